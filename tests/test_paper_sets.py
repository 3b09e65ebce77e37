"""The published sets, in small folders with their real layouts, against known counts or a plain loop."""

import gzip
import json
import random
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import pairs_of as pairs

from pluralign import LoadOptions, PreferenceSet, inspect, load_preferences
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.votes.paper_sets import KNOWN_SETS, prism_prompts
from pluralign.votes.prompts import Message

Row = dict[str, Any]
PERSONALLLM_RATERS = (
    "gemma_2b", "gemma_7b", "mistral_raft", "mistral_ray", "mistral_weqweasdas", "llama3_sfairx", "oasst_deberta_v3",
    "oasst_pythia_1b", "oasst_pythia_7b", "beaver_7b",
)  # fmt: skip
WHERE = {
    "multipref": "data/train-00000-of-00001.parquet",
    "personalllm": "data/train-00000-of-00001.parquet",
    "helpsteer2": "disagreements/disagreements.jsonl.gz",
    "helpsteer2-preference": "preference/preference.jsonl.gz",
    "tldr": "comparisons/batch3.json",
}


def load(name: str, folder: Path | str = "", **options: Any) -> PreferenceSet:
    return KNOWN_SETS[name](str(folder), LoadOptions(**options), None)


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as Parquet, or as lines of JSON, as the name of the file says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
        return
    text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


# --- MultiPref --------------------------------------------------------------------------------------------------------

A1, A2 = "A-is-clearly-better", "A-is-slightly-better"
B1, B2 = "B-is-slightly-better", "B-is-clearly-better"
TIE = "Tie"


def multipref_row(number: int, normal: list[str] | None, expert: list[str] | None) -> Row:
    row: Row = {"comparison_id": f"cmp-{number}", "prompt_id": f"prm-{number}", "text": f"Prompt {number}?"}
    row |= {"completion_a": f"First {number}.", "model_a": "one", "completion_b": f"Second {number}.", "model_b": "two"}
    row |= {"source": "sharegpt", "category": "Open QA", "subject_study": "Biology", "highest_level_degree": "none"}
    for kind, votes in (("normal", normal), ("expert", expert)):
        people = [{"evaluator": kind, "overall_pref": vote, "helpful_pref": B2} for vote in votes or []]
        row[f"{kind}_worker_annotations"] = people if votes is not None else None
    return row


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
    write(tmp_path / WHERE["multipref"], MULTIPREF_ROWS)
    return tmp_path


def test_multipref_counts_each_overall_preference_as_one_vote(multipref: Path) -> None:
    votes = load("multipref", multipref)
    assert pairs(votes) == [
        ("Prompt 1?", "First 1.", "Second 1.", 2, 1, 1),
        ("Prompt 2?", "First 2.", "Second 2.", 0, 1, 3),
        ("Prompt 4?", "First 4.", "Second 4.", 0, 4, 0),
        ("Prompt 5?", "First 5.", "Second 5.", 1, 0, 0),
    ]
    assert votes.dropped == {"pairs without a vote": 2, "tie votes": 4}
    assert list(votes.columns["comparison_id"]) == ["cmp-1", "cmp-2", "cmp-4", "cmp-5"]
    write(multipref / "other" / "MultiPref-Train.jsonl", MULTIPREF_ROWS)
    assert load("multipref", multipref / "other") == votes, "the original upload"
    assert load_preferences(f"multipref:{multipref}") == votes
    with pytest.raises(UsageError, match="rename does not apply to multipref"):
        load("multipref", multipref, rename={"prompt": "text"})


