"""A card for each member: how it differs from the other members, in words that a person can check.

Cards are measured on held-out votes only. This module decides the name and the description of a member, made of the
claims of ``leans`` (style and themes) and ``views`` (phrases and positions), and the example texts. Which claims are
significant is decided there. A member without claims is called by its number; ``unnamed_reason`` explains it once.
A language model may write names and sentences too; they are shown only if they predict votes on other prompts.
"""

import math
import os
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray, IntArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.json_values import to_json
from pluralign.core.random_streams import CHECKED_PAIRS, random_stream
from pluralign.core.text import counted, one_line, printable, shortened
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.folder import DESCRIPTIONS_FILE, load_beside, replace_facts, save_beside
from pluralign.ensemble.held_out import HeldOutVotes, held_out_votes
from pluralign.ensemble.record import LeftOut
from pluralign.measuring.leans import (
    PREFERS,
    SIGNIFICANCE,
    TRAITS,
    WORDS,
    Lean,
    SignedVotes,
    content_words,
    sample_prompts,
    trait_values,
)
from pluralign.measuring.personas import pair_questions
from pluralign.measuring.views import (
    SENTENCE,
    View,
    Views,
    distinct_pairs,
    excerpt,
    find_views,
    split_prompts,
    telling_phrases,
)
from pluralign.text.judge import JudgeModel, JudgeUsage, judge_pairs
from pluralign.text.options import SamplingOptions
from pluralign.theory import calibration
from pluralign.theory.intervals import ENOUGH_CLUSTERS, Interval, clustered_interval, p_value_above_zero
from pluralign.votes.load import VotesLike
from pluralign.votes.prompts import Prompt

# --- Descriptions of members that a language model wrote, with the checks that decide whether they are shown; on disk.


@dataclass(frozen=True)
class Check:
    """Whether a judge that knows only the description predicts the member's votes on prompts that did not write it."""

    accuracy: Interval
    """Share of the pairs on which it predicts the member's vote."""
    p_value: float
    """Of a one-sided t-test by prompt that ``accuracy`` is above ½."""
    specific: Interval
    """Mean agreement with the member minus that with the other members: 0 for a description that fits everybody."""
    specific_p_value: float
    """Of a one-sided t-test by prompt that ``specific`` is above 0."""
    pairs: int
    prompts: int


@dataclass(frozen=True)
class Description:
    """Name and sentence for one member, written by a language model."""

    member: int
    name: str
    sentence: str
    shown: bool
    """Whether it passed the check."""
    reason: str
    """Why it is not shown; empty if it is."""
    model: str
    check: Check | None
    """None if the model wrote no name and sentence."""

    @property
    def evidence(self) -> str:
        """The result of the check in words."""
        if self.check is None:
            return self.reason
        found = self.check.accuracy
        return (
            f"written by {self.model}; predicts {found.mean:.0%} of its votes on {self.check.pairs:,} other pairs "
            f"(95 % interval {found.low:.0%} to {found.high:.0%}; chance 50%)"
        )


@dataclass(frozen=True)
class Descriptions:
    """The descriptions of all members, and what they cost."""

    members: tuple[Description, ...]
    usage: JudgeUsage


def save_descriptions(found: Descriptions, folder: str | os.PathLike[str]) -> Path:
    """Write descriptions into the folder of their ensemble, for reports and the page."""
    return save_beside(Path(folder), DESCRIPTIONS_FILE, to_json(found))


def load_descriptions(folder: str | os.PathLike[str]) -> Descriptions | None:
    """Read descriptions from the folder of an ensemble; None if there are none, or if they are of another fit."""
    remedy = "run pluralign profile --describe again, or delete the file"
    return load_beside(Path(folder), DESCRIPTIONS_FILE, Descriptions, remedy)


MAX_CORRELATION = 0.5
"""A trait is left out of a name if its signs correlate more than this with those of a trait already in the name."""
CHECKED = 100
"""Pairs that a description is checked on, with two calls per pair and member."""
EXAMPLES = 3
WORDS_SHOWN = 8


