"""Calibration within groups of pairs, the worst group, and the worst of random groups (adversarial groups).

A good average can hide a group that is predicted badly. Results do not depend on the order of the two responses.
"""

import itertools
import re
import warnings
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.cluster.vq import kmeans2

from pluralign.core import random_streams as streams
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError, did_you_mean
from pluralign.measuring.leans import WORDS
from pluralign.theory import calibration
from pluralign.theory.calibration import strata
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, clustered_interval
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike
from pluralign.votes.values import as_numbers

# --- Grouping of pairs: by length, by topic, by how people split, or by a column of the data.


Labels: TypeAlias = npt.NDArray[np.object_]
DEFAULT_GROUPINGS = ("length", "topic")
OWN_GROUPINGS = ("length", "topic", "strata")
LENGTH_RATIOS = (1.1, 1.5, 2.5)
"""Edges of the bins of longer ÷ shorter response."""
MANY_VALUES = 10
"""A numeric column with more distinct values is split into quartiles."""
RARE = 30
"""Values of a column with fewer pairs are grouped together."""
PROMPTS_A_TOPIC = 30
MOST_TOPICS = 8
TOPIC_WORDS = 3
ALL_PROMPTS = "all prompts"
"""The topic of prompts that are too few, or too different, to cluster."""
VOCABULARY = 2000
TOPIC_DIMENSIONS = 32
RESTARTS = 4
MOST_COMMON = 0.5
"""A word in more than this share of the prompts does not describe a topic."""
_WORD = re.compile(r"[^\W\d_]{3,}")
FUNCTION_WORDS = frozenset(WORDS["function_words"].split())


def check_grouping(grouping: str, preferences: PreferenceSet) -> None:
    """Raise UsageError for an unknown grouping."""
    known = [*OWN_GROUPINGS, *(name for name in preferences.columns if name not in OWN_GROUPINGS)]
    if grouping not in known:
        raise UsageError(f"pairs cannot be grouped by {grouping!r}; {did_you_mean(grouping, known)}.")


def group_labels(grouping: str, preferences: PreferenceSet, *, seed: int = 0) -> Labels:
    """Return the name of each pair's group, ``(n_pairs,)``.

    Args:
        grouping: ``length``, ``topic``, ``strata`` (how people split) or a column of the data.
        preferences: the pairs.
        seed: of the clusters of topics.
    """
    if grouping == "length":
        a, b = (np.maximum(side, 1.0) for side in pair_lengths(preferences))
        bins = np.searchsorted(LENGTH_RATIOS, np.maximum(a, b) / np.minimum(a, b), side="right")
        names = [f"{first:g} to {last} × as long" for first, last in itertools.pairwise((1, *LENGTH_RATIOS))]
        return np.array([*names, f"over {LENGTH_RATIOS[-1]} × as long"], dtype=object)[bins]
    if grouping == "topic":
        return topics(preferences.prompts.tolist(), seed=seed)[preferences.prompt_index]
    if grouping == "strata":
        masks = strata(preferences.prob_a)
        return np.select([*masks.values()], [*masks], "").astype(object)
    check_grouping(grouping, preferences)
    return column_labels(preferences.columns[grouping])


def pair_lengths(preferences: PreferenceSet) -> tuple[FloatArray, FloatArray]:
    """Return the lengths in characters of both responses of each pair, each ``(n_pairs,)``."""
    lengths = np.array([len(text) for text in preferences.responses], dtype=np.float64)
    return lengths[preferences.a_index], lengths[preferences.b_index]


