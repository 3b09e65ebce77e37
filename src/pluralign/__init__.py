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
    from pluralign.answering.answer import Answer, Answerer
    from pluralign.answering.gate import NoveltyGate, fit_gate
    from pluralign.answering.generate import Generation, generate
    from pluralign.answering.options import TuneOptions
    from pluralign.answering.policies import TunedPolicies, load_policies
    from pluralign.answering.tune import Tuning, tune
    from pluralign.core.errors import DataError, MissingExtraError, PluralignError, UsageError
    from pluralign.ensemble.ensemble import RewardEnsemble
    from pluralign.ensemble.record import Evaluation
    from pluralign.experiments.reproduce import Reproduction, reproduce
    from pluralign.learning.fit import fit
    from pluralign.learning.options import FinetuneOptions, FitOptions
    from pluralign.measuring.cards import Profile, member_profiles
    from pluralign.measuring.certificate import Certificate, certify
    from pluralign.measuring.diversity import CaseStudy, Diversity, case_studies, measure_diversity
    from pluralign.measuring.evaluate import evaluate
    from pluralign.measuring.pruning import Pruning, prune
    from pluralign.measuring.tournament import Tournament, load_tournament
    from pluralign.publishing.export import Export, export
    from pluralign.scale.jobs import encode, score
    from pluralign.server.app import create_app
    from pluralign.server.run import serve
    from pluralign.text.options import RemoteOptions, SamplingOptions
    from pluralign.text.remote import ServerModel
    from pluralign.theory.rankings import Decomposition, decompose
    from pluralign.votes.candidates import Candidates, load_candidates
    from pluralign.votes.load import load_preferences
    from pluralign.votes.options import LoadOptions
    from pluralign.votes.preferences import PreferenceSet, concatenate
    from pluralign.votes.prompts import Message
    from pluralign.votes.raters import RaterVotes, load_rater_votes
    from pluralign.votes.summary import Inspection, inspect
    from pluralign.votes.town_hall.town_hall import TownHall, town_hall

_HOMES = {
    "Answer": "answering.answer",
    "AnswerRequest": "answering.request",
    "Answerer": "answering.answer",
    "Candidates": "votes.candidates",
    "CaseStudy": "measuring.diversity",
    "Certificate": "measuring.certificate",
    "DataError": "core.errors",
    "Decomposition": "theory.rankings",
    "Diversity": "measuring.diversity",
    "Evaluation": "ensemble.record",
    "Export": "publishing.export",
    "FinetuneOptions": "learning.options",
    "FitOptions": "learning.options",
    "Generation": "answering.generate",
    "Inspection": "votes.summary",
    "LoadOptions": "votes.options",
    "Message": "votes.prompts",
    "MissingExtraError": "core.errors",
    "NoveltyGate": "answering.gate",
    "PluralignError": "core.errors",
    "PreferenceSet": "votes.preferences",
    "Profile": "measuring.cards",
    "Pruning": "measuring.pruning",
    "RaterVotes": "votes.raters",
    "RemoteOptions": "text.options",
    "Reproduction": "experiments.reproduce",
    "RewardEnsemble": "ensemble.ensemble",
    "SamplingOptions": "text.options",
    "ServerModel": "text.remote",
    "Tournament": "measuring.tournament",
    "TownHall": "votes.town_hall.town_hall",
    "TuneOptions": "answering.options",
    "TunedPolicies": "answering.policies",
    "Tuning": "answering.tune",
    "UsageError": "core.errors",
    "answer": "answering.answer",
    "case_studies": "measuring.diversity",
    "certify": "measuring.certificate",
    "concatenate": "votes.preferences",
    "create_app": "server.app",
    "decompose": "theory.rankings",
    "encode": "scale.jobs",
    "evaluate": "measuring.evaluate",
    "export": "publishing.export",
    "fit": "learning.fit",
    "fit_gate": "answering.gate",
    "generate": "answering.generate",
    "inspect": "votes.summary",
    "load_candidates": "votes.candidates",
    "load_policies": "answering.policies",
    "load_preferences": "votes.load",
    "load_rater_votes": "votes.raters",
    "load_tournament": "measuring.tournament",
    "measure_diversity": "measuring.diversity",
    "member_profiles": "measuring.cards",
    "prune": "measuring.pruning",
    "reproduce": "experiments.reproduce",
    "score": "scale.jobs",
    "serve": "server.run",
    "town_hall": "votes.town_hall.town_hall",
    "tune": "answering.tune",
}

__all__ = [
    "Answer",
    "AnswerRequest",
    "Answerer",
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
    "PluralignError",
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
    "prune",
    "reproduce",
    "score",
    "serve",
    "town_hall",
    "tune",
]


_ROOMS = (
    "answering", "cli", "core", "ensemble", "experiments", "learning", "measuring", "publishing", "scale", "server",
    "text", "theory", "votes",
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