def test_ties_fixed_gives_the_papers_shares_of_all_four_annotators(tmp_path: Path) -> None:
    votes = [[A1, A1, A2, A2], [A1, A1, A1, B1], [A1, A1, A1, TIE], [A1, A1, B1, TIE], [A1, TIE, TIE, TIE], [TIE] * 4]
    other = {A1: B1, A2: B2, B1: A1, TIE: TIE}
    turned = [[other[vote] for vote in four] for four in votes]
    rows = [multipref_row(i, four[:2], four[2:]) for i, four in enumerate(votes + turned)]
    write(tmp_path / WHERE["multipref"], rows)
    read = load("multipref", tmp_path, ties="fixed")
    assert read.prob_a.tolist() == [1.0, 0.75, 0.75, 0.5, 0.25, 0.0, 0.25, 0.25, 0.5, 0.75]
    assert read.n_votes.tolist() == [4] * 10
    assert inspect(read).majority_share_of_all == pytest.approx((1 + 0.75 + 0.75 + 0.5 + 0.25) / 5)
    assert read.dropped == {"pairs without a vote": 2}


# --- PersonalLLM ------------------------------------------------------------------------------------------------------


def personalllm_rows(n: int, seed: int, first: int = 0) -> list[Row]:
    """Return rows with all 99 columns. Scores are small whole numbers, so that there are ties."""
    rng = random.Random(seed)
    rows: list[Row] = []
    for number in range(first, first + n):
        row = {"prompt": f"Prompt {number}?", "subset": f"subset-{number % 2}", "prompt_id": number}
        for i in range(1, 9):
            row |= {f"response_{i}": f"Answer {i} to {number}.", f"response_{i}_model": f"writer-{i}"}
        for rater in PERSONALLLM_RATERS:
            row |= {f"response_{i}_{rater}": float(rng.randrange(6)) for i in range(1, 9)}
        rows.append(row)
    return rows


def load_personalllm(folder: Path, train: list[Row], test: list[Row]) -> PreferenceSet:
    for split, rows in (("train", train), ("test", test)):
        write(folder / "data" / f"{split}-00000-of-00001.parquet", rows)
    return load("personalllm", folder)


def test_every_reward_model_votes_on_all_28_pairs(tmp_path: Path) -> None:
    train, test = personalllm_rows(5, seed=1), personalllm_rows(2, seed=2, first=5)
    votes = load_personalllm(tmp_path, train, test)
    assert len(votes) == 7 * 28
    assert {int(n) for n in votes.votes_a + votes.votes_b + votes.ties} == {10}
    assert 0 < votes.ties.sum() == votes.dropped["tie votes"]
    assert len(set(PERSONALLLM_RATERS)) == 10
    assert votes.columns["split"].tolist() == ["train"] * 140 + ["test"] * 56
    assert votes.columns["subset"][:29].tolist() == ["subset-0"] * 28 + ["subset-1"]
    judged: Any = votes.whole_judgments
    assert (judged.n, judged.sizes.tolist()) == (70, [8] * 70), "each model scores the eight responses to a prompt"


def test_a_repeated_or_missing_response_loses_only_its_pairs(tmp_path: Path) -> None:
    train = personalllm_rows(3, seed=3)
    train[2] |= {f"response_{i}": None for i in range(1, 9)}
    train[0]["response_5"] = train[0]["response_2"]
    train[0] |= {f"response_2_{rater}": -1.0 for rater in PERSONALLLM_RATERS}
    train[0] |= {f"response_5_{rater}": 9.0 for rater in PERSONALLLM_RATERS}
    train[1]["response_7"] = None
    votes = load_personalllm(tmp_path, train, personalllm_rows(1, seed=4, first=3))
    assert votes.columns["prompt_id"].tolist() == [0] * 21 + [1] * 21 + [3] * 28
    assert votes.dropped["missing responses"] == 9
    assert pairs(votes)[0] == ("Prompt 0?", "Answer 1 to 0.", "Answer 2 to 0.", 0, 10, 0)


# --- HelpSteer2: disagreements ----------------------------------------------------------------------------------------

MULTI_TURN = "Tea?\n<extra_id_1>Assistant\nGreen\nor black?\n<extra_id_1>User\nBlack.\n\nWith milk."
TURNS = zip(("user", "assistant", "user"), ("Tea?", "Green\nor black?", "Black.\n\nWith milk."), strict=True)
MULTI_TURN_MESSAGES = tuple(Message(role, content) for role, content in TURNS)


