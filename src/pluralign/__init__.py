"""Pluralign: a small weighted ensemble of reward models whose votes match the share of people preferring each response.

Names are loaded when first used, so that ``import pluralign`` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pluralign.demo import TownHall, town_hall
    from pluralign.ensemble import RewardEnsemble
    from pluralign.errors import DataError, MissingExtraError, PluralignError, UsageError
    from pluralign.evaluation import Evaluation, evaluate
    from pluralign.fitting import fit
    from pluralign.inspection import Inspection, inspect
    from pluralign.options import FitOptions, LoadOptions
    from pluralign.preferences import Message, PreferenceSet, concatenate
    from pluralign.sources import load_preferences

__version__ = "0.1.0"

_HOMES = {
    "DataError": "errors",
    "Evaluation": "evaluation",
    "FitOptions": "options",
    "Inspection": "inspection",
    "LoadOptions": "options",
    "Message": "preferences",
    "MissingExtraError": "errors",
    "PluralignError": "errors",
    "PreferenceSet": "preferences",
    "RewardEnsemble": "ensemble",
    "TownHall": "demo",
    "UsageError": "errors",
    "concatenate": "preferences",
    "evaluate": "evaluation",
    "fit": "fitting",
    "inspect": "inspection",
    "load_preferences": "sources",
    "town_hall": "demo",
}

__all__ = [
    "DataError",
    "Evaluation",
    "FitOptions",
    "Inspection",
    "LoadOptions",
    "Message",
    "MissingExtraError",
    "PluralignError",
    "PreferenceSet",
    "RewardEnsemble",
    "TownHall",
    "UsageError",
    "__version__",
    "concatenate",
    "evaluate",
    "fit",
    "inspect",
    "load_preferences",
    "town_hall",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pluralign' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pluralign.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
