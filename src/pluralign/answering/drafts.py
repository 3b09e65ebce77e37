"""Answers that the members' own policies write, in the three modes (§2, "queries every LLM in the support").

- *balanced*: every member's policy writes, and the slate holds every member's own answer. The consensus is one of them.
- *steerable*: the policy of the chosen member writes.
- *distributional*: a member is drawn with probability equal to its weight, and its policy writes one sample.

Of several drafts, a member answers with the one it rewards most. A member without a policy, or whose policy fails,
answers with its favourite among shared candidates (best-of-N), as in ``answer.choose``.

A policy is a ``Sampler`` per member, so this module needs to know nothing about adapters and servers. The steps are
separate functions, because a server scores texts in batches: ``answering_members``, ``write_drafts``, ``choose_own``.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pluralign.answering.answer import Answer, Mode, choose, score
from pluralign.answering.generate import Sampler, as_completed, sample_distinct
from pluralign.answering.slate import SlateEntry, consensus, favourites, near_duplicates
from pluralign.answering.steering import MeaningMatch, People, ScoredChoices, Steering, find_steering
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError
from pluralign.core.random_streams import OWN_ANSWERS, random_stream
from pluralign.core.types import Level, Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.measuring.cards import Profile
from pluralign.text.options import SamplingOptions
from pluralign.theory.posterior import ChoiceModel
from pluralign.theory.social_choice import first_choices
from pluralign.votes.prompts import Prompt, PromptLike

SharedCandidates = Sequence[str] | Callable[[], Sequence[str]]
"""Candidates for members without a policy, or a function that samples them. It is called only if they are needed."""


@dataclass(frozen=True)
class OwnPolicies:
    """The policies of members, and how to sample from them."""

    samplers: Mapping[int, Sampler]
    """By member; members may be missing."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    n: int = 1
    """Drafts per member; it answers with the one it rewards most. Distributional mode samples one."""
    concurrency: int = 1
    """Number of policies that write at the same time, each in a thread; for a server."""


@dataclass(frozen=True)
class Answering:
    """The members whose answers are needed."""

    members: tuple[int, ...]
    steering: Steering | None = None
    """Steerable mode: why this member answers."""


@dataclass(frozen=True)
class Drafts:
    """Texts by the policies of members."""

    texts: Mapping[int, Sequence[str]]
    """Distinct drafts, by member. Members whose policy is missing or failed are not in it."""
    notes: tuple[str, ...] = ()
    """Policies that failed, with the reason."""

    def pool(self, shared: Sequence[str] = ()) -> list[str]:
        """Return the distinct texts: all drafts, then the shared candidates.

        Example:
            >>> Drafts({0: ["Yes."], 2: ["No.", "Yes."]}).pool(["Perhaps."])
            ['Yes.', 'No.', 'Perhaps.']
        """
        return list(dict.fromkeys([*(text for texts in self.texts.values() for text in texts), *shared]))


def answering_members(
    weights: FloatArray,
    mode: Mode,
    *,
    prompt: PromptLike = "",
    temperature: float = 1.0,
    undecided: float = 0.0,
    member: int | None = None,
    like: str = "",
    choices: ScoredChoices | None = None,
    profiles: Sequence[Profile] = (),
    choice_model: ChoiceModel | None = None,
    match: MeaningMatch | None = None,
    seed: int = 0,
) -> Answering:
    """Return the members that answer: all with weight, the one that is steered to, or one drawn by weight.

    The arguments are those of ``answer.choose``. The random draw depends only on the weights, the prompt and the seed.

    Example:
        >>> answering_members(np.array([0.6, 0.0, 0.4]), "balanced").members
        (0, 2)
        >>> answering_members(np.array([0.6, 0.0, 0.4]), "steerable", member=1).members
        (1,)
    """
    if mode == "steerable":
        people = People(weights, temperature, undecided, choice_model or ChoiceModel())
        steering, _ = find_steering(
            people, member=member, like=like, choices=choices, profiles=profiles, match=match, seed=seed
        )
        return Answering((steering.member,), steering)
    if mode == "distributional":
        random = random_stream(seed, OWN_ANSWERS, int(Prompt(prompt).hash() * 2**53))
        return Answering((int(random.choice(len(weights), p=weights / weights.sum())),))
    return Answering(tuple(np.flatnonzero(weights > NEGLIGIBLE_WEIGHT).tolist()))