def rated(prompt: str, response: str, helpfulness: Any) -> Row:
    other = [4] * len(helpfulness) if isinstance(helpfulness, list) else 4
    row = {"prompt": prompt, "response": response, "helpfulness": helpfulness}
    return row | dict.fromkeys(("correctness", "coherence", "complexity", "verbosity"), other)


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
    write(tmp_path / WHERE["helpsteer2"], DISAGREEMENTS)
    return tmp_path


def test_helpsteer2_compares_ratings_by_position(helpsteer2: Path) -> None:
    votes = load("helpsteer2", helpsteer2)
    assert pairs(votes) == [
        ("name a prime", "Seven.", "Nine.", 2, 0, 1),
        (MULTI_TURN_MESSAGES, "Here.", "There.", 1, 1, 0),
        ("held out", "One.", "Two.", 1, 2, 0),
        ("filtered", "Up.", "Down.", 2, 2, 0),
    ]
    assert votes.dropped == {"tie votes": 1}
    marked = "<extra_id_1>User\n" + MULTI_TURN  # a marker at the start makes no empty first turn
    write(helpsteer2 / WHERE["helpsteer2"], [row | {"prompt": marked} for row in DISAGREEMENTS[2:4]])
    assert list(load("helpsteer2", helpsteer2).prompts) == [MULTI_TURN_MESSAGES]


def test_helpsteer2_takes_the_split_from_the_main_files(helpsteer2: Path) -> None:
    for name, first in (("train", "name a prime"), ("validation", "held out")):
        rows = [rated(prompt, text, 3) for prompt in (first, MULTI_TURN) for text in ("x", "y")]
        write(helpsteer2 / f"{name}.jsonl.gz", rows)
    votes = load("helpsteer2", helpsteer2)
    # The multi-turn prompt is in both: it trains. A prompt in neither has no official side.
    splits = dict(zip((votes.prompts[index] for index in votes.prompt_index), votes.columns["split"], strict=True))
    assert splits == {"name a prime": "train", MULTI_TURN_MESSAGES: "train", "held out": "validation", "filtered": None}
    train, test = votes.split(seed=1)
    assert "held out" in test.prompts
    assert {"name a prime", MULTI_TURN_MESSAGES} <= set(train.prompts)
    early = helpsteer2 / "early"  # this revision has its files at the root
    for path in (*helpsteer2.glob("*.gz"), helpsteer2 / WHERE["helpsteer2"]):
        early.mkdir(exist_ok=True)
        path.rename(early / path.name)
    assert load("helpsteer2", early) == votes


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
    write(tmp_path / "disagreements.jsonl.gz", rows)
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
    write(tmp_path / "disagreements.jsonl.gz", [*first, *second, *first, *other_order])
    votes = load("helpsteer2", tmp_path)
    assert pairs(votes) == [("again", "A.", "B.", 2, 1, 0), ("again", "C.", "D.", 0, 1, 1)]
    assert votes.dropped["rows given twice"] == 2


# --- HelpSteer2 and 3: preferences ------------------------------------------------------------------------------------


def preference(prompt: str, strengths: list[Any] | None, split: str = "train", *, as_text: bool = False) -> Row:
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
    write(tmp_path / WHERE["helpsteer2-preference"], rows)
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


# --- Reddit TL;DR -----------------------------------------------------------------------------------------------------


def label(post: str, first: str, second: str, choice: Any, worker: str, split: str = "train", **changes: Any) -> Row:
    """Return one line of a raw file. It has no id if the post starts with a capital N."""
    info = {"post": f"{post} one.\n\n{post} two.", "title": f"About {post}", "subreddit": "tea"}
    if not post.startswith("N"):
        info["id"] = f"t3_{post}"
    summaries = [{"text": text, "policy": "sup4", "note": None} for text in (first, second)]
    row = {"info": info, "summaries": summaries, "choice": choice, "worker": worker, "batch": "b", "split": split}
    return row | {"extra": {}} | changes


