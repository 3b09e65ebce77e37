"""Joint ensembles on fine-tuned models: losses that see camps, members as a head, and the comparison with frozen."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import two_camps, write_backbone

from pluralign.cli.render.fit import encoder_sentence
from pluralign.core.errors import DataError
from pluralign.ensemble.members import LinearMembers, fit_feature_map, spanned_axes, without_clipping
from pluralign.learning import tuned as tuned_model
from pluralign.learning.backbone.losses import RunningFigures, VoteLoss
from pluralign.learning.fit import fit
from pluralign.text.features import TextFeatures
from pluralign.votes.load import load_preferences
from pluralign.votes.preferences import PreferenceSet

pytestmark = pytest.mark.usefixtures("one_torch_thread")
QUICK: dict[str, Any] = {
    "k": 2, "optimizer": "adamw", "learning_rate": 5e-3, "batch_size": 32, "micro_batch": 32, "epochs": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def votes(tmp_path_factory: pytest.TempPathFactory) -> PreferenceSet:
    path = tmp_path_factory.mktemp("votes") / "camps.jsonl"
    path.write_text("\n".join(map(json.dumps, two_camps(150))))
    return load_preferences(str(path))


def teacher_loss(difference: Any, labels: Any, running: RunningFigures, done: float) -> Any:
    """The loss of earlier versions: members learn .7 from the reward in the last output, and .3 from the votes."""
    prob_a, k = labels["prob_a"], difference.shape[1] - 1
    members, reward = difference[:, :k], difference[:, k:]
    taught = 0.7 * torch.sigmoid(reward[:, 0]).detach() + 0.3 * prob_a
    error = VoteLoss(k)(torch.hstack([members, reward.detach()]), {"prob_a": taught}, running, done)
    return error + torch.nn.functional.binary_cross_entropy_with_logits(reward[:, 0], prob_a)


def train(loss: Any, features: Any, prob_a: Any, steps: int = 300) -> Any:
    """Return four rewards and one more, linear in the features, trained by a loss."""
    torch.manual_seed(0)
    theta = torch.nn.Parameter(0.1 * torch.randn(features.shape[1], 5))
    optimizer, running = torch.optim.Adam([theta], lr=0.05), RunningFigures()
    for step in range(steps):
        difference = features @ theta
        running.add(difference.detach(), prob_a)
        optimizer.zero_grad()
        loss(difference, {"prob_a": prob_a}, running, step / steps).backward()
        optimizer.step()
        running.end_step(lambda sums: sums)
    return theta.detach()


def test_members_that_learn_from_votes_find_camps_that_a_single_reward_hides() -> None:
    """Half of the people count tea, half count rum: no single reward predicts the shares."""
    rng = np.random.default_rng(0)
    counts = rng.integers(-3, 4, size=(2000, 2))
    prob_a = torch.tensor((0.5 + 0.5 * np.sign(counts)).mean(axis=1)).float()
    features = torch.tensor(np.hstack([counts, rng.standard_normal((2000, 4))])).float()
    errors = {}
    for name, loss in (("votes", VoteLoss(4)), ("teacher", teacher_loss)):
        votes = 0.5 + 0.5 * torch.sign(features @ train(loss, features, prob_a)[:, :4])
        errors[name] = float(((votes.mean(1) - prob_a) ** 2).mean())
    assert errors["votes"] < 0.5 * errors["teacher"]


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
def test_frozen_ensemble_is_used_and_reported_if_tuning_makes_it_worse(votes: PreferenceSet, tmp_path: Path) -> None:
    llama = write_backbone(tmp_path / "llama")
    ensemble = fit(votes, folder=tmp_path / "worse", backbone=str(llama), **QUICK | {"learning_rate": 1.0})
    choice = ensemble.record.encoders
    assert choice is not None
    assert choice.used == "frozen"
    assert choice.validation_frozen is not None
    assert choice.outputs is not None
    assert choice.validation_frozen < min(choice.validation_tuned, choice.outputs.validation)
    assert ensemble.record.evaluation is not None
    assert ensemble.record.evaluation.test.brier_corrected == pytest.approx(choice.test_frozen)
    assert isinstance(ensemble.features, TextFeatures)
    assert not list((tmp_path / "worse").glob("backbone*"))
    assert encoder_sentence(choice).startswith("The frozen model is used: fine-tuning did not clearly help")


@pytest.mark.slow
def test_tuned_model_is_kept_with_a_note_if_the_frozen_one_cannot_be_read(
    votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise DataError("it cannot be read", file="llama", remedy="copy it again")

    monkeypatch.setattr(tuned_model, "encoded_texts", fails)
    llama = write_backbone(tmp_path / "llama")
    ensemble = fit(votes, folder=tmp_path / "town", backbone=str(llama), **QUICK)
    assert ensemble.record.notes is not None
    assert ensemble.record.notes[-1].startswith("the frozen model was not compared: llama: it cannot be read")
    assert (tmp_path / "town" / "backbone").is_dir()
