"""The options of ``serve``: sampling, and the limits of the server. The command line reads them without fastapi."""

from dataclasses import dataclass, fields

from pluralign.core.errors import UsageError
from pluralign.core.options import option, same_option
from pluralign.text.options import SamplingOptions


@dataclass(frozen=True)
class ServeOptions:
    """Sampling and limits of a server; ``limits.Limits`` has every limit."""

    temperature: float | None = same_option(SamplingOptions, "temperature")
    top_p: float | None = same_option(SamplingOptions, "top_p")
    max_new_tokens: int = same_option(SamplingOptions, "max_new_tokens")
    seed: int | None = option(None, "Base seed for requests that send none (default: random).")
    max_body: int = option(4_000_000, "Maximum size of a request body in bytes.")
    max_texts: int = option(1024, "Maximum texts per request; a pair to compare counts as 2.")
    max_characters: int = option(32_000, "Maximum characters of a prompt, chat or response.")
    max_candidates: int = option(64, "Maximum candidates per answer, given or sampled.")
    max_seconds: float | None = option(
        None, "Maximum seconds to sample candidates (default: 120, or --timeout with --base-url)."
    )

    def __post_init__(self) -> None:
        self.sampling()
        for name in (one.name for one in fields(self) if one.name.startswith("max_")):
            if (value := getattr(self, name)) is not None and not 0 < value < float("inf"):
                raise UsageError(f"{name} must be above 0, not {value:g}.")

    def sampling(self) -> SamplingOptions:
        """Return how candidates are sampled for requests that do not say."""
        return SamplingOptions(self.temperature, self.top_p, self.max_new_tokens, self.seed or 0)
