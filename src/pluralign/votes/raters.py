"""Votes with the person who cast each of them: one row per vote and a column of rater ids.

Ids become integers while the file is read. The ids themselves are never kept, saved or printed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, IndexArray
from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.options import show_options, spelled, with_changes
from pluralign.core.random_streams import TOWN_HALL_VOTERS, random_stream
from pluralign.core.types import Progress
from pluralign.votes.builder import BadRows, Comparisons
from pluralign.votes.columns import is_person_column
from pluralign.votes.judgments import Judgments, by_first_appearance, ranges
from pluralign.votes.layouts import recognise
from pluralign.votes.load import VoteSource, kind_of, load_town_hall, open_records
from pluralign.votes.options import Loaded, LoadOptions
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.town_hall.town_hall import TownHall
from pluralign.votes.values import Record, RowError, person_key

ONE_ROW_PER_VOTE = "give one row per vote with the columns prompt, response_a, response_b, vote and the rater"


@dataclass(frozen=True, eq=False)
class RaterVotes:
    """Votes of known raters, and the same votes counted per pair."""

    preferences: PreferenceSet
    """All votes counted per pair, including votes without a rater."""
    pair: IndexArray
    """Row of each vote's pair in ``preferences``, ``(n_votes,)``."""
    rater: IndexArray
    """Rater of each vote, from 0 to ``n_raters`` − 1, numbered by first appearance, ``(n_votes,)``."""
    chose_a: FloatArray
    """1 for a vote for response a, 0 for b, 1/2 for a tie (dropped unless ties count half), ``(n_votes,)``."""
    without_rater: int = 0
    """Votes that count in ``preferences`` but have no rater."""

    def __len__(self) -> int:
        return len(self.pair)

    @property
    def n_raters(self) -> int:
        """Number of raters."""
        return int(self.rater.max()) + 1 if len(self.rater) else 0

    @property
    def prompt(self) -> IndexArray:
        """Prompt of each vote, an index into ``preferences.prompts``, ``(n_votes,)``."""
        return self.preferences.prompt_index[self.pair]


@show_options(LoadOptions)
def load_rater_votes(
    source: VoteSource,
    column: str,
    options: LoadOptions | None = None,
    *,
    progress: Progress | None = None,
    **changes: Any,
) -> RaterVotes:
    """Load votes with one row per vote, and the rater of each vote.

    Args:
        source: a source of ``load_preferences`` with one row per vote (columns vote, chosen and rejected, or ranking),
            or ``demo`` (``demo:PAIRS``), whose column is ``rater``.
        column: the column with the rater's id, after ``rename``. A vote without an id counts in the pairs only.
        options: options for reading; ``changes`` are its fields by name. ``repeats`` refers to raters.
        progress: called regularly with the amount done and the total.

    Example:
        >>> row = {"prompt": "Tea?", "response_a": "Yes.", "response_b": "No."}
        >>> rows = [{**row, "vote": "a", "worker": "x17"}, {**row, "vote": "b", "worker": "k2"}]
        >>> votes = load_rater_votes(rows, "worker")
        >>> votes.preferences.prob_a, votes.rater, votes.chose_a
        (array([0.5]), array([0, 1], dtype=int32), array([1., 0.]))
    """
    options = with_changes(options or LoadOptions(), changes)
    if options.ties == "fixed":
        rule = spelled(ties="fixed")
        raise UsageError(f"{rule} is a rule for vote counts, not for single votes; use drop or half with raters.")
    loaded = Loaded.of(source, options, column)
    kind = kind_of(source)
    if kind == "demo":
        if column != "rater":
            raise UsageError(f"the rater column of {str(source).partition(':')[0]} is 'rater', not {column!r}.")
        drawn = town_hall_votes(load_town_hall(source))
        return replace(drawn, preferences=replace(drawn.preferences, loaded=loaded))
    if kind != "records":
        raise DataError("it is read as vote counts per pair, without raters", file=str(source), remedy=ONE_ROW_PER_VOTE)
    records, bad = open_records(source, options, progress)
    layout, records = recognise(records, bad)
    if not layout.merge:
        problem = f"its rows ({layout.needs}) hold the votes of several people, so the rater of a vote is unknown"
        raise DataError(problem, file=bad.file, row=1, remedy=ONE_ROW_PER_VOTE)
    comparisons = Comparisons(bad)
    layout.read(_numbered_raters(records, column, bad), comparisons)
    few = layout.min_votes, layout.drop_few
    preferences, pair, annotators, chose_a = comparisons.finish_single(options, *few)
    split = preferences.without_official_split() if options.split == "prompts" else preferences
    known = np.array([annotator is not None for annotator in annotators], dtype=bool)
    if not known.any():
        problem = f"no vote has a value in the column {column!r}"
        raise DataError(problem, file=preferences.name, remedy="fill in the rater of each vote")
    _, rater = by_first_appearance(np.array([annotator for annotator in annotators if annotator is not None]))
    votes = replace(split, loaded=loaded)
    return RaterVotes(votes, pair[known].astype(np.int32), rater, chose_a[known], int((~known).sum()))


