"""The Ray driver: a child process runs the Ray engine, so that Ray does not change this process.

Ray prints to stdout and stderr from its own threads, reads environment variables when it starts, and replaces signal
handlers. The child, ``python -m pluralign.scale.ray_driver``, reads a ``RayJob`` as JSON from stdin and writes one line
of JSON per outcome to stdout. It ends when its stdin is closed, so it does not outlive this process. If this process is
already connected to a Ray cluster, there is no child: the connection is used here.
"""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pluralign.core.errors import DataError, MissingExtraError
from pluralign.features.frozen import TextFeatures
from pluralign.scale.options import EngineOptions
from pluralign.scale.ray_engine import run_on_ray
from pluralign.scale.worker import EncodeTask, Outcome, ScoreTask, Shard, Task, Worker

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
    command = [sys.executable, "-P", "-m", "pluralign.scale.ray_driver"]
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
