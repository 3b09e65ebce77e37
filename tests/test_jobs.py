"""Jobs at scale: every engine gives the results of one process, and interrupted jobs resume."""

import errno
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import WriteLines, run, wide

from pluralign import RewardEnsemble, encode, fit, score, town_hall
from pluralign.core.errors import DataError, MissingExtraError, PluralignError, UsageError
from pluralign.scale import jobs, ray as ray_engine, shards
from pluralign.scale.options import EngineOptions
from pluralign.scale.shards import Transform, Worker
from pluralign.text.encoders import HashingEncoder, TextFeatures, encode as encoded
from pluralign.text.store import stored_features
from pluralign.votes.preferences import PreferenceSet, texts_of
from pluralign.votes.prompts import Item, Message

VOTES = town_hall(120).preferences
HASHING = TextFeatures("hashing")
SMALL: dict[str, Any] = {"encoder": "hashing", "shard_rows": 20}


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("town")
    fit(town_hall(300).preferences, k=2, encoder="none", folder=folder)
    return folder


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A local Ray cluster with room for two workers, shared by all tests of this file."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # Ray's own deprecations
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_BACKEND_LOG_LEVEL", "fatal")
        with ray_engine.cluster(EngineOptions("ray", workers=2)):
            yield


with_ray = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray", "ignore::FutureWarning:ray")


def parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("part-*.parquet"))


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in parts(folder / "vectors")]


def table_in(folder: Path, **columns: Any) -> Path:
    """Write a folder with one shard of texts."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(columns), folder / "a.parquet")
    return folder


# --- results ----------------------------------------------------------------------------------------------------------


CHAT = (Message("user", "Tea?"), Message("assistant", "Milk?"), Message("user", "Yes."))
CHATS = PreferenceSet.from_columns([CHAT, "Tea?"], ["Here.", "Yes."], ["No milk.", "No."], [3, 2], [2, 3])


@pytest.mark.parametrize("votes", [VOTES, CHATS], ids=["texts", "chats"])
def test_features_equal_those_of_the_encoder_to_the_last_bit(
    votes: PreferenceSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLURALIGN_CACHE", str(tmp_path / "cache"))
    folder, items = tmp_path / "features", texts_of(votes)
    done = encode(votes, folder, **SMALL)
    features = stored_features(folder, items, HASHING)
    np.testing.assert_array_equal(features, encoded(items, HashingEncoder(), cache=False))
    assert (done.rows, done.dimension) == features.shape
    assert done.shards == len(parts(folder / "vectors")) == -(-len(items) // 20)
    assert {path.name for path in folder.iterdir()} == {"vectors", "features.json"}, "nothing else is left"
    assert not (tmp_path / "cache").exists(), "the vector cache is not used"


def test_a_folder_of_shards_is_encoded_in_place(tmp_path: Path) -> None:
    items = texts_of(VOTES)
    source = tmp_path / "texts"
    source.mkdir()
    for number, rows in enumerate((items[:30], items[30:31], [], items[31:])):
        columns = [pa.array([item[column] for item in rows], pa.string()) for column in (0, 1)]
        pq.write_table(pa.table(columns, ["prompt", "response"]), source / f"{number}.parquet")
    done = encode(source, tmp_path / "features", encoder="hashing")
    assert (done.shards, done.rows) == (4, len(items))
    features = stored_features(tmp_path / "features", items[::-1], HASHING)
    np.testing.assert_array_equal(features, encoded(items[::-1], HashingEncoder(), cache=False))


# --- resuming ---------------------------------------------------------------------------------------------------------


def interrupted_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Interrupt a run after two shards; return the modification times of their results."""
    plain, calls = Worker.__call__, []

    def twice(worker: Worker, number: int) -> str:
        calls.append(number)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(worker, number)

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "__call__", twice)
        with pytest.raises(KeyboardInterrupt):
            encode(VOTES, folder, **SMALL)
    return {path.name: path.stat().st_mtime_ns for path in parts(folder / "vectors")}


