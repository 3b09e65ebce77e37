"""The Ask tab: examples, candidates, the three modes, and steering."""

import json
import re
from typing import Any

import numpy as np
import pytest
from page_browser import Tab, percent

from pluralign import PreferenceSet, answer
from pluralign.answering.request import Voters
from pluralign.answering.slate import NO_MAJORITY
from pluralign.answering.steering import ScoredChoices, steer_by_choices
from pluralign.ensemble.ensemble import RewardEnsemble


def test_the_first_example_is_answered_when_the_page_opens(
    tab: Tab, address: str, ensemble: RewardEnsemble, shown: dict[str, Any]
) -> None:
    page = tab.open(address)
    first = shown["examples"][0]
    expected = answer(ensemble, first["prompt"], first["responses"])
    assert expected.consensus
    assert page.input_value("#prompt") == first["prompt"]
    assert page.text_content(".consensus .data") == expected.consensus.text
    assert percent(expected.consensus.least_support) in page.inner_text(".consensus")
    cards = page.query_selector_all(".slate .answer")
    assert [card.query_selector(".share").inner_text() for card in cards] == [
        percent(one.share or 0.0) for one in expected.answers
    ]
    assert [card.query_selector(".data").text_content() for card in cards] == [one.text for one in expected.answers]
    for card, one in zip(cards, expected.answers, strict=True):
        names = [shown["members"][j]["name"] for j in one.members]
        assert [voice.text_content() for voice in card.query_selector_all(".voices .data")] == names


def test_examples_and_rules_can_be_changed(
    tab: Tab, address: str, ensemble: RewardEnsemble, shown: dict[str, Any]
) -> None:
    page = tab.open(address)
    page.click("text=More questions")
    page.click("[data-example='5']")
    tab.rest()
    page.select_option("#rule", "maximin")
    tab.rest()
    example = shown["examples"][5]
    expected = answer(ensemble, example["prompt"], example["responses"], rule="maximin")
    assert expected.consensus
    assert page.text_content(".consensus .data") == expected.consensus.text
    assert page.get_attribute("[data-example='5']", "aria-pressed") == "true"
    assert page.get_attribute("[data-example='0']", "aria-pressed") == "false"


def test_without_a_model_a_new_question_needs_candidates(tab: Tab, address: str, ensemble: RewardEnsemble) -> None:
    page = tab.open(address)
    page.fill("#prompt", "Shall we dance?")
    assert "This server has no language model" in page.inner_text("#ask")
    page.click("#ask form button[type=submit]")
    assert "Paste candidate answers" in page.inner_text("#ask [role=alert]")
    assert page.inner_text("#ask .results") == ""
    page.fill("#candidates", "Yes,\nlet us dance.\n\nNo.\n\n\nPerhaps: it depends.")
    page.click("#ask form button[type=submit]")
    tab.rest()
    expected = answer(ensemble, "Shall we dance?", ["Yes,\nlet us dance.", "No.", "Perhaps: it depends."])
    assert expected.consensus
    assert page.text_content(".consensus .data") == expected.consensus.text
    assert not page.is_visible("#ask [role=alert]")
    page.fill("#candidates", "Yes.\nNo.")
    page.click("#ask form button[type=submit]")
    tab.rest()
    assert re.search("[12] of 2 answers", page.inner_text("#ask"))


def writing(page: Any, asked_for: str = "candidates", **more: Any) -> list[Any]:
    """Let the server write two answers; return the list of what its requests ask for."""
    sent: list[Any] = []

    def write(route: Any) -> None:
        body = route.request.post_data_json
        sent.append(body.get(asked_for))
        texts = ["Yes.", "No, thank you."]
        reply = route.fetch(post_data=json.dumps(body | {"candidates": texts})).json()
        route.fulfill(json=reply | {"candidate_texts": texts, **more})

    page.route("**/v1/answer", write)
    page.fill("#prompt", "Shall we dance?")
    return sent


