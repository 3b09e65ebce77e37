"""Pluralign: a small weighted ensemble of reward models whose votes match the share of people preferring each response.

Every command has a function of its name here. All names are loaded when first used, so that ``import pluralign`` costs
next to nothing; everything else is in the rooms, such as ``pluralign.theory.calibration``.
"""

import difflib
import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pluralign.core.late import late
from pluralign.core.version import __version__ as __version__

if TYPE_CHECKING:
    from pluralign.answering.answer import Answerer as Answerer, answer as answer
    from pluralign.answering.generate import generate as generate
    from pluralign.answering.options import TuneOptions as TuneOptions
    from pluralign.answering.request import AnswerRequest as AnswerRequest
    from pluralign.answering.tune import tune as tune
    from pluralign.core.errors import DataError as DataError, PluralignError as PluralignError, UsageError as UsageError
    from pluralign.ensemble.ensemble import RewardEnsemble as RewardEnsemble
    from pluralign.experiments.demo import demo as demo
    from pluralign.experiments.reproduce import reproduce as reproduce
    from pluralign.learning.fit import fit as fit
    from pluralign.learning.options import FinetuneOptions as FinetuneOptions, FitOptions as FitOptions
    from pluralign.measuring.cards import profile as profile
    from pluralign.measuring.certificate import certify as certify
    from pluralign.measuring.diversity import diversity as diversity
    from pluralign.measuring.evaluate import evaluate as evaluate
    from pluralign.measuring.pruning import prune as prune
    from pluralign.measuring.rankings import rankings as rankings
    from pluralign.publishing.export import export as export
    from pluralign.publishing.report import report as report
    from pluralign.scale.jobs import encode as encode, score as score
    from pluralign.scale.lines import compare as compare
    from pluralign.server.app import create_app as create_app
    from pluralign.server.run import serve as serve
    from pluralign.text.options import RemoteOptions as RemoteOptions, SamplingOptions as SamplingOptions
    from pluralign.votes.load import load_preferences as load_preferences
    from pluralign.votes.options import LoadOptions as LoadOptions
    from pluralign.votes.preferences import PreferenceSet as PreferenceSet
    from pluralign.votes.raters import load_rater_votes as load_rater_votes
    from pluralign.votes.summary import inspect as inspect
    from pluralign.votes.town_hall.town_hall import town_hall as town_hall

_HOMES = {
    "answering.answer": ("Answerer", "answer"),
    "answering.generate": ("generate",),
    "answering.options": ("TuneOptions",),
    "answering.request": ("AnswerRequest",),
    "answering.tune": ("tune",),
    "core.errors": ("DataError", "PluralignError", "UsageError"),
    "ensemble.ensemble": ("RewardEnsemble",),
    "experiments.demo": ("demo",),
    "experiments.reproduce": ("reproduce",),
    "learning.fit": ("fit",),
    "learning.options": ("FinetuneOptions", "FitOptions"),
    "measuring.cards": ("profile",),
    "measuring.certificate": ("certify",),
    "measuring.diversity": ("diversity",),
    "measuring.evaluate": ("evaluate",),
    "measuring.pruning": ("prune",),
    "measuring.rankings": ("rankings",),
    "publishing.export": ("export",),
    "publishing.report": ("report",),
    "scale.jobs": ("encode", "score"),
    "scale.lines": ("compare",),
    "server.app": ("create_app",),
    "server.run": ("serve",),
    "text.options": ("RemoteOptions", "SamplingOptions"),
    "votes.load": ("load_preferences",),
    "votes.options": ("LoadOptions",),
    "votes.preferences": ("PreferenceSet",),
    "votes.raters": ("load_rater_votes",),
    "votes.summary": ("inspect",),
    "votes.town_hall.town_hall": ("town_hall",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_ROOMS = (
    "answering", "cli", "core", "ensemble", "experiments", "learning", "measuring", "publishing", "scale", "server",
    "text", "theory", "votes",
)  # fmt: skip
__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return _room(name)
    if name not in _HOME_OF:
        problem = f"module 'pluralign' has no attribute {name!r}"
        close = [] if name.startswith("_") else difflib.get_close_matches(name, [*__all__, *_ROOMS], n=1)
        raise AttributeError(f"{problem}; did you mean {close[0]!r}?" if close else problem)
    value = late(_HOME_OF[name], name)
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
