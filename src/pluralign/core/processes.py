"""Several processes of one launch: the rank of this process, and sums over all processes.

``accelerate launch -m pluralign fit …`` starts the same program several times, on one or more machines. Every process
holds all vote counts, but only the features of its own texts. Quantities over all texts are sums over processes, so
that all processes continue with the same numbers. A program started once is a launch of one process.

Sums do not depend on the number of processes. Items are divided into ``PARTS`` parts, each part is summed by one
process, and the parts are added in order. So the last digit is the same, and with it every choice of the training.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pluralign.core.errors import MissingExtraError, UsageError

Numbers = TypeVar("Numbers", bound=npt.NDArray[Any])
Value = TypeVar("Value")

PARTS = 32
"""Number of parts into which items are divided, and the largest number of processes."""


@dataclass(frozen=True)
class Processes:
    """One process of a launch."""

    count: int = 1
    rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the process that writes files and prints."""
        return self.rank == 0

    def parts(self) -> range:
        """Return the numbers of the parts of this process."""
        return range(self.rank * PARTS // self.count, (self.rank + 1) * PARTS // self.count)

    def part(self, n: int) -> slice:
        """Return the slice of n items that belongs to this process.

        Example:
            >>> [Processes(2, rank).part(10) for rank in range(2)]
            [slice(0, 5, None), slice(5, 10, None)]
        """
        own = self.parts()
        return slice(own.start * n // PARTS, own.stop * n // PARTS)

    def sum_of(self, n: int, value: Callable[[slice], Numbers]) -> Numbers:
        """Return Σ value(part) over the parts of n items, equal to the last digit for any number of processes."""
        own = {v: value(slice(v * n // PARTS, (v + 1) * n // PARTS)) for v in self.parts()}
        zero = np.zeros_like(next(iter(own.values())))
        total = zero
        for v in range(PARTS):
            total = total + self.total(own.get(v, zero))
        return total  # type: ignore[no-any-return]

    def total(self, array: Numbers) -> Numbers:
        """Return the sum of the arrays of all processes. Every process must call it, with the same shape."""
        if self.count == 1:
            return array
        import torch

        tensor = torch.from_numpy(np.array(array, order="C"))  # a copy: the sum is written into it
        torch.distributed.all_reduce(tensor)
        return tensor.numpy()  # type: ignore[return-value]

    def gathered(self, array: npt.NDArray[Any], rows: npt.NDArray[np.integer]) -> npt.NDArray[Any]:
        """Return some rows of an array, each from the process that holds it. Every process must call it."""
        own = self.part(len(array))
        found = np.zeros((len(rows), *array.shape[1:]), dtype=np.result_type(array.dtype, np.float32))
        mine = (rows >= own.start) & (rows < own.stop)
        found[mine] = array[rows[mine]]
        return self.total(found)

    def agreed(self, decide: Callable[[], Value]) -> Value:
        """Return the value that ``decide`` returns in the first process. Every process must call it."""
        if self.count == 1:
            return decide()
        import torch

        decided = [decide() if self.first else None]
        torch.distributed.broadcast_object_list(decided)
        return decided[0]  # type: ignore[return-value]

    def wait(self) -> None:
        """Return when every process has called it."""
        if self.count > 1:
            import accelerate

            accelerate.PartialState().wait_for_everyone()


ALONE = Processes()
"""A launch of one process."""


def launched_process() -> Processes:
    """Return the position of this process in its launch, from the launcher's environment. It does not join the others.

    ``accelerate launch`` and ``torchrun`` set RANK and WORLD_SIZE; without them the process is alone.

    Raises:
        UsageError: they are not a place in a launch.
    """
    count, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    if not (count.isdecimal() and rank.isdecimal() and len(count) < 10 and int(rank[:10]) < int(count)):
        message = f"RANK {rank[:20]!r} and WORLD_SIZE {count[:20]!r} are not a place in a launch: unset both."
        raise UsageError(message)
    return Processes(int(count), int(rank))


def this_process() -> Processes:
    """Return this process for fits of frozen features, joined to the others of its launch; ``ALONE`` without a launch.

    Raises:
        UsageError: there are more processes than parts of the work.
    """
    if launched_process().count < 2:
        return ALONE
    processes = join_launch(cpu=True)  # numpy does the work
    if processes.count > PARTS:
        raise UsageError(f"at most {PARTS} processes share a fit of frozen features, not {processes.count}.")
    return processes


def join_launch(cpu: bool) -> Processes:
    """Return this process, joined to the others of its launch through accelerate.

    Args:
        cpu: whether the processes work on CPUs. If False, accelerate expects GPUs; on a machine without any it would
            see no other process. With GPUs ``total`` is not available.
    """
    try:
        import accelerate
    except ImportError:
        raise MissingExtraError("accelerate", "finetune", "fitting in several processes") from None
    state = accelerate.PartialState(cpu=cpu)
    return Processes(state.num_processes, state.process_index)


def leave_launch() -> None:
    """Leave the process group of the launch, at the end of a successful program. Does nothing without a launch.

    Threads of a process group that still run when the interpreter ends can abort the process
    (github.com/pytorch/pytorch/issues/190489).
    """
    if launched_process().count > 1:
        import torch

        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


BLOCK_ROWS = 32_768
"""Rows per block."""


def blocks(part: slice) -> Iterator[slice]:
    """Yield slices of at most ``BLOCK_ROWS`` rows that cover a longer slice in order."""
    for start in range(part.start, part.stop, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, part.stop))
