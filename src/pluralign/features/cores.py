"""Encoding on several CPU cores: each core encodes small batches by itself.

A batch for all cores at once is so large that its arrays fit into no cache and are new memory in every layer, and the
cores wait for each other after every product. Small batches per core avoid both.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from pluralign.core.arrays import Vectors

CORE_CHARACTERS = 4096
"""Characters per batch of one core, about a thousand tokens: its arrays stay in the core's cache."""


def encode_on_cores(
    inputs: list[Any], lengths: Sequence[int], prepare: Callable[[list[Any]], Any], compute: Callable[[Any], Any]
) -> Vectors:
    """Return a vector for each input, ``(n_inputs, dimension)``.

    Args:
        inputs: the texts.
        lengths: approximate length of each text, in characters.
        prepare: tokenizes a batch of texts. It is called in this thread, while other threads compute earlier batches.
        compute: returns the vectors of a tokenized batch as a tensor. Several threads call it.
    """
    parts = list(map_on_cores(inputs, lengths, prepare, compute))
    vectors = np.empty((len(inputs), parts[0][1].shape[1]), dtype=np.float32)
    for rows, part in parts:
        vectors[rows] = part.numpy()
    return vectors


def map_on_cores(
    inputs: list[Any], lengths: Sequence[int], prepare: Callable[[list[Any]], Any], compute: Callable[[Any], Any]
) -> Iterator[tuple[list[int], Any]]:
    """Yield the rows of each batch of inputs, and what ``compute`` returns for them: see ``encode_on_cores``."""
    import torch

    batches = core_batches(lengths, torch.get_num_threads())
    prepared = (prepare([inputs[row] for row in rows]) for rows in batches)
    if len(batches) == 1:
        yield batches[0], compute(next(prepared))
        return
    with _POOL_LOCK:
        pool = _pool(os.getpid())
    futures = [pool.submit(compute, batch) for batch in prepared]
    for rows, future in zip(batches, futures, strict=True):
        yield rows, future.result()


def core_batches(lengths: Sequence[int], cores: int) -> list[list[int]]:
    """Return the rows of each batch: at most ``CORE_CHARACTERS``, longest first, and smaller if a core would be idle.

    Example:
        >>> core_batches([1600, 2000, 1200, 1200], cores=2)
        [[1], [0], [2, 3]]
    """
    limit = min(CORE_CHARACTERS, -(-sum(lengths) // cores))
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or (len(batches[-1]) + 1) * lengths[batches[-1][0]] > limit:
            batches.append([])
        batches[-1].append(row)
    return batches


_POOL_LOCK = threading.Lock()


@lru_cache(maxsize=1)
def _pool(process_id: int) -> ThreadPoolExecutor:  # noqa: ARG001 - threads do not survive a fork
    """Return a pool with one thread per core. Each of its threads runs torch single-threaded.

    ``torch.set_num_threads`` sets the number for the calling thread, and also the default for threads that start later.
    So all threads of the pool start here, and the default is restored before the pool is used.
    """
    import torch

    cores = torch.get_num_threads()
    default = _in_new_thread(torch.get_num_threads)
    started = threading.Barrier(cores)

    def start() -> None:
        torch.get_num_threads()  # a thread takes the default at its first call into torch, whatever was set before
        torch.set_num_threads(1)
        started.wait()  # keeps the thread busy until the pool has started all others

    pool = ThreadPoolExecutor(cores, "core")
    for future in [pool.submit(start) for _ in range(cores)]:
        future.result()
    _in_new_thread(lambda: torch.set_num_threads(default))
    return pool


def _in_new_thread(call: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result()
