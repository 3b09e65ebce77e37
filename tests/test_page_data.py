"""What the page shows is what was measured, and a vote is explained by nothing else."""

import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pluralign import Message, PreferenceSet, town_hall
from pluralign.analysis import leans
from pluralign.analysis.leans import Lean
from pluralign.analysis.profiles import Profile
from pluralign.analysis.report_data import ReportData, collect_report_data
from pluralign.analysis.traits import trait_values
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out
from pluralign.evaluation.comparison import comparison
from pluralign.server.page_data import (
    A_TIE,
    ASKED_LENGTH,
    EXAMPLES,
    NO_CARDS,
    NO_REASON,
    PAIRS_A_POINT,
    STEERING_PAIRS,
    TEXT_LENGTH,
    _claimed,
    explain,
    showcase,
    telling_pairs,
)

SHORT, LONG = "No.", "Yes, and there are many good reasons for it, of which the first is that it is right. " * 3


@pytest.fixture(scope="module")
def ensemble(town_folder: Path) -> RewardEnsemble:
    return RewardEnsemble.load(town_folder)


@pytest.fixture(scope="module")
def evidence(town_folder: Path) -> HeldOutVotes:
    return load_held_out(town_folder)


@pytest.fixture(scope="module")
def found(ensemble: RewardEnsemble, evidence: HeldOutVotes) -> ReportData:
    return collect_report_data(ensemble, evidence)


@pytest.fixture(scope="module")
def shown(ensemble: RewardEnsemble, evidence: HeldOutVotes, found: ReportData) -> dict[str, Any]:
    return showcase(ensemble, evidence, name="town", profiles=found.profiles)


def rows_of(votes: PreferenceSet, pair: dict[str, Any]) -> list[int]:
    """Every pair of the set with these texts, which may be cut."""

    def same(text: str, shown: str) -> bool:
        return text == shown or (shown.endswith("…") and len(shown) >= TEXT_LENGTH - 20 and text.startswith(shown[:-1]))

    return [
        row
        for row in range(len(votes))
        if same(votes.prompts[votes.prompt_index[row]], pair["prompt"])
        and same(votes.responses[votes.a_index[row]], pair["response_a"])
        and same(votes.responses[votes.b_index[row]], pair["response_b"])
    ]


def test_everything_can_be_written_as_json(shown: dict[str, Any]) -> None:
    assert json.loads(json.dumps(shown, allow_nan=False)) == shown


def test_cards_are_made_where_none_are_given(
    ensemble: RewardEnsemble, evidence: HeldOutVotes, shown: dict[str, Any]
) -> None:
    assert showcase(ensemble, evidence, name="town") == shown


def test_the_curve_is_the_one_that_fit_measured(ensemble: RewardEnsemble, shown: dict[str, Any]) -> None:
    curve = ensemble.facts["reliability"]
    for key in ("predicted", "observed", "count"):
        assert [point[key] for point in shown["reliability"]] == pytest.approx(curve[key])
    for point in shown["reliability"]:
        assert point["interval"]["low"] <= point["observed"] <= point["interval"]["high"]


def test_the_pairs_behind_a_point_are_of_its_bin(
    ensemble: RewardEnsemble, evidence: HeldOutVotes, shown: dict[str, Any]
) -> None:
    votes, prediction = evidence.preferences, evidence.prob_hat(ensemble)
    order = np.sort(prediction)
    ends = np.cumsum([0] + [point["count"] for point in shown["reliability"]])
    for point, start, end in zip(shown["reliability"], ends, ends[1:], strict=False):
        assert 1 <= len(point["pairs"]) <= PAIRS_A_POINT
        assert len({pair["prompt"] for pair in point["pairs"]}) == len(point["pairs"])
        for pair in point["pairs"]:
            (row,) = rows_of(votes, pair)
            assert (pair["votes_a"], pair["votes_b"]) == (votes.votes_a[row], votes.votes_b[row])
            assert pair["prob_hat"] == prediction[row]
            assert order[start] - 1e-9 <= pair["prob_hat"] <= order[end - 1] + 1e-9


