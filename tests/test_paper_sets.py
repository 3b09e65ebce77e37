"""The published sets, in small folders with their real layouts, against known counts or a plain loop."""

import gzip
import itertools
import json
import logging
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import pairs_of as pairs

from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.votes.load import load_preferences
from pluralign.votes.options import LoadOptions
from pluralign.votes.paper_sets import KNOWN_SETS, PERSONALLLM_RATERS, prism_prompts
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Message, PromptLike
from pluralign.votes.summary import inspect

Row = dict[str, Any]
Pair = tuple[PromptLike, str, str, int, int, int]


def load(name: str, folder: Path | str = "", **options: Any) -> PreferenceSet:
    return KNOWN_SETS[name](str(folder), LoadOptions(**options), None)


def write_parquet(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_lines(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


# --- MultiPref --------------------------------------------------------------------------------------------------------

A1, A2 = "A-is-clearly-better", "A-is-slightly-better"
B1, B2 = "B-is-slightly-better", "B-is-clearly-better"
TIE = "Tie"


def multipref_row(number: int, normal: list[str] | None, expert: list[str] | None, **changes: Any) -> Row:
    people = {
        kind: votes
        if votes is None
        else [{"evaluator": f"{kind}_{i}", "overall_pref": vote, "helpful_pref": B2} for i, vote in enumerate(votes)]
        for kind, votes in (("normal", normal), ("expert", expert))
    }
    return {
        "comparison_id": f"cmp-{number}",
        "prompt_id": f"prm-{number}",
        "text": f"Prompt {number}?",
        "completion_a": f"First {number}.",
        "model_a": "model-one",
        "completion_b": f"Second {number}.",
        "model_b": "model-two",
        "source": "sharegpt",
        "category": "Open QA",
        "subject_study": "Biology",
        "highest_level_degree": "Bachelor's",
        "normal_worker_annotations": people["normal"],
        "expert_worker_annotations": people["expert"],
    } | changes


MULTIPREF_ROWS = [
    multipref_row(1, [A1, A2], [B1, TIE]),
    multipref_row(2, [TIE, TIE], [TIE, B2]),
    multipref_row(3, [TIE, TIE], [TIE, TIE]),
    multipref_row(4, [B1, B2], [B2, B1]),
    multipref_row(5, None, [A1]),
    multipref_row(6, [], None),
]


@pytest.fixture
def multipref(tmp_path: Path) -> Path:
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", MULTIPREF_ROWS)
    return tmp_path


def test_multipref_counts_each_overall_preference_as_one_vote(multipref: Path) -> None:
    votes = load("multipref", multipref)
    assert pairs(votes) == [
        ("Prompt 1?", "First 1.", "Second 1.", 2, 1, 1),
        ("Prompt 2?", "First 2.", "Second 2.", 0, 1, 3),
        ("Prompt 4?", "First 4.", "Second 4.", 0, 4, 0),
        ("Prompt 5?", "First 5.", "Second 5.", 1, 0, 0),
    ]
    assert votes.name == "multipref"
    assert votes.dropped == {"pairs without a vote": 2, "tie votes": 4}
    assert "split" not in votes.columns
    assert list(votes.columns["comparison_id"]) == ["cmp-1", "cmp-2", "cmp-4", "cmp-5"]


def test_ties_fixed_gives_the_papers_shares_of_all_four_annotators(tmp_path: Path) -> None:
    votes = [[A1, A1, A2, A2], [A1, A1, A1, B1], [A1, A1, A1, TIE], [A1, A1, B1, TIE], [A1, TIE, TIE, TIE], [TIE] * 4]
    other = {A1: B1, A2: B2, B1: A1, TIE: TIE}
    turned = [[other[vote] for vote in four] for four in votes]
    rows = [multipref_row(i, four[:2], four[2:]) for i, four in enumerate(votes + turned)]
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", rows)
    read = load("multipref", tmp_path, ties="fixed")
    assert read.prob_a.tolist() == [1.0, 0.75, 0.75, 0.5, 0.25, 0.0, 0.25, 0.25, 0.5, 0.75]
    assert read.n_votes.tolist() == [4] * 10
    assert inspect(read).majority_share_of_all == pytest.approx((1 + 0.75 + 0.75 + 0.5 + 0.25) / 5)
    assert read.dropped == {"pairs without a vote": 2}


def test_multipref_is_also_read_from_the_original_upload(multipref: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_lines(other / "MultiPref-Train.jsonl", MULTIPREF_ROWS)
    assert load("multipref", other) == load("multipref", multipref)
    write_lines(multipref / "MultiPref-Train.jsonl", [multipref_row(9, [A1], [A1])])
    assert len(load("multipref", multipref)) == 4, "the Parquet files take precedence"


def test_an_unknown_preference_is_a_bad_row_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "data" / "train-00000-of-00001.parquet"
    write_parquet(path, [*MULTIPREF_ROWS[:2], multipref_row(3, ["A-is-best", A1], [A1, A1])])
    with pytest.raises(DataError, match=r"row 3: overall_pref is 'A-is-best'") as caught:
        load("multipref", tmp_path)
    assert (caught.value.file, caught.value.row) == (str(path), 3)
    votes = load("multipref", tmp_path, skip_bad=True)
    assert len(votes) == 2
    assert votes.dropped["unknown vote"] == 1


# --- PersonalLLM ------------------------------------------------------------------------------------------------------


def personalllm_rows(n: int, seed: int, first: int = 0) -> list[Row]:
    """Return rows with all 99 columns. Scores are small whole numbers, so that there are ties."""
    rng = random.Random(seed)
    rows = []
    for number in range(first, first + n):
        row: Row = {"prompt": f"Prompt {number}?", "subset": f"subset-{number % 2}", "prompt_id": number}
        for i in range(1, 9):
            row |= {f"response_{i}": f"Answer {i} to {number}.", f"response_{i}_model": f"writer-{i}"}
        for rater in PERSONALLLM_RATERS:
            row |= {f"response_{i}_{rater}": float(rng.randrange(6)) for i in range(1, 9)}
        rows.append(row)
    return rows


def write_personalllm(folder: Path, train: list[Row], test: list[Row]) -> None:
    write_parquet(folder / "data" / "train-00000-of-00001.parquet", train)
    write_parquet(folder / "data" / "test-00000-of-00001.parquet", test)


def test_every_reward_model_votes_on_all_28_pairs(tmp_path: Path) -> None:
    train, test = personalllm_rows(5, seed=1), personalllm_rows(2, seed=2, first=5)
    write_personalllm(tmp_path, train, test)
    votes = load("personalllm", tmp_path)
    expected: list[Pair] = []
    for row in train + test:
        for i, j in itertools.combinations(range(1, 9), 2):
            for_i = for_j = ties = 0
            for rater in PERSONALLLM_RATERS:
                score_i, score_j = row[f"response_{i}_{rater}"], row[f"response_{j}_{rater}"]
                for_i += score_i > score_j
                for_j += score_j > score_i
                ties += score_i == score_j
            expected.append((row["prompt"], row[f"response_{i}"], row[f"response_{j}"], for_i, for_j, ties))
    assert pairs(votes) == expected
    assert len(votes) == 7 * 28
    assert votes.votes_a.sum() > 0
    assert 0 < votes.ties.sum() == votes.dropped["tie votes"]
    assert len(set(PERSONALLLM_RATERS)) == 10
    assert votes.columns["split"].tolist() == ["train"] * 140 + ["test"] * 56
    assert votes.columns["subset"][:29].tolist() == ["subset-0"] * 28 + ["subset-1"]


def test_a_repeated_or_missing_response_drops_only_its_pairs(tmp_path: Path) -> None:
    train = personalllm_rows(3, seed=3)
    train[2] |= {f"response_{i}": None for i in range(1, 9)}
    train[0]["response_5"] = train[0]["response_2"]
    train[0] |= {f"response_2_{rater}": -1.0 for rater in PERSONALLLM_RATERS}
    train[0] |= {f"response_5_{rater}": 9.0 for rater in PERSONALLLM_RATERS}
    train[1]["response_7"] = None
    write_personalllm(tmp_path, train, personalllm_rows(1, seed=4, first=3))
    votes = load("personalllm", tmp_path)
    assert votes.columns["prompt_id"].tolist() == [0] * 21 + [1] * 21 + [3] * 28
    assert votes.dropped["pairs with a missing or repeated response"] == 14 + 28
    # The scores of response_2 count, where the text came first.
    assert pairs(votes)[0] == ("Prompt 0?", "Answer 1 to 0.", "Answer 2 to 0.", 10, 0, 0)


def test_a_missing_score_is_no_vote_and_is_counted(tmp_path: Path) -> None:
    train = personalllm_rows(2, seed=5)
    train[0]["response_1_gemma_2b"] = None
    train[1]["response_2_beaver_7b"] = float("nan")
    write_personalllm(tmp_path, train, personalllm_rows(1, seed=6, first=2))
    votes = load("personalllm", tmp_path)
    everyone = (votes.votes_a + votes.votes_b + votes.ties)[:56].tolist()
    first = list(itertools.combinations(range(1, 9), 2))
    assert everyone == [9 if 1 in pair else 10 for pair in first] + [9 if 2 in pair else 10 for pair in first]
    assert votes.dropped["missing scores"] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("response_3_gemma_7b"), "row 1: there is no column response_3_gemma_7b"),
        (lambda row: row.update(response_3_gemma_7b="high"), "row 1: a score is not a number"),
        (lambda row: row.update(prompt=" "), "row 1: the prompt is empty"),
        (lambda row: row.update(prompt=None), "row 1: there is no text in prompt"),
    ],
)
def test_an_invalid_personalllm_row_is_reported(tmp_path: Path, change: Callable[[Row], object], message: str) -> None:
    train = personalllm_rows(1, seed=7)
    change(train[0])
    write_personalllm(tmp_path, train, personalllm_rows(1, seed=8, first=1))
    with pytest.raises(DataError, match=message) as caught:
        load("personalllm", tmp_path)
    assert caught.value.file.endswith("data/train-00000-of-00001.parquet")


