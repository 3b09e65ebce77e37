"""The wording of prompts and responses: from attributes such as stance, length and tone to English text.

Defined here: the order of the sentences and the contents of each length. Every attribute is visible in the text. The
words are in ``issues.toml`` and ``words.toml``; ``town_hall`` draws the attributes.
"""

import functools
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pluralign.core.json_values import from_json

# --- The words, read from TOML files: 48 issues that a town decides on, and phrases that fit any issue.

Phrases: TypeAlias = tuple[str, ...]
PhrasesBy: TypeAlias = Mapping[str, Phrases]
"""Phrases by the level of an attribute, such as the stance."""
STANCES = ("for", "against", "compromise", "undecided")
TONES = ("warm", "plain", "formal", "blunt")
HEDGES = ("firm", "even", "hedged")
SUPPORTS = ("none", "figures", "story", "fairness", "cost")

VALUE_AXES = ("public_spending", "change", "environment", "rules")
"""Axes of a position: spend public money or save it; change or tradition; nature first or other things first; common
rules or personal freedom. Loadings are multiples of 1/4."""


@dataclass(frozen=True)
class Issue:
    """One question, for example a bus lane, with the arguments about it."""

    verb: str
    """What the town would do, as "turn/turning": base form and -ing form."""
    rest: str
    """The rest of that phrase, "one lane of {place} into a bus lane"."""
    thing: str
    """The same as a noun, "the bus lane on {place}"."""
    kind: str
    """Kind of place it is about, a key of ``Words.places``."""
    loadings: tuple[float, float, float, float]
    """Position of "for" on each of ``VALUE_AXES``, each in [-1, 1]. "Against" is the opposite position."""
    money: int
    """Cost in thousands of pounds; negative if it saves money."""
    pros: Phrases
    """Reasons for it, as clauses."""
    cons: Phrases
    """Reasons against it, as clauses."""
    middle: Phrases
    """Compromises, as verb phrases in base form."""
    unknown: Phrases
    """Open questions, as indirect questions."""
    gains: str
    """People who gain, a plural noun phrase."""
    loses: str
    """People who lose, a plural noun phrase."""
    story_for: Phrases
    """Short stories of a person who would benefit."""
    story_against: Phrases
    """Short stories of a person who would suffer."""


@dataclass(frozen=True)
class Names:
    """Names of places of one kind: each of ``names`` with each of ``kinds``."""

    names: Phrases
    kinds: Phrases

    @functools.cached_property
    def all(self) -> Phrases:
        """Every name with every kind."""
        return tuple(f"{name} {kind}".strip() for name in self.names for kind in self.kinds)


@dataclass(frozen=True)
class Words:
    """Phrases that fit any issue, and names. ``words.toml`` documents the braces."""

    questions: Phrases
    asked_back: Phrases
    firm_doubts: Phrases
    links: Phrases
    both_sides: Phrases
    one_side: Phrases
    days: Phrases
    town_beginnings: Phrases
    town_endings: Phrases
    people: tuple[tuple[str, str, str], ...]
    leads: PhrasesBy
    positions: Mapping[str, PhrasesBy]
    assurances: PhrasesBy
    next_steps: PhrasesBy
    openers: PhrasesBy
    closers: PhrasesBy
    list_titles: PhrasesBy
    calls: PhrasesBy
    value_tags: Mapping[str, PhrasesBy]
    balance_tags: PhrasesBy
    values: Mapping[str, PhrasesBy]
    balance: PhrasesBy
    support_frames: PhrasesBy
    support: Mapping[str, PhrasesBy]
    cost: Mapping[str, PhrasesBy]
    reason_openings: PhrasesBy
    concessions: PhrasesBy
    places: Mapping[str, Names]

    contractions: Mapping[str, str]

    @functools.cached_property
    def contractible(self) -> re.Pattern[str]:
        """Matches what is contracted, only before another word: "more than I am." is not."""
        return re.compile(r"\b(" + "|".join(self.contractions) + r")(?= [a-z])")

    @functools.cached_property
    def towns(self) -> Phrases:
        """Every beginning with every ending."""
        return tuple(beginning + ending for beginning in self.town_beginnings for ending in self.town_endings)


@functools.cache
def load_issues() -> tuple[Issue, ...]:
    """Return all issues, in the order of the file. The file is read once.

    Example:
        >>> load_issues()[0].thing
        'the bus lane on {place}'
    """
    return tuple(from_json(Issue, row) for row in _read("issues.toml")["issue"])


@functools.cache
def load_words() -> Words:
    """Return the phrases and names. The file is read once.

    Example:
        >>> load_words().towns[0]
        'Alderbridge'
    """
    return from_json(Words, _read("words.toml"))


def _read(name: str) -> dict[str, Any]:
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


