"""A card for each member: what it likes more than the others do, in words that a person can check.

Measured on held-out votes only. For two responses of a pair let x = ±1 say which has more of a trait, and let
y = 2 vote − 1 say which one a member prefers. The member's *lean* is the coefficient of x in the regression of y on x
and, for every trait but length, on the difference in length (its sign and its size): at equal length the member chooses
the response with more of the trait with probability (1 + lean)/2. Its *relative* lean is its own less the ensemble's.

The same is measured of single words, with x saying which of the two responses has the word: what an answer speaks of
divides people more than its manner does.

Decided here: what a card may claim. A relative lean is claimed if chance alone would show one as large on any card of
the ensemble in less than 5 % of cases (Bonferroni over traits × members, and again over words × members, with standard
errors clustered by prompt), and if it moves at least one vote in twenty. Where the others lean one way and the member
has no clear lean of its own the other way, its card says only that it cares less for what they like.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import stats

from pluralign.analysis.traits import KEYS, TRAITS, content_words, trait_values
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import UsageError
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.theory import calibration
from pluralign.votes.candidates import rows_by_prompt
from pluralign.votes.prompts import Prompt

IntArray: TypeAlias = npt.NDArray[np.int64]

CHANCE = 0.05
"""How likely a single false claim may be on all the cards of an ensemble together."""
SMALLEST_LEAN = 0.1
"""Relative leans below this, one vote in twenty, are not worth a word."""
FEWEST_PROMPTS = 20
"""Traits and words that differ on fewer prompts are not judged: clustered standard errors are too small there."""
MOST_WORDS = 1000
"""The most frequent ones are judged."""
SAME_THING = 0.5
"""Two traits whose signs correlate more than this are not named together."""
EXAMPLES = 3
WORDS_SHOWN = 8
SUBJECT = 3
"""From so many liked words on a card's name says what the member is drawn to; fewer may be an accident."""


@dataclass(frozen=True)
class Lean:
    """How one member's votes move with one trait or word, length aside."""

    trait: str
    """Key of the trait, or the word."""
    own: float
    """Of the member: it chooses the response with more of the trait with probability (1 + own)/2."""
    relative: float
    """``own`` less the lean of the whole ensemble."""
    standard_error: float
    """Of ``relative``, clustered by prompt."""
    z: float
    """How far from chance ``relative`` is: standard normal for a member that leans as all do."""
    ensemble: float
    people: float
    """The lean of people's votes."""
    pairs: int
    """Pairs whose responses differ in the trait."""
    claim: str
    """What a card may say of it, such as "prefers longer answers"; nothing where it is small or could be chance."""


@dataclass(frozen=True)
class Typical:
    """A response that a member rates far above the other responses to the same prompt."""

    prompt: str
    response: str
    margin: float
    """Its reward less the mean of the others', in standard deviations of the member's reward differences."""


@dataclass(frozen=True)
class Distinguishing:
    """A pair where a member holds a minority view and holds it strongly."""

    prompt: str
    preferred: str
    other: str
    margin: float
    """In standard deviations of the member's reward differences."""
    weight_with_it: float
    """Share of the ensemble's weight that prefers the same response."""
    people_with_it: float
    """Share of people who do."""
    votes: int


@dataclass(frozen=True)
class Profile:
    """One member's card."""

    member: int
    weight: float
    disagreement: float
    name: str
    description: str
    leans: tuple[Lean, ...]
    """One for each of ``traits.TRAITS``, in that order."""
    likes: tuple[Lean, ...]
    """Words that speak for a response in its eyes, the clearest first."""
    dislikes: tuple[Lean, ...]
    typical: tuple[Typical, ...]
    distinguishing: tuple[Distinguishing, ...]