# --- HelpSteer2: disagreements ----------------------------------------------------------------------------------------

MULTI_TURN = "Tea?\n<extra_id_1>Assistant\nGreen\nor black?\n<extra_id_1>User\nBlack.\n\nWith milk."
MULTI_TURN_MESSAGES = (
    Message("user", "Tea?"),
    Message("assistant", "Green\nor black?"),
    Message("user", "Black.\n\nWith milk."),
)


def rated(prompt: str, response: str, helpfulness: Any, other: int = 4) -> Row:
    row: Row = {"prompt": prompt, "response": response, "helpfulness": helpfulness}
    many = isinstance(helpfulness, list)
    return row | dict.fromkeys(
        ("correctness", "coherence", "complexity", "verbosity"), [other] * len(helpfulness) if many else other
    )


DISAGREEMENTS = [
    rated("name a prime", "Seven.", [4, 4, 3]),
    rated("name a prime", "Nine.", [1, 0, 3]),
    rated(MULTI_TURN, "Here.", [0, 1]),
    rated(MULTI_TURN, "There.", [4, 0]),
    rated("held out", "One.", [2, 2, 2]),
    rated("filtered", "Up.", [4, 0, 4, 0]),
    rated("filtered", "Down.", [0, 4, 0, 4]),
    rated("held out", "Two.", [3, 3, 1]),
]


