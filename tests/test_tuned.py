"""Ensembles on fine-tuned models: losses, members as a head, the comparison with frozen, and early stopping."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import camp_votes, ranked_camps

from pluralign import DataError, FinetuneOptions, FitOptions, RewardEnsemble, fit, load_preferences, load_rater_votes
from pluralign.core.checkpoints import Checkpoints
from pluralign.ensemble.members import LinearMembers, fit_feature_map, spanned_axes, without_clipping
from pluralign.ensemble.record import EncoderChoice
from pluralign.learning import tuned
from pluralign.learning.backbone.losses import JudgedLessons, RunningFigures, VoteLoss
from pluralign.learning.backbone.recipe import MicroBatch
from pluralign.learning.backbone.train import StepCallback
from pluralign.learning.task import FitWatcher
from pluralign.learning.tuned import TunedTask, choose_stages, sizes_on_validation, stopped_improving, validation_rows
from pluralign.publishing.tables import encoder_table
from pluralign.text.encoders import TextFeatures
from pluralign.votes.preferences import PreferenceSet, texts_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")
QUICK: dict[str, Any] = {"k": 2, "optimizer": "adamw", "learning_rate": 5e-3, "batch_size": 32, "epochs": 1}


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> PreferenceSet:
    return camp_votes(tmp_path_factory.mktemp("votes"), 200)


def test_members_that_learn_from_votes_find_camps_that_a_single_reward_hides() -> None:
    """Half of the people count tea, half count rum: no single reward predicts the shares."""
    rng = np.random.default_rng(0)
    counts = rng.integers(-3, 4, size=(2000, 2))
    prob_a = torch.tensor((0.5 + 0.5 * np.sign(counts)).mean(axis=1)).float()
    features = torch.tensor(np.hstack([counts, rng.standard_normal((2000, 4))])).float()
    torch.manual_seed(0)
    theta = torch.nn.Parameter(0.1 * torch.randn(features.shape[1], 5))  # four members, and one reward
    optimizer, running, loss = torch.optim.Adam([theta], lr=0.05), RunningFigures(), VoteLoss(4)
    for step in range(300):
        difference = features @ theta
        running.add(difference.detach(), prob_a)
        optimizer.zero_grad()
        loss(difference, {"prob_a": prob_a}, running, step / 300).backward()
        optimizer.step()
        running.end_step(lambda sums: sums)
    votes = 0.5 + 0.5 * torch.sign(features @ theta.detach())
    members, one_reward = ((share - prob_a).square().mean() for share in (votes[:, :4].mean(1), votes[:, 4]))
    assert members < 0.2 * one_reward


def test_members_are_a_linear_head_on_the_states() -> None:
    rng = np.random.default_rng(1)
    states, directions = rng.standard_normal((50, 6)).astype(np.float32) * 3 + 2, rng.standard_normal((6, 2))
    inputs = without_clipping(fit_feature_map(states, 0))
    members = LinearMembers(inputs, rng.standard_normal((6, 3)))
    np.testing.assert_allclose(members.rewards(states), states @ members.head(), atol=1e-4)
    axes = spanned_axes(inputs, directions)
    within = LinearMembers(replace(inputs, axes=axes), rng.standard_normal((2, 3)))
    np.testing.assert_allclose(within.rewards(states), states @ within.head(), atol=1e-4)
    _, rest, *_ = np.linalg.lstsq(directions, within.head(), rcond=None)
    np.testing.assert_allclose(rest, 0, atol=1e-8)


@pytest.mark.slow
def test_frozen_ensemble_is_used_and_reported_if_tuning_makes_it_worse(llama: Path, tmp_path: Path) -> None:
    votes = camp_votes(tmp_path, 250)
    ensemble = fit(votes, folder=tmp_path / "worse", backbone=str(llama), **QUICK | {"learning_rate": 1.0})
    record: Any = ensemble.record
    choice = record.encoders
    assert choice.used == "frozen"
    assert choice.validation_frozen < min(choice.validation_tuned, choice.outputs.validation)
    assert record.evaluation.test.brier_corrected == pytest.approx(choice.test_frozen)
    assert isinstance(ensemble.features, TextFeatures)
    assert not list((tmp_path / "worse").glob("backbone*"))
    assert choice.why.startswith("training did not clearly help")


@pytest.mark.slow
def test_tuned_model_is_kept_with_a_note_if_the_frozen_one_cannot_be_read(
    votes: PreferenceSet, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise DataError("it cannot be read", file="llama", remedy="copy it again")

    monkeypatch.setattr(tuned, "encoded_texts", fails)
    ensemble = fit(votes, folder=tmp_path / "town", backbone=str(llama), **QUICK)
    assert (ensemble.record.notes or [""])[-1].startswith("the frozen model was not compared: llama: it cannot be read")
    assert (tmp_path / "town" / "backbone").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("raters", [False, True])
def test_rankings_train_the_backbone_and_the_members(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raters: bool
) -> None:
    """Training starts from the mixture on the base model's states, and whole judgments become more likely."""
    rows, options = ranked_camps(80), QUICK | {"epochs": 8, "batch_size": 40, "compare_frozen": False}
    options["learning_rate"] = 2e-4
    votes: Any = load_rater_votes(rows, "person") if raters else load_preferences(rows)
    losses, lessons, loss = list[float](), list[JudgedLessons](), JudgedLessons.loss

    def look(self: JudgedLessons, rewards: Any, batch: MicroBatch, *rest: Any) -> Any:
        found = loss(self, rewards, batch, *rest)
        losses.append(batch.scale * float(found.detach()))
        lessons.append(self)
        return found

    monkeypatch.setattr(JudgedLessons, "loss", look)
    ensemble = fit(votes, folder=tmp_path / "town", backbone=str(llama), **options)
    record: Any = ensemble.record
    assert record.target == ("raters" if raters else "judgments")
    assert record.encoders.judgments
    assert ensemble.features.to_json()["outputs"] == 2, "an output per member"
    judged, steps = lessons[0].judgments, record.tuning["steps"]
    assert steps == round(8 * judged.n / 40), "a step has 40 judgments"
    assert (lessons[0].posterior is not None) == judged.linked == raters
    epochs = np.mean(np.reshape(losses[: len(losses) // 8 * 8], (8, -1)), axis=1)
    assert epochs[0] < np.log(24) / 3, "better than any order from the start"
    assert epochs[-1] < epochs[0] - 0.02


@pytest.mark.slow
def test_a_fresh_head_learns_from_counts_with_a_note(llama: Path, tmp_path: Path) -> None:
    votes, options = load_preferences(ranked_camps(40)), QUICK | {"fresh_head": True, "compare_frozen": False}
    record = fit(votes, folder=tmp_path / "town", backbone=str(llama), **options).record
    assert record.target == "judgments"
    assert any("a fresh head learns from vote counts" in note for note in record.notes or [])


def test_trained_and_frozen_features_are_compared_in_a_table() -> None:
    choice = EncoderChoice("tuned", 0.0568, 0.0584, 0.0246, 0.0268, -0.0022, -0.003, -0.0014)
    frozen, trained = encoder_table(choice).lines
    assert frozen == ["frozen", "0.0584", "0.0268", ""]
    assert trained == ["trained", "0.0568", "0.0246", "[−0.0030, −0.0014]"]


# --- early stopping over the stages


def rewards(votes: PreferenceSet, *words: str) -> Any:
    """Return the rewards of members that like one word each; a member of an unknown word is a fixed random one."""
    responses = [response for _, response in texts_of(votes)]
    noise = np.random.default_rng(5).normal(size=len(responses))
    known = [np.array([float(word in response.split()) for response in responses]) for word in words]
    return np.column_stack([liked + (0 if liked.any() else noise) for liked in known]).astype(np.float32)


@pytest.mark.parametrize(("errors", "stopped"), [
    ([0.3], False), ([0.3, 0.2, 0.1], False), ([0.1, 0.2], False), ([0.1, 0.2, 0.3], True), ([0.1, 0.2, 0.05], False),
    ([0.2, 0.1, 0.1, 0.1], True),
])  # fmt: skip
def test_training_stops_two_stages_after_the_lowest_error(errors: list[float], stopped: bool) -> None:
    assert stopped_improving(errors) is stopped


def task_of(votes: PreferenceSet) -> TunedTask:
    options = FitOptions(method="stagewise", k="auto")
    return TunedTask(votes, options, FinetuneOptions(backbone="x"), Checkpoints(None, {}), FitWatcher())


def test_training_stops_once_both_camps_have_a_member(votes: PreferenceSet) -> None:
    task, outputs = task_of(votes), rewards(votes, "tea", "rum", "?", "?")
    errors = [sizes_on_validation(task, outputs[:, :j])[1] for j in range(1, 5)]
    assert [stopped_improving(one) for one in errors] == [False, False, False, True]
    for stages, reason in ((4, "score has not improved for 2 stages: 0."), (2, "2 stages are the most that --k auto")):
        k, stopped = choose_stages(task, outputs[:, :stages])
        assert k == 2
        assert reason in stopped


def test_test_votes_do_not_change_the_choice(votes: PreferenceSet) -> None:
    outputs, test = rewards(votes, "tea", "rum", "?", "?"), task_of(votes).test_rows
    assert test.any()
    a, b = votes.votes_a, votes.votes_b
    swapped = replace(votes, votes_a=np.where(test, b, a), votes_b=np.where(test, a, b))
    assert choose_stages(task_of(swapped), outputs) == choose_stages(task_of(votes), outputs)


def test_validation_prompts_are_not_trained_on() -> None:
    prompt = np.repeat(np.arange(50), 3).astype(np.int32)
    test_rows = prompt >= 40
    rows = validation_rows(prompt, test_rows, seed=0)
    assert len(np.unique(prompt[rows])) == 4
    assert not (rows & test_rows).any()
    assert not np.isin(prompt[~rows], prompt[rows]).any()


@pytest.mark.slow
def test_auto_trains_no_stage_after_the_stop_and_resumes_without_training_again(
    tmp_path: Path, votes: PreferenceSet, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuned, "stopped_improving", lambda errors: len(errors) == 3)
    folder, options = tmp_path / "town", QUICK | {"method": "stagewise", "k": "auto", "epochs": 4}
    trained: list[str] = []
    end, broken = StepCallback.on_step_end, "training-member-2"

    def counts(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
        trained.append(Path(args.output_dir).name)
        if trained[-1] == broken:
            raise KeyboardInterrupt
        end(self, args, state, control, **rest)

    monkeypatch.setattr(StepCallback, "on_step_end", counts)
    with pytest.raises(KeyboardInterrupt):
        fit(votes, folder=folder, backbone=str(llama), **options)
    assert set(trained) == {"training-member-0", "training-member-1", "training-member-2"}
    trained.clear()
    broken = ""
    ensemble = fit(votes, folder=folder, backbone=str(llama), **options)
    assert set(trained) == {"training-member-2"}

    record: Any = ensemble.record
    assert (ensemble.k, record.k, record.tuning["stages"]) == (2, 2, 3)
    assert [row.k for row in record.history] == [1, 2, 3]
    assert record.kept == record.history[1]
    assert record.evaluation.test.brier == pytest.approx(record.history[1].test_brier)
    assert record.history[1].test_brier < 0.5 * record.history[0].test_brier
    assert max(member.disagreement for member in record.evaluation.members) < 0.5
    assert len(record.seconds_members or []) == 3
    assert sorted(path.name for path in (folder / "backbone").iterdir()) == ["member-0", "member-1"]
    loaded = RewardEnsemble.load(folder)
    np.testing.assert_array_equal(loaded.prob_hat(votes, "vote"), ensemble.prob_hat(votes, "vote"))
