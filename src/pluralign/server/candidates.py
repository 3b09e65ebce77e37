"""Where the texts of an answer come from: the request, a language model, the members' policies, or held-out votes.

Generation runs in threads of its own, within limits on concurrency, waiting requests and time.
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from pluralign.answering.drafts import Answering, Drafts, write_drafts
from pluralign.answering.generate import Sampler, sample_distinct
from pluralign.core.errors import PluralignError
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.server.errors import ApiError
from pluralign.server.limits import Limits, check_count
from pluralign.text.causal import LocalModel
from pluralign.text.options import SamplingOptions
from pluralign.votes.candidates import Candidates, candidates_of
from pluralign.votes.prompts import Prompt, PromptLike

Result = TypeVar("Result")

MIN_TEMPERATURE = 0.01
"""Replaces lower temperatures, 0 included: candidates must be sampled."""
RETRY_GENERATION = 5
"""Retry-After in seconds if too many prompts are waiting for candidates."""


@dataclass(frozen=True)
class SamplingOverrides:
    """Sampling options that a request sets; None keeps the server's option."""

    temperature: float | None = None
    top_p: float | None = None
    max_new_tokens: int | None = None

    def apply(self, options: SamplingOptions, seed: int) -> SamplingOptions:
        """Return the server's options with those of the request.

        Example:
            >>> SamplingOverrides(temperature=0).apply(SamplingOptions(), seed=3).temperature
            0.01
        """
        temperature = options.temperature if self.temperature is None else max(self.temperature, MIN_TEMPERATURE)
        top_p = options.top_p if self.top_p is None else self.top_p
        max_new_tokens = options.max_new_tokens if self.max_new_tokens is None else self.max_new_tokens
        return SamplingOptions(temperature, top_p, max_new_tokens, seed)