def test_generated_answers_are_reused_until_ask_is_pressed(tab: Tab, address: str) -> None:
    page = tab.open(address, rewrite=lambda data: data | {"can_generate": True})
    sent = writing(page)
    assert "the language model of this server write answers" in page.inner_text("#ask")
    page.click("#ask form button[type=submit]")
    tab.rest()
    page.click("input[value=distributional]")
    tab.rest()
    page.click("text=Draw again")
    tab.rest()
    page.click("#ask form button[type=submit]")
    tab.rest()
    assert sent == [None, ["Yes.", "No, thank you."], ["Yes.", "No, thank you."], None]


def test_answers_of_policies_are_not_reused_as_candidates(tab: Tab, address: str) -> None:
    page = tab.open(address, rewrite=lambda data: data | {"can_generate": True, "policies": [0, 1]})
    sent = writing(page, written=[0, 1])
    assert "let each member answer with its own policy" in page.inner_text("#ask")
    page.click("#ask form button[type=submit]")
    tab.rest()
    assert "Each member's own policy wrote its answer." in page.inner_text("#ask")
    page.click("#ask form button[type=submit]")
    tab.rest()
    assert sent == [None, None]


def test_only_the_button_asks_the_language_model(tab: Tab, address: str) -> None:
    page = tab.open(address, rewrite=lambda data: data | {"can_generate": True})
    sent = writing(page, "mode")
    for mode in ("distributional", "steerable", "balanced"):
        page.click(f"input[value={mode}]")
        tab.rest()
    page.select_option("#rule", "maximin")
    tab.rest()
    assert "Press Ask" in page.inner_text("#ask .results")
    page.click("input[value=steerable]")
    page.click("[data-choice=a]")
    tab.rest()
    assert "after 1 choice" in page.inner_text("#ask"), "the posterior needs no language model"
    page.click("text=Other ways to steer")
    page.select_option("#member", "2")
    tab.rest()
    assert sent == []
    page.click("#ask form button[type=submit]")
    tab.rest()
    assert sent == ["steerable"]
    assert "Member 2 answers" in page.inner_text("#ask")
    page.fill("#prompt", "Shall we sing?")
    page.click("input[value=distributional]")
    tab.rest()
    assert sent == ["steerable"]


def test_an_error_clears_the_previous_answer(tab: Tab, address: str) -> None:
    page = tab.open(address)
    assert page.query_selector(".slate")
    page.route("**/v1/answer", lambda route: route.fulfill(status=502, json={"error": {"message": "It failed."}}))
    page.click("#ask form button[type=submit]")
    tab.rest()
    assert page.inner_text("#ask [role=alert]") == "It failed."
    assert page.inner_text("#ask .results") == ""
    page.click("input[value=steerable]")
    page.click("[data-choice=a]")
    tab.rest()
    assert page.inner_text("#ask [role=alert]") == "It failed."
    assert page.query_selector("[data-choice=a]"), "the next pair can still be chosen"
    assert page.query_selector("#ask .answer") is None
    tab.messages.clear()  # the browser logs every status of 502


def test_a_consensus_without_a_majority_says_so(tab: Tab, address: str) -> None:
    page = tab.open(address)
    assert "majority" not in page.inner_text(".consensus")

    def without_majority(route: Any) -> None:
        reply = route.fetch().json()
        route.fulfill(json=reply | {"consensus": reply["consensus"] | {"note": NO_MAJORITY}})

    page.route("**/v1/answer", without_majority)
    page.click("#ask form button[type=submit]")
    tab.rest()
    assert "No answer has a majority; this one comes nearest." in page.inner_text(".consensus")


def test_draws_are_counted(tab: Tab, address: str, shown: dict[str, Any], ensemble: RewardEnsemble) -> None:
    page = tab.open(address)
    page.click("input[value=distributional]")
    tab.rest()
    page.click("text=Draw ten")
    page.wait_for_selector("h3:text-is('11 draws')")
    tab.rest()
    example = shown["examples"][0]
    drawn = [
        answer(ensemble, example["prompt"], example["responses"], "distributional", seed=seed).answers[0]
        for seed in range(11)
    ]
    counts = [int(row.inner_text().split()[0]) for row in page.query_selector_all(".tally .percent")]
    assert counts == np.bincount([one.member for one in drawn], minlength=3).tolist()
    assert page.text_content(".results .answer .text .data") == drawn[-1].text
    assert f"Member {drawn[-1].member} was drawn" in page.inner_text("#ask")


