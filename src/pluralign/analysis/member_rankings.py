"""What the members make of several responses to one prompt: how differently they rank them, which each would choose.

The paper's §5, "Do the reward models capture distinct preferences?": best-of-N choices stand in for tuned policies.
Decided here: that members without weight take no part in what is said of choices, and which prompts make a case study.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.theory import kendall as diversity
from pluralign.votes.candidates import Candidates, candidates_of, rows_by_prompt

FEWEST_RESPONSES = 3
"""Held-out prompts with fewer responses say no more of a ranking than a vote does."""


@dataclass(frozen=True)
class MemberPair:
    """Two members that rank responses almost alike, or almost the other way round."""

    members: tuple[int, int]
    tau: float
    weight: float
    """What the two weigh together."""


@dataclass(frozen=True)
class Tops:
    """How the members' first choices differ, averaged over prompts."""

    distinct: float
    """Different first choices a prompt."""
    distinct_if_random: float
    """What members choosing at random would have."""
    most_popular: float
    """Share of the weight on the response that most weight has as its first choice."""


@dataclass(frozen=True)
class Diversity:
    """How differently the members of an ensemble rank the same responses."""

    tau: list[list[float]]
    """Kendall's tau-b between members, averaged over prompts, ``(k, k)``: 1 identical, 0 random, −1 reversed."""
    standard_error: list[list[float]]
    """Of each, from its spread over prompts."""
    mean_off_diagonal: float
    mean_off_diagonal_standard_error: float
    weighted_off_diagonal: float
    """The same mean with each two members counted by the product of their weights."""
    weights: list[float]
    tops: Tops
    near_copies: list[MemberPair]
    near_opposites: list[MemberPair]
    vote_agreement: list[list[float]] | None
    """Share of the held-out pairs on which each two members prefer the same response; None without such votes."""
    constant: list[int]
    """For how many prompts each member gave all responses the same reward; they are left out of its taus."""
    prompts: int
    candidates: int
    """Responses ranked, all prompts together."""
    skipped: int
    """Prompts with a single response, which cannot be ranked."""


@dataclass(frozen=True)
class Choice:
    """One response, and the members that put it first."""

    response: str
    members: list[int]
    weight: float


@dataclass(frozen=True)
class CaseStudy:
    """One prompt, and the response each member would choose for it."""

    number: int
    """Of the prompt among the candidates, from 1."""
    prompt: str
    candidates: int
    tau: float
    """Mean of Kendall's tau between the members, on this prompt."""
    choices: list[Choice]
    """The most weight first."""


def held_out_candidates(
    evidence: HeldOutVotes, least: int = FEWEST_RESPONSES
) -> tuple[list[Candidates], list[FloatArray]]:
    """Return the responses of each held-out prompt and the members' rewards for them; no text is encoded."""
    rows = [rows for rows in rows_by_prompt(evidence.preferences) if len(rows) >= least]
    return candidates_of(evidence.preferences, least), [evidence.rewards[of_prompt] for of_prompt in rows]


def score_candidates(
    ensemble: RewardEnsemble, candidates: Sequence[Candidates], progress: Progress | None = None
) -> list[FloatArray]:
    """Return each member's reward for each response, ``(n_responses, k)`` for each prompt."""
    items = [(one.prompt, response) for one in candidates for response in one.responses]
    ends = np.cumsum([len(one.responses) for one in candidates])
    return np.split(ensemble.rewards(items, progress), ends[:-1])


