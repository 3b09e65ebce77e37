"""Texts that arrive together are scored together, by one thread, so that the event loop stays free.

Decided here: how long a text waits for company, how many may wait, that a text which is asked for twice is scored once,
that a request which was given up costs nothing more, and that a text which cannot be scored spoils no other.
"""

import asyncio
import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.core.types import Progress
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.votes.prompts import Item, text_key

Score: TypeAlias = Callable[[Sequence[Item]], FloatArray]

WAIT_SHARE = 0.1
"""Of the time that the last batch took: a batch that is not full waits no longer for company."""
LONGEST_RETRY = 60
"""Seconds; the most that a refused client is told to wait."""


class QueueFullError(Exception):
    """More texts wait than may."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many texts wait to be scored; try again in {retry_after} s")
        self.retry_after = retry_after


@dataclass(frozen=True, eq=False)
class ScoredEnsemble(RewardEnsemble):
    """An ensemble whose rewards of some texts are at hand, for procedures that ask an ensemble for them."""

    known: Mapping[Item, FloatArray] = field(default_factory=dict)

    @classmethod
    def of(cls, ensemble: RewardEnsemble, items: Sequence[Item], rewards: FloatArray) -> "ScoredEnsemble":
        """Return an ensemble that knows the rewards of these items, ``(n_items, k)``, and of no others."""
        return cls(**vars(ensemble), known=dict(zip(items, rewards, strict=True)))

    def rewards(self, items: Sequence[Item], progress: Progress | None = None) -> FloatArray:  # noqa: ARG002
        """Return each member's reward for each (prompt, response), ``(n_items, k)``."""
        return np.array([self.known[item] for item in items]).reshape(len(items), self.k)


class _Wanted:
    """A text that is waited for."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.outcome: asyncio.Future[FloatArray | Exception] = asyncio.get_running_loop().create_future()
        self.wanted_by = 0


class Batcher:
    """Scores texts in batches; used from one event loop.

    Args:
        score: gives ``(n, k)`` rewards of n texts; called in one thread, never twice at once.
        texts: most texts of a batch.
        wait: most seconds that a batch which is not full waits for more; never above a tenth of what the last one took.
        queue: most texts that may wait.
        remember: how many texts' rewards are kept in memory, the least recently used forgotten first.
        observe: called with the texts and seconds of each batch.
    """

    def __init__(
        self,
        score: Score,
        *,
        texts: int,
        wait: float,
        queue: int,
        remember: int,
        observe: Callable[[int, float], None] | None = None,
    ) -> None:
        self._score, self._texts, self._wait, self._queue, self._remember = score, texts, wait, queue, remember
        self._observe = observe
        self._waiting: OrderedDict[bytes, _Wanted] = OrderedDict()
        self._running: dict[bytes, _Wanted] = {}
        self._recent: OrderedDict[bytes, FloatArray] = OrderedDict()
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        self._work: asyncio.Task[None] | None = None
        self._last = (1, 0.0)  # texts and seconds of the last batch

    @property
    def waiting(self) -> int:
        """How many texts wait."""
        return len(self._waiting)

    async def rewards(self, items: Sequence[Item]) -> FloatArray:
        """Return ``(n_items, k)`` rewards, scored together with what others ask for at the same time."""
        keys = [_key(item) for item in items]
        found: dict[bytes, Any] = {key: self._recall(key) for key in keys}
        missing = {key: item for key, item in zip(keys, items, strict=True) if found[key] is None}
        new = [key for key in missing if key not in self._waiting and key not in self._running]
        if len(self._waiting) + len(new) > self._queue:
            raise QueueFullError(self._retry_after())
        wanted = {}
        for key, item in missing.items():
            one = self._running.get(key) or self._waiting.setdefault(key, _Wanted(item))
            one.wanted_by += 1
            wanted[key] = one
        if wanted:
            self._start()
            try:
                await asyncio.wait([one.outcome for one in wanted.values()])  # does not cancel what others wait for
            finally:
                self._release(wanted)
        for key, one in wanted.items():
            outcome = one.outcome.result()
            if isinstance(outcome, Exception):
                raise outcome
            found[key] = outcome
        return np.stack([found[key] for key in keys])

    async def close(self) -> None:
        """Stop; texts that still wait are not scored."""
        if self._work:
            self._work.cancel()
            with suppress(asyncio.CancelledError):
                await self._work
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _recall(self, key: bytes) -> FloatArray | None:
        if key in self._recent:
            self._recent.move_to_end(key)
        return self._recent.get(key)

    def _release(self, wanted: Mapping[bytes, _Wanted]) -> None:
        for key, one in wanted.items():
            one.wanted_by -= 1
            if not one.wanted_by and self._waiting.get(key) is one:
                del self._waiting[key]

    def _retry_after(self) -> int:
        texts, seconds = self._last
        return min(max(1, math.ceil(len(self._waiting) * seconds / texts)), LONGEST_RETRY)

    def _start(self) -> None:
        self._arrived.set()
        if len(self._waiting) >= self._texts:
            self._full.set()
        if self._work is None:
            self._work = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            await self._company()
            self._running = {key: self._waiting.pop(key) for key in list(self._waiting)[: self._texts]}
            if not self._waiting:
                self._arrived.clear()
            if not self._running:  # given up meanwhile
                continue
            started = time.perf_counter()
            items = [one.item for one in self._running.values()]
            outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, self._outcomes, items)
            seconds = time.perf_counter() - started
            self._last = len(items), seconds
            for (key, one), outcome in zip(self._running.items(), outcomes, strict=True):
                if not isinstance(outcome, Exception):
                    self._recent[key] = outcome
                one.outcome.set_result(outcome)
            self._running = {}
            while len(self._recent) > self._remember:
                self._recent.popitem(last=False)
            if self._observe:
                self._observe(len(items), seconds)

    async def _company(self) -> None:
        """Wait until a batch is full, but not for long."""
        if len(self._waiting) < self._texts:
            self._full.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._wait, WAIT_SHARE * self._last[1])):
                    await self._full.wait()

    def _outcomes(self, items: Sequence[Item]) -> list[FloatArray | Exception]:
        """Return each text's rewards, or what went wrong with it: a batch that fails is halved until that is known."""
        try:
            return list(self._score(items))
        except Exception as error:
            if len(items) == 1:
                return [error]
            half = len(items) // 2
            return self._outcomes(items[:half]) + self._outcomes(items[half:])


def _key(item: Item) -> bytes:
    """Return what stands for a text, so that those remembered cost little memory."""
    return hashlib.blake2b(text_key(*item).encode(), digest_size=16).digest()
