"""Descriptions by a language model are shown only if they predict their member on prompts that did not write them."""

import functools
import json
import re
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import run
from judging import Parrot
from test_remote import Reply, Request, Serve, prompt_of, says, serve  # noqa: F401

from pluralign import DataError, UsageError, town_hall
from pluralign.ensemble.held_out import HeldOutVotes, load_held_out
from pluralign.measuring import cards
from pluralign.measuring.views import split_prompts
from pluralign.text.judge import JudgeUsage
from pluralign.theory.intervals import Interval
from pluralign.votes.town_hall.town_hall import TASTES

WEIGHTS = np.array([0.5, 0.3, 0.2])


@functools.cache
def held_out() -> HeldOutVotes:
    """Return votes with the rewards of three camps: gardeners, ratepayers and keepers of custom."""
    town = town_hall(800, seed=4)
    means = np.array([of_camps for of_camps, _ in TASTES.values()])[:, :3]
    return HeldOutVotes(town.preferences, town.features @ means)


def from_phrases(prompt: str) -> str:
    """Write the phrases of the material as the description, as an honest writer would."""
    found = re.search(r"prefers and other readers do not: (.*)", prompt)
    return f"**Name:** A *reader*\n**Description:** {found[1] if found else ''}"


def test_a_description_of_the_material_predicts_its_member() -> None:
    parrot = Parrot(writes=from_phrases)
    found = cards.describe_members(held_out(), WEIGHTS, parrot, pairs=150)
    gardeners, ratepayers, _ = found.members
    assert gardeners.shown
    assert gardeners.name == "A *reader"
    assert gardeners.check is not None
    assert gardeners.check.accuracy.low > 0.5
    assert gardeners.check.p_value < 0.01
    assert "other pairs" in ratepayers.evidence
    assert found.usage.calls == 3 + len(parrot.asked) == 3 + 3 * 2 * 150


def test_the_check_uses_prompts_that_did_not_write_the_description() -> None:
    votes, written = held_out().preferences, []
    parrot = Parrot(writes=lambda prompt: written.append(prompt) or from_phrases(prompt))  # type: ignore[func-returns-value]
    cards.describe_members(held_out(), WEIGHTS, parrot, pairs=60)
    half = split_prompts(len(votes.prompts))
    for prompt, side in zip(votes.prompts.tolist(), half.tolist(), strict=True):
        assert not any(f"Question:\n{prompt}\n" in asked for asked in parrot.asked) or side == 1
        assert not any(f"Question: {prompt}\n" in text for text in written) or side == 0


def test_a_judge_that_guesses_shows_nothing_and_gives_the_figures() -> None:
    parrot = Parrot(writes=from_phrases, judges=lambda prompt: (zlib.crc32(prompt.encode()) % 7) / 6)
    found = cards.describe_members(held_out(), WEIGHTS, parrot, pairs=60)
    for one in found.members:
        assert (one.shown, one.reason) == (False, cards.NOT_BETTER_THAN_CHANCE)
        assert one.check is not None
        assert one.check.p_value > 0.05 / 3


def test_a_description_that_fits_every_member_is_not_shown() -> None:
    longer = held_out().rewards[:, :1] + np.zeros((1, 3))  # three copies of one member
    random = np.random.default_rng(0).standard_normal((len(longer), 1))
    copies = replace(held_out(), rewards=np.hstack([longer, random]))
    words = "prefers and other readers do not: nature climate planet birds wildlife clean trees rivers"
    parrot = Parrot(writes=lambda _: from_phrases(words))
    found = cards.describe_members(copies, np.array([0.33, 0.33, 0.34, 1e-6]), parrot, pairs=150)
    assert found.members[0].reason == cards.FITS_EVERYBODY


def test_a_model_that_writes_no_name_is_reported() -> None:
    found = cards.describe_members(held_out(), WEIGHTS, Parrot(writes=lambda _: "I cannot do that."), pairs=20)
    assert {(one.shown, one.reason, one.check) for one in found.members} == {(False, cards.NOTHING_WRITTEN, None)}


