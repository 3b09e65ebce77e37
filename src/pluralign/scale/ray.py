"""The Ray driver: a child process runs the Ray engine, so that Ray does not change this process.

Ray prints to stdout and stderr from its own threads, reads environment variables when it starts, and replaces signal
handlers. The child, ``python -m pluralign.scale.ray``, reads a ``RayJob`` as JSON from stdin and writes one line
of JSON per outcome to stdout. It ends when its stdin is closed, so it does not outlive this process. If this process is
already connected to a Ray cluster, there is no child: the connection is used here.
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
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pluralign.core.errors import DataError, MissingExtraError
from pluralign.scale.options import EngineOptions
from pluralign.scale.worker import EncodeTask, Outcome, ScoreTask, Shard, Task, Worker
from pluralign.text.features import TextFeatures

# --- The Ray engine: a pool of Ray Data actors does the shards, one shard per task, in any order.


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


STOP_SECONDS = 30.0
"""How long the child may take to stop a cluster before it is killed."""
LOG_BYTES = 4000
"""How much of the child's stderr an error message quotes."""


@dataclass(frozen=True)
class RayJob:
    """Input of the child process."""

    worker: Worker
    shards: tuple[Shard, ...]
    options: EngineOptions

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON."""
        return {
            "task": _task_to_json(self.worker.task),
            "plan": str(self.worker.plan),
            "plan_hash": self.worker.plan_hash,
            "shards": [asdict(shard) for shard in self.shards],
            "options": asdict(self.options),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "RayJob":
        """Read a job from JSON."""
        return cls(
            Worker(_task_from_json(values["task"]), Path(values["plan"]), values["plan_hash"]),
            tuple(Shard(**shard) for shard in values["shards"]),
            EngineOptions(**values["options"]),
        )


def _task_to_json(task: Task) -> dict[str, Any]:
    if isinstance(task, EncodeTask):
        return {"encode": task.features.to_json()}
    if isinstance(task, ScoreTask):
        return {"score": {"ensemble": str(task.ensemble), "identity": task.identity}}
    raise TypeError(f"a {type(task).__name__} cannot be sent to the Ray driver")


def _task_from_json(values: Mapping[str, Any]) -> Task:
    if "encode" in values:
        return EncodeTask(TextFeatures.from_json(values["encode"]))
    return ScoreTask(Path(values["score"]["ensemble"]), values["score"]["identity"])


def run_with_ray(worker: Worker, shards: Sequence[Shard], options: EngineOptions) -> Generator[Outcome]:
    """Yield the outcome of each shard when a Ray actor has finished it: the engine ``ray``.

    Raises:
        MissingExtraError: Ray is not installed.
        DataError: the cluster cannot be reached, or its workers are lost.
    """
    if importlib.util.find_spec("ray") is None:
        raise MissingExtraError("ray", "ray", "--engine ray")
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        yield from run_on_ray(worker, shards, options)
    else:
        yield from _run_in_child(RayJob(worker, tuple(shards), options))


def _run_in_child(job: RayJob) -> Generator[Outcome]:
    quiet = {"RAY_BACKEND_LOG_LEVEL": "fatal", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "-P", "-m", "pluralign.scale.ray"]
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=quiet | dict(os.environ)
        )
        assert child.stdin is not None  # noqa: S101 - they are pipes
        assert child.stdout is not None  # noqa: S101
        try:
            with suppress(BrokenPipeError):  # the child has failed; its log says why
                child.stdin.write(json.dumps(job.to_json()).encode() + b"\n")
                child.stdin.flush()
            for line in child.stdout:
                message = json.loads(line)
                if "error" in message:
                    raise DataError(**message["error"])
                yield Outcome(**message)
            if child.wait():
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_BYTES))
                raise RuntimeError(f"the Ray driver failed:\n{log.read().decode(errors='replace')}")
        finally:
            _stop(child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()


# --- in the child process ---------------------------------------------------------------------------------------------


def main() -> None:
    """Run the job on stdin, and write its outcomes to stdout."""
    job = RayJob.from_json(json.loads(sys.stdin.buffer.readline()))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with os.fdopen(os.dup(1), "w") as pipe:
        os.dup2(2, 1)  # whatever Ray prints goes to the log, and only messages go to the pipe

        def send(message: dict[str, Any]) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        try:
            for outcome in run_on_ray(job.worker, job.shards, job.options):
                send(asdict(outcome))
        except DataError as error:
            send({"error": {"problem": error.problem, "remedy": error.remedy}})


def _end_with_parent() -> None:
    """Wait until the parent closes stdin or dies, then end this process."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)  # stops the cluster
    time.sleep(STOP_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
