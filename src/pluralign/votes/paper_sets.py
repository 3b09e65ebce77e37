"""The paper's four data sets and two related ones, read as published, from a folder or from the hub.

Defined here: which files of a set are read, what counts as one vote, and which rows are dropped. Everything dropped is
counted in ``PreferenceSet.dropped``. docs/reference/known-sets.md gives the reasons and the sources.
"""

import ast
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pluralign.core.errors import DataError, UsageError
from pluralign.core.hub import hub_folder
from pluralign.core.types import Progress
from pluralign.votes.builder import BadRows, Comparisons
from pluralign.votes.formats import file_records
from pluralign.votes.layouts import Reader, each
from pluralign.votes.options import LoadOptions
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Message, PromptLike
from pluralign.votes.values import Record, Records, RowError, checked_text, read_number, read_prompt


@dataclass(frozen=True)
class KnownSet:
    """A published set: its files, and how they become votes."""

    name: str
    hub: str
    layouts: tuple[str, ...]
    """File patterns separated by spaces, that of the hub first. The first layout with all files present is read."""
    read: Reader = lambda *_: None
    also: str = ""
    """Optional files that are read before the others."""
    revision: str | None = None
    merge: bool = False
    """Whether rows are single votes or may repeat a pair, to be merged."""
    min_votes: int = 1

    def __call__(self, folder: str, options: LoadOptions, progress: Progress | None = None) -> PreferenceSet:
        """Read the set from a folder, or from the hub if ``folder`` is empty."""
        if options.rename:
            raise UsageError(f"--rename does not apply to {self.name}: its columns are known.")
        files = _files(self, folder, f"{self.name}:FOLDER")
        bad = BadRows(self.name, skip=options.skip_bad, harmless=["identical responses"])
        comparisons = Comparisons(bad)
        self.read(_rows(files, bad, progress), comparisons)
        bad.file = self.name
        return comparisons.finish(options, merge=self.merge, min_votes=self.min_votes, drop_few=True)


def _files(known: KnownSet, folder: str, local: str) -> list[Path]:
    """Return the files of a set in a folder, or downloaded from the hub if ``folder`` is empty.

    ``local`` is what users write to read a folder.
    """
    root = Path(folder).expanduser()
    if not folder:
        wanted = f"{known.also} {known.layouts[0]}".split()
        remedy = f"check the network, or copy its files ({', '.join(wanted)}) into a folder and use {local}"
        root = hub_folder(known.hub, "dataset", only=wanted, revision=known.revision, remedy=remedy)
    for layout in known.layouts:
        files = [sorted(root.glob(pattern)) for pattern in layout.split()]
        if all(files):
            return [*filter(Path.is_file, map(root.joinpath, known.also.split())), *itertools.chain(*files)]
    expected = ", or ".join(layout.replace(" ", " with ") for layout in known.layouts)
    problem = f"the folder must hold {expected}" if root.is_dir() else "there is no such folder"
    remedy = f"copy the files of the dataset {known.hub} from the hub, with their names"
    raise DataError(problem, file=str(root), remedy=remedy)


