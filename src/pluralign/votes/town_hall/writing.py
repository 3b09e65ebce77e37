"""The wording of prompts and responses: from attributes such as stance, length and tone to English text.

Defined here: the order of the sentences and the contents of each length. Every attribute is visible in the text. The
words are in ``issues``, ``phrases``, ``arguments`` and ``names``; ``townhall`` draws the attributes.
"""

import functools
import itertools
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple, TypeVar

from pluralign.core.json_values import from_json
from pluralign.votes.town_hall import arguments, names, phrases

# --- The questions a town decides on: 48 issues, their positions on four value axes, and the arguments about them.


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
    """Kind of place it is about, a key of ``names.PLACES``."""
    loadings: tuple[float, float, float, float]
    """Position of "for" on each of ``VALUE_AXES``, each in [-1, 1]. "Against" is the opposite position."""
    money: int
    """Cost in thousands of pounds; negative if it saves money."""
    pros: tuple[str, ...]
    """Reasons for it, as clauses."""
    cons: tuple[str, ...]
    """Reasons against it, as clauses."""
    middle: tuple[str, ...]
    """Compromises, as verb phrases in base form."""
    unknown: tuple[str, ...]
    """Open questions, as indirect questions."""
    gains: str
    """People who gain, a plural noun phrase."""
    loses: str
    """People who lose, a plural noun phrase."""
    story_for: tuple[str, ...]
    """Short stories of a person who would benefit."""
    story_against: tuple[str, ...]
    """Short stories of a person who would suffer."""


@functools.cache
def load_issues() -> tuple[Issue, ...]:
    """Return all issues, in the order of the file. The file is read once.

    Example:
        >>> load_issues()[0].thing
        'the bus lane on {place}'
    """
    text = resources.files(__package__).joinpath("issues.toml").read_text(encoding="utf-8")
    return tuple(from_json(Issue, row) for row in tomllib.loads(text)["issue"])


Choice = TypeVar("Choice")

PROSE, BULLETS, NUMBERED = range(3)
N_DRAWS = 40
"""Random integers per response; the longest response uses 37."""

N_REASONS = (0, 1, 2, 3, 3)
N_VALUES = (0, 1, 2, 3, 3)
"""Numbers of reasons and of sentences about values, by length level; a list has at least two reasons."""

_ORDERS = tuple(itertools.permutations(range(4)))
_CONTRACTIONS = {
    "are not": "aren't",
    "cannot": "can't",
    "did not": "didn't",
    "do not": "don't",
    "does not": "doesn't",
    "I am": "I'm",
    "I would": "I'd",
    "is not": "isn't",
    "let us": "let's",
    "should not": "shouldn't",
    "will not": "won't",
    "would not": "wouldn't",
}
_CONTRACTIONS |= {full[0].upper() + full[1:]: short[0].upper() + short[1:] for full, short in _CONTRACTIONS.items()}
# Only before another word: "more than I am." is not contracted.
_CONTRACTIBLE = re.compile(r"\b(" + "|".join(_CONTRACTIONS) + r")(?= [a-z])")


class Attributes(NamedTuple):
    """Attributes of a response. Every field is an index into the levels named in its description."""

    stance: int
    """for, against, compromise, undecided (``phrases.STANCES``)."""
    length: int
    """0: one sentence; 1: a few; 2: a paragraph; 3: two paragraphs; 4: three."""
    tone: int
    """warm, plain, formal, blunt (``phrases.TONES``)."""
    hedging: int
    """firm, even, hedged (``phrases.HEDGES``)."""
    structure: int
    """0: prose; 1: bullets; 2: a numbered list. One sentence is always prose."""
    support: int
    """none, figures, story, fairness, cost (``phrases.SUPPORTS``)."""
    call: int
    """1 if it ends in a call to action."""
    question: int
    """1 if it asks a question back."""


class _Chooser:
    """Selects words with integers that were drawn before, so that one numpy call is enough for many texts."""

    def __init__(self, draws: Sequence[int]) -> None:
        self._draws = iter(draws)

    def pick(self, options: Sequence[Choice]) -> Choice:
        return options[next(self._draws) % len(options)]

    def several(self, options: Sequence[Choice], count: int) -> list[Choice]:
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
    topic = load_issues()[issue]
    verb, doing = topic.verb.split("/")
    text = phrases.QUESTIONS[question].format(
        town=names.TOWNS[town],
        do=f"{verb} {topic.rest}",
        doing=f"{doing} {topic.rest}",
        thing=topic.thing,
        day=names.DAYS[day],
    )
    return text.replace("{place}", names.PLACES[topic.kind][place])


