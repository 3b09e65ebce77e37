"""Answer a prompt with an ensemble, from candidates, in one of three modes (§2, "Policy ensemble inference").

- *balanced*: the slate that covers the largest predicted share of people's favourites, and one consensus answer.
- *steerable*: the answer for one user, known by a member's number, a preference in words, or the user's own choices.
- *distributional*: a member is drawn with probability equal to its weight, and samples a candidate from its policy.

The undecided share of an ensemble is no member: it is never drawn, has no entry on a slate, and does not change the
consensus. It makes predicted shares of people, and steering by choices, more cautious.

``answer`` is two steps: ``score`` asks the ensemble for rewards, and ``choose`` picks answers from them without any
model. Members choose by their policies ∝ exp(r/β), or, with ``level="vote"``, each takes its favourite (best-of-N). A
steered member always answers with its favourite. With ``policies``, members write their own answers (``own_answers``).
A refusal policy runs before any mode (the paper's Discussion).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from pluralign.answering.slate import (
    Consensus,
    Distilled,
    Gate,
    SlateEntry,
    Writer,
    consensus,
    favourites,
    slate,
    write_statement,
)
from pluralign.answering.steering import (
    Judge,
    MeaningMatch,
    People,
    ScoredChoices,
    Steering,
    answer_for,
    find_steering,
    judged_choices,
    match_meaning,
    steering_notes,
)
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.types import Level, Progress
from pluralign.ensemble.ensemble import RewardEnsemble, as_ensemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.measuring.cards import Profile
from pluralign.theory.posterior import ChoiceModel
from pluralign.theory.social_choice import COVERS, RULES, first_choices, policies
from pluralign.votes.load import VotesLike, as_preferences
from pluralign.votes.options import LoadOptions
from pluralign.votes.prompts import Prompt, PromptLike

if TYPE_CHECKING:
    from pluralign.answering.drafts import OwnPolicies, SharedCandidates

Mode: TypeAlias = Literal["balanced", "steerable", "distributional"]
RefusalPolicy: TypeAlias = Callable[[PromptLike], str | None]
"""Takes a prompt; returns a refusal to answer with, or None to let the ensemble answer."""

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True)
class Answer:
    """The answer in one mode, and the reasons for it."""

    mode: Mode
    answers: tuple[SlateEntry, ...]
    consensus: Consensus | None = None
    distilled: Distilled | None = None
    steering: Steering | None = None
    refused: bool = False
    candidates: int = 0
    """Number of distinct candidates."""
    coverage: float | None = None
    """Balanced mode: predicted share of people that the slate covers."""
    notes: tuple[str, ...] = ()
    written: tuple[int, ...] = ()
    """Members whose own policy wrote their answer; empty if all chose among shared candidates."""


def answer(
    ensemble: RewardEnsemble,
    prompt: PromptLike,
    candidates: "SharedCandidates" = (),
    mode: Mode = "balanced",
    *,
    policies: "OwnPolicies | None" = None,
    rule: str = "borda",
    level: Level = "policy",
    slate_size: int | None = None,
    cover: str = "favourite",
    writer: Writer | None = None,
    gate: Gate | None = None,
    member: int | None = None,
    like: str = "",
    choices: VotesLike | None = None,
    profiles: Sequence[Profile] = (),
    held_out: HeldOutVotes | None = None,
    judge: Judge | None = None,
    refusal: RefusalPolicy | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Answer:
    """Answer a prompt from candidates: ``score`` them, then ``choose``.

    Args:
        ensemble: its members choose.
        prompt: the question.
        candidates: responses to choose from, or a function that returns them. With ``policies``, members without a
            policy choose from them.
        mode: ``balanced``, ``steerable`` or ``distributional``.
        policies: the members' own policies write their answers; see ``own_answers`` and ``policies.load_policies``.
        rule: balanced mode: the rule of the consensus, one of ``social_choice.RULES``.
        level: balanced and distributional mode: members choose by their policies ∝ exp(r/β) (``policy``), or each takes
            its favourite (``vote``).
        slate_size: balanced mode: number of answers on the slate. Default: as many as the members have different
            favourites.
        cover: balanced mode: the slate covers people whose ``favourite`` is on it, or one of whose ``top-two`` is.
        writer: balanced mode: writes statements from the slate. The best one replaces the consensus if it has at least
            the support of the best candidate.
        gate: refuses statements, such as nonsense that the members' rewards do not recognise; see ``novelty``. An
            answer that it would refuse gets a note.
        member: steerable mode: this member answers.
        like: steerable mode: a preference in words. Its meaning is compared with what the members like on
            ``held_out``; if that is unclear or impossible, its words are matched to ``profiles``.
        choices: steerable mode: pairs that the user voted on, also as a path, a pandas DataFrame or a list of dicts.
        profiles: the members' cards, for ``like``.
        held_out: held-out votes with the members' rewards, for ``like``.
        judge: steerable mode: a language model that chooses, for a person who wants ``like``, between the held-out
            responses that say most about the person. Its choices count as the user's.
        refusal: runs first; if it returns a text, that is the answer.
        seed: of tie-breaks and random draws. Different prompts get different draws.
        progress: called while texts are encoded.

    Example:
        >>> from pluralign import fit, town_hall
        >>> town = town_hall(400).preferences
        >>> ensemble = fit(town, k=2, encoder="none")
        >>> found = answer(ensemble, "Tea?", ["Yes, please.", "No.", "Perhaps; it depends."])
        >>> found.mode, round(sum(entry.weight for entry in found.answers), 6)
        ('balanced', 1.0)
    """
    ensemble = as_ensemble(ensemble)
    own_votes = None if choices is None else as_preferences(choices, LoadOptions(min_votes=1))
    check_request(
        mode, rule, level=level, slate_size=slate_size, cover=cover, member=member, like=like, choices=own_votes
    )
    if judge is not None and (not like or held_out is None or member is not None or own_votes is not None):
        raise UsageError("a judge needs a preference in words alone, and an ensemble with held-out votes.")
    if refusal and (text := refusal(prompt)) is not None:
        return refuse(text, mode)
    scored = None if own_votes is None else ScoredChoices.of(ensemble, own_votes)
    match = None
    if like and judge is not None and held_out is not None:
        scored, like = judged_choices(People.of(ensemble), held_out, like, judge), ""
    elif like and held_out is not None:
        match = match_meaning(ensemble, held_out, like, seed=seed)
    if policies is not None:
        from pluralign.answering.drafts import answer_own

        found, texts, rewards = answer_own(
            ensemble,
            prompt,
            policies,
            candidates,
            mode,
            rule=rule,
            level=level,
            member=member,
            like=like,
            choices=scored,
            profiles=profiles,
            match=match,
            seed=seed,
            progress=progress,
        )
    else:
        candidates = candidates() if callable(candidates) else candidates
        rewards = score(ensemble, prompt, candidates, progress)
        average = None
        if scored is not None or match is not None:
            rows = ensemble.rewards_and_average([(prompt, text) for text in candidates], progress)
            average = rows[:, ensemble.k] if rows.shape[1] > ensemble.k else None
        found = choose(
            rewards,
            ensemble.weights,
            candidates,
            mode,
            prompt=prompt,
            level=level,
            temperature=ensemble.temperature,
            undecided=ensemble.undecided,
            rule=rule,
            slate_size=slate_size,
            cover=cover,
            member=member,
            like=like,
            choices=scored,
            profiles=profiles,
            choice_model=ensemble.choice_model,
            average=average,
            match=match,
            seed=seed,
        )
        texts, rewards = _distinct(candidates, rewards)
    found = _with_warnings(found, gate)
    if mode != "balanced" or not writer:
        return found
    try:
        statement = write_statement(
            prompt,
            texts,
            rewards,
            ensemble.weights,
            found.answers,
            writer,
            lambda drafts: score(ensemble, prompt, drafts, progress),
            gate,
            temperature=ensemble.temperature if level == "policy" else 0.0,
            undecided=ensemble.undecided,
        )
    except DataError as error:  # such as a slate longer than the writer's context; the answer stands without it
        return replace(found, notes=(*found.notes, f"no statement was written: {str(error).rstrip('.')}"))
    if statement is None:
        return replace(found, notes=(*found.notes, "the writer wrote nothing that is not among the candidates"))
    if statement.refused:
        note = f"the written statement is refused: {statement.refused}"
        return replace(found, distilled=statement, notes=(*found.notes, note))
    return replace(found, distilled=statement)


def score(
    ensemble: RewardEnsemble, prompt: PromptLike, candidates: Sequence[str], progress: Progress | None = None
) -> FloatArray:
    """Return every member's reward of each candidate, ``(n_candidates, k)``; repeated candidates are encoded once."""
    rows = {text: row for row, text in enumerate(dict.fromkeys(candidates))}
    rewards = ensemble.rewards([(prompt, text) for text in rows], progress)
    return rewards[[rows[text] for text in candidates]]


