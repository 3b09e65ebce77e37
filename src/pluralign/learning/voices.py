"""A mixture of Plackett–Luce rewards learned from whole judgments: rankings, scores, several votes of one person.

Each person i shares the reward of one member j and a decisiveness 1/T:

    P(rankings of i) = Σ_j π_j Σ_T κ_T Π_rankings PL(ranking | θ_j / T),   θ_j = θ_0 + δ_j.

The parameters minimise, with n the number of choices,

    −(1/n) Σ_i log P(rankings of i) + λ_0/2 |θ_0|² + λ/2 Σ_j |δ_j|².

With rater ids the rankings of a person on all prompts share j and T; without them each judgment is a person of its own.
L-BFGS solves it.

The test of voices asks whether people differ. Features miss a part of what makes a response good, and that part is
the same for everyone who judged it. A mixture gains by explaining it, although nobody differs. So the test gives both
the mixture and one reward latent deviations u of responses, common to a group g of people who judged the same ones:

    P(g) = E_u Π_{i in g} P(rankings of i | rewards + u),   u of each response ~ N(0, τ²),

by importance sampling around the mode.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import minimize
from scipy.special import gammaln, logsumexp, softmax

from pluralign.core.arrays import Array, FloatArray, IndexArray, IntArray, Mask
from pluralign.core.processes import ALONE, Processes
from pluralign.core.random_streams import DEVIATIONS, RATER_MIXTURE, random_stream
from pluralign.ensemble.ensemble import VOICES
from pluralign.ensemble.record import ENOUGH_PEOPLE, HistoryRow, JudgmentFigures
from pluralign.learning.pairs import Members, cap_disagreement, hard_votes, matched_orders, scores
from pluralign.learning.policy_level import adjusted_to_counts
from pluralign.learning.raters import NewPeople, VotesByRater, fit_choice_model, rater_groups
from pluralign.learning.task import AUTO_SIZES, FitTask, Fitted, choose_temperature, history_sizes
from pluralign.theory.calibration import sigmoid
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, clearly_lower, clustered_interval
from pluralign.theory.posterior import VOICES_SHARE, ChoiceModel, tied_first
from pluralign.theory.simplex import simplex_least_squares, weights_and_undecided
from pluralign.votes.judgments import Judgments

FACTORS = (1.0, 5.0)
"""Values of T: people who decide clearly, and people whose choices are nearly random."""
BLOCK = 1024
"""Rankings that are computed together, so that intermediate results fit into the cache."""
LOWEST = -40.0
"""Rewards of a prompt are at most so far below its best one. Sums of two end before single precision does (−87)."""


# --- Plackett–Luce with ties ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Shape:
    """Rankings with the same numbers of tied responses at each place, such as (1, 2, 1)."""

    ties: tuple[int, ...]
    rankings: IntArray
    """``(n,)``."""
    texts: IntArray
    """Best first, ``(n_responses, n)``."""

    def log_likelihood(self, rate: Array, log_rate: Array) -> tuple[Array, list[Array], list[Array]]:
        """Return log PL of rankings, with what its gradient needs.

        Args:
            rate: e^r of their responses, best first, ``(n_responses, …)``.
            log_rate: Σ r of the responses that were chosen alone, ``(…)``.

        Returns:
            log PL, ``(…)``; and for each place but the last, from the lowest, the total rate that the choice was from
            (of a tie: the rate of the lower responses), and the gradient of a tie.
        """
        end = len(rate) - self.ties[-1]
        lower, total = rate[end:].sum(axis=0), np.array(log_rate)
        totals, ties = list[Array](), list[Array]()
        for size in self.ties[-2::-1]:
            own, end = rate[end - size : end], end - size
            if size == 1:
                lower = lower + own[0]
                total -= np.log(lower)
                totals.append(lower)
                continue
            probability, gradient = tied_first(np.log(own) - np.log(lower))
            total += probability
            totals.append(lower)
            ties.append(gradient.astype(rate.dtype))
            lower = lower + own.sum(axis=0)
        return total, totals, ties

    def gradient(self, terms: tuple[Array, list[Array], list[Array]], weight: Array) -> Iterator[Array]:
        """Yield ∂ Σ w log PL / ∂ r of each response, best first.

        Args:
            terms: rates as for ``log_likelihood``, and the last two results of it.
            weight: w, ``(…)``.
        """
        pull, position = np.zeros_like(weight), 0  # pull: Σ over the places above of weight / rate that was available
        rate, totals, ties = terms[0], list(terms[1]), list(terms[2])
        for size in self.ties[:-1]:
            available = totals.pop()
            if size == 1:
                pull = pull + weight / available
                yield weight - rate[position] * pull
            else:
                slopes = weight * ties.pop()
                yield from slopes - rate[position : position + size] * pull
                pull = pull + slopes.sum(axis=0) / available
            position += size
        for own in rate[position:]:
            yield -own * pull

    def uniform(self) -> float:
        """Return log P of all these rankings if every order is equally likely."""
        left, tied = np.cumsum(self.ties[::-1])[::-1], np.array(self.ties)
        ways = gammaln(left + 1) - gammaln(tied + 1) - gammaln(left - tied + 1)
        return -float(ways.sum()) * len(self.rankings)

    @cached_property
    def alone(self) -> list[int]:
        """Positions of the responses that were chosen alone."""
        first = np.cumsum([0, *self.ties])
        return [int(position) for position, size in zip(first, self.ties[:-1], strict=False) if size == 1]


@dataclass(frozen=True, eq=False)
class RankedTexts:
    """Rankings over the inputs of their texts."""

    inputs: Array
    """Of the texts that are ranked, sorted by prompt, ``(n_texts, d)``."""
    first: IntArray
    """First text of each prompt, ``(n_prompts,)``."""
    shapes: list[_Shape]
    person: IndexArray
    """Of each ranking, ``(n,)``."""
    group: IndexArray
    """Group of each person: those who judged the same responses; alone if persons are known across prompts,
    ``(n_persons,)``."""
    prompt_of_group: IndexArray
    """``(n_groups,)``."""
    group_of_judgment: IndexArray
    """``(n_judgments,)``."""

    @classmethod
    def of(cls, judgments: Judgments, items: IndexArray, inputs: Array, processes: Processes = ALONE) -> "RankedTexts":
        """Gather what rankings need.

        Args:
            judgments: the judgments.
            items: text of each of their entries (``judgments.items``), ``(n_entries,)``.
            inputs: of all texts, ``(n_items, d)``.
            processes: those that hold a part of the inputs each.
        """
        used, text = np.unique(items, return_inverse=True)
        prompt = np.zeros(len(used), dtype=np.int64)
        prompt[text] = np.repeat(judgments.prompt, judgments.sizes)
        person, start = judgments.person, judgments.start
        group = np.zeros(judgments.n_persons, dtype=np.int32)
        group[person] = np.arange(len(group), dtype=np.int32)[person] if judgments.linked else judgments.group
        prompt_of_group = np.zeros(int(group.max(initial=-1)) + 1, dtype=np.int32)
        prompt_of_group[group[person]] = judgments.prompt
        # Rankings have one shape if they have as many responses and tie at the same places.
        tied = np.append(judgments.place[1:] == judgments.place[:-1], False)
        shapes = []
        for size in np.unique(judgments.sizes):
            rankings = np.flatnonzero(judgments.sizes == size)
            entries = start[rankings][:, None] + np.arange(size)
            patterns, which = np.unique(tied[entries[:, :-1]], axis=0, return_inverse=True)
            for number, pattern in enumerate(patterns):
                rows = which.ravel() == number
                ties = np.diff(np.flatnonzero([True, *~pattern, True]))
                if len(ties) > 1:  # a tie of all says nothing
                    own = np.ascontiguousarray(text[entries[rows]].T)
                    shapes.append(_Shape(tuple(ties.tolist()), rankings[rows], own))
        first = np.flatnonzero(np.diff(prompt, prepend=-1))
        of_judgment = np.zeros(judgments.n, dtype=np.int32)
        of_judgment[judgments.judgment] = group[person]
        return cls(processes.gathered(inputs, used), first, shapes, person, group, prompt_of_group, of_judgment)

    def __len__(self) -> int:
        """Return the number of rankings."""
        return len(self.person)

    @property
    def n_choices(self) -> int:
        """Number of choices: places of all rankings but the last."""
        return sum(len(shape.rankings) * (len(shape.ties) - 1) for shape in self.shapes)

    @property
    def judgments_of_group(self) -> IntArray:
        """Number of judgments of each group, ``(n_groups,)``."""
        return np.bincount(self.group_of_judgment, minlength=len(self.prompt_of_group))

    @cached_property
    def prompt_and_place(self) -> tuple[IntArray, IntArray]:
        """Prompt of each text, and its place among the texts of the prompt, ``(n_texts,)`` each."""
        counts = np.diff(np.append(self.first, len(self.inputs)))
        prompt = np.repeat(np.arange(len(counts)), counts)
        return prompt, np.arange(len(prompt)) - self.first[prompt]

    @cached_property
    def group_of_text(self) -> IndexArray:
        """Group of the people who ranked each text, ``(n_texts,)``."""
        group = np.zeros(len(self.inputs), dtype=np.int32)
        for shape in self.shapes:
            group[shape.texts] = self.group[self.person[shape.rankings]]
        return group

    @cached_property
    def blocks(self) -> list[tuple[_Shape, IntArray, IntArray]]:
        """Some rankings of one shape and their texts at a time."""
        return [
            (shape, shape.rankings[start : start + BLOCK], shape.texts[:, start : start + BLOCK])
            for shape in self.shapes
            for start in range(0, len(shape.rankings), BLOCK)
        ]

    @cached_property
    def scatter(self) -> sparse.csr_matrix:
        """Sums values of the entries of all blocks by text, ``(n_texts, n_entries)``."""
        text = [texts.ravel() for _, _, texts in self.blocks]
        column = np.concatenate(text) if text else np.empty(0, dtype=np.int64)
        ones = np.ones(len(column), dtype=np.float32)
        return sparse.csr_matrix((ones, (column, np.arange(len(column)))), shape=(len(self.inputs), len(column)))

    def log_rates(self, rewards: Array) -> Array:
        """Return rewards less the highest one of the prompt, at least ``LOWEST``, ``(n_texts, …)``."""
        if not len(rewards):
            return rewards
        highest = np.maximum.reduceat(rewards, self.first, axis=0)
        counts = np.diff(np.append(self.first, len(rewards)))
        return np.asarray(np.maximum(rewards - np.repeat(highest, counts, axis=0), LOWEST))


# --- the mixture ------------------------------------------------------------------------------------------------------


DRAWS, WIDER = 64, 1.2
"""Draws of deviations that a group is averaged over, and how much wider they spread than the posterior."""
MODE_STEPS = 10
"""L-BFGS iterations to the most likely deviations."""
PROBE = 0.05
"""Step that measures the curvature."""


@dataclass(frozen=True)
class Nuisances:
    """What the test of voices adds to a mixture."""

    scale: float
    """Factor of rewards."""
    sigma: float
    """Spread of log T over people, which is normal."""
    tau: float
    """τ, the spread of deviations."""


NUISANCES = (1.0, 0.8, 0.6)
"""Where their search starts."""
NUISANCE_STEPS, NUISANCE_JUDGMENTS = 36, 500
"""Values that are tried, and the judgments of validation prompts that decide."""
QUADRATURE = np.polynomial.hermite_e.hermegauss(3)


@dataclass(frozen=True, eq=False)
class Voices:
    """A mixture of Plackett–Luce rewards."""

    theta: FloatArray
    """θ_j, ``(d, k)``."""
    shares: FloatArray
    """π, ``(k,)``."""
    factor_shares: FloatArray
    """κ, ``(n_T,)``."""
    factors: FloatArray = field(default_factory=lambda: np.array(FACTORS))
    """Values of T, ``(n_T,)``."""
    deviation: float = 0.0
    """τ, the spread of what the features miss."""

    @property
    def k(self) -> int:
        """Number of members."""
        return len(self.shares)

    def with_nuisances(self, found: Nuisances) -> "Voices":
        """Return the mixture with rewards times a factor, log T ~ N(0, σ²) by Gauss–Hermite quadrature, and τ."""
        nodes, weights = QUADRATURE
        factors, shares = np.exp(found.sigma * nodes), weights / weights.sum()
        return replace(self, theta=self.theta * found.scale, factors=factors, factor_shares=shares, deviation=found.tau)

    def by_group(self, texts: RankedTexts) -> FloatArray:
        """Return log P of each group, ``(n_groups,)``."""
        if self.deviation:
            return _by_group_with_deviations(self, texts)
        return self.given(texts).by_group

    def given(
        self, texts: RankedTexts, deviations: FloatArray | None = None, log_draws: FloatArray | None = None
    ) -> "_Hypotheses":
        """Return what the rankings say of members and people.

        Args:
            texts: the rankings.
            deviations: of each text, ``(n_texts,)``, or several draws of them, ``(n_texts, n_draws)``. None: 0.
            log_draws: log weight of each draw for each group, ``(n_draws, n_groups)``.
        """
        x, draws = texts.inputs, None
        members = x @ self.theta.astype(x.dtype)
        if log_draws is None and deviations is not None:
            members += deviations.astype(x.dtype)[:, None]
        elif deviations is not None:
            draws = deviations.astype(x.dtype)
        log_shares = [np.log(np.maximum(one, 1e-300)) for one in (self.shares, self.factor_shares)]
        return _Hypotheses(texts, members, self.factors, log_shares, draws, log_draws)


def _by_group_with_deviations(voices: Voices, texts: RankedTexts) -> FloatArray:
    """Return log P of each group averaged over deviations u, by importance sampling around their mode, ``(n_groups,)``.

    The draws come from a normal distribution with the curvature at the mode (Laplace), a little wider.
    """
    tau, precision = voices.deviation, voices.deviation**-2
    prompt, place = texts.prompt_and_place
    m, n_prompts = int(place.max(initial=-1)) + 1, len(texts.first)

    def loss(u: FloatArray) -> tuple[float, FloatArray]:
        found = voices.given(texts, u)
        gradient = np.asarray(found.gradient(found.posterior).sum(axis=1), dtype=np.float64)
        return 0.5 * precision * float(u @ u) - float(found.by_group.sum()), precision * u - gradient

    options = {"maxiter": MODE_STEPS}
    mode = minimize(loss, np.zeros(len(texts.inputs)), jac=True, method="L-BFGS-B", options=options).x
    at_mode, columns = loss(mode)[1], np.zeros((n_prompts, m, m))
    for column in range(m):  # texts of different prompts are independent, so one of each is moved at a time
        moved = (place == column).astype(np.float64)
        columns[prompt, place, column] = (loss(mode + PROBE * moved)[1] - at_mode) / PROBE - precision * moved
    values, vectors = np.linalg.eigh((columns + columns.transpose(0, 2, 1)) / 2)
    curvature = np.einsum("pij,pj,pkj->pik", vectors, np.maximum(values, 0.0), vectors)  # there may be no maximum
    there, diagonal = np.ones((n_prompts, m)), np.arange(m)  # 1 where there is no text
    there[prompt, place] = precision
    curvature[:, diagonal, diagonal] += there
    factor = np.linalg.cholesky(curvature)

    z = random_stream(0, DEVIATIONS).standard_normal((n_prompts, m, DRAWS))
    u = WIDER * np.linalg.solve(factor.transpose(0, 2, 1), z)[prompt, place] + mode[:, None]
    log_density = 0.5 * z[prompt, place] ** 2 - 0.5 * (u / tau) ** 2
    log_density += (np.log(WIDER / tau) - np.log(factor[prompt, place, place]))[:, None]
    log_draws = _sum_by(texts.group_of_text, log_density.T, len(texts.prompt_of_group)) - np.log(DRAWS)
    return voices.given(texts, u, log_draws).by_group


class _Hypotheses:
    """Every member, draw of deviations and decisiveness, with what the rankings say of each.

    Rankings and texts are the last axis of all arrays here, because numpy sums over the other axes faster.

    Args:
        texts: the rankings.
        members: rewards of the members for the texts, ``(n_texts, k)``.
        factors: values of T, ``(n_T,)``.
        log_shares: log π and log κ, ``(k,)`` and ``(n_T,)``.
        deviations: draws of deviations of the texts, ``(n_texts, n_draws)``. None: there are none.
        log_draws: log weight of each draw for each group, ``(n_draws, n_groups)``. None for one draw.
    """

    def __init__(
        self,
        texts: RankedTexts,
        members: Array,
        factors: FloatArray,
        log_shares: Sequence[FloatArray],
        deviations: Array | None = None,
        log_draws: FloatArray | None = None,
    ) -> None:
        self.texts, self.factors, parts = texts, factors, [one for one in (members, deviations) if one is not None]
        self.logs = [
            [np.ascontiguousarray(texts.log_rates(one / np.float32(factor)).T) for one in parts] for factor in factors
        ]
        """For every T: log rates of members, ``(k, n_texts)``, then of deviations, ``(n_draws, n_texts)``."""
        self.rates = [[np.exp(one) for one in of_factor] for of_factor in self.logs]
        self.terms = list[tuple[Array, list[Array], list[Array]]]()
        """Of each T and block: what its gradient needs. Only without draws of deviations."""
        n_draws = 1 if deviations is None else deviations.shape[1]
        likelihood = np.zeros((members.shape[1], n_draws, len(factors), len(texts)))
        for factor in range(len(factors)):
            for shape, rankings, of_block in texts.blocks:
                rate, log_rate = self._block(of_block, shape.alone, factor)
                found = shape.log_likelihood(rate, log_rate)
                likelihood[:, :, factor, rankings] = found[0]
                if deviations is None:
                    self.terms.append((rate, *found[1:]))
        joint = _sum_by(texts.person, likelihood, len(texts.group))
        joint += (log_shares[0][:, None, None] + log_shares[1])[..., None]
        self.of_person, self.joint = _log_sum(joint, (0, 2))
        """log P of each person for each draw, ``(n_draws, n)``; and P(j, T | draw), ``(k, n_draws, n_T, n)``."""
        of_groups = _sum_by(texts.group, self.of_person, len(texts.prompt_of_group))
        self.by_group, self.of_draws = _log_sum(of_groups if log_draws is None else of_groups + log_draws, (0,))
        """log P of each group, ``(n_groups,)``; and the posterior of its draws, ``(n_draws, n_groups)``."""

    def _block(self, texts: IntArray, alone: list[int], factor: int) -> tuple[Array, Array]:
        """Return the arguments of ``_Shape.log_likelihood`` for some rankings and one T, ``(…, k, n_draws, n)``."""
        (rates, *draws), logs = self.rates[factor], self.logs[factor]
        rate, log_rate = rates[:, texts].swapaxes(0, 1)[:, :, None], logs[0][:, texts[alone]].sum(axis=1)[:, None]
        if draws:
            rate = rate * draws[0][:, texts].swapaxes(0, 1)[:, None]
            log_rate = log_rate + logs[1][:, texts[alone]].sum(axis=1)
        return rate, log_rate

    @property
    def posterior(self) -> FloatArray:
        """Posterior of each person, ``(k, n_draws, n_T, n)``."""
        return np.asarray(self.joint * self.of_draws[:, self.texts.group][None, :, None])

    def gradient(self, posterior: FloatArray) -> Array:
        """Return Σ_rankings E[∂ log PL / ∂ r] of the rewards of texts, ``(n_texts, k)``. Without draws."""
        texts, terms = self.texts, iter(self.terms)
        entries = np.zeros((len(posterior), texts.scatter.shape[1]), dtype=np.float32)
        for factor, divisor in enumerate(self.factors):
            of_persons, row = np.asarray(posterior[:, :, factor] / divisor, dtype=np.float32), 0
            for shape, rankings, _ in texts.blocks:
                for slope in shape.gradient(next(terms), of_persons[..., texts.person[rankings]]):
                    entries[:, row : row + len(rankings)] += slope[:, 0]
                    row += len(rankings)
        return np.asarray(texts.scatter @ entries.T)


def _sum_by(owner: IndexArray, values: FloatArray, n: int) -> FloatArray:
    """Return the sums of the last axis by owner, ``(…, n)``."""
    if len(owner) == n and np.array_equal(owner, np.arange(n)):
        return values
    which = sparse.csr_matrix((np.ones(len(owner)), (owner, np.arange(len(owner)))), shape=(n, len(owner)))
    return np.ascontiguousarray((which @ values.reshape(-1, len(owner)).T).T).reshape(*values.shape[:-1], n)


def _log_sum(values: FloatArray, axes: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    """Return log Σ e^v over some axes, which are dropped, and the share of each e^v in its sum."""
    highest = values.max(axis=axes, keepdims=True)
    shares = np.exp(values - highest)
    total = shares.sum(axis=axes, keepdims=True)
    shares /= total
    return np.asarray((highest + np.log(total)).squeeze(axis=axes)), shares


LOOSER = 3.0
"""λ_0 over λ in a mixture. Its members together explain more than one reward, which has a λ_0 of its own."""


@dataclass(frozen=True)
class Penalties:
    """Strengths of regularisation, per choice."""

    own: float
    """λ, of what is a member's own. The reward that all members share has ``LOOSER`` times it."""
    single: float
    """λ_0 of one reward for everyone."""