class _Chooser:
    """Selects words with integers that were drawn before, so that one numpy call is enough for many texts."""

    def __init__(self, draws: Sequence[int]) -> None:
        self._draws = iter(draws)

    def pick(self, options: Sequence[Word]) -> Word:
        return options[next(self._draws) % len(options)]

    def several(self, options: Sequence[Word], count: int) -> list[Word]:
        left = list(options)
        return [left.pop(next(self._draws) % len(left)) for _ in range(count)]

    def between(self, low: int, high: int) -> int:
        return low + next(self._draws) % (high - low + 1)


def write_prompt(issue: int, town: int, place: int, question: int, day: int) -> str:
    """Write the question about an issue. All arguments are indices into the word material.

    Example:
        >>> write_prompt(0, 0, 32, 0, 0)
        'Should Alderbridge turn one lane of Mill Street into a bus lane?'
    """
    topic, words = load_issues()[issue], load_words()
    verb, doing = topic.verb.split("/")
    text = words.questions[question].format(
        town=words.towns[town],
        do=f"{verb} {topic.rest}",
        doing=f"{doing} {topic.rest}",
        thing=topic.thing,
        day=words.days[day],
    )
    return text.replace("{place}", load_words().places[topic.kind].all[place])


def write_response(issue: int, town: int, place: int, attributes: Attributes, draws: Sequence[int]) -> str:
    """Write one response with the given attributes; ``draws`` (at least ``N_DRAWS`` integers) choose the words.

    Example:
        >>> one_sentence_for = Attributes(0, 0, 1, 1, 0, 0, 0, 0)
        >>> write_response(1, 0, 0, one_sentence_for, [1] * N_DRAWS)
        'I support Sunday opening at the Abbotsfield library, because good public services make a community strong.'
    """
    topic, words = load_issues()[issue], load_words()
    chooser = _Chooser(draws)
    pick = chooser.pick
    stance, tone = STANCES[attributes.stance], TONES[attributes.tone]
    hedge, support = HEDGES[attributes.hedging], SUPPORTS[attributes.support]
    blanks = _blanks(topic, town, chooser)

    because, values = _values(topic, stance, N_VALUES[attributes.length], chooser)
    position = pick(words.leads[tone]) + pick(words.positions[stance][hedge]) + because
    backing = _support(topic, stance, support, chooser)
    ending = [pick(words.asked_back)] * attributes.question + [pick(words.calls[stance])] * attributes.call

    if attributes.length == 0:
        sentence = "; ".join([position, *backing])
        blocks = [_paragraph([sentence, *ending], blanks)]
    else:
        opening, assurance, closing = _trimmings(tone, hedge, stance, chooser, length=attributes.length)
        as_list = attributes.structure != PROSE
        n_reasons = max(N_REASONS[attributes.length], 2) if as_list else N_REASONS[attributes.length]
        reasons = _reasons(topic, stance, hedge, n_reasons, chooser, as_list=as_list)
        first, second, third = [*opening, position], [*values, *backing, *assurance], [*closing, *ending]
        if as_list:
            title, numbered = pick(words.list_titles[stance]), attributes.structure == NUMBERED
            middle = _list(title, reasons, blanks, numbered=numbered)
            blocks = [_paragraph(first, blanks), middle, _paragraph(second + third, blanks)]
        elif attributes.length <= 2:
            blocks = [_paragraph(first + reasons + second + third, blanks)]
        elif attributes.length == 3:
            blocks = [_paragraph(first + reasons, blanks), _paragraph(second + third, blanks)]
        else:
            blocks = [_paragraph(block, blanks) for block in (first + reasons, second, third)]

    text = "\n\n".join(filter(None, blocks))
    if tone in ("warm", "blunt"):
        text = words.contractible.sub(lambda match: words.contractions[match[0]], text)
    return text.replace("{place}", load_words().places[topic.kind].all[place])


def _sentence(clause: str, blanks: dict[str, str]) -> str:
    text = clause.format_map(blanks)
    return text[0].upper() + text[1:] + ("" if text[-1] in "?!:" else ".")


def _paragraph(clauses: Sequence[str], blanks: dict[str, str]) -> str:
    return " ".join(_sentence(clause, blanks) for clause in clauses)


def _list(title: str, clauses: Sequence[str], blanks: dict[str, str], *, numbered: bool) -> str:
    items = [
        (f"{number}. " if numbered else "- ") + _sentence(clause, blanks)
        for number, clause in enumerate(clauses, start=1)
    ]
    return "\n".join([_sentence(title, blanks), *items])