def test_an_interrupted_run_resumes_without_repeating_finished_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = interrupted_run(tmp_path / "broken", monkeypatch)
    assert sorted(before) == ["part-00000.parquet", "part-00001.parquet"]
    done = encode(VOTES, tmp_path / "broken", **SMALL)
    assert done.resumed == 2
    after = {path.name: path.stat().st_mtime_ns for path in parts(tmp_path / "broken" / "vectors")}
    assert {name: after[name] for name in before} == before
    encode(VOTES, tmp_path / "unbroken", **SMALL)
    assert contents(tmp_path / "broken") == contents(tmp_path / "unbroken")
    monkeypatch.setattr(Worker, "__call__", lambda *_: pytest.fail("there was nothing to do"))
    assert encode(VOTES, tmp_path / "broken", **SMALL).resumed == done.shards
    monkeypatch.undo()
    interrupted_run(tmp_path / "planning", monkeypatch)
    (tmp_path / "planning" / ".unfinished" / "plan.json").unlink()
    for path in parts(tmp_path / "planning" / "vectors"):
        path.unlink()
    assert encode(VOTES, tmp_path / "planning", **SMALL).resumed == 0, "a run killed while planning plans again"


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize(
    ("votes", "changes", "sentence"),
    [
        (VOTES, {"encoder": "none"}, "job with encoder hashing; use the same settings, or name another folder"),
        (VOTES, {"shard_rows": 21}, "job with shard_rows 20"),
        (VOTES[:50], {}, "job with other texts"),
    ],
)
def test_other_settings_in_the_same_folder_raise_data_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool, votes: Any, changes: Any, sentence: str
) -> None:
    interrupted_run(tmp_path, monkeypatch)
    if finished:
        encode(VOTES, tmp_path, **SMALL)
    with pytest.raises(DataError, match=sentence):
        encode(votes, tmp_path, **SMALL | changes)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("features.json", "[" * 100_000, r"features\.json: it is damaged"),
        ("features.json", "[]", r"features\.json: it is damaged"),
        (".unfinished/plan.json", "{}", r"plan\.json: it is damaged"),
        ("vectors/part-00000.parquet", "theirs", "1 shard of another job; name an empty folder"),
    ],
)
def test_files_of_something_else_raise_data_error(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=sentence):
        encode(VOTES, tmp_path, **SMALL)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_a_finished_job_does_damaged_and_missing_shards_again(damage: Callable[[Path], Any], tmp_path: Path) -> None:
    encode(VOTES, tmp_path, **SMALL)
    before = contents(tmp_path)
    damage(parts(tmp_path / "vectors")[-1])
    again = encode(VOTES, tmp_path, **SMALL)
    assert contents(tmp_path) == before
    assert again.resumed == again.shards - 1


def test_two_runs_of_one_job_take_turns(tmp_path: Path) -> None:
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: encode(VOTES, tmp_path, **SMALL), range(2)))
    assert sorted(run.resumed for run in done) == [0, done[0].shards]


# --- Ray --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KillsOnce(Worker):
    """Kills its own process during the shard with a given text, the first time a worker does it."""

    text: str = ""
    marker: Path = Path()

    @property  # a cached_property of this file could not be pickled
    def transform(self) -> Transform:
        transform = super().transform

        def kill_once(rows: pa.Table, items: Sequence[Item]) -> pa.Table:
            if any(response == self.text for _, response in items) and not self.marker.exists():
                self.marker.write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']}")
                os.kill(os.getpid(), signal.SIGKILL)
            return transform(rows, items)

        return kill_once


@pytest.mark.slow
@with_ray
@pytest.mark.usefixtures("cluster")
def test_a_killed_worker_does_not_change_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    encode(VOTES, tmp_path / "serial", **SMALL)
    response, marker = texts_of(VOTES)[50][1], tmp_path / "killed"
    by_value: Any = ray.cloudpickle.register_pickle_by_value  # workers cannot import tests
    by_value(sys.modules[__name__])
    monkeypatch.setattr(jobs, "Worker", lambda plan, digest: KillsOnce(plan, digest, response, marker))
    seen: list[tuple[int, int]] = []
    options = SMALL | {"engine": "ray", "workers": 2, "progress": lambda *counts: seen.append(counts)}
    done = encode(VOTES, tmp_path / "ray", **options)
    killed, threads = map(int, marker.read_text().split())
    assert killed != os.getpid()
    assert threads == 1, "a worker has as many threads as CPUs"
    assert contents(tmp_path / "ray") == contents(tmp_path / "serial")
    assert (len(seen), seen[-1], sorted(seen)) == (done.shards, (done.rows, done.rows), seen)
    assert not list((tmp_path / "ray" / "vectors").glob(".*")), "files of the killed worker are removed"


@with_ray
@pytest.mark.usefixtures("cluster")
def test_rewards_from_ray_equal_those_of_one_process(ensemble: Path, write_jsonl: WriteLines, tmp_path: Path) -> None:
    items = texts_of(VOTES)
    file = write_jsonl([{"id": n, "prompt": p, "response": r} for n, (p, r) in enumerate(items)], "texts.jsonl")
    done = score(ensemble, file, tmp_path / "scored", engine="ray", workers=2, shard_rows=30)
    table = pq.read_table(tmp_path / "scored")
    assert (done.dimension, done.rows) == (2, len(items))
    assert table.column_names == ["id", "prompt", "response", "rewards"]
    assert table["id"].to_pylist() == list(range(len(items)))
    expected = RewardEnsemble.load(ensemble).rewards(items)
    np.testing.assert_allclose(np.array(table["rewards"].to_pylist()), expected, rtol=1e-12, atol=1e-12)
    source = table_in(tmp_path / "texts", prompt=["Tea?", "Tea?"], response=["Yes.", None])
    with pytest.raises(PluralignError, match=r"a\.parquet, row 2: there is no value for response"):
        score(ensemble, source, tmp_path / "other", engine="ray", workers=1)


