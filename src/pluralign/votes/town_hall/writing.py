"""The wording of prompts and responses: from attributes such as stance, length and tone to English text.

Defined here: the order of the sentences and the contents of each length. Every attribute is visible in the text. The
words are in ``issues.toml`` and ``words.toml``; ``town_hall`` draws the attributes.
"""

import functools
import itertools
import re
import tomllib
from collections.abc import Sequence
from importlib import resources
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

# --- The words, read from TOML files: 48 issues that a town decides on, and phrases that fit any issue.

STANCES = ("for", "against", "compromise", "undecided")
TONES = ("warm", "plain", "formal", "blunt")
HEDGES = ("firm", "even", "hedged")
SUPPORTS = ("none", "figures", "story", "fairness", "cost")

VALUE_AXES = ("public_spending", "change", "environment", "rules")
"""Axes of a position: spend public money or save it; change or tradition; nature first or other things first; common
rules or personal freedom. Loadings are multiples of 1/4."""


class Issue(SimpleNamespace):
    """One question, for example a bus lane, with the arguments about it; ``issues.toml`` documents its fields."""


class Words(SimpleNamespace):
    """Phrases that fit any issue, and names; ``words.toml`` documents its tables."""

    @functools.cached_property
    def contractible(self) -> re.Pattern[str]:
        """Matches what is contracted, only before another word: "more than I am." is not."""
        return re.compile(r"\b(" + "|".join(self.contractions) + r")(?= [a-z])")

    @functools.cached_property
    def towns(self) -> tuple[str, ...]:
        """Every beginning with every ending."""
        return tuple(beginning + ending for beginning in self.town_beginnings for ending in self.town_endings)

    @functools.cached_property
    def places_of(self) -> dict[str, tuple[str, ...]]:
        """For each kind of place, every name with every kind."""
        both = ((kind, itertools.product(names["names"], names["kinds"])) for kind, names in self.places.items())
        return {kind: tuple(" ".join(pair).strip() for pair in pairs) for kind, pairs in both}


@functools.cache
def load_issues() -> tuple[Issue, ...]:
    """Return all issues, in the order of the file. The file is read once.

    Example:
        >>> load_issues()[0].thing
        'the bus lane on {place}'
    """
    return tuple(Issue(**row) for row in read_toml("issues.toml")["issue"])


@functools.cache
def load_words() -> Words:
    """Return the phrases and names. The file is read once.

    Example:
        >>> load_words().towns[0]
        'Alderbridge'
    """
    return Words(**read_toml("words.toml"))


