"""Cards describe the preferences that members were given, and claim nothing about random members."""

import functools
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from conftest import run

from pluralign.ensemble.held_out import HeldOutVotes, load_held_out
from pluralign.measuring import leans
from pluralign.measuring.cards import Profile, _Claim, _names, member_profiles, unnamed_reason
from pluralign.measuring.leans import KEYS, adjusted_mean, sample_prompts, trait_values
from pluralign.votes.town_hall.town_hall import CAMP_SHARES, TASTES, TownHall, town_hall

Rewards = npt.NDArray[np.float64]


@functools.cache
def town() -> TownHall:
    return town_hall(800)


@pytest.fixture(autouse=True)
def cached_traits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leans, "trait_values", lambda *texts: _traits(*map(tuple, texts)))


@functools.cache
def _traits(prompts: tuple[str, ...], responses: tuple[str, ...]) -> Rewards:
    return trait_values(prompts, responses)


def feature(name: str, seed: int = 0) -> Rewards:
    """Return a reward for one attribute of the town hall's answers, with ties broken at random."""
    values = town().features[:, town().feature_names.index(name)]
    return values + 1e-3 * np.random.default_rng(seed).random(len(values))


def noise(seed: int) -> Rewards:
    return np.random.default_rng(seed).standard_normal(len(town().features))


def cards_of(*rewards: Rewards) -> list[Profile]:
    """Return the cards of members with equal weights; in a town hall item i is response i."""
    k = len(rewards)
    return member_profiles(np.full(k, 1 / k), HeldOutVotes(town().preferences, np.stack(rewards, axis=1)))


@pytest.mark.parametrize(
    ("liked", "claim", "name"),
    [("length", "longer answers", "Longer answers"), ("hedging", "hedged claims", "Hedged claims"),
     ("list", "lists", "Lists"), ("warmth", "a warm tone", "Warm tone"),
     ("formality", "formal wording", "Formal wording"), ("question_back", "asking questions", "Asking questions"),
     ("compromise", "weighing both sides", "Weighing both sides")],
)  # fmt: skip
def test_a_card_names_the_preference_of_its_member(liked: str, claim: str, name: str) -> None:
    likes, reversed_, indifferent = cards_of(feature(liked), -feature(liked), noise(1))
    assert likes.name == name
    assert claim in likes.wants
    leans = {lean.trait: lean for lean in likes.leans if lean.claim}
    lean = next(lean for lean in leans.values() if lean.claim == f"prefers {claim}")
    opposite = reversed_.leans[KEYS.index(lean.trait)]
    assert opposite.claim.startswith("prefers ")
    assert opposite.claim != lean.claim
    assert opposite.relative < -0.1 < 0.1 < lean.relative
    assert not indifferent.leans[KEYS.index(lean.trait)].claim


def test_a_preference_for_length_is_not_a_preference_for_lists() -> None:
    longer, _ = cards_of(feature("length"), noise(0))
    lists = longer.leans[KEYS.index("structure")]
    assert not lists.claim
    votes = town().preferences
    raw = np.sign(feature("length")[votes.a_index] - feature("length")[votes.b_index])
    items = town().features[:, town().feature_names.index("list")]
    differ = items[votes.a_index] != items[votes.b_index]
    share = (raw * np.sign(items[votes.a_index] - items[votes.b_index]))[differ].mean()
    assert share > 0.1 > abs(lists.own)  # without the control it would look like a preference


def test_cards_recognize_the_camps_of_the_town() -> None:
    means = np.array([of_camps for of_camps, _ in TASTES.values()])
    larger = town_hall(1600)
    held_out = HeldOutVotes(larger.preferences, larger.features @ means)
    cards = dict(zip(CAMP_SHARES, member_profiles(list(CAMP_SHARES.values()), held_out), strict=True))
    likes = {camp: {lean.trait for lean in card.likes} for camp, card in cards.items()}
    assert likes["gardeners"] & {"nature", "climate", "trees", "wildlife", "planet"}
    assert likes["ratepayers"] & {"taxes", "budget", "debt", "wages"}
    assert likes["bridge builders"] & {"peace", "halfway", "middle", "compromise"}
    assert "running prose" in cards["keepers of custom"].wants
    assert "lists" in cards["planners"].wants
    assert len({card.name for card in cards.values()}) == len(cards)
    assert all(card.named and len(card.name.split()) <= 4 for card in cards.values())


