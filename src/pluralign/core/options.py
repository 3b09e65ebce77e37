"""Every dial with its default and its help, once for Python and the command line.

Apart from the functions they steer, because ``pluralign --help`` shows them without importing numpy or torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, TypeVar, get_args
from urllib.parse import urlsplit

from pluralign.core.errors import UsageError, did_you_mean

TieRule: TypeAlias = Literal["drop", "half"]
Repeats: TypeAlias = Literal["count", "first"]
Variant: TypeAlias = Literal["printed", "symmetric", "weighted"]
Loss: TypeAlias = Literal["mse", "bce"]
Method: TypeAlias = Literal["joint", "stagewise"]
Level: TypeAlias = Literal["vote", "policy"]
Target: TypeAlias = Literal["auto", "teacher", "votes"]
MemberKind: TypeAlias = Literal["linear", "mlp"]
Pooling: TypeAlias = Literal["mean", "last"]
Precision: TypeAlias = Literal["float32", "bfloat16", "auto"]
Optimizer: TypeAlias = Literal["soap", "adamw"]
PolicyMethod: TypeAlias = Literal["dpo", "grpo"]
Engine: TypeAlias = Literal["local", "ray"]
MAX_MEMBERS = 256
MAX_CONCURRENCY = 256
MAX_TIMEOUT = 24 * 3600
MAX_LORA_RANK = 512
TIE_RULES: tuple[TieRule, ...] = ("drop", "half")


@dataclass(frozen=True)
class LoadOptions:
    """How votes are read."""

    ties: TieRule = field(
        default="drop", metadata={"help": "Drop ties as the paper does, or count each as half a vote for both sides."}
    )
    min_votes: int | None = field(
        default=None,
        metadata={
            "help": "Least votes a pair must have; unless given 2, or 1 for chosen/rejected rows and most known sets."
        },
    )
    repeats: Repeats = field(
        default="count", metadata={"help": "Count every vote, or only an annotator's first on a pair."}
    )
    skip_bad: bool = field(
        default=False, metadata={"help": "Drop rows that cannot be used, and say how many of which kind."}
    )
    rename: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"help": "Read a column under another name: --rename prompt=question. Repeatable."},
    )


@dataclass(frozen=True)
class FitOptions:
    """How an ensemble is learned."""

    k: int | str = field(default=8, metadata={"help": "Members of the ensemble, or auto: the fewest that do as well."})
    method: Method = field(
        default="joint", metadata={"help": "All members together, or one after the other (the paper)."}
    )
    variant: Variant = field(default="symmetric", metadata={"help": "Stagewise: the loss of each stage."})
    loss: Loss = field(default="mse", metadata={"help": "Stagewise: squared error or cross-entropy."})
    level: Level = field(default="vote", metadata={"help": "What is optimised: shares of hard votes, or of policies."})
    target: Target = field(
        default="auto", metadata={"help": "Joint: learn from a teacher, the raw votes, or what validates better."}
    )
    members: MemberKind = field(
        default="linear", metadata={"help": "Rewards linear in the features, or a small network."}
    )
    max_disagreement: float = field(
        default=0.5, metadata={"help": "No member may disagree with people more than this; 1 sets no bound."}
    )
    encoder: str = field(
        default="minilm", metadata={"help": "minilm, smollm2, hashing, none, a model folder, or a hub id."}
    )
    layer: int | None = field(
        default=None, metadata={"help": "Layers of a decoder that are kept: two thirds unless given."}
    )
    pooling: Pooling = field(default="mean", metadata={"help": "Mean over a decoder's tokens, or the last one."})
    precision: Precision = field(
        default="float32", metadata={"help": "The encoder's; auto takes bfloat16 where it is faster and agrees."}
    )
    surface: bool = field(default=True, metadata={"help": "Append surface features: lengths, punctuation, structure."})
    features: str | None = field(
        default=None, metadata={"help": "Folder that pluralign encode wrote: read from disk as it is used."}
    )
    test_fraction: float = field(
        default=0.1, metadata={"help": "Share of prompts held out where no official split is."}
    )
    keep_held_out: bool = field(
        default=True, metadata={"help": "Keep the held-out votes and texts in the folder, for report and the like."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the split and of everything random."})

    def __post_init__(self) -> None:
        if isinstance(self.k, str) and self.k.isdecimal():
            object.__setattr__(self, "k", int(self.k))
        if self.k != "auto" and not (isinstance(self.k, int) and 1 <= self.k <= MAX_MEMBERS):
            raise UsageError(f"k must be a whole number from 1 to {MAX_MEMBERS}, or auto, not {self.k!r}.")
        if self.seed < 0:
            raise UsageError(f"seed must not be negative, but it is {self.seed}.")
        if not 0 < self.max_disagreement <= 1:
            raise UsageError(f"max_disagreement must be above 0 and at most 1, not {self.max_disagreement}.")
        if self.method == "stagewise" and self.level == "policy":
            raise UsageError(
                "stagewise members are fitted for votes; use --method joint for --level policy "
                "(the policy-level reading of a stagewise ensemble is reported all the same)."
            )
        for dial in fields(self):
            allowed = get_args(_CHOICES.get(dial.name))
            if allowed and getattr(self, dial.name) not in allowed:
                came = str(getattr(self, dial.name))
                raise UsageError(f"{dial.name} cannot be {came!r}; {did_you_mean(came, allowed)}.")


_CHOICES = {
    "method": Method, "variant": Variant, "loss": Loss, "level": Level, "target": Target, "members": MemberKind,
    "pooling": Pooling, "precision": Precision,
}  # fmt: skip


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are sampled from a language model."""

    temperature: float = field(
        default=1.2, metadata={"help": "Above 1 responses differ more than the model was trained to make them."}
    )
    top_p: float = field(
        default=1.0, metadata={"help": "Sample from the likeliest tokens that make up this share; 1 leaves none out."}
    )
    max_new_tokens: int = field(default=256, metadata={"help": "Longest response, in tokens."})
    seed: int = field(default=0, metadata={"help": "Seed of everything random; each prompt has its own from it."})

    def __post_init__(self) -> None:
        if not 0 < self.temperature <= 10:
            raise UsageError(f"temperature must be above 0 and at most 10, not {self.temperature:g}.")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must be above 0 and at most 1, not {self.top_p:g}.")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")
        if self.seed < 0:
            raise UsageError(f"seed must not be negative, but it is {self.seed}.")