def choose(
    rewards: FloatArray,
    weights: FloatArray,
    texts: Sequence[str],
    mode: Mode = "balanced",
    *,
    prompt: PromptLike = "",
    level: Level = "policy",
    temperature: float = 1.0,
    undecided: float = 0.0,
    rule: str = "borda",
    slate_size: int | None = None,
    cover: str = "favourite",
    member: int | None = None,
    like: str = "",
    choices: ScoredChoices | None = None,
    profiles: Sequence[Profile] = (),
    choice_model: ChoiceModel | None = None,
    average: FloatArray | None = None,
    match: MeaningMatch | None = None,
    seed: int = 0,
) -> Answer:
    """Choose the answer from candidates whose rewards are known; needs no ensemble and no encoder.

    Args:
        rewards: of the candidates, ``(n_candidates, k)``.
        weights: of the members, ``(k,)``.
        texts: the candidates; repeats count once.
        mode: ``balanced``, ``steerable`` or ``distributional``.
        prompt: the question; its hash selects the random stream, beside ``seed``.
        level: balanced and distributional mode: members choose by their policies ∝ exp(r/β) (``policy``), or each takes
            its favourite (``vote``).
        temperature: β of the ensemble, for ``level="policy"`` and for ``choices``.
        undecided: the ensemble's undecided share, for predicted shares and for ``choices``.
        rule: balanced mode: the rule of the consensus, one of ``social_choice.RULES``.
        slate_size: balanced mode: number of answers on the slate; None for as many as there are different favourites.
        cover: balanced mode: ``favourite`` or ``top-two``, see ``consensus.slate``.
        member: steerable mode: this member answers.
        like: steerable mode: a preference in words, matched to ``profiles``.
        choices: steerable mode: pairs that the user voted on, with their rewards.
        profiles: the members' cards, for ``like``.
        choice_model: the ensemble's, for ``choices`` and ``match``.
        average: reward of the candidates for everyone, ``(n_candidates,)``, for ``choices`` and ``match``.
        match: the members that ``like`` describes by its meaning.
        seed: of tie-breaks and random draws.

    Example:
        >>> rewards = np.array([[1.0, 3.0], [2.0, 0.0]])
        >>> found = choose(rewards, np.array([0.6, 0.4]), ["Yes.", "No."], prompt="Tea?")
        >>> [(entry.text, entry.weight, round(entry.share, 2)) for entry in found.answers]
        [('Yes.', 0.4, 0.54), ('No.', 0.6, 0.46)]
    """
    check_request(
        mode, rule, level=level, slate_size=slate_size, cover=cover, member=member, like=like, choices=choices
    )
    if not texts:
        raise UsageError("there are no candidates to choose from; give at least one response.")
    notes = _notes(texts)
    if average is not None:
        average = average[_first_rows(texts)]
    texts, rewards = _distinct(texts, rewards)
    random = np.random.default_rng([seed, int(Prompt(prompt).hash() * 2**53)])
    favourite = favourites(rewards, random)
    beta = temperature if level == "policy" else 0.0
    if mode == "balanced":
        winner = consensus(texts, rewards, weights, rule, random, temperature=beta, undecided=undecided)
        shown = slate(
            texts, rewards, weights, random, temperature=beta, undecided=undecided, size=slate_size, cover=cover
        )
        return Answer(mode, shown.entries, winner, candidates=len(texts), coverage=shown.coverage, notes=notes)
    if mode == "distributional":
        drawn = int(random.choice(len(weights), p=weights / weights.sum()))
        if level == "policy":
            favourite[drawn] = random.choice(len(texts), p=policy(rewards[:, drawn], temperature))
        shares = first_choices(rewards, weights / weights.sum(), beta, undecided)
        entry = replace(_pick(texts, favourite, weights, drawn), share=float(shares[favourite[drawn]]))
        return Answer(mode, (entry,), candidates=len(texts), notes=notes)
    people = People(weights, temperature, undecided, choice_model or ChoiceModel())
    steering, beliefs = find_steering(
        people, member=member, like=like, choices=choices, profiles=profiles, match=match, seed=seed
    )
    if beliefs is None:
        entry = _pick(texts, favourite, weights, steering.member)
        return Answer(mode, (entry,), steering=steering, candidates=len(texts), notes=notes)
    notes = (*notes, *steering_notes(people))
    pick, steering = answer_for(steering, people, beliefs, prompt, texts, rewards, average)
    members = np.flatnonzero(favourite == pick)
    entry = SlateEntry(texts[pick], steering.member, float(weights[members].sum()), tuple(members.tolist()))
    return Answer(mode, (entry,), steering=steering, candidates=len(texts), notes=notes)


