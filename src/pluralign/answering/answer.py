"""Answer a prompt with an ensemble, from candidates, in one of three modes (§2, "Policy ensemble inference").

- *balanced*: the slate that covers the largest predicted share of people's favourites, and one consensus answer.
- *steerable*: the answer for one user, known by a member's number, a preference in words, or the user's own choices.
- *distributional*: a member is drawn with probability equal to its weight, and samples a candidate from its policy.

The undecided share of an ensemble is no member: it is never drawn, has no entry on a slate, and does not change the
consensus. It makes predicted shares of people, and steering by choices, more cautious.

An ``Answerer`` holds the ensemble and the language models; ``pluralign.answer``, the command and the server use it.
``choose`` picks the answers from known rewards, without any model. Members choose by their policies ∝ exp(r/β), or each
takes its favourite with ``level="vote"`` (best-of-N). A steered member answers with its favourite.

If members have policies of their own, these write ("queries every LLM in the support"): all in balanced mode, else that
of the member that answers. Of several drafts, a member answers with the one it rewards most. A member without a policy,
or whose policy fails, chooses among shared candidates. A refusal policy runs before any mode (the paper's Discussion).
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property, partial
from typing import Any, TypeAlias, TypeVar

import numpy as np

from pluralign.answering import slate
from pluralign.answering.gate import NoveltyGate, fit_gate, words_of
from pluralign.answering.generate import Sampler, as_completed, concurrency_of, sample_distinct
from pluralign.answering.request import AnswerRequest, Encode, Mode, Voters, at_once
from pluralign.answering.steering import (
    Likings,
    ScoredChoices,
    Steering,
    User,
    answer_for,
    find_user,
    judged_choices,
)
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import DataError, UsageError, did_you_mean
from pluralign.core.random_streams import OWN_ANSWERS, random_stream
from pluralign.core.text import counted, one_line
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble, as_ensemble
from pluralign.ensemble.held_out import HeldOutVotes, has_held_out, load_held_out
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.measuring.cards import Profile, member_profiles
from pluralign.text.judge import JudgeModel
from pluralign.text.options import RemoteOptions, SamplingOptions
from pluralign.text.remote import language_model
from pluralign.theory.social_choice import policies
from pluralign.votes.candidates import Candidates as CandidateList, candidates_of
from pluralign.votes.prompts import Item, Prompt, PromptLike

Result = TypeVar("Result")
RefusalPolicy: TypeAlias = Callable[[PromptLike], str | None]
"""Takes a prompt; returns a refusal to answer with, or None to let the ensemble answer."""
Candidates: TypeAlias = Sequence[str] | Callable[[], Sequence[str]]
"""Responses to choose from, or a function that returns them. It is called only if they are needed."""

DRAFTS = 4
"""Statements to request from the writer."""
WRITING_TEMPERATURE = 0.7
"""Maximum sampling temperature of drafts. At the higher temperature of candidates, small models write nonsense."""
ONLY_ONE = "there is only one candidate to choose: it has no rival, so no share of people is stated"
UNCHECKED = "no held-out texts to compare candidates with: shares of texts unlike those people voted on mean nothing"
SOME_UNLIKE = "{} of {} candidates are unlike anything these people voted on and were left out"
ALL_UNLIKE = "every candidate is unlike anything these people voted on, so no share of people is stated"
QUESTIONS_SHOWN = 5
"""Held-out questions that an error names."""
SHARED_CANDIDATES = 8
"""Candidates to sample for a request that does not say."""


@dataclass(frozen=True)
class Answer:
    """The answer in one mode, and the reasons for it."""

    mode: Mode
    answers: tuple[slate.SlateEntry, ...]
    consensus: slate.Consensus | None = None
    distilled: slate.Distilled | None = None
    steering: Steering | None = None
    refused: bool = False
    candidates: int = 0
    """Number of distinct candidates."""
    texts: tuple[str, ...] = ()
    """The distinct candidates."""
    coverage: float | None = None
    """Balanced mode: predicted share of people that the slate covers; with policies, among the members' answers."""
    notes: tuple[str, ...] = ()
    written: tuple[int, ...] = ()
    """Members whose own policy wrote their answer; empty if all chose among shared candidates."""
    unlike: Mapping[str, str] = field(default_factory=dict)
    """Candidates that the gate refuses, with the reason. No share of people is stated for them, and they are answers
    only if it refuses all."""
    cut_off: tuple[str, ...] = ()
    """Candidates that a language model did not finish within the maximum number of tokens."""

    def without_shares(self) -> "Answer":
        """Return the answer without any number of people or members: the gate refuses all candidates."""
        chosen = self.mode != "balanced"  # a member was named or drawn
        bare = tuple(slate.SlateEntry(one.text, one.member if chosen else None, 0.0) for one in self.answers)
        steering = self.steering and replace(self.steering, support=None, before=None, ask=None)
        return replace(self, answers=bare, consensus=None, coverage=None, steering=steering)


