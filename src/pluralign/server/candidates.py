"""Texts that language models write for requests: in threads of their own, within limits on their number and time."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

from pluralign.answering.generate import Sampler
from pluralign.core.errors import PluralignError
from pluralign.server.errors import ApiError
from pluralign.server.limits import Limits
from pluralign.text.causal import LocalModel

Result = TypeVar("Result")

RETRY_GENERATION = 5
"""Retry-After in seconds if too many prompts are waiting for candidates."""


class Slots:
    """The places of requests that sample from a language model. Use it from one event loop."""

    def __init__(self, limits: Limits, samplers: Sequence[Sampler]) -> None:
        self.limits = limits
        self.waiting = 0
        """Number of requests that wait for texts, those being sampled included."""
        # A model in this process seeds the random generator that all threads share.
        local = any(isinstance(sampler, LocalModel) for sampler in samplers)
        self._free = asyncio.Semaphore(1 if local else limits.generations)

    async def run(self, work: Callable[[], Result], name: str, what: str) -> Result:
        """Run work that samples in a thread, within the limits.

        Args:
            work: samples texts.
            name: of the model, for errors.
            what: is sampled, for errors.
        """
        if self.waiting >= self.limits.generations + self.limits.generations_waiting:
            message = "too many prompts are waiting for candidates; try again later."
            raise ApiError(503, message, code="generator_busy", retry_after=RETRY_GENERATION)
        self.waiting += 1
        try:
            async with asyncio.timeout(self.limits.generation_seconds):
                await self._free.acquire()
                running = in_thread(work)
                loop = asyncio.get_running_loop()
                # The thread releases its slot, because it may run on after a timeout.
                running.add_done_callback(lambda _: _call_soon(loop, self._free.release))
                return await asyncio.wrap_future(running)
        except TimeoutError:
            message = f"{name} generated no {what} within {self.limits.generation_seconds:g} s."
            raise ApiError(504, message, code="upstream_timeout") from None
        except Exception as error:
            reason = str(error) if isinstance(error, PluralignError) else f"{type(error).__name__}."
            raise ApiError(502, f"{name} generated no {what}: {reason}", code="upstream_failed") from None
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

    threading.Thread(target=run, daemon=True, name="answering").start()
    return future


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the server has stopped
        loop.call_soon_threadsafe(call)
