"""Balanced, steerable and distributional answers."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run, wide
from scipy import stats
from served import Writer, running
from test_tune import ensemble_of

from pluralign import DataError, RewardEnsemble, UsageError, answer
from pluralign.answering import answer as answering
from pluralign.answering.answer import ONLY_ONE, UNCHECKED, Answerer, Drafts, choose
from pluralign.answering.request import AnswerRequest, Mode, Voters
from pluralign.answering.steering import ScoredChoices, find_user
from pluralign.core.types import Level
from pluralign.ensemble.held_out import load_held_out
from pluralign.measuring.cards import Profile, member_profiles
from pluralign.theory.posterior import ChoiceModel
from pluralign.votes.candidates import candidates_of

PROMPT = "Should the town plant more trees?"
CANDIDATES = [
    "Yes. Trees cool the streets, and children love them; please let us plant them together, dear neighbours!",
    "No.",
    "Perhaps. It may depend on the cost, and I am not sure that we can afford it.",
    "1. Plant ten oaks.\n2. Water them.\n3. Report in June.",
    "The council must plant trees now. There is no doubt about it.",
]


@pytest.fixture(scope="module")
def cards(town_folder: Path, ensemble: RewardEnsemble) -> list[Profile]:
    return member_profiles(ensemble.weights, load_held_out(town_folder))


def favourite_text(ensemble: RewardEnsemble, member: int) -> str:
    return CANDIDATES[int(ensemble.rewards([(PROMPT, text) for text in CANDIDATES])[:, member].argmax())]


def supports(ensemble: RewardEnsemble, texts: list[str]) -> Any:
    """The weight of the members that prefer each text to each other one, with a row per text."""
    rewards = list(enumerate(ensemble.rewards([(PROMPT, text) for text in texts])))
    return np.array([[(one > other) @ ensemble.weights for j, other in rewards if i != j] for i, one in rewards])


# --- score, then choose -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("balanced", {"rule": "maximin", "slate_size": 2, "cover": "top-two"}),
        ("distributional", {}),
        ("steerable", {"member": 1}),
        ("steerable", {"like": "long answers"}),
        ("steerable", {"choices": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", ["vote", "policy"])
def test_answer_is_score_followed_by_choose(
    ensemble: RewardEnsemble, cards: list[Profile], town_folder: Path, level: Level, mode: Mode, options: dict[str, Any]
) -> None:
    ensemble, options = replace(ensemble, undecided=0.3), {**options, "level": level}
    texts, scored, average = [*CANDIDATES, CANDIDATES[0]], None, None
    if "choices" in options or "like" in options:
        average = ensemble.rewards_and_average([(PROMPT, text) for text in texts])[:, ensemble.k]
    if "choices" in options:
        options |= {"choices": load_held_out(town_folder).preferences[:5]}
        scored = ScoredChoices.of(ensemble, options["choices"])
    rewards = ensemble.rewards([(PROMPT, text) for text in CANDIDATES])[[0, 1, 2, 3, 4, 0]]
    voters = Voters.of(ensemble)
    for seed in range(5):
        request = AnswerRequest(PROMPT, mode, seed=seed, **options)
        user = find_user(request, voters, choices=scored, cards=cards) if mode == "steerable" else None
        found = choose(request, voters, texts, rewards, user=user, average=average)
        assert found == answer(ensemble, PROMPT, texts, mode, profiles=cards, seed=seed, **options)
        assert found == Answerer(ensemble, profiles=cards).answer(request, texts)
        assert found == answer(ensemble, request, texts, profiles=cards)


def test_repeated_candidates_are_encoded_once(ensemble: RewardEnsemble) -> None:
    encoded: list[Any] = []

    @dataclass(frozen=True, eq=False)
    class Recording(RewardEnsemble):
        def rewards(self, items: Any, progress: Any = None) -> Any:
            encoded.extend(items)
            return super().rewards(items, progress)

    answer(Recording(**vars(ensemble)), PROMPT, ["Yes.", "No.", "Yes."])
    assert encoded == [(PROMPT, "Yes."), (PROMPT, "No.")]


# --- balanced ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 1, 2])
def test_every_member_stands_behind_its_favourite_entry(ensemble: RewardEnsemble, size: int | None) -> None:
    found = answer(ensemble, PROMPT, CANDIDATES, slate_size=size)
    rewards = ensemble.rewards([(PROMPT, entry.text) for entry in found.answers])
    for row, entry in enumerate(found.answers):
        assert entry.members == tuple(np.flatnonzero(rewards.argmax(axis=0) == row).tolist())
        assert entry.weight == pytest.approx(sum(ensemble.weights[list(entry.members)]))
    assert sorted(j for entry in found.answers for j in entry.members) == list(range(ensemble.k))
    shares = [entry.share or 0 for entry in found.answers]
    assert shares == sorted(shares, reverse=True)
    assert found.coverage == pytest.approx(sum(shares))
    assert len(found.answers) == (size or min(3, len({favourite_text(ensemble, j) for j in range(ensemble.k)})))


def test_the_consensus_reports_its_true_support(ensemble: RewardEnsemble) -> None:
    ensemble = replace(ensemble, undecided=0.0)
    expected = supports(ensemble, CANDIDATES)
    for rule in ("borda", "schulze", "lottery", "maximin"):
        found: Any = answer(ensemble, PROMPT, CANDIDATES, rule=rule, level="vote").consensus
        against = expected[CANDIDATES.index(found.text)]
        assert (found.least_support, found.mean_support) == pytest.approx((against.min(), against.mean()))
    assert found.least_support == pytest.approx(expected.min(axis=1).max()), "maximin has the largest one"


def test_if_the_writer_fails_the_consensus_stays_and_a_note_says_why(ensemble: RewardEnsemble) -> None:
    too_long = DataError("the prompt has 9,000 tokens, but the model reads 512", remedy="shorten it")
    plain = answer(ensemble, PROMPT, CANDIDATES)
    for writer, note in (
        (Writer(error=too_long), f"no statement was written: {str(too_long).rstrip('.')}"),
        (Writer(responses=["", " ", CANDIDATES[1]]), "the writer wrote nothing that is not among the candidates"),
    ):
        assert answer(ensemble, PROMPT, CANDIDATES, writer=writer) == replace(plain, notes=(UNCHECKED, note))
    with pytest.raises(UsageError, match="needs a language model that writes it"):
        answer(ensemble, PROMPT, CANDIDATES, distill=True)


# --- distributional ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["vote", "policy"])
@pytest.mark.parametrize("texts", [[CANDIDATES[0], CANDIDATES[2]], CANDIDATES], ids=["pair", "five"])
def test_draws_have_the_predicted_shares_of_first_choices(
    ensemble: RewardEnsemble, level: Level, texts: list[str]
) -> None:
    drawn = [answer(ensemble, PROMPT, texts, "distributional", level=level, seed=i).answers[0].text for i in range(400)]
    voters = replace(Voters.of(ensemble), undecided=0.0).at(level)
    share = voters.first_choices(ensemble.rewards([(PROMPT, text) for text in texts]))
    for text, chance in zip(texts, share, strict=True):
        assert stats.binomtest(drawn.count(text), 400, chance).pvalue > 1e-4


# --- odd input --------------------------------------------------------------------------------------------------------


def test_no_single_and_repeated_candidates(ensemble: RewardEnsemble) -> None:
    with pytest.raises(UsageError, match="a list of responses"):
        answer(ensemble, PROMPT, "candidates.jsonl")
    with pytest.raises(UsageError, match="no candidates"):
        answer(ensemble, PROMPT, [])
    one = answer(ensemble, PROMPT, ["Yes.", "Yes."])
    assert [entry.text for entry in one.answers] == ["Yes."]
    assert one.answers[0].weight == pytest.approx(1)
    assert one.consensus is not None
    assert one.notes == ("1 repeat left out of the candidates", UNCHECKED, ONLY_ONE)


def test_equal_rewards_give_half_support_and_a_random_pick(ensemble: RewardEnsemble) -> None:
    alike = ["Tea is fine.", "Rum is fine."]  # identical in every feature of this ensemble
    assert np.ptp(ensemble.rewards([(PROMPT, text) for text in alike]), axis=0) == pytest.approx(0)
    found: Any = answer(ensemble, PROMPT, alike).consensus
    assert (found.least_support, found.mean_support, found.favourite_of) == pytest.approx((0.5, 0.5, 0.5))
    mode: Mode
    for mode, member in (("distributional", None), ("steerable", 1)):
        picked = [answer(ensemble, PROMPT, alike, mode, member=member, seed=seed).answers[0].text for seed in range(60)]
        assert 15 < picked.count(alike[0]) < 45


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"mode": "balance"}, "did you mean 'balanced'"),
        ({"cover": "top two"}, "no cover 'top two'; did you mean 'top-two'"),
        ({"slate_size": 0}, "at least one answer; slate_size cannot be 0"),
        ({"n": 0}, "n must be at least one"),
        ({"seed": -1}, "seed must not be negative"),
        ({"mode": "distributional", "slate_size": 2}, "slate_size requires mode balanced"),
        ({"mode": "steerable", "member": 1, "distill": True}, "distill requires mode balanced"),
        ({"mode": "steerable"}, "needs one of"),
        ({"mode": "steerable", "member": 3}, "numbered from 0 to 2; there is no member 3"),
        ({"mode": "steerable", "member": 1, "like": "short"}, "needs one of"),
        ({"member": 1}, "mode balanced takes none"),
        ({"slatesize": 2}, "no option 'slatesize'; did you mean 'slate_size'"),
    ],
    ids=str,
)
def test_a_bad_request_says_why(ensemble: RewardEnsemble, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        answer(ensemble, PROMPT, CANDIDATES, **options)


# --- answers that the members' own policies write ---------------------------------------------------------------------


@pytest.fixture
def town() -> RewardEnsemble:
    """Member 0 likes question marks, member 1 full stops, member 2 likes exclamation marks."""
    return ensemble_of("question marks", "full stops", "exclamation marks", weights=(0.5, 0.3, 0.2))


def pens() -> dict[int, Writer]:
    return {
        0: Writer(responses=["Which trees should we plant?", "Trees? Now? Why?", "Trees."]),
        1: Writer(responses=["Yes we should.", "Yes. Many. Trees.", "Yes to trees."]),
        2: Writer(responses=["Plant them now!", "Plant! Plant! Now!"]),
    }


def test_the_slate_holds_the_own_answer_of_every_member(town: RewardEnsemble) -> None:
    policies = pens()
    found = answer(town, PROMPT, policies=policies)
    assert {(entry.text, entry.members, entry.weight) for entry in found.answers} == {
        ("Which trees should we plant?", (0,), 0.5),
        ("Yes we should.", (1,), 0.3),
        ("Plant them now!", (2,), 0.2),
    }
    shares = [entry.share or 0 for entry in found.answers]
    assert shares == sorted(shares, reverse=True)
    assert found.written == (0, 1, 2)
    assert found.consensus is not None
    assert found.consensus.text in {entry.text for entry in found.answers}
    assert [[(n, options.seed) for _, n, options in pen.requests] for pen in policies.values()] == [[(1, 0)]] * 3


def test_a_member_keeps_its_own_answer_where_it_would_prefer_that_of_another(town: RewardEnsemble) -> None:
    own = {0: "No.", 1: "What? When? Where? Why? Who?", 2: "Plant!"}
    found = answer(town, PROMPT, policies={j: Writer(responses=[text]) for j, text in own.items()})
    assert {entry.member: entry.text for entry in found.answers} == own


def test_a_member_without_a_policy_chooses_among_the_shared_candidates(town: RewardEnsemble) -> None:
    policies = pens()
    del policies[1]
    asked = []

    def shared() -> list[str]:
        asked.append(1)
        return ["No to that.", "No. Never. Not.", "Is it? Is it? Is it? Is it?"]

    found = answer(town, PROMPT, shared, policies=policies)
    assert {entry.member: entry.text for entry in found.answers} == {
        0: "Which trees should we plant?", 1: "No. Never. Not.", 2: "Plant them now!",
    }  # fmt: skip
    assert found.written == (0, 2)
    assert found.notes == ("member 1 has no answer of a policy and chooses among 3 shared candidates", UNCHECKED)
    assert asked == [1]
    steered = answer(town, PROMPT, shared, "steerable", member=0, policies=policies)
    assert (steered.answers[0].text, steered.notes, asked) == ("Which trees should we plant?", (UNCHECKED,), [1])
    with pytest.raises(UsageError, match="member 1 has no policy and there are no candidates; give candidates"):
        answer(town, PROMPT, policies=policies)


def test_drafts_do_not_depend_on_concurrency(town: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
    policies = pens()
    one = answer(town, PROMPT, policies=policies, n=2)
    monkeypatch.setattr(answering, "concurrency_of", lambda _: 3)
    assert answer(town, PROMPT, policies=policies, n=2) == one


def test_slate_size_and_cover_choose_among_the_members_own_answers(town: RewardEnsemble) -> None:
    whole = answer(town, PROMPT, policies=pens())
    two = answer(town, PROMPT, policies=pens(), slate_size=2)
    assert two.answers[0].text == whole.answers[0].text
    assert len(two.answers) == 2
    assert two.consensus == whole.consensus
    top = answer(town, PROMPT, policies=pens(), slate_size=2, cover="top-two")
    assert (top.coverage or 0) > (two.coverage or 0)


def test_steering_lets_only_the_chosen_members_policy_write(town: RewardEnsemble) -> None:
    policies = pens()
    found = answer(town, PROMPT, mode="steerable", member=1, policies=policies, n=3)
    (one,) = found.answers
    assert (one.text, one.member) == ("Yes. Many. Trees.", 1)
    assert one.weight == pytest.approx(0.3)
    assert found.steering is not None
    assert found.steering.why == "it was requested by number"
    assert [len(pen.requests) for pen in policies.values()] == [0, 1, 0]
    votes = [wide(response_a="Yes! Tea! Now!", response_b="Tea.", votes_a=1, votes_b=0)] * 4
    chosen = answer(town, PROMPT, mode="steerable", choices=votes, policies=policies)
    assert chosen.steering is not None
    assert chosen.steering.member == int(np.argmax(chosen.steering.posterior)) == 2
    assert chosen.answers[0].text == "Plant them now!"


def test_random_draws_follow_the_weights_and_one_policy_writes_one_sample(town: RewardEnsemble) -> None:
    policies = pens()
    counts = np.zeros(3)
    for seed in range(400):
        found = answer(town, PROMPT, mode="distributional", policies=policies, n=5, seed=seed)
        (entry,) = found.answers
        assert entry.member is not None
        assert entry.text == policies[entry.member].responses[0], "one sample, not the best of five"
        counts[entry.member] += 1
    assert abs(counts / 400 - town.weights).max() < 0.08
    assert {n for pen in policies.values() for _, n, _ in pen.requests} == {1}


def test_a_drawn_member_without_a_policy_samples_at_the_level_of_the_ensemble(town: RewardEnsemble) -> None:
    town = replace(town, record=replace(town.record, level="policy"), temperature=1e6)
    texts = ["A?", "B.", "C!"]
    drawn = [answer(town, PROMPT, texts, "distributional", policies={}, seed=seed).answers[0] for seed in range(30)]
    assert {one.text for one in drawn} == set(texts)


def test_the_member_that_is_drawn_depends_only_on_weights_prompt_and_seed(town: RewardEnsemble) -> None:
    def drawn(prompt: str) -> list[int | None]:
        found = (answer(town, prompt, None, "distributional", policies=pens(), seed=seed) for seed in range(20))
        return [one.answers[0].member for one in found]

    assert drawn("Tea?") == drawn("Tea?") != drawn("Rum?")


def test_a_statement_is_written_from_the_members_own_answers(town: RewardEnsemble) -> None:
    writer = Writer(responses=["Trees? Yes. Plant!"])
    found = answer(town, PROMPT, policies=pens(), writer=writer)
    assert found.distilled is not None
    assert found.distilled.text == "Trees? Yes. Plant!"
    listed = "\n".join(f"- ({entry.share or 0:.0%}) {entry.text}" for entry in found.answers)
    assert listed in str(writer.requests[0][0])


def test_members_without_weight_write_nothing() -> None:
    town = ensemble_of("question marks", "full stops", weights=(1.0, 0.0))
    policies = {0: Writer(responses=["A?"]), 1: Writer(responses=["B."])}
    found: Any = answer(town, PROMPT, policies=policies)
    assert [entry.text for entry in found.answers] == ["A?"]
    assert policies[1].requests == []


def test_equal_answers_of_two_policies_share_one_entry() -> None:
    drafts, voters = Drafts((0, 1), {0: ["Yes."], 1: ["Yes."]}), Voters(np.array([0.6, 0.4]))
    found = choose(AnswerRequest("Tea?"), voters, drafts.pool, np.array([[1.0, 2.0]]), drafts=drafts)
    assert [(entry.text, entry.members) for entry in found.answers] == [("Yes.", (0, 1))]


# --- rankings as choices ----------------------------------------------------------------------------------------------


def rankings_of_member(ensemble: RewardEnsemble, member: int) -> list[dict[str, Any]]:
    """Return rankings by a member on other prompts, and one choice between two responses."""
    rows: list[dict[str, Any]] = []
    for prompt in ("Tea?", "Should the library open on Sundays?", "Cars?", "A new bridge?"):
        rewards = ensemble.rewards([(prompt, text) for text in CANDIDATES])[:, member]
        best, *middle, last = np.argsort(-rewards).tolist()
        rows.append({"prompt": prompt, "responses": CANDIDATES, "ranking": [best, middle[:-1], last]})
    pair = {"response_a": CANDIDATES[last], "response_b": CANDIDATES[best]}
    return [rows[0], {"prompt": "Rum?", **pair, "vote": "b"}, *rows[1:]]


def test_rankings_on_some_prompts_steer_the_answer_to_another(
    ensemble: RewardEnsemble, lines: Path, tmp_path: Path
) -> None:
    ensemble = replace(ensemble, undecided=0.0, choice_model=ChoiceModel(people=0.9, spread=0.0, source="raters"))
    ensemble.save(tmp_path / "ensemble")
    body = {"prompt": PROMPT, "candidates": CANDIDATES, "mode": "steerable"}
    with running(ensemble) as client:
        for member in range(ensemble.k):
            rows = rankings_of_member(ensemble, member)
            found = answer(ensemble, PROMPT, CANDIDATES, "steerable", choices=rows)
            assert found.steering is not None
            before, after = (np.array(found.steering.path[step]) for step in (0, -1))
            assert before == pytest.approx(0.9 * ensemble.weights)
            assert after[member] > 1.1 * before[member]
            assert found.steering.why.startswith("its favourite is yours in 5 of your 5 choices")
            assert found.answers[0].text == favourite_text(ensemble, member)

            (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
            steered = "--mode", "steerable", "--choices", tmp_path / "mine.jsonl", "--json"
            done = run("answer", tmp_path / "ensemble", PROMPT, "--candidates", lines, *steered)
            assert done.returncode == 0, done.stderr
            sent = [{("chosen" if name == "vote" else name): value for name, value in row.items()} for row in rows]
            for other in (json.loads(done.stdout), client.json("/v1/answer", body | {"choices": sent})):
                assert other["answers"][0]["text"] == found.answers[0].text
                assert np.array(other["steering"]["path"]) == pytest.approx(np.array(found.steering.path), abs=1e-6)


@pytest.mark.parametrize(
    ("ranking", "sentence"),
    [([0, 3], r"row 1: ranking 1 is list \[0, 3\], but must name"), ([2], "the ranking names only one response")],
    ids=str,
)
def test_a_bad_ranking_among_choices_is_one_sentence(
    ensemble: RewardEnsemble, ranking: list[int], sentence: str
) -> None:
    ranked = {"prompt": "Tea?", "responses": ["A", "B", "C"], "ranking": ranking}
    with pytest.raises(DataError, match=sentence + r"[^.]*\.$") as error:
        answer(ensemble, PROMPT, CANDIDATES, "steerable", choices=[ranked])
    assert "--skip-bad" not in str(error.value)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("candidates") / "candidates.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT, "responses": CANDIDATES}))
    return path


def test_the_command_prints_what_the_function_gives(town_folder: Path, lines: Path, ensemble: RewardEnsemble) -> None:
    done = run("answer", town_folder, PROMPT, "--candidates", lines, "--json")
    assert done.returncode == 0, done.stderr
    facts, expected = json.loads(done.stdout), answer(ensemble, PROMPT, CANDIDATES, held_out=load_held_out(town_folder))
    assert facts["mode"] == "balanced"
    assert [(one["text"], one["member"]) for one in facts["answers"]] == [(e.text, e.member) for e in expected.answers]
    assert expected.consensus is not None
    assert facts["consensus"]["text"] == expected.consensus.text
    page = run("answer", town_folder, PROMPT, "--candidates", lines)
    for words in ("consensus", "strongest rival", "of people (predicted)"):
        assert words in page.stdout


def test_a_slate_numbers_members_without_a_name_and_says_why_once(small_folder: Path, lines: Path) -> None:
    page = run("answer", small_folder, PROMPT, "--candidates", lines)
    assert page.returncode == 0, page.stderr
    assert re.search(r"Top choice of: (Member 0; Member 1|Member 0|Member 1) ", page.stdout)
    assert page.stdout.count("Members without a name") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "there are no candidates for this prompt; name a file with --candidates"),
        (["--candidates", "nowhere.jsonl"], "there is no such file"),
        (["--model", "/nowhere", "--rule", "maximum"], "no rule 'maximum'; did you mean"),
    ],
    ids=str,
)
def test_bad_usage_prints_one_sentence(town_folder: Path, arguments: list[str], sentence: str) -> None:
    done = run("answer", town_folder, PROMPT, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in done.stderr


def test_a_held_out_question_needs_no_candidates(town_folder: Path, ensemble: RewardEnsemble) -> None:
    held_out = load_held_out(town_folder)
    known = candidates_of(held_out.preferences)[0]
    done = run("answer", town_folder, f"{known.prompt_text}\n", "--json")
    assert done.returncode == 0, done.stderr
    found = answer(ensemble, known.prompt, held_out=held_out)
    assert [one["text"] for one in json.loads(done.stdout)["answers"]] == [one.text for one in found.answers]
    assert found.texts == known.responses
    assert found.unlike == {}
    other = run("answer", town_folder, "Should we plant trees?")
    assert other.returncode == 2
    assert any(str(prompt) in other.stderr for prompt in held_out.preferences.prompts)