def member_profiles(
    weights: npt.ArrayLike, evidence: HeldOutVotes, *, most_characters: int | None = None
) -> list[Profile]:
    """Describe every member of an ensemble by what sets it apart from the others.

    Args:
        weights: the members' weights, ``(k,)``.
        evidence: held-out votes with the members' rewards.
        most_characters: leans are measured on no more text than this (``within``); everything else on all votes.

    Example:
        >>> from pluralign import town_hall
        >>> votes = town_hall(400).preferences
        >>> texts = [votes.responses[i] for i in votes.items().response_index]
        >>> longer, random = np.array([len(text) for text in texts]), np.random.default_rng(0).random(len(texts))
        >>> for card in member_profiles([0.5, 0.5], Evidence(votes, np.stack([longer, random], axis=1))):
        ...     print(card.name)
        Prefers longer answers
        Cares less for longer answers
    """
    votes, alpha = evidence.preferences, np.asarray(weights, dtype=np.float64)
    if evidence.rewards.shape[1] != len(alpha):
        raise UsageError(f"the rewards are of {evidence.rewards.shape[1]} members, but there are {len(alpha)} weights.")
    read = evidence if most_characters is None else within(evidence, most_characters)
    texts = _Texts(read)
    leans = _leans(texts.traits(), texts, read, alpha)
    words = _leans(texts.words(), texts, read, alpha)
    likes, dislikes = (
        [
            sorted((w for w in own if w.claim.startswith(verb)), key=_clarity, reverse=True)[:WORDS_SHOWN]
            for own in words
        ]
        for verb in (DRAWN_TO, TURNS_FROM)
    )
    claims = [_tellable(leans[j], likes[j], texts.alike) for j in range(len(alpha))]
    names = _names(claims)
    disagreement = np.asarray(calibration.disagreement(evidence.votes, votes.prob_a))
    return [
        Profile(
            member=j,
            weight=float(alpha[j]),
            disagreement=float(disagreement[j]),
            name=names[j],
            description=_describe(claims[j]),
            leans=tuple(leans[j]),
            likes=tuple(likes[j]),
            dislikes=tuple(dislikes[j]),
            typical=tuple(_typical(evidence, j)),
            distinguishing=tuple(_distinguishing(evidence, alpha, j)),
        )
        for j in range(len(alpha))
    ]


def within(evidence: HeldOutVotes, characters: int) -> HeldOutVotes:
    """Return the votes on as many prompts, drawn by lot, as can be read within a number of characters; one at least.

    The same evidence gives the same draw. The prompt of each response is read with it.

    Example:
        >>> from pluralign import town_hall
        >>> votes = town_hall(400).preferences
        >>> whole = Evidence(votes, np.zeros((len(votes.responses), 1)))
        >>> len(whole.preferences.prompts), len(within(whole, 100_000).preferences.prompts)
        (50, 22)
    """
    votes, items = evidence.preferences, evidence.preferences.items()
    prompts = np.array([len(Prompt(prompt).text) for prompt in votes.prompts])
    responses = np.array([len(text) for text in votes.responses])
    sizes = np.bincount(items.prompt_index, prompts[items.prompt_index] + responses[items.response_index])
    if sizes.sum() <= characters:
        return evidence
    drawn = np.random.default_rng(11).permutation(len(sizes))
    n = max(int(np.searchsorted(np.cumsum(sizes[drawn]), characters, side="right")), 1)
    return evidence[np.isin(votes.prompt_index, drawn[:n])]


# --- how votes move with traits and words ---------------------------------------------------------------------------


class _Question(NamedTuple):
    """Something that one response of a pair may have more of than the other."""

    name: str
    likes: str
    """What a card says of a member that likes it, and of one that likes the contrary, …"""
    dislikes: str
    cares_less: tuple[str, str]
    """… and of one that cares less than others for it, or for the contrary."""
    rows: IntArray
    """Pairs that differ in it."""
    x: FloatArray
    """1 where response a has more of it, −1 where b has."""
    length_aside: bool = True