def refuse(text: str, mode: Mode) -> Answer:
    """Return the answer of a refusal policy.

    Example:
        >>> refuse("I cannot help with that.", "balanced").answers[0].text
        'I cannot help with that.'
    """
    return Answer(mode, (SlateEntry(text, None, 0.0),), refused=True, notes=("a refusal policy answered",))


def check_request(
    mode: str,
    rule: str,
    *,
    level: str = "policy",
    slate_size: int | None = None,
    cover: str = "favourite",
    member: int | None = None,
    like: str = "",
    choices: object | None = None,
) -> None:
    """Check the mode and its arguments, before anything is sampled or scored.

    Raises:
        UsageError: if a name is unknown, if the slate would be empty, or if arguments belong to another mode.
    """
    names = (("mode", mode, MODES), ("rule", rule, tuple(RULES)), ("level", level, get_args(Level)))
    for what, given, known in (*names, ("cover", cover, tuple(COVERS))):
        if given not in known:
            raise UsageError(f"there is no {what} {given!r}; {did_you_mean(str(given), known)}.")
    if slate_size is not None and slate_size < 1:
        raise UsageError(f"a slate needs at least one answer; slate_size cannot be {slate_size}.")
    if mode != "balanced" and slate_size is not None:
        raise UsageError(f"slate_size requires mode balanced; mode {mode} has no slate.")
    if mode != "steerable" and (member is not None or like or choices is not None):
        raise UsageError(f"member, like and choices require mode steerable; mode {mode} takes none of them.")