@dataclass(frozen=True)
class Drafts:
    """Texts by the policies of the members that answer."""

    members: tuple[int, ...]
    """The members that answer."""
    texts: Mapping[int, Sequence[str]]
    """Distinct drafts, by member. Members whose policy is missing or failed are not in it."""
    shared: Sequence[str] = ()
    """Candidates of the members without drafts."""
    notes: tuple[str, ...] = ()
    """Policies that failed, with the reason."""
    cut_off: frozenset[str] = frozenset()
    """Texts that a policy did not finish."""

    @property
    def without(self) -> list[int]:
        """The members that answer and have no drafts."""
        return [j for j in self.members if j not in self.texts]

    def passing(self, refused: Mapping[str, str]) -> "Drafts":
        """Return the drafts without refused texts. Members without any other draft choose among the other texts."""
        kept = {j: [text for text in texts if text not in refused] for j, texts in self.texts.items()}
        pool = [text for text in self.pool if text not in refused]
        shared = [text for text in self.shared if text not in refused]
        return replace(self, texts={j: texts for j, texts in kept.items() if texts}, shared=shared or pool)

    @property
    def pool(self) -> list[str]:
        """The distinct texts: all drafts, then the shared candidates.

        Example:
            >>> Drafts((0, 1, 2), {0: ["Yes."], 2: ["No.", "Yes."]}, ["Perhaps."]).pool
            ['Yes.', 'No.', 'Perhaps.']
        """
        return list(dict.fromkeys([*(text for texts in self.texts.values() for text in texts), *self.shared]))

    def picks(self, rewards: FloatArray, random: np.random.Generator) -> slate.Indices:
        """Return the row of ``pool`` that each member answers with, ``(k,)``; −1 for members that do not answer."""
        rows = {text: row for row, text in enumerate(self.pool)}
        picks = np.full(rewards.shape[1], -1)
        for j, own in self.texts.items():
            of_member = [rows[text] for text in own]
            picks[j] = of_member[int(rewards[of_member, j].argmax())]
        if self.without:
            shared = np.array([rows[text] for text in dict.fromkeys(self.shared)])
            top = slate.favourites(rewards[shared], random)
            picks[self.without] = shared[top[self.without]]
        return picks


