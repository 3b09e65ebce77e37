"""The results of an evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass

from pluralign.ensemble.headline import Headline
from pluralign.ensemble.record import Compared, Evaluation
from pluralign.evaluation.groups import AdversarialGroup, Group, WorstGroup
from pluralign.evaluation.majority import MajorityShare
from pluralign.evaluation.predictors import Kind
from pluralign.evaluation.representation import Representation
from pluralign.models.judge import JudgeUsage


@dataclass(frozen=True)
class PredictorInfo:
    """The predictor that was evaluated."""

    name: str
    kind: Kind
    k: int
    temperature: float | None
    note: str
    usage: JudgeUsage | None = None
    """Calls and tokens of a language model that judges as personas."""
    personas: tuple[str, ...] = ()
    """Descriptions of the members, if they are personas."""


@dataclass(frozen=True)
class Rival:
    """Another predictor on the same pairs, with the differences (evaluated − rival) for each of its readings."""

    name: str
    kind: Kind
    level: str
    readings: Mapping[str, Compared]
    note: str = ""
    usage: JudgeUsage | None = None
    personas: tuple[str, ...] = ()


@dataclass(frozen=True)
class PolicyRow:
    """The policy level at one strength of regularisation. 0 is the limit: the share of hard votes."""

    beta: float
    brier: float
    brier_corrected: float
    brier_reference: float | None
    """With the log-ratio of the reference policy, if there is one."""
    brier_corrected_reference: float | None


@dataclass(frozen=True)
class PolicyLevel:
    """The policy level by strength of regularisation, strongest first."""

    reference: str | None
    rows: list[PolicyRow]


@dataclass(frozen=True, repr=False)
class FullEvaluation(Evaluation):
    """An evaluation with groups, other predictors and the policy level beside the figures of a fit."""

    subject: PredictorInfo
    headline: Headline
    """The main figure, the verdict and the next step."""
    against: list[Rival]
    majority: Mapping[str, MajorityShare]
    """Share of the majority's side, observed and predicted, by how people split."""
    certain_though_contested: float
    """Share of contested pairs with more than .9 predicted for one side."""
    groups: Mapping[str, list[Group]]
    worst_group: WorstGroup | None
    adversarial: list[AdversarialGroup]
    policy: PolicyLevel | None
    """None for files of probabilities."""
    representation: Representation | None = None
    """How well individual raters are represented, if the raters are known."""

    def __str__(self) -> str:
        return f"{self.subject.name}: {self.pairs:,} pairs\n{self.headline}"
