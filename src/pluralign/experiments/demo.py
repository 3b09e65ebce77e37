"""``demo``: fit every method on a town hall with known preferences, analyse one ensemble in detail, and report it."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from pluralign.answering.answer import Answer, answer
from pluralign.core.arrays import FloatArray, Mask
from pluralign.core.errors import UsageError
from pluralign.core.files import atomic_write
from pluralign.core.json_values import JsonObject, to_json
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import score_held_out
from pluralign.learning.fit import fit
from pluralign.learning.measure import read_ensemble
from pluralign.measuring.camps import CampStudy, camps_of_ensemble
from pluralign.measuring.report_data import ReportData, ReportOptions, collect_report_data
from pluralign.publishing.tables import Table
from pluralign.theory import calibration
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.raters import town_hall_votes
from pluralign.votes.summary import Inspection, Truth, inspect, inspect_truth
from pluralign.votes.town_hall.town_hall import DEFAULT_RANKED_PAIRS, TownHall, town_hall

COUNTS, RANKINGS, WITH_IDS = "vote counts", "rankings", "rankings with ids"
"""What an ensemble was fitted to: the same votes, without and with who gave them."""
SOFT_BT, CONSTANT_HALF = "soft BT as σ(Δr)", "constant ½"
PERFECT_SINGLE, TRUE_SHARES = "perfect single reward", "true shares"
"""Names of the results that the terminal shows."""
METHODS: dict[str, dict[str, Any]] = {
    RANKINGS: {},
    COUNTS: {"judgments": False},
    "stagewise, printed": {"method": "stagewise", "variant": "printed", "max_disagreement": 1.0},
}
"""Options of ``fit`` for each method of the demo."""
DRAWS = 50
"""Number of random samples of annotators."""


@dataclass(frozen=True)
class MethodResult:
    """The error of one method on held-out prompts of a town hall."""

    name: str
    k: int
    brier: float
    brier_corrected: float
    true_error: float
    """Mean squared difference to the true shares, which are known for a town hall."""
    worst_disagreement: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Asked:
    """One held-out question, the answer of the ensemble, and the first choices of the whole town."""

    prompt: str
    responses: tuple[str, ...]
    """The answers to choose from, numbered by first appearance."""
    answer: Answer
    """In balanced mode: a slate and a consensus."""
    first_choices: tuple[float, ...]
    """Share of the town whose first choice each response is, in the order of ``responses``."""

    def share_of(self, text: str) -> float:
        """Return the share of the town whose first choice is this response."""
        return self.first_choices[self.responses.index(text)]


@dataclass(frozen=True)
class DemoResult:
    """All results of the demo."""

    inspect: Inspection
    """Size and noise of the votes."""
    truth: Truth
    """The true values that ``inspect`` estimates."""
    methods: list[MethodResult]
    """All methods and baselines, best first."""
    ensemble: RewardEnsemble
    """The ensemble that was fitted to rankings, at the vote level."""
    report_data: ReportData
    camps: Mapping[str, CampStudy]
    """Which camps the members of an ensemble stand for, by what it was fitted to: vote counts, rankings, or rankings
    with rater ids."""
    asked: Asked

    def method(self, name: str) -> MethodResult:
        """Return the result of one method, by its name."""
        return next(result for result in self.methods if result.name == name)

    def to_json(self) -> JsonObject:
        """Return the results by the names of their fields, without the ensemble."""
        names = [part.name for part in fields(self) if part.name != "ensemble"]
        return {name: to_json({"value": getattr(self, name)})["value"] for name in names}


def demo(
    town: TownHall | None = None,
    *,
    k: int = 8,
    seed: int = 0,
    test_fraction: float = 0.2,
    encoder: str = "minilm",
    progress: Progress | None = None,
) -> DemoResult:
    """Fit every method on a town hall, compare it with baselines, and analyse the ensemble that uses rankings.

    Args:
        town: a town hall whose people rank (default: ``town_hall(2500, rankings=True)``).
        k: number of members.
        seed: random seed.
        test_fraction: share of prompts to hold out.
        encoder: encoder of the texts, as in ``fit``.
        progress: called with the number of encoded texts and of all texts.
    """
    town = town or town_hall(DEFAULT_RANKED_PAIRS, rankings=True)
    votes = town.preferences
    if votes.judgments is None:
        raise UsageError("the demo needs a town whose people rank: use town_hall(..., rankings=True).")
    shared: dict[str, Any] = {"k": k, "seed": seed, "test_fraction": test_fraction}
    rows = votes.test_mask(test_fraction, seed=seed)
    test, truth = votes[rows], town.true_prob[rows]
    fitted = {
        name: fit(votes, progress=progress, encoder=encoder, **shared, **method) for name, method in METHODS.items()
    }
    fitted[WITH_IDS] = fit(town_hall_votes(town), encoder=encoder, **shared)
    ensemble = fitted[RANKINGS]
    _, baselines = read_ensemble(ensemble, test, ensemble.features(texts_of(test)))
    shares = {name: found.share for name, found in baselines.items()}
    methods = [
        *(_measure(name, one, test, truth) for name, one in fitted.items()),
        _measure_share(TRUE_SHARES, len(town.tastes), truth, test, truth),
        _measure_share(PERFECT_SINGLE, 1, (truth > 0.5).astype(float), test, truth),
        _measure_share(CONSTANT_HALF, 1, np.full(len(test), 0.5), test, truth),
        _measure_share(SOFT_BT, 1, shares["soft_bt"], test, truth),
        _measure_share("mixture of BT", k, shares["mixture"], test, truth),
        random_annotators(town, rows, k, seed),
    ]
    held_out, prompt = score_held_out(ensemble, test), int(votes.prompt_index[rows][0])
    return DemoResult(
        inspect=inspect(votes),
        truth=inspect_truth(town),
        methods=sorted(methods, key=lambda result: result.true_error),
        ensemble=ensemble,
        report_data=collect_report_data(ensemble, held_out, options=ReportOptions(seed=seed)),
        camps={name: camps_of_ensemble(town, rows, fitted[name]) for name in (COUNTS, RANKINGS, WITH_IDS)},
        asked=ask(town, ensemble, prompt, seed=seed),
    )


def _measure(name: str, ensemble: RewardEnsemble, test: PreferenceSet, truth: FloatArray) -> MethodResult:
    record = ensemble.record
    if record.evaluation is None:
        raise UsageError("the demo needs held-out prompts: test_fraction must be above 0.")
    brier, corrected = record.evaluation.test.brier, record.evaluation.test.brier_corrected
    true_error = calibration.brier(ensemble.prob_hat(test, ensemble.level), truth)
    seconds = None if record.seconds is None else record.seconds - (record.seconds_encoding or 0.0)
    return MethodResult(name, ensemble.k, brier, corrected, true_error, record.evaluation.worst_disagreement(), seconds)


def _measure_share(name: str, k: int, share: FloatArray, test: PreferenceSet, truth: FloatArray) -> MethodResult:
    corrected = calibration.brier_corrected(share, test.prob_a, test.n_votes)
    return MethodResult(name, k, calibration.brier(share, test.prob_a), corrected, calibration.brier(share, truth))


def ask(town: TownHall, ensemble: RewardEnsemble, prompt: int, *, seed: int = 0) -> Asked:
    """Ask the ensemble one question of a town hall, with the responses of the town as candidates.

    Example:
        >>> from pluralign import fit, town_hall
        >>> town = town_hall(400)
        >>> asked = ask(town, fit(town.preferences, k=2, encoder="none"), 0)
        >>> len(asked.responses), round(sum(asked.first_choices), 6), asked.answer.mode
        (6, 1.0, 'balanced')
    """
    votes = town.preferences
    of_prompt = votes.items().prompt_index == prompt
    rewards = town.annotator_rewards(range(len(town.tastes)))[of_prompt]
    responses = tuple(str(votes.responses[i]) for i in np.flatnonzero(of_prompt))
    first = np.bincount(rewards.argmax(axis=0), minlength=len(responses)) / rewards.shape[1]
    text = votes.prompts[prompt]
    return Asked(str(text), responses, answer(ensemble, text, responses, seed=seed), tuple(first.tolist()))


def random_annotators(town: TownHall, rows: Mask, k: int, seed: int) -> MethodResult:
    """Return the mean error of k random people with equal weights, the construction of Theorem 2, over fifty draws."""
    rng = np.random.default_rng(seed)
    test, truth, name = town.preferences[rows], town.true_prob[rows], f"{k} random people"
    errors = []
    for _ in range(DRAWS):
        share = town.annotator_votes(rng.integers(len(town.tastes), size=k)).mean(axis=1)[rows]
        result = _measure_share(name, k, share, test, truth)
        errors.append((result.brier, result.brier_corrected, result.true_error))
    brier, corrected, true_error = np.mean(errors, axis=0).tolist()
    return MethodResult(name, k, brier, corrected, true_error)


# --- the report -------------------------------------------------------------------------------------------------------


def write_demo_report(result: DemoResult, path: Path, commands: Sequence[Sequence[str]] = ()) -> Path:
    """Write a report of the ensemble, with camps, and a table of all methods.

    Args:
        result: of the demo.
        path: the HTML file to write.
        commands: the commands that reproduce the ensemble, each as a list of words.
    """
    from pluralign.publishing.report import page

    tables: dict[str, Any] = {"camps": result.camps, "details": [methods_table(result)]}
    text = page(result.ensemble, result.report_data, name="The town hall", commands=commands, **tables)
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")
    return path


def methods_table(result: DemoResult) -> Table:
    """Return the table of all methods."""
    return Table(
        "All methods on held-out prompts, best first",
        ("", "k", "Brier", "corrected", "true error", "worst member", "seconds"),
        [(*astuple(one)[:-1], "" if one.seconds is None else f"{one.seconds:.1f}") for one in result.methods],
        "True error: squared distance to the shares of the whole town. Corrected: an estimate of it from the votes "
        "alone. Worst member: largest disagreement of a member (chance level .500).",
    )
