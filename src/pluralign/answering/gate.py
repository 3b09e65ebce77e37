"""A gate for texts that people are said to prefer: is a text unlike those that people voted on?

A reward says nothing about texts unlike those that it was trained on: members supported word salad with .70 of their
weight. The gate knows the held-out texts of the fit, and measures four things of a new text:

- *words*: the mean surprise per word under a word-pair model of the held-out texts. It finds unknown words.
- *order*: the share of neighbouring words that are never neighbours in the held-out texts. It finds shuffled words.
- *repeats*: the share of words that occur among the three words before them, one aside. It finds repeated words.
- *topic*: the distance between text and question, in the last layer of the ensemble's encoder, if it is a language
  model. It finds texts about something else.

Texts without any word of the held-out texts (such as emoji), texts with control characters, and copies of the question
are refused at once. Any other text is refused if a measure is above that of all but 1 % of the held-out texts, each
measured by a model that does not know its prompt. Short texts vary more, so they are compared with parts of held-out
texts that are as short. A text that people voted on is never refused. ``benchmarks/statement_gate.py`` measures how
often the gate is wrong. The gate does not know whether a statement is true, or fair to its slate.
"""

import itertools
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np

from pluralign.answering.request import Encode, at_once
from pluralign.answering.slate import NEAR_DUPLICATE, similarity
from pluralign.core.arrays import FloatArray, IndexArray
from pluralign.core.text import printable
from pluralign.text.encoders import TextFeatures, encode as encoded
from pluralign.text.finetuned import FinetunedFeatures
from pluralign.text.transformer import ModelEncoder
from pluralign.votes.candidates import candidates_of
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Item, Prompt, PromptLike

Asked: TypeAlias = tuple[str, str]
"""A question and a text."""
Embed: TypeAlias = Callable[..., FloatArray]
"""Takes n texts; returns vectors, ``(n, dimension)``. With ``cache=True`` they are kept on disk."""

LEVEL = 0.01
"""Share of held-out texts above a threshold, per measure."""
FOLDS = 5
"""Held-out texts of a fifth of the prompts are measured by a word model of the others."""
FEWEST_TEXTS = 50
"""With fewer held-out texts there is no gate, and with fewer parts of a length no threshold for it."""
MAX_TEXTS = 2000
"""Held-out texts that the gate reads."""
MAX_EMBEDDED = 200
"""Held-out texts that are embedded for the threshold of *topic*; their vectors are cached."""
LENGTHS = (2, 4, 8, 16, 32, 64)
"""Words of the parts of held-out texts. A new text is compared with the parts that are next shorter and next longer."""
TOPIC_LENGTH = 24
"""Shorter texts pass *topic*: "No." names no subject."""
PAIR_SHARE = 0.8
"""λ of the word model: weight of the word-pair estimate beside the word estimate."""
REPEATS_WITHIN = 3
COPY_LENGTH = 4
"""Words of the shortest question of which a copy is refused: "Tea or coffee." may answer "Tea or coffee?"."""
REASONS = {
    "empty": "it is empty",
    "control": "it holds control characters",
    "unknown": "none of its words is in the held-out texts",
    "copy": "it repeats the question",
    "words": "its words are unlike those of the held-out texts",
    "order": "its words are in an order unlike that of the held-out texts",
    "repeats": "it repeats its words",
    "topic": "it is not about the question",
}
_WORD = re.compile(r"[\w']+|[.,;:!?]")
_FITTING = threading.Lock()


@dataclass(frozen=True)
class WordModel:
    """Counts of words and of pairs of neighbouring words in some texts."""

    words: Mapping[str, int]
    pairs: Mapping[tuple[str, str], int]
    n_words: int

    @classmethod
    def of(cls, texts: Sequence[str]) -> "WordModel":
        """Count the words of texts."""
        words: Counter[str] = Counter()
        pairs: Counter[tuple[str, str]] = Counter()
        for text in texts:
            found = ["", *words_of(text)]
            words.update(found)
            pairs.update(itertools.pairwise(found))
        return cls(words, pairs, sum(words.values()))

    def surprise(self, text: str) -> float:
        """Return the mean of −log p(word | previous word), in nats; 0 for a text without words.

        p(w | v) = λ n(v, w) / n(v) + (1 − λ) (n(w) + ½) / (n + ½ (V + 1)), where V is the number of distinct words.

        Example:
            >>> model = WordModel.of(["tea is good .", "rum is good ."])
            >>> model.surprise("tea is good .") < model.surprise("good tea . is") < model.surprise("zu mag blethon")
            True
        """
        found = ["", *words_of(text)]
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
        pairs = list(itertools.pairwise(["", *words_of(text)]))
        return sum(pair not in self.pairs for pair in pairs) / max(1, len(pairs))

    def measure(self, texts: Sequence[str]) -> dict[str, FloatArray]:
        """Return all measures but *topic*, each ``(n_texts,)``; higher values are more unusual."""
        measures = {"words": self.surprise, "order": self.unseen, "repeats": repeats}
        return {name: np.array([measure(text) for text in texts]) for name, measure in measures.items()}


