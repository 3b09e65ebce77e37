"""Pluralign: a small weighted ensemble of reward models whose votes match the share of people preferring each response.

Names are loaded when first used, so that ``import pluralign`` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pluralign.candidates import Candidates, load_candidates
    from pluralign.certification import Certificate, certify
    from pluralign.choices import CaseStudy, Diversity, case_studies, measure_diversity
    from pluralign.demo import TownHall, town_hall
    from pluralign.ensemble import RewardEnsemble
    from pluralign.errors import DataError, MissingExtraError, PluralignError, UsageError
    from pluralign.evaluation import Evaluation, evaluate
    from pluralign.fitting import fit
    from pluralign.inspection import Inspection, inspect
    from pluralign.options import FitOptions, LoadOptions
    from pluralign.preferences import Message, PreferenceSet, concatenate
    from pluralign.profiles import Profile, member_profiles
    from pluralign.pruning import Pruning, prune
    from pluralign.rankings import Decomposition, decompose
    from pluralign.sources import load_preferences
    from pluralign.tournaments import Tournament, load_tournament

__version__ = "0.1.0"

_HOMES = {
    "Candidates": "candidates",
    "CaseStudy": "choices",
    "Certificate": "certification",
    "DataError": "errors",
    "Decomposition": "rankings",
    "Diversity": "choices",
    "Evaluation": "evaluation",
    "FitOptions": "options",
    "Inspection": "inspection",
    "LoadOptions": "options",
    "Message": "preferences",
    "MissingExtraError": "errors",
    "PluralignError": "errors",
    "PreferenceSet": "preferences",
    "Profile": "profiles",
    "Pruning": "pruning",
    "RewardEnsemble": "ensemble",
    "Tournament": "tournaments",
    "TownHall": "demo",
    "UsageError": "errors",
    "case_studies": "choices",
    "certify": "certification",
    "concatenate": "preferences",
    "decompose": "rankings",
    "evaluate": "evaluation",
    "fit": "fitting",
    "inspect": "inspection",
    "load_candidates": "candidates",
    "load_preferences": "sources",
    "load_tournament": "tournaments",
    "measure_diversity": "choices",
    "member_profiles": "profiles",
    "prune": "pruning",
    "town_hall": "demo",
}

__all__ = [
    "Candidates",
    "CaseStudy",
    "Certificate",
    "DataError",
    "Decomposition",
    "Diversity",
    "Evaluation",
    "FitOptions",
    "Inspection",
    "LoadOptions",
    "Message",
    "MissingExtraError",
    "PluralignError",
    "PreferenceSet",
    "Profile",
    "Pruning",
    "RewardEnsemble",
    "Tournament",
    "TownHall",
    "UsageError",
    "__version__",
    "case_studies",
    "certify",
    "concatenate",
    "decompose",
    "evaluate",
    "fit",
    "inspect",
    "load_candidates",
    "load_preferences",
    "load_tournament",
    "measure_diversity",
    "member_profiles",
    "prune",
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