def test_the_comparison_says_where_the_ensemble_stands(ensemble: RewardEnsemble, shown: dict[str, Any]) -> None:
    rows = comparison(ensemble.facts)
    assert [row["name"] for row in shown["comparison"]] == [row.name for row in rows]
    for row in shown["comparison"]:
        gap = row["difference"]
        expected = gap and ("ahead of" if gap["high"] < 0 else "behind" if gap["low"] > 0 else "level with")
        assert row["standing"] == expected


def test_a_better_soft_reward_is_said_to_be_better(ensemble: RewardEnsemble) -> None:
    for low, high, words in (
        (0.001, 0.002, "One ordinary reward model read as a probability (soft BT) predicts shares better: "),
        (-0.002, -0.001, "It predicts shares better than one ordinary reward model"),
        (-0.001, 0.001, "These votes do not tell it from one ordinary reward model"),
    ):
        gap = {"mean": (low + high) / 2, "low": low, "high": high}
        soft = {**ensemble.facts["baselines"]["soft_bt"], "difference": gap}
        facts = {**ensemble.facts, "baselines": {**ensemble.facts["baselines"], "soft_bt": soft}}
        verdict = showcase(replace(ensemble, facts=facts), None, name="town")["verdicts"][1]
        assert verdict["text"].startswith(words)
        assert f"{high:+.4f} (95 %)" in verdict["text"].replace("−", "-")
        assert verdict["kind"] == ("behind" if low > 0 else "good" if high < 0 else "level")


@pytest.mark.parametrize(("low", "high", "said"), [(0.01, 0.03, True), (-0.01, 0.01, True), (-0.03, -0.01, False)])
def test_an_ensemble_no_better_than_half_and_half_says_so(
    ensemble: RewardEnsemble, low: float, high: float, said: bool
) -> None:
    half = ensemble.facts["baselines"]["constant_half"]
    changed = {**half, "difference": {**half["difference"], "low": low, "high": high}}
    facts = {**ensemble.facts, "baselines": {**ensemble.facts["baselines"], "constant_half": changed}}
    verdicts = showcase(replace(ensemble, facts=facts), None, name="town")["verdicts"]
    assert any("half and half" in verdict["text"] for verdict in verdicts) == said


def test_the_history_has_the_lines_to_hold_it_against(ensemble: RewardEnsemble, shown: dict[str, Any]) -> None:
    facts = ensemble.facts
    assert [(one["k"], one["brier"]) for one in shown["history"]["points"]] == [
        (stage["k"], stage["test_brier"]) for stage in facts["history"]
    ]
    for key in ("floor", "soft_bt", "constant_half"):
        assert shown["history"][key] == facts["baselines"][key]["brier"]
    assert shown["history"]["noise"] == facts["test"]["noise"]


def test_cards_hold_what_profiles_say(shown: dict[str, Any], found: ReportData) -> None:
    assert [card["name"] for card in shown["members"]] == [profile.name for profile in found.profiles]
    assert shown["disagreement"] == [profile.disagreement for profile in found.profiles]
    assert found.diversity
    assert np.allclose(shown["tau"]["tau"], found.diversity.tau)
    for card, profile in zip(shown["members"], found.profiles, strict=True):
        assert {lean["claim"] for lean in card["leans"]} <= {lean.claim for lean in profile.leans}
        assert len(card["distinguishing"]) == len(profile.distinguishing)


def test_groups_are_those_of_a_report(shown: dict[str, Any], found: ReportData) -> None:
    assert {grouping: [group["name"] for group in of] for grouping, of in shown["groups"].items()} == {
        grouping: [group.name for group in of] for grouping, of in found.groups.items()
    }
    assert found.worst_group
    assert shown["worst_group"]["brier_corrected"] == found.worst_group.brier_corrected
    assert shown["votes"]["pairs"] == found.votes.pairs


