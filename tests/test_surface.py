"""Surface features against counts by hand."""

from math import log

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pluralign.text.surface import NAMES, surface_features

texts = st.text(st.characters(codec="utf-8"), max_size=60)


def feature(name: str, text: str) -> float:
    return float(surface_features([text])[0, NAMES.index(name)])


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("log characters", "abc", log(4)),
        ("log words", "Don't stop_now", log(4)),
        ("log sentences", "One. Two! Three?", log(4)),
        ("log sentences", "Pi is 3.14 or so", log(2)),
        ("log sentences", "Wait... what?!", log(3)),
        ("letters per word", "ab abcd", 3.0),
        ("words per sentence", "One two. Three four.", 2 / 20),
        ("commas", "a, b, c d", 2 / 4),
        ("full stops", "a. b.", 1.0),
        ("question marks", "a? b c d?", 2 / 4),
        ("exclamation marks", "Go! Go! Go", 2 / 3),
        ("digits", "ab 12", 2 / 5),
        ("log line ends", "a\nb\n\nc", log(4)),
        ("log list items", "Buy:\n- a\n * b\n• c\n1. d\n2) e\n3rd f\n-g", log(6)),
        ("first person", "I think Irene and we agree", 2 / 6),
        ("first person", "MY mine", 1.0),
        ("hedging", "Perhaps it MAY rain, but maybeless", 3 / 6),
        ("capitals", "ABc d", 2 / 5),
        ("distinct words", "Tea tea TEA rum", 2 / 4),
        ("no words", "?!… —", 1.0),
        ("no words", "a", 0.0),
        ("quotes and brackets", "“a” (b) 'c' \"d\"", 8 / 4),
        ("colons", "a: b; c d", 2 / 4),
        ("ends a sentence", "Yes. \n", 1.0),
        ("ends a sentence", "Yes…", 1.0),
        ("ends a sentence", "Yes, but", 0.0),
    ],
)
def test_each_feature_equals_its_count(name: str, text: str, expected: float) -> None:
    assert feature(name, text) == pytest.approx(expected, abs=1e-6)


def test_an_empty_text_has_no_words_and_counts_as_one_sentence() -> None:
    features = dict(zip(NAMES, surface_features([""])[0].tolist(), strict=True))
    assert features.pop("no words") == 1.0
    assert features.pop("log sentences") == pytest.approx(log(2))
    assert set(features.values()) == {0.0}


def test_words_may_be_in_any_alphabet() -> None:
    for text, words in (("Größe zählt", 2), ("мир труд май", 3), ("καλημέρα", 1), ("naïve café’s", 3), ("👍🏽", 0)):
        assert feature("log words", text) == pytest.approx(log(1 + words)), text
    assert feature("capitals", "ÄÖü!") == pytest.approx(2 / 4)
    assert feature("digits", "٣٤ab") == pytest.approx(2 / 4)


def test_no_texts_give_no_rows_but_all_columns() -> None:
    assert surface_features([]).shape == (0, len(NAMES))
    assert surface_features(iter(["a", "b"])).shape == (2, len(NAMES))
    assert len(set(NAMES)) == len(NAMES)


@given(st.lists(texts, min_size=1, max_size=5))
def test_any_text_has_finite_features_that_do_not_depend_on_other_texts(several: list[str]) -> None:
    together = surface_features(several)
    assert together.shape == (len(several), len(NAMES))
    assert together.dtype == np.float32
    assert np.isfinite(together).all()
    assert (together >= 0).all()
    np.testing.assert_array_equal(together, np.vstack([surface_features([text]) for text in several]))


def test_a_very_long_text_has_finite_features() -> None:
    features = surface_features(["word, " * 200_000])
    assert np.isfinite(features).all()
    assert features[0, NAMES.index("commas")] == pytest.approx(1.0)
