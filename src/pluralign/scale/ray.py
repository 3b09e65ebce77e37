"""The Ray engine: a pool of Ray Data actors does the shards of a job, in any order.

Ray prints to stdout and stderr from its own threads, reads environment variables when it starts, and replaces signal
handlers. So a child process, ``python -m pluralign.scale.ray PLAN HASH OPTIONS``, drives it, and writes one line of
JSON per finished shard to stdout. It ends when its stdin is closed, so it does not outlive this process. If this
process is already connected to a Ray cluster, there is no child: the connection is used here.
"""

import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pluralign.core.errors import DataError, MissingExtraError
from pluralign.core.text import one_line
from pluralign.scale.options import EngineOptions
from pluralign.scale.shards import Worker

STOP_SECONDS = 30.0
"""How long the child may take to stop a cluster before it ends."""
LOG_BYTES = 4000
"""How much of the child's stderr an error message quotes."""
REACH_SECONDS = 10.0
"""How long to wait for the named cluster to answer."""
OBJECT_STORE_BYTES = 100 * 2**20
"""Memory of a local cluster: only the names of shards pass through it."""


def run_with_ray(worker: Worker, options: EngineOptions) -> Generator[str]:
    """Yield the problem of each shard, or an empty string, when a Ray actor has finished it: the engine ``ray``.

    Raises:
        MissingExtraError: Ray is not installed.
        DataError: the cluster cannot be reached, or its workers are lost.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("ray", "ray", "--engine ray")
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        yield from run_on_ray(worker, options)
    else:
        yield from _run_in_child(worker, options)


def _run_in_child(worker: Worker, options: EngineOptions) -> Generator[str]:
    quiet = {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_USAGE_STATS_ENABLED": "0"}
    job = [str(worker.plan_file), worker.plan_hash, json.dumps(asdict(options))]
    command, pipe = [sys.executable, "-P", "-m", "pluralign.scale.ray", *job], subprocess.PIPE
    with (
        tempfile.TemporaryFile() as log,
        subprocess.Popen(  # noqa: S603 - on exit it closes stdin, which ends the child, and waits
            command, stdin=pipe, stdout=pipe, stderr=log, env=quiet | dict(os.environ)
        ) as child,
    ):
        yield from map(json.loads, child.stdout or ())
        if child.wait():
            log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
            raise RuntimeError(f"the Ray driver failed:\n{log.read().decode(errors='replace')}")


# --- in the child process ---------------------------------------------------------------------------------------------


def main(plan: str, plan_hash: str, options: str) -> None:
    """Do the shards of a plan, and write the problem of each to stdout."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with os.fdopen(os.dup(1), "w") as pipe:
        os.dup2(2, 1)  # whatever Ray prints goes to the log, and only problems go to the pipe
        try:
            for problem in run_on_ray(Worker(Path(plan), plan_hash), EngineOptions(**json.loads(options))):
                print(json.dumps(problem), file=pipe, flush=True)
        except DataError as error:
            print(json.dumps(str(error)), file=pipe)


def _end_with_parent() -> None:
    """Wait until the parent closes stdin or dies, then end this process."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # stops the cluster
    time.sleep(STOP_SECONDS)
    os._exit(1)


# --- the engine -------------------------------------------------------------------------------------------------------


class RayWorker:
    """A worker as an actor of Ray Data, in a process of its own."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def __call__(self, batch: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
        """Do the shards of a batch. Ray Data passes and expects columns."""
        return {"problem": [self.worker(int(number)) for number in batch["shard"]]}


def run_on_ray(worker: Worker, options: EngineOptions) -> Generator[str]:
    """Yield the problem of each shard, or an empty string, when an actor has finished it.

    Raises:
        DataError: the cluster cannot be reached, or its workers are lost.
    """
    import ray
    import ray.data

    with cluster(options):
        rows = [{"shard": number} for number in worker.plan.todo()]
        free: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        room = [free.get("CPU", 0.0) // options.worker_cpus]
        room += [free.get("GPU", 0.0) // options.worker_gpus] if options.worker_gpus else []
        workers = min(options.workers or max(1, int(min(room))), len(rows))
        outcomes = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
            RayWorker,
            batch_size=1,
            fn_constructor_args=(worker,),
            compute=ray.data.ActorPoolStrategy(size=workers, max_tasks_in_flight_per_actor=1),
            num_cpus=options.worker_cpus,
            num_gpus=options.worker_gpus or None,
        )  # by default Ray restarts a lost actor, and gives its shard to another one, without limit
        outcomes.context.enable_progress_bars = False
        outcomes.context.print_on_execution_start = False
        try:
            for row in outcomes.iter_rows():
                yield str(row["problem"])
        except ray.exceptions.RayActorError as error:
            remedy = "run the same command again to do the shards that are left"
            raise DataError(f"Ray lost its workers ({one_line(error)})", remedy=remedy) from None


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
    chosen: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "address": address or "local"}
    if not address:
        cpus = options.workers * options.worker_cpus if options.workers else None
        chosen |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        _check_reachable(address or "")
        ray.init(**chosen)
    except (ConnectionError, ValueError, RuntimeError) as error:
        remedy = "check the address, and that the cluster has this version of Ray and Python"
        failed = f"reached at {address}" if address else "started on this machine"
        raise DataError(f"Ray cannot be {failed} ({one_line(error)})", remedy=remedy) from None
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


if __name__ == "__main__":
    main(*sys.argv[1:])
