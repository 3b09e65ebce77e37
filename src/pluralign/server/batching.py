"""Dynamic batching: texts of concurrent requests are scored together, in one thread beside the event loop.

A text that several requests ask for is scored once. A cancelled request costs nothing more. A text that cannot be
scored fails only the requests that contain it.
"""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from pluralign.core.arrays import FloatArray
from pluralign.server.errors import ApiError
from pluralign.server.limits import Limits
from pluralign.text.encoders import vector_key
from pluralign.votes.prompts import Item, text_key

WINDOW_SHARE = 0.1
"""The batch window is at most this share of the duration of the last batch."""
MAX_RETRY_AFTER = 60
"""Maximum Retry-After of a rejected request, in seconds."""


class _PendingText:
    """A text that is queued or being scored."""

    def __init__(self, item: Item) -> None:
        self.item = item
        self.outcome: asyncio.Future[FloatArray | Exception] = asyncio.get_running_loop().create_future()
        self.n_requests = 0


class Batcher:
    """Scores texts in batches. Use it from one event loop.

    Args:
        score: returns the ``(n, k)`` rewards of n texts; called in one thread, never concurrently.
        limits: of batches, of the queue and of the reward cache, whose least recently used texts are evicted first. An
            incomplete batch never waits longer than a tenth of the duration of the last batch.
        observe: called with the number of texts and the seconds of each batch.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Item]], FloatArray],
        limits: Limits,
        observe: Callable[[int, float], None] | None = None,
    ) -> None:
        self._score, self._limits, self._observe = score, limits, observe
        self._waiting: OrderedDict[bytes, _PendingText] = OrderedDict()
        self._running: dict[bytes, _PendingText] = {}
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()  # arrays would keep all rewards of their batch
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="scoring")
        """Scores one batch at a time."""
        self._worker: asyncio.Task[None] | None = None
        self._last_batch = (1, 0.0)  # texts and seconds

    @property
    def waiting(self) -> int:
        """Number of waiting texts."""
        return len(self._waiting)

    async def rewards(self, items: Sequence[Item]) -> FloatArray:
        """Return ``(n_items, k)`` rewards, scored together with the texts of concurrent requests.

        Raises:
            ApiError: if the queue has no room for the new texts.
        """
        keys = [vector_key(text_key(*item)) for item in items]  # digests take little memory
        known = {key: rewards for key in keys if (rewards := self._cached(key)) is not None}
        missing = {key: item for key, item in zip(keys, items, strict=True) if key not in known}
        new = [key for key in missing if key not in self._waiting and key not in self._running]
        if len(self._waiting) + len(new) > self._limits.queue_texts:
            wait = self._retry_after()
            message = f"too many texts are waiting to be scored; try again in {wait} s."
            raise ApiError(503, message, code="queue_full", retry_after=wait)
        pending = {}
        for key, item in missing.items():
            text = self._running.get(key) or self._waiting.setdefault(key, _PendingText(item))
            text.n_requests += 1
            pending[key] = text
        if pending:
            self._start()
            try:
                await asyncio.wait([text.outcome for text in pending.values()])  # cancelling it cancels no outcome
            finally:
                self._release(pending)
        for key, text in pending.items():
            outcome = text.outcome.result()
            if isinstance(outcome, Exception):
                raise outcome
            known[key] = outcome
        return np.stack([known[key] for key in keys])

    async def close(self) -> None:
        """Stop. Texts that are still waiting are not scored."""
        if self._worker:
            self._worker.cancel()
            with suppress(asyncio.CancelledError):
                await self._worker
        self.thread.shutdown(wait=True, cancel_futures=True)

    def _cached(self, key: bytes) -> FloatArray | None:
        if key not in self._cache:
            return None
        self._cache.move_to_end(key)
        return np.frombuffer(self._cache[key])

    def _release(self, pending: Mapping[bytes, _PendingText]) -> None:
        """Remove one request from its texts; a waiting text without requests leaves the queue."""
        for key, text in pending.items():
            text.n_requests -= 1
            if not text.n_requests and self._waiting.get(key) is text:
                del self._waiting[key]

    def _retry_after(self) -> int:
        texts, seconds = self._last_batch
        return min(max(1, math.ceil(len(self._waiting) * seconds / texts)), MAX_RETRY_AFTER)

    def _start(self) -> None:
        self._arrived.set()
        if len(self._waiting) >= self._limits.batch_texts:
            self._full.set()
        if self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._arrived.wait()
            await self._wait_for_window()
            self._running = {key: self._waiting.pop(key) for key in list(self._waiting)[: self._limits.batch_texts]}
            if not self._waiting:
                self._arrived.clear()
            if not self._running:  # all requests were cancelled meanwhile
                continue
            started = time.perf_counter()
            items = [text.item for text in self._running.values()]
            outcomes = await asyncio.get_running_loop().run_in_executor(self.thread, self._outcomes, items)
            seconds = time.perf_counter() - started
            self._last_batch = len(items), seconds
            for (key, text), outcome in zip(self._running.items(), outcomes, strict=True):
                if not isinstance(outcome, Exception):
                    self._cache[key] = outcome.astype(np.float64).tobytes()
                text.outcome.set_result(outcome)
            self._running = {}
            while len(self._cache) > self._limits.remembered:
                self._cache.popitem(last=False)
            if self._observe:
                self._observe(len(items), seconds)

    async def _wait_for_window(self) -> None:
        """Wait until the batch is full or the batch window ends."""
        if len(self._waiting) < self._limits.batch_texts:
            self._full.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(min(self._limits.batch_wait, WINDOW_SHARE * self._last_batch[1])):
                    await self._full.wait()

    def _outcomes(self, items: Sequence[Item]) -> list[FloatArray | Exception]:
        """Return each text's rewards or its error; a batch that fails is split in halves until the text is isolated."""
        try:
            return list(self._score(items))
        except Exception as error:
            if len(items) == 1:
                return [error]
            half = len(items) // 2
            return self._outcomes(items[:half]) + self._outcomes(items[half:])
