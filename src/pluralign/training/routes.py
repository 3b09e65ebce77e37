"""Which way to fine-tune fits the memory of the devices: optimizer, precision, LoRA or FSDP.

A route that the user names is kept, with a warning if it does not fit. Otherwise the first of these that fits is used:
SOAP, SOAP in BF16, one-sided SOAP in BF16, AdamW in BF16, AdamW over several GPUs (FSDP), LoRA with AdamW. ``memory``
has the estimates.
"""

import logging
import math
import os
import shlex
from collections.abc import Collection
from dataclasses import dataclass, fields, replace

from pluralign.core.distributed import launched_process
from pluralign.core.errors import UsageError
from pluralign.core.options import with_changes
from pluralign.training.memory import BF16_BYTES, FP32_BYTES, Weights, training_memory, weights_of
from pluralign.training.options import FinetuneOptions, FitOptions

logger = logging.getLogger("pluralign")

ROUTE_OPTIONS = ("optimizer", "precision", "lora")
"""Options that decide a route."""
LORA_RANK = FinetuneOptions().lora_rank
OPTIMIZER_NAMES = {"soap": "SOAP", "soap-one-sided": "one-sided SOAP", "adamw": "AdamW"}
FSDP_FLAGS = (
    "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
    "--fsdp_reshard_after_forward", "true", "--fsdp_offload_params", "false", "--fsdp_state_dict_type",
    "FULL_STATE_DICT", "--fsdp_cpu_ram_efficient_loading", "false", "--mixed_precision", "bf16",
)  # fmt: skip
"""Options of ``accelerate launch`` with the settings of configs/accelerate_fsdp.yaml, which pip does not install."""


@dataclass(frozen=True)
class Devices:
    """The devices that a training can use."""

    count: int
    bytes_each: float
    gpu: bool = True
    sharded: bool = False
    """Whether this process was launched with FSDP, which shares one model between all devices."""

    def __str__(self) -> str:
        of_each = f"{self.bytes_each / 1e9:.0f} GB"
        return f"one GPU has {of_each}" if self.gpu else f"this machine has {of_each}"


def visible_devices() -> Devices:
    """Return the GPUs that torch sees with the memory of the smallest one, or this machine's main memory."""
    import torch

    processes = launched_process().count
    sharded = os.environ.get("ACCELERATE_USE_FSDP") == "true"
    if torch.cuda.is_available():
        memory = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        count = len(memory) if processes == 1 else processes if sharded else 1  # else every process has a copy
        return Devices(count, min(memory), sharded=sharded)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else float("inf")
    return Devices(processes if sharded else 1, total / processes, gpu=False, sharded=sharded)


@dataclass(frozen=True)
class Route:
    """One way to train a member."""

    optimizer: str = "soap"
    precision: str = "float32"
    lora: bool = False
    shards: int = 1
    """Number of GPUs that share the model (FSDP)."""

    def __str__(self) -> str:
        where = f" on {self.shards} GPUs (FSDP)" if self.shards > 1 else ""
        way = "LoRA with " if self.lora else ""
        return f"{way}{OPTIMIZER_NAMES[self.optimizer]} in {self.precision}{where}"

    @property
    def flags(self) -> list[str]:
        """Options of ``fit`` for this route."""
        return ["--optimizer", self.optimizer, "--precision", self.precision, *(["--lora"] if self.lora else [])]

    @property
    def launcher(self) -> list[str]:
        """Command that runs ``pluralign`` on this route: itself, or through ``accelerate launch``."""
        if self.shards == 1:
            return ["pluralign"]
        return ["accelerate", "launch", "--num_processes", str(self.shards), *FSDP_FLAGS, "-m", "pluralign"]

    def memory(self, weights: Weights, *, gpu: bool = True, lora_rank: int = LORA_RANK) -> float:
        """Return the estimated bytes on each device."""
        return training_memory(
            weights,
            self.optimizer,
            self.precision,
            lora_rank=lora_rank if self.lora else None,
            frozen_bytes=BF16_BYTES if gpu else FP32_BYTES,
            shards=self.shards,
        )


@dataclass(frozen=True)
class Choice:
    """The route of a training, and why."""

    route: Route
    memory_gb: float | None
    """Estimated memory on each device; None if it was not estimated."""
    fits: bool
    changed: bool
    """Whether it is not the route that the options stand for."""
    reason: str
    """One sentence without a full stop."""


