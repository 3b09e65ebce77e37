"""Concurrent texts are scored together, each once, and a failing text affects no other request."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, strategies as st

from pluralign import fit, town_hall
from pluralign.server.batching import Batcher
from pluralign.server.limits import Limits
from pluralign.votes.prompts import Item

Rewards = npt.NDArray[np.float64]


class Scorer:
    """Rewards are the lengths of the response and of the prompt; records its batches."""

    def __init__(self) -> None:
        self.batches: list[list[Item]] = []
        self.go = threading.Event()
        self.go.set()

    def __call__(self, items: Sequence[Item]) -> Rewards:
        self.go.wait(5)
        self.batches.append(list(items))
        if any(response == "bad" for _, response in items):
            raise ValueError("a bad text")
        return np.array([[len(response), len(str(prompt))] for prompt, response in items], dtype=np.float64)

    @property
    def scored(self) -> list[str]:
        return [response for batch in self.batches for _, response in batch]


def items(*responses: str) -> list[Item]:
    return [("Tea?", response) for response in responses]


def with_batcher(score: Scorer, use: Callable[[Batcher], Awaitable[Any]], **changes: Any) -> Any:
    async def run() -> Any:
        used = Batcher(score, Limits(**({"batch_wait": 0.01, "queue_texts": 1000, "remembered": 100} | changes)))
        try:
            return await use(used)
        finally:
            score.go.set()
            await used.close()

    return asyncio.run(run())


def test_concurrent_requests_form_one_batch() -> None:
    score = Scorer()

    async def use(used: Batcher) -> list[Rewards]:
        return await asyncio.gather(*(used.rewards(items("a" * n, "b" * n)) for n in range(1, 9)))

    found = with_batcher(score, use)
    assert [len(batch) for batch in score.batches] == [16]
    assert [rows[:, 0].tolist() for rows in found] == [[n, n] for n in range(1, 9)]


def test_batches_have_a_maximum_size_and_keep_the_order() -> None:
    score = Scorer()
    with_batcher(score, lambda used: used.rewards(items(*map(str, range(10)))), batch_texts=4)
    assert [[text for _, text in batch] for batch in score.batches] == [list("0123"), list("4567"), list("89")]


def test_a_text_is_scored_once() -> None:
    score = Scorer()
    score.go.clear()

    async def use(used: Batcher) -> list[Rewards]:
        first = asyncio.create_task(used.rewards(items("one", "one", "two")))
        await asyncio.sleep(0.05)  # it is being scored now
        second = asyncio.create_task(used.rewards(items("two", "three")))
        await asyncio.sleep(0)
        score.go.set()
        together = await asyncio.gather(first, second)
        return [*together, await used.rewards(items("three", "one"))]

    found = with_batcher(score, use)
    assert sorted(score.scored) == ["one", "three", "two"]
    assert [rows[:, 0].tolist() for rows in found] == [[3, 3, 3], [3, 5], [5, 3]]


def test_the_same_response_to_another_prompt_is_another_text() -> None:
    score = Scorer()
    found = with_batcher(score, lambda used: used.rewards([("Tea?", "Yes"), ("Coffee?", "Yes")]))
    assert found[:, 1].tolist() == [4, 7]


def test_the_cache_evicts_the_least_recently_used() -> None:
    score = Scorer()

    async def use(used: Batcher) -> None:
        for response in ("one", "two", "one", "three", "one", "two"):
            assert (await used.rewards(items(response)))[0].tolist() == [len(response), 4]
        assert {type(rewards) for rewards in used._cache.values()} == {bytes}, "a row of an array would keep its batch"

    with_batcher(score, use, remembered=2)
    assert score.scored == ["one", "two", "three", "two"]


def test_texts_of_cancelled_requests_are_not_scored() -> None:
    score = Scorer()
    score.go.clear()

    async def use(used: Batcher) -> Rewards:
        running = asyncio.create_task(used.rewards(items("running")))
        await asyncio.sleep(0.05)
        cancelled = asyncio.create_task(used.rewards(items("nobody", "shared")))
        kept = asyncio.create_task(used.rewards(items("shared")))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.sleep(0)
        score.go.set()
        await running
        return await kept

    assert with_batcher(score, use)[0, 0] == 6
    assert score.scored == ["running", "shared"]


def test_a_failing_text_fails_only_its_own_request() -> None:
    score = Scorer()

    async def use(used: Batcher) -> list[Any]:
        asked = [items("a"), items("bb", "bad"), items("ccc", "dddd"), items("e")]
        found = await asyncio.gather(*map(used.rewards, asked), return_exceptions=True)
        return [*found, await used.rewards(items("after"))]

    first, failed, third, fourth, after = with_batcher(score, use)
    assert isinstance(failed, ValueError)
    assert str(failed) == "a bad text"
    assert [first[0, 0], third[:, 0].tolist(), fourth[0, 0], after[0, 0]] == [1, [3, 4], 1, 5]


def test_a_batch_waits_for_the_batch_window() -> None:
    score = Scorer()

    async def use(used: Batcher) -> None:
        used._last_batch = 1, 1000.0  # a tenth of it is 100 seconds
        first = asyncio.create_task(used.rewards(items("first")))
        await asyncio.sleep(0.02)
        await asyncio.gather(first, used.rewards(items("second")))

    with_batcher(score, use, batch_texts=2, batch_wait=60.0)
    assert [len(batch) for batch in score.batches] == [2]


def test_the_batch_window_is_at_most_a_tenth_of_the_last_batch() -> None:
    score = Scorer()

    async def use(used: Batcher) -> None:
        for response in ("first", "second", "third"):
            await asyncio.wait_for(used.rewards(items(response)), 10)

    with_batcher(score, use, batch_wait=60.0)
    assert score.scored == ["first", "second", "third"]


def test_a_full_batch_does_not_wait() -> None:
    score = Scorer()

    async def use(used: Batcher) -> float:
        used._last_batch = 1, 1000.0
        started = time.perf_counter()
        await asyncio.gather(*(used.rewards(items(str(n), "b")) for n in range(3)))
        return time.perf_counter() - started

    assert with_batcher(score, use, batch_texts=4, batch_wait=60.0) < 10


@given(
    st.lists(st.lists(st.sampled_from(["a", "bb", "ccc", "dddd", "eeeee"]), min_size=1, max_size=4), max_size=6),
    st.integers(1, 5),
)
def test_batching_does_not_change_rewards(asked: list[list[str]], texts: int) -> None:
    score = Scorer()

    async def use(used: Batcher) -> list[Rewards]:
        return await asyncio.gather(*(used.rewards(items(*responses)) for responses in asked))

    for responses, found in zip(asked, with_batcher(score, use, batch_texts=texts, batch_wait=0.0), strict=True):
        np.testing.assert_array_equal(found, score(items(*responses)))


def test_a_scorer_returns_rewards_and_writes_no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts: list[Item] = [("Tea?", "A text that is not in any cache."), ("Tea?", "Another one.")]
    ensemble, cache = fit(town_hall(200).preferences, k=2, encoder="hashing"), tmp_path / "empty"
    cache.mkdir()
    monkeypatch.setenv("PLURALIGN_CACHE", str(cache))
    found = ensemble.scorer()(texts)
    assert list(cache.iterdir()) == []
    np.testing.assert_array_equal(found, ensemble.rewards(texts))
    assert list(cache.iterdir()) != []