@pytest.mark.slow
def test_ray_does_not_change_this_process(tmp_path: Path) -> None:
    code = (
        "import logging, os, signal, sys\n"
        "from pluralign import encode, town_hall\n"
        "def state():\n"
        "    handlers = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]\n"
        "    levels = logging.getLogger('ray.data').level, logging.root.level\n"
        "    return dict(os.environ), sys.stdout, os.readlink('/proc/self/fd/2'), handlers, levels\n"
        "before = state()\n"
        "options = dict(encoder='hashing', shard_rows=40, engine='ray', workers=1)\n"
        "done = encode(town_hall(60).preferences, sys.argv[1], **options)\n"
        "print(done.rows > 0, state() == before, 'ray' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True True False\n", "")


@pytest.mark.slow
def test_the_ray_driver_ends_with_its_parent(tmp_path: Path) -> None:
    code = "from pluralign.scale import ray as d; print('ready', flush=True); d._end_with_parent()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin
    assert child.stdout
    assert child.stdout.readline() == b"ready\n"
    assert child.poll() is None
    child.stdin.close()
    assert child.wait(20) == -signal.SIGTERM
    child.stdout.close()


@with_ray
def test_a_ray_that_is_absent_fails_or_cannot_be_reached_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(PluralignError, match=r"^Ray cannot be reached at 127\.0\.0\.1:1 \(Connection refused\); check"):
        encode(VOTES, tmp_path, **SMALL, engine="ray", address="127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"run  pip install 'pluralign\[ray\]'"):
        encode(VOTES, tmp_path, **SMALL, engine="ray")
    driver = tmp_path / "python"
    driver.write_text("#!/bin/sh\ncat > /dev/null &\necho 'no such cluster' >&2\nexit 3\n")
    driver.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(driver))
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: True)
    with pytest.raises(RuntimeError, match="the Ray driver failed:\nno such cluster"):
        encode(VOTES, tmp_path / "features", **SMALL, engine="ray")


# --- errors in a shard ------------------------------------------------------------------------------------------------


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """The worker of an unfinished run."""
    made: list[Worker] = []

    def stop(self: Worker, _: Any) -> None:
        made.append(self)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "__call__", stop)
        with pytest.raises(KeyboardInterrupt):
            encode(VOTES, tmp_path / "features", **SMALL)
    return made[0]


def attempt(worker: Worker, number: int = 0) -> str:
    problem = worker(number)
    result = worker.plan_file.parents[1] / "vectors" / f"part-{number:05d}.parquet"
    assert bool(problem) != result.exists()
    return problem


def test_a_node_that_sees_another_folder_writes_nothing(worker: Worker, tmp_path: Path) -> None:
    sentence = "cannot see it; put the folders of texts and results on storage that all nodes share"
    assert sentence in replace(worker, plan_file=tmp_path / "not-mounted" / "plan.json")(0)
    assert "another job runs in this folder" in replace(worker, plan_hash="another")(0)


def test_another_encoder_or_ensemble_with_the_same_name_on_a_node_is_rejected(ensemble: Path) -> None:
    with pytest.raises(DataError, match="the encoder is not the one"):
        shards.encoding(replace(HASHING, identity="hashing-of-old").to_json())
    with pytest.raises(DataError, match="not the ensemble that the job started with"):
        shards.scoring(str(ensemble), "another")


def test_a_shard_that_kills_every_worker_is_not_retried_for_ever(worker: Worker) -> None:
    attempts = worker.plan_file.parent / shards.ATTEMPTS_FOLDER
    attempts.mkdir()
    for number in range(shards.MAX_ATTEMPTS):
        (attempts / f"part-00001.parquet.{number}").touch()
    sentence = attempt(worker, 1)
    assert sentence.startswith(str(worker.plan_file.parent / "texts" / "part-00001.parquet"))
    assert "4 workers died while they worked on it, perhaps for lack of memory" in sentence
    assert attempt(worker, 0) == ""


def test_a_damaged_result_of_an_interrupted_run_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_run(tmp_path / "features", monkeypatch)
    parts(tmp_path / "features" / "vectors")[0].write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r"part-00000\.parquet: it cannot be read .*; remove this file, and run"):
        encode(VOTES, tmp_path / "features", **SMALL)


