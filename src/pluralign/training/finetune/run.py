"""Fine-tuning of reward models on votes: the target, the loss and the first head of each member.

Every process of a launch must call ``fine_tune``; the first one writes. ``train_model`` trains and resumes one model.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from pluralign.training.finetune.batches import TextPairs
from pluralign.training.finetune.losses import MixtureLoss, PairLoss, StageLoss, VoteLoss
from pluralign.training.finetune.recipe import choose_precision
from pluralign.training.finetune.train_model import FinetuneRun, Training, prepare_run
from pluralign.training.finetune.trainer import PairLabels
from pluralign.training.options import FinetuneOptions, FitOptions, Variant
from pluralign.training.pairs import Pairs, row_squares
from pluralign.training.stagewise import fit_member, stage_target
from pluralign.training.teacher import VOICES, Teacher, damping_factor

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
    """Fine-tune the models of an ensemble on the votes of ``pairs``.

    ``joint``: one model whose outputs are the rewards of a mixture, then one reward. It learns from the votes alone
    (``MixtureLoss``); no output learns from the prediction of another, because a single reward hides what divides
    people. The head starts as the mixture on the base model's states, fitted as the teacher of a frozen ensemble is,
    with its weights and its damping. The members themselves are fitted afterwards, on the states of the trained model.

    ``stagewise``: k models with one output, each from the same checkpoint, fitted to the residual of the hard votes of
    the members before it (§4). The head starts as the best linear one on the base model's states. A member whose
    running disagreement with people is above the bound is penalised.

    With ``fresh_head`` the head starts random instead, and a joint model learns by ``VoteLoss``.

    Args:
        pairs: the training pairs.
        k: number of stagewise members; with ``enough`` the largest. A joint model does not depend on it.
        options: method, variant, loss and seed.
        tuning: the backbone and the recipe.
        checkpoints: stores the models and unfinished trainings, and resumes them; it must have a folder, and
            ``finetune_processes()`` as its processes.
        bound: stagewise: training disagreement above which a member is penalised; 1 sets no bound.
        enough: stagewise: called after each stage; if it returns True, no further stage is trained. Its answer is
            stored, so a resumed run stops at the same stage.
        progress: called with the steps done and their total.
        report: called with the name of each model before its training.

    Returns:
        The models as features, in the folder of ``checkpoints``: the states of a joint model, or the outputs of
        stagewise models.
    """
    run = prepare_run(pairs, tuning, options.seed, checkpoints, progress, choose_precision(options.precision))
    if options.method == "joint":
        features, seconds = _joint(run, report)
    else:
        features, seconds = _stagewise(run, k, options, bound, enough, report)
    recipe = run.recipe
    return Tuned(
        features, run.steps, recipe.batch, recipe.learning_rate, seconds, run.notes, checkpoints.processes.count
    )


def finetune_processes() -> Processes:
    """Return this process, joined to the others of its launch, for the ``Checkpoints`` of a fine-tuning."""
    return join_launch(cpu=not torch.cuda.is_available())


def _joint(run: FinetuneRun, report: Callable[[str], None]) -> tuple[FinetunedFeatures, list[float]]:
    prob_a = run.pairs.prob_a
    loss: PairLoss = VoteLoss(VOICES)
    start = {"head": np.zeros(0), "damping": np.ones(len(prob_a))}  # a fresh head needs none
    if not run.recipe.tuning.fresh_head:
        start = _start(run)
        loss = MixtureLoss(tuple(start["weights"].tolist()))
    report("all members")
    labels = PairLabels(prob_a, prob_a, start["damping"])
    features = _features(run, "joint", VOICES + 1)
    (folder,) = model_folders(features)
    seconds = run.train(Training("joint", VOICES + 1, loss, labels, lambda *_: start["head"]), folder)
    features = features.with_current_hashes()
    _outputs(run, features)  # fills the cache of vectors
    return features, [seconds]


def _start(run: FinetuneRun) -> dict[str, FloatArray]:
    """Return the mixture that a joint training starts from: ``head``, ``weights``, and ``damping`` of each pair."""
    found: dict[str, FloatArray] = {}

    def heads(pairs: Pairs, teacher: Teacher) -> FloatArray:
        squares = row_squares(pairs.difference)
        found["damping"] = damping_factor(squares, teacher.damping, teacher.mean_square)
        found["weights"] = teacher.voice_weights
        return np.column_stack([teacher.voices, teacher.theta])

    def compute() -> dict[str, FloatArray]:
        head = run.fit_head(heads)
        return {"head": head, **found}

    return run.checkpoints.arrays("start", compute)


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
        head = partial(run.head.fit, heads)
        seconds.append(run.train(Training(f"member-{j}", 1, StageLoss(stage.loss, bound), labels, head), folder))
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
        precision=run.recipe.scoring, folder=run.folder, reads="states" if method == "joint" else "outputs",
    )  # fmt: skip


def _outputs(run: FinetuneRun, features: FinetunedFeatures) -> npt.NDArray[np.float32]:
    """Return the features of all texts: the outputs of stagewise models, ``(n_items, outputs)``, or joint states.

    Each process computes a part; the cache of vectors then gives all of them to every process.
    """
    items, processes = run.pairs.items, run.checkpoints.processes
    if processes.count > 1:
        features(items[processes.rank :: processes.count])
        processes.wait()
    outputs = features(items)
    forget_models()
    return outputs