@pytest.fixture
def helpsteer2(tmp_path: Path) -> Path:
    write_lines(tmp_path / "disagreements" / "disagreements.jsonl.gz", DISAGREEMENTS)
    return tmp_path


def write_main_files(folder: Path) -> None:
    train, validation = ["name a prime", MULTI_TURN], ["held out", MULTI_TURN]
    write_lines(folder / "train.jsonl.gz", [rated(prompt, text, 3) for prompt in train for text in ("x", "y")])
    write_lines(
        folder / "validation.jsonl.gz", [rated(prompt, text, 3) for prompt in validation for text in ("x", "y")]
    )


def test_helpsteer2_compares_ratings_by_position(helpsteer2: Path) -> None:
    votes = load("helpsteer2", helpsteer2)
    assert pairs(votes) == [
        ("name a prime", "Seven.", "Nine.", 2, 0, 1),
        (MULTI_TURN_MESSAGES, "Here.", "There.", 1, 1, 0),
        ("held out", "One.", "Two.", 1, 2, 0),
        ("filtered", "Up.", "Down.", 2, 2, 0),
    ]
    assert votes.name == "helpsteer2"
    assert votes.dropped == {"tie votes": 1}
    assert "split" not in votes.columns


def test_a_prompt_that_starts_with_a_marker_has_no_empty_first_turn(tmp_path: Path) -> None:
    prompt = "<extra_id_1>User\nTea?\n<extra_id_1>Assistant\nGreen?\n<extra_id_1>User\nYes."
    write_lines(tmp_path / "disagreements.jsonl.gz", [rated(prompt, "Here.", [1]), rated(prompt, "There.", [0])])
    turns = (Message("user", "Tea?"), Message("assistant", "Green?"), Message("user", "Yes."))
    assert list(load("helpsteer2", tmp_path).prompts) == [turns]


