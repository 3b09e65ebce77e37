"""Measure the server: throughput against the command line, and latency. ``soak.py`` has overload, errors and memory.

    python benchmarks/serving.py [--pairs 768] [--clients 32] [--encoder minilm] [--quick] [--json]

The server runs in its own process, and this process sends requests over loopback, so both share the machine's cores.
Throughput is compared with offline `compare` on new texts of the same kind, in alternating rounds; the ratio is that of
the medians. A full batch has the maximum number of texts per batch.
"""

import argparse
import functools
import http.client
import io
import itertools
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from tables import show

from pluralign import RewardEnsemble, fit, town_hall
from pluralign.scale.lines import ComparedLine, compare
from pluralign.server.limits import Limits
from pluralign.server.run import serve

ROUNDS = 3
Pair = dict[str, Any]


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=768, help="pairs per round, offline and online")
    parser.add_argument("--clients", type=int, default=32, help="concurrent clients")
    parser.add_argument("--encoder", default="minilm", help="as in pluralign fit")
    parser.add_argument("--quick", action="store_true", help="a tenth of the pairs, one round")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    pairs, rounds = (max(64, arguments.pairs // 10), 1) if arguments.quick else (arguments.pairs, ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PLURALIGN_CACHE"] = str(Path(folder) / "cache")  # an empty cache
        found = throughput(Path(folder), arguments.encoder, pairs, arguments.clients, rounds)
    if arguments.json:
        print(json.dumps(found))
        return
    rows = [{"": name, "measured": value, "target": TARGETS.get(name, "")} for name, value in found.items()]
    show(rows, f"{arguments.clients} clients, one pair per request, {os.cpu_count()} cores")


TARGETS = {"online / offline throughput": "≥ 0.8", "p99 / full batch": "< 5"}


def throughput(folder: Path, encoder: str, n: int, clients: int, rounds: int) -> dict[str, Any]:
    """Measure pairs per second offline and online, and the latency."""
    where = folder / encoder
    ensemble = fit(town_hall(400).preferences, k=8, encoder=encoder, folder=where)
    pairs = fresh_pairs()
    score, batch = ensemble.scorer(), Limits().batch_texts
    texts = [(one["prompt"], one[side]) for one in take(pairs, batch // 2) for side in ("response_a", "response_b")]
    score(texts)  # loads the model
    full_batch = statistics.median(seconds_of(lambda: score(texts)) for _ in range(3))
    offline, online, waits, costs = [], [], [], []
    with serving(where) as server:
        load(server, take(pairs, 2 * clients), clients)
        for _ in range(rounds):
            lines = "\n".join(map(json.dumps, take(pairs, n))).encode()
            ours, theirs = time.process_time(), server.cpu_seconds
            offline.append(n / seconds_of(functools.partial(compare_all, ensemble, lines)))
            ours = time.process_time() - ours
            done = load(server, take(pairs, n), clients)
            costs.append((server.cpu_seconds - theirs) / ours)
            online.append(n / done.seconds)
            waits += done.waits
            if set(done.statuses) != {200}:
                raise SystemExit(f"the server answered {sorted(set(done.statuses))}")
        sizes = server.metric("pluralign_batch_texts_sum") / server.metric("pluralign_batch_texts_count")
    p50, p99 = np.quantile(waits, [0.5, 0.99])
    return {
        f"offline compare, pairs/s ({encoder})": statistics.median(offline),
        f"POST /v1/compare, pairs/s ({encoder})": statistics.median(online),
        "online / offline throughput": statistics.median(online) / statistics.median(offline),
        "CPU time, online / offline": statistics.median(costs),
        "texts per batch": sizes,
        f"a full batch of {batch} texts, s": full_batch,
        "p50, s": float(p50),
        "p99, s": float(p99),
        "p99 / full batch": float(p99) / full_batch,
    }


# --- a server, and a load on it ---------------------------------------------------------------------------------------


@dataclass
class Server:
    """A running server."""

    host: str
    port: int
    pid: int

    @property
    def cpu_seconds(self) -> float:
        """CPU time of all threads."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def metric(self, name: str) -> float:
        """Return one of its metrics."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def run_server(folder: Path, ready: Connection) -> None:
    """Serve an ensemble, and send its address."""
    serve(RewardEnsemble.load(folder), port=0, ready=ready.send)


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """Run a server in its own process."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_server, args=(folder, theirs))
    process.start()
    try:
        host, _, port = ours.recv().removeprefix("http://").partition(":")
        yield Server(host, int(port), process.pid or 0)
    finally:
        if process.pid and process.is_alive():
            os.kill(process.pid, signal.SIGTERM)
        process.join(30)


@dataclass
class Load:
    """Results of a load, one per request."""

    seconds: float
    waits: list[float]
    statuses: list[int]


def load(server: Server, pairs: Sequence[Pair], clients: int) -> Load:
    """Send one pair per request from several clients; each waits for a response before its next request."""
    local, started = threading.local(), time.perf_counter()

    def send(pair: Pair) -> tuple[float, int]:
        if not hasattr(local, "connection"):
            local.connection = http.client.HTTPConnection(server.host, server.port, timeout=300)
        body, begun = json.dumps({"pairs": [pair]}), time.perf_counter()
        local.connection.request("POST", "/v1/compare", body, {"Content-Type": "application/json"})
        response = local.connection.getresponse()
        response.read()
        return time.perf_counter() - begun, response.status

    with ThreadPoolExecutor(clients) as threads:
        found = list(threads.map(send, pairs))
    waits, statuses = (list(column) for column in zip(*found, strict=True))
    return Load(time.perf_counter() - started, waits, statuses)


def fresh_pairs() -> Iterator[Pair]:
    """Yield pairs of the town hall's texts, no two texts the same."""
    votes = town_hall(2000, seed=1).preferences
    for n in itertools.count():
        row = n % len(votes)
        a, b = (f"{votes.responses[index[row]]} ({n})" for index in (votes.a_index, votes.b_index))
        yield {"prompt": str(votes.prompts[votes.prompt_index[row]]), "response_a": a, "response_b": b}


def compare_all(ensemble: RewardEnsemble, lines: bytes) -> list[ComparedLine]:
    """Compare offline."""
    return list(compare(ensemble, io.BytesIO(lines)))


def take(pairs: Iterator[Pair], n: int) -> list[Pair]:
    """Return the next n pairs."""
    return list(itertools.islice(pairs, n))


def seconds_of(work: Any) -> float:
    """Return the duration of a call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
