"""Each trait is larger for texts with more of it; what is left without VADER; unusual and long texts."""

import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest

from pluralign.measuring import leans as traits
from pluralign.measuring.leans import KEYS, TRAITS, trait_values

PROMPT = "Should the town build a bridge?"
MORE_AND_LESS = {
    "length": ("We build the bridge now and paint it blue.", "We build it."),
    "sentence_length": ("We build it now and we paint it blue.", "We build it. We paint it. It is blue."),
    "structure": ("Reasons:\n- It helps.\n- It is cheap.", "Reasons: it helps, it is cheap."),
    "questions": ("We build it? Why not?", "We build it. Why, yes."),
    "first_person": ("I want it for us.", "People want it for others."),
    "second_person": ("You will like your bridge.", "They will like the bridge."),
    "hedging": ("Perhaps it might help.", "It does help us."),
    "certainty": ("It is certainly and always right.", "It is right most of the time."),
    "directives": ("Build it. The council must act.", "The council builds it and acts."),
    "sentiment": ("A wonderful and happy idea.", "A terrible and horrible idea."),
    "formality": ("It is therefore in accordance with the plan.", "It's okay, that's the plan, don't worry!"),
    "concreteness": ("For example, it costs 300 pounds.", "It costs some money, they say."),
    "balance": ("Both sides are right; however, a compromise is best.", "One side is right and it is best."),
    "warmth": ("Thank you, dear friends, for the kindness.", "Now to the next point on the list."),
    "readability": ("The cat sat on the mat.", "Infrastructural considerations necessitate deliberation."),
    "echo": ("The town will build the bridge.", "Nobody here wants more concrete."),
    "money": ("It costs a lot and raises taxes.", "It takes a while to build."),
    "rules": ("The law bans it and the police enforce it.", "People do it anyway."),
    "freedom": ("People are free to make that choice.", "People should do as the council says."),
    "fairness": ("It is unfair and deepens inequality.", "It is ugly and far away."),
    "evidence": ("Research and experts show it.", "I have a feeling about it."),
    "community": ("Families and neighbours meet there.", "Cars pass there all day."),
    "nature": ("Trees and animals need clean rivers.", "Shops and banks need new roads."),
    "safety": ("It is a danger and a risk to health.", "It is a pleasant sight in summer."),
}


@pytest.mark.parametrize("key", KEYS)
def test_a_text_with_more_of_a_trait_scores_higher(key: str) -> None:
    more, less = trait_values([PROMPT] * 2, list(MORE_AND_LESS[key]))[:, KEYS.index(key)]
    assert more > less


def test_traits_have_distinct_names() -> None:
    assert len({trait.key for trait in TRAITS}) == len(TRAITS) == 24
    phrases = [phrase for trait in TRAITS for phrase in (trait.more, trait.less)]
    assert len(set(phrases)) == len(phrases)
    assert all(trait.definition.endswith(".") for trait in TRAITS)
    assert max(len(phrase.removeprefix("a ").split()) for phrase in phrases) <= 4, "they name members"
    assert max(len(trait.aspect.split()) for trait in TRAITS) <= 2


def test_contractions_count_and_list_numbers_do_not() -> None:
    values = trait_values([""] * 4, ["I don't know", "I do not know", "1. tea\n2. rum", "- tea\n- rum"])
    assert values[0, KEYS.index("formality")] < values[1, KEYS.index("formality")] == 0
    assert values[2, KEYS.index("concreteness")] == values[3, KEYS.index("concreteness")] == 0
    assert values[2, KEYS.index("structure")] == values[3, KEYS.index("structure")] > 0


def test_unusual_texts_have_finite_traits() -> None:
    values = trait_values(["", "?", "x", "…"], ["", " \n", "12 %", "ÄÖ 漢字 🙂"])
    assert values.shape == (4, len(KEYS))
    assert np.isfinite(values).all()
    assert trait_values([], []).shape == (0, len(KEYS))


def test_long_texts_take_linear_time() -> None:
    started = time.process_time()
    trait_values(["Tea?"], ["It is a good and lovely plan. " * 5000])
    assert time.process_time() - started < 5  # VADER takes a minute


@pytest.fixture
def without_vader(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    traits._vader.cache_clear()
    monkeypatch.setitem(sys.modules, "vaderSentiment.vaderSentiment", None)
    yield
    traits._vader.cache_clear()


def test_without_vader_only_sentiment_is_missing(request: pytest.FixtureRequest) -> None:
    texts = ["A wonderful idea.", "You must never do it!"]
    complete = trait_values([PROMPT] * 2, texts)
    request.getfixturevalue("without_vader")
    values = trait_values([PROMPT] * 2, texts)
    others = [key != "sentiment" for key in KEYS]
    np.testing.assert_array_equal(values[:, others], complete[:, others])
    assert np.isnan(values[:, KEYS.index("sentiment")]).all()


@pytest.mark.usefixtures("without_vader")
def test_one_log_message_says_how_to_measure_sentiment(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        trait_values(["Tea?"] * 2, ["Yes.", "No."])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "pip install 'pluralign[report]'" in caplog.text