class _Texts:
    """What there is to ask about the texts of a set of votes."""

    def __init__(self, evidence: HeldOutVotes) -> None:
        votes = evidence.preferences
        self.items = votes.items()
        prompts = [Prompt(prompt).text for prompt in votes.prompts]
        self.responses = [str(votes.responses[r]) for r in self.items.response_index]
        values = trait_values([prompts[p] for p in self.items.prompt_index], self.responses)
        difference = values[self.items.a] - values[self.items.b]
        self.signs = np.sign(difference)
        length = difference[:, KEYS.index("length")]
        self.controls = np.stack([np.sign(length), np.clip(length / (length.std() or 1.0), -3.0, 3.0)], axis=1)
        norm = np.sqrt(np.maximum((self.signs**2).sum(axis=0), 1.0))
        self.alike = (self.signs.T @ self.signs) / np.outer(norm, norm)
        """How much the signs of each two traits go together, ``(n_traits, n_traits)``."""

    def traits(self) -> list[_Question]:
        asked = []
        for trait, x in zip(TRAITS, self.signs.T, strict=True):
            rows = np.flatnonzero(x)
            likes, dislikes = PREFERS + trait.more, PREFERS + trait.less
            cares_less = (CARES_LESS + trait.more, CARES_LESS + trait.less)
            asked.append(_Question(trait.key, likes, dislikes, cares_less, rows, x[rows], trait.key != "length"))
        return asked

    def words(self) -> list[_Question]:
        words = [content_words(response) for response in self.responses]
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row, (a, b) in enumerate(zip(self.items.a, self.items.b, strict=True)):
            for one, other, x in ((a, b, 1.0), (b, a, -1.0)):
                for word in words[one] - words[other]:
                    found[word].append((row, x))
        asked = []
        for word, where in sorted(found.items(), key=lambda entry: (-len(entry[1]), entry[0])):
            if len(where) >= FEWEST_PROMPTS:
                rows, signs = (np.array(column) for column in zip(*where, strict=True))
                asked.append(_Question(word, f"{DRAWN_TO}“{word}”", f"{TURNS_FROM}“{word}”", ("", ""), rows, signs))
        return asked[:MOST_WORDS]


def _leans(questions: list[_Question], texts: _Texts, evidence: HeldOutVotes, alpha: FloatArray) -> list[list[Lean]]:
    """Each member's lean on each question; one that cannot be judged is NaN."""
    votes, k = evidence.preferences, len(alpha)
    own = 2.0 * evidence.votes - 1.0
    together = own @ alpha
    # One column each: members, members relative to the ensemble, people, the ensemble.
    y = np.column_stack([own, own - together[:, None], 2.0 * votes.prob_a - 1.0, together])
    found: list[list[Lean]] = [[] for _ in range(k)]
    bar = float(stats.norm.isf(CHANCE / (2 * max(len(questions), 1) * k)))
    for question in questions:
        rows = question.rows
        clusters = np.unique(votes.prompt_index[rows], return_inverse=True)[1]
        n_prompts = int(clusters.max(initial=-1)) + 1
        fitted = Adjusted(*np.full((3, 2 * k + 2), np.nan))
        if n_prompts >= FEWEST_PROMPTS:
            controls = texts.controls[rows] if question.length_aside else np.empty((len(rows), 0))
            fitted = adjusted_mean(y[rows], question.x, controls, clusters)
        lean, z = fitted.mean, fitted.z
        clear = (np.abs(z) > bar) & (np.abs(lean) >= SMALLEST_LEAN)
        for j in range(k):
            own_lean, relative, ensemble = float(lean[j]), float(lean[k + j]), float(lean[-1])
            likes = own_lean * relative > 0 and bool(clear[j] or ensemble * relative >= 0)
            claim = (
                (question.likes if relative > 0 else question.dislikes) if likes else question.cares_less[relative > 0]
            )
            found[j].append(
                Lean(
                    trait=question.name,
                    own=own_lean,
                    relative=relative,
                    standard_error=float(fitted.standard_error[k + j]),
                    z=float(z[k + j]),
                    ensemble=ensemble,
                    people=float(lean[-2]),
                    pairs=len(rows),
                    claim=claim if clear[k + j] else "",
                )
            )
    return found


class Adjusted(NamedTuple):
    """A coefficient for each column of y, each ``(m,)``; all NaN where the controls leave nothing of x."""

    mean: FloatArray
    standard_error: FloatArray
    """Clustered."""
    z: FloatArray
    """The score statistic: standard normal where there is no effect."""