def test_of_many_texts_a_sample_is_read_and_the_rest_is_of_all(
    ensemble: RewardEnsemble, evidence: HeldOutVotes, shown: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    characters = 0

    def counted(prompts: list[str], responses: list[str]) -> npt.NDArray[np.float64]:
        nonlocal characters
        characters += sum(map(len, [*prompts, *responses]))
        return trait_values(prompts, responses)

    monkeypatch.setattr(leans, "trait_values", counted)
    monkeypatch.setattr("pluralign.showcase.READ_CHARACTERS", 20_000)
    some = showcase(ensemble, evidence, name="town")
    assert 10_000 < characters <= 20_000
    votes = evidence.preferences
    assert 1 < some["read"]["prompts"] < some["read"]["of"] == len(votes.prompts)
    assert some["tau"]["prompts"] == some["read"]["prompts"]
    assert shown["read"] == {"prompts": len(votes.prompts), "of": len(votes.prompts)}
    for key in ("votes", "reliability", "groups", "disagreement", "steering_pairs"):
        assert some[key] == shown[key]
    assert [card["typical"] for card in some["members"]] == [card["typical"] for card in shown["members"]]


def test_the_share_of_a_lean_to_length_can_be_counted(evidence: HeldOutVotes, ensemble: RewardEnsemble) -> None:
    votes = evidence.preferences
    words = np.array([len(text.split()) for text in votes.responses])
    longer_is_a = np.sign(words[votes.a_index] - words[votes.b_index])
    differ = longer_is_a != 0
    shorter = HeldOutVotes(votes, -words[votes.items().response_index][:, None].astype(float).repeat(3, axis=1))
    shorter.rewards[:, 1:] = np.random.default_rng(0).random((len(words), 2))
    (lean,) = [
        lean
        for lean in showcase(ensemble, shorter, name="town")["members"][0]["leans"]
        if lean["claim"] == "prefers shorter answers"
    ]
    people = np.where(longer_is_a > 0, votes.prob_a, 1 - votes.prob_a)[differ].mean()
    assert lean["share"] == pytest.approx(1.0, abs=0.02)
    assert lean["share_of_people"] == pytest.approx(1 - people, abs=0.03)


def a_lean(trait: str = "length", own: float = 0.5, pairs: int = 400, claim: str = "") -> Lean:
    return Lean(trait, own, own, 0.01, own / 0.01, 0.0, 0.1, pairs, claim)


def test_a_claim_is_counted_on_its_own_side() -> None:
    said = _claimed(a_lean("hedging", -0.4, claim="prefers unhedged claims"))
    assert (said["share"], said["share_of_all"], said["share_of_people"]) == pytest.approx((0.7, 0.5, 0.45))
    less = _claimed(a_lean("length", -0.1, claim="cares less about longer answers"))
    assert (less["share"], less["share_of_people"]) == pytest.approx((0.45, 0.55))


def test_examples_are_whole_held_out_prompts_over_which_members_differ_most(
    ensemble: RewardEnsemble, evidence: HeldOutVotes, shown: dict[str, Any]
) -> None:
    votes = evidence.preferences
    items = votes.items()
    assert len(shown["examples"]) == EXAMPLES
    favourites: dict[str, int] = {}
    for p, prompt in enumerate(votes.prompts):
        rows = np.flatnonzero(items.prompt_index == p)
        if len(rows) >= 3:
            favourites[prompt] = len(set(evidence.rewards[rows].argmax(axis=0)))
    chosen = [favourites[example["prompt"]] for example in shown["examples"]]
    assert chosen == sorted(favourites.values(), reverse=True)[:EXAMPLES]
    for example in shown["examples"]:
        p = votes.prompts.tolist().index(example["prompt"])
        own = {votes.responses[items.response_index[row]] for row in np.flatnonzero(items.prompt_index == p)}
        assert set(example["responses"]) == own


def test_steering_pairs_are_whole_and_of_different_prompts(evidence: HeldOutVotes, shown: dict[str, Any]) -> None:
    pairs = shown["steering_pairs"]
    assert len(pairs) == STEERING_PAIRS == len({pair["prompt"] for pair in pairs})
    for pair in pairs:
        assert rows_of(evidence.preferences, pair)


def information(chance: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> float:
    """I(J; C) by going through every course of answers."""
    total = 0.0
    for course in itertools.product((True, False), repeat=len(chance)):
        told = np.prod([q if a else 1 - q for q, a in zip(chance, course, strict=True)], axis=0)
        together = float(told @ weights)
        total += sum(w * t * math.log(t / together) for w, t in zip(weights, told, strict=True) if w > 0)
    return total


@given(st.integers(0, 10_000))
def test_each_steering_pair_adds_the_most_information(seed: int) -> None:
    random = np.random.default_rng(seed)
    chance, weights = random.uniform(0.05, 0.95, (7, 3)), random.dirichlet(np.ones(3))
    chosen = telling_pairs(chance, weights, np.arange(7), 3)
    for n in range(3):
        gains = [information(chance[[*chosen[:n], i]], weights) for i in range(7) if i not in chosen[:n]]
        assert information(chance[chosen[: n + 1]], weights) == pytest.approx(max(gains))


@given(st.integers(0, 10_000))
def test_the_order_of_responses_and_members_does_not_matter_to_steering_pairs(seed: int) -> None:
    random = np.random.default_rng(seed)
    chance, weights = random.uniform(0.05, 0.95, (20, 4)), random.dirichlet(np.ones(4))
    chosen = telling_pairs(chance, weights, np.arange(20), 3)
    assert telling_pairs(1 - chance, weights, np.arange(20), 3) == chosen
    assert telling_pairs(chance[:, ::-1], weights[::-1], np.arange(20), 3) == chosen


def test_a_prompt_has_one_steering_pair_at_most() -> None:
    chance = np.random.default_rng(0).uniform(0.05, 0.95, (6, 2))
    chosen = telling_pairs(chance, np.array([0.5, 0.5]), np.array([0, 0, 0, 1, 1, 1]), 6)
    assert sorted(row // 3 for row in chosen) == [0, 1]


def rewritten(evidence: HeldOutVotes, prompts: list[Any], responses: list[str]) -> HeldOutVotes:
    votes = evidence.preferences
    arrays = (votes.prompt_index, votes.a_index, votes.b_index, votes.votes_a, votes.votes_b)
    return HeldOutVotes(PreferenceSet.from_indices(prompts, responses, *arrays), evidence.rewards)


def test_long_texts_are_cut_where_read_and_left_out_where_scored(
    ensemble: RewardEnsemble, evidence: HeldOutVotes
) -> None:
    votes = evidence.preferences
    long = rewritten(evidence, votes.prompts.tolist(), [text + " word" * 420 for text in votes.responses])
    shown = showcase(ensemble, long, name="town")
    texts = [pair["response_a"] for point in shown["reliability"] for pair in point["pairs"]]
    assert all(len(text) <= TEXT_LENGTH and text.endswith("…") for text in texts)
    assert all(len(pair["preferred"]) <= TEXT_LENGTH for card in shown["members"] for pair in card["distinguishing"])
    assert len(votes.responses[0] + " word" * 420) > ASKED_LENGTH
    assert shown["examples"] == shown["steering_pairs"] == []


def test_chats_are_shown_as_people_read_them(ensemble: RewardEnsemble, evidence: HeldOutVotes) -> None:
    votes = evidence.preferences
    chats = [(Message("system", "Be kind."), Message("user", prompt)) for prompt in votes.prompts]
    shown = showcase(ensemble, rewritten(evidence, chats, votes.responses.tolist()), name="town")
    assert shown["examples"][0]["prompt"].startswith("system: Be kind.\nuser: ")
    assert shown["steering_pairs"][0]["prompt"].startswith("system: Be kind.\nuser: ")


def test_prompts_with_two_responses_are_examples_where_there_are_no_others(ensemble: RewardEnsemble) -> None:
    votes = town_hall(40, n_responses_per_prompt=2, pairs_per_prompt=1).preferences
    rewards = np.random.default_rng(0).random((len(votes.items().prompt_index), 3))
    shown = showcase(ensemble, HeldOutVotes(votes, rewards), name="town")
    assert {len(example["responses"]) for example in shown["examples"]} == {2}
    assert shown["tau"] is None


def test_one_pair_is_enough(ensemble: RewardEnsemble) -> None:
    votes = PreferenceSet.from_columns(["Tea?"], ["Yes."], ["No."], [1], [0])
    shown = showcase(ensemble, HeldOutVotes(votes, np.array([[1.0, 0.0, 2.0], [0.0, 1.0, 1.0]])), name="town")
    json.dumps(shown, allow_nan=False)
    assert shown["reliability"][0]["interval"] == {"low": None, "high": None}
    assert len(shown["steering_pairs"]) == 1


def test_without_evidence_only_the_ensembles_own_facts_are_shown(ensemble: RewardEnsemble) -> None:
    shown = showcase(ensemble, None, name="town")
    assert [card["name"] for card in shown["members"]] == ["Member 0", "Member 1", "Member 2"]
    assert shown["disagreement"] == [member["disagreement"] for member in ensemble.facts["members"]]
    assert [point["pairs"] for point in shown["reliability"]] == [[]] * len(ensemble.facts["reliability"]["count"])
    known = ("comparison", "history", "verdicts", "reliability")
    assert [key for key in known if not shown[key]] == []
    assert [
        key for key in ("examples", "steering_pairs", "groups", "tau", "votes", "worst_group", "read") if shown[key]
    ] == []


def test_an_ensemble_that_knows_nothing_of_itself_is_shown(ensemble: RewardEnsemble) -> None:
    shown = showcase(replace(ensemble, facts={}), None, name="town")
    assert shown["k"] == 3
    assert [key for key in ("comparison", "history", "verdicts", "reliability", "warnings") if shown[key]] == []
    assert [card["disagreement"] for card in shown["members"]] == [None] * 3


def test_members_further_from_people_than_a_coin_are_warned_of(
    ensemble: RewardEnsemble, evidence: HeldOutVotes
) -> None:
    rewards = evidence.rewards.copy()
    rewards[:, 1] = -rewards[:, 0]
    shown = showcase(ensemble, HeldOutVotes(evidence.preferences, rewards), name="town")
    far = [card["member"] for card in shown["members"] if card["disagreement"] > 0.5]
    assert len(far) == 1
    assert [warning.split(" is ")[0] for warning in shown["warnings"]] == [f"Member {far[0]}"]


# --- why ------------------------------------------------------------------------------------------------------------


def a_card(member: int = 0, leans: tuple[Lean, ...] = (), **words: Any) -> Profile:
    own = {"likes": (), "dislikes": (), "typical": (), "distinguishing": ()} | words
    return Profile(member, 0.3, 0.4, f"card {member}", "", leans, **own)


def explained(ensemble: RewardEnsemble, card: Profile, margin: float = 1.0) -> dict[str, Any]:
    """What is said of member 0, which prefers LONG where the margin is above 0."""
    return explain(ensemble, [card], "Tea?", LONG, SHORT, [margin, 0, 0], [0, 0, 0])[0]


def test_a_vote_is_explained_by_a_lean_in_its_direction(ensemble: RewardEnsemble) -> None:
    n_words = len(LONG.split())
    likes = a_card(leans=(a_lean("length", 0.5),))
    assert explained(ensemble, likes)["why"] == [
        f"Leans to longer answers (75 % of 400 held-out pairs): A has {n_words} words, B 1."
    ]
    turned = explained(ensemble, likes, -1.0)
    assert turned["why"] == [NO_REASON]
    assert turned["against"] == [f"Leans to longer answers (75 % of 400 held-out pairs): A has {n_words} words, B 1."]
    shorter = explained(ensemble, a_card(leans=(a_lean("length", -0.5),)), -1.0)
    assert shorter["why"] == [f"Leans to shorter answers (75 % of 400 held-out pairs): B has 1 words, A {n_words}."]


@pytest.mark.parametrize(
    "lean",
    [
        pytest.param(a_lean("length", 0.05, 10_000), id="too small to matter"),
        pytest.param(a_lean("length", 0.3, 100), id="could be chance"),
        pytest.param(a_lean("length", math.nan, 400), id="not measured"),
        pytest.param(a_lean("second_person", 0.5), id="the texts do not differ in it"),
    ],
)
def test_what_was_not_clearly_measured_explains_nothing(ensemble: RewardEnsemble, lean: Lean) -> None:
    said = explained(ensemble, a_card(leans=(lean,)))
    assert (said["why"], said["against"]) == ([NO_REASON], [])


def test_a_difference_that_nobody_would_notice_is_no_reason(ensemble: RewardEnsemble) -> None:
    card = a_card(leans=(a_lean("length", 0.5),))
    long = "word " * 53
    assert explain(ensemble, [card], "", long, long + "word", [0, 0, 0], [1, 0, 0])[0]["why"] == [NO_REASON]
    assert explain(ensemble, [card], "", long, long + long, [0, 0, 0], [1, 0, 0])[0]["why"] != [NO_REASON]


def test_words_explain_a_vote(ensemble: RewardEnsemble) -> None:
    likes = explained(ensemble, a_card(likes=(a_lean("reasons", 0.4),)))
    assert likes["why"] == ["Likes mentions of “reasons” (70 % of 400 held-out pairs): only A has the word."]
    turns = explained(ensemble, a_card(dislikes=(a_lean("reasons", -0.4),)), -1.0)
    assert turns["why"] == ["Turns from “reasons” (70 % of 400 held-out pairs): only A has the word."]


def test_every_member_is_told_with_its_vote(ensemble: RewardEnsemble) -> None:
    told = explain(ensemble, [], "Tea?", "Yes.", "No.", [1.0, 0.0, 0.5], [0.0, 1.0, 0.5])
    assert [one["vote"] for one in told] == [1.0, 0.0, 0.5]
    assert [one["margin"] for one in told] == [1.0, -1.0, 0.0]
    assert [one["why"] for one in told] == [[NO_CARDS], [NO_CARDS], [A_TIE]]
    assert [one["weight"] for one in told] == ensemble.weights.tolist()
    assert told[0]["prob_a"] == pytest.approx(1 / (1 + math.exp(-1 / ensemble.temperature)))


def test_exchanging_the_responses_exchanges_the_reasons(
    ensemble: RewardEnsemble, evidence: HeldOutVotes, found: ReportData
) -> None:
    votes = evidence.preferences
    reasons = 0
    for row in range(20):
        prompt = votes.prompts[votes.prompt_index[row]]
        a, b = votes.responses[votes.a_index[row]], votes.responses[votes.b_index[row]]
        rewards = ensemble.rewards([(prompt, a), (prompt, b)])
        one = explain(ensemble, found.profiles, prompt, a, b, rewards[0], rewards[1])
        other = explain(ensemble, found.profiles, prompt, b, a, rewards[1], rewards[0])
        exchange = str.maketrans("AB", "BA")
        for this, that in zip(one, other, strict=True):
            assert [s.split(": ")[-1] for s in this["why"]] == [
                s.split(": ")[-1].translate(exchange) for s in that["why"]
            ]
            assert this["vote"] == 1 - that["vote"]
            reasons += this["why"] not in ([NO_REASON], [A_TIE])
    assert reasons > 10


def test_reasons_are_plain_values(ensemble: RewardEnsemble, found: ReportData) -> None:
    told = explain(ensemble, found.profiles, "Tea?", LONG, SHORT, [1, 2, 3], [3, 2, 1])
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert asdict(found.profiles[0])["name"] == told[0]["name"]
