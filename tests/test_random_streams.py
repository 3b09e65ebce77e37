"""Random streams are fixed and reproducible."""

import numpy as np

from pluralign.core.random_streams import JOINT, random_stream


def test_a_stream_is_the_generator_of_seed_stream_and_key() -> None:
    """Fitted ensembles depend on these values."""
    for key in ((), (5,)):
        expected = np.random.default_rng([3, 2, *key]).random(4)
        np.testing.assert_array_equal(random_stream(3, JOINT, *key).random(4), expected)