def test_choices_on_pairs_update_the_posterior(
    tab: Tab, address: str, shown: dict[str, Any], ensemble: RewardEnsemble
) -> None:
    page = tab.open(address)
    page.click("input[value=steerable]")
    tab.rest()
    assert [row.inner_text() for row in page.query_selector_all("#ask .posterior .percent")] == [
        percent(weight) for weight in shown["weights"]
    ]
    chosen = []
    for pair, letter in zip(shown["steering_pairs"], "aab", strict=False):
        assert page.text_content("[data-choice=a] .data") == pair["response_a"]
        page.focus(f"[data-choice={letter}]")
        page.keyboard.press("Enter")
        tab.rest()
        chosen.append(letter == "a")
        pairs = shown["steering_pairs"][: len(chosen)]
        votes = PreferenceSet.from_columns(
            [one["prompt"] for one in pairs],
            [one["response_a"] for one in pairs],
            [one["response_b"] for one in pairs],
            [int(a) for a in chosen],
            [int(not a) for a in chosen],
        )
        scored = ScoredChoices.of(ensemble, votes)
        expected = steer_by_choices(scored, Voters.of(ensemble))
        shares = [row.inner_text() for row in page.query_selector_all("#ask .posterior .percent")]
        assert shares == [percent(share) if share >= 0.005 else "<1\u00a0%" for share in expected.posterior]
        assert f"{expected.average:.0%}".replace("%", "\u00a0%: of no member") in page.inner_text("#ask")
        assert page.evaluate("document.activeElement.dataset.choice") == "a", "the keyboard focus is on the next pair"
    for _ in range(50):  # until the transition of the bars has ended
        bars = [bar.bounding_box()["width"] for bar in page.query_selector_all("#ask .posterior .meter > i")]
        widths = np.array(bars) / page.query_selector("#ask .posterior .meter").bounding_box()["width"]
        if widths == pytest.approx(expected.posterior, abs=0.02):
            break
        page.wait_for_timeout(100)
    assert widths == pytest.approx(expected.posterior, abs=0.02)
    page.click("text=Start over")
    assert "before your first choice" in page.inner_text("#ask")


def test_pairs_can_be_skipped_until_none_is_left(tab: Tab, address: str, shown: dict[str, Any]) -> None:
    page = tab.open(address)
    page.click("input[value=steerable]")
    for _ in shown["steering_pairs"]:
        page.click("text=Skip this pair")
    assert "No more pairs" in page.inner_text("#ask")


def test_more_like_this_counts_as_choices(
    tab: Tab, address: str, ensemble: RewardEnsemble, shown: dict[str, Any]
) -> None:
    page = tab.open(address)
    example = shown["examples"][0]
    slate = answer(ensemble, example["prompt"], example["responses"]).answers
    page.click(".slate .answer >> nth=1 >> text=More like this")
    tab.rest()
    liked, others = slate[1].text, [one.text for one in slate if one is not slate[1]]
    n = len(others)
    votes = PreferenceSet.from_columns([example["prompt"]] * n, [liked] * n, others, [1] * n, [0] * n)
    expected = steer_by_choices(ScoredChoices.of(ensemble, votes), Voters.of(ensemble))
    assert page.is_checked("input[value=steerable]")
    assert f"{expected.average:.0%}".replace("%", "\u00a0%: of no member") in page.inner_text("#ask")


def test_a_member_or_words_can_steer(tab: Tab, address: str) -> None:
    page = tab.open(address)
    page.click("input[value=steerable]")
    page.click("text=Other ways to steer")
    page.select_option("#member", "2")
    tab.rest()
    assert "Member 2 answers" in page.inner_text("#ask")
    page.click("text=Other ways to steer")
    page.fill("#like", "zzz")
    page.keyboard.press("Enter")
    tab.rest()
    assert "nothing in 'zzz' names a trait" in page.inner_text("#ask [role=alert]")
    tab.messages.clear()  # the browser logs every status of 400