def write_drafts(
    samplers: Mapping[int, Sampler],
    members: Sequence[int],
    prompt: PromptLike,
    n: int,
    options: SamplingOptions,
    concurrency: int = 1,
) -> Drafts:
    """Let the policies of these members write n distinct drafts each; the texts depend on the prompt and the seed.

    A policy that cannot answer the prompt gives a note.

    Raises:
        UsageError: no policy could answer any prompt, such as with a server that is down.
    """
    writing = [j for j in members if j in samplers]
    outcomes = dict(as_completed(lambda j: sample_distinct(samplers[j], prompt, n, options), writing, concurrency))
    failed = [(j, outcome) for j, outcome in outcomes.items() if isinstance(outcome, DataError)]
    notes = [f"the policy of member {j} wrote nothing ({str(error).rstrip('.')})" for j, error in sorted(failed)]
    written = {j: outcomes[j] for j in writing}
    texts = {j: outcome.responses for j, outcome in written.items() if not isinstance(outcome, DataError)}
    return Drafts(texts, tuple(notes))


def choose_own(
    rewards: FloatArray,
    weights: FloatArray,
    drafts: Drafts,
    shared: Sequence[str],
    answering: Answering,
    mode: Mode,
    *,
    prompt: PromptLike = "",
    level: Level = "policy",
    temperature: float = 1.0,
    undecided: float = 0.0,
    rule: str = "borda",
    seed: int = 0,
) -> Answer:
    """Choose the answer from drafts and shared candidates whose rewards are known; needs no model.

    Args:
        rewards: of ``drafts.pool(shared)``, ``(n_texts, k)``.
        weights: of the members, ``(k,)``.
        drafts: of the members' policies.
        shared: candidates of the members without drafts.
        answering: the members that answer.
        mode: ``balanced``, ``steerable`` or ``distributional``.
        prompt: the question; its hash selects the random stream, beside ``seed``.
        level: as in ``answer.choose``: for the consensus and predicted shares, and in distributional mode for a member
            without drafts.
        temperature: β of the ensemble, for ``level="policy"``.
        undecided: the ensemble's undecided share, for predicted shares.
        rule: balanced mode: the rule of the consensus, one of ``social_choice.RULES``.
        seed: of tie-breaks and of the choices of members without drafts.

    Raises:
        UsageError: a member has neither drafts nor shared candidates.

    Example:
        >>> rewards = np.array([[1.0, 9.0], [3.0, 0.0], [2.0, 2.0]])  # of "Yes.", "No.", "Perhaps."
        >>> drafts, both = Drafts({0: ["Yes.", "No."], 1: ["Perhaps."]}), Answering((0, 1))
        >>> found = choose_own(rewards, np.array([0.6, 0.4]), drafts, [], both, "balanced")
        >>> [(entry.text, entry.members) for entry in found.answers]
        [('No.', (0,)), ('Perhaps.', (1,))]
    """
    texts = drafts.pool(shared)
    rows = {text: row for row, text in enumerate(texts)}
    without = [j for j in answering.members if j not in drafts.texts]
    if without and not shared:
        raise UsageError(
            f"member {without[0]} has no policy and there are no candidates; give candidates to choose from."
        )
    random = random_stream(seed, OWN_ANSWERS, int(Prompt(prompt).hash() * 2**53), 1)
    picks = np.zeros(len(weights), dtype=np.int64)  # rows of ``texts``
    for j, own in drafts.texts.items():
        of_member = [rows[text] for text in own]
        picks[j] = of_member[int(rewards[of_member, j].argmax())]
    if without:
        shared_rows = [rows[text] for text in dict.fromkeys(shared)]
        top = favourites(rewards[shared_rows], random)
        for j in without:
            picks[j] = shared_rows[top[j]]
    notes = (*drafts.notes, *_shared_notes(without, len(set(shared))))
    written = tuple(j for j in answering.members if j in drafts.texts)
    if mode == "balanced":
        kept = list(dict.fromkeys(picks[list(answering.members)].tolist()))
        kept_texts, place = [texts[row] for row in kept], {row: index for index, row in enumerate(kept)}
        own_pick = np.array([place.get(row, 0) for row in picks.tolist()], dtype=np.int64)
        beta = temperature if level == "policy" else 0.0
        winner = consensus(kept_texts, rewards[kept], weights, rule, random, temperature=beta, undecided=undecided)
        share = first_choices(rewards[kept], weights / weights.sum(), beta, undecided)
        entries = _own_slate(kept_texts, own_pick, weights, share)
        return Answer(mode, entries, winner, candidates=len(texts), notes=notes, written=written)
    (j,) = answering.members
    if mode == "distributional" and without:
        alone = np.eye(len(weights))[j]
        found = choose(
            rewards[shared_rows], alone, [texts[row] for row in shared_rows], mode,
            prompt=prompt, level=level, temperature=temperature, seed=seed,
        )  # fmt: skip
        picks[j] = rows[found.answers[0].text]
    entry = SlateEntry(texts[picks[j]], j, float(weights[j] / weights.sum()), (j,))
    return Answer(mode, (entry,), steering=answering.steering, candidates=len(texts), notes=notes, written=written)


