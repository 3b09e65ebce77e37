"""Steering by words with a list of words: the fallback where meaning cannot be matched (``steering_meaning``).

The list is English and names traits of style only, such as length and warmth.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from pluralign.analysis.leans import Lean
from pluralign.analysis.profiles import Profile
from pluralign.analysis.traits import TRAITS
from pluralign.answering.steering import Steering
from pluralign.core.errors import UsageError
from pluralign.core.random_streams import STEERING_WORDS, random_stream

DRAWS = 4000
"""Monte Carlo draws behind the posterior of a match by words."""
SURE_ENOUGH = 0.5
"""Posterior below which the reason mentions that other members fit nearly as well."""
WANTED: Mapping[str, tuple[str, str]] = {
    "length": ("long longer detailed thorough depth elaborate extensive", "short shorter brief concise terse succinct"),
    "sentence_length": ("flowing", "crisp snappy"),
    "structure": ("list lists bullet bullets structured steps headings organised organized", "prose paragraphs essay"),
    "questions": ("questions question asking socratic", "unquestioning"),
    "first_person": ("personal i we first-person", "impersonal neutral third-person"),
    "second_person": ("addressing you direct-address", ""),
    "hedging": ("hedged cautious careful tentative nuanced humble uncertain", "blunt unhedged direct straightforward"),
    "certainty": ("certain confident decisive bold assertive firm", "unsure"),
    "directives": ("actionable advice instructions commanding prescriptive practical", "open"),
    "sentiment": ("positive optimistic cheerful upbeat hopeful", "negative critical pessimistic gloomy harsh"),
    "formality": ("formal official professional academic", "informal casual chatty colloquial relaxed"),
    "concreteness": ("concrete specific examples numbers facts factual evidence data", "abstract general principled"),
    "balance": ("balanced both sides fair even-handed compromise impartial", "one-sided partisan opinionated"),
    "warmth": ("warm kind friendly empathetic caring polite compassionate", "cool cold detached matter-of-fact"),
    "readability": ("simple easy plain readable accessible clear", "demanding sophisticated complex scholarly"),
    "echo": ("on-topic", "original"),
}
"""Words that request more or less of each trait."""
_NEGATIONS = frozenset(["not", "no", "less", "without", "never", "fewer", "dont", "don't", "avoid", "hate", "dislike"])


def steer_by_words(text: str, profiles: Sequence[Profile], seed: int = 0) -> Steering:
    """Choose the member whose measured leans match a preference in words.

    The words are looked up in ``WANTED``, which maps words to more or less of a trait, and among the words that the
    members' cards list as liked or disliked. A member's fit is the mean of its leans in the wanted directions. The
    posterior is the share of random draws of all leans, within their standard errors, in which the member fits best.

    Args:
        text: such as "short, warm answers without lists".
        profiles: the members' cards.
        seed: of the draws.

    Raises:
        UsageError: if there are no cards, no word matches, or no member leans in the wanted direction.
    """
    if not profiles:
        raise UsageError(
            "a preference in words is matched to the members' cards, which need held-out votes; pluralign fit keeps "
            "them in the ensemble's folder."
        )
    matches = _matching_leans(text, profiles)
    if not any(matches):
        raise UsageError(
            f"nothing in {text!r} names a trait that the cards measure; try words such as {_vocabulary()}, "
            "or give a few choices of your own."
        )
    random = random_stream(seed, STEERING_WORDS)
    # Dividing by the matches of all members, not its own: a trait that a card lacks adds 0 to the member's fit.
    n = len({lean.trait for leans in matches for lean, _ in leans})
    scores = np.array([sum(sign * lean.own for lean, sign in leans) / n for leans in matches])
    errors = np.array([sum(lean.standard_error**2 for lean, _ in leans) ** 0.5 / n for leans in matches])
    drawn = scores + errors * random.standard_normal((DRAWS, len(scores)))
    posterior = np.bincount(drawn.argmax(axis=1), minlength=len(scores)) / DRAWS
    best = int(posterior.argmax())
    if scores[best] <= 0:
        raise UsageError(f"no member leans towards {text!r}; the nearest is {profiles[best].name!r}.")
    why = f"“{profiles[best].name}” fits {'; '.join(_reason(lean, sign) for lean, sign in matches[best])}"
    if posterior[best] < SURE_ENOUGH:
        why += "; others fit nearly as well"
    return Steering(best, why, float(posterior[best]), tuple(posterior.tolist()))


def names_a_trait(text: str, profiles: Sequence[Profile]) -> bool:
    """Return whether a word of the text names a trait that the cards measure."""
    return any(_matching_leans(text, profiles))


def _matching_leans(text: str, profiles: Sequence[Profile]) -> list[list[tuple[Lean, int]]]:
    """Return, per member, the leans that the text names, each with its wanted direction: +1 more, −1 less."""
    wanted = wanted_traits(text)
    words = set(re.findall(r"[\w'-]+", text.casefold()))
    matches = []
    for card in profiles:
        leans = [(lean, wanted[lean.trait]) for lean in card.leans if lean.trait in wanted and np.isfinite(lean.own)]
        leans += [(lean, 1) for lean in (*card.likes, *card.dislikes) if lean.trait in words and np.isfinite(lean.own)]
        matches.append(leans)
    return matches


def _reason(lean: Lean, sign: int) -> str:
    labels = {trait.key: trait.more if sign > 0 else trait.less for trait in TRAITS}
    own, everyone = (1 + sign * lean.own) / 2, (1 + sign * lean.ensemble) / 2
    return f"{labels.get(lean.trait, lean.trait)}: chosen in {own:.0%} of pairs (all members together: {everyone:.0%})"


def wanted_traits(text: str) -> dict[str, int]:
    """Return the traits that a text requests: +1 for more, −1 for less of each.

    Example:
        >>> wanted_traits("short, warm answers without lists")
        {'length': -1, 'warmth': 1, 'structure': -1}
    """
    wanted: dict[str, int] = {}
    for clause in re.split(r"[,.;:!?]|\bbut\b", text.casefold()):  # a negation ends with its clause
        words = re.findall(r"[\w'-]+", clause)
        for place, word in enumerate(words):
            direction = -1 if _NEGATIONS & set(words[max(0, place - 2) : place]) else 1
            for trait, (more, less) in WANTED.items():
                if word in more.split() or word in less.split():
                    wanted[trait] = direction * (1 if word in more.split() else -1)
    return wanted


def _vocabulary() -> str:
    return ", ".join(
        side.split()[0] for trait in ("length", "hedging", "formality", "warmth") for side in WANTED[trait]
    )
