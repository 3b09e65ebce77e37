"""Votes with raters: read against a plain loop, and refused where the rater of a vote is unknown."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WriteLines, pairs_of, wide

from pluralign import DataError, UsageError, load_preferences, town_hall
from pluralign.votes.raters import RaterVotes, load_rater_votes, town_hall_votes


def vote(prompt: str, a: str, b: str, choice: Any, worker: Any, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "response_a": a, "response_b": b, "vote": choice, "worker": worker, **more}


ROWS = [
    vote("Tea?", "Yes.", "No.", "a", "secret-ann"),
    vote("Rum?", "Yes.", "Never.", "b", "secret-bob"),
    vote("Tea?", "No.", "Yes.", "a", "secret-bob"),  # the other order: a vote for "No."
    vote("Tea?", "Yes.", "No.", "tie", "secret-cy"),
    vote("Rum?", "Yes.", "Never.", "a", None),
    vote("Rum?", "Never.", "Yes.", "b", "secret-cy"),
]


def plain(votes: RaterVotes) -> Counter[tuple[str, str, str, int, float]]:
    """Count the votes as (prompt, response a, response b, rater, chose a)."""
    counted: Counter[tuple[str, str, str, int, float]] = Counter()
    of = votes.preferences
    for pair, rater, chose in zip(votes.pair, votes.rater, votes.chose_a, strict=True):
        texts = of.prompts[of.prompt_index[pair]], of.responses[of.a_index[pair]], of.responses[of.b_index[pair]]
        counted[(*texts, int(rater), float(chose))] += 1
    return counted


def test_each_vote_keeps_its_rater_and_its_side() -> None:
    votes = load_rater_votes(ROWS, "worker")
    tea, rum = ("Tea?", "Yes.", "No."), ("Rum?", "Yes.", "Never.")
    assert plain(votes) == Counter([(*tea, 0, 1.0), (*rum, 1, 0.0), (*tea, 1, 0.0), (*rum, 2, 1.0)])
    assert plain(load_rater_votes(ROWS, "worker", ties="half"))[(*tea, 2, 0.5)] == 1
    assert (votes.n_raters, votes.without_rater) == (3, 1)
    np.testing.assert_array_equal(votes.preferences.prompts[votes.prompt], ["Tea?", "Rum?", "Tea?", "Rum?"])


def test_a_number_and_its_text_are_the_same_rater() -> None:
    ids = [1, 1.0, "1", "1.0"]
    assert load_rater_votes([row | {"worker": ids[i % 4]} for i, row in enumerate(ROWS)], "worker").n_raters == 1
    numbered = [row | {"worker": one} for row, one in zip(ROWS, [0, 1, 1, 2, float("nan"), 2], strict=True)]
    assert plain(load_rater_votes(numbered, "worker")) == plain(load_rater_votes(ROWS, "worker"))
    votes = [vote("Tea?", "Yes.", "No.", "a", None) | {"annotator": one} for one in [*ids, "01"]]
    assert load_preferences(votes, repeats="first").n_votes.tolist() == [2]


def test_the_pairs_are_those_of_load_preferences() -> None:
    without_ids = [{name: value for name, value in row.items() if name != "worker"} for row in ROWS]
    for ties in ("drop", "half"):
        assert pairs_of(load_rater_votes(ROWS, "worker", ties=ties).preferences) == pairs_of(
            load_preferences(without_ids, ties=ties)
        )


def test_votes_on_pairs_with_too_few_votes_are_dropped_with_the_pair() -> None:
    rows = [vote("First?", "A.", "B.", "a", "ann"), *ROWS]
    assert plain(load_rater_votes(rows, "worker", skip_bad=True)) == plain(load_rater_votes(ROWS, "worker"))
    assert load_rater_votes(rows, "worker", min_votes=1).n_raters == 4


HASHES = ["5f2b8c1d9e3a7f60", "0a1b2c3d4e5f6071"]


@pytest.mark.parametrize(
    ("name", "values", "note"),
    [
        ("annotator_id", [1, 2, 1, 3], "(annotator_id); to use them: load_rater_votes(source, 'annotator_id')"),
        ("Rated by", ["user1", "user2", "user1", "user3"], "ids of people are not kept (Rated by)"),
        ("key", [*HASHES, *HASHES], "ids of people are not kept (key)"),
        ("UserName", ["ann", "bob", "ann", "cy"], "ids of people are not kept (UserName)"),
        ("annotators", ["ann,bob"] * 4, "ids of people are not kept (annotators)"),
        ("country", ["fr", "de", "fr", "it"], "that differ between the votes on one pair are not kept (country)"),
    ],
)  # fmt: skip
def test_columns_that_tell_who_voted_are_not_kept(
    name: str, values: list[Any], note: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = ["Tea?", "Rum?", "Rain?", "Rain?" if name == "country" else "Sun?"]
    text = {"response_a": "Yes.", "response_b": "No.", "vote": "a", "topic": "drinks"}
    rows = [{"prompt": q, "prompt_id": q, name: value, **text} for q, value in zip(prompts, values, strict=True)]
    assert set(load_preferences(rows, min_votes=1).columns) == {"topic", "prompt_id"}
    assert note in caplog.text


def test_no_id_is_kept() -> None:
    rows = [{**row, "rater": row["worker"], "topic": "drinks", "split": "train"} for row in ROWS]
    votes = load_rater_votes(rows, "worker", split="prompts")
    assert "secret" not in repr(votes) + json.dumps(list(votes.preferences.to_records()))
    assert set(votes.preferences.columns) == {"topic"}, "the official split can be ignored"
    assert set(load_preferences(rows).columns).isdisjoint({"rater"})


@pytest.mark.parametrize(
    ("rows", "column", "message"),
    [
        (ROWS, "workr", r"votes.jsonl: there is no column 'workr'; .*did you mean 'worker'\?$"),
        ([wide(worker="ann")], "worker", r"votes.jsonl, row 1: its rows .* hold the votes of several people.*one row"),
        ([{**row, "worker": ""} for row in ROWS], "worker", "no vote has a value in the column 'worker'"),
        ([{**ROWS[0], "worker": ["ann"]}], "worker", "row 1: worker must be a text or a number, not a list"),
    ],
)
def test_unknown_raters_are_refused_with_a_remedy(
    write_jsonl: WriteLines, rows: list[dict[str, Any]], column: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        load_rater_votes(str(write_jsonl(rows)), column)


@pytest.mark.parametrize(
    ("source", "column", "options", "message"),
    [
        (ROWS, "worker", {"ties": "fixed"}, "ties='fixed' is a rule for vote counts"),
        ("demo:40", "worker", {}, "the rater column of demo is 'rater', not 'worker'"),
        ("multipref", "worker", {}, "vote counts per pair, without raters; give one row per vote"),
        ("saved.parquet", "worker", {}, "vote counts per pair, without raters; give one row per vote"),
    ],
)
def test_sources_and_rules_without_raters_are_refused(
    source: Any, column: str, options: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    load_preferences(ROWS).save(tmp_path / "saved.parquet")
    with pytest.raises((DataError, UsageError), match=message):
        load_rater_votes(source, column, **options)


def test_people_of_the_town_hall_vote_as_their_tastes_say() -> None:
    hall = town_hall(60, n_annotators=30, votes_per_pair=8)
    votes = town_hall_votes(hall)
    of_pair = np.zeros(60), np.zeros(60)
    np.add.at(of_pair[0], votes.pair, votes.chose_a)
    np.add.at(of_pair[1], votes.pair, 1 - votes.chose_a)
    np.testing.assert_array_equal(of_pair, (hall.preferences.votes_a, hall.preferences.votes_b))
    assert pairs_of(load_rater_votes("demo:40", "rater").preferences) == pairs_of(load_preferences("demo:40"))
    # each rater's votes are those of one person, whoever it is
    truth = hall.annotator_votes(range(30))
    for rater in range(votes.n_raters):
        mine = votes.rater == rater
        assert (truth[votes.pair[mine]] == votes.chose_a[mine, None]).all(axis=0).any()
