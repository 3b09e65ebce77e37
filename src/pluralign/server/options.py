"""The options of ``serve``: how the server samples, and its limits."""

from dataclasses import dataclass, field, fields

from pluralign.core.errors import UsageError
from pluralign.core.options import same_option
from pluralign.models.options import SamplingOptions


@dataclass(frozen=True)
class ServeOptions:
    """What a server samples by and how much it takes on; ``gate.Limits`` has every limit."""

    temperature: float = same_option(SamplingOptions, "temperature")
    top_p: float = same_option(SamplingOptions, "top_p")
    max_new_tokens: int = same_option(SamplingOptions, "max_new_tokens")
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
