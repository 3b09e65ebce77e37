"""Why each member votes as it does on one pair: the measured preferences of its card that apply to the two texts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pluralign.core.arrays import FloatArray
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.measuring.cards import Profile, member_name
from pluralign.measuring.leans import DISLIKES_WORD, KEYS, LIKES_WORD, MIN_LEAN, TRAITS, Lean, trait_values
from pluralign.measuring.views import phrases_of
from pluralign.theory.calibration import sigmoid

MAX_REASONS = 3
CLEAR = 4.0
"""Minimum lean in standard errors, computed as if pairs were independent. They share prompts, hence more than 2."""
NOTICEABLE = 0.1
"""Two texts differ in a trait if their values differ by more than this share of the larger one."""


SCALES: Mapping[str, Callable[[float], float]] = {"": float, "per 100": lambda rate: 100 * rate, "expm1": math.expm1}
"""From the value of a trait to its unit, by ``Trait.scale``: "A has 12 words, B 80"."""
NO_CARDS = "No explanation: this ensemble has no held-out votes to measure preferences on."
NO_REASON = "No measured preference of this member explains the vote."
A_TIE = "It gives both responses the same reward."


@dataclass(frozen=True)
class MemberVote:
    """One member's vote on a pair, with reasons."""

    member: int
    name: str
    weight: float
    vote: float
    """1 for a, 0 for b, 0.5 for a tie."""
    margin: float
    """Its reward for a minus its reward for b."""
    prob_a: float
    """Probability that its policy prefers a."""
    why: list[str]
    """Preferences in favour of the vote."""
    against: list[str]
    """Preferences that speak against the vote."""


def explain_votes(
    ensemble: RewardEnsemble,
    profiles: Sequence[Profile],
    prompt: str,
    responses: tuple[str, str],
    rewards: npt.ArrayLike,
) -> list[MemberVote]:
    """Return every member's vote on a pair, with the reasons that its card gives.

    A reason is a trait or phrase in which the two texts differ, and for which the member has a clear preference on
    held-out votes. Preferences against the vote are reported as well.

    Args:
        ensemble: its members vote.
        profiles: their cards; empty without held-out votes.
        prompt: the question.
        responses: a and b.
        rewards: of a and b, ``(2, k)``.

    Example:
        >>> from pluralign import fit, town_hall
        >>> town = fit(town_hall(200).preferences, k=2, encoder="none")
        >>> votes = explain_votes(town, [], "Tea?", ("Yes.", "No."), [[1, 0], [0, 0]])
        >>> votes[1].vote, votes[1].why
        (0.5, ['It gives both responses the same reward.'])
    """
    reward_a, reward_b = np.asarray(rewards, dtype=np.float64)
    values = trait_values([prompt, prompt], list(responses)) if profiles else np.zeros((2, 0))
    words = phrases_of(responses[0]), phrases_of(responses[1])
    cards = {profile.member: profile for profile in profiles}
    margins = (reward_a - reward_b).tolist()
    return [_vote(ensemble, j, margin, cards.get(j), values, words) for j, margin in enumerate(margins)]


def _vote(
    ensemble: RewardEnsemble,
    member: int,
    margin: float,
    card: Profile | None,
    values: FloatArray,
    words: tuple[frozenset[str], frozenset[str]],
) -> MemberVote:
    reasons = _reasons(card, values, words) if card else []
    why = [sentence for side, sentence in reasons if side * margin > 0]
    against = [sentence for side, sentence in reasons if side * margin < 0]
    if not margin:
        why = [A_TIE]
    elif not why:
        why = [NO_REASON if card else NO_CARDS]
    return MemberVote(
        member=member,
        name=card.name if card else member_name(member),
        weight=float(ensemble.weights[member]),
        vote=1.0 if margin > 0 else 0.0 if margin < 0 else 0.5,
        margin=margin,
        prob_a=float(sigmoid(np.array(margin / ensemble.temperature))),
        why=why[:MAX_REASONS],
        against=against[:MAX_REASONS],
    )


def _reasons(card: Profile, values: FloatArray, words: tuple[frozenset[str], frozenset[str]]) -> list[tuple[int, str]]:
    """Return (side, sentence) for each preference that applies, strongest first; side is 1 for a and −1 for b."""
    reasons: list[tuple[float, int, str]] = []
    for lean in card.leans:
        if abs(lean.own) >= MIN_LEAN and abs(lean.own) * math.sqrt(lean.pairs) >= CLEAR:
            trait = TRAITS[KEYS.index(lean.trait)]
            unit, scale = trait.unit, SCALES[trait.scale]
            a, b = (scale(value) for value in values[:, KEYS.index(lean.trait)].tolist())
            if abs(a - b) <= NOTICEABLE * max(abs(a), abs(b)):
                continue
            what = trait.more if lean.own > 0 else trait.less
            side, counts = 1, f"A has {_number(a)} {unit}, B {_number(b)}"
            if (a - b) * lean.own <= 0:
                side, counts = -1, f"B has {_number(b)} {unit}, A {_number(a)}"
            reasons.append((abs(lean.own), side, f"Prefers {what} ({_rate(lean)}): {counts}."))
    for lean in (*card.likes, *card.dislikes):
        in_a, in_b = (lean.trait in own for own in words)
        if in_a != in_b and np.isfinite(lean.own):
            verb, side = (LIKES_WORD if lean.own > 0 else DISLIKES_WORD), 1 if in_a == (lean.own > 0) else -1
            sentence = f"{verb.capitalize()}“{lean.trait}” ({_rate(lean)}): only {'A' if in_a else 'B'} contains it."
            reasons.append((abs(lean.own), side, sentence))
    return [(side, sentence) for _, side, sentence in sorted(reasons, key=lambda reason: -reason[0])]


def _rate(lean: Lean) -> str:
    return f"{100 * min((1 + abs(lean.own)) / 2, 1.0):.0f} % of {lean.pairs:,} held-out pairs"


def _number(value: float) -> str:
    """Return a value rounded for reading.

    Example:
        >>> _number(80.2), _number(1.25), _number(-0.5)
        ('80', '1.2', '−0.5')
    """
    text = f"{value:.0f}" if abs(value) >= 10 or abs(value - round(value)) < 1e-3 else f"{value:.1f}"
    return ("0" if text == "-0" else text).replace("-", "−")
