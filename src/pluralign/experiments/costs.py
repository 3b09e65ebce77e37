"""Cost estimates of encoding, fine-tuning and sampling: tokens, operations, hours, memory and disk space.

The estimates follow from published sizes and stated assumptions; nothing is measured. The operations of attention are
left out except in encoding: at 500 tokens per text they are under 2 % of those of an 8B model. The formulas are in
docs/how-to/reproduce.md and docs/how-to/scale.md.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

H100_FLOPS = 989.4e12
"""Operations per second of one H100 SXM in dense BF16, from its data sheet."""
H100_FP32_FLOPS = 66.9e12
"""Operations per second in FP32, which its tensor cores do not support."""
H100_BANDWIDTH = 3.35e12
"""Memory bandwidth in bytes per second."""
TRAINING_UTILISATION = 0.35
"""Share of the peak reached in training and scoring. It includes the recomputation of activations."""
NARROW_UTILISATION = 0.1
"""Share of the BF16 peak assumed for a model as narrow as MiniLM, limited by memory bandwidth: a product with a
384 × 384 matrix has at most 192 operations per byte moved, and an H100 needs 295 to be compute-bound."""
DECODING_UTILISATION = 0.2
"""Share of the bandwidth reached by the sampling loop of transformers, which has Python overhead at every token."""
H100_MEMORY = 80e9
BF16_BYTES, FP32_BYTES = 2, 4
ACTIVATION_BYTES = 6e9
"""Memory for activations, with gradient checkpointing and a micro-batch of a few texts."""
SOAP_LARGEST_SIDE = 10_000
"""Longer sides of a matrix have no preconditioner: the default of SOAP in pytorch-optimizer."""
SOAP_EVERY = 10
"""Steps between two updates of the eigenbases of SOAP: the default of pytorch-optimizer."""


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
    def matrices(self) -> list[tuple[int, int]]:
        """(rows, columns) of every matrix of a reward model: embeddings, layers, the one-node head."""
        return [(self.vocabulary, self.hidden), *self.linear_layers * self.layers, (1, self.hidden)]


LLAMA_3_8B = Architecture(128_256, 4096, 14_336, 32, 32, 8)
MINILM = Architecture(30_522, 384, 1536, 6, 12, 12, gated=False)
"""all-MiniLM-L6-v2, from its config.json."""


def reward_parameters(architecture: Architecture) -> int:
    """Return the parameters of a reward model, which has a one-node head instead of the token head.

    Example:
        >>> reward_parameters(LLAMA_3_8B)
        7504928768
    """
    norms = (2 * architecture.layers + 1) * architecture.hidden
    return sum(rows * columns for rows, columns in architecture.matrices) + norms


def language_model_parameters(architecture: Architecture) -> int:
    """Return the parameters of the language model, with a token head separate from the embeddings.

    Example:
        >>> language_model_parameters(LLAMA_3_8B)
        8030261248
    """
    return reward_parameters(architecture) + (architecture.vocabulary - 1) * architecture.hidden


def lora_matrices(architecture: Architecture, rank: int) -> list[tuple[int, int]]:
    """Return (rows, columns) of the matrices that LoRA trains: two factors per matrix of every layer, and the head."""
    factors = [pair for rows, columns in architecture.linear_layers for pair in ((rank, columns), (rows, rank))]
    return [*factors * architecture.layers, (1, architecture.hidden)]


def lora_parameters(architecture: Architecture, rank: int) -> int:
    """Return the parameters that LoRA trains: Σ r (rows + columns) over the matrices of all layers, and the head.

    Example:
        >>> lora_parameters(LLAMA_3_8B, 16)
        41947136
    """
    return sum(rows * columns for rows, columns in lora_matrices(architecture, rank))


def training_flops(parameters: int, tokens: float, *, lora: bool = False) -> float:
    """Return the operations of one epoch: 6 N T, or 4 N T with LoRA, which needs no gradient of the frozen weights.

    Example:
        >>> training_flops(7_504_928_768, 1e6)
        4.5029572608e+16

    Reference: Kaplan et al., "Scaling laws for neural language models" (2020), Section 2.1.
    """
    return (4.0 if lora else 6.0) * parameters * tokens


def scoring_flops(parameters: int, tokens: float) -> float:
    """Return the operations of one forward pass: 2 N T.

    Example:
        >>> scoring_flops(1_000, 10)
        20000.0
    """
    return 2.0 * parameters * tokens


def encoding_flops(architecture: Architecture, tokens: float, length: float, layers: int | None = None) -> float:
    """Return the operations to encode texts of one length with the lowest layers: T Σ_layers (2 N_layer + 4 h s).

    The second term is attention: the products of a token with s keys and s values of h numbers. It is a tenth of the
    operations of a narrow model. Embeddings are looked up and cost nothing.

    Args:
        architecture: sizes of the model.
        tokens: T, tokens of all texts.
        length: s, tokens per text.
        layers: number of layers that are computed (default: all).

    Example:
        >>> round(encoding_flops(MINILM, 1, 256) / 1e6, 1), round(encoding_flops(LLAMA_3_8B, 1, 256, 21) / 1e9, 1)
        (23.6, 9.2)
    """
    kept = architecture.layers if layers is None else layers
    matrices = sum(rows * columns for rows, columns in architecture.linear_layers)
    return tokens * kept * (2.0 * matrices + 4.0 * architecture.hidden * length)


@dataclass(frozen=True)
class EncodingCost:
    """Cost of encoding or scoring the texts of a number of pairs."""

    pairs: int
    texts: float
    tokens: float
    flops: float
    gpu_hours: float
    stored_bytes: float
    """Size of the vectors on disk, before compression."""


def encoding_cost(
    pairs: int,
    architecture: Architecture,
    *,
    texts_per_pair: float,
    tokens_per_text: float,
    layers: int | None = None,
    surface: int = 0,
    peak: float = H100_FLOPS,
    utilisation: float = TRAINING_UTILISATION,
) -> EncodingCost:
    """Estimate the cost of encoding the distinct texts of ``pairs``, all with the mean length.

    Example:
        >>> cost = encoding_cost(1_000_000, MINILM, texts_per_pair=2, tokens_per_text=256)
        >>> f"{cost.tokens:.1e} tokens, {cost.flops:.1e} operations, {cost.stored_bytes / 1e9:.1f} GB"
        '5.1e+08 tokens, 1.2e+16 operations, 3.1 GB'
    """
    texts = pairs * texts_per_pair
    tokens = texts * tokens_per_text
    flops = encoding_flops(architecture, tokens, tokens_per_text, layers)
    stored = texts * FP32_BYTES * (architecture.hidden + surface)
    return EncodingCost(pairs, texts, tokens, flops, gpu_hours(flops, peak, utilisation), stored)


def soap_flops(matrices: Iterable[tuple[int, int]], steps: int) -> float:
    """Return the operations that SOAP adds to training.

    A side of length d of a matrix with s entries costs 4 · 2 s d per step (three projections and one update of the
    covariance), and a product and a QR decomposition, (2 + 8/3) d³, every ten steps.

    Example:
        >>> f"{soap_flops(LLAMA_3_8B.matrices, 1):.2e}"
        '2.93e+14'

    Reference: Vyas et al., "SOAP" (2024), Algorithm 3; pytorch-optimizer 4.1, ``SOAP.step``.
    """
    sides = [(rows * columns, d) for rows, columns in matrices for d in _preconditioned(rows, columns)]
    return steps * sum(8.0 * entries * d + (14.0 / 3.0) * d**3 / SOAP_EVERY for entries, d in sides)


def soap_bases(matrices: Iterable[tuple[int, int]]) -> int:
    """Return the size of SOAP's state beside two moments: d² covariances and d² eigenvectors per short side d.

    Example:
        >>> soap_bases([(3, 10_001), (4, 5)])
        100
    """
    return sum(2 * d * d for rows, columns in matrices for d in _preconditioned(rows, columns))


def _preconditioned(rows: int, columns: int) -> list[int]:
    return [side for side in (rows, columns) if side <= SOAP_LARGEST_SIDE]


def gpu_hours(flops: float, peak: float = H100_FLOPS, utilisation: float = TRAINING_UTILISATION) -> float:
    """Return the hours on one H100 that reaches a given share of its peak.

    Example:
        >>> round(gpu_hours(H100_FLOPS * 0.35 * 3600), 9)
        1.0
    """
    return flops / (peak * utilisation) / 3600


def decoding_hours(parameters: int, prompts: int, samples: int, tokens: int, at_once: int) -> float:
    """Return the hours to sample on one H100, where each token of a batch reads all weights once.

      prompts · ceil(samples / at_once) · tokens · (2 N bytes) / (bandwidth · utilisation)

    Example:
        >>> round(decoding_hours(8_030_261_248, 50, 100, 256, 32), 3)
        0.341
    """
    passes = prompts * math.ceil(samples / at_once) * tokens
    return passes * BF16_BYTES * parameters / (H100_BANDWIDTH * DECODING_UTILISATION) / 3600


def training_memory(
    architecture: Architecture, optimizer: str = "soap", *, lora_rank: int | None = None, number_bytes: int = FP32_BYTES
) -> float:
    """Return the GPU memory in bytes to train a member: weights, gradients, optimizer state and activations.

    Args:
        architecture: sizes of the backbone.
        optimizer: ``soap`` or ``adamw``, which stores two moments only.
        lora_rank: rank of an adapter; only the adapter has gradients and moments then.
        number_bytes: bytes per number of trained weights and state: 4 in FP32, as in ``fit``, or 2 in BF16.

    Example:
        >>> [round(training_memory(LLAMA_3_8B, number_bytes=size) / 1e9) for size in (4, 2)]
        [166, 86]
        >>> round(training_memory(LLAMA_3_8B, "adamw", lora_rank=16) / 1e9, 1)
        21.7
    """
    frozen = 0 if lora_rank is None else BF16_BYTES * reward_parameters(architecture)
    trained = trained_numbers(architecture, optimizer, lora_rank) + trained_parameters(architecture, lora_rank)
    return frozen + number_bytes * trained + ACTIVATION_BYTES


def trained_parameters(architecture: Architecture, lora_rank: int | None = None) -> int:
    """Return the parameters that one member trains: all, or those of an adapter of the given rank."""
    return reward_parameters(architecture) if lora_rank is None else lora_parameters(architecture, lora_rank)


def trained_numbers(architecture: Architecture, optimizer: str = "soap", lora_rank: int | None = None) -> int:
    """Return the numbers in a training checkpoint: trained weights, two moments of them, and the bases of SOAP.

    Example:
        >>> [round(4 * trained_numbers(LLAMA_3_8B, optimizer) / 1e9) for optimizer in ("soap", "adamw")]
        [130, 90]
    """
    matrices = architecture.matrices if lora_rank is None else lora_matrices(architecture, lora_rank)
    bases = soap_bases(matrices) if optimizer == "soap" else 0
    return 3 * trained_parameters(architecture, lora_rank) + bases
