"""Which way to fine-tune fits the memory of the devices: optimizer, precision, LoRA or FSDP.

A route that the user names is kept, with a warning if it does not fit. Otherwise the first of these that fits is used:
SOAP, SOAP in BF16, one-sided SOAP in BF16, AdamW in BF16, AdamW over several GPUs (FSDP), LoRA with AdamW. ``memory``
has the estimates.
"""

import logging
import math
import os
import shlex
from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

from pluralign.core.errors import PluralignError, UsageError
from pluralign.core.hub import HUB_ID, hub_folder
from pluralign.core.options import with_changes
from pluralign.core.processes import launched_process
from pluralign.learning.options import FinetuneOptions, FitOptions
from pluralign.text.loading import model_folder, quiet_transformers

# --- Estimated memory of fine-tuning: weights, gradients, optimizer state and activations.


Shape: TypeAlias = tuple[int, ...]

BF16_BYTES, FP32_BYTES = 2, 4
NUMBER_BYTES = {"float32": FP32_BYTES, "bfloat16": BF16_BYTES}
"""Bytes of each trained weight, gradient and optimizer state. The head is always in FP32; it is too small to count."""
ACTIVATION_BYTES = 6e9
"""Memory for the activations of Llama-3-8B, with gradient checkpointing and a micro-batch of a few texts."""
SOAP_LARGEST_SIDE = 10_000
"""Longer sides of a matrix have no preconditioner: the default of SOAP in pytorch-optimizer."""


@dataclass(frozen=True)
class Weights:
    """The weights of a reward model: their shapes, and the sizes that other estimates need."""

    shapes: tuple[Shape, ...]
    """Of all weights, the one-node head included."""
    linear: tuple[Shape, ...]
    """(rows, columns) of the matrices that LoRA adapts: all linear layers but the head."""
    layers: int
    hidden: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """Number of parameters of the reward model."""
        return sum(map(math.prod, self.shapes))

    @property
    def language_model_parameters(self) -> int:
        """Number of parameters of the language model, with a token head separate from the embeddings."""
        return self.parameters + (self.vocabulary - 1) * self.hidden

    @property
    def activation_bytes(self) -> float:
        """Memory for activations: proportional to layers × hidden size, which is what checkpointing stores."""
        return ACTIVATION_BYTES * self.layers * self.hidden / (LLAMA_3_8B.layers * LLAMA_3_8B.hidden)


