"""A stagewise fit on frozen features: choose the regularisation and the size, fit stage by stage, fit the rivals."""

from collections.abc import Callable, Iterator

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.checkpoints import Arrays
from pluralign.fitting.rivals import fit_rivals
from pluralign.fitting.selection import choose_size, choose_temperature, validation_brier
from pluralign.fitting.task import FitTask, Fitted, Members
from pluralign.training.bradley_terry import fit_bradley_terry
from pluralign.training.pairs import Pairs
from pluralign.training.stagewise import stages

L2_GRID = (0.1, 0.03, 0.01, 0.003)


def fit_stagewise(task: FitTask, record: Callable[[Members], None]) -> Fitted:
    """Fit a stagewise ensemble (§4).

    Args:
        task: the fit.
        record: called with the ensemble after each stage.
    """
    options = task.options
    l2, validated = choose_l2(task)
    if options.k == "auto":
        task.watcher.choosing("k")
        size = choose_size(dict(enumerate(validated, 1)), task.check, options.level)
    else:
        size = int(options.k)
    members = validated[0]
    for members in members_by_stage(task, task.train, size, l2, "stage", task.bound):
        record(members)
    baselines = fit_rivals(task)
    task.watcher.choosing("temperature")
    temperature = choose_temperature(validated[size - 1].unit_spread(task.learn), task.check)
    unbounded = None
    if options.max_disagreement < 1:
        *_, unbounded = members_by_stage(task, task.train, size, l2, "unbounded", 1.0)
    return Fitted(members, temperature, baselines, unbounded)


def choose_l2(task: FitTask) -> tuple[float, list[Members]]:
    """Choose the regularisation on validation prompts.

    Returns:
        The chosen value, and the ensembles after each stage, fitted with it without the validation prompts.
    """
    task.watcher.choosing("regularisation")
    fits = {
        l2: list(members_by_stage(task, task.learn, task.largest_size, l2, "validation", task.bound)) for l2 in L2_GRID
    }
    errors = [validation_brier(fits[l2][-1], task.check, task.options.level) for l2 in L2_GRID]
    chosen = L2_GRID[int(np.argmin(errors))]
    return chosen, fits[chosen]


def members_by_stage(task: FitTask, pairs: Pairs, k: int, l2: float, name: str, bound: float) -> Iterator[Members]:
    """Yield the ensemble after each stage, fitted to ``pairs``; finished stages are read from the checkpoint.

    Args:
        task: the fit, for its options and checkpoint.
        pairs: the training pairs, or those without the validation prompts.
        k: number of stages.
        l2: regularisation of each stage.
        name: of the stages in the checkpoint.
        bound: the largest disagreement of a member on training pairs.
    """
    options, earlier = task.options, None
    anchor = task.checkpoints.arrays(
        f"{name}-{l2:g}-anchor", lambda: {"theta": fit_bradley_terry(pairs.difference, pairs.prob_a, l2)}
    )["theta"]
    for j in range(1, k + 1):

        def compute(j: int = j, earlier: FloatArray | None = earlier) -> Arrays:
            *_, stage = stages(
                pairs.difference, pairs.prob_a, j, l2=l2, variant=options.variant, loss=options.loss, bound=bound,
                first=earlier, anchor=anchor,
            )  # fmt: skip
            return {"theta": stage.theta, "weights": stage.weights}

        arrays = task.checkpoints.arrays(f"{name}-{l2:g}-{j}", compute)
        earlier = arrays["theta"]
        yield Members(earlier, arrays["weights"])
