"""Pluralign: a small weighted ensemble of reward models whose votes match the share of people preferring each response.

Names are loaded when first used, so that ``import pluralign`` costs next to nothing.
"""

import difflib
import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pluralign.core.late import late
from pluralign.core.version import __version__

if TYPE_CHECKING:
    from pluralign.analysis.certificate import Certificate, certify
    from pluralign.analysis.member_rankings import CaseStudy, Diversity, case_studies, measure_diversity
    from pluralign.analysis.profiles import Profile, member_profiles
    from pluralign.analysis.pruning import Pruning, prune
    from pluralign.analysis.tournament import Tournament, load_tournament
    from pluralign.answering.generate import Generation, generate
    from pluralign.answering.novelty import NoveltyGate, fit_gate
    from pluralign.answering.own_answers import OwnPolicies
    from pluralign.core.errors import DataError, MissingExtraError, PluralignError, UsageError
    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.ensemble.record import Evaluation
    from pluralign.evaluation.evaluate import evaluate
    from pluralign.experiments.plan import Plan, plan
    from pluralign.experiments.reproduce import Reproduction, reproduce
    from pluralign.fitting.fit import fit
    from pluralign.models.options import RemoteOptions, SamplingOptions
    from pluralign.models.remote import ServerModel
    from pluralign.policies.options import PolicyOptions, TuneOptions
    from pluralign.policies.tune import Tuning, tune
    from pluralign.policies.writing import TunedPolicies, load_policies
    from pluralign.publishing.export_folder import Export
    from pluralign.publishing.transformers_export import export
    from pluralign.scale.jobs import encode, score
    from pluralign.server.app import create_app
    from pluralign.server.run import serve
    from pluralign.theory.realizability import Decomposition, decompose
    from pluralign.training.options import FinetuneOptions, FitOptions
    from pluralign.votes.candidates import Candidates, load_candidates
    from pluralign.votes.load import load_preferences
    from pluralign.votes.options import LoadOptions
    from pluralign.votes.preferences import PreferenceSet, concatenate
    from pluralign.votes.prompts import Message
    from pluralign.votes.raters import RaterVotes, load_rater_votes
    from pluralign.votes.summary import Inspection, inspect
    from pluralign.votes.town_hall.townhall import TownHall, town_hall

_HOMES = {
    "Answer": "answering.answer",
    "Candidates": "votes.candidates",
    "CaseStudy": "analysis.member_rankings",
    "Certificate": "analysis.certificate",
    "DataError": "core.errors",
    "Decomposition": "theory.realizability",
    "Diversity": "analysis.member_rankings",
    "Evaluation": "ensemble.record",
    "Export": "publishing.export_folder",
    "FinetuneOptions": "training.options",
    "FitOptions": "training.options",
    "Generation": "answering.generate",
    "Inspection": "votes.summary",
    "LoadOptions": "votes.options",
    "Message": "votes.prompts",
    "MissingExtraError": "core.errors",
    "NoveltyGate": "answering.novelty",
    "OwnPolicies": "answering.own_answers",
    "Plan": "experiments.plan",
    "PluralignError": "core.errors",
    "PolicyOptions": "policies.options",
    "PreferenceSet": "votes.preferences",
    "Profile": "analysis.profiles",
    "Pruning": "analysis.pruning",
    "RaterVotes": "votes.raters",
    "RemoteOptions": "models.options",
    "Reproduction": "experiments.reproduce",
    "RewardEnsemble": "ensemble.ensemble",
    "SamplingOptions": "models.options",
    "ServerModel": "models.remote",
    "Tournament": "analysis.tournament",
    "TownHall": "votes.town_hall.townhall",
    "TuneOptions": "policies.options",
    "TunedPolicies": "policies.writing",
    "Tuning": "policies.tune",
    "UsageError": "core.errors",
    "answer": "answering.answer",
    "case_studies": "analysis.member_rankings",
    "certify": "analysis.certificate",
    "concatenate": "votes.preferences",
    "create_app": "server.app",
    "decompose": "theory.realizability",
    "encode": "scale.jobs",
    "evaluate": "evaluation.evaluate",
    "export": "publishing.transformers_export",
    "fit": "fitting.fit",
    "fit_gate": "answering.novelty",
    "generate": "answering.generate",
    "inspect": "votes.summary",
    "load_candidates": "votes.candidates",
    "load_policies": "policies.writing",
    "load_preferences": "votes.load",
    "load_rater_votes": "votes.raters",
    "load_tournament": "analysis.tournament",
    "measure_diversity": "analysis.member_rankings",
    "member_profiles": "analysis.profiles",
    "plan": "experiments.plan",
    "prune": "analysis.pruning",
    "reproduce": "experiments.reproduce",
    "score": "scale.jobs",
    "serve": "server.run",
    "town_hall": "votes.town_hall.townhall",
    "tune": "policies.tune",
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
    "FinetuneOptions",
    "FitOptions",
    "Generation",
    "Inspection",
    "LoadOptions",
    "Message",
    "MissingExtraError",
    "NoveltyGate",
    "OwnPolicies",
    "Plan",
    "PluralignError",
    "PolicyOptions",
    "PreferenceSet",
    "Profile",
    "Pruning",
    "RaterVotes",
    "RemoteOptions",
    "Reproduction",
    "RewardEnsemble",
    "SamplingOptions",
    "ServerModel",
    "Tournament",
    "TownHall",
    "TuneOptions",
    "TunedPolicies",
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
    "fit_gate",
    "generate",
    "inspect",
    "load_candidates",
    "load_policies",
    "load_preferences",
    "load_rater_votes",
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


_ROOMS = (
    "analysis", "answering", "cli", "core", "ensemble", "evaluation", "experiments", "features", "fitting", "models",
    "policies", "publishing", "scale", "server", "theory", "training", "votes",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return _room(name)
    if name not in _HOMES:
        problem = f"module 'pluralign' has no attribute {name!r}"
        close = [] if name.startswith("_") else difflib.get_close_matches(name, [*__all__, *_ROOMS], n=1)
        raise AttributeError(f"{problem}; did you mean {close[0]!r}?" if close else problem)
    value = late(_HOMES[name], name)
    globals()[name] = value
    return value


def _room(name: str) -> ModuleType:
    """Return a package of this one, whose modules are also loaded when first used: ``pluralign.theory.kendall``."""
    room = importlib.import_module(f"pluralign.{name}")

    def load(module: str) -> ModuleType:
        if module.startswith("_") or importlib.util.find_spec(f"pluralign.{name}.{module}") is None:
            raise AttributeError(f"module 'pluralign.{name}' has no attribute {module!r}")
        return importlib.import_module(f"pluralign.{name}.{module}")

    room.__getattr__ = load  # type: ignore[method-assign]
    return room


def __dir__() -> list[str]:
    return sorted(set(__all__) | set(_ROOMS) | set(globals()))