def adjusted_mean(y: FloatArray, x: FloatArray, controls: FloatArray, clusters: IntArray) -> Adjusted:
    """Coefficient of x in the regression of each column of y on x and the controls.

    By Frisch, Waugh and Lovell it is b = Σ x̃ y / Σ x̃², where x̃ is x less its regression on the controls. With
    residuals e, its standard error clustered over G clusters g is √(G/(G−1) Σ_g (Σ_{i∈g} x̃ e)²) / Σ x̃². That is too
    small for few clusters; z therefore takes the residuals of the regression on the controls alone, as there are where
    x has no effect. Without controls and with x = ±1, b is the mean of x y. No intercept: exchanging the responses of a
    pair turns every sign.

    Args:
        y: ``(n, m)``.
        x: ``(n,)``.
        controls: ``(n, c)``.
        clusters: number of each row's cluster, from 0, ``(n,)``.

    Example:
        >>> y, x = np.array([[1.0], [1.0], [-1.0], [1.0]]), np.array([1.0, 1.0, -1.0, -1.0])
        >>> found = adjusted_mean(y, x, np.empty((4, 0)), np.arange(4))
        >>> float(found.mean[0]), float(found.standard_error[0])
        (0.5, 0.5)

    Reference: Liang and Zeger, "Longitudinal data analysis using generalized linear models", Biometrika 73 (1986).
    """
    n_clusters = int(clusters.max()) + 1
    without = np.linalg.lstsq(controls, np.column_stack([x, y]), rcond=None)[0] if controls.size else None
    left, rest = (x, y) if without is None else (x - controls @ without[:, 0], y - controls @ without[:, 1:])
    scale = float(left @ left)
    if scale < 1e-9 * len(x) or n_clusters < 2:
        return Adjusted(*np.full((3, y.shape[1]), np.nan))
    mean = left @ rest / scale
    spread, spread_without = (
        np.sqrt(n_clusters / (n_clusters - 1) * (_sums(left[:, None] * residual, clusters) ** 2).sum(axis=0))
        for residual in (rest - np.outer(left, mean), rest)
    )
    return Adjusted(mean, spread / scale, mean * scale / np.maximum(spread_without, 1e-12))


def _sums(values: FloatArray, clusters: IntArray) -> FloatArray:
    sums = np.zeros((int(clusters.max()) + 1, values.shape[1]))
    np.add.at(sums, clusters, values)
    return sums


# --- words ----------------------------------------------------------------------------------------------------------

NOTHING = "Close to the average of all members"
PREFERS, CARES_LESS, DRAWN_TO, TURNS_FROM = "prefers ", "cares less for ", "is drawn to ", "turns from "


class _Told(NamedTuple):
    """A claim for a card's name, and the sentence that says how to check it."""

    verb: str
    what: list[str]
    sentence: str


def _clarity(lean: Lean) -> float:
    """What a lean would be in standard errors if pairs were independent; a fair order of frequent and rare things."""
    return abs(lean.relative) * math.sqrt(lean.pairs)


def _tellable(leans: list[Lean], likes: list[Lean], alike: FloatArray) -> list[_Told]:
    """The claims of a card, the clearest first; a trait that goes with a clearer one is left out."""
    clearest = sorted((p for p, lean in enumerate(leans) if lean.claim), key=lambda p: -_clarity(leans[p]))
    told: list[tuple[float, _Told]] = []
    named: list[int] = []
    for position in clearest:
        if all(abs(alike[position, before]) < SAME_THING for before in named):
            named.append(position)
            told.append((_clarity(leans[position]), _told_trait(leans[position])))
    if len(likes) >= SUBJECT:
        what = [f"“{lean.trait}”" for lean in likes[:SUBJECT]]
        sentence = f"What speaks of {likes[0].trait}: {_counted(likes[0], 1.0)}"
        told.append((_clarity(likes[0]), _Told(DRAWN_TO, what, sentence)))
    return [one for _, one in sorted(told, key=lambda entry: -entry[0])]


def _told_trait(lean: Lean) -> _Told:
    trait = TRAITS[KEYS.index(lean.trait)]
    verb = PREFERS if lean.claim.startswith(PREFERS) else CARES_LESS
    what = lean.claim.removeprefix(verb)
    return _Told(verb, [what], f"{what[0].upper() + what[1:]}: {_counted(lean, 1.0 if what == trait.more else -1.0)}")


