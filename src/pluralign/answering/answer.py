"""Three ways to answer with an ensemble (§2, "Policy ensemble inference"), from candidates for one prompt.

*balanced*: a slate of every member's pick with the weight behind it, and one consensus answer by a stated rule.
*steerable*: one member answers, chosen by number, by a preference in words, or by a few choices of the user's own.
*distributional*: a member is drawn in proportion to its weight.

Decided here: what each mode answers and why. Each member's policy is best-of-N, its favourite among the candidates;
drawn from an ensemble that was fitted for the policy level, it answers with a candidate sampled from its policy.
A team's own refusal policy runs before any mode (the paper's Discussion).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from pluralign.analysis.profiles import Profile
from pluralign.analysis.traits import TRAITS
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.theory import calibration
from pluralign.theory.logistic import sigmoid
from pluralign.theory.social_choice import RULES, borda, choose, maximin, pairwise_support
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Prompt, PromptLike

Mode: TypeAlias = Literal["balanced", "steerable", "distributional"]
Writer: TypeAlias = Callable[[str, int], Sequence[str]]
"""Given an instruction and how many, texts that a language model writes; a ``DataError`` where it cannot."""
RefusalPolicy: TypeAlias = Callable[[PromptLike], str | None]
"""Given a prompt, the answer that is given instead of any member's, or None to go on."""

MODES: tuple[Mode, ...] = get_args(Mode)
NEAR_DUPLICATE = 0.8
"""Share of two texts' word trigrams in common from which they count as one answer."""
SLIP = 0.1
"""How often a user's choice says nothing of their taste: half of these go either way."""
DRAWS = 4000
"""Drawn to tell how sure a match of words is."""
SURE_ENOUGH = 0.5
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
"""Words by which people ask for more or less of each trait."""
_NOT = frozenset(["not", "no", "less", "without", "never", "fewer", "dont", "don't", "avoid", "hate", "dislike"])


@dataclass(frozen=True)
class Given:
    """One answer, and who stands behind it."""

    text: str
    member: int | None
    """The member that answers; the one with the most weight where several chose it; None for a refusal."""
    weight: float
    """Share of the ensemble's weight that has it as its favourite."""
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Consensus:
    """One answer for all, by a stated rule."""

    text: str
    rule: str
    least_support: float
    """Share of the weight that prefers it to its strongest rival."""
    mean_support: float
    """The same, averaged over all rivals."""
    favourite_of: float
    """Share of the weight that has it as its favourite."""


@dataclass(frozen=True)
class Distilled:
    """A statement that a language model wrote from the slate, and whether it may stand for it."""

    text: str
    least_support: float
    """Share of the weight that prefers it to the candidate that most prefer to it."""
    to_reach: float
    """The same of the best candidate: what the statement must have to be used."""
    used: bool
    drafts: int
    """How many were written; this is the best supported."""


@dataclass(frozen=True)
class Steering:
    """Which member was chosen, why, and how sure that is."""

    member: int
    why: str
    sure: float
    """Between 0 and 1: the chance that this is the member that was asked for."""
    posterior: tuple[float, ...]
    """That chance for every member."""
    path: tuple[tuple[float, ...], ...] = ()
    """The same after each of the user's choices, the weights first."""


@dataclass(frozen=True)
class Answer:
    """What a mode answers."""

    mode: Mode
    answers: tuple[Given, ...]
    consensus: Consensus | None = None
    distilled: Distilled | None = None
    steering: Steering | None = None
    refused: bool = False
    candidates: int = 0
    notes: tuple[str, ...] = field(default=())