def test_a_server_that_answers_with_errors_is_an_error() -> None:
    def fails(_: str) -> str:
        raise DataError("the server's reply has no choices")

    with pytest.raises(DataError, match="no choices"):
        cards.describe_members(held_out(), WEIGHTS, Parrot(writes=fails), pairs=20)


def test_too_few_prompts_are_refused() -> None:
    few = held_out()[held_out().preferences.prompt_index < 30]
    with pytest.raises(UsageError, match="40 held-out prompts"):
        cards.describe_members(few, WEIGHTS, Parrot())


def test_descriptions_are_saved_for_their_ensemble_only(town_folder: Path, tmp_path: Path) -> None:
    found = cards.describe_members(held_out(), WEIGHTS, Parrot(writes=from_phrases), pairs=20)
    path = cards.save_descriptions(found, town_folder)
    try:
        assert isinstance(cards.load_descriptions(town_folder), cards.Descriptions)
        assert cards.load_descriptions(town_folder) == found
        value = json.loads(path.read_text())
        path.write_text(json.dumps(value | {"members": []}))
        with pytest.raises(DataError, match="describe again"):
            cards.load_descriptions(town_folder)
        path.write_text(json.dumps(value | {"ensemble": "another"}))
        assert cards.load_descriptions(town_folder) is None
    finally:
        path.unlink()
    assert cards.load_descriptions(tmp_path) is None


def test_the_command_describes_members_with_a_server(
    town_folder: Path,
    serve: Serve,  # noqa: F811
    tmp_path: Path,
) -> None:
    def script(request: Request) -> Reply:
        prompt = prompt_of(request)
        if "Describe this reader" in prompt:
            return says("Name: <b>Bold</b>\nDescription: likes [red]lists[/red] \x1b[31m")
        a, b = prompt.split("Response A:")[1].split("Response B:")
        return says("A" if len(a) > len(b) else "B")

    town_hall(480, seed=9).preferences.save(tmp_path / "other.jsonl")
    upstream = serve(script)
    options = ("--describe", "parrot", "--base-url", upstream.url)
    shown = json.loads(run("profile", town_folder, tmp_path / "other.jsonl", *options, "--json").stdout)
    written = shown["members"][0]["written"]
    assert shown["described"]["calls"] == len(upstream.requests) == 3 + 3 * 2 * 100
    assert written["name"] == "<b>Bold</b>"
    assert written["check"]["pairs"] == 100
    assert "\x1b" not in written["sentence"]
    assert not (town_folder / "descriptions.json").exists()  # they are of other votes
    assert "requires --describe" in run("profile", town_folder, "--base-url", upstream.url).stderr


def test_cards_show_saved_descriptions_that_passed_and_say_why_others_failed(town_folder: Path) -> None:
    check = cards.Check(Interval(0.7, 0.6, 0.8, 0.05), 0.001, Interval(0.2, 0.1, 0.3, 0.05), 0.001, 100, 40)
    passed = cards.Description(0, "Tree [bold]friend", "Likes <i>trees</i>.", True, "", "parrot", check)
    failed = cards.Description(1, "Hidden", "Likes nothing.", False, cards.NOT_BETTER_THAN_CHANCE, "parrot", check)
    cards.save_descriptions(cards.Descriptions((passed, failed), JudgeUsage("parrot", 9)), town_folder)
    try:
        page = run("profile", town_folder).stdout
        found = cards.load_descriptions(town_folder)
    finally:
        (town_folder / "descriptions.json").unlink()
    assert "Tree [bold]friend – Likes <i>trees</i>." in page
    assert "70% of its votes on 100 other pairs" in page
    assert "is not shown: it does not predict the member's votes better than chance" in " ".join(page.split())
    assert "Hidden" not in page
    held_out = load_held_out(town_folder)
    card = cards.with_descriptions(cards.member_profiles(np.full(3, 1 / 3), held_out), found)[0]
    assert card.written == passed
