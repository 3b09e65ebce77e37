"""Balanced, steerable and distributional answers."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import run
from scipy import stats

from pluralign import PreferenceSet, answer, fit, town_hall
from pluralign.answering.answer import Mode, choose, refuse, score
from pluralign.answering.slate import favourites
from pluralign.answering.steering import ScoredChoices
from pluralign.core.errors import DataError, UsageError
from pluralign.core.types import Level
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import load_held_out
from pluralign.measuring.cards import Profile, member_profiles

PROMPT = "Should the town plant more trees?"
CANDIDATES = [
    "Yes. Trees cool the streets, and children love them; please let us plant them together, dear neighbours!",
    "No.",
    "Perhaps. It may depend on the cost, and I am not sure that we can afford it.",
    "1. Plant ten oaks.\n2. Water them.\n3. Report in June.",
    "The council must plant trees now. There is no doubt about it.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ensemble")
    fit(town_hall(900).preferences, k=4, encoder="none", target="mixture", folder=path, test_fraction=0.4)
    return path


@pytest.fixture(scope="module")
def ensemble(folder: Path) -> RewardEnsemble:
    return RewardEnsemble.load(folder)


@pytest.fixture(scope="module")
def cards(folder: Path, ensemble: RewardEnsemble) -> list[Profile]:
    return member_profiles(ensemble.weights, load_held_out(folder))


def favourite_text(ensemble: RewardEnsemble, member: int) -> str:
    return CANDIDATES[int(ensemble.rewards([(PROMPT, text) for text in CANDIDATES])[:, member].argmax())]


# --- score, then choose -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("balanced", {"rule": "maximin", "slate_size": 2, "cover": "top-two"}),
        ("distributional", {}),
        ("steerable", {"member": 1}),
        ("steerable", {"like": "short answers"}),
        ("steerable", {"choices": True}),
    ],
    ids=str,
)
@pytest.mark.parametrize("level", ["vote", "policy"])
def test_answer_is_score_followed_by_choose(
    ensemble: RewardEnsemble, cards: list[Profile], folder: Path, level: Level, mode: Mode, options: dict[str, Any]
) -> None:
    ensemble, options = replace(ensemble, undecided=0.3), {**options, "level": level}
    texts = [*CANDIDATES, CANDIDATES[0]]
    scored = dict(options)
    if "choices" in options:
        votes = load_held_out(folder).preferences[:5]
        average = ensemble.rewards_and_average([(PROMPT, text) for text in texts])[:, ensemble.k]
        options |= {"choices": votes}
        scored |= {"choices": ScoredChoices.of(ensemble, votes), "average": average}
    rewards = score(ensemble, PROMPT, texts)
    assert rewards.shape == (6, ensemble.k)
    for seed in range(5):
        expected = answer(ensemble, PROMPT, texts, mode, profiles=cards, seed=seed, **options)
        found = choose(
            rewards,
            ensemble.weights,
            texts,
            mode,
            prompt=PROMPT,
            temperature=ensemble.temperature,
            undecided=0.3,
            profiles=cards,
            choice_model=ensemble.choice_model,
            seed=seed,
            **scored,
        )
        assert found == expected


def test_repeated_candidates_are_encoded_once(ensemble: RewardEnsemble) -> None:
    encoded: list[Any] = []

    @dataclass(frozen=True, eq=False)
    class Recording(RewardEnsemble):
        def rewards(self, items: Any, progress: Any = None) -> Any:
            encoded.extend(items)
            return super().rewards(items, progress)

    rewards = score(Recording(**vars(ensemble)), PROMPT, ["Yes.", "No.", "Yes."])
    assert encoded == [(PROMPT, "Yes."), (PROMPT, "No.")]
    assert (rewards[0] == rewards[2]).all()


# --- balanced ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 1, 2])
def test_every_member_stands_behind_its_favourite_entry_of_the_slate(
    ensemble: RewardEnsemble, size: int | None
) -> None:
    found = answer(ensemble, PROMPT, CANDIDATES, slate_size=size)
    rewards = score(ensemble, PROMPT, [entry.text for entry in found.answers])
    for row, entry in enumerate(found.answers):
        assert entry.members == tuple(np.flatnonzero(rewards.argmax(axis=0) == row).tolist())
        assert entry.weight == pytest.approx(sum(ensemble.weights[list(entry.members)]))
    assert sorted(j for entry in found.answers for j in entry.members) == list(range(ensemble.k))
    shares = [entry.share or 0 for entry in found.answers]
    assert shares == sorted(shares, reverse=True)
    assert found.coverage == pytest.approx(sum(shares))
    assert len(found.answers) == (size or len({favourite_text(ensemble, j) for j in range(ensemble.k)}))


def test_a_slate_at_the_vote_level_lists_every_members_favourite(ensemble: RewardEnsemble) -> None:
    found = answer(replace(ensemble, undecided=0.2), PROMPT, CANDIDATES, level="vote")
    for entry in found.answers:
        assert {favourite_text(ensemble, j) for j in entry.members} == {entry.text}
        assert entry.share == pytest.approx(0.2 / 5 + 0.8 * entry.weight)


def test_the_consensus_reports_its_true_support(ensemble: RewardEnsemble) -> None:
    rewards = ensemble.rewards([(PROMPT, text) for text in CANDIDATES])
    ensemble = replace(ensemble, undecided=0.0)
    for rule in ("maximin", "borda", "schulze", "lottery"):
        found = answer(ensemble, PROMPT, CANDIDATES, rule=rule, level="vote").consensus
        assert found is not None
        winner = CANDIDATES.index(found.text)
        against = [
            float((rewards[winner] > rewards[other]) @ ensemble.weights) for other in range(5) if other != winner
        ]
        assert found.least_support == pytest.approx(min(against))
        assert found.mean_support == pytest.approx(np.mean(against))
    best = answer(ensemble, PROMPT, CANDIDATES, rule="maximin", level="vote").consensus
    assert best is not None
    every = [min(float((rewards[a] > rewards[b]) @ ensemble.weights) for b in range(5) if b != a) for a in range(5)]
    assert best.least_support == pytest.approx(max(every))


def test_a_statement_is_used_only_if_its_support_reaches_the_best_candidates(ensemble: RewardEnsemble) -> None:
    instructions: list[str] = []

    def writer(instruction: str, count: int) -> list[str]:
        instructions.append(instruction)
        return [CANDIDATES[0], "", "Nonsense nonsense nonsense", CANDIDATES[0] + " We all agree on that, dear friends!"]

    ensemble = replace(ensemble, undecided=0.0)
    found = answer(ensemble, PROMPT, CANDIDATES, writer=writer, level="vote").distilled
    assert found is not None
    assert found.drafts == 2, "neither a candidate nor an empty text counts as a draft"
    assert PROMPT in instructions[0]
    rewards = ensemble.rewards([(PROMPT, text) for text in [found.text, *CANDIDATES]])
    against = [float((rewards[0] > rewards[i]) @ ensemble.weights) for i in range(1, 6)]
    assert found.least_support == pytest.approx(min(against))
    best = max(
        min(float((rewards[a] > rewards[b]) @ ensemble.weights) for b in range(1, 6) if b != a) for a in range(1, 6)
    )
    assert found.to_reach == pytest.approx(best)
    assert found.used == (found.least_support >= found.to_reach)


def test_if_the_writer_fails_the_consensus_stays_and_a_note_says_why(ensemble: RewardEnsemble) -> None:
    def too_long(instruction: str, count: int) -> list[str]:
        raise DataError("the prompt has 9,000 tokens, but the model reads 512", remedy="shorten it")

    plain = answer(ensemble, PROMPT, CANDIDATES)
    for writer, note in (
        (too_long, "no statement was written: the prompt has 9,000 tokens, but the model reads 512; shorten it"),
        (lambda *_: ["", " ", CANDIDATES[1]], "the writer wrote nothing that is not among the candidates"),
    ):
        found = answer(ensemble, PROMPT, CANDIDATES, writer=writer)
        assert found == replace(plain, notes=(note,))


# --- distributional ---------------------------------------------------------------------------------------------------


def test_members_are_drawn_in_proportion_to_their_weights(ensemble: RewardEnsemble) -> None:
    drawn = [answer(ensemble, f"{PROMPT} {i}", ["Yes."], "distributional").answers[0].member for i in range(600)]
    counts = np.bincount([member for member in drawn if member is not None], minlength=ensemble.k)
    assert stats.chisquare(counts, ensemble.weights * 600).pvalue > 1e-4


def test_drawn_answers_to_a_pair_match_the_predicted_share_of_the_members(ensemble: RewardEnsemble) -> None:
    pair = PreferenceSet.from_columns([PROMPT], [CANDIDATES[0]], [CANDIDATES[2]], [1], [1])
    for level in ("vote", "policy"):
        share = float(replace(ensemble, undecided=0.0).prob_hat(pair, level)[0])
        texts = [CANDIDATES[0], CANDIDATES[2]]
        drawn = [
            answer(ensemble, PROMPT, texts, "distributional", level=level, seed=seed).answers[0].text
            for seed in range(400)
        ]
        assert stats.binomtest(drawn.count(CANDIDATES[0]), 400, share).pvalue > 1e-4


def test_draws_depend_only_on_the_request_and_the_seed(ensemble: RewardEnsemble) -> None:
    first, again = (answer(ensemble, PROMPT, CANDIDATES, "distributional", seed=3) for _ in range(2))
    assert first == again
    drawn = {answer(ensemble, PROMPT, CANDIDATES, "distributional", seed=seed).answers[0].member for seed in range(40)}
    assert len(drawn) > 1


# --- steerable --------------------------------------------------------------------------------------------------------


def test_a_member_is_chosen_by_number(ensemble: RewardEnsemble) -> None:
    found = answer(ensemble, PROMPT, CANDIDATES, "steerable", member=2)
    assert found.answers[0].text == favourite_text(ensemble, 2)
    assert found.steering is not None
    assert found.steering.posterior == (0.0, 0.0, 1.0, 0.0)
    with pytest.raises(UsageError, match="numbered from 0 to 3; there is no member 4"):
        answer(ensemble, PROMPT, CANDIDATES, "steerable", member=4)


def test_a_slate_needs_at_least_one_answer(ensemble: RewardEnsemble) -> None:
    with pytest.raises(UsageError, match="at least one answer; slate_size cannot be 0"):
        answer(ensemble, PROMPT, CANDIDATES, slate_size=0)


def test_steering_needs_exactly_one_argument(ensemble: RewardEnsemble) -> None:
    with pytest.raises(UsageError, match="needs one of"):
        answer(ensemble, PROMPT, CANDIDATES, "steerable")
    with pytest.raises(UsageError, match="mode balanced takes none"):
        answer(ensemble, PROMPT, CANDIDATES, member=1)


# --- odd input --------------------------------------------------------------------------------------------------------


def test_no_single_and_repeated_candidates(ensemble: RewardEnsemble) -> None:
    with pytest.raises(UsageError, match="no candidates"):
        answer(ensemble, PROMPT, [])
    one = answer(ensemble, PROMPT, ["Yes.", "Yes."])
    assert [entry.text for entry in one.answers] == ["Yes."]
    assert one.answers[0].weight == pytest.approx(1)
    assert one.consensus is not None
    assert len(one.notes) == 2


def test_equal_rewards_are_broken_at_random() -> None:
    rewards = np.array([[1.0], [1.0], [0.0]])
    picked = np.bincount([int(favourites(rewards, np.random.default_rng(seed))[0]) for seed in range(200)], minlength=3)
    assert picked[2] == 0
    assert min(picked[:2]) > 60


def test_equal_rewards_give_half_support_and_a_random_pick(ensemble: RewardEnsemble) -> None:
    alike = ["Tea is fine.", "Rum is fine."]  # identical in every feature of this ensemble
    assert np.ptp(ensemble.rewards([(PROMPT, text) for text in alike]), axis=0) == pytest.approx(0)
    found = answer(ensemble, PROMPT, alike).consensus
    assert found is not None
    assert (found.least_support, found.mean_support, found.favourite_of) == pytest.approx((0.5, 0.5, 0.5))
    for mode, member in (("distributional", None), ("steerable", 1)):
        picked = [answer(ensemble, PROMPT, alike, mode, member=member, seed=seed).answers[0].text for seed in range(60)]
        assert 15 < picked.count(alike[0]) < 45


def test_a_refusal_policy_runs_before_any_mode(ensemble: RewardEnsemble) -> None:
    for mode in ("balanced", "distributional"):
        found = answer(ensemble, PROMPT, [], mode, refusal=lambda _: "We do not speak of trees.")
        assert found.refused
        assert found == refuse("We do not speak of trees.", mode)
        assert found.answers[0].text == "We do not speak of trees."
    assert not answer(ensemble, PROMPT, CANDIDATES, refusal=lambda _: None).refused


def test_an_unknown_mode_raises_an_error_that_suggests_the_nearest(ensemble: RewardEnsemble) -> None:
    with pytest.raises(UsageError, match="did you mean 'balanced'"):
        answer(ensemble, PROMPT, CANDIDATES, "balance")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("candidates") / "candidates.jsonl"
    path.write_text(json.dumps({"prompt": PROMPT, "responses": CANDIDATES}))
    return path


def test_the_command_prints_the_result_of_the_function(folder: Path, lines: Path, ensemble: RewardEnsemble) -> None:
    done = run("answer", folder, PROMPT, "--candidates", lines, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    expected = answer(ensemble, PROMPT, CANDIDATES)
    assert facts["mode"] == "balanced"
    assert [(one["text"], one["member"]) for one in facts["answers"]] == [
        (entry.text, entry.member) for entry in expected.answers
    ]
    assert expected.consensus is not None
    assert facts["consensus"]["text"] == expected.consensus.text
    page = run("answer", folder, PROMPT, "--candidates", lines)
    for words in ("of the weight", "consensus", "strongest rival", "of people (predicted)"):
        assert words in page.stdout


def test_a_slate_calls_members_without_a_name_by_their_number_and_says_why_once(
    small_folder: Path, lines: Path
) -> None:
    page = run("answer", small_folder, PROMPT, "--candidates", lines)
    assert page.returncode == 0, page.stderr
    assert re.search(r"of the weight · (Member 0; Member 1|Member 0|Member 1) ", page.stdout)
    assert page.stdout.count("Members without a name") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "name candidates to choose from"),
        (["--candidates", "nowhere.jsonl"], "there is no such file"),
        (["--candidates", "LINES", "--mode", "steerable"], "needs one of"),
        (["--candidates", "LINES", "--rule", "plurality"], "there is no rule 'plurality'"),
        (["--candidates", "LINES", "--cover", "top two"], "there is no cover 'top two'; did you mean 'top-two'"),
        (["--candidates", "LINES", "--level", "votes"], "there is no level 'votes'"),
        (["--candidates", "LINES", "--mode", "distributional", "--slate-size", "2"], "slate_size requires"),
        (["--candidates", "LINES", "--mode", "steerable", "--like", "purple"], "nothing in 'purple'"),
    ],
    ids=str,
)
def test_bad_usage_prints_one_sentence(folder: Path, lines: Path, arguments: list[str], sentence: str) -> None:
    done = run("answer", folder, PROMPT, *[str(lines) if word == "LINES" else word for word in arguments])
    assert done.returncode == 2
    assert done.stdout == ""
    assert sentence in done.stderr


def test_an_unknown_rule_raises_an_error_before_anything_is_sampled(town_folder: Path) -> None:
    done = run("answer", town_folder, "Trees?", "--model", "/nowhere", "--rule", "maximum")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no rule 'maximum'; did you mean" in done.stderr.lower()