def answer(
    ensemble: RewardEnsemble,
    prompt: PromptLike,
    candidates: Sequence[str],
    mode: Mode = "balanced",
    *,
    rule: str = "maximin",
    writer: Writer | None = None,
    member: int | None = None,
    like: str = "",
    choices: PreferenceSet | None = None,
    profiles: Sequence[Profile] = (),
    refusal: RefusalPolicy | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Answer:
    """Answer a prompt from candidates, in one of three modes.

    Args:
        ensemble: whose members choose.
        prompt: what is asked.
        candidates: responses to choose from.
        mode: ``balanced``, ``steerable`` or ``distributional``.
        rule: balanced: how the consensus is chosen, one of ``social_choice.RULES``.
        writer: balanced: writes statements from the slate; the best takes the consensus's place if it has its support.
        member: steerable: this one answers.
        like: steerable: a preference in words, matched to ``profiles``.
        choices: steerable: pairs on which the user has voted.
        profiles: the members' cards, for ``like`` and for names.
        refusal: runs first; what it returns is the answer.
        seed: of ties, lots and the draw of a member; another prompt is another draw.
        progress: called while texts are encoded.

    Example:
        >>> from pluralign import fit, town_hall
        >>> town = town_hall(400).preferences
        >>> ensemble = fit(town, k=2, encoder="none")
        >>> found = answer(ensemble, "Tea?", ["Yes, please.", "No.", "Perhaps; it depends."])
        >>> found.mode, round(sum(one.weight for one in found.answers), 6)
        ('balanced', 1.0)
    """
    check_ways(mode, rule)
    if mode != "steerable" and (member is not None or like or choices is not None):
        raise UsageError(f"a member, words or choices steer; mode {mode} takes none of them.")
    if refusal and (text := refusal(prompt)) is not None:
        return Answer(mode, (Given(text, None, 0.0),), refused=True, notes=("a refusal policy answered",))
    texts = list(dict.fromkeys(candidates))
    if not texts:
        raise UsageError("there are no candidates to choose from; give at least one response.")
    notes = _notes(candidates, texts)
    random = np.random.default_rng([seed, int(Prompt(prompt).hash() * 2**53)])
    rewards = ensemble.rewards([(prompt, text) for text in texts], progress)
    favourite = favourites(rewards, random)
    if mode == "balanced":
        entries = slate(texts, favourite, ensemble.weights)
        found = consensus(texts, rewards, ensemble.weights, rule, random)
        statement = None
        if writer:
            try:
                statement = distil(ensemble, prompt, texts, rewards, entries, writer, progress)
            except DataError as error:  # such as a slate longer than the writer reads; the answer stands
                notes += (f"no statement was written: {str(error).rstrip('.')}",)
            else:
                notes += () if statement else ("no statement was written that is not among the candidates",)
        return Answer(mode, entries, found, statement, candidates=len(texts), notes=notes)
    if mode == "distributional":
        chosen = int(random.choice(ensemble.k, p=ensemble.weights / ensemble.weights.sum()))
        if ensemble.level == "policy":
            favourite[chosen] = random.choice(len(texts), p=policy(rewards[:, chosen], ensemble.temperature))
        return Answer(mode, (_given(texts, favourite, ensemble.weights, chosen),), candidates=len(texts), notes=notes)
    steering = steer(ensemble, member=member, like=like, choices=choices, profiles=profiles, seed=seed)
    given = _given(texts, favourite, ensemble.weights, steering.member)
    return Answer(mode, (given,), steering=steering, candidates=len(texts), notes=notes)


def check_ways(mode: str, rule: str) -> None:
    """Refuse a mode or a rule that there is not, before anything is sampled or scored."""
    for what, given, known in (("mode", mode, MODES), ("rule", rule, tuple(RULES))):
        if given not in known:
            raise UsageError(f"there is no {what} {given!r}; {did_you_mean(str(given), known)}.")


def _notes(candidates: Sequence[str], texts: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if len(texts) < len(candidates):
        notes.append(f"{len(candidates) - len(texts)} candidates were repeats and count once")
    if len(texts) == 1:
        notes.append("there is one candidate, so every member chose it")
    return tuple(notes)


def favourites(rewards: FloatArray, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return the candidate that each member likes best, ``(k,)``; equal rewards are broken by lot.

    Example:
        >>> favourites(np.array([[1.0, 3.0], [2.0, 0.0]]), np.random.default_rng(0))
        array([1, 0])
    """
    top = rewards == rewards.max(axis=0)
    lots = random.random(rewards.shape)
    return np.asarray(np.where(top, lots, -1.0).argmax(axis=0), dtype=np.int64)


def policy(rewards: FloatArray, beta: float) -> FloatArray:
    """The chance that a member's policy gives each candidate: ∝ exp(r/β), where the reference favours none (App. A).

    Example:
        >>> policy(np.array([1.0, 0.0]), 1.0).round(3)
        array([0.731, 0.269])
    """
    weight = np.exp((rewards - rewards.max()) / beta)
    return np.asarray(weight / weight.sum())


def _given(texts: Sequence[str], favourite: npt.NDArray[np.int64], weights: FloatArray, member: int) -> Given:
    pick = favourite[member]
    behind = np.flatnonzero(favourite == pick)
    return Given(texts[pick], member, float(weights[behind].sum()), tuple(behind.tolist()))


# --- balanced -------------------------------------------------------------------------------------------------------


def slate(texts: Sequence[str], favourite: npt.NDArray[np.int64], weights: FloatArray) -> tuple[Given, ...]:
    """Return every member's pick, near-duplicates as one, with the weight behind each, most first.

    Example:
        >>> slate(["Yes.", "No."], np.array([0, 1, 0]), np.array([0.5, 0.3, 0.2]))[0].weight
        0.7
    """
    used = np.flatnonzero(weights > NEGLIGIBLE_WEIGHT)
    groups: list[list[int]] = []
    for j in sorted(used.tolist(), key=lambda j: -weights[j]):
        text = texts[favourite[j]]
        for group in groups:
            if similarity(text, texts[favourite[group[0]]]) >= NEAR_DUPLICATE:
                group.append(j)
                break
        else:
            groups.append([j])
    total = weights[used].sum()
    entries = [
        Given(texts[favourite[group[0]]], group[0], float(weights[group].sum() / total), tuple(sorted(group)))
        for group in groups
    ]
    return tuple(sorted(entries, key=lambda entry: -entry.weight))


def similarity(a: str, b: str) -> float:
    """The share of word trigrams that two texts have in common (Jaccard); of words where they are shorter.

    Example:
        >>> similarity("I like tea very much.", "i like tea very much"), similarity("Yes.", "No.")
        (1.0, 0.0)
    """
    words = [re.findall(r"\w+", text.casefold()) for text in (a, b)]
    size = min(3, *(len(of) for of in words)) or 1
    grams = [{tuple(of[i : i + size]) for i in range(len(of) - size + 1)} for of in words]
    union = grams[0] | grams[1]
    return len(grams[0] & grams[1]) / len(union) if union else 1.0


def consensus(
    texts: Sequence[str], rewards: FloatArray, weights: FloatArray, rule: str, random: np.random.Generator
) -> Consensus:
    """Choose one answer for all by a social-choice rule over the weighted members."""
    support = pairwise_support(rewards, weights / weights.sum())
    winner = choose(support, rule, random.integers(2**32))
    tops = rewards == rewards.max(axis=0)
    favourite_of = float((tops / tops.sum(axis=0))[winner] @ weights / weights.sum())
    if len(texts) == 1:
        return Consensus(texts[0], rule, 1.0, 1.0, 1.0)
    return Consensus(texts[winner], rule, float(maximin(support)[winner]), float(borda(support)[winner]), favourite_of)


DRAFTS = 4
WRITING_TEMPERATURE = 0.7
"""Most at which drafts are sampled: hot enough to differ; at the heat of candidates a small model writes nonsense."""
INSTRUCTION = """People were asked: {prompt}

These are their answers:
{answers}

Write one short statement that all of them could accept. Take up what they have in common, be fair to each, and add
nothing of your own. Write only the statement."""


def distil(
    ensemble: RewardEnsemble,
    prompt: PromptLike,
    texts: Sequence[str],
    rewards: FloatArray,
    entries: Sequence[Given],
    writer: Writer,
    progress: Progress | None = None,
) -> Distilled | None:
    """Let a language model write a statement from the slate, and judge it by the ensemble (Habermas-style).

    A text's support is the share of weight that prefers it to its strongest rival among the candidates, min_b s_ab. The
    best supported draft is used if it has at least the support of the best candidate. None where nothing was written.
    """
    listed = "\n".join(f"- ({entry.weight:.0%}) {entry.text}" for entry in entries)
    written = writer(INSTRUCTION.format(prompt=Prompt(prompt).text, answers=listed), DRAFTS)
    drafts = [text for text in dict.fromkeys(text.strip() for text in written) if text and text not in texts]
    if not drafts:
        return None
    weights = ensemble.weights / ensemble.weights.sum()
    own = ensemble.rewards([(prompt, draft) for draft in drafts], progress)
    against = pairwise_support(np.vstack([own, rewards]), weights)[: len(drafts), len(drafts) :].min(axis=1)
    best = int(against.argmax())
    to_reach = float(maximin(pairwise_support(rewards, weights)).max()) if len(texts) > 1 else 0.5
    return Distilled(drafts[best], float(against[best]), to_reach, bool(against[best] >= to_reach), len(drafts))


# --- steerable ------------------------------------------------------------------------------------------------------


def steer(
    ensemble: RewardEnsemble,
    *,
    member: int | None = None,
    like: str = "",
    choices: PreferenceSet | None = None,
    profiles: Sequence[Profile] = (),
    seed: int = 0,
) -> Steering:
    """Choose one member: by number, by words, or by the user's own choices."""
    ways = [member is not None, bool(like), choices is not None]
    if sum(ways) != 1:
        raise UsageError("steerable mode needs one of: a member, words that say what you like, or your own choices.")
    if member is not None:
        if not 0 <= member < ensemble.k:
            raise UsageError(f"members are numbered from 0 to {ensemble.k - 1}; there is no member {member}.")
        certain = tuple(float(j == member) for j in range(ensemble.k))
        return Steering(member, "it was asked for by number", 1.0, certain)
    if choices is not None:
        return steer_by_choices(ensemble, choices)
    return steer_by_words(like, profiles, seed=seed)


def steer_by_choices(ensemble: RewardEnsemble, choices: PreferenceSet) -> Steering:
    """Choose the member most likely to share the user's taste.

    With weights as the prior and n_a of n votes for a on pair i, the posterior is

      P(j | choices) ∝ α_j Π_i q_ij^{n_a} (1 − q_ij)^{n − n_a},   q_ij = (1 − 2η) σ(Δr_ij / β) + η,

    β being the ensemble's fitted temperature and 2η the share of choices that say nothing.
    """
    reward_a, reward_b = ensemble.pair_rewards(choices)
    chance = SLIP / 2 + (1 - SLIP) * sigmoid((reward_a - reward_b) / ensemble.temperature)
    votes_a = (choices.votes_a + 0.5 * choices.counted_ties)[:, None]
    votes_b = (choices.votes_b + 0.5 * choices.counted_ties)[:, None]
    evidence = votes_a * np.log(chance) + votes_b * np.log1p(-chance)
    prior = np.log(np.maximum(ensemble.weights, 1e-300))
    path = [_normalised(prior + evidence[:n].sum(axis=0)) for n in range(len(evidence) + 1)]
    best = int(path[-1].argmax())
    agree = calibration.votes_from_rewards(reward_a, reward_b)[:, best]
    side = choices.prob_a
    with_it = int(np.sum((agree > 0.5) == (side > 0.5)))
    why = f"it agrees with {with_it} of your {len(choices)} choices; its weight was {ensemble.weights[best]:.2f}"
    return Steering(best, why, float(path[-1][best]), tuple(path[-1].tolist()), tuple(tuple(p.tolist()) for p in path))


def _normalised(log: FloatArray) -> FloatArray:
    weight = np.exp(log - log.max())
    return np.asarray(weight / weight.sum())


def steer_by_words(text: str, profiles: Sequence[Profile], seed: int = 0) -> Steering:
    """Choose the member whose measured leans fit what a text asks for.

    Words of the text are looked up among those by which people ask for more or less of a trait (``WANTED``), and among
    the words that cards say members are drawn to. A member's fit is the mean of its leans in the wanted directions; how
    sure the match is, is the share of draws of all leans within their standard errors in which it fits best.
    """
    if not profiles:
        raise UsageError("words are matched to the members' cards, which need held-out votes: fit keeps them in DIR.")
    wanted = wanted_traits(text)
    asked = set(re.findall(r"[\w'-]+", text.casefold()))
    found = []  # of each member, the leans that count, turned so that up is wanted
    for card in profiles:
        leans = [(lean, wanted[lean.trait]) for lean in card.leans if lean.trait in wanted and np.isfinite(lean.own)]
        leans += [(lean, 1) for lean in (*card.likes, *card.dislikes) if lean.trait in asked and np.isfinite(lean.own)]
        found.append(leans)
    if not any(found):
        raise UsageError(
            f"nothing in {text!r} names a trait that the cards measure; try words such as {_vocabulary()}, "
            "or give a few choices of your own."
        )
    random = np.random.default_rng([seed, 11])
    n = len({lean.trait for leans in found for lean, _ in leans})  # a word that a card does not hold moves it nowhere
    scores = np.array([sum(sign * lean.own for lean, sign in leans) / n for leans in found])
    errors = np.array([sum(lean.standard_error**2 for lean, _ in leans) ** 0.5 / n for leans in found])
    drawn = scores + errors * random.standard_normal((DRAWS, len(scores)))
    posterior = np.bincount(drawn.argmax(axis=1), minlength=len(scores)) / DRAWS
    best = int(posterior.argmax())
    if scores[best] <= 0:
        raise UsageError(f"no member leans towards {text!r}; the nearest is {profiles[best].name!r}.")
    labels = {trait.key: (trait.less, "", trait.more) for trait in TRAITS}
    reasons = [
        f"{labels[lean.trait][sign + 1] if lean.trait in labels else lean.trait}: it chooses so in "
        f"{(1 + sign * lean.own) / 2:.0%} of pairs, all members together in {(1 + sign * lean.ensemble) / 2:.0%}"
        for lean, sign in found[best]
    ]
    doubt = "" if posterior[best] >= SURE_ENOUGH else "; others fit nearly as well"
    why = f"“{profiles[best].name}” fits {'; '.join(reasons)}{doubt}"
    return Steering(best, why, float(posterior[best]), tuple(posterior.tolist()))


def wanted_traits(text: str) -> dict[str, int]:
    """Return which traits a text asks for, +1 more or −1 less of each.

    Example:
        >>> wanted_traits("short, warm answers without lists")
        {'length': -1, 'warmth': 1, 'structure': -1}
    """
    wanted: dict[str, int] = {}
    for clause in re.split(r"[,.;:!?]|\bbut\b", text.casefold()):  # a "not" reaches no further
        words = re.findall(r"[\w'-]+", clause)
        for place, word in enumerate(words):
            turn = -1 if _NOT & set(words[max(0, place - 2) : place]) else 1
            for trait, (more, less) in WANTED.items():
                if word in more.split() or word in less.split():
                    wanted[trait] = turn * (1 if word in more.split() else -1)
    return wanted


def _vocabulary() -> str:
    return ", ".join(
        side.split()[0] for trait in ("length", "hedging", "formality", "warmth") for side in WANTED[trait]
    )