def test_helpsteer2_takes_the_split_from_the_main_files(helpsteer2: Path) -> None:
    write_main_files(helpsteer2)
    votes = load("helpsteer2", helpsteer2)
    # The multi-turn prompt is in both: it trains. A prompt in neither has no official side.
    assert votes.columns["split"].tolist() == ["train", "train", "validation", None]
    train, test = votes.split(seed=1)
    assert "held out" in test.prompts
    assert {"name a prime", MULTI_TURN_MESSAGES} <= set(train.prompts)


def test_the_early_revision_is_read_from_the_root(helpsteer2: Path, tmp_path: Path) -> None:
    early = tmp_path / "early"
    write_lines(early / "disagreements.jsonl.gz", DISAGREEMENTS)
    write_main_files(early)
    write_main_files(helpsteer2)
    assert load("helpsteer2", early) == load("helpsteer2", helpsteer2)


def test_helpsteer2_drops_and_counts_responses_that_cannot_be_compared(tmp_path: Path) -> None:
    rows = [
        rated("uneven", "Yes.", [4, 4, 3]),
        rated("uneven", "No.", [1, 0]),
        rated("alone", "Yes.", [4, 4, 3]),
        rated("equal", "Same.", [4, 4]),
        rated("equal", "Same.", [1, 1]),
        rated("good", "Yes.", [4, 4, 3]),
        rated("good", "No.", [1, 0, 1]),
        rated("unrated", "Yes.", None),
        rated("unrated", "No.", []),
    ]
    write_lines(tmp_path / "disagreements.jsonl.gz", rows)
    votes = load("helpsteer2", tmp_path)
    assert pairs(votes) == [("good", "Yes.", "No.", 3, 0, 0)]
    assert votes.dropped == {
        "pairs whose responses have unequally many ratings": 1,
        "responses without a second one": 1,
        "identical responses": 1,
        "pairs without a vote": 1,
    }


def test_a_repeated_prompt_gives_two_pairs_and_a_repeated_row_none(tmp_path: Path) -> None:
    first = [rated("again", "A.", [4, 4]), rated("again", "B.", [1, 0])]
    second = [rated("again", "C.", [0, 0]), rated("again", "D.", [1, 0])]
    other_order = [rated("again", "B.", [4]), rated("again", "A.", [0])]
    write_lines(tmp_path / "disagreements.jsonl.gz", [*first, *second, *first, *other_order])
    votes = load("helpsteer2", tmp_path)
    assert pairs(votes) == [("again", "A.", "B.", 2, 1, 0), ("again", "C.", "D.", 0, 1, 1)]
    assert votes.dropped["rows given twice"] == 2