@dataclass(frozen=True)
class RemoteOptions:
    """Which server's model is sampled from, and how patiently."""

    base_url: str = field(
        default="",
        metadata={"help": "Sample from this server, which speaks OpenAI's chat completions: http://localhost:8000/v1."},
    )
    api_key_env: str = field(
        default="OPENAI_API_KEY",
        metadata={"help": "Server: environment variable with the key that is sent to it; it may be unset."},
    )
    concurrency: int = field(default=8, metadata={"help": "Server: prompts asked at the same time."})
    timeout: float = field(default=300.0, metadata={"help": "Server: seconds that an answer may take."})

    def __post_init__(self) -> None:
        if not self.base_url and (changed := changed_options(self)):
            raise UsageError(f"{changed[0]} is about a server: name one with --base-url.")
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise UsageError(f"concurrency must be from 1 to {MAX_CONCURRENCY}, not {self.concurrency}.")
        if not 0 < self.timeout <= MAX_TIMEOUT:
            raise UsageError(f"timeout must be above 0 and at most {MAX_TIMEOUT:,} seconds, not {self.timeout:g}.")
        if self.base_url:
            object.__setattr__(self, "base_url", _checked_url(self.base_url))


def _checked_url(url: str) -> str:
    """Return a server's address without a slash at its end; nothing secret is in it, since it is kept with results."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https") or not url.isprintable() or " " in url:
        raise UsageError("the base URL must look like http://localhost:8000/v1 or https://api.example.com/v1.")
    if parts.username is not None or parts.query or parts.fragment:
        raise UsageError(
            "the base URL must not hold a password or anything after ? or #; a key goes into the environment variable "
            "that --api-key-env names."
        )
    return url.rstrip("/")


@dataclass(frozen=True)
class TuneOptions:
    """How a language model is fine-tuned; the defaults are the paper's recipe (App. Training Pipeline)."""

    backbone: str | None = field(
        default=None,
        metadata={"help": "Fine-tune this model instead: a model folder, a hub id, smollm2 or minilm."},
    )
    lora: bool = field(default=False, metadata={"help": "Backbone: train LoRA adapters and the head, not all weights."})
    lora_rank: int = field(default=16, metadata={"help": "Backbone: rank of the adapters."})
    optimizer: Optimizer = field(default="soap", metadata={"help": "Backbone: soap (the paper) or adamw."})
    learning_rate: float | None = field(
        default=None, metadata={"help": "Backbone: 2e-5 unless given, 2e-4 with --lora; ten times that for the head."}
    )
    fresh_head: bool = field(
        default=False,
        metadata={"help": "Backbone: begin with a head that knows nothing (the paper), not a fitted one."},
    )
    epochs: float = field(default=1.0, metadata={"help": "Backbone: passes over the training pairs."})
    batch_size: int | None = field(
        default=None,
        metadata={"help": "Backbone: pairs a step, all devices together: up to 512, fewer where pairs are few."},
    )
    micro_batch: int = field(default=8, metadata={"help": "Backbone: most pairs a device reads at once."})
    max_length: int = field(
        default=1024, metadata={"help": "Backbone: tokens of a text that are read; the prompt's beginning is cut."}
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Backbone: save memory by computing activations twice."}
    )

    def __post_init__(self) -> None:
        if self.optimizer not in (known := get_args(Optimizer)):
            raise UsageError(f"optimizer cannot be {self.optimizer!r}; {did_you_mean(self.optimizer, known)}.")
        numbers = ("lora_rank", "learning_rate", "epochs", "batch_size", "micro_batch", "max_length")
        for name in numbers:
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UsageError(f"{name} must be above 0, not {value:g}.")
        if self.backbone is None and (changed := changed_options(self)):
            raise UsageError(f"{changed[0]} is about fine-tuning: name a model to tune with --backbone.")


