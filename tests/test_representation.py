"""How well individuals are represented: against plain loops, on raters whose preferences are known."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import WriteLines, run
from town_raters import town_raters, town_representation

from pluralign import DataError, RewardEnsemble, UsageError, evaluate, town_hall
from pluralign.ensemble.folder import REPRESENTATION_FILE
from pluralign.ensemble.held_out import load_held_out
from pluralign.ensemble.record import hash_prompts
from pluralign.learning.pairs import Differences
from pluralign.measuring import individuals
from pluralign.measuring.comparison import representation_notes, representation_verdicts
from pluralign.theory.posterior import FACTORS, ChoiceModel, person_chances
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.raters import RaterVotes, town_hall_votes

K, N_PROMPTS, PER_PROMPT, N_RATERS = 3, 12, 4, 30
WEIGHTS = np.array([0.5, 0.3, 0.2])
PEOPLE = ChoiceModel(people=0.9, spread=0.0)


def known_raters(seed: int = 0) -> tuple[individuals.PairPredictions, RaterVotes]:
    """Return raters who each vote on every pair as one of three members does."""
    random = np.random.default_rng(seed)
    n = N_PROMPTS * PER_PROMPT
    difference = random.normal(size=(n, K))
    taste = random.integers(K, size=N_RATERS)
    chose_a = (difference[:, taste] > 0).astype(float)  # (n, n_raters)
    preferences = PreferenceSet.from_columns(
        [f"prompt {i // PER_PROMPT}" for i in range(n)],
        [f"a{i}" for i in range(n)],
        [f"b{i}" for i in range(n)],
        chose_a.sum(axis=1).astype(int),
        (1 - chose_a).sum(axis=1).astype(int),
    )
    pair, rater = (index.ravel().astype(np.int32) for index in np.indices((n, N_RATERS)))
    items = preferences.items()
    inputs = np.zeros((len(items.prompt_index), K))
    inputs[items.a] = difference
    sharp = 1 / (1 + np.exp(-difference / 0.05))
    predictors = individuals.PairPredictions(
        vote=sharp,
        chance=person_chances(difference, None, WEIGHTS, 0.05, 0.0, PEOPLE),
        prior=PEOPLE.prior(WEIGHTS),
        weights=WEIGHTS,
        soft_bt=preferences.prob_a,
        pairs=Differences(inputs, items.a, items.b),
    )
    return predictors, RaterVotes(preferences, pair, rater, chose_a.ravel())


EVERY = np.ones(N_PROMPTS, dtype=bool)


def test_choices_find_the_member_that_a_rater_follows() -> None:
    rows = individuals.score_raters(*known_raters(), EVERY)
    assert list(rows) == [0, 1, 3, 5, 10, 20, individuals.ALL]
    found = [float(row.accuracy["posterior"].mean()) for row in rows.values()]
    assert found[0] == pytest.approx(rows[0].accuracy["prior"].mean())
    assert found[-1] > 0.97 > found[0] + 0.05
    assert rows[individuals.ALL].accuracy["member"].mean() > 0.97
    assert rows[individuals.ALL].log_loss["posterior"].mean() < rows[individuals.ALL].log_loss["soft_bt"].mean()


def test_a_rater_s_own_reward_learns_from_choices() -> None:
    rows = individuals.score_raters(*known_raters(), EVERY)
    np.testing.assert_array_equal(rows[0].accuracy["own"], 0.5)
    np.testing.assert_allclose(rows[0].log_loss["own"], math.log(2))
    assert rows[individuals.ALL].accuracy["own"][:, -1].mean() > 0.8


def test_predictions_do_not_see_votes_on_the_same_prompt() -> None:
    predictors, votes = known_raters()
    measured = np.arange(N_PROMPTS) == 3
    # each vote twice, so that one prompt has enough of them
    pair, rater, chose_a = np.tile(votes.pair, 2), np.tile(votes.rater, 2), np.tile(votes.chose_a, 2)
    twice = RaterVotes(votes.preferences, pair, rater, chose_a)
    flipped = replace(twice, chose_a=np.where(twice.prompt == 3, 1 - twice.chose_a, twice.chose_a))
    first, second = (
        individuals.score_raters(predictors, twice, measured),
        individuals.score_raters(predictors, flipped, measured),
    )
    for m in (0, 5, individuals.ALL):
        for name in ("posterior", "own", "soft_bt"):
            np.testing.assert_allclose(first[m].accuracy[name], 1 - second[m].accuracy[name])


def test_a_row_has_the_raters_with_enough_choices() -> None:
    predictors, votes = known_raters()
    n_votes = np.bincount(votes.rater)
    # rater 0 keeps the votes on two prompts, rater 1 on one, rater 2 three votes
    prompt = votes.prompt
    kept = ~((votes.rater == 0) & (prompt > 1)) & ~((votes.rater == 1) & (prompt > 0))
    kept &= ~((votes.rater == 2) & (votes.pair > 2))
    fewer = RaterVotes(votes.preferences, votes.pair[kept], votes.rater[kept], votes.chose_a[kept])
    assert individuals.qualified_raters(fewer, EVERY, seed=0).tolist() == [0, *range(3, N_RATERS)]
    rows = individuals.score_raters(predictors, fewer, EVERY)
    assert len(rows[3].votes) == N_RATERS - 2  # rater 0 has 4 choices for each prompt
    assert len(rows[5].votes) == N_RATERS - 3
    assert len(rows[individuals.ALL].votes) == N_RATERS - 2
    assert rows[5].votes.sum() == n_votes[3:].sum()
    assert rows[individuals.ALL].choices.min() == PER_PROMPT
    assert individuals.MIN_VOTES > 3


# --- a fitted ensemble ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def votes() -> RaterVotes:
    return town_raters()


@pytest.fixture(scope="module")
def found(town_folder: Path, ensemble: RewardEnsemble, votes: RaterVotes) -> individuals.Representation:
    return town_representation(ensemble, votes)


def test_one_held_out_prompt_against_plain_loops(town_folder: Path, ensemble: RewardEnsemble) -> None:
    hall = town_hall(480)
    keys = sorted(load_held_out(town_folder).preferences.prompts)[:1]
    others = hash_prompts(prompt for prompt in hall.preferences.prompts if prompt != keys[0])
    votes = RaterVotes(
        hall.preferences,
        np.tile(np.arange(480, dtype=np.int32), 4),
        np.repeat(np.arange(4, dtype=np.int32), 480),
        hall.annotator_votes(range(4)).T.ravel(),
    )
    found = individuals.represent(ensemble, votes, ensemble.features(texts_of(hall.preferences)), others, choices=(0,))
    predicted = [i for i in range(480) if hall.preferences.prompts[hall.preferences.prompt_index[i]] == keys[0]]
    reward_a, reward_b = ensemble.pair_rewards(hall.preferences)
    rewards = ensemble.rewards_and_average(texts_of(hall.preferences))[:, -1]
    items = hall.preferences.items()
    average = rewards[items.a] - rewards[items.b]
    u, beta, model = ensemble.undecided, ensemble.temperature, ensemble.choice_model
    accuracies, losses, best = [], [], []

    def chance(i: int, h: int, factor: float) -> float:
        z = average[i] if h == ensemble.k else (reward_a[i, h] - reward_b[i, h]) / beta
        s = 1 - (1 - model.slip) * (1 - (0 if h == ensemble.k else u))
        return s / 2 + (1 - s) / (1 + math.exp(-z / factor))

    kinds = [(h, factor) for h in range(ensemble.k + 1) for factor in FACTORS]
    shares = [*(model.people * ensemble.weights), 1 - model.people]
    prior = [math.log(shares[h] * model.factor_prior[list(FACTORS).index(factor)]) for h, factor in kinds]
    for person in range(4):
        y = hall.annotator_votes(person)[:, 0]
        log_posterior = np.array(prior)
        for i in set(range(480)) - set(predicted):
            q = np.array([chance(i, *kind) for kind in kinds])
            log_posterior += np.log(q if y[i] else 1 - q)
        posterior = np.exp(log_posterior - log_posterior.max())
        posterior /= posterior.sum()
        p = [posterior @ [chance(i, *kind) for kind in kinds] for i in predicted]
        accuracies.append(np.mean([(q > 0.5) == y[i] for q, i in zip(p, predicted, strict=True)]))
        losses.append(-np.mean([math.log(q if y[i] else 1 - q) for q, i in zip(p, predicted, strict=True)]))
        best.append(max(np.mean((reward_a > reward_b)[predicted] == y[predicted, None], axis=0)))
    last = found.rows[-1]
    assert (last.choices, last.raters, last.votes) == (None, 4, 4 * len(predicted))
    assert last.mean_choices == 480 - len(predicted)
    assert last.predictors["posterior"].accuracy.mean == pytest.approx(np.mean(accuracies))
    assert last.predictors["posterior"].log_loss.mean == pytest.approx(np.mean(losses))
    assert last.predictors["hindsight"].accuracy.mean == pytest.approx(np.mean(best))
    assert math.isnan(last.predictors["posterior"].accuracy.low), f"4 raters are fewer than {individuals.MIN_RATERS}"


def test_votes_are_predicted_on_held_out_prompts_only(found: individuals.Representation, town_folder: Path) -> None:
    assert found.held_out
    assert found.prompts == len(load_held_out(town_folder).preferences.prompts)
    assert "held-out prompts" in " ".join(representation_notes(found))


def test_unknown_prompts_are_all_predicted_and_the_notes_say_so(ensemble: RewardEnsemble, votes: RaterVotes) -> None:
    features = ensemble.features(texts_of(votes.preferences))
    found = individuals.represent(ensemble, votes, features, None, choices=(0, 5))
    assert not found.held_out
    assert found.prompts == len(votes.preferences.prompts)
    assert "may have been trained on these prompts" in " ".join(representation_notes(found))


def test_differences_are_paired_with_soft_bt_on_the_same_raters(found: individuals.Representation) -> None:
    for row in found.rows:
        ours, soft_bt = row.predictors["posterior"], row.predictors["soft_bt"]
        assert ours.accuracy_difference.mean == pytest.approx(ours.accuracy.mean - soft_bt.accuracy.mean)
        assert ours.log_loss_difference.mean == pytest.approx(ours.log_loss.mean - soft_bt.log_loss.mean)
        assert row.log_loss_gain.mean == pytest.approx(ours.log_loss.mean - row.predictors["prior"].log_loss.mean)
        assert soft_bt.log_loss_difference.mean == 0
        assert ours.accuracy.low < ours.accuracy.mean < ours.accuracy.high


def test_the_prior_variance_of_a_rater_is_chosen_on_other_raters() -> None:
    log_loss = np.tile([1.0, 0.9, 0.8, 0.9, 1.0], (20, 1))
    log_loss[7] = [0.0, 5.0, 5.0, 5.0, 5.0]  # this rater alone would choose the first
    assert individuals.chosen_variances(log_loss)[7] == 2


def test_few_raters_have_no_interval() -> None:
    assert math.isnan(individuals.over_raters(np.arange(individuals.MIN_RATERS - 1.0)).low)
    interval = individuals.over_raters(np.arange(float(individuals.MIN_RATERS)))
    assert interval.low < interval.mean < interval.high


def test_raters_with_too_few_votes_are_refused(ensemble: RewardEnsemble) -> None:
    votes = town_hall_votes(town_hall(16))
    with pytest.raises(DataError, match="no rater has votes on two prompts and at least 5 votes"):
        individuals.represent(ensemble, votes, ensemble.features(texts_of(votes.preferences)))


def test_an_ensemble_without_baselines_is_refused(ensemble: RewardEnsemble, votes: RaterVotes) -> None:
    bare = replace(ensemble, record=replace(ensemble.record, baseline_formulas={}))
    with pytest.raises(UsageError, match="the soft BT baseline, and this ensemble has none"):
        individuals.represent(bare, votes, ensemble.features(texts_of(votes.preferences)))


def test_verdicts_name_the_direction(found: individuals.Representation) -> None:
    row = found.rows[-2]
    assert row.choices == 20

    def with_gain(low: float, high: float) -> individuals.Representation:
        gain = replace(row.log_loss_gain, low=low, high=high)
        return replace(found, rows=[replace(row, log_loss_gain=gain)])

    first = [next(representation_verdicts(with_gain(*ends))) for ends in ((0.1, 0.2), (-0.2, -0.1), (-0.1, 0.1))]
    assert [verdict.kind for verdict in first] == ["behind", "good", "level"]
    assert first[0].text.startswith("20 choices by a rater worsen the predictions")
    few = replace(found, rows=[replace(one, raters=3) for one in found.rows])
    assert "Fewer than 10 raters" in next(representation_verdicts(few)).text


# --- on disk and on the command line ----------------------------------------------------------------------------------


def test_figures_are_read_back_until_the_ensemble_changes(
    town_folder: Path, tmp_path: Path, ensemble: RewardEnsemble, found: individuals.Representation
) -> None:
    folder = tmp_path / "ensemble"
    shutil.copytree(town_folder, folder)
    assert individuals.load_representation(folder) is None
    individuals.save_representation(found, folder)
    assert individuals.load_representation(folder) == found
    replace(ensemble, weights=ensemble.weights[::-1].copy()).save(folder)
    assert individuals.load_representation(folder) is None
    (folder / REPRESENTATION_FILE).write_text("[]")
    with pytest.raises(DataError, match=r"representation\.json: it cannot be read; run pluralign evaluate --raters"):
        individuals.load_representation(folder)


def records(votes: RaterVotes) -> list[dict[str, Any]]:
    of = votes.preferences
    return [
        {
            "prompt": of.prompts[of.prompt_index[pair]],
            "response_a": of.responses[of.a_index[pair]],
            "response_b": of.responses[of.b_index[pair]],
            "vote": "a" if chose else "b",
            "worker": f"secret-{rater}",
        }
        for pair, rater, chose in zip(votes.pair, votes.rater, votes.chose_a, strict=True)
    ]


def test_evaluate_measures_and_saves_representation(
    write_jsonl: WriteLines, town_folder: Path, tmp_path: Path, votes: RaterVotes
) -> None:
    folder = tmp_path / "ensemble"
    shutil.copytree(town_folder, folder)
    data = str(write_jsonl(records(votes)))
    words = ["evaluate", str(folder), data, "--raters", "worker", "--min-votes", "1"]
    result = json.loads(run(*words, "--json").stdout)
    rows = result["representation"]["rows"]
    assert [row["choices"] for row in rows] == [0, 1, 3, 5, 10, 20, None]
    assert set(rows[0]["predictors"]) == {
        "posterior", "prior", "member", "ensemble", "soft_bt", "own", "hindsight"
    }  # fmt: skip
    saved = (folder / REPRESENTATION_FILE).read_text()
    assert json.loads(saved)["rows"] == rows
    assert "secret" not in saved + json.dumps(result)
    shown = run(*words).stdout
    assert "How well individuals are represented" in shown
    assert "secret" not in shown


def test_the_counted_votes_must_be_those_of_the_raters(ensemble: RewardEnsemble, votes: RaterVotes) -> None:
    with pytest.raises(UsageError, match=r"preferences must be raters\.preferences"):
        evaluate(ensemble, votes.preferences[:10], raters=votes)