@dataclass(frozen=True, eq=False)
class NoveltyGate:
    """Says whether a text is unlike the held-out texts, and in which respect. Computed when the first text is new."""

    items: Sequence[Asked]
    """Questions with held-out texts."""
    fold: IndexArray
    """Number of each text's fold, ``(n_texts,)``; texts of one question are in one fold."""
    embed: Embed | None = None
    """For *topic*."""

    @cached_property
    def known(self) -> frozenset[Asked]:
        """The texts that people voted on."""
        return frozenset(self.items)

    @cached_property
    def model(self) -> WordModel:
        """Counts of the held-out texts."""
        return WordModel.of([text for _, text in self.items])

    @cached_property
    def thresholds(self) -> Mapping[int, Mapping[str, float]]:
        """The thresholds of every measure, by length in words."""
        models = {
            number: WordModel.of([self.items[i][1] for i in np.flatnonzero(self.fold != number).tolist()])
            for number in np.unique(self.fold).tolist()
        }
        found: dict[int, dict[str, float]] = {}
        for length in LENGTHS:
            parts = {number: list[str]() for number in models}
            for number, (_, text) in zip(self.fold.tolist(), self.items, strict=True):
                if part := _part(text, length):
                    parts[number].append(part)
            if sum(map(len, parts.values())) < FEWEST_TEXTS and found:
                break
            measured = [models[number].measure(part) for number, part in parts.items() if part]
            found[length] = {
                name: conformal_quantile(np.concatenate([one[name] for one in measured]), LEVEL)
                for name in (measured[0] if measured else ())
            }
        return found

    @cached_property
    def topic_threshold(self) -> float:
        """The threshold of *topic* by the encoder, for texts of at least ``TOPIC_LENGTH`` words."""
        assert self.embed  # noqa: S101 - not without an encoder
        long = [item for item in self.items if len(words_of(item[1])) >= TOPIC_LENGTH]
        if len(long) < FEWEST_TEXTS:
            return math.inf
        rows = np.unique(np.linspace(0, len(long) - 1, min(len(long), MAX_EMBEDDED)).astype(np.int64))
        distance = topic_distance(partial(self.embed, cache=True), [long[row] for row in rows.tolist()])
        return conformal_quantile(distance, LEVEL)

    def _at_sight(self, prompt: PromptLike, text: str) -> str:
        """Return the reason to refuse a text that needs no measure."""
        if not text.strip():
            return REASONS["empty"]
        if printable(plain := text.replace("\r", "")) != plain:
            return REASONS["control"]
        if self.model.words.keys().isdisjoint(spoken_words(text)):
            return REASONS["unknown"]
        question = Prompt(prompt).turns[-1].content
        long = len(spoken_words(question)) >= COPY_LENGTH
        return REASONS["copy"] if long and similarity(question, text) >= NEAR_DUPLICATE else ""

    def check(self, items: Sequence[Item]) -> list[str]:
        """Return for each prompt with a text the reason to refuse the text, or an empty text."""
        asked = [(Prompt(prompt).text, text) for prompt, text in items]
        reasons = [
            "" if one in self.known and one[1].strip() else self._at_sight(*item)
            for one, item in zip(asked, items, strict=True)
        ]
        new = [i for i, one in enumerate(asked) if not reasons[i] and one not in self.known]
        if not new:
            return reasons
        with _FITTING:
            thresholds = self.thresholds
        texts = [asked[i][1] for i in new]
        measured, lengths = self.model.measure(texts), [len(words_of(text)) for text in texts]
        for row, i in enumerate(new):
            shorter = max((one for one in thresholds if one <= lengths[row]), default=min(thresholds))
            longer = min((one for one in thresholds if one > lengths[row]), default=shorter)
            limits = {name: max(thresholds[shorter][name], thresholds[longer][name]) for name in measured}
            reasons[i] = next((REASONS[name] for name, of in measured.items() if of[row] > limits[name]), "")
        long = [i for row, i in enumerate(new) if not reasons[i] and lengths[row] >= TOPIC_LENGTH]
        if self.embed and long:
            with _FITTING:
                threshold = self.topic_threshold
            for i, distance in zip(long, topic_distance(self.embed, [asked[i] for i in long]), strict=True):
                reasons[i] = REASONS["topic"] if distance > threshold else ""
        return reasons


