"""Random streams: fixed, independent, and reproducible."""

import numpy as np

from pluralign.core import random_streams
from pluralign.core.random_streams import FOLDS, JOINT, random_stream


def test_a_stream_is_the_generator_of_seed_stream_and_key() -> None:
    """Fitted ensembles depend on these values."""
    for key in ((), (5,)):
        expected = np.random.default_rng([3, 2, *key]).random(4)
        np.testing.assert_array_equal(random_stream(3, JOINT, *key).random(4), expected)


def test_streams_of_one_seed_differ() -> None:
    assert random_stream(0, FOLDS).random() != random_stream(0, JOINT).random()


def test_the_numbers_of_streams_are_fixed() -> None:
    numbers = {name: value for name, value in vars(random_streams).items() if name.isupper()}
    assert numbers == {
        "FOLDS": 1, "JOINT": 2, "POLICY_LEVEL": 3, "BOOTSTRAP": 4, "MIXTURE": 5, "FINETUNE": 7,
        "ORIENTATION": 8,
        "VALIDATION_PROMPTS": 6, "EVALUATION_FOLDS": 2, "CLUSTER_START": 3, "CLUSTER_RESTARTS": 4,
        "SIMULATED_VOTES": 5, "PROMPT_SUBSETS": 6, "SIMULATED_MAJORITIES": 7, "STEERING_WORDS": 11, "EXAMPLE_PAIRS": 7,
        "TOWN_HALL_VOTERS": 13, "OWN_ANSWERS": 18, "VIEW_HALVES": 14, "PERSONA_PROMPTS": 15, "PAIR_SAMPLE": 16,
        "CHECKED_PAIRS": 17, "CHOICE_MODEL": 19, "RATER_CHOICES": 12, "RATER_MIXTURE": 9, "DIRECTION": 10,
    }  # fmt: skip
