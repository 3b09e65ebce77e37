"""How the members rank several responses to one prompt: the diversity of their rankings, and their first choices.

This follows the paper's §5, "Do the reward models capture distinct preferences?", where best-of-N choices stand in for
tuned policies. This module decides which prompts become case studies.
"""

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble, as_ensemble
from pluralign.ensemble.held_out import HeldOutVotes, has_held_out, load_held_out
from pluralign.ensemble.record import LeftOut, are_trained
from pluralign.theory import kendall
from pluralign.theory.social_choice import first_choices
from pluralign.votes.candidates import Candidates, CandidatesLike, candidates_of, load_candidates, rows_by_prompt

MIN_RESPONSES = 3
"""Held-out prompts with fewer responses are not ranked: a ranking of two responses is a vote."""


@dataclass(frozen=True)
class MemberPair:
    """Two members with nearly equal or nearly reversed rankings."""

    members: tuple[int, int]
    tau: float
    weight: float
    """Sum of their weights."""


@dataclass(frozen=True)
class Tops:
    """Diversity of the members' first choices, averaged over prompts."""

    distinct: float
    """Number of different first choices per prompt."""
    distinct_if_random: float
    """Expected number if members chose at random."""
    most_popular: float
    """Largest share of the weight with the same first choice."""


@dataclass(frozen=True)
class FirstChoice:
    """A response and the members whose first choice it is."""

    response: str
    members: list[int]
    weight: float


@dataclass(frozen=True)
class CaseStudy:
    """A prompt and the response that each member would choose."""

    number: int
    """Number of the prompt among the candidates, from 1."""
    prompt: str
    candidates: int
    tau: float
    """Mean of Kendall's tau between the members on this prompt."""
    choices: list[FirstChoice]
    """In order of decreasing weight."""


@dataclass(frozen=True)
class Diversity:
    """Differences between the members' rankings of the same responses."""

    tau: list[list[float]]
    """Kendall's tau-b between members, averaged over prompts, ``(k, k)``: 1 identical, 0 random, −1 reversed."""
    standard_error: list[list[float]]
    """Standard error of each tau over prompts."""
    mean_off_diagonal: float
    mean_off_diagonal_standard_error: float
    weighted_off_diagonal: float
    """The same mean, with every two members weighted by the product of their weights."""
    weights: list[float]
    tops: Tops
    near_copies: list[MemberPair]
    near_opposites: list[MemberPair]
    vote_agreement: list[list[float]] | None
    """Share of the held-out pairs on which every two members prefer the same response; None without held-out votes."""
    prompts: int
    candidates: int
    """Number of ranked responses over all prompts."""
    skipped: int
    """Number of prompts with a single response, which cannot be ranked."""
    cases: list[CaseStudy] = field(default_factory=list)
    """Prompts with the choice of every member."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Prompts of the candidates that were left out, because the ensemble was trained on them."""


def held_out_candidates(votes: HeldOutVotes, least: int = MIN_RESPONSES) -> tuple[list[Candidates], list[FloatArray]]:
    """Return the responses of each held-out prompt and the members' stored rewards. No text is encoded."""
    rows = [rows for rows in rows_by_prompt(votes.preferences) if len(rows) >= least]
    return candidates_of(votes.preferences, least), [votes.rewards[of_prompt] for of_prompt in rows]


def score_candidates(
    ensemble: RewardEnsemble, candidates: Sequence[Candidates], progress: Progress | None = None
) -> list[FloatArray]:
    """Return the rewards of all members for all responses, one array ``(n_responses, k)`` per prompt."""
    items = [(of_prompt.prompt, response) for of_prompt in candidates for response in of_prompt.responses]
    ends = np.cumsum([len(of_prompt.responses) for of_prompt in candidates])
    return np.split(ensemble.rewards(items, progress), ends[:-1])


def diversity(
    ensemble: RewardEnsemble | str | os.PathLike[str],
    candidates: CandidatesLike | None = None,
    *,
    cases: int = 1,
    prompt: str = "",
    all_prompts: bool = False,
    progress: Progress | None = None,
) -> Diversity:
    """Measure how differently the members rank the same responses, and show their first choices on single prompts.

    Args:
        ensemble: the ensemble, or its folder.
        candidates: prompts with their responses: ``Candidates``, a candidates file, dicts of {prompt, responses}, or
            votes, whose responses to each prompt are compared (default: the responses of the held-out prompts in the
            folder). Prompts with a single response are skipped, and prompts that the ensemble was trained on are left
            out.
        cases: number of prompts to show.
        prompt: show prompts that contain this text, or the prompt with this number.
        all_prompts: do not leave out prompts that the ensemble was trained on.
        progress: called while texts are encoded.

    Raises:
        DataError: every prompt of the candidates was used for training.
    """
    loaded, held_out, left_out = as_ensemble(ensemble), None, LeftOut()
    if not isinstance(ensemble, RewardEnsemble) and (candidates is None or has_held_out(ensemble)):
        held_out = load_held_out(ensemble, loaded)
    if candidates is not None:
        lists = load_candidates(candidates)
        if not all_prompts:
            trained = are_trained([of_prompt.prompt for of_prompt in lists], loaded.trained_on)
            if lists and trained.all():
                problem = f"all {len(lists):,} prompts of the candidates were used for training"
                raise DataError(problem, remedy="give other prompts, or use --all to measure on training prompts")
            lists, left_out = list(itertools.compress(lists, ~trained)), LeftOut(prompts=int(trained.sum()))
        rewards = score_candidates(loaded, lists, progress)
    elif held_out is not None:
        lists, rewards = held_out_candidates(held_out)
        if not lists:
            raise UsageError("no held-out prompt has three responses to rank; name a file of candidates.")
    else:
        raise UsageError("give candidates, or the folder of an ensemble: it holds the held-out votes of the fit.")
    shown = case_studies(loaded, lists, rewards, cases, prompt)
    return replace(measure_diversity(loaded, rewards, held_out), cases=shown, left_out=left_out)


