"""A gate for texts that a language model wrote: is a text unlike those that the members can judge?

A reward says nothing about texts unlike those that it was trained on: members supported word salad with .70 of their
weight. The gate knows the held-out texts of the fit, and measures three things of a new text:

- *words*: the mean surprise per word under a word-pair model of the held-out texts. It finds word salad.
- *order*: the share of neighbouring words that are never neighbours in the held-out texts. It finds shuffled words.
- *topic*: the distance between text and question, in the last layer of the ensemble's encoder. It finds texts about
  something else. Without such an encoder: the weighted share of the question's words that the text lacks.

A text is refused if a measure is above that of all but 1 % of the held-out texts, each measured by a model that does
not know its prompt. ``benchmarks/statement_gate.py`` compares these measures with distances in feature space and with a
language model's perplexity. The gate does not know whether a statement is true, or fair to its slate.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pluralign.answering.request import Encode, at_once
from pluralign.core.arrays import FloatArray
from pluralign.text.encoders import TextFeatures
from pluralign.text.encoders import encode as encoded
from pluralign.text.finetuned import FinetunedFeatures
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.candidates import candidates_of
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike

Embed: TypeAlias = Callable[[Sequence[str]], FloatArray]
"""Takes n texts; returns unit vectors, ``(n, dimension)``."""

LEVEL = 0.01
"""Share of held-out texts above a threshold, per measure."""
FOLDS = 5
"""Held-out texts of a fifth of the prompts are measured by a word model of the others."""
FEWEST_TEXTS = 50
"""With fewer held-out texts there is no gate."""
MAX_EMBEDDED = 400
"""Held-out texts that are embedded for the threshold of *topic*; their vectors are cached."""
PAIR_SHARE = 0.8
"""λ of the word model: weight of the word-pair estimate beside the word estimate."""
STEM = 5
"""Words with the same first letters count as the same word of a question."""
REASONS = {
    "words": "its words are unlike those of the held-out texts",
    "order": "its words are in an order unlike that of the held-out texts",
    "topic": "it is not about the question",
}
_WORD = re.compile(r"[\w']+|[.,;:!?]")


@dataclass(frozen=True)
class WordModel:
    """Counts of words and of pairs of neighbouring words in some texts."""

    words: Mapping[str, int]
    pairs: Mapping[tuple[str, str], int]
    texts_with: Mapping[str, int]
    """Number of texts that contain a stem."""
    n_words: int
    n_texts: int

    @classmethod
    def of(cls, texts: Sequence[str]) -> "WordModel":
        """Count the words of texts."""
        words: Counter[str] = Counter()
        pairs: Counter[tuple[str, str]] = Counter()
        texts_with: Counter[str] = Counter()
        for text in texts:
            found = ["", *_words(text)]
            words.update(found)
            pairs.update(itertools.pairwise(found))
            texts_with.update(_stems(text))
        return cls(words, pairs, texts_with, sum(words.values()), len(texts))

    def surprise(self, text: str) -> float:
        """Return the mean of −log p(word | previous word), in nats; 0 for a text without words.

        p(w | v) = λ n(v, w) / n(v) + (1 − λ) (n(w) + ½) / (n + ½ (V + 1)), where V is the number of distinct words.

        Example:
            >>> model = WordModel.of(["tea is good .", "rum is good ."])
            >>> model.surprise("tea is good .") < model.surprise("good tea . is") < model.surprise("zu mag blethon")
            True
        """
        found = ["", *_words(text)]
        total = 0.0
        for before, word in itertools.pairwise(found):
            alone = (self.words.get(word, 0) + 0.5) / (self.n_words + 0.5 * (len(self.words) + 1))
            known = self.words.get(before, 0)
            paired = self.pairs.get((before, word), 0) / known if known else 0.0
            total -= math.log(PAIR_SHARE * paired + (1 - PAIR_SHARE) * alone)
        return total / max(1, len(found) - 1)

    def unseen(self, text: str) -> float:
        """Return the share of pairs of neighbouring words that never occur in the texts; 0 for a text without words.

        Example:
            >>> WordModel.of(["tea is good ."]).unseen("good is tea .")
            1.0
        """
        found = ["", *_words(text)]
        pairs = list(itertools.pairwise(found))
        return sum(pair not in self.pairs for pair in pairs) / max(1, len(pairs))

    def lacking(self, question: str, text: str) -> float:
        """Return the share of the question's words that a text lacks, weighted by how rare they are in the texts.

        Example:
            >>> model = WordModel.of(["Tea is good.", "Rum is good."])
            >>> model.lacking("Is tea good?", "Tea.") < model.lacking("Is tea good?", "It is good.")
            True
        """
        rare = {stem: math.log((self.n_texts + 1) / (self.texts_with.get(stem, 0) + 0.5)) for stem in _stems(question)}
        present, total = _stems(text), sum(rare.values())
        return 1 - sum(weight for stem, weight in rare.items() if stem in present) / total if total > 0 else 0.0


@dataclass(frozen=True, eq=False)
class NoveltyGate:
    """Says whether a text is unlike the held-out texts, and in which respect."""

    model: WordModel
    thresholds: Mapping[str, float]
    """By measure; a text above one is refused."""
    n_texts: int
    """Number of held-out texts."""
    embed: Embed | None = None
    """For *topic*; the share of missing words without it."""

    def measure(self, prompt: PromptLike, texts: Sequence[str]) -> dict[str, FloatArray]:
        """Return the measures of texts, each ``(n_texts,)``; higher values are more unusual."""
        return measure_texts(self.model, self.embed, [(Prompt(prompt).text, text) for text in texts])

    def reasons(self, prompt: PromptLike, texts: Sequence[str]) -> list[str]:
        """Return for each text the reason to refuse it, or an empty text."""
        if not texts:
            return []
        measured = self.measure(prompt, texts)
        above = {name: measured[name] > self.thresholds[name] for name in REASONS}
        return [
            next((reason for name, reason in REASONS.items() if above[name][i]), "")
            if texts[i].strip()
            else "it is empty"
            for i in range(len(texts))
        ]


def fit_gate(
    held_out: PreferenceSet,
    features: TextFeatures | FinetunedFeatures | None = None,
    level: float = LEVEL,
    encode: Encode = at_once,
) -> NoveltyGate | None:
    """Return the gate of an ensemble, from the texts of its held-out votes.

    Thresholds are conformal quantiles: if new texts are like held-out texts of other prompts, each measure is above its
    threshold for at most ``level`` of them. With n < 1/level − 1 texts, the threshold is the largest measure.

    Args:
        held_out: votes whose texts are known to be good.
        features: of the ensemble; its encoder embeds texts for *topic*.
        level: share of held-out texts above a threshold.
        encode: calls the encoder.

    Returns:
        The gate, or None with fewer than ``FEWEST_TEXTS`` texts or ``FOLDS`` prompts.
    """
    lists = sorted(candidates_of(held_out), key=lambda one: Prompt(one.prompt).hash())
    items = [(Prompt(one.prompt).text, text) for one in lists for text in one.responses]
    if len(items) < FEWEST_TEXTS or len(lists) < FOLDS:
        return None
    fold = np.repeat(np.arange(len(lists)) % FOLDS, [len(one.responses) for one in lists])
    embed = last_layer(features, encode)
    measured = measure_held_out(items, fold, embed)
    thresholds = {name: conformal_quantile(values, level) for name, values in measured.items()}
    return NoveltyGate(WordModel.of([text for _, text in items]), thresholds, len(items), embed)


def measure_held_out(
    items: Sequence[tuple[str, str]], fold: npt.NDArray[np.int64], embed: Embed | None
) -> dict[str, FloatArray]:
    """Return the measures of held-out texts, each by a word model of the other folds.

    Args:
        items: questions with texts.
        fold: number of each text's fold, ``(n_texts,)``; texts of one question are in one fold.
        embed: for *topic*. At most ``MAX_EMBEDDED`` texts are embedded, evenly spaced.
    """
    parts: dict[str, list[FloatArray]] = {name: [] for name in REASONS}
    for number in np.unique(fold):
        model = WordModel.of([items[i][1] for i in np.flatnonzero(fold != number).tolist()])
        for name, values in measure_texts(
            model, None, [items[i] for i in np.flatnonzero(fold == number).tolist()]
        ).items():
            parts[name].append(values)
    measured = {name: np.concatenate(values) for name, values in parts.items()}
    if embed:
        some = np.unique(np.linspace(0, len(items) - 1, min(len(items), MAX_EMBEDDED)).astype(np.int64))
        measured["topic"] = topic_distance(embed, [items[i] for i in some.tolist()])
    return measured


def measure_texts(model: WordModel, embed: Embed | None, items: Sequence[tuple[str, str]]) -> dict[str, FloatArray]:
    """Return the measures of questions with texts, each ``(n_items,)``."""
    lacking = np.array([model.lacking(question, text) for question, text in items])
    return {
        "words": np.array([model.surprise(text) for _, text in items]),
        "order": np.array([model.unseen(text) for _, text in items]),
        "topic": topic_distance(embed, items) if embed else lacking,
    }


def topic_distance(embed: Embed, items: Sequence[tuple[str, str]]) -> FloatArray:
    """Return 1 − cosine of each text and its question, ``(n_items,)``."""
    questions = list(dict.fromkeys(question for question, _ in items))
    vectors = embed([*questions, *(text for _, text in items)])
    row = {question: i for i, question in enumerate(questions)}
    of_question = vectors[[row[question] for question, _ in items]]
    return np.asarray(1 - (of_question * vectors[len(questions) :]).sum(axis=1))


def last_layer(features: TextFeatures | FinetunedFeatures | None, encode: Encode = at_once) -> Embed | None:
    """Return a function from texts to unit vectors of the encoder's last layer; None if no language model encodes."""
    if not isinstance(features, TextFeatures):
        return None
    encoder, n_layers = features.load_checked(), features.n_layers
    if not isinstance(encoder, ModelEncoder):
        return None

    def embed(texts: Sequence[str]) -> FloatArray:
        vectors = encode(partial(encoded, encoder=encoder, surface=False), [("", text) for text in texts])
        vectors = np.asarray(vectors, dtype=np.float64)
        last = vectors[:, -(vectors.shape[1] // n_layers) :]
        return np.asarray(last / np.maximum(np.linalg.norm(last, axis=1, keepdims=True), 1e-12))

    return embed


def conformal_quantile(values: FloatArray, level: float) -> float:
    """Return the smallest value such that a new exchangeable one is above it with probability at most ``level``.

    Example:
        >>> conformal_quantile(np.arange(1.0, 200.0), 0.01)
        198.0
        >>> conformal_quantile(np.array([3.0, 1.0, 2.0]), 0.01)
        3.0
    """
    rank = min(math.ceil((1 - level) * (len(values) + 1)), len(values))
    return float(np.sort(values)[rank - 1])


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


def _stems(text: str) -> set[str]:
    return {word[:STEM] for word in _words(text) if word[0].isalnum()}
