"""``FitRecord``: the typed record of a fit, with held-out figures (``Evaluation``), history, data and options.

Also decided here: which pairs are measured, so that no figure is about a training prompt by mistake.

Undefined figures are NaN here and null in JSON.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import Mask
from pluralign.core.errors import DataError
from pluralign.core.json_values import JsonObject, from_json, to_json
from pluralign.core.late import late
from pluralign.core.text import counted
from pluralign.core.types import Level
from pluralign.theory.calibration import Reliability
from pluralign.theory.intervals import Interval
from pluralign.votes.options import Loaded
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# --- The prompts that an ensemble was trained on, as hashes, so that nothing is measured on them by mistake.


PromptHashes = npt.NDArray[np.uint64]
NO_PROMPTS: PromptHashes = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True)
class LeftOut:
    """The pairs of a data set that were left out because an ensemble was trained on their prompts."""

    pairs: int = 0
    prompts: int = 0
    measured: int = 0
    """Training prompts that were measured all the same, with ``all_prompts``. Scores are then too good."""

    @property
    def sentence(self) -> str:
        """What was left out, in words; empty if nothing was.

        Example:
            >>> LeftOut(1544, 80).sentence
            'Left out 80 prompts (1,544 pairs) that were used for training.'
        """
        if self.measured:
            return f"{counted(self.measured, 'training prompt')} included: scores are too good."
        if not self.prompts:
            return ""
        pairs = f" ({counted(self.pairs, 'pair')})" if self.pairs else ""
        verb = "was" if self.prompts == 1 else "were"
        return f"Left out {counted(self.prompts, 'prompt')}{pairs} that {verb} used for training."


def hash_prompts(prompts: Iterable[PromptLike]) -> PromptHashes:
    """Return the sorted distinct hashes of prompts."""
    return np.unique(np.array([Prompt(prompt).identity for prompt in prompts], dtype=np.uint64))


def are_trained(prompts: Iterable[PromptLike], trained_on: PromptHashes) -> Mask:
    """Return which prompts are among the training prompts, ``(n_prompts,)``."""
    return np.isin(np.array([Prompt(prompt).identity for prompt in prompts], dtype=np.uint64), trained_on)


def pairs_to_measure(
    preferences: PreferenceSet, trained_on: Sequence[PromptHashes], *, all_prompts: bool = False
) -> tuple[Mask, LeftOut]:
    """Return which pairs have prompts that were not used for training, ``(n_pairs,)``, and the number of the others.

    Args:
        preferences: votes.
        trained_on: the training prompts of each ensemble to be measured.
        all_prompts: leave nothing out.

    Raises:
        DataError: every prompt was used for training.
    """
    trained = are_trained(preferences.prompts, np.concatenate([*trained_on, NO_PROMPTS]))
    rows = trained[preferences.prompt_index]
    if all_prompts:
        return np.ones(len(preferences), dtype=bool), LeftOut(measured=int(trained.sum()))
    if rows.all():
        problem = f"all {counted(len(trained), 'prompt')} were used for training, so scores would be too good"
        remedy = "give votes on other prompts, or measure on training prompts with evaluate --all"
        raise DataError(problem, file=preferences.name, remedy=remedy)
    return ~rows, LeftOut(int(rows.sum()), int(trained.sum()))


NEGLIGIBLE_WEIGHT = 1e-6
"""Members with no more weight than this are ignored."""
CHANCE = 0.5
"""The expected disagreement of a coin flip."""
BASELINE_NAMES = {
    "floor": "floor",
    "constant_half": "constant ½",
    "soft_bt": "soft BT as σ(Δr)",
    "soft_bt_temperature": "soft BT, tempered",
    "damped_bt": "soft BT, damped",
    "undecided_bt": "soft BT, undecided share",
    "hard_bt": "hard BT",
    "pair": "{r, −r}",
    "bootstrap": "bootstrap",
    "mean_variance": "mean–variance",
    "mixture": "mixture of BT",
}
"""Display name of every baseline, including the two that need no fit."""
SINGLE_REWARDS = ("soft_bt", "soft_bt_temperature", "damped_bt", "undecided_bt")
"""The baselines that read one reward as a probability."""
Settings: TypeAlias = Mapping[str, str | int | float | bool | None]
"""Options as they were given, by name."""


def worse_than_chance(disagreement: float, weight: float) -> bool:
    """Whether a member that has weight disagrees with people more than a coin flip does.

    No policy should be tuned to such a member.

    Example:
        >>> worse_than_chance(0.51, 0.1), worse_than_chance(0.51, 0.0), worse_than_chance(0.5, 0.1)
        (True, False, False)
    """
    return disagreement > CHANCE and weight > NEGLIGIBLE_WEIGHT


@dataclass(frozen=True)
class Scores:
    """Scores of one prediction of the vote shares."""

    brier: float
    brier_corrected: float
    """Brier − noise: an unbiased estimate of the true calibration error (Lemma 1). NaN if every pair has one vote."""
    log_loss: float
    absolute_error: float
    """mean |p̂ − p|."""

    @property
    def scores(self) -> dict[str, float]:
        """The scores by name."""
        return {part.name: getattr(self, part.name) for part in fields(Scores)}


@dataclass(frozen=True)
class Figures(Scores):
    """All figures of one prediction of the vote shares."""

    noise: float
    calibration_error: float
    """Expected calibration error over ten bins of equal mass."""
    interval: Interval
    """95 % interval over prompts of the corrected Brier score (of the plain one if every pair has one vote)."""


@dataclass(frozen=True)
class Compared(Scores):
    """Scores of a baseline, and the paired difference of Brier scores (ensemble − baseline)."""

    k: int
    difference: Interval
    """Below 0 the ensemble is better."""
    worst_disagreement: float | None
    """Largest disagreement of a member. None if the baseline has no votes."""


@dataclass(frozen=True)
class MemberFigures:
    """Figures of one member."""

    weight: float
    disagreement: float
    regret: float


@dataclass(frozen=True)
class VoicesEvidence:
    """Whether several rewards predict pair counts better than the best single reward. See ``learning.measure``.

    That is no evidence that people differ: ``JudgmentFigures`` is.
    """

    evidence: bool | None
    """Whether ``difference`` is entirely below 0. None if undefined."""
    best_single: str
    """Key of the single reward with the lowest Brier score on these votes."""
    reading: str
    """The reading of the ensemble whose interval has the lowest upper end."""
    difference: Interval
    """Brier score of that reading − Brier score of the best single reward."""
    confidence: float
    """Coverage of the interval."""


ENOUGH_PEOPLE = 1.5
"""Smallest mean number of people who judged the same responses that tells people from prompts."""


@dataclass(frozen=True)
class JudgmentFigures:
    """How well whole judgments on held-out prompts are predicted, and whether one reward would do as well."""

    n: int
    """Number of judgments: what one person said about the responses to one prompt."""
    prompts: int
    log_likelihood: float
    """Of the ensemble, per judgment, with people of different decisiveness and a part common to each group."""
    uniform: float
    """Of rankings that are equally likely, per judgment."""
    best_single: float
    """Of the best single reward with the same decisiveness, with or without a part common to each group."""
    gain: Interval
    """``log_likelihood`` − ``best_single`` per judgment, with its 95 % interval by prompt. Above 0: distinct voices."""
    people: float
    """Mean number of people who judged the same responses. Below ``ENOUGH_PEOPLE`` the gain has no interval."""

    @property
    def evidence(self) -> bool | None:
        """Whether people differ in their preferences. None without an interval."""
        return None if np.isnan(self.gain.low) else self.gain.low > 0


@dataclass(frozen=True)
class FirstChoices:
    """Predicted against observed shares of first choices, over sets of t responses that the same people judged."""

    t: int
    sets: int
    """Number of sets."""
    error: float
    """Mean over sets of Σ_s (q_s − f_s)², with f_s the share of people whose first choice is s."""
    corrected: float
    """The same less the noise of a few people: unbiased for the error against the shares of all people."""
    interval: Interval
    """95 % interval of ``corrected`` by prompt."""
    soft_bt: float
    """``error`` of one soft Bradley–Terry reward read as Plackett–Luce."""
    uniform: float
    """``error`` of equal shares."""
    difference: Interval
    """``error`` − ``soft_bt``, with its 95 % interval by prompt. Below 0 the ensemble is better."""


@dataclass(frozen=True, repr=False)
class Evaluation:
    """Figures of a predictor on one set of votes."""

    level: str
    """The reading that ``test`` measures: the one an ensemble was fitted for."""
    test: Figures
    levels: Mapping[str, Figures]
    """Figures of every reading. An ensemble has two: hard votes, and policies at the fitted temperature."""
    baselines: Mapping[str, Compared]
    members: list[MemberFigures]
    undecided: float
    """u, the share of votes that no member explains. 0 for predictors without one."""
    reliability: Reliability
    strata: Mapping[str, tuple[int, float]]
    """Number of pairs and mean squared error, by how people split."""
    pairs: int
    prompts: int
    voices: VoicesEvidence | None = field(default=None, kw_only=True)
    """The best single reward on pair counts. None without several members or without a single reward."""
    judgments: JudgmentFigures | None = field(default=None, kw_only=True)
    """Figures of whole judgments. None if there are none, or if the ensemble was not fitted to judgments."""
    first_choices: list[FirstChoices] = field(default_factory=list, kw_only=True)
    """Figures of first choices for t = 2, 3, 4, as far as judgments have that many responses."""
    left_out: LeftOut = field(default_factory=LeftOut, kw_only=True)
    """Pairs of the data that were not measured, because an ensemble was trained on their prompts."""

    def worst_disagreement(self) -> float | None:
        """Return the largest disagreement of a member whose weight counts, or None where nothing votes."""
        return max((member.disagreement for member in self.members if member.weight > NEGLIGIBLE_WEIGHT), default=None)

    def __str__(self) -> str:
        from pluralign.ensemble.verdict import headline, voices_sentence  # it imports this module

        found = headline(self)  # without a next step: that depends on the predictor
        return "\n".join(filter(None, (f"{self.pairs:,} pairs", found.main, found.verdict, voices_sentence(self))))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"

    def _repr_html_(self) -> str:
        return str(late("publishing.notebook", "evaluation_html")(self))

    def plot(self) -> "Figure":
        """Return a figure of observed against predicted shares. Needs matplotlib.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        drawing: Figure = late("publishing.figures", "reliability_curve", purpose="a figure")(self)
        return drawing


