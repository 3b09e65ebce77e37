"""Which layers of a transformer model are used as features: the option ``layers``.

One forward pass computes every layer, so several layers cost no more than the last one. Layer 0 is the embeddings,
layer n the output of the n-th transformer block. The pooled states of the layers are concatenated.
"""

from collections.abc import Mapping
from typing import Any

from pluralign.core.errors import DataError, UsageError

AUTO = "auto"
LAST = "last"
ENCODER_LAYERS = 4
"""Layers of an encoder that ``auto`` uses: evenly spaced from the embeddings to the last (docs/log.md)."""
MIDDLE = 2 / 3
"""Relative depth of the layer that ``auto`` uses of a decoder, and an attention pooling of an encoder: middle layers
work better than the last (docs/log.md)."""
_DEPTH_NAMES = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
"""Names of the number of layers in ``config.json``; most models have the first one."""


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the layers of a comma-separated list, in ascending order; empty for ``auto`` and ``last``.

    Example:
        >>> parse_layers("6,0,2"), parse_layers("auto")
        ((0, 2, 6), ())
        >>> parse_layers("-1")
        Traceback (most recent call last):
        pluralign.core.errors.UsageError: layers must be auto, last, or numbers such as 0,2,4,6, not '-1'.
    """
    if text in (AUTO, LAST):
        return ()
    numbers = [number.strip() for number in str(text).split(",")]
    if not all(number.isdecimal() for number in numbers):
        raise UsageError(f"layers must be auto, last, or numbers such as 0,2,4,6, not {text!r}.")
    return tuple(sorted({int(number) for number in numbers}))


def is_decoder(config: Mapping[str, Any]) -> bool:
    """Return whether ``config.json`` describes a decoder."""
    return any(name.endswith("ForCausalLM") for name in config.get("architectures") or [])


def model_depth(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers in ``config.json``, or None if it has none.

    Example:
        >>> model_depth({"n_layer": 12}), model_depth({})
        (12, None)
    """
    return next((int(config[name]) for name in _DEPTH_NAMES if isinstance(config.get(name), int)), None)


def choose_layers(requested: str, config: Mapping[str, Any], model: str, *, own: bool = False) -> tuple[int, ...]:
    """Return the layers that the option means for a model. Empty means the model's own sentence vector.

    ``auto`` is four evenly spaced layers of an encoder, and the layer at two thirds of a decoder. ``last`` is the last
    layer of a decoder, and an encoder's own vector, with its own pooling and normalisation. A decoder that is a
    sentence encoder is used as it is in both cases.

    Args:
        requested: the option.
        config: contents of the model's ``config.json``.
        model: name of the model, for error messages.
        own: whether the folder is one of sentence-transformers, which defines a sentence vector.

    Example:
        >>> choose_layers("auto", {"num_hidden_layers": 6}, "MiniLM")
        (0, 2, 4, 6)
        >>> choose_layers("auto", {"num_hidden_layers": 30, "architectures": ["LlamaForCausalLM"]}, "SmolLM2")
        (20,)
    """
    layers, depth, decoder = parse_layers(requested), model_depth(config), is_decoder(config)
    if depth is None:
        if layers or (decoder and not own):
            raise DataError("config.json does not give the number of layers", file=model, remedy="use another model")
        return ()
    if layers and layers[-1] > depth:
        raise UsageError(f"layers must be between 0 and {depth} for {model}, not {layers[-1]}.")
    if layers or (decoder and own) or (requested == LAST and not decoder):
        return layers
    if decoder:
        return (round(depth * MIDDLE) if requested == AUTO else depth,)
    return tuple(sorted({round(depth * step / (ENCODER_LAYERS - 1)) for step in range(ENCODER_LAYERS)}))


def middle_layer(layers: tuple[int, ...]) -> int:
    """Return the layer that is closest to two thirds of the highest one.

    Example:
        >>> middle_layer((0, 2, 4, 6))
        4
    """
    return min(layers, key=lambda layer: abs(layer - MIDDLE * layers[-1]))


def layers_from_layer(layer: int | None, config: Mapping[str, Any], model: str, *, own: bool) -> tuple[int, ...]:
    """Return the layers of features saved with the earlier option ``layer``; other arguments as in ``choose_layers``.

    A decoder was cut after ``layer`` layers, by default after two thirds. Other models gave their own vector.
    """
    if own or not is_decoder(config):
        return ()
    return choose_layers(AUTO if layer is None else str(layer), config, model)


def layers_text(layers: tuple[int, ...]) -> str:
    """Return the layers as the option spells them.

    Example:
        >>> layers_text((0, 2, 6)), layers_text(())
        ('0,2,6', 'last')
    """
    return ",".join(map(str, layers)) or LAST