@pytest.mark.parametrize("given", [3, "3, 4", {"a": 3}])
def test_ratings_that_are_not_a_list_are_a_bad_row(helpsteer2: Path, given: Any) -> None:
    path = helpsteer2 / "disagreements" / "disagreements.jsonl.gz"
    write_lines(path, [*DISAGREEMENTS[:2], DISAGREEMENTS[2] | {"helpfulness": given}, *DISAGREEMENTS[3:]])
    with pytest.raises(DataError, match="row 3: helpfulness is not a list of ratings") as caught:
        load("helpsteer2", helpsteer2)
    assert caught.value.file == str(path)
    votes = load("helpsteer2", helpsteer2, skip_bad=True)
    assert len(votes) == 3
    assert votes.dropped["wrong type"] == 1
    assert votes.dropped["responses without a second one"] == 1


# --- HelpSteer2 and 3: preferences ------------------------------------------------------------------------------------


def preference(prompt: str, strengths: list[int] | None, split: str = "train", *, as_text: bool = False) -> Row:
    given: Any = strengths and [{"strength": value, "justification": "@Response 1's it."} for value in strengths]
    text = repr(given) if as_text else given
    row = {"prompt": prompt, "response_1": "Seven.", "response_2": "Nine.", "preference_strength": -2, "split": split}
    return row | {"all_preferences_unprocessed": text}


def test_helpsteer2_preference_counts_signs_except_minus_one_hundred(tmp_path: Path) -> None:
    rows = [
        preference("p1", [-2, 1, -100]),
        preference("p2", [3, 3, 0, -1], "val"),
        preference("p3", [-100, -100, 0]),
        preference("p4", None),
        preference(MULTI_TURN, [-3, 2, 2], as_text=True),
    ]
    write_lines(tmp_path / "preference" / "preference.jsonl.gz", rows)
    votes = load("helpsteer2-preference", tmp_path)
    assert pairs(votes) == [
        ("p1", "Seven.", "Nine.", 1, 1, 0),
        ("p2", "Seven.", "Nine.", 1, 2, 1),
        (MULTI_TURN_MESSAGES, "Seven.", "Nine.", 1, 2, 0),
    ]
    assert votes.columns["split"].tolist() == ["train", "val", "train"]
    assert votes.dropped == {"votes for neither response": 3, "pairs without a vote": 2, "tie votes": 1}
    train, test = votes.split()
    assert (len(train), list(test.prompts)) == (2, ["p2"])


@pytest.mark.parametrize("strength", [-4, 100, -99, 1.5, "1", None, True])
def test_a_strength_outside_the_scale_is_a_bad_row(tmp_path: Path, strength: Any) -> None:
    write_lines(tmp_path / "preference.jsonl.gz", [preference("p1", [1]), preference("p2", [1, strength])])
    with pytest.raises(DataError, match=r"row 2: a strength is .*, not a whole number from -3 to 3"):
        load("helpsteer2-preference", tmp_path)


@pytest.mark.parametrize("text", ["[{'strength': 1", "[dict(strength=1)]", "[1]", "{'strength': 1}"])
def test_preferences_as_text_must_be_a_plain_list(tmp_path: Path, text: str) -> None:
    row = preference("p1", [1]) | {"all_preferences_unprocessed": text}
    write_lines(tmp_path / "preference.jsonl.gz", [row])
    with pytest.raises(DataError, match="row 1: all_preferences_unprocessed is"):
        load("helpsteer2-preference", tmp_path)


def helpsteer3_row(question: str, scores: list[int]) -> Row:
    people = [{"score": score, "reasoning": "r", "feedback1": "f", "feedback2": "g"} for score in scores]
    return {
        "domain": "general",
        "language": "english",
        "context": [{"role": "user", "content": question}],
        "response1": "Seven.",
        "response2": "Nine.",
        "overall_preference": -3,
        "individual_preference": people,
    }


def test_helpsteer3_counts_individual_preferences_and_keeps_its_split(tmp_path: Path) -> None:
    write_lines(tmp_path / "preference" / "train.jsonl.gz", [helpsteer3_row("q1", [-3, 1, 0])])
    plain = helpsteer3_row("q2", [2, 1]) | {"context": "q2", "domain": "code", "language": "python"}
    write_lines(tmp_path / "preference" / "validation.jsonl.gz", [plain])
    votes = load("helpsteer3", tmp_path)
    assert pairs(votes) == [((Message("user", "q1"),), "Seven.", "Nine.", 1, 1, 1), ("q2", "Seven.", "Nine.", 0, 2, 0)]
    columns = {name: values.tolist() for name, values in votes.columns.items()}
    assert columns == {
        "split": ["train", "validation"],
        "domain": ["general", "code"],
        "language": ["english", "python"],
    }