@dataclass(frozen=True)
class Distinguishing:
    """A pair on which a member strongly prefers the response that most members reject."""

    prompt: str
    preferred: str
    other: str
    margin: float
    """Reward difference in standard deviations of the member's reward differences."""
    weight_with_it: float
    """Share of the ensemble's weight that prefers the same response."""
    people_with_it: float
    """Share of people who prefer the same response."""
    votes: int


@dataclass(frozen=True)
class Profile:
    """The card of one member."""

    member: int
    weight: float
    disagreement: float
    name: str
    """At most four words from its clearest claim that no other member is named by, or "Member 4"."""
    named: bool = field(default=True, kw_only=True)
    """Whether the name is a claim."""
    wants: str = field(default="", kw_only=True)
    """Its clearest claims in words with shares of pairs, such as "prefers lists (in 81% of pairs; all members 52%)"."""
    example: str = field(default="", kw_only=True)
    """Quotes of a pair that illustrate its name, and on which most other members disagree; empty if there is none."""
    description: str
    """The claims with numbers; empty if it has none."""
    leans: tuple[Lean, ...]
    """One per trait, in the order of ``leans.TRAITS``."""
    likes: tuple[Lean, ...]
    """Phrases whose responses it prefers, the clearest first, from ``views``."""
    dislikes: tuple[Lean, ...]
    """Phrases whose responses it rejects, the clearest first, from ``views``."""
    distinguishing: tuple[Distinguishing, ...]
    views: Views = field(default_factory=Views, kw_only=True)
    """Phrases and positions with intervals and quotes."""
    written: Description | None = field(default=None, kw_only=True)
    """Name and sentence that a language model wrote, with the check of it on other prompts."""

    @property
    def label(self) -> str:
        """Number and name, such as "4 · Prefers lists"; "Member 4" without a name."""
        return f"{self.member} · {self.name}" if self.named else self.name


def member_name(member: int) -> str:
    """Return what a member without a name is called. Members are numbered from 0.

    Example:
        >>> member_name(4)
        'Member 4'
    """
    return f"Member {member}"


def unnamed_reason(profiles: Sequence[Profile], prompts: int) -> str:
    """Return why some members have no name, in one sentence; empty if all have one.

    Args:
        profiles: the members' cards.
        prompts: number of prompts that their traits were measured on.
    """
    if all(profile.named for profile in profiles):
        return ""
    start, found = "Members without a name:", counted(prompts, "prompt")
    if prompts < ENOUGH_CLUSTERS:
        return f"{start} {found} cannot distinguish members; at least {ENOUGH_CLUSTERS} are needed."
    return f"{start} on {found}, no difference from the other members in a trait is significant."


@dataclass(frozen=True)
class MemberProfiles:
    """The cards of all members, and the votes that they were measured on."""

    members: list[Profile]
    described: JudgeUsage | None
    """Calls of the language model that described the members, if one did."""
    unnamed: str
    """Why some members have no name; empty if all have one."""
    undecided: float
    pairs: int
    prompts: int
    left_out: LeftOut


