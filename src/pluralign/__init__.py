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
    from pluralign.exporting import Export, export
    from pluralign.fitting import fit
    from pluralign.generation import Generation, generate
    from pluralign.inspection import Inspection, inspect
    from pluralign.options import FitOptions, LoadOptions, PolicyOptions, RemoteOptions, SamplingOptions
    from pluralign.preferences import Message, PreferenceSet, concatenate
    from pluralign.profiles import Profile, member_profiles
    from pluralign.pruning import Pruning, prune
    from pluralign.rankings import Decomposition, decompose
    from pluralign.reproduction import Plan, Reproduction, plan, reproduce
    from pluralign.scaling import encode, score
    from pluralign.servers import ServerModel
    from pluralign.serving import create_app, serve
    from pluralign.sources import load_preferences
    from pluralign.tournaments import Tournament, load_tournament
    from pluralign.tuning import Tuning, tune

__version__ = "0.1.0"

_HOMES = {
    "Answer": "pluralism",
    "Candidates": "candidates",
    "CaseStudy": "choices",
    "Certificate": "certification",
    "DataError": "errors",
    "Decomposition": "rankings",
    "Diversity": "choices",
    "Evaluation": "evaluation",
    "Export": "exporting",
    "FitOptions": "options",
    "Generation": "generation",
    "Inspection": "inspection",
    "LoadOptions": "options",
    "Message": "preferences",
    "MissingExtraError": "errors",
    "Plan": "reproduction",
    "PluralignError": "errors",
    "PolicyOptions": "options",
    "PreferenceSet": "preferences",
    "Profile": "profiles",
    "Pruning": "pruning",
    "RemoteOptions": "options",
    "Reproduction": "reproduction",
    "RewardEnsemble": "ensemble",
    "SamplingOptions": "options",
    "ServerModel": "servers",
    "Tournament": "tournaments",
    "TownHall": "demo",
    "Tuning": "tuning",
    "UsageError": "errors",
    "answer": "pluralism",
    "case_studies": "choices",
    "certify": "certification",
    "concatenate": "preferences",
    "create_app": "serving",
    "decompose": "rankings",
    "encode": "scaling",
    "evaluate": "evaluation",
    "export": "exporting",
    "fit": "fitting",
    "generate": "generation",
    "inspect": "inspection",
    "load_candidates": "candidates",
    "load_preferences": "sources",
    "load_tournament": "tournaments",
    "measure_diversity": "choices",
    "member_profiles": "profiles",
    "plan": "reproduction",
    "prune": "pruning",
    "reproduce": "reproduction",
    "score": "scaling",
    "serve": "serving",
    "town_hall": "demo",
    "tune": "tuning",
}

__all__ = [
    "Answer",
    "Candidates",
    "CaseStudy",
    "Certificate",
    "DataError",
    "Decomposition",
    "Diversity",
    "Evaluation",
    "Export",
    "FitOptions",
    "Generation",
    "Inspection",
    "LoadOptions",
    "Message",
    "MissingExtraError",
    "Plan",
    "PluralignError",
    "PolicyOptions",
    "PreferenceSet",
    "Profile",
    "Pruning",
    "RemoteOptions",
    "Reproduction",
    "RewardEnsemble",
    "SamplingOptions",
    "ServerModel",
    "Tournament",
    "TownHall",
    "Tuning",
    "UsageError",
    "__version__",
    "answer",
    "case_studies",
    "certify",
    "concatenate",
    "create_app",
    "decompose",
    "encode",
    "evaluate",
    "export",
    "fit",
    "generate",
    "inspect",
    "load_candidates",
    "load_preferences",
    "load_tournament",
    "measure_diversity",
    "member_profiles",
    "plan",
    "prune",
    "reproduce",
    "score",
    "serve",
    "town_hall",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pluralign' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pluralign.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(globals()))
