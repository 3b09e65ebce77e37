"""The work of the server without HTTP: scoring, comparing, ranking and answering, within its limits.

The routes are in ``routes``, dynamic batching is in ``batching``. Answers are those of ``Answerer``, which runs in a
thread per request, scores through the batcher and samples within the limits of ``candidates``.
"""

import asyncio
import random
import re
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from scipy.stats import rankdata

from pluralign.answering.answer import Answer, Answerer, Host
from pluralign.answering.request import AnswerRequest, Voters
from pluralign.answering.steering import ScoredChoices, steer_by_choices
from pluralign.core.arrays import FloatArray
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.record import NEGLIGIBLE_WEIGHT
from pluralign.scale.lines import compared
from pluralign.server import schemas
from pluralign.server.batching import Batcher
from pluralign.server.candidates import Slots, in_thread
from pluralign.server.errors import ApiError
from pluralign.server.explain import explain_votes
from pluralign.server.limits import ServerSettings, check_count
from pluralign.votes.load import as_choices
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.prompts import Item, Prompt, PromptLike

Result = TypeVar("Result")

MAX_END_MARK = 44
"""Maximum length of a match of ``END_MARK``."""
END_MARK = re.compile(r"(?:<\|[^|<>\s]{1,40}\|>|</s>|<eos>|<pad>|<end_of_turn>|\[PAD\])$")
"""Special tokens that trainers leave at the end of a decoded response."""
SEED_LIMIT = 2**31
"""Seeds that the server draws are below this."""
MIN_TEMPERATURE = 0.01
"""Replaces lower temperatures of requests, 0 included: candidates must be sampled."""
CHOICE_FIELDS = {"response_a", "response_b", "responses", "ranking"}


