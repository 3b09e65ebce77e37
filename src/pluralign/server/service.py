"""What the server does, apart from HTTP: it scores, compares, ranks and answers, within its limits.

Decided here: where candidates come from, how many are generated at once, what a rank is, and which limit a request
breaks. The routes are in ``serving``.
"""

import asyncio
import functools
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from scipy.stats import rankdata

from pluralign.analysis.profiles import Profile
from pluralign.answering import answer as pluralism
from pluralign.answering.answer import Answer, Mode, RefusalPolicy
from pluralign.answering.generate import Sampler, sample_distinct
from pluralign.answering.steering import ScoredChoices, Steering, steer_by_choices
from pluralign.core.arrays import FloatArray
from pluralign.core.errors import PluralignError
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.models.causal import LocalModel
from pluralign.models.options import SamplingOptions
from pluralign.server import openai_chat as chat
from pluralign.server.batching import Batcher, QueueFullError, ScoredEnsemble
from pluralign.server.limits import ApiError, Limits
from pluralign.server.page_data import cards, explain, showcase
from pluralign.server.schemas import Choice, Pair, Text, Turn
from pluralign.theory import calibration
from pluralign.votes.candidates import candidates_of
from pluralign.votes.preferences import PreferenceSet
from pluralign.votes.prompts import Item, Prompt, PromptLike

Result = TypeVar("Result")

LONGEST_MARK = 44
END_MARK = re.compile(r"(?:<\|[^|<>\s]{1,40}\|>|</s>|<eos>|<pad>|<end_of_turn>|\[PAD\])$")
"""What trainers leave at the end of a decoded response."""
SEEDS = 2**31
"""Seeds that the server draws are below this."""
RETRY_GENERATING = 5
"""Seconds after which a client may ask again when too many wait for candidates."""


