"""Options of frozen text features, shared by ``fit`` and ``encode``."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from pluralign.core.errors import DataError, UsageError
from pluralign.core.options import changed_options, check_choices, check_seed, option

# --- Which layers of a transformer model are used as features: the option ``layers``.


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
    return any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or [])


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
    layers, decoder = parse_layers(requested), is_decoder(config)
    depth = next((int(config[name]) for name in _DEPTH_NAMES if isinstance(config.get(name), int)), None)
    if depth is None:
        if layers or (decoder and not own):
            raise DataError("config.json does not give the number of layers", file=model, remedy="use another model")
        return ()
    if depth < 1:
        raise DataError(f"config.json gives {depth} layers", file=model, remedy="copy or download the model again")
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


def layers_text(layers: tuple[int, ...]) -> str:
    """Return the layers as the option spells them.

    Example:
        >>> layers_text((0, 2, 6)), layers_text(())
        ('0,2,6', 'last')
    """
    return ",".join(map(str, layers)) or LAST


Pooling: TypeAlias = Literal["mean", "last"]
Precision: TypeAlias = Literal["float32", "bfloat16", "auto"]
ChosenPrecision: TypeAlias = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class EncodeOptions:
    """How texts are encoded."""

    encoder: str = option("minilm", "minilm, smollm2, hashing, none, a model folder, or a hub id.")
    layers: str = option(
        "auto",
        "Layers to pool and concatenate, for instance 0,2,4,6 (0: embeddings). auto: four evenly spaced "
        "layers of an encoder, or the layer at two thirds of a decoder. last: the model's own vector.",
    )
    pooling: Pooling = option("mean", "Pooling of layers: mean over tokens, or last token.")
    precision: Precision = option("float32", "Precision of the encoder. auto: bfloat16 on GPUs that support it.")
    surface: bool = option(True, "Append surface features: lengths, punctuation, structure.")

    def __post_init__(self) -> None:
        parse_layers(self.layers)
        check_choices(self, {"pooling": Pooling, "precision": Precision})


# --- Options of sampling from a language model, in this process or behind a server.


MAX_CONCURRENCY = 256
MAX_TIMEOUT = 24 * 3600
"""Seconds."""
SMALL_MODEL = 1_000_000_000
"""A local model with fewer parameters is small: at a high temperature it writes nonsense."""


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are sampled from a language model."""

    temperature: float | None = option(
        None,
        "Sampling temperature; higher values give more diverse responses (default: 0.7 for local models "
        "below 1B parameters, else 1.2).",
    )
    top_p: float | None = option(
        None,
        "Sample from the likeliest tokens with this total probability (default: 0.9 where the default "
        "temperature is 0.7, else 1: all tokens).",
    )
    max_new_tokens: int = option(256, "Maximum length of a response, in tokens.")
    seed: int = option(0, "Random seed; each prompt derives its own seed from it.")

    def __post_init__(self) -> None:
        if self.temperature is not None and not 0 < self.temperature <= 10:
            raise UsageError(f"temperature must be above 0 and at most 10, not {self.temperature:g}.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p:g}.")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")
        check_seed(self.seed)

    def with_defaults(self, *, small: bool) -> "SamplingOptions":
        """Return the options with a temperature and a ``top_p``; options that were given stay as they are.

        Args:
            small: whether the model is local and has fewer than ``SMALL_MODEL`` parameters.

        Example:
            >>> SamplingOptions().with_defaults(small=True)
            SamplingOptions(temperature=0.7, top_p=0.9, max_new_tokens=256, seed=0)
            >>> SamplingOptions(temperature=1.5).with_defaults(small=True)
            SamplingOptions(temperature=1.5, top_p=1.0, max_new_tokens=256, seed=0)
        """
        careful = small and self.temperature is None
        defaults: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9} if careful else {"temperature": 1.2, "top_p": 1.0}
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})


@dataclass(frozen=True)
class RemoteOptions:
    """Which server to sample from, and its limits."""

    base_url: str = option(
        "", "Sample from this server of OpenAI's chat completions API, such as http://localhost:8000/v1."
    )
    api_key_env: str = option("OPENAI_API_KEY", "Server: environment variable with the API key; it may be unset.")
    concurrency: int = option(8, "Server: maximum number of concurrent requests.")
    timeout: float = option(300.0, "Server: timeout per response, in seconds.")

    def __post_init__(self) -> None:
        if not self.base_url and (changed := changed_options(self)):
            raise UsageError(f"--{changed[0].replace('_', '-')} requires --base-url.")
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise UsageError(f"concurrency must be from 1 to {MAX_CONCURRENCY}, not {self.concurrency}.")
        if not 0 < self.timeout <= MAX_TIMEOUT:
            raise UsageError(f"timeout must be above 0 and at most {MAX_TIMEOUT:,} seconds, not {self.timeout:g}.")
        if self.base_url:
            object.__setattr__(self, "base_url", _checked_url(self.base_url))


def _checked_url(url: str) -> str:
    """Return the URL without a slash at its end. It is stored with results, so it must not contain secrets."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https") or not url.isprintable() or " " in url:
        raise UsageError("the base URL must look like http://localhost:8000/v1 or https://api.example.com/v1.")
    if parts.username is not None or parts.query or parts.fragment:
        remedy = "put the API key into the environment variable that --api-key-env names"
        raise UsageError(f"the base URL must not contain a password, a query (?) or a fragment (#); {remedy}.")
    return url.rstrip("/")