def answer_own(
    ensemble: RewardEnsemble,
    prompt: PromptLike,
    policies: OwnPolicies,
    candidates: SharedCandidates,
    mode: Mode,
    *,
    rule: str = "borda",
    level: Level = "policy",
    member: int | None = None,
    like: str = "",
    choices: ScoredChoices | None = None,
    profiles: Sequence[Profile] = (),
    match: MeaningMatch | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[Answer, list[str], FloatArray]:
    """Answer a prompt with the members' policies: the steps of this module, in order.

    The arguments are those of ``answer.answer``; ``candidates`` are for members without a policy.

    Returns:
        The answer; the texts of its slate or its single answer; and their rewards, ``(n_texts, k)``.
    """
    answering = answering_members(
        ensemble.weights,
        mode,
        prompt=prompt,
        temperature=ensemble.temperature,
        undecided=ensemble.undecided,
        member=member,
        like=like,
        choices=choices,
        profiles=profiles,
        choice_model=ensemble.choice_model,
        match=match,
        seed=seed,
    )
    n = 1 if mode == "distributional" else policies.n
    drafts = write_drafts(
        policies.samplers, answering.members, prompt, n, policies.sampling, concurrency=policies.concurrency
    )
    shared: Sequence[str] = ()
    if set(answering.members) - set(drafts.texts):
        shared = candidates() if callable(candidates) else candidates
    texts = drafts.pool(shared)
    rewards = score(ensemble, prompt, texts, progress)
    found = choose_own(
        rewards,
        ensemble.weights,
        drafts,
        shared,
        answering,
        mode,
        prompt=prompt,
        level=level,
        temperature=ensemble.temperature,
        undecided=ensemble.undecided,
        rule=rule,
        seed=seed,
    )
    shown = list(dict.fromkeys(entry.text for entry in found.answers))
    return found, shown, rewards[[texts.index(text) for text in shown]]


def _own_slate(
    texts: Sequence[str], own_pick: npt.NDArray[np.int64], weights: FloatArray, share: FloatArray
) -> tuple[SlateEntry, ...]:
    """Return every member's own answer, in order of decreasing weight. Near-duplicates share one entry.

    Args:
        texts: the answers, ``n_texts`` of them.
        own_pick: index of each member's answer, ``(k,)``.
        weights: of the members, ``(k,)``; members of negligible weight are left out.
        share: predicted share of people whose favourite each answer is, ``(n_texts,)``.
    """
    alpha = np.where(weights > NEGLIGIBLE_WEIGHT, weights, 0.0)
    alpha = alpha / alpha.sum()
    heaviest = np.argsort(-np.bincount(own_pick, weights=alpha, minlength=len(texts)), kind="stable")
    group, shown = near_duplicates(texts, heaviest)
    entries = []
    for number, row in enumerate(shown.tolist()):
        members = np.flatnonzero((group[own_pick] == number) & (alpha > 0))
        of_text = members[own_pick[members] == row]
        first = int(of_text[alpha[of_text].argmax()])
        behind, people = float(alpha[members].sum()), float(share[group == number].sum())
        entries.append(SlateEntry(texts[row], first, behind, tuple(members.tolist()), people))
    return tuple(sorted(entries, key=lambda entry: -entry.weight))


def _shared_notes(without: Sequence[int], n_shared: int) -> list[str]:
    if not without:
        return []
    who = f"member {without[0]} has" if len(without) == 1 else f"members {', '.join(map(str, without))} have"
    verb = "chooses" if len(without) == 1 else "choose"
    return [f"{who} no answer of a policy and {verb} among {n_shared} shared candidates"]