def _numbered_raters(
    records: Iterator[tuple[int, Record]], column: str, bad: BadRows
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records with the rater as an integer in ``annotator`` instead of its own column."""
    numbers: dict[str, int] = {}
    known: dict[str, None] = {}
    for row, record in records:
        known |= dict.fromkeys(record)
        rest = {name: value for name, value in record.items() if name != column and not is_person_column(name)}
        value = record.get(column)
        with bad.row(row):
            if value is None or value != value or value == "":
                rest["annotator"] = None
            elif isinstance(value, str | int | float | np.number):
                rest["annotator"] = numbers.setdefault(person_key(value), len(numbers))
            else:
                problem = f"{column} must be a text or a number, not a {type(value).__name__}"
                raise RowError("wrong type", problem, "give one id per vote")
            yield row, rest
    if known and column not in known:
        remedy = f"name the column with the rater's id; {did_you_mean(column, sorted(known))}"
        raise DataError(f"there is no column {column!r}", file=bad.file, remedy=remedy.rstrip("."))


def town_hall_votes(hall: TownHall, seed: int = 0) -> RaterVotes:
    """Return the people behind the town hall's vote counts: those who ranked, or else people who are drawn here.

    Every vote of a pair is that of a person drawn uniformly from the population, with replacement. Given the count
    votes_a, the people behind it are independent uniform draws from those who prefer a, and the others from those who
    prefer b. The counts stay as they are.

    Example:
        >>> from pluralign.votes.town_hall.town_hall import town_hall
        >>> votes = town_hall_votes(town_hall(40))
        >>> len(votes), int(votes.chose_a.sum()) == int(votes.preferences.votes_a.sum())
        (200, True)
    """
    counts = hall.preferences
    pair = np.repeat(np.arange(len(counts), dtype=np.int32), counts.n_votes)
    prefers_a = hall.annotator_votes(range(len(hall.tastes))) > 0.5
    if hall.people is not None and (judged := counts.judgments) is not None:
        # The people of a prompt are in order, and so are the votes of each of its pairs.
        first = np.searchsorted(judged.prompt, counts.prompt_index)
        people = hall.people[judged.person[ranges(first, counts.n_votes)]]
        linked = replace(judged, person=by_first_appearance(hall.people[judged.person])[1], linked=True)
        chose_a = prefers_a[pair, people].astype(np.float64)
        return RaterVotes(replace(counts, judgments=linked), pair, by_first_appearance(people)[1], chose_a)
    random = random_stream(seed, TOWN_HALL_VOTERS)
    drawn: list[npt.NDArray[np.int64]] = []
    for row in range(len(counts)):
        sides = (prefers_a[row], counts.votes_a[row]), (~prefers_a[row], counts.votes_b[row])
        drawn.extend(random.choice(np.flatnonzero(side), size=size) for side, size in sides if size)
    sizes = np.column_stack([counts.votes_a, counts.votes_b]).ravel()
    chose_a = np.repeat(np.tile([1.0, 0.0], len(counts)), sizes)
    rater = by_first_appearance(np.concatenate(drawn))[1]
    both = np.stack([counts.a_index[pair], counts.b_index[pair]], axis=1).ravel()
    scores = np.stack([chose_a, 1 - chose_a], axis=1).ravel()
    prompt, two = counts.prompt_index[pair], np.full(len(pair), 2)
    judged = Judgments.from_scores(rater, prompt, two, both, scores, linked=True)
    return RaterVotes(replace(counts, judgments=judged), pair, rater, chose_a)
