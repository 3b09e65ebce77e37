"""The work of the server without HTTP: scoring, comparing, ranking and answering, within its limits.

The routes are in ``routes/``, dynamic batching is in ``batching``, and the candidates come from ``candidates``.
"""

import asyncio
import functools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

import numpy as np
from scipy.stats import rankdata

from pluralign.answering.answer import Answer, Mode, RefusalPolicy, choose, refuse
from pluralign.answering.drafts import Drafts, answering_members, choose_own
from pluralign.answering.steering import People, ScoredChoices, Steering, steer_by_choices
from pluralign.core.arrays import FloatArray
from pluralign.core.types import Level
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.measuring.cards import Profile
from pluralign.server.batching import Batcher, QueueFullError
from pluralign.server.candidates import CandidateSource, SamplingOverrides
from pluralign.server.errors import ApiError
from pluralign.server.explain import explain_votes
from pluralign.server.limits import Limits, check_count
from pluralign.server.schemas import (
    Choice,
    Comparison,
    ExplainResponse,
    Pair,
    PairRewards,
    SteeringResponse,
    Text,
    TextRewards,
    Turn,
)
from pluralign.theory import calibration
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.prompts import Item, Prompt, PromptLike

MAX_END_MARK = 44
"""Maximum length of a match of ``END_MARK``."""
END_MARK = re.compile(r"(?:<\|[^|<>\s]{1,40}\|>|</s>|<eos>|<pad>|<end_of_turn>|\[PAD\])$")
"""Special tokens that trainers leave at the end of a decoded response."""
SEED_LIMIT = 2**31
"""Seeds that the server draws are below this."""