def _counted(lean: Lean, sign: float) -> str:
    own, ensemble, people = (
        f"{min(max((1 + sign * value) / 2, 0.0), 1.0):.0%}" for value in (lean.own, lean.ensemble, lean.people)
    )
    aside = "" if lean.trait == "length" else ", length aside"
    return (
        f"it sides with that in {own} of the {lean.pairs:,} pairs that differ there{aside}; "
        f"all members together in {ensemble}, people in {people}."
    )


def _names(claims: list[list[_Told]]) -> list[str]:
    """Names of two claims, or of as many as it takes to tell the members apart; else with a number."""
    names = [_joined(of_member[:2]) for of_member in claims]
    for n in range(3, max(map(len, claims), default=0) + 1):
        names = [_joined(claims[j][:n]) if names.count(name) > 1 else name for j, name in enumerate(names)]
    return [f"{name} (member {j})" if names.count(name) > 1 else name for j, name in enumerate(names)]


def _joined(claims: list[_Told]) -> str:
    """Claims as one sentence without a full stop.

    Example:
        >>> _joined([_Told(PREFERS, ["lists"], ""), _Told(DRAWN_TO, ["“tax”", "“debt”"], "")])
        'Prefers lists, is drawn to “tax” and “debt”'
    """
    if not claims:
        return NOTHING
    objects: dict[str, list[str]] = defaultdict(list)
    for told in claims:
        objects[told.verb].extend(told.what)
    text = ", ".join(
        verb + " and ".join(filter(None, [", ".join(what[:-1]), what[-1]])) for verb, what in objects.items()
    )
    return text[0].upper() + text[1:]


def _describe(claims: list[_Told]) -> str:
    """One sentence for each of the two clearest claims, with numbers that a person can check."""
    if not claims:
        return "Nothing sets its votes apart from those of all members together by more than chance would."
    return " ".join(told.sentence for told in claims[:2])


# --- examples -------------------------------------------------------------------------------------------------------


def _typical(evidence: HeldOutVotes, j: int) -> Iterator[Typical]:
    votes, scale = evidence.preferences, _scale(evidence, j)
    items = votes.items()
    best: list[tuple[float, int]] = []
    for rows in rows_by_prompt(votes):
        reward = evidence.rewards[rows, j]
        if len(rows) >= 2:
            top = int(reward.argmax())
            margin = (reward[top] - (reward.sum() - reward[top]) / (len(rows) - 1)) / scale
            best.append((float(margin), int(rows[top])))
    for margin, row in sorted(best, reverse=True)[:EXAMPLES]:
        prompt, response = votes.prompts[items.prompt_index[row]], votes.responses[items.response_index[row]]
        yield Typical(Prompt(prompt).text, str(response), margin)


def _distinguishing(evidence: HeldOutVotes, alpha: FloatArray, j: int) -> Iterator[Distinguishing]:
    votes = evidence.preferences
    margin = evidence.difference[:, j] / _scale(evidence, j)
    for_a = evidence.votes @ alpha
    with_it = np.where(margin > 0, for_a, 1.0 - for_a)
    alone = np.abs(margin) * (1.0 - 2.0 * with_it)  # how strongly it prefers, and with how few
    seen: set[int] = set()
    for row in np.argsort(-alone, kind="stable"):
        if len(seen) == EXAMPLES or not alone[row] > 0.0:
            return
        prompt = int(votes.prompt_index[row])
        if prompt in seen:
            continue
        seen.add(prompt)
        a, b = str(votes.responses[votes.a_index[row]]), str(votes.responses[votes.b_index[row]])
        prob = float(votes.prob_a[row])
        yield Distinguishing(
            prompt=Prompt(votes.prompts[prompt]).text,
            preferred=a if margin[row] > 0 else b,
            other=b if margin[row] > 0 else a,
            margin=abs(float(margin[row])),
            weight_with_it=float(with_it[row]),
            people_with_it=prob if margin[row] > 0 else 1.0 - prob,
            votes=int(votes.n_votes[row]),
        )


def _scale(evidence: HeldOutVotes, j: int) -> float:
    return float(np.sqrt((evidence.difference[:, j] ** 2).mean())) or 1.0
