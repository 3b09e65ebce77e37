"""PreferenceSet: distinct texts, exact votes, splits by prompt, files."""

import itertools
import json
import sys
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import pairs_of
from hypothesis import given, strategies as st
from simulated import concatenate

from pluralign.core.errors import DataError, UsageError
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Message, Prompt, PromptLike

texts = st.text(st.characters(codec="utf-8"), max_size=8)
chats = st.lists(st.builds(Message, st.sampled_from(["system", "user"]), texts), min_size=1, max_size=3).map(tuple)
prompts = st.one_of(texts, chats)


@st.composite
def preference_sets(draw: st.DrawFn, tie_rule: str | None = None) -> PreferenceSet:
    rows = draw(st.lists(st.tuples(prompts, texts, texts, *[st.integers(0, 9)] * 3), min_size=1, max_size=12))
    rows = [row for row in rows if row[1] != row[2]] or [("Tea?", "Yes.", "No.", 1, 1, 0)]
    columns = {
        "topic": np.array([draw(st.none() | texts) for _ in rows], dtype=object),
        "length": np.array([draw(st.integers(-5, 5)) for _ in rows]),
    }
    prompt, a, b, votes_a, votes_b, ties = zip(*rows, strict=True)
    options: dict[str, Any] = {"columns": columns, "dropped": {"tie votes": 2}, "name": "drawn"}
    rule = tie_rule or draw(st.sampled_from(["drop", "half"]))
    return PreferenceSet.from_columns(prompt, a, b, np.array(votes_a) + 1, votes_b, ties=ties, tie_rule=rule, **options)


def rows(votes: PreferenceSet) -> list[tuple[Any, ...]]:
    return pairs_of(votes, columns=True)


def test_each_distinct_text_is_stored_once_in_order_of_first_appearance() -> None:
    votes = PreferenceSet.from_columns(["x", "x", "y"], ["B", "C", "B"], ["A", "B", "A"], [1, 1, 1], [1, 2, 3])
    assert (list(votes.prompts), list(votes.responses)) == (["x", "y"], ["B", "A", "C"])
    assert np.stack([votes.prompt_index, votes.a_index, votes.b_index]).tolist() == [[0, 0, 1], [0, 2, 0], [1, 0, 1]]


@given(preference_sets())
def test_saving_and_loading_gives_the_same_set(preferences: PreferenceSet) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "votes.parquet"
        preferences.save(path)
        loaded = PreferenceSet.load(path)
    assert loaded == preferences
    assert rows(loaded) == rows(preferences)
    assert (loaded.tie_rule, loaded.dropped, loaded.name) == (preferences.tie_rule, {"tie votes": 2}, "drawn")
    assert loaded.fingerprint == preferences.fingerprint
    for name in ("prompt_index", "a_index", "b_index", "votes_a", "votes_b", "ties"):
        assert getattr(loaded, name).dtype == getattr(preferences, name).dtype


@given(preference_sets(), st.data())
def test_slicing_keeps_exactly_the_chosen_rows(preferences: PreferenceSet, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.integers(0, len(preferences) - 1)))
    expected = rows(preferences)
    picked = preferences[np.array(chosen, dtype=int)]
    assert rows(picked) == [expected[row] for row in chosen]
    assert set(picked.responses) == {text for row in chosen for text in expected[row][1:3]}, "no unused text is kept"
    mask = np.zeros(len(preferences), dtype=bool)
    mask[chosen] = True
    assert rows(preferences[mask]) == [row for row, keep in zip(expected, mask, strict=True) if keep]
    assert rows(preferences[1:]) == expected[1:]


@given(preference_sets())
def test_swapping_reverses_the_share(preferences: PreferenceSet) -> None:
    swapped = preferences.swapped()
    np.testing.assert_allclose(swapped.prob_a, 1 - preferences.prob_a, atol=1e-15)
    assert swapped.swapped() == preferences


@given(preference_sets())
def test_the_tie_rule_decides_how_ties_count(preferences: PreferenceSet) -> None:
    for share, (_, _, _, a, b, ties, *_) in zip(preferences.prob_a, rows(preferences), strict=True):
        half = Fraction(2 * a + ties, 2 * (a + b + ties))
        expected = half if preferences.tie_rule == "half" else Fraction(a, a + b)
        assert share == pytest.approx(float(expected), abs=1e-15)