def write_response(issue: int, town: int, place: int, attributes: Attributes, draws: Sequence[int]) -> str:
    """Write one response with the given attributes; ``draws`` (at least ``N_DRAWS`` integers) choose the words.

    Example:
        >>> one_sentence_for = Attributes(0, 0, 1, 1, 0, 0, 0, 0)
        >>> write_response(1, 0, 0, one_sentence_for, [1] * N_DRAWS)
        'I support Sunday opening at the Abbotsfield library, because good public services make a community strong.'
    """
    topic = load_issues()[issue]
    chooser = _Chooser(draws)
    pick = chooser.pick
    stance, tone = phrases.STANCES[attributes.stance], phrases.TONES[attributes.tone]
    hedge, support = phrases.HEDGES[attributes.hedging], phrases.SUPPORTS[attributes.support]
    blanks = _blanks(topic, town, chooser)

    because, values = _values(topic, stance, N_VALUES[attributes.length], chooser)
    position = pick(phrases.LEADS[tone]) + pick(phrases.POSITIONS[stance, hedge]) + because
    backing = _support(topic, stance, support, chooser)
    ending = [pick(phrases.ASKED_BACK)] * attributes.question + [pick(phrases.CALLS[stance])] * attributes.call

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
            title, numbered = pick(phrases.LIST_TITLES[stance]), attributes.structure == NUMBERED
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
        text = _CONTRACTIBLE.sub(lambda match: _CONTRACTIONS[match[0]], text)
    return text.replace("{place}", names.PLACES[topic.kind][place])


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
    verb, doing = topic.verb.split("/")
    unknown = chooser.between(0, 1)
    who, she, her = chooser.pick(names.PEOPLE)
    thousands = abs(topic.money) * chooser.between(80, 125) / 100
    step = 0.5 if thousands < 10 else 1 if thousands < 50 else 5 if thousands < 200 else 10
    return {
        "place": "{place}",
        "town": names.TOWNS[town],
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
        "day": chooser.pick(names.DAYS),
        # Never the town itself: between 1 and all but one steps further on in the table.
        "other": names.TOWNS[(town + chooser.between(1, len(names.TOWNS) - 1)) % len(names.TOWNS)],
    }


def _values(topic: Issue, stance: str, n_sentences: int, chooser: _Chooser) -> tuple[str, list[str]]:
    """Return a "because" clause with each value of the position, and sentences that alternate between the values."""
    if stance in arguments.BALANCE:
        tags = [chooser.pick(arguments.BALANCE_TAGS[stance])]
        sentences = chooser.several(arguments.BALANCE[stance], n_sentences)
    else:
        direction = 1 if stance == "for" else -1
        signs = {
            axis: direction if load > 0 else -direction
            for axis, load in zip(VALUE_AXES, topic.loadings, strict=True)
            if load
        }
        tags = [chooser.pick(arguments.VALUE_TAGS[value]) for value in signs.items()]
        by_value = [chooser.several(arguments.VALUES[value], n_sentences) for value in signs.items()]
        sentences = [sentence for turn in zip(*by_value, strict=True) for sentence in turn][:n_sentences]
    return ", because " + ", and because ".join(tags), sentences


def _support(topic: Issue, stance: str, support: str, chooser: _Chooser) -> list[str]:
    """Return a sentence that supports the position with figures, a story, fairness or the cost, or nothing."""
    if support == "none":
        return []
    frame = chooser.pick(arguments.SUPPORT_FRAMES[support])
    if support == "cost":
        return [frame + chooser.pick(arguments.COST[stance, topic.money < 0])]
    if support == "story" and stance in ("for", "against"):
        return [frame + chooser.pick(topic.story_for if stance == "for" else topic.story_against)]
    return [frame + chooser.pick(arguments.SUPPORT[support, stance])]


def _trimmings(
    tone: str, hedge: str, stance: str, chooser: _Chooser, *, length: int
) -> tuple[list[str], list[str], list[str]]:
    """Return the additions of longer responses at the start, after the argument, and at the end."""

    def maybe(options: Sequence[str], shortest: int) -> list[str]:
        return [chooser.pick(options)] if options and length >= shortest else []

    assurances = phrases.FIRM_DOUBTS if (stance, hedge) == ("undecided", "firm") else phrases.ASSURANCES[hedge]
    opening = maybe(phrases.OPENERS[tone], 2)
    assurance = maybe(arguments.CONCESSIONS[stance], 4) + maybe(assurances, 1)
    closing = maybe(phrases.NEXT_STEPS[stance], 4) + maybe(phrases.CLOSERS[tone], 1)
    return opening, assurance, closing


def _reasons(topic: Issue, stance: str, hedge: str, n_reasons: int, chooser: _Chooser, *, as_list: bool) -> list[str]:
    """Return the argument as sentences: reasons of one side, or of both sides in turn."""
    pros = [topic.pros[index] for index in chooser.pick(_ORDERS)]
    cons = [topic.cons[index] for index in chooser.pick(_ORDERS)]
    if stance in arguments.BALANCE:
        if as_list:
            return [
                arguments.ONE_SIDE[turn % 2].format(pro=pros[turn // 2], con=cons[turn // 2])
                for turn in range(n_reasons)
            ]
        first = chooser.between(0, len(arguments.BOTH_SIDES) - 1)
        return [
            arguments.BOTH_SIDES[(first + turn) % len(arguments.BOTH_SIDES)].format(pro=pros[turn], con=cons[turn])
            for turn in range((n_reasons + 1) // 2)
        ]
    reasons = (pros if stance == "for" else cons)[:n_reasons]
    if as_list:
        return reasons
    opened = chooser.pick(arguments.REASON_OPENINGS[hedge]) + reasons[0]
    start = chooser.between(0, len(arguments.LINKS) - 1)
    linked = [
        arguments.LINKS[(start + turn) % len(arguments.LINKS)] + reason for turn, reason in enumerate(reasons[1:])
    ]
    return [opened, *linked]