@dataclass(frozen=True)
class PolicyOptions:
    """How a policy is tuned to a member."""

    method: PolicyMethod = field(
        default="dpo", metadata={"help": "Pairs of the best and worst samples (dpo), or its reward itself (grpo)."}
    )
    beta: float = field(
        default=0.1, metadata={"help": "Price of a nat of KL to the base, in standard deviations of reward."}
    )
    steps: int = field(default=100, metadata={"help": "Steps of the optimiser for each member."})
    batch_size: int = field(default=8, metadata={"help": "Pairs a step (dpo), or prompts a step (grpo)."})
    samples: int = field(
        default=8, metadata={"help": "Responses to a prompt: of the base, in a group of grpo, and in the evaluation."}
    )
    lora_rank: int = field(default=16, metadata={"help": "Rank of the adapters."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Largest learning rate; it warms up and decays."})
    temperature: float = field(default=1.0, metadata={"help": "Of sampling, in training and evaluation."})
    max_new_tokens: int = field(default=128, metadata={"help": "Longest response, in tokens."})
    held_out: float = field(default=0.25, metadata={"help": "Share of prompts never trained on, to judge by."})
    micro_batch: int = field(default=8, metadata={"help": "Most responses read at once; lower it to save memory."})
    seed: int = field(default=0, metadata={"help": "Seed of everything random; the same for all members."})

    def __post_init__(self) -> None:
        if self.method not in (known := get_args(PolicyMethod)):
            raise UsageError(f"method cannot be {self.method!r}; {did_you_mean(self.method, known)}.")
        for name in ("beta", "steps", "batch_size", "lora_rank", "learning_rate", "max_new_tokens", "micro_batch"):
            if not 0 < (value := getattr(self, name)) < float("inf"):
                raise UsageError(f"{name} must be above 0, not {value:g}.")
        if self.lora_rank > MAX_LORA_RANK:
            raise UsageError(f"lora_rank must be at most {MAX_LORA_RANK}, the most that vLLM serves.")
        if self.samples < 2:
            raise UsageError(f"samples must be at least 2, or no response is better than another, not {self.samples}.")
        if not 0 < self.temperature <= 10:
            raise UsageError(f"temperature must be above 0 and at most 10, not {self.temperature:g}.")
        if not 0 < self.held_out < 1:
            raise UsageError(f"held_out must be between 0 and 1, not {self.held_out:g}.")
        if self.seed < 0:
            raise UsageError(f"seed must not be negative, but it is {self.seed}.")


def _as_in(config: type, name: str) -> Any:
    """Return an option of another dataclass as it is there."""
    known = config.__dataclass_fields__[name]  # type: ignore[attr-defined]
    return field(default=known.default, metadata=known.metadata)


@dataclass(frozen=True)
class EncodeOptions:
    """What texts are encoded with; as for ``fit``."""

    encoder: str = _as_in(FitOptions, "encoder")
    layer: int | None = _as_in(FitOptions, "layer")
    pooling: Pooling = _as_in(FitOptions, "pooling")  # noqa: RUF009
    precision: Precision = _as_in(FitOptions, "precision")  # noqa: RUF009
    surface: bool = _as_in(FitOptions, "surface")

    def __post_init__(self) -> None:
        for name in ("pooling", "precision"):
            if (came := getattr(self, name)) not in (known := get_args(_CHOICES[name])):
                raise UsageError(f"{name} cannot be {came!r}; {did_you_mean(came, known)}.")


@dataclass(frozen=True)
class EngineOptions:
    """Where the shards of a large piece of work are done."""

    engine: Engine = field(default="local", metadata={"help": "This process, or workers on a Ray cluster (ray)."})
    workers: int | None = field(
        default=None, metadata={"help": "Ray: workers at once; as many as there is room for unless given."}
    )
    worker_cpus: int = field(default=1, metadata={"help": "Ray: CPUs, and threads, of a worker."})
    worker_gpus: float = field(default=0.0, metadata={"help": "Ray: GPUs of a worker; 0.5 lets two share one."})
    address: str | None = field(
        default=None,
        metadata={"help": "Ray: HOST:PORT of a cluster, or auto; else $RAY_ADDRESS, else one is started here."},
    )
    shard_rows: int = field(
        default=8192, metadata={"help": "Texts a shard: what a lost worker can cost. Shards of a folder stay as is."}
    )

    def __post_init__(self) -> None:
        if self.engine not in (known := get_args(Engine)):
            raise UsageError(f"engine cannot be {self.engine!r}; {did_you_mean(self.engine, known)}.")
        for name in ("workers", "worker_cpus", "shard_rows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}.")
        if not 0 <= self.worker_gpus < float("inf"):
            raise UsageError(f"worker_gpus must not be below 0, but it is {self.worker_gpus:g}.")
        of_ray = [name for name in changed_options(self) if name not in ("engine", "shard_rows")]
        if self.engine == "local" and of_ray:
            raise UsageError(f"{of_ray[0]} is about --engine ray.")


@dataclass(frozen=True)
class ServeOptions:
    """What a server samples by and how much it takes on; ``gate.Limits`` has every limit."""

    temperature: float = _as_in(SamplingOptions, "temperature")
    top_p: float = _as_in(SamplingOptions, "top_p")
    max_new_tokens: int = _as_in(SamplingOptions, "max_new_tokens")
    seed: int | None = field(
        default=None,
        metadata={"help": "Requests without a seed get theirs from this one, in turn; else nobody can foretell them."},
    )
    max_body: int = field(default=4_000_000, metadata={"help": "Bytes of a request."})
    max_texts: int = field(default=1024, metadata={"help": "Texts of a request; a pair to compare has two."})
    max_characters: int = field(default=32_000, metadata={"help": "Characters of a prompt, chat or response."})
    max_candidates: int = field(default=64, metadata={"help": "Candidates for an answer, given or sampled."})
    max_requests: int = field(default=512, metadata={"help": "Requests at work at once; more are told to come again."})
    max_queue: int = field(default=4096, metadata={"help": "Texts that wait to be scored; as for requests."})
    max_seconds: float | None = field(
        default=None, metadata={"help": "For a prompt's candidates: 120 unless given, --timeout with --base-url."}
    )

    def __post_init__(self) -> None:
        self.sampling()
        for name in (dial.name for dial in fields(self) if dial.name.startswith("max_")):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name} must be above 0, not {value:g}.")
        if self.max_queue < self.max_texts:
            raise UsageError(
                f"max_queue must be at least max_texts, {self.max_texts:,}, or so large a request could never be taken."
            )

    def sampling(self) -> SamplingOptions:
        """Return how candidates are sampled where a request does not say."""
        return SamplingOptions(self.temperature, self.top_p, self.max_new_tokens, self.seed or 0)


def changed_options(options: Any) -> list[str]:
    """Return the names of the options that differ from their defaults."""
    return [dial.name for dial in fields(options) if getattr(options, dial.name) != dial.default]


Options = TypeVar(
    "Options", "LoadOptions", "FitOptions", "SamplingOptions", "TuneOptions", "PolicyOptions", "EncodeOptions"
)


def with_changes(options: Options, changes: Mapping[str, Any]) -> Options:
    """Return ``options`` with some fields changed by name; an unknown name is answered with the nearest known one."""
    known = [dial.name for dial in fields(options)]
    for name in changes:
        if name not in known:
            raise UsageError(f"there is no option {name!r}; {did_you_mean(name, known)}.")
    return replace(options, **changes)