def policy(rewards: FloatArray, beta: float) -> FloatArray:
    """Return the probabilities of the candidates under one member's policy, ∝ exp(r/β), ``(n_candidates,)``.

    This is the policy of App. A with a uniform reference over the candidates.

    Example:
        >>> policy(np.array([1.0, 0.0]), 1.0).round(3)
        array([0.731, 0.269])
    """
    return np.asarray(policies(rewards[:, None], beta)[:, 0])


def _distinct(texts: Sequence[str], rewards: FloatArray) -> tuple[list[str], FloatArray]:
    """Return the distinct texts in order, with their rewards."""
    rows = _first_rows(texts)
    return [texts[row] for row in rows], rewards[rows]


def _first_rows(texts: Sequence[str]) -> list[int]:
    """Return the row of the first occurrence of each distinct text."""
    first: dict[str, int] = {}
    for row, text in enumerate(texts):
        first.setdefault(text, row)
    return list(first.values())


def _notes(candidates: Sequence[str]) -> tuple[str, ...]:
    notes, distinct = [], len(set(candidates))
    if distinct < len(candidates):
        notes.append(f"{len(candidates) - distinct} candidates were repeats and count once")
    if distinct == 1:
        notes.append("there is only one candidate, so every member chose it")
    return tuple(notes)


def _with_warnings(found: Answer, gate: Gate | None) -> Answer:
    """Return the answer with a note on each of its texts that the gate would refuse."""
    if gate is None:
        return found
    reasons = gate([entry.text for entry in found.answers])
    notes = [
        f"read the answer of member {entry.member} with care: {reason}"
        for entry, reason in zip(found.answers, reasons, strict=True)
        if reason
    ]
    return replace(found, notes=(*found.notes, *notes))


def _pick(texts: Sequence[str], favourite: npt.NDArray[np.int64], weights: FloatArray, member: int) -> SlateEntry:
    """Return one member's answer, with the weight of all members that chose the same text."""
    choice = favourite[member]
    members = np.flatnonzero(favourite == choice)
    return SlateEntry(texts[choice], member, float(weights[members].sum()), tuple(members.tolist()))