@given(preference_sets())
def test_fixed_shares_are_of_all_people_for_the_majority_and_reverse_with_the_order(preferences: PreferenceSet) -> None:
    fixed = preferences.with_ties("fixed")
    for share, (_, _, _, a, b, ties, *_) in zip(fixed.prob_a, rows(fixed), strict=True):
        most = float(Fraction(max(a, b), a + b + ties))
        assert share == pytest.approx(0.5 if a == b else most if a > b else 1 - most, abs=1e-15)
    assert fixed.n_votes.tolist() == (fixed.votes_a + fixed.votes_b + fixed.ties).tolist()
    np.testing.assert_allclose(fixed.swapped().prob_a, 1 - fixed.prob_a, atol=1e-15)


def test_a_chat_and_a_text_equal_to_its_json_are_two_prompts(tmp_path: Path) -> None:
    chat: PromptLike = (Message("user", "Why?"),)
    votes = PreferenceSet.from_columns([chat, '[["user","Why?"]]'], ["A", "A"], ["B", "B"], [1, 1], [1, 1])
    votes.save(tmp_path / "votes.parquet")
    assert list(PreferenceSet.load(tmp_path / "votes.parquet").prompts) == [chat, '[["user","Why?"]]']
    assert Prompt(chat).messages == [{"role": "user", "content": "Why?"}]


def test_items_are_the_distinct_prompt_and_response_texts() -> None:
    votes = PreferenceSet.from_columns(["x", "x", "y"], ["A", "B", "A"], ["B", "C", "C"], [1] * 3, [1] * 3)
    items = votes.items()
    texts = list(zip(votes.prompts[items.prompt_index], votes.responses[items.response_index], strict=True))
    assert len(texts) == len(set(texts)) == 5
    assert [texts[i] for i in items.a] == [("x", "A"), ("x", "B"), ("y", "A")]
    assert [texts[i] for i in items.b] == [("x", "B"), ("x", "C"), ("y", "C")]
    assert votes.items() is items, "items are computed once"


def test_the_fingerprint_keeps_its_value() -> None:
    """Saved ensembles store the fingerprint of their votes."""
    votes = PreferenceSet.from_columns(
        ["Tea?", (Message("user", "Rum?"),)], ["Yes.", "No."], ["No.", "Never."], [3, 1], [2, 4], ties=[0, 1],
        columns={"split": np.array(["train", None], dtype=object)},
    )  # fmt: skip
    assert votes.fingerprint == "0f43805737158f3c7e0ba8bdb6c01e42b5eedcd87544a847bba3dbce5e6ad9d4"


def many_prompts(n: int, **options: Any) -> PreferenceSet:
    names, ones = [f"prompt {i}" for i in range(n)], [1] * n
    return PreferenceSet.from_columns(names, ["A"] * n, ["B"] * n, ones, ones, **options)


def test_a_split_puts_no_prompt_on_both_sides_and_loses_no_pair() -> None:
    doubled = concatenate([many_prompts(300), many_prompts(300)])
    train, test = doubled.split(0.2)
    assert not set(train.prompts) & set(test.prompts)
    assert len(train) + len(test) == 600
    assert 0.12 < len(test) / 600 < 0.28


def test_a_prompt_stays_on_its_side_when_data_is_added() -> None:
    small, large = many_prompts(200).split(0.1), many_prompts(2000).split(0.1)
    assert set(small[1].prompts) == set(large[1].prompts) & set(many_prompts(200).prompts)
    assert set(small[1].prompts) <= set(many_prompts(200).split(0.3)[1].prompts), "larger sets include smaller"


def test_split_seeds_give_different_splits_and_hashes_look_uniform() -> None:
    assert set(many_prompts(500).split(seed=1)[1].prompts) != set(many_prompts(500).split(seed=2)[1].prompts)
    hashes = np.sort([Prompt(f"prompt {i}").hash() for i in range(2000)])
    assert np.abs(hashes - np.arange(2000) / 2000).max() < 1.95 / np.sqrt(2000), "Kolmogorov–Smirnov at 0.1 %"
    assert Prompt("Should parents be allowed to opt out?").hash(0) == 0.9459847551717149, "on every machine"