def choose(
    request: AnswerRequest,
    voters: Voters,
    texts: Sequence[str],
    rewards: FloatArray,
    *,
    user: User | None = None,
    average: FloatArray | None = None,
    drafts: Drafts | None = None,
    reasons: Sequence[str] | None = None,
) -> Answer:
    """Choose the answer from candidates whose rewards are known; needs no ensemble and no encoder.

    Texts that the gate refuses are left out. If it refuses all, no number of people or members is stated.

    Args:
        request: the prompt and how to answer it.
        voters: the ensemble's numbers.
        texts: the candidates; repeats count once.
        rewards: of the candidates, ``(n_candidates, k)``.
        user: steerable mode: who the user is; not needed for ``request.member``.
        average: reward of the candidates for everyone, ``(n_candidates,)``, for a user known by choices or by words.
        drafts: which of ``texts``, their pool, each member may choose from; by default each from all.
        reasons: why the gate refuses each of ``texts``, or an empty text. None if there is no gate.

    Example:
        >>> rewards, town = np.array([[1.0, 3.0], [2.0, 0.0]]), Voters(np.array([0.6, 0.4]))
        >>> found = choose(AnswerRequest("Tea?"), town, ["Yes.", "No."], rewards)
        >>> [(entry.text, entry.weight, round(entry.share, 2)) for entry in found.answers]
        [('Yes.', 0.4, 0.54), ('No.', 0.6, 0.46)]
        >>> own = Drafts((0, 1), {0: ["No."], 1: ["No.", "Yes."]})
        >>> found = choose(AnswerRequest("Tea?"), town, own.pool, rewards[::-1], drafts=own)
        >>> [(entry.text, entry.members) for entry in found.answers]
        [('Yes.', (1,)), ('No.', (0,))]
    """
    if drafts is not None and drafts.without and not drafts.shared:
        problem = f"member {drafts.without[0]} has no policy and there are no candidates"
        raise UsageError(f"{problem}; give candidates to choose from.")
    if not texts:
        raise UsageError("there are no candidates to choose from; give at least one response.")
    notes, distinct = list(drafts.notes if drafts else ()), {text: texts.index(text) for text in texts}
    if drafts is None and len(distinct) < len(texts):
        notes.append(f"{counted(len(texts) - len(distinct), 'repeat')} left out of the candidates")
    refused = {text: reason for text, row in distinct.items() if reasons and (reason := reasons[row])}
    all_refused = len(refused) == len(distinct)
    rows = [row for text, row in distinct.items() if all_refused or text not in refused]
    if drafts is not None and not all_refused:
        drafts = drafts.passing(refused)
    notes += [] if drafts is None else _shared_notes(drafts)
    if refused:
        notes.append(ALL_UNLIKE if all_refused else SOME_UNLIKE.format(len(refused), len(distinct)))
    elif reasons is None:
        notes.append(UNCHECKED)
    if len(rows) == 1 and not all_refused and (drafts is None or request.mode == "balanced"):
        notes.append(ONLY_ONE)
    texts, rewards = [texts[row] for row in rows], rewards[rows]
    average = None if average is None else average[rows]
    key = int(Prompt(request.prompt).hash() * 2**53)
    if drafts is None:
        random, picks = np.random.default_rng([request.seed, key]), None
    else:
        random = random_stream(request.seed, OWN_ANSWERS, key, 1)
        picks = drafts.picks(rewards, random)
    written = () if drafts is None else tuple(j for j in drafts.members if j in drafts.texts)
    known: dict[str, Any] = {"candidates": len(distinct), "texts": tuple(distinct), "unlike": refused}
    found = Answer(request.mode, (), **known, notes=tuple(notes), written=written)
    at_level, favourite = voters.at(request.level), slate.favourites(rewards, random) if picks is None else picks
    if request.mode == "balanced":
        if picks is not None:  # only these answers are compared
            kept = list(dict.fromkeys(picks[picks >= 0].tolist()))
            texts, rewards = [texts[row] for row in kept], rewards[kept]
            picks = np.array([kept.index(row) if row >= 0 else 0 for row in picks.tolist()])
        winner = slate.consensus(texts, rewards, at_level, request.rule, random)
        shown = slate.slate(texts, rewards, at_level, random, size=request.slate_size, cover=request.cover, own=picks)
        found = replace(found, answers=shown.entries, consensus=winner, coverage=shown.coverage)
    elif request.mode == "distributional":
        drawn = int(random.choice(len(voters.weights), p=voters.alpha)) if drafts is None else drafts.members[0]
        if request.level == "policy" and drawn not in written:
            some = np.arange(len(texts)) if drafts is None else np.array([texts.index(one) for one in drafts.shared])
            chance = policies(rewards[some], voters.temperature)[:, drawn]
            favourite[drawn] = some[random.choice(len(some), p=chance)]
        alone = drafts is not None or len(texts) == 1
        share = None if alone else float(at_level.first_choices(rewards)[favourite[drawn]])
        found = replace(found, answers=(replace(_pick(texts, favourite, voters, drawn), share=share),))
    else:
        user = user or find_user(request, voters)
        steering, pick = user.steering, favourite[user.steering.member]
        if user.beliefs is not None and drafts is None:
            pick, steering = answer_for(user, voters, Prompt(request.prompt).text, texts, rewards, average)
        entry = _pick(texts, favourite, voters, steering.member, pick)
        notes += [steering.note] if steering.note else []
        found = replace(found, answers=(entry,), steering=steering, notes=tuple(notes))
    return found.without_shares() if all_refused else found