def measure_diversity(
    ensemble: RewardEnsemble,
    candidates: Sequence[Candidates],
    *,
    rewards: Sequence[FloatArray] | None = None,
    evidence: HeldOutVotes | None = None,
    progress: Progress | None = None,
) -> Diversity:
    """Measure how differently the members rank the same candidates.

    Args:
        ensemble: whose members are compared.
        candidates: prompts with their responses; those with a single response are skipped.
        rewards: the members' rewards for them, where they are at hand (``score_candidates``).
        evidence: held-out votes, for how often members vote alike.
        progress: called while texts are encoded.
    """
    rewards = score_candidates(ensemble, candidates, progress) if rewards is None else rewards
    ranked = [of_prompt for of_prompt in rewards if len(of_prompt) >= 2]
    if not ranked:
        raise UsageError("diversity needs a prompt with at least two different responses; there is none.")
    if ranked[0].shape[1] != ensemble.k:
        raise UsageError(f"the rewards are of {ranked[0].shape[1]} members, but the ensemble has {ensemble.k}.")
    found = diversity.mean_tau(ranked)
    weights = ensemble.weights
    return Diversity(
        tau=found.tau.tolist(),
        standard_error=found.standard_error.tolist(),
        mean_off_diagonal=found.off_diagonal,
        mean_off_diagonal_standard_error=found.off_diagonal_standard_error,
        weighted_off_diagonal=diversity.weighted_off_diagonal(found.tau, weights),
        weights=weights.tolist(),
        tops=_tops(ranked, weights),
        near_copies=_named(diversity.near_copies(found.tau), found.tau, weights),
        near_opposites=_named(diversity.near_opposites(found.tau), found.tau, weights),
        vote_agreement=diversity.vote_agreement(evidence.votes).tolist() if evidence else None,
        constant=found.constant.tolist(),
        prompts=len(ranked),
        candidates=sum(map(len, ranked)),
        skipped=len(rewards) - len(ranked),
    )


def _tops(rewards: Sequence[FloatArray], weights: FloatArray) -> Tops:
    used = weights > NEGLIGIBLE_WEIGHT
    distinct = [len(set(of_prompt[:, used].argmax(axis=0).tolist())) for of_prompt in rewards]
    at_random = [diversity.expected_distinct(len(of_prompt), int(used.sum())) for of_prompt in rewards]
    popular = [float(diversity.weight_on_tops(of_prompt, weights).max()) for of_prompt in rewards]
    return Tops(float(np.mean(distinct)), float(np.mean(at_random)), float(np.mean(popular)))


def _named(pairs: list[tuple[int, int]], tau: FloatArray, weights: FloatArray) -> list[MemberPair]:
    return [MemberPair((i, j), float(tau[i, j]), float(weights[i] + weights[j])) for i, j in pairs]


def case_studies(
    ensemble: RewardEnsemble,
    candidates: Sequence[Candidates],
    n: int = 3,
    *,
    containing: str = "",
    numbers: Sequence[int] = (),
    rewards: Sequence[FloatArray] | None = None,
    progress: Progress | None = None,
) -> list[CaseStudy]:
    """Put the first choices of the members side by side.

    Unless prompts are named, those with the most different first choices come first, and of these the ones with the
    lowest mean tau. Of two responses with the same reward the first one listed is chosen.

    Args:
        ensemble: whose members choose.
        candidates: prompts with their responses.
        n: how many prompts to show.
        containing: only prompts that contain this text, whatever its case.
        numbers: just these prompts, counted from 1, in this order.
        rewards: the members' rewards for the candidates, where they are at hand.
        progress: called while texts are encoded.

    Reference: the paper's appendix "Qualitative Case Studies of Ensemble Outputs".
    """
    if bad := [number for number in numbers if not 1 <= number <= len(candidates)]:
        raise UsageError(f"prompts are numbered from 1 to {len(candidates)}; there is no prompt {bad[0]}.")
    rewards = score_candidates(ensemble, candidates, progress) if rewards is None else rewards
    chosen = [number - 1 for number in numbers] or [p for p in range(len(candidates)) if len(rewards[p]) >= 2]
    if containing:
        chosen = [p for p in chosen if containing.casefold() in candidates[p].prompt_text.casefold()]
        if not chosen:
            raise UsageError(f"no prompt contains {containing!r}.")
    cases = [_case(p, candidates[p], rewards[p], ensemble.weights) for p in chosen]
    if numbers:
        return cases
    return sorted(cases, key=lambda case: (-len(case.choices), case.tau))[:n]


def _case(position: int, one: Candidates, rewards: FloatArray, weights: FloatArray) -> CaseStudy:
    members: dict[int, list[int]] = {}
    for j in np.flatnonzero(weights > NEGLIGIBLE_WEIGHT).tolist():
        members.setdefault(int(rewards[:, j].argmax()), []).append(j)
    choices = [Choice(one.responses[top], those, float(weights[those].sum())) for top, those in members.items()]
    tau = diversity.mean_tau([rewards[:, weights > NEGLIGIBLE_WEIGHT]]).off_diagonal
    return CaseStudy(
        number=position + 1,
        prompt=one.prompt_text,
        candidates=len(one.responses),
        tau=tau,
        choices=sorted(choices, key=lambda choice: -choice.weight),
    )
