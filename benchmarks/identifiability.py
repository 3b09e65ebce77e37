"""How different two equally calibrated ensembles are (the paper's §2, non-identifiability).

    python benchmarks/identifiability.py DATA [--seeds 3] [--k 8] [--encoder minilm] [--json]

DATA is anything that ``pluralign fit`` reads. One split by prompt; ensembles are fitted with several seeds, with half
and twice the number of members, and with each target (votes, teacher). Two ensembles are equally calibrated if the 95 %
interval of the difference of their held-out Brier scores contains 0. For such pairs the table has means of

- shares: |p̂ − p̂′|, the mean absolute difference of the predicted shares on held-out pairs;
- members: distance between their members, matched in the best way (earth mover's distance; a matched pair costs the
  share of pairs on which it disagrees); unmatched: the same without matching;
- even part: the same for the even parts, in which each member has its opposite beside it;
- first choices: total variation between the distributions of first choices among the responses to a prompt.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from tables import Row, show

import pluralign
from pluralign.core.arrays import FloatArray
from pluralign.ensemble.held_out import HeldOutVotes, score_held_out
from pluralign.measuring.diversity import held_out_candidates
from pluralign.theory.calibration import checked, squared_error
from pluralign.theory.intervals import Interval, paired_difference
from pluralign.theory.kendall import vote_agreement
from pluralign.theory.social_choice import first_choices
from pluralign.votes.preferences import PreferenceSet

# --- distances between ensembles -----


def transport_cost(cost: npt.ArrayLike, weights: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """Return the earth mover's distance between two weightings.

    min Σ_ij T_ij c_ij over T ≥ 0 with row sums ``weights`` and column sums ``others``.

    Args:
        cost: c, ``(k, l)``.
        weights: α, on the simplex, ``(k,)``.
        others: α′, on the simplex, ``(l,)``.

    Example:
        >>> round(transport_cost([[0.0, 1.0], [1.0, 0.0]], [0.75, 0.25], [0.5, 0.5]), 6)
        0.25
    """
    c = np.asarray(cost, dtype=np.float64)
    a, b = np.asarray(weights, dtype=np.float64), np.asarray(others, dtype=np.float64)
    k, n = c.shape
    sums = np.vstack([np.kron(np.eye(k), np.ones(n)), np.kron(np.ones(k), np.eye(n))])
    marginals = np.concatenate([a / a.sum(), b / b.sum()])
    # The last equation follows from the others; without it, rounding cannot make them contradict each other.
    solution = linprog(c.ravel(), A_eq=sums[:-1], b_eq=marginals[:-1])
    if not solution.success:
        raise ValueError(f"the transport problem has no solution: {solution.message}")
    return float(max(0.0, solution.fun))


def member_distance(matrix: npt.ArrayLike, weights: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """Return the distance between the members of two ensembles.

    W = min_T Σ_ij T_ij (1 − A_ij): members are matched in the best way, and a matched pair costs the share of pairs
    on which its votes differ. It is 0 only if the members vote alike, with the same weights.

    Args:
        matrix: A, the ``vote_agreement`` of their members, ``(k, l)``.
        weights: of the first ensemble, ``(k,)``.
        others: weights of the second ensemble, ``(l,)``.
    """
    return transport_cost(1 - checked("matrix", matrix, np.shape(matrix)), weights, others)


def even_part_distance(matrix: npt.ArrayLike, weights: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """Return the distance between the even parts of two ensembles.

    The even part of an ensemble has each member r and its opposite −r with half of the weight; it predicts ½ on every
    pair. The opposite of a member disagrees where the member agrees, so the distance is W = min_T Σ_ij T_ij c_ij with
    c_ij = min(A_ij, 1 − A_ij). Arguments as in ``member_distance``.
    """
    a = checked("matrix", matrix, np.shape(matrix))
    return transport_cost(np.minimum(a, 1 - a), weights, others)


def unmatched_distance(matrix: npt.ArrayLike, weights: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """Return how often two members drawn independently from the two ensembles disagree: Σ_ij α_i α′_j (1 − A_ij).

    It bounds ``member_distance`` from above. Arguments as in ``member_distance``.

    Example:
        >>> unmatched_distance([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.5], [0.5, 0.5])
        0.5
    """
    a, b = np.asarray(weights, dtype=np.float64), np.asarray(others, dtype=np.float64)
    return float(a @ (1 - checked("matrix", matrix, np.shape(matrix))) @ b)


# --- the benchmark -----


@dataclass(frozen=True, eq=False)
class Fit:
    """One ensemble and its predictions on held-out prompts."""

    name: str
    options: Mapping[str, Any]
    """The options that differ between the fits."""
    held_out: HeldOutVotes
    weights: FloatArray
    share: FloatArray
    brier: float
    undecided: float

    def first_choices(self) -> list[FloatArray]:
        """Return the weight of each response as a first choice, per prompt."""
        return [first_choices(rewards, self.weights) for rewards in held_out_candidates(self.held_out)[1]]


@dataclass(frozen=True)
class Comparison:
    """Two ensembles on the same held-out prompts."""

    first: str
    second: str
    differ: str
    """The option in which the two fits differ: ``seed``, ``k``, ``target`` or ``several``."""
    brier: Interval
    """Difference of their Brier scores, with its 95 % interval over prompts."""
    shares: float
    members: float
    unmatched: float
    even_part: float
    first_choices: float

    @property
    def equally_calibrated(self) -> bool:
        """Whether the interval of the difference contains 0."""
        return self.brier.low <= 0 <= self.brier.high


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--seeds", type=int, default=3, help="number of fit seeds")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--test-fraction", type=float, default=0.2)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    votes = pluralign.load_preferences(arguments.data).with_split(arguments.test_fraction)
    fits = list(fit_all(votes, arguments))
    compared = [compare(*pair) for pair in itertools.combinations(fits, 2)]
    if arguments.json:
        pairs = [{**asdict(one), "equally_calibrated": one.equally_calibrated} for one in compared]
        scores = {fit.name: {"brier": fit.brier, "undecided": fit.undecided} for fit in fits}
        print(json.dumps({"data": arguments.data, "fits": scores, "comparisons": pairs}))
        return
    for fit in fits:
        print(f"{fit.name}: Brier {fit.brier:.4f}, undecided {fit.undecided:.2f}")
    show(list(summary(compared)), f"{arguments.data}: pairs of equally calibrated ensembles")


def variants(seeds: int, k: int) -> Iterator[dict[str, Any]]:
    """Yield the options of each fit; the first one is the reference."""
    reference = {"seed": 0, "k": k, "target": "auto"}
    yield from ({**reference, "seed": seed} for seed in range(seeds))
    yield from ({**reference, "k": size} for size in (k // 2, 2 * k))
    yield from ({**reference, "target": target} for target in ("votes", "teacher"))


def fit_all(votes: PreferenceSet, arguments: argparse.Namespace) -> Iterator[Fit]:
    """Yield the fits of all variants, with the target that each one learned from.

    The target that the reference chose is not fitted a second time: it would be the same ensemble.
    """
    test, done = votes[votes.test_mask()], list[Mapping[str, Any]]()
    for variant in variants(arguments.seeds, arguments.k):
        if variant in done:
            continue
        started = time.perf_counter()
        ensemble = pluralign.fit(votes, encoder=arguments.encoder, **variant)
        options = {**variant, "target": ensemble.record.target}
        done.append(options)
        held_out = score_held_out(ensemble, test)
        share = held_out.prob_hat(ensemble)
        name = ", ".join(f"{key} {value}" for key, value in options.items())
        print(f"{name}: {time.perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
        brier = float(squared_error(share, test.prob_a).mean())
        yield Fit(name, options, held_out, ensemble.weights, share, brier, ensemble.undecided)


def compare(first: Fit, second: Fit) -> Comparison:
    """Measure how different two ensembles are on held-out prompts."""
    people = first.held_out.preferences
    error, other_error = (squared_error(fit.share, people.prob_a) for fit in (first, second))
    both = (first.weights, second.weights)
    matrix = vote_agreement(first.held_out.votes, second.held_out.votes)
    choices = zip(first.first_choices(), second.first_choices(), strict=True)
    changed = [key for key in first.options if first.options[key] != second.options[key]]
    return Comparison(
        first=first.name,
        second=second.name,
        differ=changed[0] if len(changed) == 1 else "several",
        brier=paired_difference(error, other_error, people.prompt_index),
        shares=float(np.abs(first.share - second.share).mean()),
        members=member_distance(matrix, *both),
        unmatched=unmatched_distance(matrix, *both),
        even_part=even_part_distance(matrix, *both),
        first_choices=float(np.mean([np.abs(one - other).sum() / 2 for one, other in choices])),
    )


def summary(compared: Sequence[Comparison]) -> Iterator[Row]:
    """Yield the means over equally calibrated pairs, by the option in which the fits differ."""
    columns = ("shares", "members", "unmatched", "even_part", "first_choices")
    for differ in [*dict.fromkeys(one.differ for one in compared), "any"]:
        of = [one for one in compared if differ in ("any", one.differ)]
        equal = [one for one in of if one.equally_calibrated]
        figures = {key: float(np.mean([getattr(one, key) for one in equal])) if equal else None for key in columns}
        yield {"differ in": differ, "pairs": len(of), "equal": len(equal), **figures}


if __name__ == "__main__":
    main()
