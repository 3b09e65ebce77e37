"""Views on cards: phrases and positions come from one half of the prompts and must survive on the other half."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from benchmark_modules import benchmark

from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.measuring import views as module
from pluralign.measuring.leans import SignedVotes
from pluralign.measuring.views import (
    Views,
    excerpt,
    find_views,
    phrase_table,
    phrases_of,
    split_prompts,
    telling_phrases,
)
from pluralign.votes.town_hall.town_hall import CAMP_SHARES, TASTES, TownHall, town_hall

WEIGHTS = np.array(list(CAMP_SHARES.values()))


@functools.cache
def town() -> TownHall:
    return town_hall(1200, seed=3)


@functools.cache
def of_camps() -> SignedVotes:
    """Return votes with the rewards of the six camps."""
    means = np.array([of_camps for of_camps, _ in TASTES.values()])
    return SignedVotes.of(HeldOutVotes(town().preferences, town().features @ means), WEIGHTS)


@functools.cache
def camp_views() -> dict[str, Views]:
    return dict(zip(CAMP_SHARES, find_views(of_camps()), strict=True))


def phrases_on(views: Views, side: str) -> set[str]:
    return {phrase for view in (*views.positions, *views.phrases) for phrase in getattr(view, side)}


@pytest.mark.parametrize(
    ("camp", "wants", "rejects"),
    [
        ("gardeners", {"nature", "clean", "climate", "planet", "birds", "wildlife"}, {"comfort", "jobs", "wages"}),
        ("ratepayers", {"taxes", "budget", "debt", "money", "tax"}, {"generous", "community", "public", "services"}),
        ("keepers of custom", {"heritage", "customs", "grandparents"}, {"modern", "innovation", "fresh", "tomorrow"}),
        ("bridge builders", {"peace", "middle", "side", "sides", "compromise"}, set()),
        ("free spirits", {"freedom", "free people", "liberty", "choice", "personal"}, {"rules", "law and order"}),
    ],
)
def test_a_card_names_what_its_camp_wants(camp: str, wants: set[str], rejects: set[str]) -> None:
    found = camp_views()[camp]
    assert phrases_on(found, "prefers") & wants
    assert not phrases_on(found, "prefers") & rejects
    assert not phrases_on(found, "rejects") & wants


def test_members_that_vote_at_random_have_no_views() -> None:
    random = np.random.default_rng(0)
    for _ in range(4):
        rewards, weights = random.standard_normal((len(town().features), 4)), np.full(4, 0.25)
        found = find_views(replace(of_camps(), held_out=HeldOutVotes(town().preferences, rewards), weights=weights))
        assert not any(views.phrases or views.positions for views in found)


def test_proposals_are_tested_on_prompts_that_did_not_propose_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[set[int], set[int]]] = []
    prompts = town().preferences.prompt_index
    propose = module._propose

    def recorded(votes, table, proposing, testing):  # type: ignore[no-untyped-def]
        seen.append((set(prompts[proposing].tolist()), set(prompts[testing].tolist())))
        return propose(votes, table, proposing, testing)

    monkeypatch.setattr(module, "_propose", recorded)
    find_views(of_camps())
    assert seen
    assert not any(proposing & testing for proposing, testing in seen)


def test_figures_of_a_view_come_from_the_testing_half() -> None:
    votes = town().preferences
    half = split_prompts(len(votes.prompts))[votes.prompt_index]
    for camp, views in enumerate(camp_views().values()):
        for view in views.phrases:
            sign = 1.0 if view.prefers else -1.0
            (phrase,) = view.prefers or view.rejects
            has = np.array([phrase in phrases_of(str(text)) for text in votes.responses], dtype=float)
            x = has[votes.a_index] - has[votes.b_index]
            rows = [(x != 0) & (half == side) for side in (0, 1)]
            assert view.lean.pairs in [int(of.sum()) for of in rows]
            assert view.low < view.lean.relative < view.high
            assert sign * view.lean.own > 0
            assert 20 <= view.prompts <= view.lean.pairs
            member = np.sign(of_camps().held_out.difference[:, camp])
            shares = [float((x * member)[of].mean()) for of in rows]
            assert min(abs(share - view.lean.own) for share in shares) < 0.3  # without the control for length


def test_quotes_carry_the_phrase_where_most_members_disagree() -> None:
    quotes = [(view, quote) for views in camp_views().values() for view in views.positions for quote in view.quotes]
    assert len(quotes) > 5
    texts = {str(prompt) for prompt in town().preferences.prompts}
    for view, quote in quotes:
        assert quote.preferred
        assert quote.weight_with_it < 0.5
        assert quote.prompt in texts
        assert any(phrase in quote.text.lower().replace("’", "'") for phrase in view.prefers)


def test_words_that_both_responses_share_cancel() -> None:
    table = phrase_table(
        ["The park needs trees.", "The park needs benches."], np.array([0]), np.array([1]), min_texts=1
    )
    differ = {table.phrases[column] for column in table.difference.nonzero()[1]}
    assert "park" not in differ
    assert {"trees", "benches"} <= differ


def test_phrases_do_not_cross_punctuation_or_begin_with_function_words() -> None:
    found = phrases_of("Safety first, taxes later. The law and the order of things")
    assert {"safety first", "taxes later"} <= found
    assert not found & {"first taxes", "the law", "law and", "and the order"}


def test_a_long_sentence_is_cut_around_the_phrase() -> None:
    text = "word " * 100 + "with clean air in it " + "word " * 100
    cut = excerpt(text, ["clean air"])
    assert "clean air" in cut
    assert len(cut) <= 181
    assert excerpt("Nothing of it.", ["clean air"]) == ""


def test_few_prompts_give_no_views_and_no_phrases_are_proposed() -> None:
    some = of_camps().held_out[town().preferences.prompt_index < 30]
    assert find_views(SignedVotes.of(some, WEIGHTS)) == [Views()] * 6


def test_material_for_descriptions_names_the_camp() -> None:
    prefers, rejects = telling_phrases(of_camps())[0]
    assert set(prefers) & {"nature", "clean", "climate", "planet", "birds", "wildlife"}
    assert not set(prefers) & set(rejects)


def test_the_benchmark_finds_that_cards_of_the_true_camps_name_their_tastes() -> None:
    script = benchmark("member_cards")
    sources = script.expressed()
    assert sources["climate"] == ("environment", 1.0)
    assert sources["taxes"] == ("public_spending", -1.0)
    assert "town" not in sources
    cards = {camp: list(script.grouped(views)) for camp, views in camp_views().items()}
    found = script.count("positions", 0, cards, script.relative_tastes(town()), sources)
    assert found.camps == len(CAMP_SHARES)
    assert found.expressive > 20
    assert found.agree > 0.8 * found.expressive > 0.6 * found.expressive > found.agree_other_camps
