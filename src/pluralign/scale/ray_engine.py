"""Ray."""

import io
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import IO, Any

from pluralign.core.errors import DataError, MissingExtraError
from pluralign.scale.jobs import Outcomes, Shard
from pluralign.scale.options import EngineOptions
from pluralign.scale.worker import Worker

REACH_SECONDS = 10.0


OBJECT_STORE_BYTES = 100 * 2**20
"""Memory of a Ray started here: only names of shards pass through it."""


def _with_ray(worker: Worker, todo: Sequence[Shard], options: EngineOptions) -> Outcomes:
    """Yield outcomes as a pool of actors of Ray Data finishes shards, one shard a task, in any order."""
    try:
        import ray
        import ray.data
    except ImportError:
        raise MissingExtraError("ray", "ray", "--engine ray") from None
    with _cluster(ray, options):
        workers = min(options.workers or _room(ray, options), len(todo))
        rows = [{"shard": shard, "result": result} for shard, result in todo]
        outcomes = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            Worker,
            batch_size=1,
            fn_constructor_kwargs=dict(vars(worker)),
            compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
            num_cpus=options.worker_cpus,
            num_gpus=options.worker_gpus or None,
        )  # by default a lost actor is started again, and its shard given to another one, without end
        outcomes.context.enable_progress_bars = False
        outcomes.context.print_on_execution_start = False
        try:
            yield from outcomes.iter_rows()
        except ray.exceptions.RayActorError as error:
            remedy = "run the same command again, which goes on with what is left"
            raise DataError(f"Ray lost its workers ({_first_line(error)})", remedy=remedy) from None


def _room(ray: Any, options: EngineOptions) -> int:
    resources = ray.cluster_resources()
    by_cpu = resources.get("CPU", 0.0) // options.worker_cpus
    by_gpu = resources.get("GPU", 0.0) // options.worker_gpus if options.worker_gpus else by_cpu
    return max(1, int(min(by_cpu, by_gpu)))


@contextmanager
def _cluster(ray: Any, options: EngineOptions) -> Iterator[None]:
    """Join the cluster that is named, or start one here; leave or stop it in the end. A session at hand is used."""
    if ray.is_initialized():
        yield
        return
    address = options.address or os.environ.get("RAY_ADDRESS")
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what matters is raised
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    with redirect_stdout(_ThisThread(sys.stdout)):
        try:
            if address:
                _reach(address)
                with _silent_stderr():
                    ray.init(address=address, **quiet)
            else:
                cpus = options.workers * options.worker_cpus if options.workers else None
                own = {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
                with _silent_stderr():
                    ray.init(address="local", **own, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            remedy = "check --address, and that the cluster has this version of Ray and Python"
            where = address or "on this machine"
            raise DataError(f"Ray cannot be reached at {where} ({_first_line(error)})", remedy=remedy) from None
        try:
            yield
        finally:
            ray.shutdown()


class _ThisThread(io.TextIOBase):
    """Passes on what this thread prints: Ray's own threads tell of lost workers on stdout, where results belong."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream, self.thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return self.stream.write(text) if threading.get_ident() == self.thread else len(text)

    def flush(self) -> None:
        self.stream.flush()


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """Keep what Ray's C++ says of its own log level off the terminal; errors are raised and not only printed."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _reach(address: str) -> None:
    """Try the door before Ray does, which waits for minutes."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise ConnectionError(error.strerror or str(error)) from None


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
