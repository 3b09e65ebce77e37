"""The logistic function against scipy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import expit

from pluralign.theory.calibration import sigmoid


@given(st.floats(-1e4, 1e4))
def test_sigmoid_equals_scipys_and_is_symmetric(z: float) -> None:
    assert sigmoid(z) == pytest.approx(expit(z), abs=1e-15)
    assert sigmoid(-z) == pytest.approx(1 - sigmoid(z), abs=1e-15)