def test_random_members_get_no_claims_beyond_the_error_rate() -> None:
    ensembles = [cards_of(*(noise(10 * seed + j) for j in range(4))) for seed in range(8)]
    claims = [
        [lean.claim for card in cards for lean in (*card.leans, *card.likes, *card.dislikes) if lean.claim]
        for cards in ensembles
    ]
    assert sum(map(bool, claims)) <= 2, claims


def test_a_random_member_among_members_that_prefer_length_only_cares_less() -> None:
    *_, indifferent = cards_of(feature("length", 1), feature("length", 2), noise(0))
    assert indifferent.name == "Less for longer answers"
    assert indifferent.wants.startswith("cares less about longer answers")
    assert indifferent.description.startswith("Longer answers: preferred in 5")


def test_a_name_goes_to_the_clearest_claim_and_members_with_equal_claims_are_numbered() -> None:
    lists, tone = (
        partial(_Claim, name=name, wants=("prefers", name), shares=(0.6, 0.5), sentence="")
        for name in ("Lists", "Warm tone")
    )
    claims = [[lists(1.0)], [lists(3.0), tone(2.0)], [lists(2.0), tone(1.0)], [lists(0.5)], []]
    assert _names(claims) == ["Lists 2", "Lists", "Warm tone", "Lists 3", ""]
    assert _names([[lists(3.0)], [tone(3.0)], [lists(1.0), tone(0.5)]]) == ["Lists", "Warm tone", "Lists, warm tone"]


@pytest.mark.parametrize(
    ("liked", "preferred", "rejected"), [("list", "“- ", "“[^-]"), ("hedging", "“", "certain|doubt")]
)
def test_the_quotes_of_a_card_illustrate_its_name(liked: str, preferred: str, rejected: str) -> None:
    card, *_ = cards_of(feature(liked), noise(1), noise(2))
    assert re.match(rf"(alone|unlike most) prefers {preferred}.*” to .*({rejected})", card.example)
    assert re.search(r"\(in \d+% of pairs; all members \d+%\)", card.wants)


def test_a_member_without_claims_is_called_by_its_number() -> None:
    cards = cards_of(noise(0), noise(1), noise(2))
    assert [card.name for card in cards] == ["Member 0", "Member 1", "Member 2"]
    assert not any(card.named or card.description for card in cards)
    longer, *_ = cards_of(feature("length"), noise(0), noise(1))
    assert longer.named
    assert (longer.label, cards[1].label) == (f"0 · {longer.name}", "Member 1")


def test_the_reason_for_missing_names_is_one_sentence_about_the_prompts() -> None:
    cards = cards_of(noise(0), noise(1), noise(2))
    assert "on 30 prompts, no difference" in unnamed_reason(cards, 30)
    assert unnamed_reason([replace(card, named=True) for card in cards], 8) == ""


def test_a_single_member_has_no_name() -> None:
    (alone,) = cards_of(feature("length"))
    assert (alone.name, alone.named) == ("Member 0", False)
    assert alone.leans[0].own == pytest.approx(alone.leans[0].ensemble)
    assert alone.distinguishing == ()


def test_a_lean_is_a_difference_of_choice_rates() -> None:
    card = cards_of(feature("length"), noise(3))[0]
    votes = town().preferences
    words = np.array([len(str(text).split()) for text in votes.responses])
    lean = card.leans[KEYS.index("length")]
    assert lean.own == pytest.approx(np.mean(np.sign(words[votes.a_index] - words[votes.b_index]) * np.sign(
        feature("length")[votes.a_index] - feature("length")[votes.b_index])), abs=0.02)  # fmt: skip
    assert lean.own - lean.ensemble == pytest.approx(lean.relative)


def test_swapping_a_and_b_changes_no_lean() -> None:
    rewards = np.stack([feature("hedging"), feature("list"), noise(0)], axis=1)
    votes = town().preferences
    swapped = votes.swapped()
    order = [list(votes.responses).index(text) for text in swapped.responses[swapped.items().response_index]]
    before = member_profiles([0.5, 0.3, 0.2], HeldOutVotes(votes, rewards))
    after = member_profiles([0.5, 0.3, 0.2], HeldOutVotes(swapped, rewards[order]))
    for one, other in zip(before, after, strict=True):
        assert one.name == other.name
        np.testing.assert_allclose([lean.z for lean in one.leans], [lean.z for lean in other.leans], atol=1e-9)