def profile(
    ensemble: RewardEnsemble | str | os.PathLike[str],
    votes: HeldOutVotes | VotesLike | None = None,
    *,
    describe: JudgeModel | None = None,
    concurrency: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> MemberProfiles:
    """Describe how each member differs from the others: style, phrases and positions, with significance tests.

    Args:
        ensemble: the ensemble, or its folder.
        votes: held-out votes, see ``held_out_votes``.
        describe: a language model that writes a name and a sentence per member, which are checked on other prompts. For
            the held-out votes of a folder they are saved there, and read again by a later call without a model.
        concurrency: number of questions to the model at the same time.
        seed: of the texts and of the choice of pairs.
        progress: called with the number of calls done and the total.
    """
    loaded, held_out = held_out_votes(ensemble, votes)
    alpha = loaded.weights
    folder = None if votes is not None or isinstance(ensemble, RewardEnsemble) else ensemble
    written = load_descriptions(folder) if folder is not None and describe is None else None
    if describe is not None:
        written = describe_members(held_out, alpha, describe, concurrency=concurrency, seed=seed, progress=progress)
    members, people = with_descriptions(member_profiles(alpha, held_out), written), held_out.preferences
    if describe is not None and folder is not None and written is not None:
        from pluralign.measuring.insight import with_insight  # it imports this module

        save_descriptions(written, folder)
        replace_facts(Path(folder), with_insight(loaded, held_out, members).record.to_json())
    described, prompts = written.usage if written else None, len(people.prompts)
    unnamed = unnamed_reason(members, prompts)
    return MemberProfiles(members, described, unnamed, loaded.undecided, len(people), prompts, held_out.left_out)


def member_profiles(weights: npt.ArrayLike, held_out: HeldOutVotes, signed: SignedVotes | None = None) -> list[Profile]:
    """Return the card of each member.

    Args:
        weights: of the members, ``(k,)``.
        held_out: held-out votes with the rewards of the members.
        signed: the votes that leans and views are measured on (default: a sample of prompts, ``sample_prompts``); all
            other figures use all votes.

    Example:
        >>> from pluralign import town_hall
        >>> votes = town_hall(400).preferences
        >>> texts = [votes.responses[i] for i in votes.items().response_index]
        >>> longer, random = np.array([len(text) for text in texts]), np.random.default_rng(0).random(len(texts))
        >>> for card in member_profiles([0.5, 0.5], HeldOutVotes(votes, np.stack([longer, random], axis=1))):
        ...     print(card.name)
        Longer answers
        Less for longer answers
    """
    votes, alpha = held_out.preferences, np.asarray(weights, dtype=np.float64)
    if held_out.rewards.shape[1] != len(alpha):
        raise UsageError(f"the rewards are of {held_out.rewards.shape[1]} members, but there are {len(alpha)} weights.")
    signed = signed or SignedVotes.of(sample_prompts(held_out), alpha)
    leans, views = signed.trait_leans()[0], find_views(signed)
    norm = np.sqrt(np.maximum((signed.signs**2).sum(axis=0), 1.0))
    correlation = (signed.signs.T @ signed.signs) / np.outer(norm, norm)
    claims = [_claims(leans[j], views[j], correlation) for j in range(len(alpha))]
    disagreement = np.asarray(calibration.disagreement(held_out.votes, votes.prob_a))
    profiles = []
    for j, name in enumerate(_names(claims)):
        shown, phrases = sorted(claims[j], key=lambda claim: claim.name != name)[:CLAIMS_SHOWN], views[j].phrases
        card = Profile(
            member=j,
            weight=float(alpha[j]),
            disagreement=float(disagreement[j]),
            name=name or member_name(j),
            named=bool(name),
            wants=wanted(shown),
            example=_example(signed, j, shown[0] if shown else None),
            description=" ".join(claim.sentence for claim in shown),
            leans=leans[j],
            likes=tuple(view.lean for view in phrases if view.prefers)[:WORDS_SHOWN],
            dislikes=tuple(view.lean for view in phrases if view.rejects)[:WORDS_SHOWN],
            distinguishing=tuple(distinguishing_pairs(held_out, alpha, j)),
            views=views[j],
        )
        profiles.append(card)
    return profiles


# --- names and descriptions -------------------------------------------------------------------------------------------


class _Claim(NamedTuple):
    """One claim of a card: a name of at most four words, what the member wants, and a sentence with numbers."""

    clarity: float
    name: str
    wants: tuple[str, str]
    """Verb and object."""
    shares: tuple[float, float]
    """Shares of pairs in which the member and all members together choose the claimed side."""
    sentence: str
    trait: tuple[int, float] | None = None
    """Place of a trait, and 1 if the member favours more of it than the others, else −1."""
    view: View | None = None


MAX_WORDS = 4
"""Number of words in a name."""
CLAIMS_SHOWN = 3
FAINT, COMMON, VERBAL = 0.1, 0.5, 0.5
"""Factors of the clarity of claims that a member cares less, about length, and of phrases: they make poor names."""


def _claims(leans: Sequence[Lean], views: Views, correlation: FloatArray) -> list[_Claim]:
    """Return the claims of a card, the clearest first, without traits that correlate with a clearer one.

    The clarity is the relative lean in standard errors of independent pairs, which is fair to rare traits.
    """
    claims: list[_Claim] = []
    clarity = [abs(lean.relative) * math.sqrt(lean.pairs) if lean.claim else 0.0 for lean in leans]
    named: list[int] = []
    for place in np.argsort(-np.array(clarity), kind="stable").tolist():
        if not clarity[place] or any(abs(correlation[place, before]) >= MAX_CORRELATION for before in named):
            continue
        named.append(place)
        lean, phrase, side = leans[place], leans[place].phrase, float(np.sign(leans[place].relative))
        own, ensemble, people = lean.shares()
        adjusted = "" if lean.trait == "length" else ", at equal length"
        sentence = (
            f"{capitalised(phrase)}: preferred in {own:.0%} of the {lean.pairs:,} pairs that differ in this{adjusted}; "
            f"by all members together in {ensemble:.0%}, by people in {people:.0%}."
        )
        verb, name = "prefers", capitalised(phrase.removeprefix("a "))
        factor = COMMON if lean.trait == "length" else 1.0
        if not lean.claim.startswith(PREFERS):
            verb, factor = "cares less about", FAINT * factor
            name = f"{'Open to' if side > 0 else 'Less for'} {TRAITS[place].aspect}"
        claims.append(_Claim(factor * clarity[place], name, (verb, phrase), (own, ensemble), sentence, (place, side)))
    for view in (*views.positions, *views.phrases):
        liked, rejected = ([f"“{phrase}”" for phrase in side[:2]] for side in (view.prefers, view.rejects))
        wants = ("prefers", " and ".join(liked)) if liked else ("rejects", " and ".join(rejected))
        if liked and rejected:
            wants = ("prefers", f"{liked[0]} to {rejected[0]}")
        own, ensemble, _ = view.lean.shares(1 if liked else -1)
        clear = VERBAL * abs(view.lean.relative) * math.sqrt(view.lean.pairs)
        name, sentence = _view_name(liked, rejected), f"{view.title}: {view.evidence}."
        claims.append(_Claim(clear, name, wants, (own, ensemble), sentence, view=view))
    return sorted(claims, key=lambda claim: -claim.clarity)


def _view_name(liked: Sequence[str], rejected: Sequence[str]) -> str:
    """Return the name of a view: the most telling phrases that fit into a name.

    Example:
        >>> _view_name(["“waiting lists”"], ["“taxes”"]), _view_name([], ["“taxes”"])
        ('“waiting lists”, not “taxes”', 'Not “taxes”')
    """
    options = [f"{liked[0]}, not {rejected[0]}"] if liked and rejected else []
    options += [" and ".join(liked), *liked] if liked else []
    options += [f"Not {rejected[0]}"] if rejected and not liked else []
    return next(name for name in options if len(name.split()) <= MAX_WORDS)


def _names(claims: list[list[_Claim]]) -> list[str]:
    """Return a name per member, empty without claims: of all claims the clearest ones, and no name twice.

    Where all claims of a member are names of others, its name joins two of them, such as “Lists, warm tone”; else it
    gets a number, such as “Longer answers 2”.
    """
    names = [""] * len(claims)
    for _, j, name in sorted((-claim.clarity, j, claim.name) for j, own in enumerate(claims) for claim in own):
        if not names[j] and name not in names:
            names[j] = name
    for j, own in enumerate(claims):
        joined = [f"{one.name}, {other.name[0].lower()}{other.name[1:]}" for one, other in combinations(own, 2)]
        numbered = [f"{claim.name} {i}" for i in range(2, len(claims) + 1) for claim in own]
        free = (name for name in joined + numbered if name not in names and len(name.split()) <= MAX_WORDS)
        names[j] = names[j] or next(free, "")
    return names


def wanted(claims: Sequence[_Claim]) -> str:
    """Return claims as one phrase, with the shares of pairs in which the member and all members choose this side.

    Example:
        >>> lists = _Claim(2.0, "Lists", ("prefers", "lists"), (0.81, 0.52), "")
        >>> wanted([lists, lists._replace(wants=("rejects", "“tax”"), shares=(0.7, 0.6))])
        'prefers lists (in 81% of pairs; all members 52%); rejects “tax” (70%; 60%)'
    """
    objects: dict[str, list[str]] = defaultdict(list)
    for place, claim in enumerate(claims):
        words = "({:.0%}; {:.0%})" if place else "(in {:.0%} of pairs; all members {:.0%})"
        objects[claim.wants[0]].append(f"{claim.wants[1]} {words.format(*claim.shares)}")
    return "; ".join(f"{verb} {', '.join(listed)}" for verb, listed in objects.items())


def capitalised(text: str) -> str:
    """Return a text with a capital as its first letter."""
    return text[:1].upper() + text[1:]


# --- examples ---------------------------------------------------------------------------------------------------------


def distinguishing_pairs(
    held_out: HeldOutVotes, weights: FloatArray, j: int, count: int = EXAMPLES
) -> Iterator[Distinguishing]:
    """Yield pairs on which member j strongly prefers the response that most members reject, one per prompt."""
    votes = held_out.preferences
    for row, margin, weight in islice(distinct_pairs(held_out, weights, j), count):
        sides, people = [votes.a_index[row], votes.b_index[row]], float(votes.prob_a[row])
        if margin <= 0:
            sides, people = sides[::-1], 1.0 - people
        preferred, other = (str(votes.responses[side]) for side in sides)
        text = Prompt(votes.prompts[votes.prompt_index[row]]).text
        yield Distinguishing(text, preferred, other, abs(margin), weight, people, int(votes.n_votes[row]))


QUOTE = 60
"""Maximum length of a quote."""
EXAMPLES_TRIED = 50


def _example(signed: SignedVotes, j: int, claim: _Claim | None) -> str:
    """Return quotes that illustrate a claim: from a pair that the member alone, or with few others, decides so."""
    held_out, alone = signed.held_out, float(signed.weights[j]) + 1e-9
    if claim and claim.view and claim.view.quotes:
        quote, phrases = claim.view.quotes[0], claim.view.prefers or claim.view.rejects
        who = "alone" if quote.weight_with_it <= alone else "unlike most"
        return f"{who} {'prefers' if quote.preferred else 'rejects'} “{excerpt(quote.text, phrases, QUOTE)}”"
    trait = claim.trait if claim else None
    side = signed.signs[:, trait[0]] * trait[1] if trait else None
    pairs = list(islice(distinct_pairs(held_out, signed.weights, j, side), EXAMPLES_TRIED))
    if not pairs:
        return ""
    pair = next((pair for pair in pairs if pair.weight_with_it <= alone), pairs[0])
    preferred, rejected = quotes_of(held_out, pair.row, pair.margin > 0, trait)
    return f"{'alone' if pair.weight_with_it <= alone else 'unlike most'} prefers {preferred} to {rejected}"


def quotes_of(
    held_out: HeldOutVotes, row: int, a_first: bool, trait: tuple[int, float] | None = None
) -> tuple[str, str]:
    """Return the sentences in which the responses of a pair differ most, in quotes, the preferred one first.

    With a trait, sentences that show it come first: its place, and 1 if the preferred response has more of it, else −1.
    """
    votes = held_out.preferences
    texts = [printable(str(votes.responses[side[row]])) for side in (votes.a_index, votes.b_index)]
    first, second = texts if a_first else texts[::-1]
    place, sign = trait or (0, 0.0)
    return _telling(first, second, place, sign), _telling(second, first, place, -sign)


def _telling(text: str, other: str, place: int = 0, sign: float = 0.0) -> str:
    """Return the sentence that shows a trait best, and among equals has the most words that the other text has not.

    Example:
        >>> _telling("I agree with this. Cycle lanes cost too much.", "I agree with this. More parks, please.")
        '“Cycle lanes cost too much.”'
    """
    known = content_words(other)
    sentences = [one for one in SENTENCE.findall(text) if content_words(one)] or [text]
    values = trait_values([""] * len(sentences), sentences)[:, place] if sign else np.zeros(len(sentences))

    def own(sentence: str) -> float:
        words = content_words(sentence)
        return len(words - known) / (len(words) + 2)

    ranked = [(value, own(one), one) for value, one in zip(np.nan_to_num(sign * values), sentences, strict=True)]
    return quoted(max(ranked)[2], QUOTE)


def quoted(text: str, length: int) -> str:
    """Return a text on one line in quotes, cut between words.

    Example:
        >>> quoted("Cycle lanes cost too much.", 20)
        '“Cycle lanes cost…”'
    """
    short = textwrap.shorten(text[: 10 * length], length, placeholder="…")
    if short == "…":  # a single word, or a language without spaces
        short = shortened(text, length)
    return f"“{short.removesuffix('…').rstrip('.,;:') + '…' if short.endswith('…') else short}”"


# --- A name and a sentence for each member, written by a language model and checked on other prompts.


EXAMPLES_SHOWN = 4
EXAMPLE_LENGTH = 400
ATTEMPTS = 3
MIN_SPECIFIC = 0.05
"""A description must agree with its member on at least one vote in twenty more than with the others."""
MAX_NAME = 60
MAX_SENTENCE = 300
WRITING = SamplingOptions(temperature=0.3, top_p=0.95, max_new_tokens=150)

NOTHING_WRITTEN = "the model wrote no name and description"
NOT_BETTER_THAN_CHANCE = "it does not predict the member's votes better than chance"
REQUEST, EXAMPLE = WORDS["requests"]["member"], WORDS["requests"]["example"]

FITS_EVERYBODY = "it does not predict this member's votes better than those of the other members"

_NAME = re.compile(r"^[\W_]*name[\W_]*?:[\s*_]*(.+)$", re.IGNORECASE | re.MULTILINE)
_SENTENCE = re.compile(r"^[\W_]*description[\W_]*?:[\s*_]*(.+)$", re.IGNORECASE | re.MULTILINE)


def describe_members(
    held_out: HeldOutVotes,
    weights: FloatArray,
    model: JudgeModel,
    *,
    pairs: int = CHECKED,
    concurrency: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
) -> Descriptions:
    """Let a language model describe each member, and check each description on prompts that did not write it.

    Args:
        held_out: held-out votes with the rewards of the members.
        weights: of the members, ``(k,)``.
        model: writes the descriptions and judges with them.
        pairs: number of pairs to check on, at least 20.
        concurrency: number of questions asked at the same time.
        seed: of the texts and of the choice of pairs.
        progress: called with the number of calls done and the total.
    """
    votes, alpha = held_out.preferences, np.asarray(weights, dtype=np.float64)
    half = split_prompts(len(votes.prompts))[votes.prompt_index]
    material, checked = held_out[half == 0], held_out[half == 1]
    if min(len(part.preferences.prompts) for part in (material, checked)) < ENOUGH_CLUSTERS:
        needed = f"{2 * ENOUGH_CLUSTERS} held-out prompts, half to write them and half to check them"
        there = f"there are {len(votes.prompts)}: name more votes, as in profile DIR DATA."
        raise UsageError(f"descriptions need {needed}, but {there}")
    model.prepare()
    written = write_descriptions(material, alpha, model, seed)
    chosen = checked[_pairs_to_check(checked, pairs, seed)]
    known = [one for one in written if one.name]
    questions = [question for one in known for question in pair_questions(chosen.preferences, one.sentence)]
    judged = judge_pairs(model, questions, concurrency=concurrency, progress=progress)
    usage = judged.usage + JudgeUsage(model.name, calls=len(written))
    predicted = iter(judged.prob_a.reshape(len(known), len(chosen.preferences)))
    members = tuple(_checked(one, next(predicted), chosen, alpha) if one.name else one for one in written)
    return Descriptions(members, usage)


def with_descriptions(profiles: Sequence[Profile], descriptions: Descriptions | None) -> list[Profile]:
    """Return the cards with the descriptions of their members. A description that is shown names its member."""
    of = {one.member: one for one in descriptions.members} if descriptions else {}
    cards = [replace(profile, written=of.get(profile.member)) for profile in profiles]
    for j, card in enumerate(cards):
        if card.written and card.written.shown:
            name = " ".join(card.written.name.split()[:MAX_WORDS])
            if all(name != other.name for other in cards):
                cards[j] = replace(card, name=name, named=True)
    return cards


# --- writing ----------------------------------------------------------------------------------------------------------


def write_descriptions(material: HeldOutVotes, weights: FloatArray, model: JudgeModel, seed: int) -> list[Description]:
    """Return a description of each member that is not checked yet; without a name if the model wrote none."""
    phrases = telling_phrases(SignedVotes.of(material, weights))
    written = []
    for j, (prefers, rejects) in enumerate(phrases):
        examples = "\n\n".join(
            EXAMPLE.format(prompt=_cut(pair.prompt), preferred=_cut(pair.preferred), other=_cut(pair.other))
            for pair in distinguishing_pairs(material, weights, j, EXAMPLES_SHOWN)
        )
        listed = {side: ", ".join(of) or "none" for side, of in (("prefers", prefers), ("rejects", rejects))}
        name, sentence = _name_and_sentence(model, REQUEST.format(**listed, examples=examples), seed)
        written.append(Description(j, name, sentence, False, "" if name else NOTHING_WRITTEN, model.name, None))
    return written


def _cut(text: str) -> str:
    return shortened(one_line(text, 10 * EXAMPLE_LENGTH), EXAMPLE_LENGTH)


def _name_and_sentence(model: JudgeModel, request: str, seed: int) -> tuple[str, str]:
    """Return what a model writes, empty if it is no name and sentence. Raises the error of the last attempt."""
    for attempt in range(ATTEMPTS):
        try:
            (answer,) = model.sample(request, 1, WRITING, seed + attempt)
        except DataError:
            if attempt == ATTEMPTS - 1:
                raise
            continue
        name, sentence = (pattern.search(answer.text) for pattern in (_NAME, _SENTENCE))
        if name and sentence:
            return _clean(name[1], MAX_NAME), _clean(sentence[1], MAX_SENTENCE)
    return "", ""


def _clean(text: str, length: int) -> str:
    return shortened(one_line(printable(text), 10 * length).strip(" *_\"“”'`"), length)


# --- checking ---------------------------------------------------------------------------------------------------------


def _pairs_to_check(checked: HeldOutVotes, count: int, seed: int) -> IntArray:
    """Return pairs on which the members are divided, from as many prompts as possible."""
    votes = checked.votes
    divided = np.flatnonzero(np.ptp(votes, axis=1) > 0)
    if len(divided) < ENOUGH_CLUSTERS:
        raise UsageError("the members vote alike on nearly all held-out pairs, so no description can be checked.")
    order = random_stream(seed, CHECKED_PAIRS).permutation(divided)
    prompts, turn = checked.preferences.prompt_index[order], np.zeros(len(order), dtype=np.int64)
    seen: dict[int, int] = {}
    for row, prompt in enumerate(prompts.tolist()):
        turn[row] = seen[prompt] = seen.get(prompt, -1) + 1
    return np.asarray(order[np.argsort(turn, kind="stable")][:count])


def _checked(one: Description, prob_a: FloatArray, chosen: HeldOutVotes, weights: FloatArray) -> Description:
    """Return a description with its check: the judge's choice against the votes of the member and of the others."""
    prompts, own = chosen.preferences.prompt_index, chosen.votes[:, one.member]
    others = np.delete(weights, one.member)
    rest = np.delete(chosen.votes, one.member, axis=1)
    share = rest @ (others / others.sum()) if others.sum() > 0 else np.full(len(own), 0.5)
    choice = np.where(prob_a == 0.5, 0.5, (prob_a > 0.5).astype(float))
    correct, specific = 1.0 - np.abs(choice - own), (2.0 * choice - 1.0) * (own - share)
    accuracy, p_value = clustered_interval(correct, prompts), p_value_above_zero(correct - 0.5, prompts)
    gain, gain_p_value = clustered_interval(specific, prompts), p_value_above_zero(specific, prompts)
    check = Check(accuracy, p_value, gain, gain_p_value, len(own), len(np.unique(prompts)))
    level = SIGNIFICANCE / len(weights)
    fits_everybody = gain_p_value > level or gain.mean < MIN_SPECIFIC
    reason = NOT_BETTER_THAN_CHANCE if p_value > level else FITS_EVERYBODY if fits_everybody else ""
    return replace(one, shown=not reason, reason=reason, check=check)