@dataclass(kw_only=True, eq=False)
class CandidateSource:
    """Provides candidates. Use it from one event loop."""

    generator: Sampler | None
    """Writes candidates if a request sends none; called in threads."""
    held_out: HeldOutVotes | None
    """Their prompts can be answered without a generator."""
    limits: Limits
    sampling: SamplingOptions
    """Sampling options of requests that set none."""
    n_candidates: int
    """Number of candidates to generate for requests that do not say."""
    policies: Mapping[int, Sampler] = field(default_factory=dict)
    """The members' own policies, by member; called in threads."""
    n_drafts: int = 1
    """Number of drafts per policy for requests that do not say."""
    waiting: int = field(default=0, init=False)
    """Number of requests that wait for candidates, those being generated included."""

    @cached_property
    def held_out_prompts(self) -> Mapping[str, Candidates]:
        """Held-out prompts with their responses, by the text that a request would send."""
        lists = [] if self.held_out is None else candidates_of(self.held_out.preferences)
        return {_prompt_key(candidates.prompt): candidates for candidates in lists}

    @cached_property
    def only_chats(self) -> bool:
        """Whether all held-out prompts are chats. Then a chat of one message stays a chat."""
        return bool(self.held_out_prompts) and all(
            Prompt(candidates.prompt).is_chat for candidates in self.held_out_prompts.values()
        )

    async def get(
        self,
        prompt: PromptLike,
        given: Sequence[str] | None,
        n_candidates: int | None,
        seed: int,
        sampling: SamplingOverrides,
    ) -> tuple[PromptLike, list[str]]:
        """Return the prompt as the ensemble knows it, and the candidates to choose from.

        Args:
            prompt: of the request.
            given: candidates of the request.
            n_candidates: number of candidates to generate; the server's default if None.
            seed: of the generation.
            sampling: options of the generation.
        """
        if given is not None:
            check_count(len(given), self.limits.candidates, "candidates")
            return prompt, list(given)
        if self.generator is not None:
            n_candidates = n_candidates or self.n_candidates
            check_count(n_candidates, self.limits.candidates, "candidates")
            generator, options = self.generator, self._options(sampling, seed)
            sampled = await self._in_slot(
                lambda: sample_distinct(generator, prompt, n_candidates, options), generator.name, "candidates"
            )
            self._check_generated(sampled.responses, generator.name)
            return prompt, sampled.responses
        if (known := self.held_out_prompts.get(_prompt_key(prompt))) is not None:
            return known.prompt, list(known.responses)[: self.limits.candidates]
        message = (
            "this server has no language model to generate candidates: send candidates, ask one of the held-out "
            "prompts, or start the server with --model or --base-url."
        )
        raise ApiError(400, message, code="no_generator", param="candidates")

    async def write(
        self,
        prompt: PromptLike,
        answering: Sequence[Answering],
        n_drafts: int | None,
        seed: int,
        sampling: SamplingOverrides,
    ) -> list[Drafts]:
        """Let the members' policies write drafts, for one answer or for several draws.

        Args:
            prompt: of the request.
            answering: the members of each draw.
            n_drafts: number of drafts per policy; the server's default if None.
            seed: of the first draw; each further draw adds 1.
            sampling: options of the generation.
        """
        n = n_drafts or self.n_drafts
        writing = [[j for j in draw.members if j in self.policies] for draw in answering]
        check_count(n * sum(map(len, writing)), self.limits.candidates, "drafts")
        options = [self._options(sampling, seed + draw) for draw in range(len(answering))]
        concurrency = 1 if self._is_local else self.limits.generations

        def work() -> list[Drafts]:
            draws = zip(writing, options, strict=True)
            return [write_drafts(self.policies, members, prompt, n, own, concurrency) for members, own in draws]

        drafts = await self._in_slot(work, "a policy", "answer")
        for draw in drafts:
            self._check_generated(draw.pool(), "a policy")
        return drafts

    def _options(self, sampling: SamplingOverrides, seed: int) -> SamplingOptions:
        check_count(sampling.max_new_tokens or 1, self.limits.max_tokens, "tokens per candidate")
        return sampling.apply(self.sampling, seed)

    def _check_generated(self, texts: Sequence[str], name: str) -> None:
        """Check texts that the request did not send, so that it is not blamed for them."""
        for text in texts:
            try:
                self.limits.check_text(text, f"a candidate of {name}")
            except ApiError as error:
                raise ApiError(502, error.message, code="upstream_failed") from None

    @property
    def _is_local(self) -> bool:
        return any(isinstance(sampler, LocalModel) for sampler in (self.generator, *self.policies.values()))

    @cached_property
    def _slots(self) -> asyncio.Semaphore:
        # A model in this process seeds the random generator that all threads share.
        return asyncio.Semaphore(1 if self._is_local else self.limits.generations)

    async def _in_slot(self, work: Callable[[], Result], name: str, what: str) -> Result:
        """Generate in a thread, within the limits.

        Args:
            work: generates texts.
            name: of the model, for errors.
            what: is generated, for errors.
        """
        if self.waiting >= self.limits.generations + self.limits.generations_waiting:
            message = "too many prompts are waiting for candidates; try again later."
            raise ApiError(503, message, code="generator_busy", retry_after=RETRY_GENERATION)
        self.waiting += 1
        try:
            async with asyncio.timeout(self.limits.generation_seconds):
                await self._slots.acquire()
                running = in_thread(work)
                loop = asyncio.get_running_loop()
                # The thread releases its slot, because it may run on after a timeout.
                running.add_done_callback(lambda _: _call_soon(loop, self._slots.release))
                return await asyncio.wrap_future(running)
        except TimeoutError:
            message = f"{name} generated no {what} within {self.limits.generation_seconds:g} s."
            raise ApiError(504, message, code="upstream_timeout") from None
        except Exception as error:
            reason = str(error) if isinstance(error, PluralignError) else f"{type(error).__name__}."
            message = f"{name} generated no {what}: {reason}"
            raise ApiError(502, message, code="upstream_failed") from None
        finally:
            self.waiting -= 1


def in_thread(work: Callable[[], Result]) -> "Future[Result]":
    """Run work in a daemon thread, so that an upstream server that hangs cannot keep the process from exiting.

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


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the server has stopped
        loop.call_soon_threadsafe(call)


def _prompt_key(prompt: PromptLike) -> str:
    """Return the text of a prompt; a chat of one user message has the key of that message."""
    if Prompt(prompt).is_one_question:
        return Prompt(prompt).turns[0].content
    return Prompt(prompt).text