def test_examples_match_rewards_and_votes() -> None:
    votes = town().preferences
    rewards = np.stack([feature("length"), noise(0), noise(1)], axis=1)
    held_out, weights = HeldOutVotes(votes, rewards), np.array([0.2, 0.5, 0.3])
    card = member_profiles(weights, held_out)[0]
    of_text = dict(zip(votes.responses, rewards, strict=True))
    assert len(card.distinguishing) == 3
    for pair in card.distinguishing:
        with_it = of_text[pair.preferred] > of_text[pair.other]
        assert with_it[0]
        assert pair.weight_with_it == pytest.approx(weights @ with_it)
        assert pair.weight_with_it < 0.5
        (row,) = (
            row
            for row in range(len(votes))
            if {votes.responses[votes.a_index[row]], votes.responses[votes.b_index[row]]}
            == {pair.preferred, pair.other}
        )
        a_preferred = votes.responses[votes.a_index[row]] == pair.preferred
        assert pair.people_with_it == pytest.approx(votes.prob_a[row] if a_preferred else 1 - votes.prob_a[row])
        assert pair.votes == votes.n_votes[row]


def test_the_command_says_once_why_members_have_no_name(small_folder: Path) -> None:
    prompts = len(load_held_out(small_folder).preferences.prompts)
    reason = f"Members without a name: {prompts} prompts cannot distinguish members; at least 20 are needed."
    page = run("profile", small_folder)
    assert page.stdout.count(reason) == 1
    assert re.findall(r"─ (Member \d[^─]*) ─", page.stdout) == ["Member 0", "Member 1"]
    facts = json.loads(run("profile", small_folder, "--json").stdout)
    assert facts["unnamed"] == reason
    assert [(card["name"], card["named"]) for card in facts["members"]] == [("Member 0", False), ("Member 1", False)]


def test_adjusted_mean_equals_regression_with_clustered_errors() -> None:
    random = np.random.default_rng(0)
    x, controls, clusters = random.choice([-1.0, 1.0], 90), random.standard_normal((90, 2)), np.arange(90) // 3
    y = np.stack([0.4 * x + controls @ [1.0, -1.0], controls[:, 0]], axis=1) + random.standard_normal((90, 2))
    found = adjusted_mean(y, x, controls, clusters)
    design = np.column_stack([x, controls])
    inverse = np.linalg.inv(design.T @ design)
    coefficients = inverse @ design.T @ y
    np.testing.assert_allclose(found.mean, coefficients[0])
    for column in range(2):
        residual = y[:, column] - design @ coefficients[:, column]
        meat = sum(np.outer(s, s) for g in range(30) for s in [design[clusters == g].T @ residual[clusters == g]])
        variance = (inverse @ meat @ inverse)[0, 0] * 30 / 29
        assert found.standard_error[column] == pytest.approx(np.sqrt(variance))


def test_the_score_statistic_is_standard_normal_without_an_effect() -> None:
    random = np.random.default_rng(1)
    clusters = np.repeat(np.arange(25), 4)
    x = random.choice([-1.0, 1.0], 100)
    shared = np.repeat(random.standard_normal((25, 2000)), 4, axis=0)  # errors are shared within a prompt
    z = adjusted_mean(shared + random.standard_normal((100, 2000)), x, np.empty((100, 0)), clusters).z
    assert z.std() == pytest.approx(1.0, abs=0.08)
    assert np.mean(np.abs(z) > 3) < 0.004
    assert np.isnan(adjusted_mean(shared, x, x[:, None], clusters).mean).all()


def test_leans_use_the_sample_and_other_figures_use_all_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = np.stack([feature("length"), noise(1)], axis=1)
    whole, weights = HeldOutVotes(town().preferences, rewards), [0.7, 0.3]
    sample = sample_prompts(whole, 100_000)
    assert 10 < len(sample.preferences.prompts) < len(whole.preferences.prompts)
    of_sample, of_all = member_profiles(weights, sample), member_profiles(weights, whole)
    monkeypatch.setattr(leans, "MAX_CHARACTERS", 100_000)
    found = member_profiles(weights, whole)
    for one, some, every in zip(found, of_sample, of_all, strict=True):
        assert repr((one.leans, one.likes, one.name)) == repr((some.leans, some.likes, some.name))  # some are NaN
        assert (one.disagreement, one.distinguishing) == (every.disagreement, every.distinguishing)
        assert one.disagreement != some.disagreement
