"""Cost estimates of encoding, fine-tuning and sampling: tokens, operations, hours and disk space.

The estimates follow from published sizes and stated assumptions; nothing is measured. The operations of attention are
left out except in encoding: at 500 tokens per text they are under 2 % of those of an 8B model. The formulas are in
docs/how-to/reproduce.md and docs/how-to/scale.md; ``learning.routes`` estimates the memory.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pluralign.learning.routes import BF16_BYTES, FP32_BYTES, Architecture, Shape, preconditioned_sides

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
"""Memory in bytes."""
SOAP_EVERY = 10
"""Steps between two updates of the eigenbases of SOAP: the default of pytorch-optimizer."""
MINILM = Architecture(30_522, 384, 1536, 6, 12, 12, gated=False)
"""all-MiniLM-L6-v2, from its config.json."""


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
        >>> from pluralign.learning.routes import LLAMA_3_8B
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


def soap_flops(shapes: Iterable[Shape], steps: int, optimizer: str = "soap") -> float:
    """Return the operations that SOAP adds to training.

    A preconditioned side of length d of a weight with s entries costs 4 · 2 s d per step (three projections and one
    update of the covariance), and a product and a QR decomposition, (2 + 8/3) d³, every ten steps.

    Example:
        >>> from pluralign.learning.routes import LLAMA_3_8B
        >>> [f"{soap_flops(LLAMA_3_8B.weights.shapes, 1, name):.2e}" for name in ("soap", "soap-one-sided", "adamw")]
        ['2.93e+14', '2.45e+14', '0.00e+00']

    Reference: Vyas et al., "SOAP" (2024), Algorithm 3; pytorch-optimizer 4.1, ``SOAP.step``.
    """
    sides = [(math.prod(shape), d) for shape in shapes for d in preconditioned_sides(shape, optimizer)]
    return steps * sum(8.0 * entries * d + (14.0 / 3.0) * d**3 / SOAP_EVERY for entries, d in sides)


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
