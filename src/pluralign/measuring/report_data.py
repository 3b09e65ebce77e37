"""Everything that a report shows of one ensemble, measured on held-out votes.

This module decides what belongs in a report. ``publishing.report`` lays it out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from pluralign.core.errors import UsageError
from pluralign.core.json_values import JsonObject, to_json
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import Evaluation, FitRecord, Insight
from pluralign.measuring import diversity as spread
from pluralign.measuring.cards import Descriptions, Profile, member_profiles, unnamed_reason, with_descriptions
from pluralign.measuring.certificate import Certificate, certify
from pluralign.measuring.evaluate import FullEvaluation, MajorityShare, majority_shares
from pluralign.measuring.groups import DEFAULT_GROUPINGS, Group, WorstGroup, measure_groups
from pluralign.measuring.individuals import Representation
from pluralign.theory.best_of_n import BestOfN, best_of_n
from pluralign.votes.candidates import Candidates
from pluralign.votes.summary import Inspection, inspect


@dataclass(frozen=True)
class ReportData:
    """The results that a report shows."""

    record: FitRecord
    """The record of the fit, with the figures on these votes as its ``evaluation``. On other votes than those of the
    fit it has no ``cross_validation``."""
    votes: Inspection
    majorities: Mapping[str, MajorityShare]
    """Majority shares, observed and predicted, by how people split."""
    groups: Mapping[str, Sequence[Group]]
    worst_group: WorstGroup | None
    diversity: spread.Diversity | None
    """None if no prompt has enough responses to rank."""
    best_of_n: BestOfN | None
    profiles: list[Profile]
    certificate: Certificate
    cases: list[spread.CaseStudy]
    representation: Representation | None = None
    """How well individual raters are represented, if it was measured."""

    @property
    def evaluation(self) -> Evaluation:
        """Figures on these votes. Raises UsageError if the ensemble was fitted without held-out votes."""
        if self.record.evaluation is None:
            raise UsageError("the ensemble has no held-out figures: name votes with --data, or fit again.")
        return self.record.evaluation

    @property
    def main(self) -> Evaluation:
        """The figures that count: those of the cross-validation if there was one."""
        return self.record.cross_validation or self.evaluation

    @property
    def insight(self) -> Insight | None:
        """Who disagrees about what, by these votes."""
        return self.evaluation.insight if isinstance(self.evaluation, FullEvaluation) else self.record.insight

    @property
    def unnamed(self) -> str:
        """Why some members have no name; empty if all have one."""
        return unnamed_reason(self.profiles, self.votes.prompts)

    def to_json(self) -> JsonObject:
        """Return the data with the keys of the command line's JSON; the record of the fit is under ``facts``."""
        others = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "record"}
        return {"facts": self.record.to_json(), **to_json(others)}


@dataclass(frozen=True)
class ReportOptions:
    """What to show in a report."""

    candidates: Sequence[Candidates] | None = None
    """Responses to rank for diversity and case studies (default: the responses of the held-out prompts)."""
    cases: int = 4
    """Number of case studies."""
    prompt: str = ""
    """Restrict case studies to prompts with this text, or to the prompt with this number."""
    groupings: Sequence[str] = DEFAULT_GROUPINGS
    """How to group pairs: ``length``, ``topic`` or columns of the votes."""
    seed: int = 0
    """Random seed of the topic clusters."""


def collect_report_data(
    ensemble: RewardEnsemble,
    held_out: HeldOutVotes,
    evaluation: Evaluation | None = None,
    options: ReportOptions | None = None,
    *,
    representation: Representation | None = None,
    descriptions: Descriptions | None = None,
    progress: Progress | None = None,
) -> ReportData:
    """Measure everything that a report shows.

    Args:
        ensemble: the ensemble to report on.
        held_out: held-out votes with the rewards of its members.
        evaluation: figures on these votes (default: those that ``fit`` recorded on its held-out votes).
        options: what to show.
        representation: how well individual raters are represented, from ``load_representation``.
        descriptions: of the members by a language model, from ``load_descriptions``.
        progress: called while candidates are encoded.
    """
    record, options = ensemble.record, options or ReportOptions()
    if evaluation is not None:
        record = replace(record, evaluation=evaluation, cross_validation=None)
    if (candidates := options.candidates) is None:
        candidates, rewards = spread.held_out_candidates(held_out)
    else:
        rewards = spread.score_candidates(ensemble, candidates, progress)
    people, share = held_out.preferences, held_out.prob_hat(ensemble)
    groups, worst = measure_groups(share, people, options.groupings, seed=options.seed)
    ranked = any(len(of_prompt) > 1 for of_prompt in rewards)
    prompt = options.prompt if ranked else ""
    return ReportData(
        record=record,
        votes=inspect(people),
        majorities=majority_shares(share, people.prob_a, people.n_votes, seed=options.seed),
        groups=groups,
        worst_group=worst,
        diversity=spread.measure_diversity(ensemble, rewards, held_out) if ranked else None,
        best_of_n=best_of_n(rewards),
        profiles=with_descriptions(member_profiles(ensemble.weights, held_out), descriptions),
        certificate=certify(ensemble, held_out),
        cases=spread.case_studies(ensemble, candidates, rewards, options.cases, prompt),
        representation=representation,
    )
