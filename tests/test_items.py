"""Texts and votes in the forms that people give them in Python."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pytest
from conftest import WriteLines, wide

import pluralign
from pluralign import (
    DataError,
    UsageError,
    certify,
    diversity,
    encode,
    evaluate,
    inspect,
    load_preferences,
    profile,
    prune,
    town_hall,
)
from pluralign.votes.candidates import load_candidates
from pluralign.votes.prompts import Message

if TYPE_CHECKING:
    from pluralign import RewardEnsemble

TEXTS = [("Tea?", "Yes, please."), ("Tea?", "No.")]
OTHERS = town_hall(60, seed=5).preferences
"""Votes on prompts that the ensemble of the tests was not trained on."""


def as_path(rows: list[dict[str, Any]], tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_dataset(rows: list[dict[str, Any]], _: Path) -> Any:
    import datasets

    return datasets.Dataset.from_list(rows)


FORMS: dict[str, Callable[[list[dict[str, Any]], Path], Any]] = {
    "dicts": lambda rows, _: rows,
    "a DataFrame": lambda rows, _: pd.DataFrame(rows),
    "a path": as_path,
    "a path as text": lambda rows, folder: str(as_path(rows, folder)),
    "a dataset": as_dataset,
}


def test_items_in_every_form_get_the_same_rewards(ensemble: "RewardEnsemble") -> None:
    dicts = [{"response": response, "prompt": prompt, "id": 3} for prompt, response in TEXTS]
    frame = pd.DataFrame(TEXTS, columns=["prompt", "response"])
    for items in (dicts, [list(item) for item in TEXTS], frame, iter(TEXTS)):
        np.testing.assert_array_equal(ensemble.rewards(items), ensemble.rewards(TEXTS))
    messages, as_tuple = [{"role": "user", "content": "Tea?"}], ((Message("user", "Tea?"),), "Yes.")
    chats: Any = [{"prompt": messages, "response": "Yes."}, (messages, "Yes."), as_tuple]
    np.testing.assert_array_equal(ensemble.rewards(chats), ensemble.rewards([as_tuple] * 3))


@pytest.mark.parametrize(
    ("items", "problem"),
    [
        ("Tea?", r"items must be a list of \(prompt, response\), not str 'Tea\?'"),
        ({"prompt": "Tea?", "response": "Yes."}, "items must be a list"),
        (["Tea?", "Yes."], r"items\[0\] cannot be scored: it is str 'Tea\?'"),
        ([TEXTS[0], ("Tea?", "Yes.", "No.")], r"items\[1\] cannot be scored"),
        ([{"prompt": "Tea?", "text": "Yes."}], r"items\[0\] cannot be scored: it has no response"),
        ([("Tea?", 5)], r"items\[0\] cannot be scored: the response must be text"),
        ([("Tea?", "\ud800")], r"items\[0\] cannot be scored: the response is not valid UTF-8"),
        (OTHERS, "use pair_rewards"),
    ],
)
def test_other_items_are_one_sentence_with_the_position(items: Any, problem: str, ensemble: "RewardEnsemble") -> None:
    for score in (ensemble.rewards, ensemble.scorer(), ensemble.features):
        with pytest.raises(UsageError, match=problem) as caught:
            score(items)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_pairs_are_scored_without_votes(form: str, ensemble: "RewardEnsemble", tmp_path: Path) -> None:
    rows = [{"prompt": "Tea?", "response_a": "Yes, please.", "response_b": "No."},
            {"prompt": "Rum?", "response_a": "Never in the morning.", "response_b": "No."},
            {"prompt": "Tea?", "response_a": "No.", "response_b": "Yes, please."}]  # fmt: skip
    pairs = FORMS[form](rows, tmp_path)
    shares, votes = ensemble.prob_hat(pairs), ensemble.votes(pairs)
    a, b = ensemble.pair_rewards(pairs)
    assert shares.shape == (3,)
    np.testing.assert_allclose(shares[0], 1 - shares[2])
    np.testing.assert_array_equal(a[0] > b[0], votes[0] == 1)
    np.testing.assert_array_equal(a[2], b[0])


def test_pairs_of_votes_are_read_as_rows_or_as_their_layout(ensemble: "RewardEnsemble") -> None:
    rows = list(OTHERS.to_records())
    np.testing.assert_array_equal(ensemble.prob_hat(rows), ensemble.prob_hat(OTHERS))
    ranked = {"prompt": "Tea?", "responses": ["Yes.", "No.", "Perhaps not."], "ranking": [0, 1, 2]}
    assert len(ensemble.prob_hat([ranked])) == 3
    assert len(ensemble.prob_hat("demo:40")) == 40
    with pytest.raises(DataError, match="no rows"):
        ensemble.prob_hat([])
    assert len(ensemble.prob_hat(town_hall(40))) == 40
    pair = {"prompt": "Tea?", "response_a": "Yes.", "response_b": "No."}
    with pytest.raises(DataError, match="the records, row 2: there is no value for response_b"):
        ensemble.prob_hat([pair, {"prompt": "Tea?", "response_a": "Yes."}])
    with pytest.raises(UsageError, match="level cannot be 'votes'"):
        ensemble.prob_hat(OTHERS, level="votes")  # type: ignore[arg-type]


@pytest.mark.parametrize("form", FORMS)
def test_votes_in_every_form_are_the_same_votes(form: str, tmp_path: Path) -> None:
    rows = [wide(country="fr"), wide(prompt="Rain?", votes_a=1, country="de")]
    assert load_preferences(FORMS[form](rows, tmp_path)) == load_preferences(rows)


def test_every_function_that_takes_votes_takes_them_in_any_form(ensemble: "RewardEnsemble", tmp_path: Path) -> None:
    rows = list(OTHERS.to_records())
    frame, path = pd.DataFrame(rows), as_path(rows, tmp_path)
    assert inspect(frame).votes == inspect(path).votes == inspect(OTHERS).votes
    expected = evaluate(ensemble, OTHERS, groups=[]).test.brier
    assert evaluate(ensemble, frame, groups=[]).test.brier == expected
    assert evaluate(ensemble, str(path), groups=[]).test.brier == expected
    assert certify(ensemble, frame).held_out == certify(ensemble, OTHERS).held_out
    assert prune(ensemble, path).removed == prune(ensemble, OTHERS).removed
    first, second = profile(ensemble, rows), profile(ensemble, OTHERS)
    assert [card.name for card in first.members] == [card.name for card in second.members]
    assert diversity(ensemble, frame).tau == diversity(ensemble, OTHERS).tau
    assert encode(frame, tmp_path / "features", encoder="none").rows == len(OTHERS.items().prompt_index)


def test_missing_values_of_a_frame_are_nulls() -> None:
    frame = pd.DataFrame([wide(), wide(prompt="Rain?")])
    frame["ties"] = [1, None]
    frame["seen"] = pd.array([None, True], dtype="boolean")
    assert load_preferences(frame).ties.tolist() == [1, 0]
    frame.loc[1, "votes_a"] = None
    with pytest.raises(DataError, match="the DataFrame, row 2: there is no value for votes_a"):
        load_preferences(frame)
    with pytest.raises(DataError, match="two columns have the same name"):
        load_preferences(pd.concat([frame, frame], axis=1))


def test_diversity_takes_candidates_in_every_form(ensemble: "RewardEnsemble", write_jsonl: WriteLines) -> None:
    lines = [{"prompt": "Tea?", "responses": ["Yes.", "No, never.", "Perhaps, it depends on the day."]}]
    expected = diversity(ensemble, load_candidates(write_jsonl(lines)))
    for source in (lines, pd.DataFrame(lines), write_jsonl(lines)):
        assert diversity(ensemble, source).tau == expected.tau
    assert expected.cases[0].candidates == 3
    with pytest.raises(UsageError, match="not a RewardEnsemble"):
        diversity(ensemble, ensemble)  # type: ignore[arg-type]


ANY: Any = pluralign
"""The package without the types of its functions, for arguments that they do not take."""


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda e: ANY.evaluate(OTHERS, e), r"evaluate takes the predictor first.*evaluate\(ensemble, votes\)"),
        (lambda e: ANY.certify(OTHERS, e), "the first argument must be an ensemble or its folder, not a PreferenceSet"),
        (lambda e: ANY.prune(e, 5), "votes must be a PreferenceSet, a path, .*, not a int"),
        (lambda e: ANY.fit({"prompt": ["Tea?"]}), "votes must be a PreferenceSet, .*, not a dict"),
        (lambda e: ANY.fit([{1: "Tea?"}]), "row 1: a record must be a dict"),
        (lambda e: ANY.fit(""), "the name of the data is empty"),
        (lambda e: ANY.profile(e), "give votes, or the folder of an ensemble"),
        (lambda e: ANY.diversity(e), "give candidates, or the folder of an ensemble"),
        (lambda e: ANY.load_preferences([wide()], rename="prompt=question"), "rename must be a dict"),
    ],
)  # fmt: skip
def test_natural_mistakes_are_one_sentence(call: Any, problem: str, ensemble: "RewardEnsemble") -> None:
    with pytest.raises((UsageError, DataError), match=problem) as caught:
        call(ensemble)
    assert "\n" not in str(caught.value)


def test_an_ensemble_loaded_from_a_file_names_the_folder(town_folder: Path, write_jsonl: WriteLines) -> None:
    with pytest.raises(DataError, match=f"it is a file, not the folder of an ensemble; give its folder, {town_folder}"):
        pluralign.RewardEnsemble.load(town_folder / "ensemble.json")
    with pytest.raises(DataError, match="it is a file, not the folder of an ensemble"):
        pluralign.RewardEnsemble.load(write_jsonl([wide()]))
    with pytest.raises(DataError, match="it is the folder of an ensemble, not votes; name the ensemble first"):
        load_preferences(town_folder)