def refuse(text: str, mode: Mode) -> Answer:
    """Return the answer of a refusal policy.

    Example:
        >>> refuse("I cannot help with that.", "balanced").answers[0].text
        'I cannot help with that.'
    """
    return Answer(mode, (slate.SlateEntry(text, None, 0.0),), refused=True, notes=("a refusal policy answered",))


def _pick(
    texts: Sequence[str], favourite: slate.Indices, voters: Voters, member: int, choice: int | None = None
) -> slate.SlateEntry:
    """Return a member's answer, with the weight of all members that chose the same text."""
    choice = int(favourite[member]) if choice is None else choice
    members = np.flatnonzero(favourite == choice)
    return slate.SlateEntry(texts[choice], member, float(voters.weights[members].sum()), tuple(members.tolist()))


def _shared_notes(drafts: Drafts) -> list[str]:
    if not (without := drafts.without):
        return []
    who = f"member {without[0]} has" if len(without) == 1 else f"members {', '.join(map(str, without))} have"
    verb = "chooses" if len(without) == 1 else "choose"
    return [f"{who} no answer of a policy and {verb} among {len(set(drafts.shared))} shared candidates"]


# --- The answerer: samples texts, scores them, and chooses.


@dataclass(frozen=True, eq=False)
class Host:
    """Where the work of an answer is done: here, in this thread. A server has its own, with batches and limits."""

    ensemble: RewardEnsemble
    progress: Progress | None = None
    remedy: str = "give candidates or a generator"
    """For a prompt without candidates."""

    def rewards(self, items: Sequence[Item], *, average: bool = False) -> FloatArray:
        """Return ``(n_items, k)`` rewards, and with ``average`` the reward for everyone if there is one."""
        return (self.ensemble.rewards_and_average if average else self.ensemble.rewards)(items, self.progress)

    def missing(self, message: str) -> Exception:
        """Return the error of a prompt without candidates."""
        return UsageError(message)

    def sample(self, work: Callable[[], Result], name: str, what: str) -> Result:  # noqa: ARG002 - for errors of a server
        """Return the result of work that samples from the language model ``name``."""
        return work()