def read_toml(name: str) -> dict[str, Any]:
    """Return a TOML file of this folder."""
    return tomllib.loads(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"))


# --- Texts.


Word = TypeVar("Word")

PROSE, BULLETS, NUMBERED = range(3)
N_DRAWS = 40
"""Random integers per response; the longest response uses 37."""

N_REASONS = (0, 1, 2, 3, 3)
N_VALUES = (0, 1, 2, 3, 3)
"""Numbers of reasons and of sentences about values, by length level; a list has at least two reasons."""

_ORDERS = tuple(itertools.permutations(range(4)))


class Attributes(NamedTuple):
    """Attributes of a response. Every field is an index into the levels named in its description."""

    stance: int
    """for, against, compromise, undecided (``STANCES``)."""
    length: int
    """0: one sentence; 1: a few; 2: a paragraph; 3: two paragraphs; 4: three."""
    tone: int
    """warm, plain, formal, blunt (``TONES``)."""
    hedging: int
    """firm, even, hedged (``HEDGES``)."""
    structure: int
    """0: prose; 1: bullets; 2: a numbered list. One sentence is always prose."""
    support: int
    """none, figures, story, fairness, cost (``SUPPORTS``)."""
    call: int
    """1 if it ends in a call to action."""
    question: int
    """1 if it asks a question back."""


def write_prompt(issue: int, town: int, place: int, question: int, day: int) -> str:
    """Write the question about an issue. All arguments are indices into the word material.

    Example:
        >>> write_prompt(0, 0, 32, 0, 0)
        'Should Alderbridge turn one lane of Mill Street into a bus lane?'
    """
    topic, words = load_issues()[issue], load_words()
    text: str = words.questions[question].format(town=words.towns[town], day=words.days[day], **_proposal(topic))
    return text.replace("{place}", words.places_of[topic.kind][place])


def write_response(issue: int, town: int, place: int, attributes: Attributes, draws: Sequence[int]) -> str:
    """Write one response with the given attributes; ``draws`` (at least ``N_DRAWS`` integers) choose the words.

    Example:
        >>> one_sentence_for = Attributes(0, 0, 1, 1, 0, 0, 0, 0)
        >>> write_response(1, 0, 0, one_sentence_for, [1] * N_DRAWS)
        'I support Sunday opening at the Abbotsfield library, because good public services make a community strong.'
    """
    writer = _Writer(load_issues()[issue], attributes, draws)
    return writer.write(town).replace("{place}", writer.words.places_of[writer.topic.kind][place])


def _proposal(topic: Issue) -> dict[str, str]:
    verb, doing = topic.verb.split("/")
    return {"do": f"{verb} {topic.rest}", "doing": f"{doing} {topic.rest}", "thing": topic.thing}


class _Writer:
    """Writes one response. Integers that were drawn before choose the words, so that one numpy call is enough for many
    texts; the order of the choices is part of the texts.
    """

    def __init__(self, topic: Issue, attributes: Attributes, draws: Sequence[int]) -> None:
        self.words, self.topic, self.draws = load_words(), topic, iter(draws)
        self.length, self.structure = attributes.length, attributes.structure
        self.call, self.question = attributes.call, attributes.question
        self.stance, self.tone = STANCES[attributes.stance], TONES[attributes.tone]
        self.hedge, self.support = HEDGES[attributes.hedging], SUPPORTS[attributes.support]

    def pick(self, options: Sequence[Word]) -> Word:
        return options[next(self.draws) % len(options)]

    def several(self, options: Sequence[Word], count: int) -> list[Word]:
        left = list(options)
        return [left.pop(next(self.draws) % len(left)) for _ in range(count)]

    def between(self, low: int, high: int) -> int:
        return low + next(self.draws) % (high - low + 1)

    def write(self, town: int) -> str:
        """Return the text, in which {place} is left."""
        words, pick, length = self.words, self.pick, self.length
        blanks = self.blanks(town)

        def paragraph(clauses: Sequence[str]) -> str:
            return " ".join(_sentence(clause, blanks) for clause in clauses)

        because, values = self.values(N_VALUES[length])
        position = pick(words.leads[self.tone]) + pick(words.positions[self.stance][self.hedge]) + because
        backing = self.backing()
        ending = [pick(words.asked_back)] * self.question + [pick(words.calls[self.stance])] * self.call
        if length == 0:
            blocks = [paragraph(["; ".join([position, *backing]), *ending])]
        else:
            opening, assurance, closing = self.trimmings()
            reasons = self.reasons()
            first, second, third = [*opening, position], [*values, *backing, *assurance], [*closing, *ending]
            if self.structure != PROSE:
                title, bullets = pick(words.list_titles[self.stance]), itertools.repeat("- ")
                marks = (f"{i}. " for i in itertools.count(1)) if self.structure == NUMBERED else bullets
                lines = [mark + _sentence(reason, blanks) for mark, reason in zip(marks, reasons, strict=False)]
                blocks = [paragraph(first), "\n".join([_sentence(title, blanks), *lines]), paragraph(second + third)]
            elif length <= 2:
                blocks = [paragraph(first + reasons + second + third)]
            elif length == 3:
                blocks = [paragraph(first + reasons), paragraph(second + third)]
            else:
                blocks = [paragraph(block) for block in (first + reasons, second, third)]
        text = "\n\n".join(filter(None, blocks))
        if self.tone in ("warm", "blunt"):
            text = words.contractible.sub(lambda match: words.contractions[match[0]], text)
        return text

    def blanks(self, town: int) -> dict[str, str]:
        """Choose the words for the braces; {place} is filled in last."""
        topic, towns = self.topic, self.words.towns
        unknown = self.between(0, 1)
        who, she, her = self.pick(self.words.people)
        thousands = abs(topic.money) * self.between(80, 125) / 100
        step = 0.5 if thousands < 10 else 1 if thousands < 50 else 5 if thousands < 200 else 10
        numbers = ("two", "three", "four", "five", "six", "seven", "eight")
        return {
            "place": "{place}",
            "town": towns[town],
            **_proposal(topic),
            "middle": self.pick(topic.middle),
            "unknown": topic.unknown[unknown],
            "asked": topic.unknown[1 - unknown],
            "pro": self.pick(topic.pros),
            "con": self.pick(topic.cons),
            "gains": topic.gains,
            "loses": topic.loses,
            "who": who,
            "she": she,
            "her": her,
            "money": f"{round(thousands / step) * step * 1000:,.0f}",
            "percent": str(self.between(53, 79)),
            "points": str(self.between(2, 5)),
            "count": f"{self.between(12, 290) * 10 + self.between(0, 9):,}",
            "weeks": self.pick(numbers),
            "years": self.pick(numbers),
            "day": self.pick(self.words.days),
            # Never the town itself: between 1 and all but one steps further on in the table.
            "other": towns[(town + self.between(1, len(towns) - 1)) % len(towns)],
        }

    def values(self, n_sentences: int) -> tuple[str, list[str]]:
        """Return a "because" clause with each value of the position, and sentences about the values in turn."""
        words = self.words
        if self.stance in words.balance:
            tags = [self.pick(words.balance_tags[self.stance])]
            sentences = self.several(words.balance[self.stance], n_sentences)
        else:
            ends = [
                (axis, "for" if (load > 0) == (self.stance == "for") else "against")
                for axis, load in zip(VALUE_AXES, self.topic.loadings, strict=True)
                if load
            ]
            tags = [self.pick(words.value_tags[axis][end]) for axis, end in ends]
            by_value = [self.several(words.values[axis][end], n_sentences) for axis, end in ends]
            sentences = [sentence for turn in zip(*by_value, strict=True) for sentence in turn][:n_sentences]
        return ", because " + ", and because ".join(tags), sentences

    def backing(self) -> list[str]:
        """Return a sentence that supports the position with figures, a story, fairness or the cost, or nothing."""
        if self.support == "none":
            return []
        frame = self.pick(self.words.support_frames[self.support])
        if self.support == "cost":
            options = self.words.cost[self.stance]["saves" if self.topic.money < 0 else "costs"]
        elif self.support == "story" and self.stance in ("for", "against"):
            options = self.topic.story_for if self.stance == "for" else self.topic.story_against
        else:
            options = self.words.support[self.support][self.stance]
        return [frame + self.pick(options)]

    def trimmings(self) -> tuple[list[str], list[str], list[str]]:
        """Return the additions of longer responses at the start, after the argument, and at the end."""

        def maybe(options: Sequence[str], shortest: int) -> list[str]:
            return [self.pick(options)] if options and self.length >= shortest else []

        words, is_firm_doubt = self.words, (self.stance, self.hedge) == ("undecided", "firm")
        opening = maybe(words.openers[self.tone], 2)
        assurance = maybe(words.concessions[self.stance], 4)
        assurance += maybe(words.firm_doubts if is_firm_doubt else words.assurances[self.hedge], 1)
        closing = maybe(words.next_steps[self.stance], 4) + maybe(words.closers[self.tone], 1)
        return opening, assurance, closing

    def reasons(self) -> list[str]:
        """Return the argument as sentences: reasons of one side, or of both sides in turn."""
        words, count = self.words, N_REASONS[self.length]
        pros = [self.topic.pros[index] for index in self.pick(_ORDERS)]
        cons = [self.topic.cons[index] for index in self.pick(_ORDERS)]
        if self.structure != PROSE:
            count = max(count, 2)
            if self.stance not in words.balance:
                return (pros if self.stance == "for" else cons)[:count]
            return [words.one_side[i % 2].format(pro=pros[i // 2], con=cons[i // 2]) for i in range(count)]
        if self.stance in words.balance:
            sides = self.in_turn(words.both_sides, (count + 1) // 2)
            return [side.format(pro=pro, con=con) for side, pro, con in zip(sides, pros, cons, strict=False)]
        own = (pros if self.stance == "for" else cons)[:count]
        opened = self.pick(words.reason_openings[self.hedge]) + own[0]
        links = self.in_turn(words.links, len(own) - 1)
        return [opened, *(link + reason for link, reason in zip(links, own[1:], strict=True))]

    def in_turn(self, options: Sequence[str], count: int) -> list[str]:
        """Return phrases in the order of the table, from one that is chosen."""
        first = self.between(0, len(options) - 1)
        return [options[(first + turn) % len(options)] for turn in range(count)]


def _sentence(clause: str, blanks: dict[str, str]) -> str:
    text = clause.format_map(blanks)
    return text[0].upper() + text[1:] + ("" if text[-1] in "?!:" else ".")
