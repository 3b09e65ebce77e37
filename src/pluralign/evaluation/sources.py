"""Predictors by name: the folder of an ensemble, a transformers reward model, a file of scores, or personas."""

import math
import re
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np

from pluralign.core.arrays import Mask
from pluralign.core.errors import DataError
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import ENSEMBLE_FILE
from pluralign.evaluation.personas import PREFIX, Personas, find_personas, persona_predictor
from pluralign.evaluation.predictors import Predictor, ensemble_predictor, reward_predictor
from pluralign.evaluation.score_files import read_score_file
from pluralign.models.classifier import UNDECIDED_KEY, WEIGHTS_KEY, model_rewards, reward_model_config
from pluralign.models.loading import model_folder
from pluralign.votes.preferences import PreferenceSet, texts_of

Source: TypeAlias = "RewardEnsemble | Personas | str | PathLike[str]"


FILE_ENDINGS = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".gz")


_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def find_predictor(name: str | PathLike[str]) -> Literal["ensemble", "model", "hub", "file", "personas"]:
    """Return the kind of predictor of this name, without loading it. Raises DataError if the name matches nothing."""
    path = Path(name)
    if str(name).startswith(PREFIX):
        return "personas"
    if path.is_dir():
        if (path / ENSEMBLE_FILE).is_file():
            return "ensemble"
        reward_model_config(path)
        return "model"
    if path.is_file():
        return "file"
    if path.suffix in FILE_ENDINGS:
        raise DataError("there is no such file", file=str(path), remedy="check the path")
    if _HUB_ID.fullmatch(str(name)):
        return "hub"
    remedy = (
        "name a folder that pluralign fit wrote, a reward model (a folder or hub id), a file of scores, or "
        "personas:FILE"
    )
    raise DataError("no such folder, file or hub id", file=str(name), remedy=remedy)


def load_predictor(
    source: Source,
    preferences: PreferenceSet,
    *,
    measured: Mask | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Predictor:
    """Return the predictions of ``source`` for the pairs of a set.

    Args:
        source: an ensemble or the folder of one, a transformers reward model (a folder or a hub id), a file of
            scores or probabilities, or ``Personas``.
        preferences: the pairs. Votes serve only to choose the temperature of rewards trained elsewhere.
        measured: if ``preferences`` are a part of a data file, which pairs of it they are. For files of shares without
            texts, which have one row per pair of the data file.
        seed: of the folds for that choice.
        progress: called with the texts done and the total.
    """
    if isinstance(source, RewardEnsemble):
        return ensemble_predictor(source, *source.pair_rewards(preferences, progress))
    if isinstance(source, Personas):
        return persona_predictor(source, preferences, seed=seed, progress=progress)
    kind = find_predictor(source)
    if kind == "personas":
        find_personas(str(source), None)  # raises UsageError: a name alone has no judge
    if kind == "ensemble":
        ensemble = RewardEnsemble.load(source)
        return ensemble_predictor(ensemble, *ensemble.pair_rewards(preferences, progress), name=str(source))
    if kind == "file":
        return read_score_file(Path(source), preferences, measured=measured, seed=seed)
    remedy = "check the path, or the model id and the network"
    folder = Path(source) if kind == "model" else model_folder(str(source), remedy=remedy)
    return _model_predictor(str(source), folder, preferences, seed, progress)


def _model_predictor(
    name: str, folder: Path, preferences: PreferenceSet, seed: int, progress: Progress | None
) -> Predictor:
    config = reward_model_config(folder)
    rewards = model_rewards(folder, texts_of(preferences), progress)
    if not np.isfinite(rewards).all():
        raise DataError("its rewards are not finite", file=name, remedy="check the model's weights")
    items, k = preferences.items(), rewards.shape[1]
    weights, note = np.full(k, 1 / k), "" if k == 1 else f"{k} rewards, read as members of equal weight"
    if WEIGHTS_KEY in config:
        weights, note = np.asarray(config[WEIGHTS_KEY], dtype=np.float64), f"weights from {WEIGHTS_KEY} in config.json"
        if weights.shape != (k,) or not (weights >= 0).all() or not math.isclose(weights.sum(), 1, abs_tol=1e-6):
            remedy = f"give {k} weights that are not negative and sum to 1"
            raise DataError(f"{WEIGHTS_KEY} does not match its {k} rewards", file=str(folder), remedy=remedy)
    undecided = config.get(UNDECIDED_KEY, 0.0)
    if not isinstance(undecided, int | float) or not 0 <= undecided <= 1:
        raise DataError(f"{UNDECIDED_KEY} is not a share", file=str(folder), remedy="give a number from 0 to 1")
    difference = rewards[items.a] - rewards[items.b]
    return reward_predictor(name, "reward model", difference, weights, preferences, seed, note, float(undecided))