def test_a_full_disk_and_a_damaged_shard_are_reported(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", full)
    assert "cannot be written (No space left on device); free some space" in attempt(worker)
    monkeypatch.undo()
    assert attempt(worker) == "", "the next attempt succeeds"
    path = worker.plan_file.parent / "texts" / "part-00001.parquet"
    path.write_bytes(path.read_bytes()[:-8])
    assert attempt(worker, 1).startswith(f"{path}: the Parquet file cannot be read")


# --- scoring files ----------------------------------------------------------------------------------------------------


def test_results_have_the_order_and_the_columns_of_the_file(
    ensemble: Path, write_jsonl: WriteLines, tmp_path: Path
) -> None:
    lines = [{"prompt": f"Tea {n}?", "response": "word " * n, "n": n} for n in range(7)]
    lines[5]["note"] = "only here"
    lines[6] |= {"n": 6.5, "prompt": [{"role": "user", "content": "Tea?"}]}
    score(ensemble, write_jsonl(lines, "texts.jsonl"), tmp_path / "scored", shard_rows=2)
    table = pq.read_table(tmp_path / "scored")
    assert table["n"].to_pylist() == [0, 1, 2, 3, 4, 5, 6.5]
    assert table["note"].to_pylist() == [None] * 5 + ["only here", None]
    assert table["prompt"].to_pylist()[5:] == ["Tea 5?", '[["user","Tea?"]]']
    assert table["prompt_is_chat"].to_pylist() == [None] * 6 + [True]
    texts: list[Item] = [(f"Tea {n}?", "word " * n) for n in range(6)]
    expected = RewardEnsemble.load(ensemble).rewards([*texts, ((Message("user", "Tea?"),), "word " * 6)])
    np.testing.assert_allclose(np.array(table["rewards"].to_pylist()), expected, rtol=1e-12, atol=1e-12)


def test_large_shards_are_read_in_parts_and_keep_their_types(
    ensemble: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "ROWS_IN_MEMORY", 2)
    chats, numbers = [[{"role": "user", "content": "Tea?"}]] * 5, pa.array(range(5), pa.int8())
    source = table_in(tmp_path / "texts", prompt=chats, response=list("abcde"), n=numbers)
    score(ensemble, source, tmp_path / "scored")
    given, scored = pq.read_table(source), pq.read_table(tmp_path / "scored")
    assert scored.drop_columns("rewards").cast(given.schema).equals(given)
    assert (scored.schema.field("n").type, scored.schema.field("rewards").type.value_type) == (pa.int8(), pa.float64())
    table_in(source, prompt=["Tea?"] * 5, response=["a", "b", "c", None, "e"])
    with pytest.raises(PluralignError, match=r"a\.parquet, row 4: there is no value for response"):
        score(ensemble, source, tmp_path / "again")
    with pytest.raises(UsageError, match="the folder of the texts: name another folder"):
        score(ensemble, source, source)


YES: dict[str, Any] = {"prompt": "Tea?", "response": "Yes."}


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ([wide(response="Yes."), {"prompt": "Tea?"}], "row 2: there is no value for response"),
        ([YES | {"x": x} for x in (1, "one")], "column x holds values of several types"),
        ([YES | {"rewards": 1}], "already have a column rewards; rename it"),
        ([YES | {"x": x} for x in (1, 2, [1])], "a column has different types in different shards"),
        ([], "there are no texts"),
    ],
)
def test_a_file_that_cannot_be_scored_raises_an_error(
    ensemble: Path, write_jsonl: WriteLines, tmp_path: Path, lines: Any, sentence: str
) -> None:
    with pytest.raises(PluralignError, match=sentence):
        score(ensemble, write_jsonl(lines, "texts.jsonl"), tmp_path / "scored", shard_rows=2)


# --- the command line -------------------------------------------------------------------------------------------------


def test_the_command_summarises_its_results(ensemble: Path, write_jsonl: WriteLines, tmp_path: Path) -> None:
    done = run("score", ensemble, "--engine", "ray", stdin="")
    assert (done.returncode, done.stderr) == (2, "pluralign: --engine requires -o.\n")
    file = write_jsonl([YES], "texts.jsonl")
    done = run("score", ensemble, file, "-o", tmp_path / "scored")
    assert done.returncode == 0, done.stderr
    assert "1 text, rewards of 2 members, 1 shard" in done.stdout


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"engine": "spark"}, "engine cannot be 'spark'; known are: local, ray"),
        ({"workers": 2}, "workers requires engine ray"),
        ({"engine": "ray", "workers": 0}, "workers must be at least 1, not 0"),
        ({"engine": "ray", "worker_gpus": -1.0}, "worker_gpus must not be below 0"),
        ({"shard_rows": 0}, "shard_rows must be at least 1, not 0"),
        ({"shards": 3}, "there is no option 'shards'"),
    ],
)
def test_invalid_options_raise_usage_error(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        encode(VOTES, tmp_path, **changes)