# --- Reddit TL;DR -----------------------------------------------------------------------------------------------------


def label(
    post: str, first: str, second: str, choice: int, worker: str, split: str = "train", batch: str = "batch3"
) -> Row:
    """Return one line of a raw file. It has no id if the post starts with a capital N."""
    info = {"post": f"{post} one.\n\n{post} two.", "title": f"About {post}", "subreddit": "tea"}
    if not post.startswith("N"):
        info["id"] = f"t3_{post}"
    summaries = [{"text": text, "policy": "sup4", "note": None} for text in (first, second)]
    row = {"info": info, "summaries": summaries, "choice": choice, "worker": worker, "batch": batch, "split": split}
    return row | {"extra": {}}


def article(worker: str) -> Row:
    info = {"id": "abc", "site": "dailymail", "title": "News", "article": "It rained."}
    return label("x", " wet", " dry", 0, worker, batch="cnndm0") | {"info": info}


def tldr_prompt(post: str) -> str:
    return f"SUBREDDIT: r/tea\n\nTITLE: About {post}\n\nPOST: {post} one.\n{post} two.\n\nTL;DR:"


BATCHES = {
    "batch3": [
        label("hen", " one hen", " two hens", 0, "w1"),
        label("hen", " two hens", " one hen", 0, "w2"),
        label("hen", " one hen", " no hen", 1, "w3"),
        label("cow", " a cow", " cows", 1, "w1", "valid1"),
        label("same", " equal", "equal ", 1, "w1"),
    ],
    "batch22": [
        label("hen", "two hens ", " one hen", 1, "w1", batch="batch22"),
        label("cow", " cows", " a cow", 0, "w2", "valid1", batch="batch22"),
        label("dog", " a dog", " dogs", 0, "w2", "valid2", batch="batch22"),
        label("dog", " a dog", " dogs", 1, "w3", "valid2", batch="batch22"),
        label("Nameless", " a", " b", 0, "w1", batch="batch22"),
        label("Nameless", " a", " b", 0, "w2", batch="batch22"),
        label("Nobody", " a", " b", 0, "w2", batch="batch22"),
    ],
    "cnndm0": [article("w1"), article("w2")],
}
TLDR_PAIRS = [
    # batch22 is read first: files are taken in the order of their names.
    (tldr_prompt("hen"), "two hens", "one hen", 1, 2, 0),
    (tldr_prompt("cow"), "cows", "a cow", 2, 0, 0),
    (tldr_prompt("dog"), "a dog", "dogs", 1, 1, 0),
    (tldr_prompt("Nameless"), "a", "b", 2, 0, 0),
]


@pytest.fixture
def tldr(tmp_path: Path) -> Path:
    for batch, rows in BATCHES.items():
        write_lines(tmp_path / "comparisons" / f"{batch}.json", rows)
    return tmp_path


def test_tldr_merges_labels_of_all_files_in_either_order(tldr: Path) -> None:
    votes = load("tldr", tldr)
    assert pairs(votes) == TLDR_PAIRS
    assert votes.dropped == {
        "pairs with fewer than 2 votes": 2,
        "identical responses": 1,
        "labels on CNN/DM articles": 2,
    }
    assert votes.columns["split"].tolist() == ["train", "valid1", "valid2", "train"]
    assert votes.columns["batch"].tolist() == ["batch22"] * 4
    assert votes.columns["subreddit"].tolist() == ["tea"] * 4
    assert votes.name == "tldr"
    assert set(votes.split()[1].prompts) == {tldr_prompt("cow"), tldr_prompt("dog")}, "valid1 and valid2"
    assert load("tldr", tldr, min_votes=1).n_votes.tolist() == [3, 2, 2, 2, 1, 1]