def _blanks(topic: Issue, town: int, chooser: _Chooser) -> dict[str, str]:
    """Choose the words for the braces of one response; {place} is filled in last."""
    words = load_words()
    verb, doing = topic.verb.split("/")
    unknown = chooser.between(0, 1)
    who, she, her = chooser.pick(words.people)
    thousands = abs(topic.money) * chooser.between(80, 125) / 100
    step = 0.5 if thousands < 10 else 1 if thousands < 50 else 5 if thousands < 200 else 10
    return {
        "place": "{place}",
        "town": words.towns[town],
        "do": f"{verb} {topic.rest}",
        "doing": f"{doing} {topic.rest}",
        "thing": topic.thing,
        "middle": chooser.pick(topic.middle),
        "unknown": topic.unknown[unknown],
        "asked": topic.unknown[1 - unknown],
        "pro": chooser.pick(topic.pros),
        "con": chooser.pick(topic.cons),
        "gains": topic.gains,
        "loses": topic.loses,
        "who": who,
        "she": she,
        "her": her,
        "money": f"{round(thousands / step) * step * 1000:,.0f}",
        "percent": str(chooser.between(53, 79)),
        "points": str(chooser.between(2, 5)),
        "count": f"{chooser.between(12, 290) * 10 + chooser.between(0, 9):,}",
        "weeks": ("two", "three", "four", "five", "six", "seven", "eight")[chooser.between(0, 6)],
        "years": ("two", "three", "four", "five", "six", "seven", "eight")[chooser.between(0, 6)],
        "day": chooser.pick(words.days),
        # Never the town itself: between 1 and all but one steps further on in the table.
        "other": words.towns[(town + chooser.between(1, len(words.towns) - 1)) % len(words.towns)],
    }


def _values(topic: Issue, stance: str, n_sentences: int, chooser: _Chooser) -> tuple[str, list[str]]:
    """Return a "because" clause with each value of the position, and sentences that alternate between the values."""
    words = load_words()
    if stance in words.balance:
        tags = [chooser.pick(words.balance_tags[stance])]
        sentences = chooser.several(words.balance[stance], n_sentences)
    else:
        ends = [
            (axis, "for" if (load > 0) == (stance == "for") else "against")
            for axis, load in zip(VALUE_AXES, topic.loadings, strict=True)
            if load
        ]
        tags = [chooser.pick(words.value_tags[axis][end]) for axis, end in ends]
        by_value = [chooser.several(words.values[axis][end], n_sentences) for axis, end in ends]
        sentences = [sentence for turn in zip(*by_value, strict=True) for sentence in turn][:n_sentences]
    return ", because " + ", and because ".join(tags), sentences


def _support(topic: Issue, stance: str, support: str, chooser: _Chooser) -> list[str]:
    """Return a sentence that supports the position with figures, a story, fairness or the cost, or nothing."""
    if support == "none":
        return []
    words = load_words()
    frame = chooser.pick(words.support_frames[support])
    if support == "cost":
        return [frame + chooser.pick(words.cost[stance]["saves" if topic.money < 0 else "costs"])]
    if support == "story" and stance in ("for", "against"):
        return [frame + chooser.pick(topic.story_for if stance == "for" else topic.story_against)]
    return [frame + chooser.pick(words.support[support][stance])]


def _trimmings(
    tone: str, hedge: str, stance: str, chooser: _Chooser, *, length: int
) -> tuple[list[str], list[str], list[str]]:
    """Return the additions of longer responses at the start, after the argument, and at the end."""

    def maybe(options: Sequence[str], shortest: int) -> list[str]:
        return [chooser.pick(options)] if options and length >= shortest else []

    words = load_words()
    assurances = words.firm_doubts if (stance, hedge) == ("undecided", "firm") else words.assurances[hedge]
    opening = maybe(words.openers[tone], 2)
    assurance = maybe(words.concessions[stance], 4) + maybe(assurances, 1)
    closing = maybe(words.next_steps[stance], 4) + maybe(words.closers[tone], 1)
    return opening, assurance, closing


def _reasons(topic: Issue, stance: str, hedge: str, n_reasons: int, chooser: _Chooser, *, as_list: bool) -> list[str]:
    """Return the argument as sentences: reasons of one side, or of both sides in turn."""
    words = load_words()
    pros = [topic.pros[index] for index in chooser.pick(_ORDERS)]
    cons = [topic.cons[index] for index in chooser.pick(_ORDERS)]
    if stance in words.balance:
        if as_list:
            return [
                words.one_side[turn % 2].format(pro=pros[turn // 2], con=cons[turn // 2]) for turn in range(n_reasons)
            ]
        first = chooser.between(0, len(words.both_sides) - 1)
        return [
            words.both_sides[(first + turn) % len(words.both_sides)].format(pro=pros[turn], con=cons[turn])
            for turn in range((n_reasons + 1) // 2)
        ]
    reasons = (pros if stance == "for" else cons)[:n_reasons]
    if as_list:
        return reasons
    opened = chooser.pick(words.reason_openings[hedge]) + reasons[0]
    start = chooser.between(0, len(words.links) - 1)
    linked = [words.links[(start + turn) % len(words.links)] + reason for turn, reason in enumerate(reasons[1:])]
    return [opened, *linked]
