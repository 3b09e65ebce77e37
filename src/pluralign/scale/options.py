"""Where the shards of a large job run."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pluralign.core.errors import UsageError
from pluralign.core.options import changed_options, check_choices

Engine: TypeAlias = Literal["local", "ray"]


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
        check_choices(self, {"engine": Engine})
        for name in ("workers", "worker_cpus", "shard_rows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}.")
        if not 0 <= self.worker_gpus < float("inf"):
            raise UsageError(f"worker_gpus must not be below 0, but it is {self.worker_gpus:g}.")
        of_ray = [name for name in changed_options(self) if name not in ("engine", "shard_rows")]
        if self.engine == "local" and of_ray:
            raise UsageError(f"{of_ray[0]} is about --engine ray.")