def fit_gate(
    held_out: PreferenceSet,
    features: TextFeatures | FinetunedFeatures | None = None,
    encode: Encode = at_once,
) -> NoveltyGate | None:
    """Return the gate of an ensemble, from the texts of its held-out votes.

    Thresholds are conformal quantiles: if new texts are like held-out texts of other prompts, each measure is above its
    threshold for at most ``LEVEL`` of them. With n < 1/LEVEL − 1 texts, the threshold is the largest measure.

    Args:
        held_out: votes whose texts are known to be good.
        features: of the ensemble; its encoder embeds texts for *topic*.
        encode: calls the encoder.

    Returns:
        The gate, or None with fewer than ``FEWEST_TEXTS`` texts or ``FOLDS`` prompts.
    """
    lists = sorted(candidates_of(held_out), key=lambda one: Prompt(one.prompt).hash())
    items = [(Prompt(one.prompt).text, text) for one in lists for text in one.responses]
    if len(items) < FEWEST_TEXTS or len(lists) < FOLDS:
        return None
    fold = np.repeat(np.arange(len(lists), dtype=np.int32) % FOLDS, [len(one.responses) for one in lists])
    return NoveltyGate(items, fold, sentence_embedding(features, encode))


def repeats(text: str) -> float:
    """Return the share of words that occur among the three words before them. One is no sign: "the end of the street".

    Example:
        >>> repeats("no no no no"), repeats("No, no.")
        (0.5, 0.0)
    """
    words = words_of(text)
    again = sum(word in words[max(0, i - REPEATS_WITHIN) : i] for i, word in enumerate(words))
    return max(0, again - 1) / max(1, len(words))


def _part(text: str, length: int) -> str:
    """Return the first words of some sentence of a text; an empty text if it has too few words."""
    words = words_of(text)
    starts = [0, *(i + 1 for i, word in enumerate(words) if word in ".!?")]
    starts = [start for start in starts if start + length <= len(words)]
    if not starts:
        return ""
    start = starts[len(text) % len(starts)]  # as good as random
    return " ".join(words[start : start + length])


def topic_distance(embed: Embed, items: Sequence[Asked]) -> FloatArray:
    """Return 1 − cosine of each text and its question, ``(n_items,)``."""
    questions = list(dict.fromkeys(question for question, _ in items))
    vectors = embed([*questions, *(text for _, text in items)])
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    row = {question: i for i, question in enumerate(questions)}
    of_question = vectors[[row[question] for question, _ in items]]
    return np.asarray(1 - (of_question * vectors[len(questions) :]).sum(axis=1))


def sentence_embedding(features: TextFeatures | FinetunedFeatures | None, encode: Encode = at_once) -> Embed | None:
    """Return a function from texts to vectors of the last layer of an encoder; None if no language model encodes."""
    if not isinstance(features, TextFeatures) or not isinstance(features.load_checked(), ModelEncoder):
        return None
    encoder = replace(features, layers="last", pooling="mean", surface=False, identity="").resolved().load()

    def embed(texts: Sequence[str], *, cache: bool = False) -> FloatArray:  # a server keeps no texts of its users
        read = partial(encoded, encoder=encoder, surface=False, cache=cache)
        return np.asarray(encode(read, [("", text) for text in texts]), dtype=np.float64)

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


def words_of(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, in lower case."""
    return _WORD.findall(text.casefold().replace("’", "'"))


def spoken_words(text: str) -> list[str]:
    """Return the words of a text, in lower case, without punctuation marks."""
    return [word for word in words_of(text) if word[0].isalnum()]
