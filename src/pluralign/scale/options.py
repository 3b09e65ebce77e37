"""Options of large jobs: where their shards run."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pluralign.core.errors import UsageError
from pluralign.core.options import changed_options, check_choices, option

Engine: TypeAlias = Literal["local", "ray"]


@dataclass(frozen=True)
class EngineOptions:
    """Where the shards of a large job run."""

    engine: Engine = option("local", "Run in this process (local) or on a Ray cluster (ray).")
    workers: int | None = option(None, "Ray: number of workers (default: as many as the cluster has room for).")
    worker_cpus: int = option(1, "Ray: CPUs, and threads, per worker.")
    worker_gpus: float = option(0.0, "Ray: GPUs per worker; with 0.5, two workers share one.")
    address: str | None = field(
        default=None,
        metadata={
            "help": "Ray: HOST:PORT of a cluster, or auto (default: $RAY_ADDRESS, else a new local cluster).",
            "command_line": False,  # there it is $RAY_ADDRESS
        },
    )
    shard_rows: int = option(8192, "Texts per shard, the unit of resuming. A folder of shards is not cut again.")

    def __post_init__(self) -> None:
        check_choices(self, {"engine": Engine})
        for name in ("workers", "worker_cpus", "shard_rows"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, not {value}.")
        if not 0 <= self.worker_gpus < float("inf"):
            raise UsageError(f"worker_gpus must not be below 0, but it is {self.worker_gpus:g}.")
        of_ray = [name for name in changed_options(self) if name not in ("engine", "shard_rows")]
        if self.engine == "local" and of_ray:
            raise UsageError(f"--{of_ray[0].replace('_', '-')} requires --engine ray.")