@dataclass(frozen=True)
class HistoryRow:
    """The ensemble of one size."""

    k: int
    train_brier: float
    test_brier: float
    test_brier_corrected: float
    weights: list[float]
    undecided: float = 0.0


@dataclass(frozen=True)
class DataSummary:
    """The votes of a fit, and how many of them were held out."""

    name: str
    fingerprint: str
    train_pairs: int
    train_prompts: int
    test_pairs: int
    test_prompts: int
    loaded: Loaded | None = field(default_factory=Loaded)
    """How the votes were read. None for votes that were made or changed in Python."""


@dataclass(frozen=True)
class BoundCost:
    """What the bound on disagreement costs: held-out Brier score and worst member, with the bound and without."""

    max_disagreement: float
    brier: float
    brier_without: float
    worst: float
    worst_without: float


@dataclass(frozen=True)
class TunedFit:
    """One of several fits on a fine-tuned model."""

    validation: float
    """Brier score on validation prompts."""
    test: float
    """Held-out Brier score of the ensemble, corrected for vote noise."""
    difference: float | None = None
    """Held-out Brier score minus that of the frozen ensemble, with its 95 % interval by prompt."""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class EncoderChoice:
    """A fine-tuned model next to the frozen one: fits on the same split."""

    used: str
    """The fit with the lowest Brier score on validation prompts; frozen, unless another is clearly better.

    ``tuned``: on the states of the fine-tuned model, or with a trained pooling. ``outputs``: members are combinations
    of its trained outputs. ``frozen``: on the features of the same model before tuning.
    """
    validation_tuned: float
    """Brier score on validation prompts of members that were fitted without them."""
    validation_frozen: float | None
    """None if the frozen model was not compared."""
    test_tuned: float
    """Held-out Brier score of the ensemble on tuned features, corrected for vote noise."""
    test_frozen: float | None
    difference: float | None
    """Held-out Brier score, tuned minus frozen, with its 95 % interval by prompt; None with few prompts."""
    low: float | None = None
    high: float | None = None
    outputs: TunedFit | None = None
    """The fit of ``outputs``. None for a sentence encoder."""
    why: str = ""
    """Why this fit is used."""
    judgments: bool = False
    """Whether the figures on validation prompts are −log P per judgment instead of Brier scores."""