def test_tldr_can_count_only_the_first_label_of_a_worker(tldr: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="pluralign"):
        assert load("tldr", tldr).n_votes.tolist() == [3, 2, 2, 2]
    assert "1 votes repeat an annotator's vote" in caplog.text
    votes = load("tldr", tldr, repeats="first")
    assert pairs(votes)[0] == (tldr_prompt("hen"), "two hens", "one hen", 1, 1, 0)
    assert votes.dropped["repeat votes of one annotator on one pair"] == 1


def test_one_post_is_one_prompt_even_if_its_text_varies(tmp_path: Path) -> None:
    rows = [label("hen", " one", " two", 0, "w1"), label("hen", " one", " two", 0, "w2")]
    rows[1]["info"]["post"] += " "
    write_lines(tmp_path / "batch3.json", rows)
    votes = load("tldr", tmp_path)
    assert pairs(votes) == [(tldr_prompt("hen"), "one", "two", 2, 0, 0)]


def test_tldr_as_parquet_from_the_hub_gives_the_same_votes(tldr: Path, tmp_path: Path) -> None:
    filled: dict[str, list[Row]] = {"train": [], "validation": []}
    keys = ("id", "post", "title", "subreddit", "site", "article")
    for row in itertools.chain(BATCHES["batch22"], BATCHES["batch3"], BATCHES["cnndm0"]):
        full = row | {"info": {key: row["info"].get(key) for key in keys}, "extra": {"confidence": None}}
        filled["train" if row["split"] == "train" else "validation"].append(full)
    hub = tmp_path / "hub"
    for split, rows in filled.items():
        write_parquet(hub / "comparisons" / split / "0000.parquet", rows)
    votes = load("tldr", hub)
    assert sorted(pairs(votes), key=str) == sorted(TLDR_PAIRS, key=str)
    assert votes.dropped == load("tldr", tldr).dropped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"choice": 2}, "two summaries and the choice 0 or 1"),
        ({"choice": True}, "two summaries and the choice 0 or 1"),
        ({"choice": None}, "two summaries and the choice 0 or 1"),
        ({"summaries": [{"text": "a"}]}, "two summaries and the choice 0 or 1"),
        ({"info": None}, "two summaries and the choice 0 or 1"),
        ({"info": {"id": "t3_x", "title": "t"}}, "there is no text in post"),
        ({"summaries": [{"text": "a"}, {"text": None}]}, "there is no text in text"),
    ],
)
def test_an_invalid_label_is_reported_with_file_and_row(tldr: Path, change: Row, message: str) -> None:
    path = tldr / "comparisons" / "batch3.json"
    write_lines(path, [BATCHES["batch3"][0], BATCHES["batch3"][1] | change])
    with pytest.raises(DataError, match=message) as caught:
        load("tldr", tldr)
    assert (caught.value.file, caught.value.row) == (str(path), 2)


# --- sources of the files ---------------------------------------------------------------------------------------------

HUBS = {
    "multipref": ("allenai/multipref", None, ["data/train-*.parquet"]),
    "helpsteer2": (
        "nvidia/HelpSteer2",
        None,
        ["validation.jsonl.gz", "train.jsonl.gz", "disagreements/disagreements.jsonl.gz"],
    ),
    "tldr": (
        "openai/summarize_from_feedback",
        "refs/convert/parquet",
        ["comparisons/train/*.parquet", "comparisons/validation/*.parquet"],
    ),
}