STEPS = 50
"""L-BFGS iterations. With more of them, fits follow the training judgments too closely."""
STARTS = 6
"""Random starts whose mean is the ensemble. From 6 on their number hardly matters (docs/log.md)."""
START = 1.0
"""Spread of the random start of a member's own part, in units of reward."""


def fit_voices(
    texts: RankedTexts,
    k: int,
    penalties: Penalties,
    start: FloatArray | None = None,
    *,
    seed: int = 0,
) -> Voices:
    """Fit the mixture from one random start.

    Args:
        texts: the rankings.
        k: number of members. A single member has no part of its own.
        penalties: how strongly to regularise.
        start: θ_0 to start from, ``(d,)``.
        seed: of the δ to start from.
    """
    x, n = texts.inputs, max(texts.n_choices, 1)
    d, n_own = x.shape[1], k if k > 1 else 0
    unknowns = np.zeros((d, 1 + n_own))
    unknowns[:, 1:] = random_stream(seed, RATER_MIXTURE, k).standard_normal((d, n_own))
    if len(x):
        spread = np.std(x @ unknowns[:, 1:].astype(x.dtype), axis=0)
        unknowns[:, 1:] *= START / np.maximum(spread, 1e-12)
    if start is not None:
        unknowns[:, 0] = start
    strength = np.array([LOOSER * penalties.own, *[penalties.own] * k] if n_own else [penalties.single])

    def unpack(values: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        return values[: unknowns.size].reshape(d, -1), values[unknowns.size :][:k], values[unknowns.size + k :]

    def loss(values: FloatArray) -> tuple[float, FloatArray]:
        weights, *logits = unpack(values)
        rewards = x @ weights.astype(x.dtype)
        members = rewards[:, :1] + rewards[:, 1:] if n_own else rewards
        log_shares = [one - logsumexp(one) for one in logits]
        found = _Hypotheses(texts, members, np.array(FACTORS), log_shares)
        posterior = found.posterior
        of_texts = found.gradient(posterior)
        both = np.column_stack([of_texts.sum(axis=1), of_texts]) if n_own else of_texts
        slope = strength * weights - (x.T @ both) / n
        counts = posterior.sum(axis=(1, 2, 3)), posterior.sum(axis=(0, 1, 3))
        slopes = [(softmax(one) * count.sum() - count) / n for one, count in zip(logits, counts, strict=True)]
        value = -float(found.by_group.sum()) / n + 0.5 * float(strength @ (weights**2).sum(axis=0))
        return value, np.concatenate([slope.ravel(), *slopes])

    first = np.append(unknowns.ravel(), np.zeros(k + len(FACTORS)))
    found = minimize(loss, first, jac=True, method="L-BFGS-B", options={"maxiter": STEPS})
    weights, *logits = unpack(found.x)
    theta = weights[:, :1] + weights[:, 1:] if n_own else weights
    return Voices(theta, *(softmax(one) for one in logits))


def mean_of(fits: Sequence[Voices], inputs: Array) -> Voices:
    """Return the mean of mixtures that were fitted from different random starts.

    Members are matched by ``matched_orders``. A mean reward varies less from start to start than a single one does.
    It keeps the mean spread of its parts, because people are as decisive as each fit says.

    Args:
        fits: mixtures with the same number of members.
        inputs: of texts, ``(n_texts, d)``.
    """
    rewards = [inputs @ fit.theta.astype(inputs.dtype) for fit in fits]
    orders = matched_orders(rewards)
    matched = [
        replace(fit, theta=fit.theta[:, order], shares=fit.shares[order])
        for fit, order in zip(fits, orders, strict=True)
    ]
    theta = np.mean([fit.theta for fit in matched], axis=0)
    spread = np.mean([np.std(inputs @ fit.theta.astype(inputs.dtype), axis=0) for fit in matched], axis=0)
    theta = theta * spread / np.maximum(np.std(inputs @ theta.astype(inputs.dtype), axis=0), 1e-12)
    factor_shares = np.mean([fit.factor_shares for fit in matched], axis=0)
    return Voices(theta, np.mean([fit.shares for fit in matched], axis=0), factor_shares)


def best_nuisances(fits: Sequence[tuple[Voices, RankedTexts]]) -> Nuisances:
    """Return the nuisances with the highest log likelihood of judgments.

    Args:
        fits: mixtures, each with judgments on prompts that it was fitted without.
    """

    def values(logs: FloatArray) -> Nuisances:
        return Nuisances(*np.exp(np.clip(logs, -4, 3)).tolist())

    def loss(logs: FloatArray) -> float:
        return -float(sum(one.with_nuisances(values(logs)).by_group(texts).sum() for one, texts in fits))

    start = np.log(NUISANCES)
    options = {"maxfev": NUISANCE_STEPS, "initial_simplex": np.vstack([start, start + 0.5 * np.eye(3)])}
    return values(minimize(loss, start, method="Nelder-Mead", options=options).x)


# --- the fit of an ensemble: choose on validation prompts, fit every size, fit the models of the test of voices -------


STRENGTHS = (0.15, 0.06, 0.025, 0.01, 0.004, 0.0015, 0.0006, 0.0002)
"""Values of λ and λ_0 to choose from, strongest first."""
AT_ONCE = 2
"""Strengths that are tried side by side. The search ends when the last one is not the best so far."""
SEARCH_FOLDS = 1
"""Validation folds that choose, where there are many prompts."""
MANY_PROMPTS = 500
RATER_FOLDS = 3
"""Validation folds that decide what the choices of a person say, where rater ids are known."""
SINGLE = "one reward"
"""The rival of ``VOICES`` in the test of voices, by its name in an ensemble."""


def fit_judgments(task: FitTask, judgments: Judgments, items: IndexArray) -> Fitted:
    """Fit an ensemble to whole judgments on the training prompts, with every smaller size for its history.

    At the policy level members are then adjusted to the counts. Strengths, k and τ have the highest log likelihood of
    judgments on validation prompts.

    Args:
        task: the training pairs. Weights and the undecided share are solved on their vote counts.
        judgments: on the training prompts.
        items: text of each of their entries, ``(n_entries,)``.
    """
    options, keep = task.options, task.checkpoints.keep
    search = VoicesSearch(task, judgments, items)
    task.watcher.choosing("shrinkage")
    penalties = keep("judgments-penalties", Penalties, lambda: search.choose_penalties(task.usual_size))
    if options.k == "auto":
        task.watcher.choosing("k")
        size = keep("judgments-size", int, lambda: search.choose_size(penalties))
    else:
        size = int(options.k)
    everyone = search.texts(np.ones(len(task.train), dtype=bool))
    single = keep("judgments-1", Voices, lambda: fit_voices(everyone, 1, penalties))

    def fitted(k: int, start: int = 0) -> Voices:
        if k == 1:
            return single
        seed, theta = options.seed * STARTS + start, single.theta[:, 0]
        return keep(f"judgments-{k}-{start}", Voices, lambda: fit_voices(everyone, k, penalties, theta, seed=seed))

    task.watcher.choosing("temperature")
    validated = partial(keep, "judgments-validated", Validated, partial(search.validated, size, penalties))
    smaller = history_sizes(size)[1:-1]
    fits: list[Callable[[], Any]] = [task.baselines, validated, *(partial(fitted, k) for k in smaller)]
    fits += [partial(fitted, size, start) for start in range(STARTS)]
    baselines, checked, *mixtures = task.in_parallel(fits)
    voices = mean_of(mixtures[len(smaller) :], everyone.inputs)
    history, free = list[HistoryRow](), Members(single.theta, single.shares)

    as_members = partial(members_of, task, anchor=single.theta[:, 0])
    for mixture in [*[single] * (size > 1), *mixtures[: len(smaller)], voices]:
        members, free = as_members(mixture, bound=task.bound), as_members(mixture, bound=1.0)
        history.append(task.measured(members))
    unbounded = free if options.max_disagreement < 1 else None
    starts = mixtures[len(smaller) :] if size > 1 else []
    without_one = [mean_of(starts[:i] + starts[i + 1 :], everyone.inputs) for i in range(len(starts))]
    spread = jackknife(task.test_errors([as_members(one, bound=task.bound) for one in without_one]))
    models = {VOICES: voices.with_nuisances(checked.voices), SINGLE: single.with_nuisances(checked.single)}
    temperature = 1.0 if options.level == "policy" else checked.temperature
    target = "raters" if judgments.linked else "judgments"
    arrays = {name: asdict(one) for name, one in models.items()}
    found = target, None, spread, checked.choice_model, arrays
    return Fitted(members, temperature, baselines, unbounded, history, *found)


def jackknife(errors: FloatArray) -> float | None:
    """Return the standard deviation of an error over random seeds, from its values without one start each.

    √((n − 1)/n Σ_i (e_i − mean e)²), the jackknife estimate for a function of n independent starts; None without any.

    Reference: Efron and Stein, "The jackknife estimate of variance", Annals of Statistics 9 (1981).
    """
    return float(np.sqrt(len(errors) - 1) * np.std(errors)) if len(errors) else None


def members_of(task: FitTask, voices: Voices, *, anchor: FloatArray, bound: float) -> Members:
    """Return the members of a mixture for the level of the fit, with weights that match the vote counts.

    Args:
        task: the training pairs.
        voices: the mixture.
        anchor: the single reward that a member above the bound is mixed with, ``(d,)``.
        bound: maximum training disagreement of a member; 1 sets no bound.
    """
    train, policy = task.train, task.options.level == "policy"
    members = Members(voices.theta, voices.shares)
    if policy:
        members = adjusted_to_counts(train, members)
    theta = members.theta
    if bound < 1:
        capped = [cap_disagreement(one, anchor, train.difference, train.prob_a, bound) for one in theta.T]
        theta = np.column_stack(capped)
    if not policy:
        votes = hard_votes(train.difference, theta)
        return Members(theta, *weights_and_undecided(votes, train.prob_a, undecided=task.options.undecided))
    if np.array_equal(theta, members.theta):
        return members
    return Members(theta, simplex_least_squares(sigmoid(scores(train.difference, theta)), train.prob_a))


@dataclass(frozen=True)
class Validated:
    """What a mixture gets from validation prompts."""

    temperature: float
    choice_model: ChoiceModel
    voices: Nuisances
    single: Nuisances


@dataclass(frozen=True, eq=False)
class VoicesSearch:
    """The choices of a fit to judgments, made on validation prompts."""

    task: FitTask
    judgments: Judgments
    items: IndexArray
    fits: dict[Any, Voices] = field(default_factory=dict)
    """What was fitted so far."""

    def texts(self, rows: Mask, persons: Mask | None = None, *, linked: bool = True) -> RankedTexts:
        """Return the judgments on the prompts of some training pairs.

        Args:
            rows: the training pairs, ``(n_train,)``.
            persons: whose judgments (default: all), ``(n_persons,)``.
            linked: whether people stay known across prompts, if they are.
        """
        judgments, train = self.judgments, self.task.train
        kept = np.isin(judgments.prompt, train.prompt[rows])
        if persons is not None:
            kept &= persons[judgments.person]
        items, judged = self.items[np.repeat(kept, judgments.sizes)], judgments[kept]
        return RankedTexts.of(judged if linked else judged.unlinked(), items, train.inputs, train.processes)

    @cached_property
    def parts(self) -> list[tuple[RankedTexts, RankedTexts]]:
        """The judgments without the validation prompts, and those on them, for each fold that chooses."""
        folds = self.task.folds
        if len(np.unique(self.task.train.prompt)) >= MANY_PROMPTS:
            folds = folds[:SEARCH_FOLDS]
        return [(self.texts(~fold), self.texts(fold)) for fold in folds]

    def fitted(self, part: int, k: int, penalties: Penalties) -> Voices:
        """Return a mixture without common parts, fitted without the validation prompts of a part."""
        start = None if k == 1 else self.fitted(part, 1, penalties).theta[:, 0]
        key = part, k, penalties.single if k == 1 else penalties
        if key not in self.fits:
            learn, seed = self.parts[part][0], self.task.options.seed
            self.fits[key] = fit_voices(learn, k, penalties, start, seed=seed)
        return self.fits[key]

    def log_likelihood(self, k: int, penalties: Penalties) -> FloatArray:
        """Return log P of each group on validation prompts, by a mixture fitted without them, ``(n_groups,)``."""
        parts = enumerate(self.parts)
        return np.concatenate([self.fitted(part, k, penalties).by_group(check) for part, (_, check) in parts])

    def best_strength(self, k: int, penalties_of: Callable[[float], Penalties]) -> float:
        """Return the strength with the highest log likelihood, tried from the strongest on."""

        def log_likelihood(strength: float) -> float:
            return float(self.log_likelihood(k, penalties_of(strength)).sum())

        found: list[float] = []
        while len(found) < len(STRENGTHS) and (not found or int(np.argmax(found)) == len(found) - 1):
            tried = STRENGTHS[len(found) : len(found) + AT_ONCE]
            found += self.task.in_parallel([partial(log_likelihood, strength) for strength in tried])
        return STRENGTHS[int(np.argmax(found))]

    def choose_penalties(self, k: int) -> Penalties:
        """Choose λ_0 of one reward, then λ of a mixture."""
        single = self.best_strength(1, lambda strength: Penalties(strength, strength))
        own = single if k == 1 else self.best_strength(k, lambda strength: Penalties(strength, single))
        return Penalties(own, single)

    def choose_size(self, penalties: Penalties) -> int:
        """Return the smallest k whose log likelihood is not clearly lower than the best one, by a paired test."""
        found = {k: self.log_likelihood(k, penalties) for k in AUTO_SIZES}
        best = max(found.values(), key=lambda one: float(one.sum()))
        return min(k for k, one in found.items() if not clearly_lower(one - best, np.arange(len(best))))

    def nuisance_texts(self) -> list[RankedTexts]:
        """Return judgments on some validation prompts of each fold, ``NUISANCE_JUDGMENTS`` in all."""
        texts, most = [], NUISANCE_JUDGMENTS // len(self.parts)
        for _, fold in zip(self.parts, self.task.folds, strict=False):
            prompts = np.unique(self.task.train.prompt[fold])
            counts = np.cumsum(np.bincount(self.judgments.prompt, minlength=prompts.max() + 1)[prompts])
            few = prompts[: max(int(np.searchsorted(counts, most)), 1)]
            texts.append(self.texts(np.isin(self.task.train.prompt, few), linked=False))
        return texts

    def validated(self, k: int, penalties: Penalties) -> Validated:
        """Return what a mixture gets from validation prompts. The first fold decides the temperature.

        Without rater ids, a person's choices count if the mixture predicts these judgments better than one reward.
        """
        task, checks = self.task, self.nuisance_texts()
        singles, several = ([self.fitted(part, n, penalties) for part in range(len(checks))] for n in (1, k))
        members = Members(several[0].theta, several[0].shares)
        if task.options.level == "vote":
            members = members.unit_spread(task.learn, together=True)
        temperature = choose_temperature(members, task.check)
        chosen = [best_nuisances(list(zip(fits, checks, strict=True))) for fits in (several, singles)]
        check = self.texts(task.folds[0], linked=False)
        of_voices, of_single = (
            fits[0].with_nuisances(found).by_group(check)
            for fits, found in zip((several, singles), chosen, strict=True)
        )
        convincing = len(check) > 0 and gain_of(of_voices, of_single, check).low > 0
        model = ChoiceModel(VOICES_SHARE, source="voices") if convincing else ChoiceModel()
        if self.judgments.linked:
            model = self.choice_model(k, penalties)
        return Validated(temperature, model, *chosen)

    def choice_model(self, k: int, penalties: Penalties) -> ChoiceModel:
        """Fit the choice model to raters and prompts that the members of each validation fold were not learned from."""
        train, seed, folds, parts = self.task.train, self.task.options.seed, self.task.folds[:RATER_FOLDS], []
        votes = VotesByRater.of(self.judgments, self.items, train)
        for fold, held_out in zip(folds, rater_groups(votes.n_raters, len(folds) + 1, seed), strict=False):
            learn = self.texts(~fold, ~held_out)
            single = fit_voices(learn, 1, penalties).theta
            mixture = fit_voices(learn, k, penalties, single[:, 0], seed=seed)
            theta, own = np.column_stack([mixture.theta, single]), votes.of_raters(held_out)
            known, new = (scores(train[rows].difference, theta) for rows in (~fold, fold))
            parts.append(NewPeople(own[~fold], known, own[fold], new, mixture.shares))
        return fit_choice_model(parts, seed)


# --- the test of voices -----------------------------------------------------------------------------------------------


def gain_of(voices: FloatArray, single: FloatArray, texts: RankedTexts) -> Interval:
    """Return how much better a mixture predicts judgments than one reward, per judgment, with an interval by prompt.

    There is no interval if most groups are one person: a mixture then gains from prompts that differ as it does from
    people who differ.

    Args:
        voices: log P of each group by the mixture, ``(n_groups,)``.
        single: the same by one reward.
        texts: the judgments.
    """
    per_judgment = ((voices - single) / texts.judgments_of_group)[texts.group_of_judgment]
    prompt = texts.prompt_of_group[texts.group_of_judgment]
    gain = clustered_interval(per_judgment, prompt, min_clusters=ENOUGH_CLUSTERS)
    alone = texts.judgments_of_group.mean() < ENOUGH_PEOPLE
    return replace(gain, low=math.nan, high=math.nan) if alone else gain


def judgment_figures(
    models: Mapping[str, Mapping[str, Any]], judgments: Judgments, items: IndexArray, inputs: Array
) -> JudgmentFigures:
    """Measure the models of the test of voices on judgments.

    One reward with people of different decisiveness, and with deviations common to a group, explains all that does not
    need different preferences. So a mixture of rewards with the same two must predict better than it.

    Args:
        models: the arrays of ``VOICES`` and ``SINGLE``.
        judgments: on prompts that nothing was trained on.
        items: text of each of their entries, ``(n_entries,)``.
        inputs: of the texts, ``(n_items, d)``.
    """
    texts = RankedTexts.of(judgments.unlinked(), items, inputs)
    voices, single = (Voices(**models[name]).by_group(texts) for name in (VOICES, SINGLE))
    return JudgmentFigures(
        n=judgments.n,
        prompts=judgments.n_prompts,
        log_likelihood=float(voices.sum()) / judgments.n,
        uniform=sum(shape.uniform() for shape in texts.shapes) / judgments.n,
        best_single=float(single.sum()) / judgments.n,
        gain=gain_of(voices, single, texts),
        people=float(texts.judgments_of_group.mean()),
    )