@dataclass(frozen=True)
class PruneRecord:
    """How an ensemble was pruned (Theorem 3)."""

    k: int
    """Members before."""
    beta: float
    only_far: bool
    removed: list[int]
    removed_weight: float
    epsilon: float
    bound: float
    source: str = ""
    """Folder of the ensemble before pruning."""


@dataclass(frozen=True)
class Voice:
    """One member in the insight of an ensemble."""

    member: int
    share: float
    """Its weight."""
    name: str
    """At most four words; no other member has it."""
    wants: str
    """What it prefers and rejects, in words; empty if no difference from the other members is significant."""
    example: str = ""
    """A pair on which most other members disagree, as two quotes."""

    @property
    def line(self) -> str:
        """What it wants, and the example."""
        return "; ".join(filter(None, (self.wants or "no significant difference from the others", self.example)))


@dataclass(frozen=True)
class Insight:
    """Who disagrees about what, in words: what every surface shows first. From ``measuring.insight``."""

    title: str
    evidence: Literal["clear", "none", "unknown"]
    """Whether whole judgments on held-out prompts show that people differ in their preferences."""
    sentence: str
    """The same with figures."""
    voices: list[Voice]
    """The members, the heaviest first. Empty without evidence: then they stand for nobody."""
    unites: str
    """What people or members agree on."""
    example: str
    """A pair of responses as an example, as two quotes."""
    divides: str
    """The questions that people split most on."""
    trust: str
    """How far a predicted share is off on unseen prompts."""
    advice: str = ""
    """Which votes would show voices; empty if these do."""

    @property
    def findings(self) -> list[str]:
        """The sentences below the voices."""
        agreed = f"{self.unites} Example: {self.example}." if self.unites and self.example else self.unites
        split = f"People split most on: {self.divides}." if self.divides else ""
        return [line for line in (agreed, split, self.trust, self.advice) if line]

    def without_texts(self) -> "Insight":
        """Return the insight without quotes and questions of the votes."""
        return replace(self, voices=[replace(one, example="") for one in self.voices], example="", divides="")

    def text(self, width: int = 100) -> str:
        """Return the insight as lines of text of this width."""
        wrap = partial(textwrap.wrap, width=width, break_on_hyphens=False)
        lines, largest = [self.title, *wrap(self.sentence)], max((one.share for one in self.voices), default=1)
        column = max((len(one.name) for one in self.voices), default=0) + 2
        for one in self.voices:
            bar = "▇" * max(round(BAR * one.share / largest), 1)
            start = f"{bar:{BAR}} {one.share:4.0%}  {one.name:{column}}"
            indent = len(start) if width - len(start) >= NARROW else BAR
            lines += wrap(start + one.line, subsequent_indent=" " * indent)
        return "\n".join([*lines, *(line for finding in self.findings for line in wrap(finding))])


