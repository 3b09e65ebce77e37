"""The baselines of a fit, kept in its checkpoint."""

import numpy as np

from pluralign.core.checkpoints import Arrays
from pluralign.fitting.task import FitTask
from pluralign.training.baselines import BASELINES, Baseline, fit_baselines


def fit_rivals(task: FitTask) -> dict[str, Baseline]:
    """Return every baseline, fitted to the training pairs with the same folds as the ensemble.

    If features were trained with a teacher, baselines use the frozen ones.
    """
    task = task.on_frozen_inputs()

    def compute() -> Arrays:
        fitted = fit_baselines(
            task.train,
            task.folds,
            task.largest_size,
            seed=task.options.seed,
            report=task.watcher.fitting_baseline,
        )
        flat = {f"{name}/{part}": array for name, base in fitted.items() for part, array in base.arrays.items()}
        return flat | {f"{name}/seconds": np.array(base.seconds) for name, base in fitted.items()}

    arrays = task.checkpoints.arrays("baselines", compute)
    kept = {}
    for name, formula in BASELINES.items():
        parts = {key.partition("/")[2]: array for key, array in arrays.items() if key.startswith(f"{name}/")}
        seconds = float(parts.pop("seconds"))
        kept[name] = Baseline(formula, parts, seconds)
    return kept