def possible_routes(first: Route, devices: Devices) -> list[Route]:
    """Return the routes on these devices, best first. CPUs train in float32: bfloat16 crashes on some of them.

    Example:
        >>> for route in possible_routes(Route(), Devices(2, 80e9)):
        ...     print(route)
        SOAP in float32
        SOAP in bfloat16
        one-sided SOAP in bfloat16
        AdamW in bfloat16
        AdamW in float32 on 2 GPUs (FSDP)
        LoRA with AdamW in float32
    """
    if devices.sharded:
        return [Route("adamw", shards=devices.count)]
    low = "bfloat16" if devices.gpu else first.precision
    full = [first, replace(first, precision=low), Route("soap-one-sided", low), Route("adamw", low)]
    shards = 2 ** int(math.log2(devices.count))  # must divide the pairs per step, a power of two
    shared = [Route("adamw", shards=shards)] if shards > 1 else []
    return [*dict.fromkeys(full), *shared, Route("adamw", first.precision, lora=True)]


def choose_route(
    weights: Weights, devices: Devices, first: Route, *, named: bool = False, lora_rank: int = LORA_RANK
) -> Choice:
    """Return the first route that fits, or ``first`` if the user named it. Without any that fits: the last one.

    Args:
        weights: of the backbone.
        devices: to train on.
        first: the route of the options or of the recipe.
        named: whether the user named a part of ``first``, which is then kept.
        lora_rank: rank of adapters.

    Example:
        >>> from pluralign.training.memory import LLAMA_3_8B
        >>> choice = choose_route(LLAMA_3_8B.weights, Devices(1, 80e9), Route())
        >>> print(choice.reason)
        one-sided SOAP in bfloat16 needs about 77 GB; SOAP in float32 needs about 166 GB, and one GPU has 80 GB
    """

    def memory(route: Route) -> float:
        return route.memory(weights, gpu=devices.gpu, lora_rank=lora_rank)

    def needs(route: Route) -> str:
        return f"{route} needs about {_gb(memory(route))}"

    routes = possible_routes(first, devices)
    fitting = [route for route in routes if memory(route) <= devices.bytes_each]
    route = first if named else (fitting or routes[-1:])[0]
    size = memory(route)
    fits, changed = size <= devices.bytes_each, route != first
    if fits and not changed:
        reason = f"{needs(route)}, and {devices}"
    elif fits and devices.sharded:
        reason = f"{needs(route)} on each GPU, and {devices}; SOAP needs whole matrices, which FSDP splits"
    elif fits:
        reason = f"{needs(route)}; {needs(first)}, and {devices}"
    else:
        reason = f"{needs(route)}, but {devices}, so training may run out of memory"
        if fitting and named:
            reason += f"; {needs(fitting[0])} ({' '.join(fitting[0].flags)})"
    return Choice(route, size / 1e9, fits, changed, reason)


def _gb(size: float) -> str:
    return f"{size / 1e9:.0f} GB" if size >= 1e10 else f"{size / 1e9:.1f} GB"


def check_launch(choice: Choice, command: str) -> None:
    """Raise UsageError if the route needs several processes and this one is alone; ``command`` launches them."""
    if choice.changed and choice.route.shards > 1 and launched_process().count == 1:
        raise UsageError(f"{choice.reason}: run  {command}  or use --lora.")


def with_fitting_route(
    options: FitOptions, tuning: FinetuneOptions, named: Collection[str] = (), devices: Devices | None = None
) -> tuple[FitOptions, FinetuneOptions]:
    """Return the options of a fine-tuning with a route that fits; the choice is logged.

    Args:
        options: precision of the training.
        tuning: backbone, optimizer and LoRA.
        named: names of options that the user gave, also with their default values.
        devices: to train on (default: those that torch sees).

    Raises:
        UsageError: the route needs several processes, and this process was not launched as one of them.
    """
    weights = weights_of(tuning.backbone) if tuning.backbone is not None else None
    if weights is None:
        return options, tuning
    devices = devices or visible_devices()
    usual = {option.name: option.default for option in (*fields(FitOptions), *fields(FinetuneOptions))}
    given = {"optimizer": tuning.optimizer, "precision": options.precision, "lora": tuning.lora}
    is_named = any(name in named or given[name] != usual[name] for name in ROUTE_OPTIONS)
    shards = devices.count if devices.sharded else 1
    first = Route(
        tuning.optimizer, "float32" if options.precision == "auto" else options.precision, tuning.lora, shards
    )
    choice = choose_route(weights, devices, first, named=is_named, lora_rank=tuning.lora_rank)
    route = choice.route
    check_launch(choice, shlex.join([*route.launcher, "fit", "DATA", "--backbone", str(tuning.backbone), *route.flags]))
    if (choice.changed or not choice.fits) and launched_process().first:
        logger.warning("%s.", choice.reason)
    if not choice.changed:
        return options, tuning
    # Memory is scarce on any other route than the first, and recomputed activations change no result.
    of_tuning = {"optimizer": route.optimizer, "lora": route.lora, "gradient_checkpointing": True}
    return with_changes(options, {"precision": route.precision}), with_changes(tuning, of_tuning)