def _rows(files: Sequence[Path], bad: BadRows, progress: Progress | None) -> Iterator[tuple[int, Record]]:
    """Yield the records of all files. ``bad.file`` is the current file; progress counts the bytes of all files."""
    sizes = [path.stat().st_size for path in files]
    for path, size, before in zip(files, sizes, itertools.accumulate(sizes, initial=0), strict=False):
        bad.file = str(path)

        def report(done: int, total: int, before: int = before, size: int = size) -> None:
            if progress:
                progress(before + (size * done // total if total else 0), sum(sizes))

        yield from file_records(path, bad, report)


# --- shared by all sets -----------------------------------------------------------------------------------------------


def _invalid(kind: str, problem: str) -> RowError:
    return RowError(kind, problem, "fetch the file again, or use --skip-bad to drop such rows")


def _text(record: Record, name: str) -> str:
    if not isinstance(value := record.get(name), str):
        raise _invalid("missing value", f"there is no text in {name}")
    return checked_text(value, name)


def _entries(record: Record, name: str) -> list[Mapping[str, Any]]:
    """Return a list of structs. Null is an empty list; one public copy stores lists as Python source text."""
    if name not in record:
        raise _invalid("missing value", f"there is no column {name}")
    entries = record[name]
    if isinstance(entries, str):
        try:
            entries = ast.literal_eval(entries)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise _invalid("wrong type", f"{name} is text that is not a Python list") from None
    entries = [] if entries is None else entries
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise _invalid("wrong type", f"{name} is not a list of objects")
    return entries


def _split(into: Comparisons) -> str:
    """Return the split that the name of the current file has."""
    return re.split(r"[-.]", Path(into.bad.file).name)[0]


def _chat(text: str) -> PromptLike:
    """Return a flattened conversation of HelpSteer2 as messages, and any other prompt unchanged."""
    first, *turns = re.split(r"\n?<extra_id_1>(Assistant|User)(?:\n|$)", text)
    if not turns:
        return read_prompt(text)
    messages = [Message(role.lower(), content) for role, content in zip(turns[::2], turns[1::2], strict=True)]
    return (Message("user", first), *messages) if first else tuple(messages)


# --- the sets ---------------------------------------------------------------------------------------------------------

KNOWN_SETS: dict[str, Callable[[str, LoadOptions, Progress | None], PreferenceSet]] = {}
"""The sets by name. Each is called with a folder (``""`` for the hub), options and a progress callback."""


def _published(name: str, hub: str, *layouts: str, **others: Any) -> Callable[[Reader], Reader]:
    """Add the set that a function reads to ``KNOWN_SETS``; for the arguments see ``KnownSet``."""

    def add(read: Reader) -> Reader:
        KNOWN_SETS[name] = KnownSet(name, hub, layouts, read, **others)
        return read

    return add


MULTIPREF_VOTES = {
    "A-is-clearly-better": (1, 0, 0),
    "A-is-slightly-better": (1, 0, 0),
    "B-is-clearly-better": (0, 1, 0),
    "B-is-slightly-better": (0, 1, 0),
    "Tie": (0, 0, 1),
}
_MULTIPREF_COLUMNS = (
    "comparison_id", "prompt_id", "category", "source", "subject_study", "highest_level_degree", "model_a", "model_b",
)  # fmt: skip


@_published(
    "multipref", "allenai/multipref", "data/train-*.parquet", "train-*.parquet", "MultiPref-Train.jsonl", merge=True
)
@each
def _multipref(record: Record, row: int, into: Comparisons) -> None:
    prompt, a, b = read_prompt(_text(record, "text")), _text(record, "completion_a"), _text(record, "completion_b")
    votes = []
    for person in _entries(record, "normal_worker_annotations") + _entries(record, "expert_worker_annotations"):
        if (vote := MULTIPREF_VOTES.get(str(person.get("overall_pref")))) is None:
            raise _invalid("unknown vote", f"overall_pref is {person.get('overall_pref')!r}")
        votes.append((person.get("evaluator"), vote))
    columns = {name: record.get(name) for name in _MULTIPREF_COLUMNS}
    for evaluator, vote in votes or [(None, (0, 0, 0))]:
        into.add(row, prompt, a, b, vote, annotator=evaluator, columns=columns)


PERSONALLLM_RATERS = (
    "gemma_2b", "gemma_7b", "mistral_raft", "mistral_ray", "mistral_weqweasdas", "llama3_sfairx", "oasst_deberta_v3",
    "oasst_pythia_1b", "oasst_pythia_7b", "beaver_7b",
)  # fmt: skip
_RESPONSES = [f"response_{i}" for i in range(1, 9)]
_SCORES = [[f"{response}_{rater}" for rater in PERSONALLLM_RATERS] for response in _RESPONSES]


@_published(
    "personalllm",
    "namkoong-lab/PersonalLLM",
    "data/train-*.parquet data/test-*.parquet",
    "train-*.parquet test-*.parquet",
)
@each
def _personalllm(record: Record, row: int, into: Comparisons) -> None:
    prompt = read_prompt(_text(record, "prompt"))
    try:
        scores = np.array([[record[name] for name in names] for names in _SCORES], dtype=np.float64)  # null is NaN
        texts = [record[name] for name in _RESPONSES]
    except KeyError as error:
        raise _invalid("missing value", f"there is no column {error.args[0]}") from None
    except (TypeError, ValueError):
        raise _invalid("wrong type", "a score is not a number") from None
    first = {text: i for i, text in reversed(list(enumerate(texts))) if isinstance(text, str)}
    kept = sorted(first.values())
    pairs, left = len(texts) * (len(texts) - 1) // 2, len(kept) * (len(kept) - 1) // 2
    into.bad.count("pairs with a missing or repeated response", pairs - left)
    into.bad.count("missing scores", int(np.isnan(scores[kept]).sum()))
    columns = {"split": _split(into), "subset": record.get("subset"), "prompt_id": record.get("prompt_id")}
    if len(kept) > 1:
        answers = [checked_text(texts[i], _RESPONSES[i]) for i in kept]
        into.add_all_pairs(row, prompt, answers, scores[kept], columns=columns)


@_published(
    "helpsteer2",
    "nvidia/HelpSteer2",
    "disagreements/disagreements.jsonl.gz",
    "disagreements.jsonl.gz",
    also="validation.jsonl.gz train.jsonl.gz",  # in this order: a prompt in both is a training prompt
    merge=True,
)
def _read_helpsteer2(rows: Records, into: Comparisons) -> None:
    """Pair the responses of a prompt in file order. The i-th ratings of both are from the same annotator."""
    split_of: dict[str, str] = {}
    rated: dict[str, dict[tuple[str, ...], tuple[int, str, list[float]]]] = {}
    for row, record in rows:
        with into.bad.row(row):
            prompt = _text(record, "prompt")
            if not Path(into.bad.file).name.startswith("disagreements"):
                split_of[prompt] = _split(into)
                continue
            ratings = record.get("helpfulness", 0)
            if not isinstance(ratings, list | None):
                raise _invalid("wrong type", "helpfulness is not a list of ratings")
            numbers = [read_number(rating, "helpfulness") for rating in ratings or []]
            key, others = tuple(map(str, record.values())), rated.setdefault(prompt, {})
            into.bad.count("rows given twice", key in others)
            others.setdefault(key, (row, _text(record, "response"), numbers))
    for prompt, responses in rated.items():
        in_order = list(responses.values())
        into.bad.count("responses without a second one", len(in_order) % 2)
        for (row, a, ratings_a), (_, b, ratings_b) in zip(in_order[::2], in_order[1::2], strict=False):
            if len(ratings_a) != len(ratings_b):
                into.bad.count("pairs whose responses have unequally many ratings")
                continue
            with into.bad.row(row):
                columns = {"split": split_of.get(prompt)} if split_of else {}
                into.add_all_pairs(row, _chat(prompt), [a, b], np.array([ratings_a, ratings_b]), columns=columns)


NEITHER = -100
"""The strength that means "neither response is good". It is no vote, although it is below zero."""


def _count_strengths(record: Record, name: str, strength: str, into: Comparisons) -> tuple[int, int, int]:
    given: list[Any] = [entry.get(strength) for entry in _entries(record, name)]
    for value in given:
        if type(value) is not int or (abs(value) > 3 and value != NEITHER):
            raise _invalid("unknown vote", f"a {strength} is {value!r}, not a whole number from -3 to 3")
    into.bad.count("votes for neither response", given.count(NEITHER))
    for_first = sum(value < 0 for value in given) - given.count(NEITHER)
    return for_first, sum(value > 0 for value in given), given.count(0)


@_published("helpsteer2-preference", "nvidia/HelpSteer2", "preference/preference.jsonl.gz", "preference.jsonl.gz")
@each
def _helpsteer2_preference(record: Record, row: int, into: Comparisons) -> None:
    prompt, a, b = _chat(_text(record, "prompt")), _text(record, "response_1"), _text(record, "response_2")
    votes = _count_strengths(record, "all_preferences_unprocessed", "strength", into)
    into.add(row, prompt, a, b, votes, columns={"split": record.get("split")})


@_published("helpsteer3", "nvidia/HelpSteer3", "preference/train.jsonl.gz preference/validation.jsonl.gz")
@each
def _helpsteer3(record: Record, row: int, into: Comparisons) -> None:
    prompt, a, b = read_prompt(record.get("context")), _text(record, "response1"), _text(record, "response2")
    votes = _count_strengths(record, "individual_preference", "score", into)
    columns = {"split": _split(into), "domain": record.get("domain"), "language": record.get("language")}
    into.add(row, prompt, a, b, votes, columns=columns)


@_published(
    "tldr",
    "openai/summarize_from_feedback",
    "comparisons/train/*.parquet comparisons/validation/*.parquet",
    "comparisons/*.json",
    "*.json",
    revision="refs/convert/parquet",  # the main branch holds a loading script and no data
    merge=True,
    min_votes=2,
)
def _read_tldr(rows: Records, into: Comparisons) -> None:
    """Read one label per row. Posts with the same id have one prompt, even if their spacing differs between batches."""
    prompts: dict[str, str] = {}
    for row, record in rows:
        with into.bad.row(row):
            info, choice, summaries = record.get("info"), record.get("choice"), _entries(record, "summaries")
            if not isinstance(info, Mapping) or len(summaries) != 2 or type(choice) is not int or choice not in (0, 1):
                raise _invalid("wrong type", "a label must have info, two summaries and the choice 0 or 1")
            if info.get("post") is None and info.get("article") is not None:
                into.bad.count("labels on CNN/DM articles")
                continue
            post, title = _text(info, "post").replace("\n\n", "\n"), info.get("title") or ""
            text = f"SUBREDDIT: r/{info.get('subreddit') or ''}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
            prompt = prompts.setdefault(info.get("id") or text, checked_text(text, "prompt"))
            a, b = (_text(summary, "text").strip() for summary in summaries)
            columns = {"split": record.get("split"), "subreddit": info.get("subreddit")}
            columns["batch"] = record.get("batch") or Path(into.bad.file).stem
            into.add(row, prompt, a, b, (1 - choice, choice, 0), annotator=record.get("worker"), columns=columns)


_PRISM = KnownSet("prism", "HannahRoseKirk/prism-alignment", ("conversations.jsonl", "data/conversations.jsonl"))


def prism_prompts(folder: str = "", kinds: Collection[str] = ("values guided", "controversy guided")) -> list[str]:
    """Return the distinct opening prompts of PRISM's conversations, stripped, in file order.

    Args:
        folder: a copy of ``HannahRoseKirk/prism-alignment``; if empty, the hub is used.
        kinds: kinds of conversations. The paper uses ``values guided`` and ``controversy guided``; the third kind is
            ``unguided``.
    """
    bad = BadRows("prism")
    prompts: dict[str, None] = {}
    for row, record in _rows(_files(_PRISM, folder, "prism_prompts('FOLDER')"), bad, None):
        with bad.row(row):
            if _text(record, "conversation_type") in kinds and (text := _text(record, "opening_prompt").strip()):
                prompts.setdefault(text)
    if not prompts:
        remedy = "known kinds are: values guided, controversy guided, unguided"
        raise DataError(f"there is no opening prompt of the kinds {', '.join(kinds)}", file=bad.file, remedy=remedy)
    return list(prompts)