@dataclass(kw_only=True, eq=False)
class Service:
    """Scores texts and answers prompts with one ensemble. Use it from one event loop."""

    ensemble: RewardEnsemble
    candidates: CandidateSource
    name: str
    """First part of every model id."""
    names: Sequence[str]
    """Names of the members."""
    profiles: Sequence[Profile] = ()
    """The members' cards; empty without held-out votes."""
    limits: Limits = field(default_factory=Limits)
    refusal: RefusalPolicy | None = None
    seed: int | None = None
    """Base seed for requests that send none; random if None."""
    observe: Callable[[int, float], None] | None = None
    """Called with the number of texts and the seconds of each batch."""

    @cached_property
    def _seeds(self) -> random.Random:
        return random.SystemRandom() if self.seed is None else random.Random(self.seed)  # noqa: S311 - no secrets

    def seed_for(self, given: int | None) -> int:
        """Return the seed of a request: its own, or the next one of the server."""
        return self._seeds.randrange(SEED_LIMIT) if given is None else given

    @cached_property
    def score(self) -> Callable[[Sequence[Item]], FloatArray]:
        """The function from texts to rewards, with one more column for steering; keeps its models in memory."""
        return self.ensemble.scorer(average=True)

    @cached_property
    def batcher(self) -> Batcher:
        """Scores the texts of concurrent requests together."""
        limits = self.limits
        return Batcher(
            self.score,
            texts=limits.batch_texts,
            wait=limits.batch_wait,
            queue=limits.queue_texts,
            remember=limits.remembered,
            observe=self.observe,
        )

    def prompt(self, given: str | Sequence[Turn], *, single_as_text: bool = False) -> PromptLike:
        """Return a prompt as the ensemble reads it: a text, or the messages of a chat.

        Args:
            given: the prompt of a request.
            single_as_text: whether a chat of one user message becomes a text.
        """
        prompt = given if isinstance(given, str) else tuple(turn.as_message() for turn in given)
        if single_as_text and Prompt(prompt).is_one_question:
            prompt = Prompt(prompt).turns[0].content
        if not "".join(turn.content for turn in Prompt(prompt).turns).strip():
            raise ApiError(422, "the prompt must not be empty; send the text to answer.", code="empty_prompt")
        self.limits.check_text(Prompt(prompt).text, "the prompt")
        return prompt

    # --- scoring ----------------------------------------------------------------------------------------------------

    async def rewards(self, items: Sequence[Item]) -> FloatArray:
        """Return ``(n_items, k)`` rewards."""
        return (await self._rewards_and_average(items))[:, : self.ensemble.k]

    async def _rewards_and_average(self, items: Sequence[Item]) -> FloatArray:
        """Return the rewards, and the reward for everyone in the last column if the ensemble has one."""
        check_count(len(items), self.limits.texts, "texts")
        for _, response in items:
            self.limits.check_text(response, "a response")
        if not items:
            return np.empty((0, self.ensemble.k))
        try:
            return await self.batcher.rewards(items)
        except QueueFullError as full:
            raise ApiError(503, f"{full}.", code="queue_full", retry_after=full.retry_after) from None

    async def decoded_rewards(self, prompts: Sequence[str], queries: Sequence[str]) -> FloatArray:
        """Return ``(n_queries, k)`` rewards of decoded texts: each query is a prompt, its response and end marks."""
        items: list[Item] = []
        for prompt, query in zip(prompts, queries, strict=True):
            self.limits.check_text(prompt, "a prompt")
            self.limits.check_text(response := query.removeprefix(prompt), "a response")
            items.append((prompt, without_end_marks(response)))
        return await self.rewards(items)

    async def score_texts(self, texts: Sequence[Text]) -> list[TextRewards]:
        """Return the rewards of each text."""
        split = [text.split() for text in texts]
        rewards = await self.rewards([(self.prompt(prompt), response) for prompt, response in split])
        return [TextRewards(rewards=row.tolist()) for row in rewards]

    async def compare(self, pairs: Sequence[Pair]) -> list[Comparison]:
        """Return the votes and both predicted shares of each pair."""
        return self._comparisons(*await self._pair_rewards(pairs))

    async def explain(self, pair: Pair) -> ExplainResponse:
        """Return the votes on a pair, and the reasons of every member."""
        reward_a, reward_b = await self._pair_rewards([pair])
        prompt, responses = Prompt(self.prompt(pair.prompt)).text, (pair.response_a, pair.response_b)
        rewards = np.concatenate([reward_a, reward_b])
        members = await asyncio.to_thread(explain_votes, self.ensemble, self.profiles, prompt, responses, rewards)
        (comparison,) = self._comparisons(reward_a, reward_b)
        a, b = rewards.tolist()
        return ExplainResponse(
            **comparison.model_dump(),
            rewards=PairRewards(a=a, b=b),
            members=members,
            undecided=self.ensemble.undecided,
        )

    def _comparisons(self, reward_a: FloatArray, reward_b: FloatArray) -> list[Comparison]:
        votes, shares = calibration.votes_from_rewards(reward_a, reward_b), self.ensemble.readings(reward_a - reward_b)
        rows = zip(votes.tolist(), shares["vote"].tolist(), shares["policy"].tolist(), strict=True)
        return [Comparison(votes=vote, prob_hat=share, prob_policy=policy) for vote, share, policy in rows]

    async def _pair_rewards(self, pairs: Sequence[Pair]) -> tuple[FloatArray, FloatArray]:
        rewards = await self.rewards(self._items(pairs))
        return rewards[0::2], rewards[1::2]

    def _items(self, pairs: Sequence[Pair]) -> list[Item]:
        return [(self.prompt(pair.prompt), text) for pair in pairs for text in (pair.response_a, pair.response_b)]

    async def rank(self, query: str, texts: Sequence[str], member: int | None, *, raw: bool) -> FloatArray:
        """Return a score per text, ``(n_texts,)``.

        The score is the text's Borda score, in [0, 1]: the weight that prefers it to another text, averaged over all
        others. With one member, it is the share of the other texts that the member ranks below it.

        Args:
            query: the prompt.
            texts: responses to rank.
            member: rank by this member alone.
            raw: return rewards instead: the member's, or their weighted mean.
        """
        weights, prompt = self.weights(member), self.prompt(query)
        rewards = await self.rewards([(prompt, text) for text in texts])
        if raw:
            return np.asarray(rewards @ weights)
        if len(texts) == 1:
            return np.array([0.5])
        # Mean ranks give the same score as all pairs, without n² numbers.
        return np.asarray((rankdata(rewards, axis=0) - 1.0) / (len(texts) - 1) @ weights)

    def weights(self, member: int | None) -> FloatArray:
        """Return the weights of the ensemble, or all weight on one member, ``(k,)``."""
        if member is None:
            return np.asarray(self.ensemble.weights / self.ensemble.weights.sum())
        if member >= self.ensemble.k:
            message = f"members are numbered from 0 to {self.ensemble.k - 1}; there is no member {member}."
            raise ApiError(404, message, code="no_such_member", param="member")
        return np.asarray(np.eye(self.ensemble.k)[member])

    # --- answering --------------------------------------------------------------------------------------------------

    async def answer(
        self,
        prompt: PromptLike,
        mode: Mode,
        *,
        candidates: Sequence[str] | None,
        seed: int,
        sampling: SamplingOverrides,
        n_candidates: int | None = None,
        draws: int = 1,
        stop: Sequence[str] = (),
        rule: str = "borda",
        level: Level = "policy",
        slate_size: int | None = None,
        cover: str = "favourite",
        member: int | None = None,
        like: str = "",
        choices: Sequence[Choice] | None = None,
    ) -> tuple[list[Answer], list[str]]:
        """Answer a prompt ``draws`` times; return the answers and the candidates.

        If the server has the members' policies and the request sends no candidates, the policies write.

        Args:
            prompt: the question.
            mode: ``balanced``, ``steerable`` or ``distributional``.
            candidates: responses to choose from; generated if None.
            seed: of the first draw; each further draw adds 1.
            sampling: options of the generation.
            n_candidates: number of candidates to generate, or of drafts per policy.
            draws: number of answers.
            stop: candidates end before the first of these texts.
            rule: balanced mode: the rule of the consensus.
            level: balanced and distributional mode: ``policy`` or ``vote``, as in ``choose``.
            slate_size: balanced mode: number of answers on the slate.
            cover: balanced mode: ``favourite`` or ``top-two``.
            member: steerable mode: this member answers.
            like: steerable mode: a preference in words.
            choices: steerable mode: the user's own choices.
        """
        if self.refusal and (refused := await asyncio.to_thread(self.refusal, prompt)) is not None:
            return [refuse(refused, mode)] * draws, []
        votes = None if choices is None else self._votes(choices)
        if self.candidates.policies and candidates is None:
            return await self._answer_by_policies(
                prompt,
                mode,
                seed,
                draws,
                rule,
                level=level,
                member=member,
                like=like,
                votes=votes,
                n_candidates=n_candidates,
                sampling=sampling,
                stop=stop,
            )
        prompt, texts = await self.candidates.get(prompt, candidates, n_candidates, seed, sampling)
        texts = cut_at(texts, stop)
        voted = [] if votes is None else texts_of(votes)
        rewards = await self._distinct_rewards([*((prompt, text) for text in texts), *voted])
        k = self.ensemble.k
        one_draw = functools.partial(
            choose,
            rewards[: len(texts), :k],
            self.ensemble.weights,
            texts,
            mode,
            prompt=prompt,
            level=level,
            temperature=self.ensemble.temperature,
            undecided=self.ensemble.undecided,
            rule=rule,
            slate_size=slate_size,
            cover=cover,
            member=member,
            like=like,
            choices=None if votes is None else _scored_choices(votes, rewards[len(texts) :], k),
            profiles=self.profiles,
            choice_model=self.ensemble.choice_model,
            average=rewards[: len(texts), k] if votes is not None and rewards.shape[1] > k else None,
        )
        return await asyncio.to_thread(lambda: [one_draw(seed=seed + draw) for draw in range(draws)]), texts

    async def _answer_by_policies(
        self,
        prompt: PromptLike,
        mode: Mode,
        seed: int,
        draws: int,
        rule: str,
        *,
        level: Level,
        member: int | None,
        like: str,
        votes: PreferenceSet | None,
        n_candidates: int | None,
        sampling: SamplingOverrides,
        stop: Sequence[str],
    ) -> tuple[list[Answer], list[str]]:
        """Let the policies of the answering members write; members without one choose among shared candidates."""
        ensemble, choices = self.ensemble, None
        if votes is not None:
            choices = _scored_choices(votes, await self._rewards_and_average(texts_of(votes)), ensemble.k)
        answering = [
            answering_members(
                ensemble.weights,
                mode,
                prompt=prompt,
                temperature=ensemble.temperature,
                undecided=ensemble.undecided,
                member=member,
                like=like,
                choices=choices,
                profiles=self.profiles,
                choice_model=ensemble.choice_model,
                seed=seed + draw,
            )
            for draw in range(draws)
        ]
        n_drafts = 1 if mode == "distributional" else n_candidates
        written = await self.candidates.write(prompt, answering, n_drafts, seed, sampling)
        written = [
            Drafts({j: cut_at(texts, stop) for j, texts in drafts.texts.items()}, drafts.notes) for drafts in written
        ]
        shared: list[str] = []
        if any(set(draw.members) - set(drafts.texts) for draw, drafts in zip(answering, written, strict=True)):
            _, shared = await self.candidates.get(prompt, None, n_candidates, seed, sampling)
            shared = cut_at(shared, stop)
        pools = [drafts.pool(shared) for drafts in written]
        rows = {text: row for row, text in enumerate(dict.fromkeys(text for pool in pools for text in pool))}
        rewards = await self.rewards([(prompt, text) for text in rows])

        def choose_all() -> list[Answer]:
            return [
                choose_own(
                    rewards[[rows[text] for text in pools[draw]]],
                    ensemble.weights,
                    written[draw],
                    shared,
                    answering[draw],
                    mode,
                    prompt=prompt,
                    level=level,
                    temperature=ensemble.temperature,
                    undecided=ensemble.undecided,
                    rule=rule,
                    seed=seed + draw,
                )
                for draw in range(draws)
            ]

        return await asyncio.to_thread(choose_all), list(rows)

    async def steer(self, choices: Sequence[Choice]) -> SteeringResponse:
        """Return the member that the user's choices point to, and the posterior after each choice."""
        if choices:
            votes = self._votes(choices)
            scored = _scored_choices(votes, await self._rewards_and_average(texts_of(votes)), self.ensemble.k)
            steering = steer_by_choices(scored, People.of(self.ensemble))
        else:
            prior = tuple(People.of(self.ensemble).prior[:-1].sum(axis=1).tolist())
            likeliest = prior.index(max(prior))
            steering = Steering(
                likeliest, "it has the most weight", prior[likeliest], prior, (prior,), average=1 - sum(prior)
            )
        return SteeringResponse(**asdict(steering), name=self.names[steering.member])

    async def _distinct_rewards(self, items: Sequence[Item]) -> FloatArray:
        """Return ``_rewards_and_average``; repeated items count once towards the limit."""
        rows = {item: row for row, item in enumerate(dict.fromkeys(items))}
        rewards = await self._rewards_and_average(list(rows))
        return rewards[[rows[item] for item in items]]

    def _votes(self, choices: Sequence[Choice]) -> PreferenceSet:
        check_count(len(choices), self.limits.choices, "choices")
        chose_a = np.array([choice.chosen == "a" for choice in choices], dtype=np.int64)
        return PreferenceSet.from_columns(
            [self.prompt(choice.prompt) for choice in choices],
            [choice.response_a for choice in choices],
            [choice.response_b for choice in choices],
            chose_a,
            1 - chose_a,
        )