def tldr_prompt(post: str) -> str:
    return f"SUBREDDIT: r/tea\n\nTITLE: About {post}\n\nPOST: {post} one.\n{post} two.\n\nTL;DR:"


ARTICLE = {"id": "abc", "site": "dailymail", "title": "News", "article": "It rained."}
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
        *(label("Nameless", " a", " b", 0, worker, batch="batch22") for worker in ("w1", "w2")),
        label("Nobody", " a", " b", 0, "w2", batch="batch22"),
    ],
    "cnndm0": [label("x", " wet", " dry", 0, worker, info=ARTICLE) for worker in ("w1", "w2")],
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
        write(tmp_path / "comparisons" / f"{batch}.json", rows)
    return tmp_path


def test_tldr_merges_labels_of_all_files_in_either_order(tldr: Path) -> None:
    votes = load("tldr", tldr)
    assert pairs(votes) == TLDR_PAIRS
    dropped = {"pairs with fewer than 2 votes": 2, "identical responses": 1, "labels on CNN/DM articles": 2}
    assert votes.dropped == dropped
    assert votes.columns["split"].tolist() == ["train", "valid1", "valid2", "train"]
    assert "batch" not in votes.columns, "it differs between the labels of one pair"
    assert set(votes.split()[1].prompts) == {tldr_prompt("cow"), tldr_prompt("dog")}, "valid1 and valid2"
    assert (every := load("tldr", tldr, min_votes=1)).n_votes.tolist() == [3, 2, 2, 2, 1, 1]
    assert every.judgments is not None
    assert every.judgments.tell_more.sum() == 2, "one worker labelled a post twice"
    for path in (tldr / "comparisons").glob("batch*"):
        path.unlink()
    with pytest.raises(DataError, match=r"tldr: there are no pairs in it.*labels on CNN/DM articles': 2"):
        load("tldr", tldr)


def test_tldr_can_count_only_the_first_label_of_a_worker(tldr: Path) -> None:
    votes = load("tldr", tldr, repeats="first")
    assert pairs(votes)[0] == (tldr_prompt("hen"), "two hens", "one hen", 1, 1, 0)
    assert votes.dropped["repeat votes of one annotator on one pair"] == 1


# --- bad rows ---------------------------------------------------------------------------------------------------------

PERSON = personalllm_rows(1, seed=7)[0]
ENTRIES = "all_preferences_unprocessed"
NO_LISTS = ("[{'strength': 1", "[dict(strength=1)]", "[1]", "{'strength': 1}")


BAD_ROWS: list[tuple[str, str, list[Row]]] = [
    ("multipref", "overall_pref is 'A-is-best'", [multipref_row(3, ["A-is-best", A1], [A1])]),
    ("personalllm", "response_3_gemma_7b must be a number", [PERSON | {"response_3_gemma_7b": "high"}]),
    ("personalllm", "the prompt is empty", [PERSON | {"prompt": " "}]),
    ("helpsteer2", "not a list of ratings", [rated("p", "x", given) for given in ("3, 4", {"a": 3})]),
    ("helpsteer2-preference", "from -3 to 3", [preference("p", [1, n]) for n in (-4, 1.5, "one", None, True)]),
    ("helpsteer2-preference", "_unprocessed is", [preference("p", [1]) | {ENTRIES: text} for text in NO_LISTS]),
    ("tldr", "two summaries and the choice 0 or 1", [label("x", "a", "b", n, "w") for n in (2, True, None)]),
    ("tldr", "two summaries and the choice", [label("x", "a", "b", 0, "w", summaries=[]) | {"info": {}}]),
    ("tldr", "there is no text in", [label("x", "a", "b", 0, "w", info={"id": "t3_x"})]),
    ("tldr", "there is no text in text", [label("x", "a", "b", 0, "w", summaries=[{"text": "a"}, {}])]),
]