def record_downloads(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[tuple[Any, Any]]:
    calls: list[tuple[Any, Any]] = []

    def download(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def fail_to_download(*args: Any, **kwargs: Any) -> str:
    raise ConnectionError("no route\n  to host")


def test_load_preferences_reads_a_known_set_from_a_folder(multipref: Path) -> None:
    assert load_preferences(f"multipref:{multipref}") == load("multipref", multipref)
    assert len(load_preferences(f"multipref:{multipref}", ties="half")) == 5


@pytest.mark.parametrize("name", HUBS)
def test_without_a_folder_only_the_needed_files_are_downloaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = record_downloads(monkeypatch, tmp_path)
    hub, revision, patterns = HUBS[name]
    with pytest.raises(DataError, match=f"the folder must hold .*the dataset {hub} from the hub") as caught:
        load(name)  # nothing was really fetched
    assert patterns[-1] in str(caught.value)
    with pytest.raises(DataError, match="nowhere: there is no such folder"):
        load(name, tmp_path / "nowhere")
    assert calls == [((hub,), {"repo_type": "dataset", "revision": revision, "allow_patterns": patterns})]


def test_a_folder_is_read_without_the_hub(multipref: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert len(load("multipref", multipref)) == 4


def test_a_failed_download_raises_one_sentence_with_the_folder_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail_to_download)
    with pytest.raises(DataError, match=r"hf:allenai/multipref: .*no route to host.*train-.* use multipref:FOLDER"):
        load("multipref")


def test_a_missing_hub_package_raises_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match=r"allenai/multipref .*pip install 'pluralign\[hf\]'"):
        load("multipref")


def test_renaming_columns_of_a_known_set_is_refused(multipref: Path) -> None:
    with pytest.raises(UsageError, match="--rename does not apply to multipref"):
        load("multipref", multipref, rename={"prompt": "text"})


def test_progress_covers_all_files(tldr: Path) -> None:
    seen: list[tuple[int, int]] = []
    KNOWN_SETS["tldr"](str(tldr), LoadOptions(), lambda done, total: seen.append((done, total)))
    whole = sum(path.stat().st_size for path in (tldr / "comparisons").iterdir())
    assert seen[-1] == (whole, whole)
    assert {total for _, total in seen} == {whole}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_error_lists_the_dropped_rows_if_nothing_is_left(tldr: Path) -> None:
    for batch in ("batch3", "batch22"):
        (tldr / "comparisons" / f"{batch}.json").unlink()
    with pytest.raises(DataError, match=r"tldr: there are no pairs in it.*labels on CNN/DM articles': 2"):
        load("tldr", tldr)


# --- PRISM ------------------------------------------------------------------------------------------------------------


def conversation(number: int, kind: str, prompt: str) -> Row:
    return {"conversation_id": f"c{number}", "conversation_type": kind, "opening_prompt": prompt, "open_feedback": ""}


CONVERSATIONS = [
    conversation(0, "unguided", "Hello"),
    conversation(1, "controversy guided", "  Should villages pay for light?\n"),
    conversation(2, "values guided", "What is fair?"),
    conversation(3, "values guided", "Should villages pay for light?"),
    conversation(4, "values guided", " "),
]


@pytest.mark.parametrize("name", ["conversations.jsonl", "data/conversations.jsonl"])
def test_prism_prompts_are_stripped_and_distinct_in_file_order(tmp_path: Path, name: str) -> None:
    write_lines(tmp_path / name, CONVERSATIONS)
    assert prism_prompts(str(tmp_path)) == ["Should villages pay for light?", "What is fair?"]
    assert prism_prompts(str(tmp_path), kinds=["unguided"]) == ["Hello"]


def test_prism_is_downloaded_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines(tmp_path / "conversations.jsonl", CONVERSATIONS)
    calls = record_downloads(monkeypatch, tmp_path)
    assert len(prism_prompts()) == 2
    arguments = {"repo_type": "dataset", "revision": None, "allow_patterns": ["conversations.jsonl"]}
    assert calls == [(("HannahRoseKirk/prism-alignment",), arguments)]


def test_prism_reports_failed_downloads_unknown_kinds_and_bad_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail_to_download)
    with pytest.raises(DataError, match=r"into a folder and use prism_prompts\('FOLDER'\)"):
        prism_prompts()
    write_lines(tmp_path / "conversations.jsonl", CONVERSATIONS)
    with pytest.raises(DataError, match="no opening prompt of the kinds value_guided"):
        prism_prompts(str(tmp_path), kinds=["value_guided"])
    write_lines(
        tmp_path / "conversations.jsonl",
        [CONVERSATIONS[0], conversation(1, "values guided", "") | {"opening_prompt": None}],
    )
    with pytest.raises(DataError, match="row 2: there is no text in opening_prompt"):
        prism_prompts(str(tmp_path))