@dataclass(eq=False)
class Service:
    """An ensemble at work; used from one event loop."""

    ensemble: RewardEnsemble
    generator: Sampler | None = None
    """Writes candidates where a request brings none; called in threads."""
    evidence: HeldOutVotes | None = None
    name: str = "pluralign"
    limits: Limits = field(default_factory=Limits)
    refusal: RefusalPolicy | None = None
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    n: int = 8
    """Candidates that are generated unless a request says otherwise."""
    seed: int | None = None
    """Gives requests without a seed theirs, in turn; without one nobody can foretell them."""
    observe: Callable[[int, float], None] | None = None
    """Called with the texts and seconds of each batch."""
    _asking: int = field(default=0, init=False)
    """Requests that wait for candidates."""

    @cached_property
    def _seeds(self) -> random.Random:
        return random.SystemRandom() if self.seed is None else random.Random(self.seed)  # noqa: S311 - no secrets

    def seed_of(self, given: int | None) -> int:
        """Return the seed of a request: its own, else the next one."""
        return self._seeds.randrange(SEEDS) if given is None else given

    @cached_property
    def score(self) -> Callable[[Sequence[Item]], FloatArray]:
        """What gives texts their rewards, with its models in memory."""
        return self.ensemble.scorer()

    @cached_property
    def batcher(self) -> Batcher:
        """What brings the texts of several requests together."""
        limits = self.limits
        return Batcher(
            self.score,
            texts=limits.batch_texts,
            wait=limits.batch_wait,
            queue=limits.queue_texts,
            remember=limits.remembered,
            observe=self.observe,
        )

    @cached_property
    def profiles(self) -> Sequence[Profile]:
        """The members' cards; none where there are no held-out votes."""
        return () if self.evidence is None else cards(self.ensemble, self.evidence)

    @cached_property
    def shown(self) -> dict[str, Any]:
        """What the page shows."""
        return {
            **showcase(self.ensemble, self.evidence, name=self.name, profiles=self.profiles),
            "can_generate": self.generator is not None,
            "generator": self.generator.name if self.generator else None,
            "modes": list(pluralism.MODES),
            "models": chat.model_ids(self.name, self.ensemble.k),
            "limits": asdict(self.limits),
        }

    @cached_property
    def names(self) -> list[str]:
        """What the members are called."""
        return [str(member["name"]) for member in self.shown["members"]]

    @cached_property
    def held_out(self) -> Mapping[str, tuple[PromptLike, tuple[str, ...]]]:
        """Prompts that people voted on, with the responses there are."""
        lists = [] if self.evidence is None else candidates_of(self.evidence.preferences)
        return {_asked(one.prompt): (one.prompt, one.responses) for one in lists}

    @cached_property
    def only_chats(self) -> bool:
        """Whether the ensemble knows prompts as chats alone: then a single message stays one."""
        return bool(self.held_out) and all(Prompt(prompt).is_chat for prompt, _ in self.held_out.values())

    # --- limits -----------------------------------------------------------------------------------------------------

    def check_count(self, n: int, allowed: int, what: str) -> None:
        """Refuse more than is allowed."""
        if n > allowed:
            raise ApiError(422, f"there are {n:,} {what}; {allowed:,} are allowed.", code="too_many")

    def check_text(self, text: str, what: str) -> None:
        """Refuse a text that is too long, or none: half of a surrogate pair, which JSON can hold."""
        if not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text):
            raise ApiError(422, f"{what} is not valid Unicode.", code="not_text")
        if len(text) > self.limits.characters:
            message = f"{what} has {len(text):,} characters; {self.limits.characters:,} are allowed."
            raise ApiError(422, message, code="text_too_long")

    def prompt(self, given: str | Sequence[Turn], *, single_as_text: bool = False) -> PromptLike:
        """Return a prompt as the ensemble reads it: a text, or the messages of a chat."""
        prompt = given if isinstance(given, str) else tuple(turn.as_message() for turn in given)
        if single_as_text and Prompt(prompt).is_one_question:
            prompt = Prompt(prompt).turns[0].content
        shown = Prompt(prompt).text
        if not "".join(turn.content for turn in Prompt(prompt).turns).strip():
            raise ApiError(422, "the prompt is empty; give the text that is to be answered.", code="empty_prompt")
        self.check_text(shown, "the prompt")
        return prompt

    # --- scoring ----------------------------------------------------------------------------------------------------

    async def rewards(self, items: Sequence[Item]) -> FloatArray:
        """Return ``(n_items, k)`` rewards."""
        self.check_count(len(items), self.limits.texts, "texts in the request")
        for _, response in items:
            self.check_text(response, "a response")
        if not items:
            return np.empty((0, self.ensemble.k))
        try:
            return await self.batcher.rewards(items)
        except QueueFullError as full:
            raise ApiError(503, f"{full}.", code="queue_full", retry_after=full.retry_after) from None

    async def decoded_rewards(self, prompts: Sequence[str], queries: Sequence[str]) -> FloatArray:
        """Return ``(n_queries, k)`` rewards of texts as trainers decode them: a prompt, its response, end marks."""
        items: list[Item] = []
        for prompt, query in zip(prompts, queries, strict=True):
            self.check_text(prompt, "a prompt")
            self.check_text(response := query.removeprefix(prompt), "a response")
            items.append((prompt, without_end_marks(response)))
        return await self.rewards(items)

    async def score_texts(self, texts: Sequence[Text]) -> list[dict[str, Any]]:
        """Return every member's reward for each text."""
        rewards = await self.rewards([(self.prompt(text.prompt), text.response) for text in texts])
        return [{"rewards": row.tolist()} for row in rewards]

    async def compare(self, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
        """Return votes and both readings of each pair."""
        return self._compared(*await self._pair_rewards(pairs))

    async def explain(self, pair: Pair) -> dict[str, Any]:
        """Return who votes for which response, and why."""
        a, b = await self._pair_rewards([pair])
        asked, texts = Prompt(self.prompt(pair.prompt)).text, (pair.response_a, pair.response_b)
        members = await asyncio.to_thread(explain, self.ensemble, self.profiles, asked, *texts, a[0], b[0])
        return {**self._compared(a, b)[0], "rewards": {"a": a[0].tolist(), "b": b[0].tolist()}, "members": members}

    async def _pair_rewards(self, pairs: Sequence[Pair]) -> tuple[FloatArray, FloatArray]:
        rewards = await self.rewards(self._items(pairs))
        return rewards[0::2], rewards[1::2]

    def _items(self, pairs: Sequence[Pair]) -> list[Item]:
        return [(self.prompt(pair.prompt), text) for pair in pairs for text in (pair.response_a, pair.response_b)]

    def _compared(self, a: FloatArray, b: FloatArray) -> list[dict[str, Any]]:
        votes, shares = calibration.votes_from_rewards(a, b), self.ensemble.readings(a - b)
        rows = zip(votes.tolist(), shares["vote"].tolist(), shares["policy"].tolist(), strict=True)
        return [{"votes": vote, "prob_hat": share, "prob_policy": policy} for vote, share, policy in rows]

    async def rank(self, query: str, texts: Sequence[str], member: int | None, *, raw: bool) -> FloatArray:
        """Score texts against each other, ``(n_texts,)``.

        A text's score is the share of weight that prefers it to another one, averaged over all others: Borda's, in
        [0, 1]. Of one member, it is the share of the others that it prefers the text to. Raw scores are rewards.
        """
        weights, prompt = self.weights(member), self.prompt(query)
        rewards = await self.rewards([(prompt, text) for text in texts])
        if raw:
            return np.asarray(rewards @ weights)
        if len(texts) == 1:
            return np.array([0.5])
        # Ranks, ties at their mean, rather than all pairs: the same score without n² numbers.
        return np.asarray((rankdata(rewards, axis=0) - 1.0) / (len(texts) - 1) @ weights)

    def weights(self, member: int | None) -> FloatArray:
        """Return the weights of the whole ensemble, or all of it on one member, ``(k,)``."""
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
        n: int | None = None,
        sampling: Mapping[str, Any],
        draws: int = 1,
        choices: Sequence[Choice] | None = None,
        **options: Any,
    ) -> tuple[list[Answer], list[str]]:
        """Answer a prompt, as many times as ``draws`` says; return the answers and what was chosen from."""
        if self.refusal and (refused := await asyncio.to_thread(self.refusal, prompt)) is not None:
            return [pluralism.refuse(refused, mode)] * draws, []
        prompt, texts = await self._candidates(prompt, candidates, n, seed, sampling)
        known = await self._scored([*((prompt, text) for text in texts), *self._items(choices or [])])
        options |= {"choices": None if choices is None else self._votes(choices), "profiles": self.profiles}
        one = functools.partial(pluralism.answer, known, prompt, texts, mode, **options)
        return await asyncio.to_thread(lambda: [one(seed=seed + draw) for draw in range(draws)]), texts

    async def steer(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the member that choices point to, and how sure that is after each."""
        if choices:
            votes = self._votes(choices)
            scored = ScoredChoices.of(await self._scored(self._items(choices)), votes)
            steering = steer_by_choices(scored, self.ensemble.weights, self.ensemble.temperature)
        else:
            prior = tuple(self.weights(None).tolist())
            likeliest = prior.index(max(prior))
            steering = Steering(likeliest, "it has the most weight", prior[likeliest], prior, (prior,))
        return {**asdict(steering), "name": self.names[steering.member]}

    async def _scored(self, items: Sequence[Item]) -> ScoredEnsemble:
        distinct = list(dict.fromkeys(items))
        return ScoredEnsemble.of(self.ensemble, distinct, await self.rewards(distinct))

    def _votes(self, choices: Sequence[Choice]) -> PreferenceSet:
        self.check_count(len(choices), self.limits.choices, "choices")
        chose_a = np.array([one.chosen == "a" for one in choices], dtype=np.int64)
        texts = [one.response_a for one in choices], [one.response_b for one in choices]
        return PreferenceSet.from_columns([self.prompt(one.prompt) for one in choices], *texts, chose_a, 1 - chose_a)

    async def _candidates(
        self, prompt: PromptLike, given: Sequence[str] | None, n: int | None, seed: int, sampling: Mapping[str, Any]
    ) -> tuple[PromptLike, list[str]]:
        if given is not None:
            self.check_count(len(given), self.limits.candidates, "candidates")
            return prompt, list(given)
        if self.generator is not None:
            self.check_count(n or self.n, self.limits.candidates, "candidates asked for")
            return prompt, await self._generate(self.generator, prompt, n or self.n, seed, sampling)
        if (known := self.held_out.get(_asked(prompt))) is not None:
            return known[0], list(known[1])[: self.limits.candidates]
        message = (
            "this server has no language model to write candidates with: send some as candidates, ask one of the "
            "held-out prompts, or start it with --model or --base-url."
        )
        raise ApiError(400, message, code="no_generator", param="candidates")

    # --- generating -------------------------------------------------------------------------------------------------

    @cached_property
    def _turns(self) -> asyncio.Semaphore:
        # A model in this process seeds the random numbers that all threads share.
        return asyncio.Semaphore(1 if isinstance(self.generator, LocalModel) else self.limits.generations)

    async def _generate(
        self, generator: Sampler, prompt: PromptLike, n: int, seed: int, sampling: Mapping[str, Any]
    ) -> list[str]:
        given = {name: value for name, value in sampling.items() if value is not None}
        if "temperature" in given:
            given["temperature"] = max(given["temperature"], chat.COLDEST)
        self.check_count(given.get("max_new_tokens", 1), self.limits.max_tokens, "tokens asked for")
        options = replace(self.sampling, seed=seed, **given)
        if self._asking >= self.limits.generations + self.limits.generations_waiting:
            message = "too many prompts wait for candidates; try again soon."
            raise ApiError(503, message, code="generator_busy", retry_after=RETRY_GENERATING)
        self._asking += 1
        try:
            async with asyncio.timeout(self.limits.generation_seconds):
                await self._turns.acquire()
                work = in_thread(lambda: sample_distinct(generator, prompt, n, options))
                loop = asyncio.get_running_loop()
                work.add_done_callback(lambda _: _soon(loop, self._turns.release))  # not before the thread is done
                return (await asyncio.wrap_future(work)).responses
        except TimeoutError:
            message = f"{generator.name} gave no candidates within {self.limits.generation_seconds:g} s."
            raise ApiError(504, message, code="upstream_timeout") from None
        except Exception as error:
            reason = str(error) if isinstance(error, PluralignError) else f"{type(error).__name__}."
            message = f"{generator.name} gave no candidates: {reason}"
            raise ApiError(502, message, code="upstream_failed") from None
        finally:
            self._asking -= 1


def without_end_marks(text: str) -> str:
    """Return a decoded response without the marks at its end.

    Example:
        >>> without_end_marks("Yes, please.<|im_end|>\\n</s><pad><pad>")
        'Yes, please.'
    """
    end = len(text)
    while True:
        stop = end
        while stop and text[stop - 1].isspace():
            stop -= 1
        found = END_MARK.search(text, max(0, stop - LONGEST_MARK), stop)
        if found is None:
            return text[:end]
        end = found.start()


def in_thread(work: Callable[[], Result]) -> "Future[Result]":
    """Run work in a thread that does not keep the process from ending, however long an upstream server hangs.

    Example:
        >>> in_thread(lambda: 2 + 2).result()
        4
    """
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="generating").start()
    return future


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the server has stopped
        loop.call_soon_threadsafe(call)


def _asked(prompt: PromptLike) -> str:
    """Return the text by which a held-out prompt is found, be it a text or a chat of one message."""
    if Prompt(prompt).is_one_question:
        return Prompt(prompt).turns[0].content
    return Prompt(prompt).text