@dataclass(frozen=True, eq=False)
class Answerer:
    """Answers prompts with an ensemble. ``pluralign.answer``, the command and the server are ways to use it.

    Example:
        >>> from pluralign import fit, town_hall
        >>> answerer = Answerer(fit(town_hall(400).preferences, k=2, encoder="none"))
        >>> found = answerer.answer(AnswerRequest("Tea?"), ["Yes, please.", "No.", "Perhaps; it depends."])
        >>> found.mode, round(sum(entry.weight for entry in found.answers), 6)
        ('balanced', 1.0)
    """

    ensemble: RewardEnsemble
    held_out: HeldOutVotes | None = None
    """Held-out votes with the members' rewards: for the members' cards, preferences in words, and the gate."""
    generator: Sampler | None = None
    """Samples candidates for requests without any."""
    policies: Mapping[int, Sampler] = field(default_factory=dict)
    """The members' own policies, by member; members may be missing. See ``load_policies``."""
    writer: Sampler | None = None
    """Writes statements (``AnswerRequest.distill``); the generator if there is no writer."""
    judge: JudgeModel | None = None
    """Chooses, for a person who wants ``like``, between the held-out responses that say most about the person."""
    refusal: RefusalPolicy | None = None
    """Runs first; if it returns a text, that is the answer."""
    gate: NoveltyGate | None = None
    """Judges every text before a share of people is stated for it. Default: fitted on ``held_out``."""
    profiles: Sequence[Profile] | None = None
    """The members' cards; measured on ``held_out`` by default."""
    encode: Encode = at_once
    """Calls the ensemble's encoder; a server does so in parts, between the batches of other requests."""

    @classmethod
    def of(
        cls,
        ensemble: "RewardEnsemble | str | os.PathLike[str]",
        *,
        generator: str | None = None,
        policies: str | os.PathLike[str] | None = None,
        writer: str | None = None,
        judge: str | None = None,
        remote: RemoteOptions | None = None,
    ) -> "Answerer":
        """Return the answerer of an ensemble with its saved held-out votes, and with models by their names.

        Args:
            ensemble: an ensemble or its folder.
            generator: samples candidates: ``smollm2``, a folder or hub id, or a name on the server of ``remote``.
            policies: the folder that ``tune`` wrote; its base model is the generator if none is named.
            writer: the model that writes statements.
            judge: the model that judges preferences in words.
            remote: the server of the models.
        """
        loaded, held_out = as_ensemble(ensemble), None
        if not isinstance(ensemble, RewardEnsemble) and has_held_out(ensemble):
            held_out = load_held_out(ensemble, loaded)
        names = {name: language_model(name, remote) for name in (generator, writer, judge) if name}
        base, own = None, dict[int, Sampler]()
        if policies is not None:
            from pluralign.answering.policies import load_policies

            tuned = load_policies(policies, loaded, remote)
            base, own = tuned.base, dict(tuned.samplers)
        return cls(
            loaded,
            held_out,
            generator=names[generator] if generator else base,
            policies=own,
            writer=names.get(writer or ""),
            judge=names.get(judge or ""),
        )

    @property
    def samplers(self) -> list[Sampler]:
        """The language models."""
        models = (self.generator, self.writer, self.judge, *self.policies.values())
        return list({id(model): model for model in models if model is not None}.values())

    @cached_property
    def cards(self) -> Sequence[Profile]:
        """The members' cards; empty without held-out votes."""
        if self.profiles is not None:
            return self.profiles
        return member_profiles(self.ensemble.weights, self.held_out) if self.held_out else []

    @cached_property
    def fitted_gate(self) -> NoveltyGate | None:
        """The gate; None without enough held-out texts."""
        if self.gate is not None or self.held_out is None:
            return self.gate
        return fit_gate(self.held_out.preferences, self.ensemble.features, encode=self.encode)

    @cached_property
    def held_out_prompts(self) -> Mapping[int, CandidateList]:
        """Held-out prompts with the responses that people voted on, by ``Prompt.identity``: they need no generator."""
        lists = [] if self.held_out is None else candidates_of(self.held_out.preferences)
        return {Prompt(one.prompt).identity: one for one in lists}

    def no_candidates(self, prompt: PromptLike, remedy: str) -> str:
        """Return what is wrong with a prompt without candidates, and the held-out questions that are most like it."""
        asked = set(words_of(Prompt(prompt).text))
        known = [one_line(one.prompt_text) for one in self.held_out_prompts.values()]
        near = sorted(known, key=lambda one: -len(asked & set(words_of(one))))[:QUESTIONS_SHOWN]
        if near:
            remedy += f", or ask one of the {len(known):,} held-out questions, such as “{'”, “'.join(near)}”"
        return f"there are no candidates for this prompt; {remedy}."

    @cached_property
    def likings(self) -> Likings | None:
        """What members like, to match preferences in words by their meaning."""
        return Likings.of(self.ensemble, self.held_out, self.encode) if self.held_out else None

    def answer(
        self, request: AnswerRequest, candidates: Candidates | None = None, *, progress: Progress | None = None
    ) -> Answer:
        """Answer a prompt.

        Args:
            request: the prompt and how to answer it.
            candidates: responses to choose from. If None, they are sampled by ``generator``, or without one those of a
                held-out prompt. If members have policies, only members without one choose from them.
            progress: called while texts are encoded.
        """
        return self.answers(request, candidates, host=Host(self.ensemble, progress))[0]

    def answers(
        self, request: AnswerRequest, candidates: Candidates | None = None, *, draws: int = 1, host: Host | None = None
    ) -> list[Answer]:
        """Answer a prompt several times from the same candidates, each time with the next seed.

        Args:
            request: the prompt and how to answer it.
            candidates: as in ``answer``.
            draws: number of answers.
            host: where models run; in this thread by default.
        """
        if self.refusal and (text := self.refusal(request.prompt)) is not None:
            return [refuse(text, request.mode)] * draws
        if request.distill and not (self.writer or self.generator):
            raise UsageError("a statement needs a language model that writes it: a writer or a generator.")
        known = self.held_out_prompts.get(Prompt(request.prompt).identity) if self.generator is None else None
        if candidates is None and known is not None:
            request, candidates = replace(request, prompt=known.prompt), known.responses
        host = host or Host(self.ensemble)
        shared = cache(partial(self._shared, request, candidates, host))
        seeds = range(request.seed, request.seed + draws)
        return [self._answer(replace(request, seed=seed), shared, host) for seed in seeds]

    def _answer(self, request: AnswerRequest, shared: Callable[[], Drafts], host: Host) -> Answer:
        voters = Voters.of(self.ensemble)
        user = self._user(request, voters, host) if request.mode == "steerable" else None
        drafts = self._drafts(request, user, voters, host) if self.policies else None
        own = drafts or Drafts((), {})
        if drafts is None or drafts.without:
            common = shared()
            own = replace(own, shared=common.shared, notes=(*own.notes, *common.notes))
            own = replace(own, cut_off=own.cut_off | common.cut_off)
        texts = list(own.shared) if drafts is None else own.pool
        k, steered = self.ensemble.k, user is not None and user.beliefs is not None
        distinct = list(dict.fromkeys(texts))
        scored = host.rewards([(request.prompt, text) for text in distinct], average=steered)
        scored = scored[[distinct.index(text) for text in texts]]
        rewards, average = scored[:, :k], scored[:, k] if steered and scored.shape[1] > k else None
        gate = self.fitted_gate
        reasons = gate.check([(request.prompt, text) for text in texts]) if gate else None
        rest: dict[str, Any] = {"user": user, "average": average, "drafts": drafts and own, "reasons": reasons}
        found = choose(request, voters, texts, rewards, **rest)
        notes = (*found.notes, *own.notes) if drafts is None else found.notes
        found = replace(found, notes=notes, cut_off=tuple(text for text in found.texts if text in own.cut_off))
        if not request.distill:
            return found
        # Only answers of policies, and texts that the gate accepts, are rivals of a statement.
        rivals = [entry.text for entry in found.answers] if drafts else found.texts
        known = {text: rewards[texts.index(text)] for text in rivals if text not in found.unlike}
        return self._with_statement(found, request, known, host)

    def _shared(self, request: AnswerRequest, given: Candidates | None, host: Host) -> Drafts:
        """Return the candidates, cut at the stop texts, and a note if the generator gave fewer than requested."""
        notes, cut_off = list[str](), frozenset[str]()
        if isinstance(given, str):
            reader = "pluralign.votes.candidates.load_candidates reads a file"
            raise UsageError(f"candidates must be a list of responses, not one text; {reader}.")
        if callable(given):
            given = given()
        elif given is None and (generator := self.generator) is not None:
            n, sampling = request.n or SHARED_CANDIDATES, replace(request.sampling, seed=request.seed)
            work = partial(sample_distinct, generator, request.prompt, n, sampling)
            sampled = host.sample(work, generator.name, "candidates")
            given, cut_off = sampled.responses, frozenset(sampled.unfinished)
            if len(given) < n:
                notes.append(f"{generator.name} gave {len(given)} distinct responses, not {n}")
        elif given is None and not self.policies:
            raise host.missing(self.no_candidates(request.prompt, host.remedy))
        return Drafts((), {}, cut_at(given or (), request.stop), tuple(notes), cut_off)

    def _user(self, request: AnswerRequest, voters: Voters, host: Host) -> User:
        """Return who the user is: models score the user's choices, or compare the user's words."""
        scored, match = None, None
        if request.votes is not None:
            scored = ScoredChoices.of(self.ensemble, request.votes, partial(host.rewards, average=True))
        if self.judge is not None:
            if not request.like or self.held_out is None:
                raise UsageError("a judge needs a preference in words alone, and an ensemble with held-out votes.")
            work = partial(judged_choices, voters, self.held_out, request.like, self.judge)
            scored = host.sample(work, self.judge.name, "judgement")
        elif request.like and self.likings is not None:
            match = self.likings.match(request.like, request.seed)
        return find_user(request, voters, choices=scored, cards=self.cards if request.like else (), match=match)

    def _drafts(self, request: AnswerRequest, user: User | None, voters: Voters, host: Host) -> Drafts:
        """Let the policies of the members that answer write; a policy that cannot answer the prompt gives a note."""
        if user is not None:
            members: tuple[int, ...] = (user.steering.member,)
        elif request.mode == "distributional":
            random = random_stream(request.seed, OWN_ANSWERS, int(Prompt(request.prompt).hash() * 2**53))
            members = (int(random.choice(len(voters.weights), p=voters.alpha)),)
        else:
            members = tuple(np.flatnonzero(voters.weights > NEGLIGIBLE_WEIGHT).tolist())
        if not (writing := [j for j in members if j in self.policies]):
            return Drafts(members, {})
        n = 1 if request.mode == "distributional" else request.n or 1
        sampling = replace(request.sampling, seed=request.seed)

        def write() -> dict[int, Any]:
            sample = lambda j: sample_distinct(self.policies[j], request.prompt, n, sampling)  # noqa: E731
            return dict(as_completed(sample, writing, min(concurrency_of(self.policies[j]) for j in writing)))

        outcomes = host.sample(write, "a policy", "answer")
        failed = {j: one for j in writing if isinstance(one := outcomes[j], DataError)}
        notes = [f"the policy of member {j} wrote nothing ({str(error).rstrip('.')})" for j, error in failed.items()]
        wrote = {j: outcomes[j] for j in writing if j not in failed}
        texts = {j: cut_at(one.responses, request.stop) for j, one in wrote.items()}
        cut_off = frozenset(text for one in wrote.values() for text in one.unfinished)
        return Drafts(members, texts, notes=tuple(notes), cut_off=cut_off)

    def _with_statement(
        self, found: Answer, request: AnswerRequest, candidates: Mapping[str, FloatArray], host: Host
    ) -> Answer:
        """Let the writer write statements from the slate, and keep the best; ``candidates`` are with their rewards."""
        if not candidates:  # the gate refuses all
            return found
        writer = self.writer or self.generator
        assert writer is not None  # noqa: S101 - checked before

        def write() -> Sequence[str] | DataError:
            try:
                asked = slate.instruction(request.prompt, found.answers)
                return sample_distinct(writer, asked, DRAFTS, _for_statements(request)).responses
            except DataError as error:  # such as a slate longer than the writer's context; the answer stands without it
                return error

        written = host.sample(write, writer.name, "statement")
        if isinstance(written, DataError):
            return replace(found, notes=(*found.notes, f"no statement was written: {str(written).rstrip('.')}"))
        drafts = [text for text in dict.fromkeys(text.strip() for text in written) if text and text not in candidates]
        if not drafts:
            return replace(found, notes=(*found.notes, "the writer wrote nothing that is not among the candidates"))
        items, voters = [(request.prompt, text) for text in drafts], Voters.of(self.ensemble).at(request.level)
        reasons, of_drafts = (
            gate.check(items) if (gate := self.fitted_gate) else [""] * len(drafts),
            host.rewards(items),
        )
        best = slate.judge_statements(drafts, of_drafts, np.stack(list(candidates.values())), voters, reasons)
        notes = [f"the written statement is refused: {best.refused}"] if best.refused else []
        return replace(found, distilled=best, notes=(*found.notes, *notes))


