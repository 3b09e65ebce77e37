"""The Ray engine: a pool of Ray Data actors does the shards, one shard per task, in any order.

Decided here: how a cluster is reached, and how many workers run on it. Ray prints from its own threads and changes the
process it runs in, so ``ray_driver`` calls this module in a child process.
"""

import logging
import os
import socket
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pluralign.core.errors import DataError
from pluralign.scale.options import EngineOptions
from pluralign.scale.worker import Outcome, Shard, Worker

REACH_SECONDS = 10.0
OBJECT_STORE_BYTES = 100 * 2**20
"""Memory of a local cluster: only the names of shards pass through it."""


class RayWorker:
    """A worker as an actor of Ray Data, in a process of its own."""

    def __init__(self, worker: Worker, directory: str) -> None:
        self.worker = worker
        if Path(directory).is_dir():  # relative paths then mean the same as for the caller
            os.chdir(directory)

    def __call__(self, batch: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
        """Do the shards of a batch. Ray Data passes and expects columns."""
        columns = zip(batch["texts"], batch["result"], strict=True)
        outcomes = [self.worker(Shard(str(texts), str(result))) for texts, result in columns]
        return {
            "shard": [outcome.shard for outcome in outcomes],
            "problem": [outcome.problem for outcome in outcomes],
        }


def run_on_ray(worker: Worker, shards: Sequence[Shard], options: EngineOptions) -> Generator[Outcome]:
    """Yield the outcome of each shard when an actor has finished it.

    Raises:
        DataError: the cluster cannot be reached, or its workers are lost.
    """
    import ray
    import ray.data

    with cluster(options):
        workers = min(options.workers or _capacity(ray, options), len(shards))
        rows = [asdict(shard) for shard in shards]
        outcomes = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            RayWorker,
            batch_size=1,
            fn_constructor_kwargs={"worker": worker, "directory": str(Path.cwd())},
            compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
            num_cpus=options.worker_cpus,
            num_gpus=options.worker_gpus or None,
        )  # by default Ray restarts a lost actor, and gives its shard to another one, without limit
        outcomes.context.enable_progress_bars = False
        outcomes.context.print_on_execution_start = False
        try:
            for row in outcomes.iter_rows():
                yield Outcome(**row)
        except ray.exceptions.RayActorError as error:
            remedy = "run the same command again to do the shards that are left"
            raise DataError(f"Ray lost its workers ({_first_line(error)})", remedy=remedy) from None


def _capacity(ray: Any, options: EngineOptions) -> int:
    """Return the number of workers that the cluster has room for."""
    resources = ray.cluster_resources()
    by_cpu = resources.get("CPU", 0.0) // options.worker_cpus
    by_gpu = resources.get("GPU", 0.0) // options.worker_gpus if options.worker_gpus else by_cpu
    return max(1, int(min(by_cpu, by_gpu)))


@contextmanager
def cluster(options: EngineOptions) -> Iterator[None]:
    """Connect to the named cluster, or start a local one, and disconnect or stop it at the end.

    If this process is already connected to a cluster, that connection is used and kept.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    address = options.address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address:
            _check_reachable(address)
            ray.init(address=address, **quiet)
        else:
            cpus = options.workers * options.worker_cpus if options.workers else None
            own: dict[str, Any] = {
                "num_cpus": cpus,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
            }
            ray.init(address="local", **own, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        remedy = "check --address, and that the cluster has this version of Ray and Python"
        failed = f"reached at {address}" if address else "started on this machine"
        raise DataError(f"Ray cannot be {failed} ({_first_line(error)})", remedy=remedy) from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ConnectionError if nothing listens at the address. Ray itself would wait for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
