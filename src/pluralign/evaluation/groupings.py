"""Grouping of pairs: by length, by topic, by how people split, or by a column of the data."""

import itertools
import re
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import sparse
from scipy.cluster.vq import kmeans2

from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError, did_you_mean
from pluralign.core.random_streams import CLUSTER_RESTARTS, CLUSTER_START, random_stream
from pluralign.theory.reliability import strata
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike

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


FUNCTION_WORDS = frozenset(
    _WORD.findall(
        "about above after again against all also any and are because been before being below between both but can "
        "could did does doing don down during each every few for from further get give had has have having her here "
        "him his how into its just let like make many may might more most much must not now off one only onto other "
        "others our out over own please same shall she should some such tell than that the their them then there these "
        "they think thinking this those through too two under until upon use very want was way well were what when "
        "where whether which while who whom whose why will with within without would write yes yet you your"
    )
)


def groupings_of(preferences: PreferenceSet) -> list[str]:
    """Return the names of all groupings of a data set."""
    return [*OWN_GROUPINGS, *(name for name in preferences.columns if name not in OWN_GROUPINGS)]


def check_grouping(grouping: str, preferences: PreferenceSet) -> None:
    """Raise UsageError for an unknown grouping."""
    known = groupings_of(preferences)
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
        return _length_labels(preferences)
    if grouping == "topic":
        return topics(preferences.prompts.tolist(), seed=seed)[preferences.prompt_index]
    if grouping == "strata":
        labels = np.empty(len(preferences), dtype=object)
        for name, mask in strata(preferences.prob_a).items():
            labels[mask] = name
        return labels
    check_grouping(grouping, preferences)
    return column_labels(preferences.columns[grouping])


def pair_lengths(preferences: PreferenceSet) -> tuple[FloatArray, FloatArray]:
    """Return the lengths in characters of both responses of each pair, each ``(n_pairs,)``."""
    lengths = np.array([len(text) for text in preferences.responses], dtype=np.float64)
    return lengths[preferences.a_index], lengths[preferences.b_index]


def _length_labels(preferences: PreferenceSet) -> Labels:
    a, b = (np.maximum(side, 1.0) for side in pair_lengths(preferences))
    bins = np.searchsorted(LENGTH_RATIOS, np.maximum(a, b) / np.minimum(a, b), side="right")
    low = ("1", *map(str, LENGTH_RATIOS))
    names = [f"{first} to {last} × as long" for first, last in itertools.pairwise(low)]
    return np.array([*names, f"over {low[-1]} × as long"], dtype=object)[bins]


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


def as_numbers(values: npt.NDArray[Any]) -> FloatArray | None:
    """Return a column as floats with NaN for nulls, or None if it is not numeric. CSV columns are text.

    Example:
        >>> as_numbers(np.array(["1.5", None], dtype=object))
        array([1.5, nan])
    """
    if values.dtype.kind == "b":
        return None
    try:
        return np.array([np.nan if value is None else value for value in values.tolist()], dtype=np.float64)
    except ValueError:
        return None


def topics(prompts: Sequence[PromptLike], *, seed: int = 0, prompts_a_topic: int = PROMPTS_A_TOPIC) -> Labels:
    """Return the topic of each prompt, ``(n_prompts,)``: a cluster named by its most distinctive words.

    Words are weighted by tf-idf, projected on their leading directions and clustered by k-means, the best of a few
    starts. There is one topic per ``prompts_a_topic`` prompts, and at most eight.
    """
    words = [set(_WORD.findall(_text(prompt).lower())) - FUNCTION_WORDS for prompt in prompts]
    k = int(np.clip(len(prompts) // prompts_a_topic, 1, MOST_TOPICS))
    counts: dict[str, int] = {}
    for own in words:
        for word in own:
            counts[word] = counts.get(word, 0) + 1
    telling = [word for word, count in counts.items() if 2 <= count <= MOST_COMMON * len(prompts)]
    vocabulary = sorted(telling, key=lambda word: (-counts[word], word))[:VOCABULARY]
    if k == 1 or len(vocabulary) <= k:
        return np.full(len(prompts), ALL_PROMPTS, dtype=object)
    present = _presence(words, vocabulary)
    cluster = _clusters(present, k, seed)
    labels = np.empty(len(prompts), dtype=object)
    everywhere = np.asarray(present.mean(axis=0)).ravel()
    for one in np.unique(cluster):
        inside = cluster == one
        apart = np.asarray(present[inside].mean(axis=0)).ravel() - everywhere
        named = [vocabulary[column] for column in np.argsort(-apart, kind="stable")[:TOPIC_WORDS]]
        labels[inside] = ", ".join(named)
    return labels


def _text(prompt: PromptLike) -> str:
    return " ".join(turn.content for turn in Prompt(prompt).turns)


def _presence(words: Sequence[set[str]], vocabulary: Sequence[str]) -> Any:
    column_of = {word: column for column, word in enumerate(vocabulary)}
    columns = [sorted(column_of[word] for word in own if word in column_of) for own in words]
    starts = np.cumsum([0, *map(len, columns)])
    entries = np.concatenate([np.array(own, dtype=np.int64) for own in columns])
    return sparse.csr_array((np.ones(len(entries)), entries, starts), shape=(len(words), len(vocabulary)))


def _clusters(present: Any, k: int, seed: int) -> npt.NDArray[np.int32]:
    frequency = np.asarray(present.mean(axis=0)).ravel()
    weighted = present * -np.log(frequency)[None, :]
    dimensions = min(TOPIC_DIMENSIONS, min(present.shape) - 1)
    start = random_stream(seed, CLUSTER_START).standard_normal(min(present.shape))
    left, scale, _ = sparse.linalg.svds(sparse.csr_array(weighted), k=dimensions, v0=start)
    points = left * scale
    points /= np.maximum(np.linalg.norm(points, axis=1, keepdims=True), 1e-12)
    best, least = np.zeros(len(points), dtype=np.int32), np.inf
    for restart in range(RESTARTS):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # an empty cluster: one topic fewer
            centres, labels = kmeans2(
                points, k, iter=30, minit="++", seed=random_stream(seed, CLUSTER_RESTARTS, restart)
            )
        distance = float(((points - centres[labels]) ** 2).sum())
        if distance < least:
            best, least = labels, distance
    return best