def answer(
    ensemble: "RewardEnsemble | Answerer | str | os.PathLike[str]",
    prompt: PromptLike | AnswerRequest,
    candidates: Candidates | None = None,
    mode: Mode = "balanced",
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Answer:
    """Answer a prompt: one call of ``Answerer.answer``.

    Args:
        ensemble: an ensemble or its folder, or an ``Answerer``.
        prompt: the question, or a whole ``AnswerRequest``.
        candidates: responses to choose from, or a function that returns them; sampled by ``generator`` if None.
        mode: ``balanced``, ``steerable`` or ``distributional``.
        progress: called while texts are encoded.
        **options: fields of ``AnswerRequest``, such as ``rule`` or ``like``, and of ``Answerer``, such as ``held_out``.
            A ``writer`` writes a statement in balanced mode.

    Example:
        >>> from pluralign import fit, town_hall
        >>> town = fit(town_hall(400).preferences, k=2, encoder="none")
        >>> found = answer(town, "Tea?", ["Yes, please.", "No.", "Perhaps; it depends."], "steerable", member=1)
        >>> found.answers[0].member
        1
    """
    of_request = {one.name for one in fields(AnswerRequest)} - {"prompt", "mode"}
    of_answerer = {one.name for one in fields(Answerer)} - {"ensemble"}
    for name in options:
        if name not in of_request | of_answerer:
            raise UsageError(f"there is no option {name!r}; {did_you_mean(name, sorted(of_request | of_answerer))}.")
    asked = {name: value for name, value in options.items() if name in of_request}
    if isinstance(prompt, AnswerRequest):
        request = replace(prompt, **asked)
    else:
        request = AnswerRequest(prompt, mode, **{"distill": mode == "balanced" and "writer" in options} | asked)
    answerer = ensemble if isinstance(ensemble, Answerer) else Answerer.of(ensemble)
    answerer = replace(answerer, **{name: value for name, value in options.items() if name in of_answerer})
    return answerer.answer(request, candidates, progress=progress)


def cut_at(texts: Sequence[str], stop: Sequence[str]) -> list[str]:
    """Return texts up to the first stop text; those that start with one are left out.

    Raises:
        UsageError: every text starts with a stop text.

    Example:
        >>> cut_at(["Yes. END No.", "END", "No."], ["END", "No"])
        ['Yes. ']
    """
    cut = [text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))] for text in texts]
    kept = [text for text in cut if text.strip()] if stop else cut
    if texts and not kept:
        raise UsageError("no candidate has text before a stop text; send other stop texts or candidates.")
    return kept


def _for_statements(request: AnswerRequest) -> SamplingOptions:
    """Return the sampling of statements: at high temperatures small models write nonsense."""
    temperature = min(request.sampling.temperature or WRITING_TEMPERATURE, WRITING_TEMPERATURE)
    return replace(request.sampling, temperature=temperature, seed=request.seed)