BAR, NARROW = 8, 40
"""Width of the longest bar, and of the narrowest column of text."""


@dataclass(frozen=True, repr=False)
class FitRecord:
    """The record of a fit. Ensembles built by hand have an empty one."""

    method: str = ""
    level: Level = "vote"
    k: int = 0
    baseline_formulas: Mapping[str, str] = field(default_factory=dict)
    options: Settings = field(default_factory=dict)
    target: str | None = None
    """What joint members learned from: ``teacher``, ``mixture``, ``votes``, or ``raters`` if rater ids were used."""
    vote_share: float | None = None
    """Share of the raw votes in that target. None for ``raters`` and at the policy level."""
    seed_spread: float | None = None
    """Standard deviation of the held-out Brier score over random seeds, with the split and the data as they are."""
    raters: int | None = None
    """Number of raters with training votes. None if the fit had no rater ids."""
    history: list[HistoryRow] = field(default_factory=list)
    bound: BoundCost | None = None
    data: DataSummary | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    evaluation: Evaluation | None = None
    """Figures on held-out prompts."""
    cross_validation: Evaluation | None = None
    """With ``folds``: figures on all prompts, each predicted by an ensemble that was fitted without it."""
    tuning: Settings | None = None
    """Options and outcome of fine-tuning, with a backbone."""
    encoders: EncoderChoice | None = None
    """With a backbone and joint members: the fine-tuned model next to the frozen one."""
    insight: Insight | None = None
    """Who disagrees about what, on held-out prompts."""
    notes: list[str] | None = None
    processes: int | None = None
    seconds_members: list[float] | None = None
    seconds: float | None = None
    seconds_encoding: float | None = None
    pruned: PruneRecord | None = None

    @property
    def kept(self) -> HistoryRow | None:
        """The row of the history with k members. Rows after it are of stages that early stopping did not keep."""
        return next((row for row in self.history if row.k == self.k), None)

    def __repr__(self) -> str:
        data = f", {self.data.name}: {self.data.train_pairs:,} training pairs" if self.data else ""
        return f"FitRecord({self.method} k={self.k}, {self.level} level{data})"

    def to_json(self) -> JsonObject:
        """Return the record with the keys of the command line's JSON; figures of ``evaluation`` are top-level keys."""
        own: JsonObject = {name: value for name, value in to_json(self).items() if value is not None}
        figures: JsonObject = own.pop("evaluation", {})
        return own | figures

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "FitRecord":
        """Return the record that ``to_json`` wrote."""
        evaluation = from_json(Evaluation, value) if "test" in value else None
        return replace(from_json(cls, value), evaluation=evaluation)
