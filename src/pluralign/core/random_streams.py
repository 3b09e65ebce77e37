"""Random streams: each use of a seed has its own random numbers.

The numbers of streams must not change, because fitted ensembles and reports depend on them. Streams with the same
number give the same random numbers for the same seed; their results are never combined.
"""

import numpy as np

from pluralign.core.options import check_seed

# votes
TOWN_HALL_VOTERS = 13

# training
FOLDS = 1
JOINT = 2
POLICY_LEVEL = 3
BOOTSTRAP = 4
MIXTURE = 5
FINETUNE = 7
ORIENTATION = 8
RATER_MIXTURE = 9
CHOICE_MODEL = 19
DEVIATIONS = 21

# fitting
VALIDATION_PROMPTS = 6
DIRECTION = 10

# evaluation
EVALUATION_FOLDS = 2
CLUSTER_START = 3
CLUSTER_RESTARTS = 4
SIMULATED_VOTES = 5
PROMPT_SUBSETS = 6
SIMULATED_MAJORITIES = 7
RATER_CHOICES = 12
PERSONA_PROMPTS = 15
PAIR_SAMPLE = 16
FIRST_CHOICES = 20

# analysis
VIEW_HALVES = 14
CHECKED_PAIRS = 17

# answering
STEERING_WORDS = 11
OWN_ANSWERS = 18

# server
EXAMPLE_PAIRS = 7


def random_stream(seed: int, stream: int, *key: int) -> np.random.Generator:
    """Return the generator of a stream, or of one of its parts.

    Example:
        >>> first, second = random_stream(0, FOLDS), random_stream(0, JOINT)
        >>> bool(first.random() == second.random())
        False
    """
    return np.random.default_rng([check_seed(seed), stream, *key])