def measure_diversity(
    ensemble: RewardEnsemble, rewards: Sequence[FloatArray], held_out: HeldOutVotes | None = None
) -> Diversity:
    """Measure how differently the members rank the same candidates.

    Args:
        ensemble: the ensemble whose members are compared.
        rewards: of the members for the responses to each prompt, ``(n_responses, k)`` each.
        held_out: held-out votes, for ``vote_agreement``.
    """
    ranked = [of_prompt for of_prompt in rewards if len(of_prompt) >= 2]
    if not ranked:
        raise UsageError("diversity needs a prompt with at least two different responses, but no prompt has them.")
    if ranked[0].shape[1] != ensemble.k:
        raise UsageError(f"the rewards are of {ranked[0].shape[1]} members, but the ensemble has {ensemble.k}.")
    taus, weights = kendall.mean_tau(ranked), ensemble.weights
    distinct = [len(set(of_prompt.argmax(axis=0).tolist())) for of_prompt in ranked]
    at_random = [kendall.expected_distinct(len(of_prompt), ensemble.k) for of_prompt in ranked]
    popular = [float(first_choices(of_prompt, weights).max()) for of_prompt in ranked]

    def member_pairs(pairs: list[tuple[int, int]]) -> list[MemberPair]:
        return [MemberPair((i, j), float(taus.tau[i, j]), float(weights[i] + weights[j])) for i, j in pairs]

    return Diversity(
        tau=taus.tau.tolist(),
        standard_error=taus.standard_error.tolist(),
        mean_off_diagonal=taus.off_diagonal,
        mean_off_diagonal_standard_error=taus.off_diagonal_standard_error,
        weighted_off_diagonal=kendall.weighted_off_diagonal(taus.tau, weights),
        weights=weights.tolist(),
        tops=Tops(float(np.mean(distinct)), float(np.mean(at_random)), float(np.mean(popular))),
        near_copies=member_pairs(kendall.near_copies(taus.tau)),
        near_opposites=member_pairs(kendall.near_opposites(taus.tau)),
        vote_agreement=kendall.vote_agreement(held_out.votes).tolist() if held_out else None,
        prompts=len(ranked),
        candidates=sum(map(len, ranked)),
        skipped=len(rewards) - len(ranked),
    )


def case_studies(
    ensemble: RewardEnsemble, candidates: Sequence[Candidates], rewards: Sequence[FloatArray], n: int, prompt: str = ""
) -> list[CaseStudy]:
    """Return the first choices of the members on single prompts.

    Prompts with the most different first choices come first, and among those the ones with the lowest mean tau. If two
    responses have the same reward, the first one listed is chosen.

    Args:
        ensemble: the ensemble whose members choose.
        candidates: prompts with their responses.
        rewards: of the members for the candidates, ``(n_responses, k)`` per prompt.
        n: number of prompts to return.
        prompt: only prompts that contain this text, ignoring case; or the prompt with this number, counted from 1.

    Reference: the paper's appendix "Qualitative Case Studies of Ensemble Outputs".
    """
    if prompt.isdecimal():
        if not 1 <= int(prompt) <= len(candidates):
            raise UsageError(f"prompts are numbered from 1 to {len(candidates)}; there is no prompt {prompt}.")
        chosen = [int(prompt) - 1]
    else:
        text = prompt.casefold()
        chosen = [p for p, one in enumerate(candidates) if len(rewards[p]) >= 2 and text in one.prompt_text.casefold()]
        if prompt and not chosen:
            raise UsageError(f"no prompt contains {prompt!r}.")
    cases = [_case(p, candidates[p], rewards[p], ensemble.weights) for p in chosen]
    return sorted(cases, key=lambda case: (-len(case.choices), case.tau))[:n]


def _case(position: int, candidates: Candidates, rewards: FloatArray, weights: FloatArray) -> CaseStudy:
    members: dict[int, list[int]] = {}
    for j, top in enumerate(rewards.argmax(axis=0).tolist()):
        members.setdefault(top, []).append(j)
    choices = [FirstChoice(candidates.responses[top], own, float(weights[own].sum())) for top, own in members.items()]
    choices.sort(key=lambda choice: -choice.weight)
    tau = kendall.mean_tau([rewards]).off_diagonal
    return CaseStudy(position + 1, candidates.prompt_text, len(candidates.responses), tau, choices)
