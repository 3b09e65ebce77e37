"""Fine-tuning of reward models on votes: the target, the loss and the first head of each member.

Every process of a launch must call ``fine_tune``; the first one writes. ``train_model`` trains and resumes one model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from pluralign.core.arrays import FloatArray
from pluralign.core.checkpoints import Checkpoints
from pluralign.core.distributed import Processes, join_launch
from pluralign.core.types import Method, Progress
from pluralign.features.finetuned import FinetunedFeatures, forget_models, model_folders, model_identity
from pluralign.models.identity import hub_source
from pluralign.theory.calibration import votes_from_rewards
from pluralign.theory.simplex import simplex_least_squares
from pluralign.training.bradley_terry import fit_bradley_terry
from pluralign.training.finetune.batches import TextPairs
from pluralign.training.finetune.losses import JointLoss, StageLoss
from pluralign.training.finetune.recipe import choose_precision
from pluralign.training.finetune.train_model import FinetuneRun, Training, prepare_run
from pluralign.training.finetune.trainer import PairLabels
from pluralign.training.joint import FEW_RESTARTS, FROM_TEACHER, fit_joint
from pluralign.training.options import FinetuneOptions, FitOptions, Variant
from pluralign.training.pairs import Pairs
from pluralign.training.stagewise import fit_member, stage_target
from pluralign.training.teacher import Teacher

Enough: TypeAlias = Callable[[npt.NDArray[np.float32]], bool]
"""Takes the rewards of the members so far for every text, ``(n_items, members)``; returns whether to stop there."""


@dataclass(frozen=True)
class Tuned:
    """Fine-tuned models, and how they were trained."""

    features: FinetunedFeatures
    steps: int
    """Optimiser steps that each model took."""
    batch_size: int
    learning_rate: float
    seconds: list[float]
    """Training time of each model."""
    notes: list[str]
    processes: int


def fine_tune(
    pairs: TextPairs,
    k: int,
    options: FitOptions,
    tuning: FinetuneOptions,
    checkpoints: Checkpoints,
    *,
    bound: float = 1.0,
    enough: Enough | None = None,
    progress: Progress | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Tuned:
    """Fine-tune the members of an ensemble on the votes of ``pairs``.

    ``joint``: one model with k + 1 outputs. The last is a soft-label Bradley–Terry reward, trained in the same pass:

        mean (p̂ − t)² + 1/k² Σ_j q_j (1 − q_j) + BCE(p, σ(Δ_bt)),
        q_j = σ(Δ_j / (s_j τ)),   p̂ = 1/k Σ_j q_j,   t = (1 − v) σ(Δ_bt) + v p,

    with s_j the running spread of Δ_j, and τ decreasing. The first two terms are the expected error of votes drawn
    with probabilities q_j, so undecided members are penalised: hard votes cannot be undecided.

    ``stagewise``: k models with one output, each from the same checkpoint, fitted to the residual of the hard votes of
    the members before it (§4).

    In both, a member whose running disagreement with people is above the bound is penalised. The head starts as the
    best linear one on the base model's features of the texts: fine-tuning starts from the ensemble on frozen features.
    With ``fresh_head`` it starts random instead.

    Args:
        pairs: the training pairs.
        k: number of members; with ``enough`` the largest.
        options: method, variant, loss and seed.
        tuning: the backbone and the recipe.
        checkpoints: stores the models and unfinished trainings, and resumes them; it must have a folder, and
            ``finetune_processes()`` as its processes.
        bound: training disagreement above which a member is penalised; 1 sets no bound.
        enough: stagewise: called after each stage; if it returns True, no further stage is trained. Its answer is
            stored, so a resumed run stops at the same stage.
        progress: called with the steps done and their total.
        report: called with the name of each member before its training.

    Returns:
        The models as features, in the folder of ``checkpoints``.
    """
    run = prepare_run(pairs, tuning, options.seed, checkpoints, progress, choose_precision(options.precision))
    if options.method == "joint":
        features, seconds = _joint(run, k, options, bound, report)
    else:
        features, seconds = _stagewise(run, k, options, bound, enough, report)
    recipe = run.recipe
    return Tuned(
        features, run.steps, recipe.batch, recipe.learning_rate, seconds, run.notes, checkpoints.processes.count
    )


def finetune_processes() -> Processes:
    """Return this process, joined to the others of its launch, for the ``Checkpoints`` of a fine-tuning."""
    return join_launch(cpu=not torch.cuda.is_available())


def _joint(
    run: FinetuneRun, k: int, options: FitOptions, bound: float, report: Callable[[str], None]
) -> tuple[FinetunedFeatures, list[float]]:
    report("all members")

    def heads(pairs: Pairs, teacher: Teacher) -> FloatArray:
        reward = fit_bradley_terry(pairs.difference, pairs.prob_a, teacher.l2)
        if k == 1:
            return np.column_stack([reward, reward])
        # The loss has no undecided share, so the members that it starts from have none either.
        fit = fit_joint(
            pairs, teacher, k, FROM_TEACHER, seed=options.seed, bound=bound, restarts=FEW_RESTARTS, undecided=False
        )
        return np.column_stack([fit.theta, reward])

    prob_a = run.pairs.prob_a
    loss = JointLoss(k, bound, fitted=not run.recipe.tuning.fresh_head)
    features = _features(run, "joint", k + 1)
    (folder,) = model_folders(features)
    labels = PairLabels(prob_a, prob_a, np.ones(len(prob_a)))
    seconds = run.train(Training("joint", k + 1, loss, labels, heads), folder)
    features = features.with_current_hashes()
    _outputs(run, features)  # fills the cache of vectors
    return features, [seconds]


def _stagewise(
    run: FinetuneRun,
    k: int,
    options: FitOptions,
    bound: float,
    enough: Enough | None,
    report: Callable[[str], None],
) -> tuple[FinetunedFeatures, list[float]]:
    pairs = run.pairs
    prob_hat = np.full(len(pairs.prob_a), 0.5)
    seconds: list[float] = []
    identity: tuple[str, ...] = ()
    for j in range(k):
        report(f"member {j + 1} of {'at most ' if enough else ''}{k}")
        features = _features(run, "stagewise", j + 1)
        folder = model_folders(features)[j]
        variant: Variant = "symmetric" if j == 0 else options.variant
        residual = pairs.prob_a - prob_hat

        def heads(
            base: Pairs, teacher: Teacher, residual: FloatArray = residual, variant: Variant = variant
        ) -> FloatArray:
            return fit_member(base.difference, residual, l2=teacher.l2, variant=variant, loss=options.loss)[:, None]

        stage = stage_target(residual, variant, options.loss)
        labels = PairLabels(pairs.prob_a, stage.target, stage.weight)
        seconds.append(run.train(Training(f"member-{j}", 1, StageLoss(stage.loss, bound), labels, heads), folder))
        identity = (*identity, model_identity(folder, features))
        features = _features(run, "stagewise", j + 1, identity)
        outputs = _outputs(run, features)
        votes = votes_from_rewards(outputs[pairs.a], outputs[pairs.b])
        if enough and _agreed(run, f"enough-{j}", lambda: enough(outputs)):  # noqa: B023 - called at once
            break
        prob_hat = votes @ simplex_least_squares(votes, pairs.prob_a)
    return features, seconds


def _agreed(run: FinetuneRun, name: str, decide: Callable[[], bool]) -> bool:
    """Return a decision of the first process, as stored if it was made before."""
    return bool(run.checkpoints.value(name, lambda: run.checkpoints.processes.agreed(decide)))


def _features(run: FinetuneRun, method: Method, outputs: int, identity: tuple[str, ...] = ()) -> FinetunedFeatures:
    """Return the models as features."""
    source = hub_source(run.base.folder)
    return FinetunedFeatures(
        base=run.base.name, method=method, lora=run.recipe.tuning.lora, outputs=outputs,
        max_length=run.base.max_length, identity=identity, revision=source[1] if source else "",
        precision=run.recipe.scoring, folder=run.folder,
    )  # fmt: skip


def _outputs(run: FinetuneRun, features: FinetunedFeatures) -> npt.NDArray[np.float32]:
    """Return the outputs for all texts, ``(n_items, outputs)``.

    Each process computes a part; the cache of vectors then gives all of them to every process.
    """
    items, processes = run.pairs.items, run.checkpoints.processes
    if processes.count > 1:
        features(items[processes.rank :: processes.count])
        processes.wait()
    outputs = features(items)
    forget_models()
    return outputs
