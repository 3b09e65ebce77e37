"""Whole judgments beside the pair counts: read from every layout, restricted, joined, saved; against plain loops."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import pairs_of, wide
from hypothesis import given, strategies as st
from simulated import concatenate

from pluralign import DataError, UsageError, inspect, load_preferences, load_rater_votes, town_hall
from pluralign.ensemble.folder import REWARDS_FILE, VOTES_FILE
from pluralign.ensemble.held_out import HeldOutVotes, held_out_files
from pluralign.votes.judgments import Judgments, rankings_of_one
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.raters import town_hall_votes

Said = tuple[int, str, tuple[frozenset[str], ...]]
"""Person, prompt, and the responses place by place."""


def said(votes: PreferenceSet, judgments: Judgments | None = None) -> list[Said]:
    judged: Any = votes.judgments if judgments is None else judgments
    found: list[Said] = []
    for i, (first, end) in enumerate(itertools.pairwise(judged.start)):
        places = judged.place[first:end].tolist()
        assert places == sorted(places)
        assert set(places) == set(range(max(places) + 1)), "dense"
        texts = votes.responses[judged.response[first:end]]
        by_place = (frozenset(texts[np.array(places) == place]) for place in range(max(places) + 1))
        found.append((int(judged.person[i]), str(votes.prompts[judged.prompt[i]]), tuple(by_place)))
    return found


def shown(votes: PreferenceSet) -> list[str]:
    """Return each ranking as "0 x: C>A=B"."""
    return [f"{who} {prompt}: {'>'.join('='.join(sorted(tie)) for tie in order)}" for who, prompt, order in said(votes)]


def ask(**row: Any) -> dict[str, Any]:
    return {"prompt": "x", "responses": ["A", "B", "C"]} | row


def vote(a: str, b: str, choice: str, who: str | None, prompt: str = "x") -> dict[str, Any]:
    return {"prompt": prompt, "response_a": a, "response_b": b, "vote": choice, "annotator": who}


COLUMNS = {f"response_{i}": text for i, text in enumerate("ABC", 1)}
OF: dict[str, list[float | None]] = {"u": [1, 3, 2], "v": [2, 2, None]}
SCORED = {f"response_{i}_{who}": score for who, of in OF.items() for i, score in enumerate(of, 1)}
CHOSEN = [("A", "B", "u"), ("A", "C", "u"), ("B", "A", "v")]
LAYOUTS: dict[str, tuple[list[dict[str, Any]], list[str]]] = {
    "rankings": (
        [ask(rankings=[[2, 0, 1], [[0, 1], 2], [1, 2]]), ask(prompt="y", rankings=[[0, 1, 2], ["2", [1, 0]]])],
        ["0 x: C>A>B", "1 x: A=B>C", "2 x: B>C", "3 y: A>B>C", "4 y: C>A=B"],
    ),
    "ranking": (
        [ask(ranking=[2, 0], annotator="u"), ask(ranking=[1, [0, 2]]), ask(ranking=[1, 0, 2], annotator="u"),
         ask(ranking=[0, 1, 2], annotator="u", prompt="y")],
        ["0 x: C>A", "1 x: B>A=C", "0 x: B>A>C", "2 y: A>B>C"],
    ),
    "score lists": ([ask(scores=[[1, 2], [3, 2], [2, None]])], ["0 x: B>C>A", "1 x: A=B"]),
    "score columns": ([{"prompt": "x", **COLUMNS, **SCORED}], ["0 x: B>C>A", "1 x: A=B"]),
    "responses": (
        [{"prompt": "x", "response": "ABC"[i]} | {f"score_{who}": of[i] for who, of in OF.items()} for i in range(3)],
        ["0 x: B>C>A", "1 x: A=B"],
    ),
    "votes": (
        [vote("A", "B", "a", "u"), vote("A", "C", "tie", "u"), vote("B", "A", "a", None), vote("C", "A", "b", "v"),
         vote("A", "B", "b", "u", "y")],
        ["0 x: A>B", "0 x: A=C", "1 x: B>A", "2 x: A>C", "3 y: B>A"],
    ),
    "chosen": (
        [{"prompt": "x", "chosen": good, "rejected": bad, "rater": who} for good, bad, who in CHOSEN],
        ["0 x: A>B", "0 x: A>C", "1 x: B>A"],
    ),
    "votes and rankings": (
        [vote("A", "B", "a", "u"), ask(ranking=[2, 0], annotator="u"), vote("C", "A", "b", "v"),
         ask(ranking=[1, [0, 2]]), vote("C", "A", "tie", "u") | {"ranking": None}],
        ["0 x: A>B", "0 x: C>A", "1 x: A>C", "2 x: B>A=C", "0 x: A=C"],
    ),
}  # fmt: skip
LAYOUTS["rankings and votes"] = (
    LAYOUTS["votes and rankings"][0][1:],
    ["0 x: C>A", "1 x: A>C", "2 x: B>A=C", "0 x: A=C"],
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_keeps_what_single_people_said(name: str) -> None:
    rows, expected = LAYOUTS[name]
    assert shown(load_preferences(rows, min_votes=1)) == expected


@pytest.mark.parametrize(
    "rows",
    [
        [wide()],
        [vote("A", "B", "a", "u"), vote("A", "B", "b", "v"), vote("A", "B", "b", "u", "y")],
        [ask(responses=["A", "B"], rankings=[[0, 1], [1, 0]])],
        [{"prompt": "x", "chosen": "A", "rejected": "B"}] * 2,
    ],
)
def test_votes_that_tell_no_more_than_their_counts_are_only_counted(rows: list[dict[str, Any]]) -> None:
    assert load_preferences(rows, min_votes=1).judgments is None


@pytest.mark.parametrize("ranking", [[], [0, 0], [0, [0, 1]], [0, []], [0, 3], ["A"], [None]])
def test_an_invalid_ranking_is_one_sentence(ranking: list[Any]) -> None:
    with pytest.raises(DataError, match=r"row 1: ranking 1 is .* must name responses, each at most once"):
        load_preferences([ask(ranking=ranking)])


def test_a_text_given_twice_keeps_its_best_place_and_repeated_judgments_can_be_dropped() -> None:
    twice = ask(responses=["A", "B", "A", "C"], rankings=[[1, 2, 3, 0]])
    assert shown(load_preferences([twice], min_votes=1)) == ["0 x: B>A>C"]
    rows = [ask(ranking=order, annotator="u") for order in ([0, 1, 2], [1, 0, 2])]
    assert shown(load_preferences(rows)) == ["0 x: A>B>C", "0 x: B>A>C"]
    assert shown(load_preferences(rows, min_votes=1, repeats="first")) == ["0 x: A>B>C"]
    votes, expected = LAYOUTS["votes"]
    assert shown(load_preferences([*votes, votes[0]], min_votes=1, repeats="first")) == expected


def test_rater_ids_link_judgments_across_prompts_and_others_are_own_people() -> None:
    rows = [row | {"who": row["annotator"]} for row in LAYOUTS["votes"][0]]
    votes = load_rater_votes(rows, "who", min_votes=1, ties="half")
    linked: Any = votes.preferences.judgments
    assert linked.linked
    assert shown(votes.preferences) == ["0 x: A>B", "0 x: A=C", "1 x: B>A", "2 x: A>C", "0 y: B>A"]
    assert (linked.n_persons, linked.n, linked.n_prompts, votes.n_raters) == (3, 4, 2, 2)
    assert linked.unlinked() == load_preferences(rows, min_votes=1, ties="half").judgments
    ranked = load_rater_votes([row | {"who": "u"} for row in LAYOUTS["ranking"][0]], "who", min_votes=1)
    assert [who for who, *_ in said(ranked.preferences)] == [0, 0, 0, 0]
    mixed = load_rater_votes([row | {"who": "u"} for row in LAYOUTS["votes and rankings"][0]], "who", min_votes=1)
    assert [who for who, *_ in said(mixed.preferences)] == [0] * 5
    assert mixed.chose_a.tolist() == [1, 0, 1, 0, 1], "A>B, C>A, A>C, B>A, B>C"


def test_the_rankings_of_one_person_are_the_judgments_and_all_other_votes() -> None:
    ranked = load_preferences([ask(ranking=[2, [0, 1]])], min_votes=1, ties="half")
    counted = load_preferences([wide(prompt="y", response_a="A", response_b="C", votes_a=2, votes_b=1)])
    both = concatenate([ranked, counted.with_ties("half")])
    assert shown(replace(both, judgments=rankings_of_one(both))) == ["0 x: C>A=B", "0 y: A>C", "0 y: A>C", "0 y: C>A"]


@st.composite
def ranked_rows(draw: st.DrawFn) -> list[dict[str, Any]]:
    rows = []
    for number in range(draw(st.integers(1, 4))):
        texts = draw(st.lists(st.sampled_from("ABCDE"), min_size=2, max_size=5, unique=True))
        rankings = []
        for _ in range(draw(st.integers(1, 4))):
            order = draw(st.permutations(range(len(texts))))[: draw(st.integers(2, len(texts)))]
            cut = draw(st.integers(1, len(order)))
            rankings.append([*order[:cut], *([order[cut:]] if cut < len(order) else [])])
        rows.append({"prompt": f"p{number % 3}", "responses": texts, "rankings": rankings})
    return rows


def loaded(rows: list[dict[str, Any]]) -> PreferenceSet | None:
    """Return the votes, or None if all of them are ties."""
    try:
        return load_preferences(rows, min_votes=1, ties="half")
    except DataError:
        return None


@given(ranked_rows())
def test_the_counts_are_the_sums_of_the_judgments(rows: list[dict[str, Any]]) -> None:
    votes: Any = loaded(rows)
    if votes.judgments is None:
        assert all(len(row["responses"]) == 2 or all(len(r) == 2 for r in row["rankings"]) for row in rows)
        return
    counted: Counter[tuple[str, str, str]] = Counter()
    for _, prompt, order in said(votes):
        for (i, better), (j, worse) in itertools.product(enumerate(order), repeat=2):
            for a, b in itertools.product(better, worse) if i <= j else ():
                counted[prompt, a, b] += a != b
    expected: Counter[tuple[str, str, str]] = Counter()
    for prompt, a, b, for_a, for_b, ties in pairs_of(votes):
        expected[prompt, a, b] += for_a + ties
        expected[prompt, b, a] += for_b + ties
    assert +counted == +expected


@given(ranked_rows(), st.data())
def test_a_subset_keeps_the_responses_that_are_still_in_a_pair(rows: list[dict[str, Any]], data: st.DataObject) -> None:
    votes = loaded(rows)
    if votes is None or votes.judgments is None:
        return
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(votes), max_size=len(votes))))
    part = votes[mask]
    kept = {(prompt, text) for prompt, a, b, *_ in pairs_of(part) for text in (a, b)}
    people: dict[int, int] = {}
    expected: list[Said] = []
    for who, prompt, order in said(votes):
        left = [frozenset(text for text in tie if (prompt, text) in kept) for tie in order]
        if sum(map(len, left)) >= 2:
            expected.append((people.setdefault(who, len(people)), prompt, tuple(filter(None, left))))
    assert (part.judgments is None) == (not expected)
    if part.judgments is not None:
        assert said(part) == expected
        texts, at = texts_of(part), part.judgments.items(part)
        entries = zip(np.repeat(part.judgments.prompt, part.judgments.sizes), part.judgments.response, strict=True)
        assert [texts[i] for i in at] == [(part.prompts[p], part.responses[r]) for p, r in entries]
    some = np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=len(said(votes)), max_size=len(said(votes)))))
    assert [row[1:] for row in said(votes, votes.judgments[some])] == [said(votes)[i][1:] for i in some]


@given(ranked_rows(), ranked_rows())
def test_sets_are_joined_and_saved_with_their_judgments(one: Any, two: Any) -> None:
    first, second = loaded(one), loaded(two)
    if first is None or second is None:
        return
    joined = concatenate([first, second])
    parts = [said(votes) if votes.judgments is not None else [] for votes in (first, second)]
    shift = max((who + 1 for who, *_ in parts[0]), default=0)
    expected = parts[0] + [(who + shift, *rest) for who, *rest in parts[1]]
    assert (said(joined) if joined.judgments is not None else []) == expected
    again = PreferenceSet.from_table(joined.to_table())
    assert again == joined
    assert again.fingerprint == joined.fingerprint
    for votes in (joined.swapped(), joined.with_ties("half"), joined.without_official_split()):
        assert votes.judgments is None if joined.judgments is None else said(votes) == expected


@given(ranked_rows())
def test_groups_are_people_who_judged_the_same_responses(rows: list[dict[str, Any]]) -> None:
    votes = loaded(rows)
    if votes is None or (judged := votes.judgments) is None:
        return
    names = [{(prompt, text) for tie in order for text in tie} for _, prompt, order in said(votes)]
    groups: list[set[tuple[str, str]]] = []
    for name in names:  # a plain union: merge all groups that share an item
        touched = [group for group in groups if group & name]
        groups = [group for group in groups if not group & name] + [name.union(*touched)]
    component = [next(i for i, group in enumerate(groups) if name <= group) for name in names]
    numbered = {group: number for number, group in enumerate(dict.fromkeys(component))}
    assert judged.group.tolist() == [numbered[group] for group in component]


def test_votes_of_one_person_are_one_judgment_and_one_group() -> None:
    rows = [vote("A", "B", "a", "u"), vote("C", "D", "a", "u"), vote("C", "E", "a", "v"), vote("F", "G", "a", None)]
    judged: Any = load_preferences(rows, min_votes=1).judgments
    assert (judged.tell_more.tolist(), judged.group.tolist()) == ([True, True, False, False], [0, 0, 0, 1])
    assert (judged.n, judged.sizes.tolist()) == (3, [2, 2, 2, 2])


def test_whole_judgments_are_those_of_a_tenth_of_the_votes() -> None:
    ranking = load_preferences([ask(ranking=[0, 1, 2])], min_votes=1)
    few, many = (load_preferences([wide(votes_a=n, votes_b=0)]) for n in (27, 28))
    assert concatenate([ranking, few]).whole_judgments is not None
    assert concatenate([ranking, many]).whole_judgments is None
    summary: Any = inspect(concatenate([ranking, many])).judgments
    assert (summary.n, summary.prompts, summary.responses, summary.used) == (1, 1, 3.0, False)
    assert inspect(few).judgments is None


def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path) -> None:
    votes = load_preferences(LAYOUTS["rankings"][0], min_votes=1)
    table = votes.to_table()
    with pytest.raises(UsageError, match="judgments are those of another table"):
        PreferenceSet.from_table(table.slice(1))
    votes.save(path := tmp_path / "votes.parquet")
    assert PreferenceSet.load(path) == votes
    key, judgments = next(item for item in table.schema.metadata.items() if b"judgments" in item[0])
    broken = judgments[:-20] + judgments[-20:].swapcase()
    tables = []
    for other in (broken, judgments[:-8], b"", b"x:" + judgments):
        tables.append(table.replace_schema_metadata({**table.schema.metadata, key: other}))
        with pytest.raises(ValueError):  # noqa: PT011
            PreferenceSet.from_table(tables[-1])
    pq.write_table(tables[0], path)
    with pytest.raises(DataError, match="the file is damaged"):
        PreferenceSet.load(path)


def test_saved_held_out_votes_link_nobody_across_prompts(tmp_path: Path) -> None:
    rows = [row | {"who": "u"} for row in LAYOUTS["ranking"][0]]
    votes = load_rater_votes(rows, "who", min_votes=1).preferences
    ensemble: Any = SimpleNamespace(identity="an ensemble")
    files = held_out_files(ensemble, HeldOutVotes(votes, np.zeros((6, 1))))
    (tmp_path / "votes.parquet").write_bytes(files[VOTES_FILE])
    saved: Any = PreferenceSet.load(tmp_path / "votes.parquet")
    assert [who for who, *_ in said(saved)] == [0, 0, 0, 1]
    assert not saved.judgments.linked
    assert saved.fingerprint.encode() in files[REWARDS_FILE]


def test_people_of_a_town_rank_by_their_rewards() -> None:
    hall = town_hall(67, n_annotators=30, votes_per_pair=(2, 4), n_responses_per_prompt=4, rankings=True)
    judged, people = hall.preferences.judgments, hall.people
    assert judged is not None
    assert people is not None
    rewards = hall.annotator_rewards(range(30))
    counts = Counter({(prompt, a, b): 0 for prompt, a, b, *_ in pairs_of(hall.preferences)})
    for who, prompt, order in said(hall.preferences):
        texts = [next(iter(tie)) for tie in order]
        mine = [rewards[list(hall.preferences.responses).index(text), people[who]] for text in texts]
        assert mine == sorted(mine, reverse=True)
        for pair in itertools.combinations(texts, 2):
            counts[prompt, *pair] += 1
    assert [(counts[p, a, b], counts[p, b, a]) for p, a, b, *_ in pairs_of(hall.preferences)] == [
        (for_a, for_b) for *_, for_a, for_b, _ in pairs_of(hall.preferences)
    ]
    assert set(np.bincount(judged.prompt)) == {2, 3, 4}
    votes = town_hall_votes(hall)
    linked: Any = votes.preferences.judgments
    assert linked.linked
    assert linked.n_persons == votes.n_raters == len(set(people.tolist())) <= 30
    assert linked.unlinked().n < judged.n, "one person was drawn twice for a prompt"
    chosen = [np.bincount(votes.pair, weights) for weights in (votes.chose_a, 1 - votes.chose_a)]
    np.testing.assert_array_equal(chosen, [votes.preferences.votes_a, votes.preferences.votes_b])
    named = load_preferences("demo-rankings:45")
    assert (len(named.prompts), named.loaded and named.loaded.source) == (5, "demo-rankings:45")
    assert load_rater_votes("demo-rankings:45", "rater").preferences.judgments is not None