@dataclass(kw_only=True, eq=False)
class Service:
    """Scores texts and answers prompts with one ensemble. Use it from one event loop."""

    answerer: Answerer
    settings: ServerSettings
    names: Sequence[str]
    """Names of the members."""
    observe: Callable[[int, float], None] | None = None
    """Called with the number of texts and the seconds of each batch."""

    def __post_init__(self) -> None:
        self.answerer = replace(self.answerer, encode=self.encode)
        self.answerer = replace(self.answerer, gate=self.answerer.fitted_gate)
        self.ensemble: RewardEnsemble = self.answerer.ensemble
        self.limits, self.name = self.settings.limits, self.settings.name
        seed = self.settings.seed
        self.seeds = random.SystemRandom() if seed is None else random.Random(seed)  # noqa: S311 - no secrets
        self.slots = Slots(self.limits, self.answerer.samplers)
        self.batcher = Batcher(lambda items: self.score(items), self.limits, self.observe)

    @cached_property
    def score(self) -> Callable[[Sequence[Item]], FloatArray]:
        """The function from texts to rewards, with one more column for steering; keeps its models in memory."""
        return self.ensemble.scorer(average=True)

    @cached_property
    def chooser(self) -> Answerer:
        """The answerer for candidates of a request, where policies do not write."""
        return replace(self.answerer, policies={}) if self.answerer.policies else self.answerer

    @cached_property
    def only_chats(self) -> bool:
        """Whether all held-out prompts are chats. Then a chat of one message stays a chat."""
        known = self.answerer.held_out_prompts.values()
        return bool(known) and all(Prompt(candidates.prompt).is_chat for candidates in known)

    def prompt(self, given: str | Sequence[schemas.Turn], *, single_as_text: bool = False) -> PromptLike:
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

    async def rewards(self, items: Sequence[Item], *, average: bool = False) -> FloatArray:
        """Return ``(n_items, k)`` rewards; with ``average`` the reward for everyone comes last if there is one."""
        check_count(len(items), self.limits.texts, "texts")
        for _, response in items:
            self.limits.check_text(response, "a response")
        if not items:
            return np.empty((0, self.ensemble.k))
        rewards = await self.batcher.rewards(items)
        return rewards if average else rewards[:, : self.ensemble.k]

    def encode(self, encoder: Callable[[Sequence[Item]], FloatArray], items: Sequence[Item]) -> FloatArray:
        """Return vectors of texts for a thread that answers.

        An encoder serves one thread at a time: that of the batcher. Batches of other requests go between the parts.
        """
        size, thread = self.limits.batch_texts, self.batcher.thread
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        return np.vstack([thread.submit(encoder, part).result() for part in parts])

    async def decoded_rewards(self, prompts: Sequence[str], queries: Sequence[str]) -> FloatArray:
        """Return ``(n_queries, k)`` rewards of decoded texts: each query is a prompt, its response and end marks."""
        items: list[Item] = []
        for prompt, query in zip(prompts, queries, strict=True):
            self.limits.check_text(prompt, "a prompt")
            self.limits.check_text(response := query.removeprefix(prompt), "a response")
            items.append((prompt, without_end_marks(response)))
        return await self.rewards(items)

    async def score_texts(self, texts: Sequence[schemas.Text]) -> list[schemas.TextRewards]:
        """Return the rewards of each text."""
        split = [text.split() for text in texts]
        rewards = await self.rewards([(self.prompt(prompt), response) for prompt, response in split])
        return [schemas.TextRewards(rewards=row.tolist()) for row in rewards]

    async def compare(self, pairs: Sequence[schemas.Pair]) -> tuple[list[schemas.Comparison], FloatArray]:
        """Return the votes and both predicted shares of each pair, and the rewards of its texts in turn."""
        items = [(self.prompt(pair.prompt), text) for pair in pairs for text in (pair.response_a, pair.response_b)]
        rewards = await self.rewards(items)
        reasons = await self.reasons(items)
        return [schemas.Comparison(**line) for line in compared(self.ensemble, rewards, reasons)], rewards

    async def reasons(self, items: Sequence[Item]) -> list[str]:
        """Return for each text why the gate refuses it, or an empty text."""
        gate = self.answerer.fitted_gate
        return await asyncio.wrap_future(in_thread(lambda: gate.check(items))) if gate else [""] * len(items)

    async def explain(self, pair: schemas.Pair) -> schemas.ExplainResponse:
        """Return the votes on a pair, and the reasons of every member."""
        (comparison,), rewards = await self.compare([pair])
        prompt, responses = Prompt(self.prompt(pair.prompt)).text, (pair.response_a, pair.response_b)
        cards = self.answerer.cards
        members = await asyncio.to_thread(explain_votes, self.ensemble, cards, prompt, responses, rewards)
        a, b = rewards.tolist()
        own: dict[str, Any] = {"rewards": {"a": a, "b": b}, "members": members, "undecided": self.ensemble.undecided}
        return schemas.ExplainResponse(**dict(comparison), **own)

    async def rank(
        self, query: str, texts: Sequence[str], member: int | None, *, raw: bool = False
    ) -> tuple[list[tuple[int, float]], list[int]]:
        """Return the index and the score of each text, best first, and the indices of texts that the gate refuses.

        The score is the text's Borda score, in [0, 1]: the weight that prefers it to another text, averaged over all
        others. Texts that the gate refuses come last with score 0, and are no rivals. With one member, the score is the
        share of the other texts that the member ranks below it, and there is no gate.

        Args:
            query: the prompt.
            texts: responses to rank.
            member: rank by this member alone.
            raw: return the member's rewards instead; needs a member.
        """
        weights, prompt = self.weights(member, required=raw), self.prompt(query)
        items = [(prompt, text) for text in texts]
        rewards = await self.rewards(items)
        scores = rewards @ weights if raw else borda_scores(rewards, weights)
        reasons = await self.reasons(items) if member is None else [""] * len(items)
        refused = np.array([reason != "" for reason in reasons])
        order = np.lexsort((-scores, refused)).tolist()
        if refused.any():
            scores[~refused] = borda_scores(rewards[~refused], weights)
            scores[refused] = 0.0
            order = sorted(order, key=lambda i: (refused[i], -scores[i]))
        return [(i, float(scores[i])) for i in order], np.flatnonzero(refused).tolist()

    def weights(self, member: int | None, *, required: bool = False) -> FloatArray:
        """Return the weights of the ensemble, or all weight on one member, ``(k,)``.

        A member is ``required`` for rewards: as ``RewardEnsemble.as_reward_func``, the server does not average them.
        """
        if member is None and required:
            last = self.ensemble.k - 1
            message = f"members' rewards have different scales and are not averaged; send ?member=J, from 0 to {last}."
            raise ApiError(422, message, code="member_required", param="member")
        if member is None:
            return Voters.of(self.ensemble).alpha
        if member >= self.ensemble.k:
            message = f"members are numbered from 0 to {self.ensemble.k - 1}; there is no member {member}."
            raise ApiError(404, message, code="no_such_member", param="member")
        return np.asarray(np.eye(self.ensemble.k)[member])

    # --- answering --------------------------------------------------------------------------------------------------

    def sampled(self, body: schemas.Sampled, max_tokens: int | None = None) -> dict[str, Any]:
        """Return the fields of an ``AnswerRequest`` about sampling: those of the body, else the server's."""
        max_tokens = max_tokens or body.max_tokens
        check_count(max_tokens or 1, self.limits.max_tokens, "tokens per candidate")
        temperature = None if body.temperature is None else max(body.temperature, MIN_TEMPERATURE)
        given = {"temperature": temperature, "top_p": body.top_p, "max_new_tokens": max_tokens}
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return {
            "sampling": replace(self.settings.sampling, **changes),
            "stop": [body.stop] if isinstance(body.stop, str) else body.stop or (),
            "seed": self.seeds.randrange(SEED_LIMIT) if body.seed is None else body.seed,
        }

    async def answer(self, request: AnswerRequest, given: Sequence[str] | None, draws: int = 1) -> list[Answer]:
        """Answer a prompt ``draws`` times, each with the next seed.

        If the server has the members' policies and the request sends no candidates, the policies write.

        Args:
            request: the prompt and how to answer it.
            given: candidates of the request; else they are sampled, or those of a held-out prompt.
            draws: number of answers.
        """
        answerer = self.answerer if given is None else self.chooser
        request = replace(request, n=request.n or self.settings.n)
        known = self.answerer.held_out_prompts.get(Prompt(request.prompt).identity)
        if given is None and answerer.generator is None and known is not None:
            request = replace(request, prompt=known.prompt)
            given = list(known.responses)[: self.limits.candidates]
        if answerer.policies:
            check_count(draws * self._n_drafts(request), self.limits.candidates, "drafts")
        check_count(len(given) if given else request.n or 1, self.limits.candidates, "candidates")
        host = RequestHost(self.ensemble, service=self, request=request, sent=frozenset(given or ()))
        return await host.run(lambda: answerer.answers(request, given, draws=draws, host=host))

    def _n_drafts(self, request: AnswerRequest) -> int:
        """Return the number of drafts that policies write for an answer."""
        if request.mode == "distributional":
            return 1
        n_members = sum(bool(self.ensemble.weights[j] > NEGLIGIBLE_WEIGHT) for j in self.answerer.policies)
        return (request.n or 1) * (n_members if request.mode == "balanced" else 1)

    async def steer(self, choices: Sequence[schemas.Choice]) -> schemas.SteeringResponse:
        """Return the member that the user's choices point to, and the posterior after each choice."""
        votes = self.votes(choices)
        rewards = await self.rewards(texts_of(votes), average=True)
        scored = ScoredChoices.of(self.ensemble, votes, lambda _: rewards)
        steering = await asyncio.to_thread(steer_by_choices, scored, Voters.of(self.ensemble))
        return schemas.SteeringResponse(**vars(steering), name=self.names[steering.member])

    def votes(self, choices: Sequence[schemas.Choice]) -> PreferenceSet:
        """Return the choices of a request as votes."""
        check_count(len(choices), self.limits.choices, "choices")
        for choice in choices:
            check_count(len(choice.responses or ()), self.limits.candidates, "responses to rank")
        texts = [choice.model_dump(include=CHOICE_FIELDS, exclude_none=True) for choice in choices]
        prompts = [{"prompt": self.prompt(choice.prompt), "vote": choice.chosen} for choice in choices]
        return as_choices([text | prompt for text, prompt in zip(texts, prompts, strict=True)])