def test_an_official_split_is_used_and_other_rows_are_split_by_hash() -> None:
    official = np.array(["train", "test", "validation", "train"], dtype=object)
    train, test = many_prompts(4, columns={"split": official}).split()
    assert (list(train.prompts), list(test.prompts)) == (["prompt 0", "prompt 3"], ["prompt 1", "prompt 2"])
    one_sided = many_prompts(30, columns={"split": np.array(["train"] * 30, dtype=object)})
    assert len(one_sided.split()[1].prompts) == 9, "a split with one side is not used"
    n = 400
    official = np.array(["train"] * 10 + [None] * (n - 10), dtype=object)
    votes = many_prompts(n, columns={"split": official})
    expected = [i >= 10 and Prompt(f"prompt {i}").hash() < 0.1 for i in range(n)]
    assert votes.test_mask(0.1).tolist() == expected


@pytest.mark.parametrize("n", [2, 3, 5, 13, 25])
@pytest.mark.parametrize("fraction", [None, 0.01, 0.1, 0.99])
def test_any_two_prompts_can_be_split(n: int, fraction: float | None) -> None:
    for seed in range(20):
        train, test = many_prompts(n).split(fraction, seed=seed)
        assert len(train.prompts) + len(test.prompts) == n
        assert min(len(train.prompts), len(test.prompts)) >= 1


@pytest.mark.parametrize(("n", "held_out"), [(2, 1), (10, 3), (25, 8), (50, 15), (67, 20), (150, 20)])
def test_a_default_split_of_few_prompts_holds_out_up_to_twenty(n: int, held_out: int) -> None:
    assert len(many_prompts(n).split()[1].prompts) == held_out


def test_one_prompt_cannot_be_split() -> None:
    with pytest.raises(DataError, match="a split by prompt needs two prompts, and there is one"):
        many_prompts(1).split()
    for fraction in (0.0, 1.5):
        with pytest.raises(UsageError, match="between 0 and 1"):
            many_prompts(5).split(fraction)


def test_jsonl_holds_the_wide_layout(tmp_path: Path) -> None:
    prompt, columns = (Message("user", "Tea?"),), {"topic": np.array(["hot"], object)}
    votes = PreferenceSet.from_columns([prompt], ["Yes."], ["No."], [3], [2], ties=[1], columns=columns)
    votes.save(tmp_path / "votes.jsonl")
    assert json.loads((tmp_path / "votes.jsonl").read_text()) == {
        "prompt": [{"role": "user", "content": "Tea?"}], "response_a": "Yes.", "response_b": "No.",
        "votes_a": 3, "votes_b": 2, "ties": 1, "topic": "hot",
    }  # fmt: skip


def test_parquet_stores_each_text_once(tmp_path: Path) -> None:
    long, ones = "word " * 2000, [1] * 300
    PreferenceSet.from_columns(["p"] * 300, [long] * 300, [f"{i}" for i in range(300)], ones, ones).save(
        tmp_path / "v.parquet"
    )
    assert (tmp_path / "v.parquet").stat().st_size < 3 * len(long)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"votes_a": [1, 1]}, "one length"),
        ({"votes_a": [-1]}, "negative"),
        ({"votes_a": [0], "votes_b": [0]}, "needs a vote"),
        ({"a_index": [7]}, "between 0 and 1"),
        ({"responses": ["A", "A"]}, "distinct"),
        ({"tie_rule": "thirds"}, "tie_rule"),
        ({"columns": {"prompt": np.array(["x"], object)}}, "rename"),
    ],
)
def test_invalid_arrays_are_refused(arrays: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "prompts": ["x"], "responses": ["A", "B"], "prompt_index": [0], "a_index": [0], "b_index": [1],
        "votes_a": [1], "votes_b": [1],
    }  # fmt: skip
    with pytest.raises(UsageError, match=message):
        PreferenceSet.from_indices(**good | arrays)


def test_a_million_pairs_are_processed_without_a_loop_over_pairs() -> None:
    """1M pairs over 1,000 texts take array operations only: a loop over pairs would make a million calls."""
    n, rng, calls = 1_000_000, np.random.default_rng(0), itertools.count()
    a, prompt = rng.integers(0, 500, n), rng.integers(0, 100, n)
    texts = [f"p{i}" for i in range(100)], [f"r{i}" for i in range(1000)]
    votes = PreferenceSet.from_indices(*texts, prompt, a, a + 500, rng.integers(1, 5, n), rng.integers(0, 5, n))
    sys.setprofile(lambda *_: next(calls))
    try:
        part = votes[votes.prob_a > 0.5]
        items = part.items()
    finally:
        sys.setprofile(None)
    assert len(items.a) == len(part) > 100_000
    assert next(calls) < 5_000