def column_labels(values: npt.NDArray[Any]) -> Labels:
    """Return group names from a column: quartiles of numbers with many values, else the values, with rare ones grouped.

    Example:
        >>> column_labels(np.array(["uk"] * 40 + ["fr"] * 3)).tolist()[38:42]
        ['uk', 'uk', 'other', 'other']
    """
    numbers = as_numbers(values)
    if numbers is not None and len(np.unique(numbers[~np.isnan(numbers)])) > MANY_VALUES:
        edges = np.unique(np.nanquantile(numbers, [0, 0.25, 0.5, 0.75, 1]))
        bins = np.clip(np.searchsorted(edges, numbers, side="right") - 1, 0, len(edges) - 2)
        quarters = [f"{low:.4g} to {high:.4g}" for low, high in itertools.pairwise(edges)]
        labels = np.array(quarters, dtype=object)[bins]
        labels[np.isnan(numbers)] = "missing"
        return labels
    labels = np.array(["missing" if value is None or value != value else str(value) for value in values], dtype=object)
    names, position, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return np.where(counts < RARE, "other", names)[position]


def topics(prompts: Sequence[PromptLike], *, seed: int = 0) -> Labels:
    """Return the topic of each prompt, ``(n_prompts,)``: a cluster named by its most distinctive words.

    Words are weighted by tf-idf, projected on their leading directions and clustered by k-means, the best of a few
    starts. There is one topic per ``PROMPTS_A_TOPIC`` prompts, and at most eight.
    """
    texts = (" ".join(turn.content for turn in Prompt(prompt).turns) for prompt in prompts)
    words = [set(_WORD.findall(text.lower())) - FUNCTION_WORDS for text in texts]
    k = int(np.clip(len(prompts) // PROMPTS_A_TOPIC, 1, MOST_TOPICS))
    counts = Counter(word for own in words for word in own)
    telling = [word for word, count in counts.items() if 2 <= count <= MOST_COMMON * len(prompts)]
    vocabulary = sorted(telling, key=lambda word: (-counts[word], word))[:VOCABULARY]
    if k == 1 or len(vocabulary) <= k:
        return np.full(len(prompts), ALL_PROMPTS, dtype=object)
    present = presence(words, vocabulary)
    cluster = _clusters(present, k, seed)
    labels = np.empty(len(prompts), dtype=object)
    everywhere = np.asarray(present.mean(axis=0)).ravel()
    for one in np.unique(cluster):
        inside = cluster == one
        apart = np.asarray(present[inside].mean(axis=0)).ravel() - everywhere
        labels[inside] = ", ".join(vocabulary[column] for column in np.argsort(-apart, kind="stable")[:TOPIC_WORDS])
    return labels


def presence(words: Sequence[Collection[str]], vocabulary: Sequence[str]) -> Any:
    """Return which texts have which words or phrases, a sparse matrix of 0 and 1, ``(n_texts, n_words)``."""
    column_of = {word: column for column, word in enumerate(vocabulary)}
    columns = [sorted(column_of[word] for word in own if word in column_of) for own in words]
    starts = np.cumsum([0, *map(len, columns)])
    entries = np.concatenate([np.array(own, dtype=np.int64) for own in columns])
    return sparse.csr_array((np.ones(len(entries)), entries, starts), shape=(len(words), len(vocabulary)))


def _clusters(present: Any, k: int, seed: int) -> npt.NDArray[np.int32]:
    frequency = np.asarray(present.mean(axis=0)).ravel()
    weighted = present * -np.log(frequency)[None, :]
    dimensions = min(TOPIC_DIMENSIONS, min(present.shape) - 1)
    start = streams.random_stream(seed, streams.CLUSTER_START).standard_normal(min(present.shape))
    left, scale, _ = sparse.linalg.svds(sparse.csr_array(weighted), k=dimensions, v0=start)
    points = left * scale
    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    starts = [streams.random_stream(seed, streams.CLUSTER_RESTARTS, restart) for restart in range(RESTARTS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # an empty cluster: one topic fewer
        found = [kmeans2(points, k, iter=30, minit="++", seed=random) for random in starts]
    _, labels = min(found, key=lambda run: float(((points - run[0][run[1]]) ** 2).sum()))
    return np.asarray(labels)


FRACTIONS = (0.05, 0.1, 0.2, 0.5, 1.0)
SUBSETS = 200
SUBSETS_AT_ONCE = 50
SIMULATIONS = 20
BINS = 10


# --- calibration within groups ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Figures of one group of pairs."""

    name: str
    pairs: int
    prompts: int
    brier: float
    brier_corrected: float
    interval: Interval
    """95 % interval over prompts of the corrected Brier score (of the plain one if all pairs have one vote)."""
    residual: Interval
    """Mean p̂ − p for the longer response in groups of length, for the predicted majority in others."""


@dataclass(frozen=True)
class WorstGroup:
    """The group with the highest corrected Brier score, with an interval that allows for the selection."""

    grouping: str
    name: str
    brier_corrected: float
    interval: Interval
    """At level 1 − .05/groups, so that the intervals of all groups hold together with 95 % (Bonferroni)."""
    groups: int
    """Number of groups with enough prompts to be selected."""


def measure_groups(
    prob_hat: FloatArray, preferences: PreferenceSet, groupings: Sequence[str], *, seed: int = 0
) -> tuple[dict[str, list[Group]], WorstGroup | None]:
    """Return the calibration within each group of each grouping, and the worst group.

    The residual is mean s·(p̂ − p), with s = ±1 the side of the longer response (``length``) or of the predicted
    majority (all other groupings, where a positive residual means overconfidence). A pair without such a side counts
    0, the mean over its two orders.
    """
    p, n, ties = preferences.prob_a, preferences.n_votes, preferences.counted_ties
    interval_of = partial(clustered_interval, seed=seed, min_clusters=ENOUGH_CLUSTERS)
    error = calibration.squared_error(prob_hat, p)
    corrected = error - calibration.sampling_noise(p, n, ties)
    found: dict[str, list[Group]] = {}
    candidates: list[tuple[float, str, str, FloatArray, npt.NDArray[Any]]] = []
    for grouping in dict.fromkeys(groupings):
        labels = group_labels(grouping, preferences, seed=seed)
        side = np.sign(np.subtract(*pair_lengths(preferences))) if grouping == "length" else np.sign(prob_hat - 0.5)
        found[grouping] = []
        for name in sorted(set(labels.tolist()), key=lambda label: (label in ("other", "missing"), _order(label))):
            rows = np.flatnonzero(labels == name)
            prompt = preferences.prompt_index[rows]
            values = corrected[rows] if not np.isnan(corrected[rows]).all() else error[rows]
            group = Group(
                name=name,
                pairs=len(rows),
                prompts=len(np.unique(prompt)),
                brier=float(error[rows].mean()),
                brier_corrected=calibration.brier_corrected(prob_hat[rows], p[rows], n[rows], ties[rows]),
                interval=interval_of(values, prompt),
                residual=interval_of((side * (prob_hat - p))[rows], prompt),
            )
            found[grouping].append(group)
            if group.prompts >= ENOUGH_CLUSTERS:
                candidates.append((group.interval.mean, grouping, name, values, prompt))
    if not candidates:
        return found, None
    height, grouping, name, values, prompt = max(candidates, key=lambda candidate: candidate[0])
    m = len(candidates)
    interval = clustered_interval(values, prompt, level=1 - 0.05 / m, n_resamples=max(2000, 800 * m))
    return found, WorstGroup(grouping, name, height, interval, m)


def _order(label: str) -> tuple[float, str]:
    """Return a sort key: numbers by size, then words."""
    number = re.match(r"-?\d+(\.\d+)?(e[+-]?\d+)?", label)
    return (float(number[0]) if number else np.inf, label)


# --- adversarial groups -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdversarialGroup:
    """The worst calibration error among random groups of one size, and the value expected from noise alone."""

    fraction: float
    """Size of the groups as a share of the prompts."""
    prompts: int
    worst: float
    expected: float
    """Mean of the same figure over simulated votes drawn from the prediction."""
    high: float
    """95 % quantile of the simulated figures."""


def simulated_shares(prob_hat: FloatArray, n_votes: npt.NDArray[np.int64], random: np.random.Generator) -> FloatArray:
    """Return simulated shares under a correct prediction: Binomial(n_votes, p̂) / n_votes per pair."""
    return random.binomial(n_votes, prob_hat) / n_votes


def adversarial_calibration(prob_hat: FloatArray, preferences: PreferenceSet, seed: int = 0) -> list[AdversarialGroup]:
    """Return the worst calibration error over random groups of prompts, for groups of several sizes.

    With pairs turned so that p̂ ≥ ½ and binned by p̂ (ten bins of equal mass), a group S of prompts has the error

      CE(S) = Σ_b |Σ_{i ∈ S, i in b} (p̂_i − p_i)| / |S|,

    and the adversarial error at size f is max CE(S) over 200 random S of f × all prompts; at f = 1 it is the error on
    all pairs. Sampling noise alone makes some group look bad, so the same figure is computed for votes drawn from p̂
    with the same groups: ``expected`` and ``high``. A value above ``high`` means that some groups are predicted worse
    than noise explains.

    Args:
        prob_hat: predicted shares, ``(n_pairs,)``.
        preferences: the votes.
        seed: of groups and drawings.

    Example:
        >>> votes = PreferenceSet.from_columns(list("abcdefgh"), ["Yes."] * 8, ["No."] * 8, [4] * 8, [0] * 8)
        >>> adversarial_calibration(np.full(8, 0.75), votes)[-1].worst
        0.25

    Reference: Zhao, Ma and Ermon, "Individual Calibration with Randomized Forecasting" (ICML 2020), the definition of
    adversarial group calibration.
    """
    side = np.sign(prob_hat - 0.5)
    _, prompt = np.unique(preferences.prompt_index, return_inverse=True)
    n_prompts, n_pairs = int(prompt.max()) + 1, len(prob_hat)
    leaning, equal = np.unique(np.round(np.maximum(prob_hat, 1 - prob_hat), 9), return_inverse=True)
    mass = np.bincount(equal, minlength=len(leaning))
    bins = np.minimum(((np.cumsum(mass) - mass / 2) / n_pairs * BINS).astype(int), BINS - 1)[equal]
    sizes = np.bincount(prompt, minlength=n_prompts).astype(np.float64)
    random = streams.random_stream(seed, streams.SIMULATED_VOTES)
    drawn_votes = [simulated_shares(prob_hat, preferences.n_votes, random) for _ in range(SIMULATIONS)]
    shares = [preferences.prob_a, *drawn_votes]
    sums = [np.bincount(prompt * BINS + bins, side * (prob_hat - share), n_prompts * BINS) for share in shares]
    errors = np.hstack([one.reshape(n_prompts, BINS) for one in sums])
    found = []
    # A separate stream, so that both orders of pairs get the same groups.
    random = streams.random_stream(seed, streams.PROMPT_SUBSETS)
    for fraction in FRACTIONS:
        chosen = max(1, round(fraction * n_prompts))
        worst = np.zeros(1 + SIMULATIONS)
        for _ in range(1 if chosen == n_prompts else SUBSETS // SUBSETS_AT_ONCE):
            drawn = [random.choice(n_prompts, chosen, replace=False) for _ in range(SUBSETS_AT_ONCE)]
            starts = np.arange(SUBSETS_AT_ONCE + 1) * chosen
            # Sparse products also avoid starting threads for small matrices.
            ones, shape = np.ones(SUBSETS_AT_ONCE * chosen), (SUBSETS_AT_ONCE, n_prompts)
            member = sparse.csr_array((ones, np.concatenate(drawn), starts), shape=shape)
            totals = np.abs(member @ errors).reshape(SUBSETS_AT_ONCE, 1 + SIMULATIONS, BINS).sum(axis=2)
            worst = np.maximum(worst, (totals / (member @ sizes)[:, None]).max(axis=0))
        high = float(np.quantile(worst[1:], 0.95))
        found.append(AdversarialGroup(fraction, chosen, float(worst[0]), float(worst[1:].mean()), high))
    return found
