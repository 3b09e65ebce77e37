"""Columns of other names: the exact --rename line, checked renames, and votes in other words."""

import shlex
from typing import Any

import pytest
from conftest import WriteLines, run, wide

from pluralign import DataError, UsageError, load_preferences
from pluralign.votes.columns import guess_columns

TEXTS = {"question": "Tea?", "answer_1": "Yes.", "answer_2": "No."}
WHO = {"who": "x"}
RENAME = {"prompt": "question", "response_a": "answer_1", "response_b": "answer_2", "vote": "winner"}


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        ("question answer_1 answer_2 winner", "prompt=question response_a=answer_1 response_b=answer_2 vote=winner"),
        ("query model_a_response model_b_response preference",
         "prompt=query response_a=model_a_response response_b=model_b_response vote=preference"),
        ("prompt response1 response2 n_1 n_2", "response_a=response1 response_b=response2 votes_a=n_1 votes_b=n_2"),
        ("Prompt ResponseA ResponseB CountA CountB",
         "prompt=Prompt response_a=ResponseA response_b=ResponseB votes_a=CountA votes_b=CountB"),
        ("prompt completion_0 completion_1 choice", "response_a=completion_0 response_b=completion_1 vote=choice"),
        ("context answers rankings", "prompt=context responses=answers"),
        ("question chosen_response rejected_response",
         "prompt=question chosen=chosen_response rejected=rejected_response"),
        ("input response_a response_b votes_a votes_b", "prompt=input"),
        ("promt response_a response_b vote", "prompt=promt"),
        ("prompt response_a respnse_b vote", "response_b=respnse_b"),
    ],
)  # fmt: skip
def test_columns_with_clear_names_are_renamed_with_a_note(
    columns: str, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    renames = dict(part.split("=") for part in line.split())
    ours = {theirs: name for name, theirs in renames.items()}
    values = {"vote": "a", "votes_a": 3, "votes_b": 2, "responses": ["x", "y"], "rankings": [[0, 1]]}
    row = {name: values.get(ours.get(name, name), f"text {name}") for name in columns.split()}
    assert len(load_preferences([row], min_votes=1)) == 1
    assert caplog.messages == [f"the records: columns are read as rename={renames}"]


@pytest.mark.parametrize(
    "row",
    [
        TEXTS | {"winner": 1},  # numbers of the responses, or whether the first is better?
        TEXTS | {"winner": "a", "context": "Which drink?"},
        TEXTS | {"winner": "a", "summary_1": "Yes.", "summary_2": "No."},
    ],
)
def test_columns_that_may_mean_something_else_are_not_renamed(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"; use rename={'prompt': 'question', 'response_a': 'answer_1', "):
        load_preferences([row], min_votes=1)


def test_the_rename_line_can_be_pasted_into_a_shell(write_jsonl: WriteLines) -> None:
    row = {"My Question": "Tea?", "Answer 1": "Yes.", "Answer 2": "No.", "n 1": 3, "n 2": 2}
    path = write_jsonl([row])
    refused = run("inspect", path)
    assert refused.returncode == 2
    assert "--rename prompt=THEIRS --rename 'response_a=Answer 1' " in refused.stderr
    line = shlex.split(refused.stderr.partition("; use ")[2].partition(" (THEIRS")[0])
    line[1] = "prompt=My Question"
    assert run("inspect", path, *line).returncode == 0
    assert guess_columns(["response_a", "response_b"], ["prompt", "model_a", "model_b", "winner"]) == {}, "no responses"


@pytest.mark.parametrize(
    ("rename", "problem"),
    [
        (RENAME | {"vote": "winer"}, "no column 'winer' for .*; did you mean rename={'vote': 'winner'}"),
        (RENAME | {"annotator": "worker"}, "there is no column 'worker' for rename={'annotator': 'worker'}"),
        ({"question": "prompt"}, "the new name comes first: rename={'prompt': 'question'}"),
        (RENAME | {"anotator": "who"}, "a name without a meaning; did you mean rename={'annotator': 'who'}"),
    ],
)  # fmt: skip
def test_a_wrong_rename_is_an_error(rename: dict[str, str], problem: str) -> None:
    rows = [TEXTS | {"winner": vote, "who": vote} for vote in "ab"]
    with pytest.raises(DataError, match=problem):
        load_preferences(rows, rename=rename)


def test_a_renamed_column_may_be_ones_own_or_missing_in_some_rows() -> None:
    rows = [TEXTS | {"winner": vote, "land": "fr"} | who for vote, who in (("a", {}), ("a", WHO), ("b", WHO))]
    votes = load_preferences(rows, rename=RENAME | {"annotator": "who", "country": "land"}, repeats="first")
    assert (votes.votes_a.tolist(), votes.columns["country"].tolist()) == ([2], ["fr"])


@pytest.mark.parametrize("first", ["prompt", "question"])
def test_a_rename_onto_an_existing_column_is_an_error_in_any_order(first: str) -> None:
    row = {first: "Tea?", "prompt": "Tea?", "question": "Rum?"} | wide(prompt=None)
    with pytest.raises(DataError, match=r"rename={'prompt': 'question'} is not possible, because both columns exist"):
        load_preferences([row], rename={"prompt": "question"})
    votes = load_preferences([wide()], rename={"response_a": "response_b", "response_b": "response_a"})
    assert votes.responses[votes.a_index[0]] == "No.", "columns may be exchanged"


def test_a_name_is_given_once(write_jsonl: WriteLines) -> None:
    with pytest.raises(UsageError, match="must not give the column 'question' two names"):
        load_preferences([wide()], rename={"prompt": "question", "vote": "question"})
    done = run("inspect", write_jsonl([wide()]), "--rename", "prompt=a", "--rename", "prompt=b")
    assert done.returncode == 2
    assert "must not give the name 'prompt' to two columns" in done.stderr


@pytest.mark.parametrize(
    "votes",
    [("answer_1", "answer_2"), ("Answer 1", "Answer 2"), ("response_1", "response_2"), ("A", "B"), ("left", "right"),
     (1, 2), ("1", "2"), (1, 0), (1.0, 2.0), ("model_a", "model_b"), ("response_a", "response_b"), ("first", "second")],
)  # fmt: skip
def test_votes_in_the_words_of_the_data(votes: tuple[Any, Any]) -> None:
    rows = [TEXTS | {"winner": vote} for vote in (votes[0], votes[0], votes[1])]
    loaded = load_preferences(rows, rename=RENAME)
    assert (loaded.votes_a.tolist(), loaded.votes_b.tolist()) == ([2], [1])


def test_votes_named_after_columns_that_count_from_0() -> None:
    rename = RENAME | {"response_a": "answer_0", "response_b": "answer_1"}
    texts = {"question": "Tea?", "answer_0": "Yes.", "answer_1": "No."}
    rows = [texts | {"winner": vote} for vote in ("answer_0", "answer_1", "answer_1")]
    assert load_preferences(rows, rename=rename).votes_b.tolist() == [2]
    with pytest.raises(DataError, match=r"row 1: vote is int 1 .* answer_0 and answer_1, so its meaning is unclear"):
        load_preferences([texts | {"winner": 1}], rename=rename, skip_bad=True)


@pytest.mark.parametrize("votes", [(1, 2, 0), (0, 1, 2), ("2", "0"), ("response_1", "response_0")])
def test_votes_counted_from_0_and_from_1_are_an_error_even_if_bad_rows_are_skipped(votes: tuple[Any, ...]) -> None:
    rows = [{"prompt": "x", "response_a": "A", "response_b": "B", "vote": vote} for vote in votes]
    with pytest.raises(DataError, match="write a, b or tie"):
        load_preferences(rows, skip_bad=True, min_votes=1)