@dataclass(frozen=True)
class Architecture:
    """The sizes of a Llama-like decoder, or of a BERT-like encoder."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_value_heads: int
    gated: bool = True
    """Whether the feed-forward layer has a gate, a third matrix: true for Llama, false for BERT."""

    @property
    def linear_layers(self) -> list[tuple[int, int]]:
        """(rows, columns) of the matrices of one layer: seven, or six without a gate."""
        kv = self.hidden * self.key_value_heads // self.heads
        attention = [(self.hidden, self.hidden), (kv, self.hidden), (kv, self.hidden), (self.hidden, self.hidden)]
        wide = [(self.intermediate, self.hidden)] * (2 if self.gated else 1)
        return [*attention, *wide, (self.hidden, self.intermediate)]

    @property
    def weights(self) -> Weights:
        """The weights of a decoder with a one-node head: embeddings, layers, norms, head.

        Example:
            >>> LLAMA_3_8B.weights.parameters, LLAMA_3_8B.weights.language_model_parameters
            (7504928768, 8030261248)
        """
        linear = tuple(self.linear_layers * self.layers)
        norms = ((self.hidden,),) * (2 * self.layers + 1)
        shapes = ((self.vocabulary, self.hidden), *linear, (1, self.hidden), *norms)
        return Weights(shapes, linear, self.layers, self.hidden, self.vocabulary)


LLAMA_3_8B = Architecture(128_256, 4096, 14_336, 32, 32, 8)


def weights_of(name: str) -> Weights | None:
    """Return the weights of a model that transformers can load as a reward model; None if it cannot.

    Only the configuration is read; of a hub id, only ``config.json`` is downloaded.

    Args:
        name: a model folder, a hub id, ``smollm2`` or ``minilm``.
    """
    try:
        import torch
        import transformers

        remote = HUB_ID.fullmatch(name) and not Path(name).is_dir()
        folder = hub_folder(name, "model", only=["config.json"], remedy="") if remote else model_folder(name)
        with quiet_transformers(), torch.device("meta"):
            config: Any = transformers.AutoConfig.from_pretrained(folder, num_labels=1)
            empty: Any = transformers.AutoModelForSequenceClassification
            model = empty.from_config(config)
    except (ImportError, OSError, ValueError, KeyError, PluralignError):  # fit gives the reason
        return None
    sizes = config.get_text_config()
    matrices = [
        tuple(layer.weight.shape)
        for path, layer in model.named_modules()
        if isinstance(layer, torch.nn.Linear | transformers.pytorch_utils.Conv1D)
        and path.split(".")[0] == model.base_model_prefix
    ]
    return Weights(
        shapes=tuple(tuple(weight.shape) for weight in model.parameters()),
        linear=tuple(matrices),
        layers=sizes.num_hidden_layers,
        hidden=sizes.hidden_size,
        vocabulary=sizes.vocab_size,
    )


def lora_shapes(weights: Weights, rank: int) -> list[Shape]:
    """Return the shapes that LoRA trains: two factors per linear layer, and the head."""
    factors = [shape for rows, columns in weights.linear for shape in ((rank, columns), (rows, rank))]
    return [*factors, (1, weights.hidden)]


def trained_shapes(weights: Weights, lora_rank: int | None = None) -> list[Shape]:
    """Return the shapes of the weights that one member trains: all, or those of an adapter of the given rank."""
    return list(weights.shapes) if lora_rank is None else lora_shapes(weights, lora_rank)


def trained_parameters(weights: Weights, lora_rank: int | None = None) -> int:
    """Return the parameters that one member trains: all, or with LoRA Σ r (rows + columns), and the head.

    Example:
        >>> trained_parameters(LLAMA_3_8B.weights, 16)
        41947136
    """
    return sum(map(math.prod, trained_shapes(weights, lora_rank)))


def preconditioned_sides(shape: Shape, optimizer: str = "soap") -> list[int]:
    """Return the sides of a weight that an optimizer preconditions.

    ``soap`` preconditions every side of up to 10,000, ``soap-one-sided`` the shortest side of them, ``adamw`` none.
    Vectors, such as norms, are not preconditioned.

    Example:
        >>> preconditioned_sides((128_256, 4096)), preconditioned_sides((1024, 4096), "soap-one-sided")
        ([4096], [1024])
    """
    sides = [side for side in shape if side <= SOAP_LARGEST_SIDE] if len(shape) > 1 else []
    return {"soap": sides, "soap-one-sided": sorted(sides)[:1]}.get(optimizer, [])


def soap_bases(shapes: Iterable[Shape], optimizer: str = "soap") -> int:
    """Return the size of SOAP's state beside two moments: d² covariances and d² eigenvectors per side d.

    Example:
        >>> soap_bases([(3, 10_001), (4, 5)]), soap_bases([(3, 10_001), (4, 5)], "soap-one-sided")
        (100, 50)
    """
    return sum(2 * side**2 for shape in shapes for side in preconditioned_sides(shape, optimizer))


def trained_numbers(weights: Weights, optimizer: str = "soap", lora_rank: int | None = None) -> int:
    """Return the numbers in a training checkpoint: trained weights, two moments of them, and the bases of SOAP.

    Example:
        >>> [round(4 * trained_numbers(LLAMA_3_8B.weights, optimizer) / 1e9) for optimizer in ("soap", "adamw")]
        [130, 90]
    """
    bases = soap_bases(trained_shapes(weights, lora_rank), optimizer)
    return 3 * trained_parameters(weights, lora_rank) + bases


def training_memory(
    weights: Weights,
    optimizer: str = "soap",
    precision: str = "float32",
    *,
    lora_rank: int | None = None,
    frozen_bytes: int = BF16_BYTES,
    shards: int = 1,
) -> float:
    """Return the memory in bytes to train a member on one device: weights, gradients, optimizer state, activations.

    Args:
        weights: of the backbone.
        optimizer: ``soap``, ``soap-one-sided`` or ``adamw``.
        precision: of trained weights, gradients and state: ``float32`` or ``bfloat16``.
        lora_rank: rank of an adapter; only the adapter has gradients and state then.
        frozen_bytes: bytes per weight of the model under an adapter: 2 on a GPU, 4 on a CPU.
        shards: number of devices that share all but the activations (FSDP).

    Example:
        >>> llama, optimizers = LLAMA_3_8B.weights, ("soap", "soap-one-sided", "adamw")
        >>> [round(training_memory(llama, name) / 1e9) for name in optimizers]
        [166, 148, 126]
        >>> [round(training_memory(llama, name, "bfloat16") / 1e9) for name in optimizers]
        [86, 77, 66]
        >>> round(training_memory(llama, "adamw", lora_rank=16) / 1e9, 1)
        21.7
    """
    frozen = 0 if lora_rank is None else frozen_bytes * weights.parameters
    trained = trained_numbers(weights, optimizer, lora_rank) + trained_parameters(weights, lora_rank)
    return (frozen + NUMBER_BYTES[precision] * trained) / shards + weights.activation_bytes


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
        >>> from pluralign.learning.routes import LLAMA_3_8B
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
