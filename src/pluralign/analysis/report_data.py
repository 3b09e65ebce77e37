"""Everything a report shows of one ensemble, measured on votes it did not learn from, in one value.

Decided here: what belongs in a report. Drawing it is up to ``reporting``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pluralign.analysis.certificate import Certificate, certify
from pluralign.analysis.member_rankings import (
    CaseStudy,
    Diversity,
    case_studies,
    held_out_candidates,
    measure_diversity,
    score_candidates,
)
from pluralign.analysis.profiles import Profile, member_profiles
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import Evaluation, FitRecord
from pluralign.evaluation.groups import (
    DEFAULT_GROUPINGS,
    Group,
    MajorityShare,
    WorstGroup,
    judge_groups,
    majority_shares,
)
from pluralign.theory.best_of_n import BestOfN, best_of_n
from pluralign.votes.candidates import Candidates
from pluralign.votes.summary import Inspection, inspect

CASES = 4


@dataclass(frozen=True)
class ReportData:
    """One ensemble as a report shows it."""

    record: FitRecord
    """The record of the fit, with the figures on these votes as its ``evaluation``."""
    votes: Inspection
    majorities: Mapping[str, MajorityShare]
    """What is left of disagreement, by how people split."""
    groups: Mapping[str, Sequence[Group]]
    worst_group: WorstGroup | None
    diversity: Diversity | None
    """None where no prompt has enough responses to rank."""
    best_of_n: BestOfN | None
    profiles: list[Profile]
    certificate: Certificate
    cases: list[CaseStudy]


def collect_report_data(
    ensemble: RewardEnsemble,
    evidence: HeldOutVotes,
    evaluation: Evaluation | None = None,
    *,
    candidates: Sequence[Candidates] | None = None,
    cases: int = CASES,
    containing: str = "",
    groupings: Sequence[str] = DEFAULT_GROUPINGS,
    seed: int = 0,
    progress: Progress | None = None,
) -> ReportData:
    """Measure what a report shows.

    Args:
        ensemble: the one to be shown.
        evidence: held-out votes with the members' rewards.
        evaluation: figures on these votes (default: those of ``fit`` on its held-out votes).
        candidates: responses to rank for diversity and case studies; unless given, those of the held-out prompts.
        cases: how many case studies.
        containing: only prompts with this text become case studies.
        groupings: what pairs are grouped by: ``length``, ``topic`` or columns of the votes.
        seed: of clusters of topics.
        progress: called while candidates are encoded.
    """
    record = ensemble.record if evaluation is None else replace(ensemble.record, evaluation=evaluation)
    if candidates is None:
        candidates, rewards = held_out_candidates(evidence)
    else:
        rewards = score_candidates(ensemble, candidates, progress)
    people, share = evidence.preferences, evidence.prob_hat(ensemble)
    groups, worst = judge_groups(share, people, groupings, seed=seed)
    ranked = any(len(of_prompt) > 1 for of_prompt in rewards)
    return ReportData(
        record=record,
        votes=inspect(people),
        majorities=majority_shares(share, people.prob_a, people.n_votes, seed=seed),
        groups=groups,
        worst_group=worst,
        diversity=measure_diversity(ensemble, candidates, rewards=rewards, evidence=evidence) if ranked else None,
        best_of_n=best_of_n(rewards),
        profiles=member_profiles(ensemble.weights, evidence),
        certificate=certify(ensemble, evidence),
        cases=case_studies(ensemble, candidates, cases, containing=containing, rewards=rewards) if ranked else [],
    )
