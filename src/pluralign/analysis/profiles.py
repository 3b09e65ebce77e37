"""A card for each member: how it differs from the other members, in words that a person can check.

Cards are measured on held-out votes only. This module decides the name and the description of a member, made of the
claims of ``leans`` (style) and ``views`` (phrases and positions), and the example texts. Which claims are significant
is decided there. A member without claims is called by its number; ``unnamed_reason`` explains it once for all of them.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pluralign.analysis.description import Description
from pluralign.analysis.leans import (
    CARES_LESS,
    LIKES_WORD,
    PREFERS,
    PREFERS_PHRASES,
    Lean,
    find_contrasts,
    measure_leans,
    sample_prompts,
)
from pluralign.analysis.pruning import as_held_out
from pluralign.analysis.traits import KEYS, TRAITS
from pluralign.analysis.views import Views, find_views, reward_scale
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError
from pluralign.core.text import counted
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.theory import calibration
from pluralign.theory.intervals import ENOUGH_CLUSTERS
from pluralign.votes.candidates import rows_by_prompt
from pluralign.votes.load import VotesLike
from pluralign.votes.prompts import Prompt

MAX_CORRELATION = 0.5
"""A trait is left out of a name if its signs correlate more than this with those of a trait already in the name."""
EXAMPLES = 3
WORDS_SHOWN = 8
WORDS_IN_NAME = 3
"""Number of words in a name. A member with fewer liked words has none in its name: they may be an accident."""


@dataclass(frozen=True)
class Typical:
    """A response that a member rates far above the other responses to the same prompt."""

    prompt: str
    response: str
    margin: float
    """Its reward minus the mean of the others', in standard deviations of the member's reward differences."""


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
    """Its clearest claims, or "Member 4" if it has none."""
    named: bool = field(default=True, kw_only=True)
    """Whether the name consists of claims."""
    description: str
    """The claims with numbers; empty if it has none."""
    leans: tuple[Lean, ...]
    """One per trait, in the order of ``traits.TRAITS``."""
    likes: tuple[Lean, ...]
    """Phrases whose responses it prefers, the clearest first, from ``views``."""
    dislikes: tuple[Lean, ...]
    """Phrases whose responses it rejects, the clearest first, from ``views``."""
    typical: tuple[Typical, ...]
    distinguishing: tuple[Distinguishing, ...]
    views: Views = field(default_factory=Views, kw_only=True)
    """Phrases and positions with intervals and quotes."""
    written: Description | None = field(default=None, kw_only=True)
    """Name and sentence that a language model wrote, with the check of it on other prompts."""

    @property
    def label(self) -> str:
        """Number and name, such as "4 · Prefers lists"; "Member 4" without a name."""
        return f"{self.member} · {self.name.removesuffix(_suffix(self.member))}" if self.named else self.name


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
    if len(profiles) == 1:
        return f"{start} a single member has no others to differ from."
    if prompts < ENOUGH_CLUSTERS:
        return f"{start} {found} cannot distinguish members; at least {ENOUGH_CLUSTERS} are needed."
    return f"{start} on {found}, no difference from the other members in a trait is significant."


def member_profiles(
    weights: RewardEnsemble | npt.ArrayLike, held_out: HeldOutVotes | VotesLike, *, max_characters: int | None = None
) -> list[Profile]:
    """Describe how each member of an ensemble differs from the others.

    Args:
        weights: the ensemble, or the weights of its members, ``(k,)``.
        held_out: held-out votes with the rewards of the members. With an ensemble, any votes (a ``PreferenceSet``, a
            path, a pandas DataFrame, a list of dicts): it scores them, without the prompts it was trained on.
        max_characters: measure leans on a sample of prompts with at most this much text (``sample_prompts``); all other
            figures use all votes.

    Example:
        >>> from pluralign import town_hall
        >>> votes = town_hall(400).preferences
        >>> texts = [votes.responses[i] for i in votes.items().response_index]
        >>> longer, random = np.array([len(text) for text in texts]), np.random.default_rng(0).random(len(texts))
        >>> for card in member_profiles([0.5, 0.5], HeldOutVotes(votes, np.stack([longer, random], axis=1))):
        ...     print(card.name)
        Prefers longer answers
        Cares less about longer answers
    """
    if isinstance(weights, RewardEnsemble):
        held_out = as_held_out(weights, held_out)
        weights = weights.weights
    if not isinstance(held_out, HeldOutVotes):
        raise UsageError("member_profiles needs an ensemble to score votes: member_profiles(ensemble, votes).")
    votes, alpha = held_out.preferences, np.asarray(weights, dtype=np.float64)
    if held_out.rewards.shape[1] != len(alpha):
        raise UsageError(f"the rewards are of {held_out.rewards.shape[1]} members, but there are {len(alpha)} weights.")
    sample = held_out if max_characters is None else sample_prompts(held_out, max_characters)
    contrasts = find_contrasts(sample)
    leans = measure_leans(contrasts.traits, contrasts.length, sample, alpha)
    views = find_views(sample, alpha, contrasts.length)
    likes = [[view.lean for view in own.phrases if view.prefers][:WORDS_SHOWN] for own in views]
    dislikes = [[view.lean for view in own.phrases if view.rejects][:WORDS_SHOWN] for own in views]
    claims = [_claims(leans[j], likes[j], views[j], contrasts.trait_correlation) for j in range(len(alpha))]
    names = _names(claims)
    disagreement = np.asarray(calibration.disagreement(held_out.votes, votes.prob_a))
    return [
        Profile(
            member=j,
            weight=float(alpha[j]),
            disagreement=float(disagreement[j]),
            name=names[j],
            named=bool(claims[j]),
            description=_description(claims[j]),
            leans=tuple(leans[j]),
            likes=tuple(likes[j]),
            dislikes=tuple(dislikes[j]),
            typical=tuple(_typical(held_out, j)),
            distinguishing=tuple(distinguishing_pairs(held_out, alpha, j)),
            views=views[j],
        )
        for j in range(len(alpha))
    ]


# --- names and descriptions -------------------------------------------------------------------------------------------


class _Claim(NamedTuple):
    """One claim of a card: verb and objects for the name, and a sentence with numbers for the description."""

    verb: str
    objects: list[str]
    sentence: str


def _clarity(lean: Lean) -> float:
    """Return the relative lean in standard errors of independent pairs, to order frequent and rare traits fairly."""
    return abs(lean.relative) * math.sqrt(lean.pairs)


def _claims(leans: list[Lean], likes: list[Lean], views: Views, correlation: FloatArray) -> list[_Claim]:
    """Return the claims of a card, the clearest first, without traits that correlate with a clearer one.

    The clearest view, if there is one, is among the first two.
    """
    clearest = sorted((p for p, lean in enumerate(leans) if lean.claim), key=lambda p: -_clarity(leans[p]))
    claims: list[tuple[float, _Claim]] = []
    named: list[int] = []
    for position in clearest:
        if all(abs(correlation[position, before]) < MAX_CORRELATION for before in named):
            named.append(position)
            claims.append((_clarity(leans[position]), _trait_claim(leans[position])))
    if len(likes) >= WORDS_IN_NAME:
        words = [f"“{lean.trait}”" for lean in likes[:WORDS_IN_NAME]]
        sentence = f"Mentions of “{likes[0].trait}”: {_shares(likes[0], 1.0)}"
        claims.append((_clarity(likes[0]), _Claim(LIKES_WORD, words, sentence)))
    else:  # a position over all prompts, whose phrases are tested together
        for view in views.positions:
            if not view.topic:
                liked, rejected = (" or ".join(f"“{p}”" for p in side[:2]) for side in (view.prefers, view.rejects))
                claim = _Claim(PREFERS_PHRASES, [f"{liked} to {rejected}"], f"{view.title}: {view.evidence}.")
                claims.append((_clarity(view.lean), claim))
    ordered = [claim for _, claim in sorted(claims, key=lambda entry: -entry[0])]
    named_view = next((claim for claim in ordered if claim.verb in (LIKES_WORD, PREFERS_PHRASES)), None)
    if named_view is not None and named_view not in ordered[:2]:  # a name has room for two claims: style and view
        ordered = [ordered[0], named_view, *(claim for claim in ordered[1:] if claim is not named_view)]
    return ordered


def _trait_claim(lean: Lean) -> _Claim:
    trait = TRAITS[KEYS.index(lean.trait)]
    verb = PREFERS if lean.claim.startswith(PREFERS) else CARES_LESS
    phrase = lean.claim.removeprefix(verb)
    shares = _shares(lean, 1.0 if phrase == trait.more else -1.0)
    return _Claim(verb, [phrase], f"{phrase[0].upper() + phrase[1:]}: {shares}")


def _shares(lean: Lean, sign: float) -> str:
    own, ensemble, people = (
        f"{min(max((1 + sign * value) / 2, 0.0), 1.0):.0%}" for value in (lean.own, lean.ensemble, lean.people)
    )
    adjusted = "" if lean.trait == "length" else ", at equal length"
    return (
        f"preferred in {own} of the {lean.pairs:,} pairs that differ in this{adjusted}; "
        f"by all members together in {ensemble}, by people in {people}."
    )


def _names(claims: list[list[_Claim]]) -> list[str]:
    """Return a name of two claims per member; of more claims, or with a number, where names would be the same."""
    names = [_joined(of_member[:2]) if of_member else member_name(j) for j, of_member in enumerate(claims)]
    for n in range(3, max(map(len, claims), default=0) + 1):
        names = [_joined(claims[j][:n]) if names.count(name) > 1 else name for j, name in enumerate(names)]
    return [name + _suffix(j) if names.count(name) > 1 else name for j, name in enumerate(names)]


def _suffix(member: int) -> str:
    """Return the end of a name that two members would share."""
    return f" (member {member})"


def _joined(claims: list[_Claim]) -> str:
    """Return claims as one sentence without a full stop.

    Example:
        >>> _joined([_Claim(PREFERS, ["lists"], ""), _Claim(LIKES_WORD, ["“tax”", "“debt”"], "")])
        'Prefers lists, likes mentions of “tax” and “debt”'
    """
    objects: dict[str, list[str]] = defaultdict(list)
    for claim in claims:
        objects[claim.verb].extend(claim.objects)
    text = ", ".join(
        verb + " and ".join(filter(None, [", ".join(listed[:-1]), listed[-1]])) for verb, listed in objects.items()
    )
    return text[0].upper() + text[1:]


def _description(claims: list[_Claim]) -> str:
    """Return one sentence with numbers for each of the two clearest claims."""
    return " ".join(claim.sentence for claim in claims[:2])


# --- examples ---------------------------------------------------------------------------------------------------------


def _typical(held_out: HeldOutVotes, j: int) -> Iterator[Typical]:
    votes, scale = held_out.preferences, reward_scale(held_out, j)
    items = votes.items()
    best: list[tuple[float, int]] = []
    for rows in rows_by_prompt(votes):
        reward = held_out.rewards[rows, j]
        if len(rows) >= 2:
            top = int(reward.argmax())
            margin = (reward[top] - (reward.sum() - reward[top]) / (len(rows) - 1)) / scale
            best.append((float(margin), int(rows[top])))
    for margin, row in sorted(best, reverse=True)[:EXAMPLES]:
        prompt, response = votes.prompts[items.prompt_index[row]], votes.responses[items.response_index[row]]
        yield Typical(Prompt(prompt).text, str(response), margin)


def distinguishing_pairs(
    held_out: HeldOutVotes, weights: FloatArray, j: int, count: int = EXAMPLES
) -> Iterator[Distinguishing]:
    """Yield pairs on which member j strongly prefers the response that most members reject, one per prompt."""
    votes = held_out.preferences
    margin = held_out.difference[:, j] / reward_scale(held_out, j)
    share_a = held_out.votes @ weights
    weight_with_it = np.where(margin > 0, share_a, 1.0 - share_a)
    distinctness = np.abs(margin) * (1.0 - 2.0 * weight_with_it)  # a strong preference with little weight behind it
    shown: set[int] = set()
    for row in np.argsort(-distinctness, kind="stable"):
        if len(shown) == count or not distinctness[row] > 0.0:
            return
        prompt = int(votes.prompt_index[row])
        if prompt in shown:
            continue
        shown.add(prompt)
        a, b = str(votes.responses[votes.a_index[row]]), str(votes.responses[votes.b_index[row]])
        prob = float(votes.prob_a[row])
        yield Distinguishing(
            prompt=Prompt(votes.prompts[prompt]).text,
            preferred=a if margin[row] > 0 else b,
            other=b if margin[row] > 0 else a,
            margin=abs(float(margin[row])),
            weight_with_it=float(weight_with_it[row]),
            people_with_it=prob if margin[row] > 0 else 1.0 - prob,
            votes=int(votes.n_votes[row]),
        )
