"""The processes of one launch: which of them this is, and sums over all of them.

``accelerate launch -m pluralign fit …`` starts the same program several times, on one machine or several. Every process
holds all vote counts but only its own texts' features; what needs all texts is a sum over processes, so that each then
goes on with the same numbers. A program that was started once is a launch of one.

Decided here: that sums do not depend on how many processes there are. Things are dealt out in ``PARTS`` parts, each is
summed by the process that has it, and the parts are added in their order: so the last digit is the same, and with it
every choice that training makes.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from pluralign.core.errors import MissingExtraError, UsageError

Numbers = TypeVar("Numbers", bound=npt.NDArray[Any])
Thing = TypeVar("Thing")

PARTS = 32
"""Into how many parts things are dealt out, and so how many processes can share the work."""


@dataclass(frozen=True)
class Processes:
    """One process among those of a launch."""

    count: int = 1
    rank: int = 0

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and talks."""
        return self.rank == 0

    def parts(self) -> range:
        """Return the numbers of the parts that are this process's."""
        return range(self.rank * PARTS // self.count, (self.rank + 1) * PARTS // self.count)

    def part(self, n: int) -> slice:
        """Return which of n things are this process's.

        Example:
            >>> [Processes(2, rank).part(10) for rank in range(2)]
            [slice(0, 5, None), slice(5, 10, None)]
        """
        own = self.parts()
        return slice(own.start * n // PARTS, own.stop * n // PARTS)

    def sum_of(self, n: int, value: Callable[[slice], Numbers]) -> Numbers:
        """Return Σ value(part) over the parts of n things; the same to the last digit for any number of processes."""
        mine = {v: value(slice(v * n // PARTS, (v + 1) * n // PARTS)) for v in self.parts()}
        nothing = np.zeros_like(next(iter(mine.values())))
        total = nothing
        for v in range(PARTS):
            total = total + self.total(mine.get(v, nothing))
        return total  # type: ignore[no-any-return]

    def total(self, array: Numbers) -> Numbers:
        """Return the sum of all processes' arrays of this shape; every process must call it."""
        if self.count == 1:
            return array
        import torch

        tensor = torch.from_numpy(np.array(array, order="C"))  # a copy: the sum is written into it
        torch.distributed.all_reduce(tensor)
        return tensor.numpy()  # type: ignore[return-value]

    def agreed(self, decide: Callable[[], Thing]) -> Thing:
        """Return what the first process decides; every process must call it."""
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
"""The launch of one."""


def launched_process() -> Processes:
    """Return the position of this process in its launch, from the launcher's environment. It does not join the others.

    ``accelerate launch`` and ``torchrun`` set RANK and WORLD_SIZE; without them the process is alone.
    """
    return Processes(int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0")))


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


BLOCK_ROWS = 32_768


def blocks(part: slice) -> Iterator[slice]:
    """Yield slices that cover a longer one in order."""
    for start in range(part.start, part.stop, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, part.stop))