@pytest.mark.parametrize(("name", "message", "row"), [(*case, row) for *case, rows in BAD_ROWS for row in rows])
def test_a_bad_row_is_reported_with_file_and_row(name: str, message: str, row: Row, tmp_path: Path) -> None:
    path = tmp_path / WHERE[name]
    good = {"multipref": MULTIPREF_ROWS[:1], "personalllm": [], "tldr": BATCHES["batch3"][:1]}
    rows = [*good.get(name, DISAGREEMENTS[:1] if name == "helpsteer2" else [preference("p1", [1])]), row]
    write(path, rows)
    if name == "personalllm":
        write(path.with_name("test-00000-of-00001.parquet"), [PERSON])
    with pytest.raises(DataError, match=f"row {len(rows)}: .*{message}") as caught:
        load(name, tmp_path)
    assert (caught.value.file, caught.value.row) == (str(path), len(rows))
    if name == "multipref":
        assert load(name, tmp_path, skip_bad=True).dropped["unknown vote"] == 1


# --- sources of the files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "hub", "revision", "patterns"),
    [
        ("multipref", "allenai/multipref", None, "data/train-*.parquet"),
        ("helpsteer2", "nvidia/HelpSteer2", None, "validation.jsonl.gz train.jsonl.gz disagreements/*"),
        ("tldr", "openai/summarize_from_feedback", "refs/convert/parquet", "comparisons/*/*.parquet comparisons/*"),
        ("prism", "HannahRoseKirk/prism-alignment", None, "conversations.jsonl"),
    ],
)
def test_without_a_folder_only_the_needed_files_are_downloaded(
    name: str, hub: str, revision: str | None, patterns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def download(*args: Any, **options: Any) -> str:
        calls.append((args, options))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    read: Any = prism_prompts if name == "prism" else partial(load, name)
    with pytest.raises(DataError, match=r"must hold|conversations\.jsonl"):
        read()  # nothing was really fetched
    with pytest.raises(DataError, match="nowhere: there is no such folder"):
        read(str(tmp_path / "nowhere"))
    ((args, options),) = calls
    assert (args, options["repo_type"], options["revision"]) == ((hub,), "dataset", revision)
    for wanted, pattern in zip(options["allow_patterns"], patterns.split(), strict=True):
        assert fnmatch(wanted, pattern)


def test_failed_downloads_and_a_missing_hub_package_raise_a_remedy(
    multipref: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route\n  to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DataError, match=r"hf:allenai/multipref: .*no route to host.*train-.* use multipref:FOLDER"):
        load("multipref")
    with pytest.raises(DataError, match=r"into a folder and use prism_prompts\('FOLDER'\)"):
        prism_prompts()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert len(load("multipref", multipref)) == 4, "a folder is read without the hub"
    with pytest.raises(MissingExtraError, match=r"allenai/multipref .*pip install 'pluralign\[hf\]'"):
        load("multipref")


# --- PRISM ------------------------------------------------------------------------------------------------------------


def conversation(number: int, kind: str, prompt: str) -> Row:
    return {"conversation_id": f"c{number}", "conversation_type": kind, "opening_prompt": prompt, "open_feedback": ""}


@pytest.mark.parametrize("name", ["conversations.jsonl", "data/conversations.jsonl"])
def test_prism_prompts_are_stripped_and_distinct_in_file_order(tmp_path: Path, name: str) -> None:
    rows = [
        conversation(0, "unguided", "Hello"),
        conversation(1, "controversy guided", "  Should villages pay for light?\n"),
        conversation(2, "values guided", "What is fair?"),
        conversation(3, "values guided", "Should villages pay for light?"),
        conversation(4, "values guided", " "),
    ]
    write(tmp_path / name, rows)
    assert prism_prompts(str(tmp_path)) == ["Should villages pay for light?", "What is fair?"]
    assert prism_prompts(str(tmp_path), kinds=["unguided"]) == ["Hello"]
    with pytest.raises(DataError, match="no opening prompt of the kinds value_guided"):
        prism_prompts(str(tmp_path), kinds=["value_guided"])
    write(tmp_path / name, [rows[2], rows[3] | {"opening_prompt": None}])
    with pytest.raises(DataError, match="row 2: there is no text in opening_prompt"):
        prism_prompts(str(tmp_path))