def _scored_choices(votes: PreferenceSet, rewards: FloatArray, k: int) -> ScoredChoices:
    """Return the user's votes with the rewards of both responses; ``rewards`` are those of ``texts_of(votes)``."""
    pairs = votes.items()
    return ScoredChoices.from_rewards(votes, rewards[np.stack([pairs.a, pairs.b])], k)


def cut_at(texts: Sequence[str], stop: Sequence[str]) -> list[str]:
    """Return texts up to the first stop text; those that start with one are left out.

    Raises:
        ApiError: every text starts with a stop text.

    Example:
        >>> cut_at(["Yes. END No.", "END", "No."], ["END", "No"])
        ['Yes. ']
    """
    if not stop:
        return list(texts)
    cut = [text[: min((at for one in stop if (at := text.find(one)) >= 0), default=len(text))] for text in texts]
    if not (kept := [text for text in cut if text.strip()]):
        message = "no candidate has text before a stop text; send other stop texts or candidates."
        raise ApiError(400, message, code="nothing_left", param="stop")
    return kept


def without_end_marks(text: str) -> str:
    """Return a decoded response without the special tokens at its end.

    Example:
        >>> without_end_marks("Yes, please.<|im_end|>\\n</s><pad><pad>")
        'Yes, please.'
    """
    end = len(text)
    while True:
        stop = end
        while stop and text[stop - 1].isspace():
            stop -= 1
        mark = END_MARK.search(text, max(0, stop - MAX_END_MARK), stop)
        if mark is None:
            return text[:end]
        end = mark.start()
