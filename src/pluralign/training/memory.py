"""Estimated memory of fine-tuning: weights, gradients, optimizer state and activations.

The estimates follow from the shapes of the weights. The shapes of Llama-like models are computed from their sizes;
those of any other model are read from an empty copy of it, without downloading or allocating weights. The formulas are
in docs/how-to/reproduce.md.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pluralign.core.errors import PluralignError
from pluralign.core.hub import HUB_ID, hub_folder
from pluralign.features.finetuned import backbone_folder
from pluralign.models.loading import quiet_transformers

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
        folder = hub_folder(name, "model", only=["config.json"], remedy="") if remote else backbone_folder(name)
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
