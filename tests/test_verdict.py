"""The headline of an evaluation: its figures are those of the tables, and it claims no more than the votes can tell."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import evaluation_of, run

from pluralign import PreferenceSet, RewardEnsemble, evaluate, fit, inspect, town_hall
from pluralign.core.json_values import to_json
from pluralign.ensemble.record import SINGLE_REWARDS, Compared, Evaluation, FitRecord, JudgmentFigures
from pluralign.ensemble.verdict import headline
from pluralign.learning.fit import fold_of_prompts
from pluralign.measuring.comparison import comparison
from pluralign.theory.calibration import floor_corrected, floor_is_measurable
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval


@pytest.fixture(scope="module")
def evaluation(ensemble: RewardEnsemble) -> Evaluation:
    return evaluation_of(ensemble)


def against(evaluation: Evaluation, **ends: tuple[float, float]) -> Evaluation:
    """Return an evaluation with other differences from baselines; all single rewards differ as soft BT does."""
    singles = dict.fromkeys(SINGLE_REWARDS, ends["soft_bt"]) if "soft_bt" in ends else {}
    changed: dict[str, Compared] = {
        name: replace(evaluation.baselines[name], difference=Interval(sum(pair) / 2, *pair, 0.01))
        for name, pair in {**singles, **ends}.items()
    }
    return replace(evaluation, baselines={**evaluation.baselines, **changed})


AHEAD, LEVEL, BEHIND = (-0.02, -0.01), (-0.01, 0.02), (0.01, 0.02)


@pytest.mark.parametrize(
    ("half", "soft_bt", "standing", "words"),
    [
        (AHEAD, AHEAD, "ahead", "Better than one soft BT reward"),
        (AHEAD, LEVEL, "level", "Not significantly different from one soft BT reward"),
        (AHEAD, BEHIND, "behind", "Worse than one soft BT reward"),
        (LEVEL, AHEAD, "level", "Not significantly different from predicting ½ for every pair"),
        (BEHIND, AHEAD, "behind", "Worse than predicting ½ for every pair"),
    ],
)
def test_the_verdict_is_about_soft_bt_unless_one_half_is_as_good(
    evaluation: Evaluation, half: tuple[float, float], soft_bt: tuple[float, float], standing: str, words: str
) -> None:
    found = headline(against(evaluation, constant_half=half, soft_bt=soft_bt))
    assert found.standing == standing
    assert found.verdict.startswith(words)


@pytest.mark.parametrize(
    ("ends", "standing", "words"),
    [(LEVEL, "level", "Not significantly different from the best"), (BEHIND, "behind", "Worse than the best")],
)
def test_another_reward_may_be_as_good(
    evaluation: Evaluation, ends: tuple[float, float], standing: str, words: str
) -> None:
    changed = against(evaluation, constant_half=AHEAD, soft_bt=AHEAD, damped_bt=ends)
    best = replace(changed.baselines["damped_bt"], brier=0.0)
    found = headline(replace(changed, baselines={**changed.baselines, "damped_bt": best}))
    assert found.standing == standing
    assert found.verdict.startswith("Better than one soft BT reward")
    assert f"{words} single reward (soft BT, damped: " in found.verdict


def test_the_main_figure_is_the_corrected_score_with_its_interval(evaluation: Evaluation) -> None:
    test = evaluation.test
    expected = f"corrected Brier score {test.brier_corrected:.4f} [{test.interval.low:.4f}, {test.interval.high:.4f}]"
    assert expected in headline(evaluation).main


@pytest.mark.parametrize(
    ("options", "level", "soft_bt", "step"),
    [
        ({"encoder": "hashing"}, "policy", BEHIND, "fit with --encoder minilm"),
        ({"encoder": "minilm"}, "policy", BEHIND, "try a larger encoder"),
        ({"encoder": "minilm"}, "vote", BEHIND, "fit with --level policy"),
        ({"encoder": "minilm"}, "vote", AHEAD, "pluralign serve town."),
        ({"encoder": "minilm"}, "vote", LEVEL, "one reward predicts these votes as well"),
    ],
)
def test_the_next_step_depends_on_what_would_help(
    evaluation: Evaluation, options: dict[str, str], level: str, soft_bt: tuple[float, float], step: str
) -> None:
    soft = replace(evaluation.levels["policy"], brier=evaluation.test.brier - 0.001)
    changed = replace(evaluation, level=level, levels={**evaluation.levels, "policy": soft})
    record = FitRecord(options=options)
    assert step in headline(against(changed, constant_half=AHEAD, soft_bt=soft_bt), record, "town").next_step


def test_voices_that_predict_shares_no_better_than_one_reward_are_read_at_the_policy_level(
    evaluation: Evaluation,
) -> None:
    changed = against(evaluation, constant_half=AHEAD, soft_bt=LEVEL)
    for low, words in ((0.1, "fit with --level policy"), (-0.1, "one reward predicts these votes as well")):
        judged = JudgmentFigures(60, 30, -2.0, -3.0, -2.3, Interval(0.3, low, 0.5, 0.1), 5.0)
        record = FitRecord(options={"encoder": "minilm"})
        assert words in headline(replace(changed, judgments=judged), record, "town").next_step


# --- few prompts ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def of_few_prompts() -> RewardEnsemble:
    votes = town_hall(480).preferences
    return fit(votes[votes.prompt_index < 25], k=2, encoder="none", target="mixture")


def test_few_test_prompts_give_no_interval_and_no_verdict(of_few_prompts: RewardEnsemble) -> None:
    found: Any = of_few_prompts.record.evaluation
    assert found.prompts == 8 < ENOUGH_CLUSTERS
    assert math.isnan(found.test.interval.low)
    assert all(math.isnan(rival.difference.high) for rival in found.baselines.values())
    assert [row.interval for row in comparison(found)] == [None] * len(comparison(found))
    first = headline(found, of_few_prompts.record)
    assert first.standing == "unknown"
    assert first.verdict == "No verdict: 8 test prompts, and an interval needs at least 20."
    assert first.next_step == "fit with --folds 5, which tests each of the 25 prompts once."


# --- few votes --------------------------------------------------------------------------------------------------------


def with_votes(n: int) -> PreferenceSet:
    """Return the pairs of a town hall with n votes each, drawn from its true shares."""
    town = town_hall(480)
    drawn = np.random.default_rng(0).binomial(n, town.true_prob)
    return replace(town.preferences, votes_a=drawn, votes_b=n - drawn)


@pytest.mark.parametrize("n", [2, 3])
def test_the_corrected_floor_of_two_or_three_votes_is_an_identity(n: int) -> None:
    votes = with_votes(n)
    assert floor_corrected(votes.prob_a, votes.n_votes) == pytest.approx(0, abs=1e-12)
    assert not floor_is_measurable(votes.n_votes)
    assert math.isnan(inspect(votes).floor_corrected)


def test_the_floor_is_measurable_if_most_pairs_have_four_votes() -> None:
    assert floor_is_measurable([4, 5, 3])
    assert not floor_is_measurable([4, 3])


def test_the_floor_is_no_rival_at_three_votes_per_pair(ensemble: RewardEnsemble) -> None:
    few, many = evaluate(ensemble, with_votes(3), groups=[]), evaluate(ensemble, with_votes(5), groups=[])
    assert "floor" in [row.name for row in comparison(many)]
    assert "floor" not in [row.name for row in comparison(few)]
    assert math.isnan(few.baselines["floor"].brier_corrected)


# --- cross-validation -------------------------------------------------------------------------------------------------


def test_folds_test_every_prompt_once_and_allow_a_verdict(tmp_path: Path) -> None:
    votes = town_hall(480).preferences
    few = votes[votes.prompt_index < 25]
    ensemble = fit(few, k=2, encoder="none", target="mixture", folds=3, folder=tmp_path)
    pooled: Any = ensemble.record.cross_validation
    assert (pooled.prompts, pooled.pairs) == (25, len(few))
    assert not math.isnan(pooled.test.interval.low)
    assert set(pooled.baselines) >= {"floor", "constant_half", "soft_bt"}
    assert headline(pooled, ensemble.record).standing != "unknown"
    saved: Any = RewardEnsemble.load(tmp_path).record.cross_validation
    assert to_json(saved) == to_json(pooled)


def test_a_fold_is_predicted_by_an_ensemble_that_was_fitted_without_it() -> None:
    """Two folds are two fits with an official split; their pooled predictions have the recorded score."""
    votes = town_hall(240).preferences
    options: dict[str, Any] = {"k": 2, "encoder": "none", "target": "mixture"}
    pooled: Any = fit(votes, **options, folds=2).record.cross_validation
    fold = fold_of_prompts(votes, 2)[votes.prompt_index]
    share = np.empty(len(votes))
    for number in (0, 1):
        side = np.where(fold == number, "test", "train").astype(object)
        share[fold == number] = fit(replace(votes, columns={"split": side}), **options).prob_hat(votes[fold == number])
    assert pooled.test.brier == pytest.approx(((share - votes.prob_a) ** 2).mean())


def test_more_folds_than_prompts_are_refused(tmp_path: Path) -> None:
    town_hall(40).preferences.save(tmp_path / "votes.jsonl")
    done = run("fit", tmp_path / "votes.jsonl", "-o", tmp_path / "out", "--encoder", "none", "--folds", "9")
    assert done.returncode == 2
    assert "--folds 9 needs at least 9 prompts" in done.stderr
