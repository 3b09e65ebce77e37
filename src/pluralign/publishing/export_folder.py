"""What all exports share: their result, their index file, names of members, warnings, and where they may be written."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pluralign.analysis.profiles import member_name, member_profiles
from pluralign.core.errors import UsageError
from pluralign.core.hub import HUB_ID
from pluralign.core.json_values import without_nan
from pluralign.core.text import counted
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.headline import main_evaluation, standing
from pluralign.ensemble.held_out import has_held_out, load_held_out
from pluralign.ensemble.record import FitRecord
from pluralign.models.bundled import MINILM_HUB_ID
from pluralign.models.identity import hub_source
from pluralign.publishing.model_card import ModelCard
from pluralign.theory.intervals import ENOUGH_CLUSTERS

INDEX_FILE = "pluralign.json"
"""Index of an export: its members, their weights, the undecided share, and the version that wrote it."""
KNOWN_BASES = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct", "minilm": MINILM_HUB_ID}
"""Hub ids of models that have a short name in this library."""


@dataclass(frozen=True)
class Export:
    """The result of an export."""

    folder: str
    models: list[str]
    """Folders for ``from_pretrained``: one, or one per member."""
    members: list[int]
    """Indices of the exported members."""
    names: list[str]
    weights: list[float]
    """Weights of the exported members in the ensemble; they sum to 1 if all are exported."""
    undecided: float
    """Share of votes that no member explains."""
    base: str
    hub: str | None
    """URL on the hub, if the export was pushed."""
    warnings: list[str] = field(default_factory=list)
    """Reasons not to rely on the ensemble, as sentences."""


def member_names(folder: str | os.PathLike[str], ensemble: RewardEnsemble) -> list[str]:
    """Return the name of each member on its card, or its number if there are no held-out votes."""
    if not has_held_out(folder):
        return numbered_names(ensemble)
    return [card.name for card in member_profiles(ensemble.weights, load_held_out(folder, ensemble))]


def numbered_names(ensemble: RewardEnsemble) -> list[str]:
    """Return the names of members that are known by their numbers only."""
    return [member_name(j) for j in range(ensemble.k)]


def base_id(base: str) -> str | None:
    """Return the hub id of a base model, or None for a local folder: local paths are not published.

    Example:
        >>> base_id("smollm2"), base_id("my-org/model"), base_id("/home/me/models/mine")
        ('HuggingFaceTB/SmolLM2-135M-Instruct', 'my-org/model', None)
    """
    if base in KNOWN_BASES:
        return KNOWN_BASES[base]
    if found := hub_source(Path(base)):
        return found[0]
    return base if HUB_ID.fullmatch(base) and not Path(base).exists() else None


def export_warnings(record: FitRecord) -> list[str]:
    """Return reasons not to rely on an ensemble, as sentences: no figures, few prompts, or no better than ½."""
    evaluation = main_evaluation(record)
    if evaluation is None:
        return ["The calibration of this ensemble is unknown: there are no figures on held-out votes."]
    if evaluation.prompts < ENOUGH_CLUSTERS:
        few = counted(evaluation.prompts, "held-out prompt")
        return [
            f"The calibration of this ensemble is uncertain: {few}, and a verdict needs at least {ENOUGH_CLUSTERS}."
        ]
    half = evaluation.baselines.get("constant_half")
    if half is None or standing(half.difference) == "ahead":
        return []
    worse = "worse than" if standing(half.difference) == "behind" else "not significantly better than"
    scores = f"Brier score {evaluation.test.brier:.4f} against {half.brier:.4f}"
    return [f"On held-out votes this ensemble is {worse} predicting ½ for every pair ({scores})."]


def refuse_place(folder: Path, output: Path, overwrite: bool) -> None:
    """Raise UsageError unless ``output`` can hold an export of the ensemble in ``folder``."""
    inside, outside = folder.resolve(), output.resolve()
    if inside == outside or inside in outside.parents or outside in inside.parents:
        raise UsageError(
            f"{output} must be outside the ensemble's folder {folder}, and not contain it; name another folder."
        )
    if output.is_dir() and any(output.iterdir()):
        if not overwrite:
            raise UsageError(
                f"{output} is not empty; name another folder, or replace an earlier export with --overwrite."
            )
        if not (output / INDEX_FILE).is_file():
            raise UsageError(f"{output} is not an earlier export ({INDEX_FILE} is missing); name another folder.")
    elif output.exists() and not output.is_dir():
        raise UsageError(f"{output} is a file; name a folder.")


def index_of(
    card: ModelCard, groups: Mapping[str, Sequence[int]], more: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the index of an export.

    Args:
        card: base, names and figures.
        groups: the members in each subfolder.
        more: further keys.
    """
    rows = [asdict(card.member_row(j)) | {"folder": part} for part, chosen in groups.items() for j in chosen]
    return {
        "format": "pluralign-export",
        "pluralign": __version__,
        "base": card.base,
        "undecided": card.ensemble.undecided,
        "members": rows,
        **(more or {}),
    }


def write_index(place: Path, index: Mapping[str, Any]) -> None:
    """Write the index of an export into its folder."""
    (place / INDEX_FILE).write_text(json.dumps(without_nan(index), indent=1, ensure_ascii=False), encoding="utf-8")
