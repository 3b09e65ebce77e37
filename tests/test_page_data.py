"""The page shows what was measured, as JSON."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import evaluation_of, pairs_of
from hypothesis import given, strategies as st

from pluralign import PreferenceSet, RewardEnsemble, evaluate, town_hall
from pluralign.core.json_values import to_json
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out, score_held_out
from pluralign.ensemble.verdict import FEW_VOTES, headline
from pluralign.learning.measure import without_verdict
from pluralign.measuring import leans
from pluralign.measuring.cards import Profile
from pluralign.measuring.leans import CARES_LESS, DISLIKES_WORD, LIKES_WORD, PREFERS, Lean, trait_values
from pluralign.measuring.report_data import ReportData, collect_report_data
from pluralign.publishing import tables
from pluralign.server import page
from pluralign.server.explain import A_TIE, NO_CARDS, NO_REASON, MemberVote, explain_votes
from pluralign.theory.posterior import most_informative


@pytest.fixture(scope="module")
def report(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> ReportData:
    return collect_report_data(ensemble, held_out)


def page_json(ensemble: RewardEnsemble, held_out: HeldOutVotes | None = None, **options: Any) -> dict[str, Any]:
    """The data of the page as clients get it."""
    data: dict[str, Any] = to_json(page.collect_page_data(ensemble, held_out, name="town", **options))
    return data


@pytest.fixture(scope="module")
def shown(ensemble: RewardEnsemble, held_out: HeldOutVotes, report: ReportData) -> dict[str, Any]:
    return page_json(ensemble, held_out, profiles=report.profiles)


def cells_of(table: dict[str, Any]) -> list[str]:
    return [cell for row in table["rows"] for cell in row]


def rows_of(votes: PreferenceSet, pair: dict[str, Any]) -> list[int]:
    """Rows of the pairs with these texts, which may be cut."""

    def same(text: str, shown: str) -> bool:
        return text == shown or (
            shown.endswith("…") and len(shown) >= page.TEXT_LENGTH - 20 and text.startswith(shown[:-1])
        )

    names = ("prompt", "response_a", "response_b")
    pairs = enumerate(pairs_of(votes))
    return [
        row for row, texts in pairs if all(same(text, pair[name]) for text, name in zip(texts, names, strict=False))
    ]


def test_the_reliability_curve_equals_the_fits(ensemble: RewardEnsemble, shown: dict[str, Any]) -> None:
    curve = evaluation_of(ensemble).reliability
    for key in ("predicted", "observed", "count"):
        assert [point[key] for point in shown["reliability"]] == pytest.approx(list(getattr(curve, key)))
    for point in shown["reliability"]:
        assert point["interval"]["low"] <= point["observed"] <= point["interval"]["high"]


def test_pairs_of_points_are_in_bins(ensemble: RewardEnsemble, held_out: HeldOutVotes, shown: dict[str, Any]) -> None:
    votes, prediction = held_out.preferences, held_out.prob_hat(ensemble)
    order = np.sort(prediction)
    ends = np.cumsum([0] + [point["count"] for point in shown["reliability"]])
    for point, start, end in zip(shown["reliability"], ends, ends[1:], strict=False):
        assert 1 <= len(point["pairs"]) <= page.PAIRS_PER_POINT
        assert len({pair["prompt"] for pair in point["pairs"]}) == len(point["pairs"])
        for pair in point["pairs"]:
            (row,) = rows_of(votes, pair)
            assert (pair["votes_a"], pair["votes_b"]) == (votes.votes_a[row], votes.votes_b[row])
            assert pair["prob_hat"] == prediction[row]
            assert order[start] - 1e-9 <= pair["prob_hat"] <= order[end - 1] + 1e-9


def test_the_tables_are_those_of_the_report(
    ensemble: RewardEnsemble, shown: dict[str, Any], report: ReportData
) -> None:
    evaluation = evaluation_of(ensemble)
    expected = [tables.comparison_table(evaluation), *tables.judgment_tables(evaluation)]
    expected += tables.group_tables(report.groups)
    assert [table["rows"] for table in shown["tables"]] == [table.lines for table in expected]
    worst = report.worst_group
    assert shown["worst_group"] == (tables.worst_group_sentence(worst) if worst and worst.groups > 1 else "")


def test_the_history_has_the_baselines(ensemble: RewardEnsemble, shown: dict[str, Any]) -> None:
    points, evaluation = shown["history"]["points"], evaluation_of(ensemble)
    assert [(point["k"], point["test_brier"]) for point in points] == [
        (row.k, row.test_brier) for row in ensemble.record.history
    ]
    for key in ("floor", "soft_bt", "constant_half"):
        assert shown["history"]["lines"][key] == evaluation.baselines[key].brier
    assert shown["history"]["lines"]["noise"] == evaluation.test.noise


def test_the_headline_is_the_main_figures(ensemble: RewardEnsemble, shown: dict[str, Any]) -> None:
    evaluation = evaluation_of(ensemble)
    assert shown["headline"] == to_json(headline(evaluation, ensemble.record))
    assert (shown["cross_validated"], shown["left_out"]) == (False, "")


def test_a_cross_validation_counts(ensemble: RewardEnsemble, held_out: HeldOutVotes, report: ReportData) -> None:
    evaluation = evaluation_of(ensemble)
    test = replace(evaluation.test, brier_corrected=0.0123)
    pooled = replace(evaluation, test=test, levels={**evaluation.levels, evaluation.level: test}, members=[])
    record = replace(ensemble.record, cross_validation=pooled)
    shown = page_json(replace(ensemble, record=record), held_out, profiles=report.profiles)
    assert "0.0123" in shown["headline"]["main"]
    assert "0.0123" in cells_of(shown["tables"][0])
    assert shown["cross_validated"]
    assert [point["count"] for point in shown["reliability"]] == list(evaluation.reliability.count)
    assert [point["pairs"] for point in shown["reliability"]] == [[]] * len(evaluation.reliability.count)
    assert len(shown["members"]) == 3, "the members are those of the served ensemble"
    assert shown["tables"][0]["rows"][shown["tables"][0]["main"]][1] == "3"


def test_a_floor_that_votes_cannot_measure_is_not_shown(ensemble: RewardEnsemble) -> None:
    evaluation = evaluation_of(ensemble)
    floor = without_verdict(evaluation.baselines["floor"])
    few_votes = replace(evaluation, baselines={**evaluation.baselines, "floor": floor})
    shown = page_json(replace(ensemble, record=replace(ensemble.record, evaluation=few_votes)))
    assert FEW_VOTES in shown["tables"][0]["note"]
    assert "floor" not in shown["history"]["lines"]
    assert "floor" not in cells_of(shown["tables"][0])


def test_few_prompts_have_no_intervals(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    evaluation = evaluation_of(ensemble)
    recorded = replace(ensemble.record, evaluation=replace(evaluation, prompts=19))
    for votes in (None, held_out):
        shown = page_json(replace(ensemble, record=recorded), votes)
        assert {point["interval"] for point in shown["reliability"]} == {None}
    assert shown["headline"]["standing"] == "level"
    assert shown["headline"]["verdict"].startswith("No verdict: 19 test prompts")


def test_other_votes_report_what_was_left_out(ensemble: RewardEnsemble) -> None:
    votes = town_hall(480).preferences
    scored = score_held_out(ensemble, votes)
    assert 0 < scored.left_out.pairs < len(votes)
    evaluation = evaluate(ensemble, scored.preferences, groups=[])
    shown = page_json(ensemble, scored, evaluation=evaluation)
    assert shown["left_out"] == scored.left_out.sentence
    assert f"({scored.left_out.pairs:,} pairs)" in shown["left_out"]
    assert shown["votes"]["pairs"] == len(votes) - scored.left_out.pairs
    assert f"{evaluation.test.brier:.4f}" in cells_of(shown["tables"][0])


def test_cards_agree_with_profiles(shown: dict[str, Any], report: ReportData) -> None:
    assert [card["name"] for card in shown["members"]] == [profile.name for profile in report.profiles]
    assert [card["disagreement"] for card in shown["members"]] == [profile.disagreement for profile in report.profiles]
    assert report.diversity
    assert np.allclose(shown["tau"]["tau"], report.diversity.tau)
    for card, profile in zip(shown["members"], report.profiles, strict=True):
        assert {lean["claim"] for lean in card["leans"]} <= {lean.claim for lean in profile.leans}
        assert len(card["distinguishing"]) == len(profile.distinguishing)


def test_the_page_says_once_why_members_have_no_name(ensemble: RewardEnsemble, small_folder: Path) -> None:
    small = page_json(RewardEnsemble.load(small_folder), load_held_out(small_folder))
    assert [(card["name"], card["description"]) for card in small["members"]] == [("Member 0", ""), ("Member 1", "")]
    assert small["unnamed"].endswith("prompts cannot distinguish members; at least 20 are needed.")
    assert page_json(ensemble)["unnamed"].endswith("there are no held-out votes to compare them on.")


def test_long_texts_are_sampled_and_other_figures_use_all_votes(
    ensemble: RewardEnsemble, held_out: HeldOutVotes, shown: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    characters = 0

    def counted(prompts: list[str], responses: list[str]) -> npt.NDArray[np.float64]:
        nonlocal characters
        characters += sum(map(len, [*prompts, *responses]))
        return trait_values(prompts, responses)

    monkeypatch.setattr(leans, "trait_values", counted)
    monkeypatch.setattr(leans, "MAX_CHARACTERS", 20_000)
    some = page_json(ensemble, held_out)
    assert 10_000 < characters <= 20_000
    votes = held_out.preferences
    assert 1 < some["read"]["prompts"] < some["read"]["of"] == len(votes.prompts)
    assert some["tau"]["prompts"] == some["read"]["prompts"]
    assert shown["read"] == {"prompts": len(votes.prompts), "of": len(votes.prompts)}
    for key in ("votes", "reliability", "tables", "steering_pairs"):
        assert some[key] == shown[key]


def test_the_share_of_a_length_lean_can_be_recounted(held_out: HeldOutVotes, ensemble: RewardEnsemble) -> None:
    votes = held_out.preferences
    words = np.array([len(text.split()) for text in votes.responses])
    longer_is_a = np.sign(words[votes.a_index] - words[votes.b_index])
    differ = longer_is_a != 0
    shorter = HeldOutVotes(votes, -words[votes.items().response_index][:, None].astype(float).repeat(3, axis=1))
    shorter.rewards[:, 1:] = np.random.default_rng(0).random((len(words), 2))
    leans = page_json(ensemble, shorter)["members"][0]["leans"]
    (lean,) = [lean for lean in leans if lean["claim"] == f"{PREFERS}shorter answers"]
    people = np.where(longer_is_a > 0, votes.prob_a, 1 - votes.prob_a)[differ].mean()
    assert lean["share"] == pytest.approx(1.0, abs=0.02)
    assert lean["share_of_people"] == pytest.approx(1 - people, abs=0.03)


def test_shares_count_the_claimed_side() -> None:
    lean = a_lean("hedging", -0.4, claim=f"{PREFERS}unhedged claims")
    assert lean.shares() == pytest.approx((0.7, 0.5, 0.45))
    own, _, people = a_lean("length", -0.1, claim=f"{CARES_LESS}longer answers").shares()
    assert (own, people) == pytest.approx((0.45, 0.55))


def test_long_texts_are_cut_and_no_examples(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    votes = held_out.preferences
    arrays = (votes.prompt_index, votes.a_index, votes.b_index, votes.votes_a, votes.votes_b)
    responses = [text + " word" * 420 for text in votes.responses]
    long = HeldOutVotes(PreferenceSet.from_indices(votes.prompts.tolist(), responses, *arrays), held_out.rewards)
    shown = page_json(ensemble, long)
    texts = [pair["response_a"] for point in shown["reliability"] for pair in point["pairs"]]
    assert all(len(text) <= page.TEXT_LENGTH and text.endswith("…") for text in texts)
    assert all(
        len(pair["preferred"]) <= page.TEXT_LENGTH for card in shown["members"] for pair in card["distinguishing"]
    )
    assert len(votes.responses[0] + " word" * 420) > page.MAX_LENGTH
    assert shown["examples"] == shown["steering_pairs"] == []


def test_without_held_out_votes_only_the_record_is_shown(ensemble: RewardEnsemble) -> None:
    shown = page_json(ensemble)
    assert [card["name"] for card in shown["members"]] == ["Member 0", "Member 1", "Member 2"]
    evaluation = evaluation_of(ensemble)
    assert [card["disagreement"] for card in shown["members"]] == [member.disagreement for member in evaluation.members]
    assert [point["pairs"] for point in shown["reliability"]] == [[]] * len(evaluation.reliability.count)
    known = {"tables", "history", "reliability"}
    unknown = {"examples", "steering_pairs", "tau", "votes", "worst_group", "read"}
    assert {key for key in known | unknown if shown[key]} == known


def test_members_worse_than_chance_are_marked(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    rewards = held_out.rewards.copy()
    rewards[:, 1] = -rewards[:, 0]
    shown = page_json(ensemble, HeldOutVotes(held_out.preferences, rewards))
    far = [card["disagreement"] > 0.5 for card in shown["members"]]
    assert [card["far"] for card in shown["members"]] == far
    assert sum(far) == 1


# --- page examples ----------------------------------------------------------------------------------------------------


def test_examples_are_the_prompts_with_most_disagreement(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    votes = held_out.preferences
    items = votes.items()
    examples = list(page.example_prompts(ensemble, held_out))
    assert len(examples) == page.EXAMPLES
    favourites: dict[str, int] = {}
    for p, prompt in enumerate(votes.prompts):
        rows = np.flatnonzero(items.prompt_index == p)
        if len(rows) >= 3:
            favourites[prompt] = len(set(held_out.rewards[rows].argmax(axis=0)))
    chosen = [favourites[example.prompt] for example in examples]
    assert chosen == sorted(favourites.values(), reverse=True)[: page.EXAMPLES]
    for example in examples:
        p = votes.prompts.tolist().index(example.prompt)
        own = {votes.responses[items.response_index[row]] for row in np.flatnonzero(items.prompt_index == p)}
        assert set(example.responses) == own


def test_prompts_with_two_responses_are_the_fallback(ensemble: RewardEnsemble) -> None:
    votes = town_hall(40, n_responses_per_prompt=2, pairs_per_prompt=1).preferences
    rewards = np.random.default_rng(0).random((len(votes.items().prompt_index), 3))
    held_out = HeldOutVotes(votes, rewards)
    assert {len(example.responses) for example in page.example_prompts(ensemble, held_out)} == {2}
    assert page.collect_page_data(ensemble, held_out, name="town").tau is None


def test_steering_pairs_are_whole_and_have_different_prompts(ensemble: RewardEnsemble, held_out: HeldOutVotes) -> None:
    pairs, votes = list(page.steering_pairs(ensemble, held_out)), held_out.preferences
    assert len(pairs) == page.STEERING_PAIRS == len({pair.prompt for pair in pairs})
    assert set(pairs) <= {page.voted_pair(votes, row) for row in range(len(votes))}


def information(chance: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> float:
    """I(J; C) by enumeration of all sequences of choices."""
    total = 0.0
    for sequence in itertools.product((True, False), repeat=len(chance)):
        likelihood = np.prod([q if a else 1 - q for q, a in zip(chance, sequence, strict=True)], axis=0)
        marginal = float(likelihood @ weights)
        total += sum(w * t * math.log(t / marginal) for w, t in zip(weights, likelihood, strict=True) if w > 0)
    return total


@given(st.integers(0, 10_000))
def test_each_steering_pair_has_the_largest_gain(seed: int) -> None:
    random = np.random.default_rng(seed)
    chance, weights = random.uniform(0.05, 0.95, (7, 3)), random.dirichlet(np.ones(3))
    chosen = most_informative(chance, weights, np.arange(7), 3)
    for n in range(3):
        gains = [information(chance[[*chosen[:n], i]], weights) for i in range(7) if i not in chosen[:n]]
        assert information(chance[chosen[: n + 1]], weights) == pytest.approx(max(gains))


# --- explain ----------------------------------------------------------------------------------------------------------


SHORT, LONG = "No.", "Yes, and there are many good reasons for it, of which the first is that it is right. " * 3


def a_lean(trait: str = "length", own: float = 0.5, pairs: int = 400, claim: str = "") -> Lean:
    return Lean(trait, own, own, 0.01, own / 0.01, 0.0, 0.1, pairs, claim)


def a_card(member: int = 0, leans: tuple[Lean, ...] = (), **words: Any) -> Profile:
    own = {"likes": (), "dislikes": (), "distinguishing": ()} | words
    return Profile(member, 0.3, 0.4, f"card {member}", "", leans, **own)


def explained(ensemble: RewardEnsemble, card: Profile, margin: float = 1.0) -> MemberVote:
    """The vote of member 0, which prefers LONG if the margin is above 0."""
    return explain_votes(ensemble, [card], "Tea?", (LONG, SHORT), [[margin, 0.0, 0.0], [0.0, 0.0, 0.0]])[0]


def test_a_lean_in_the_votes_direction_explains_it(ensemble: RewardEnsemble) -> None:
    n_words = len(LONG.split())
    likes = a_card(leans=(a_lean("length", 0.5),))
    reasons = [f"Prefers longer answers (75 % of 400 held-out pairs): A has {n_words} words, B 1."]
    assert explained(ensemble, likes).why == reasons
    against = explained(ensemble, likes, -1.0)
    assert (against.why, against.against) == ([NO_REASON], reasons)
    shorter = explained(ensemble, a_card(leans=(a_lean("length", -0.5),)), -1.0)
    assert shorter.why == [f"Prefers shorter answers (75 % of 400 held-out pairs): B has 1 words, A {n_words}."]


@pytest.mark.parametrize(
    "lean",
    [a_lean("length", 0.05, 10_000), a_lean("length", 0.3, 100), a_lean("length", math.nan), a_lean("second_person")],
    ids=["too small to matter", "could be chance", "not measured", "the texts do not differ in it"],
)
def test_unclear_leans_explain_nothing(ensemble: RewardEnsemble, lean: Lean) -> None:
    vote = explained(ensemble, a_card(leans=(lean,)))
    assert (vote.why, vote.against) == ([NO_REASON], [])


def test_small_differences_are_no_reason(ensemble: RewardEnsemble) -> None:
    card = a_card(leans=(a_lean("length", 0.5),))
    long = "word " * 53
    assert explain_votes(ensemble, [card], "", (long, long + "word"), [[0, 0, 0], [1, 0, 0]])[0].why == [NO_REASON]
    assert explain_votes(ensemble, [card], "", (long, long + long), [[0, 0, 0], [1, 0, 0]])[0].why != [NO_REASON]


def test_words_explain_a_vote(ensemble: RewardEnsemble) -> None:
    likes = explained(ensemble, a_card(likes=(a_lean("reasons", 0.4),)))
    rest = "“reasons” (70 % of 400 held-out pairs): only A contains it."
    assert likes.why == [LIKES_WORD.capitalize() + rest]
    turns = explained(ensemble, a_card(dislikes=(a_lean("reasons", -0.4),)), -1.0)
    assert turns.why == [DISLIKES_WORD.capitalize() + rest]


def test_every_member_has_a_vote(ensemble: RewardEnsemble) -> None:
    votes = explain_votes(ensemble, [], "Tea?", ("Yes.", "No."), [[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]])
    assert [one.vote for one in votes] == [1.0, 0.0, 0.5]
    assert [one.margin for one in votes] == [1.0, -1.0, 0.0]
    assert [one.why for one in votes] == [[NO_CARDS], [NO_CARDS], [A_TIE]]
    assert [one.weight for one in votes] == ensemble.weights.tolist()
    assert votes[0].prob_a == pytest.approx(1 / (1 + math.exp(-1 / ensemble.temperature)))