@dataclass(frozen=True, eq=False, kw_only=True)
class RequestHost(Host):
    """Where one request's answer is computed: a thread that waits for the event loop to score and to sample."""

    service: Service
    request: AnswerRequest
    sent: frozenset[str]
    """Candidates of the request; it is not blamed for others."""
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    texts: dict[Item, None] = field(default_factory=dict)
    """Texts that were scored for the request."""
    waiting: list[Future[Any]] = field(default_factory=list)
    """What the thread waits for."""
    cancelled: list[bool] = field(default_factory=list)
    remedy: str = "send candidates, start the server with --model or --base-url"

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run work in a thread of its own; if the request is cancelled, all that the thread waits for is too."""
        try:
            return await asyncio.wrap_future(in_thread(work))
        finally:
            self.cancelled.append(True)
            for future in list(self.waiting):
                future.cancel()

    def _wait(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the event loop, and wait for it in this thread."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        self.waiting.append(future)
        if self.cancelled:
            future.cancel()
        try:
            return future.result()
        finally:
            self.waiting.remove(future)

    def rewards(self, items: Sequence[Item], *, average: bool = False) -> FloatArray:
        """Return the rewards of texts, scored together with those of other requests."""
        self.texts.update(dict.fromkeys(items))
        check_count(len(self.texts), self.service.limits.texts, "texts")
        for prompt, text in items:
            if prompt == self.request.prompt and text not in self.sent:
                self._check_written(text)
        return self._wait(self.service.rewards(items, average=average))

    def _check_written(self, text: str) -> None:
        voted = () if self.request.votes is None else self.request.votes.responses
        try:
            self.service.limits.check_text(text, "a text of the language model")
        except ApiError as error:
            if text not in voted:
                raise ApiError(502, error.message, code="upstream_failed") from None
            raise

    def missing(self, message: str) -> Exception:
        """Return the error of a prompt without candidates, which names flags of the command that started the server."""
        return ApiError(400, message, code="no_generator", param="candidates")

    def sample(self, work: Callable[[], Result], name: str, what: str) -> Result:
        """Sample within the limits of generation."""
        return self._wait(self.service.slots.run(work, name, what))


def borda_scores(rewards: FloatArray, weights: FloatArray) -> FloatArray:
    """Return for each text the weight that prefers it to another one, averaged over all others, ``(n,)``.

    Example:
        >>> borda_scores(np.array([[2.0, 0.0], [1.0, 1.0], [0.0, 2.0]]), np.array([0.75, 0.25]))
        array([0.75, 0.5 , 0.25])
    """
    if len(rewards) < 2:
        return np.full(len(rewards), 0.5)
    # Mean ranks give the same score as all pairs, without n² numbers.
    return np.asarray((rankdata(rewards, axis=0) - 1.0) / (len(rewards) - 1) @ weights)


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
