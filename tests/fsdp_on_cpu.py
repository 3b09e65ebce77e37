"""``pluralign`` with FSDP2 on CPUs, interrupted once: ``torchrun --nproc-per-node 2 tests/fsdp_on_cpu.py STEP fit …``.

accelerate uses FSDP for GPUs only; with CPUs it would ignore ACCELERATE_USE_FSDP and use DDP. Here its state is changed
after it was made. All else is the code of a launch on GPUs: sharding, reductions (gloo), checkpoints and saving.
"""

import os
import sys
from contextlib import suppress
from typing import Any

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from pluralign.cli.main import main
from pluralign.learning.backbone.train import StepCallback

make, end = AcceleratorState.__init__, StepCallback.on_step_end
stop = 0
trained: list[int] = []


def make_sharded(self: Any, *arguments: Any, fsdp_plugin: Any = None, **options: Any) -> None:
    """Make the state of accelerate, and use FSDP on CPUs too."""
    make(self, *arguments, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as accelerate does for GPUs


def stops(self: Any, args: Any, state: Any, control: Any, **rest: Any) -> None:
    """Check that the model is sharded, and interrupt the first training at a step."""
    assert {type(weights.data).__name__ for weights in rest["model"].parameters()} == {"DTensor"}
    trained.append(state.global_step)
    if len(trained) == stop:
        raise KeyboardInterrupt
    assert len(trained) != stop + 1 or state.global_step == stop, "it resumes from the last checkpoint"
    end(self, args, state, control, **rest)


if __name__ == "__main__":
    os.environ |= {
        "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    }  # fmt: skip
    stop = int(sys.argv.pop(1))
    AcceleratorState.__init__ = make_sharded
    StepCallback.on_step_end = stops  # type: ignore[method-assign]
    with suppress(SystemExit):
        main()
    assert len(trained) == stop
    main()
