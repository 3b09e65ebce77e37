"""Measure the server: throughput against the command line, latency, errors, memory, and overload.

    python benchmarks/serving.py [--pairs 768] [--requests 10000] [--clients 32] [--encoder minilm] [--quick] [--json]

The server runs in its own process, and this process sends requests over loopback, so both share the machine's cores.
Throughput is compared with offline `compare` on new texts of the same kind, in alternating rounds; the ratio is that of
the medians. A full batch has the maximum number of texts per batch. The long run uses the hashing encoder, because it
measures HTTP, batching and memory, not a model.
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
from rich import box
from rich.console import Console
from rich.table import Table

from pluralign import RewardEnsemble, fit, town_hall
from pluralign.scale.lines import ComparedLine, compare
from pluralign.server.limits import Limits
from pluralign.server.run import serve

ROUNDS = 3
TIGHT = Limits(queue_texts=64, batch_texts=16)
"""Limits of the overloaded server."""
Pair = dict[str, Any]


def main() -> None:
    """Run the benchmark and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=768, help="pairs per round, offline and online")
    parser.add_argument("--requests", type=int, default=10_000, help="requests of the long run")
    parser.add_argument("--clients", type=int, default=32, help="concurrent clients")
    parser.add_argument("--encoder", default="minilm", help="encoder of the throughput part")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything, one round")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    pairs, requests = arguments.pairs, arguments.requests
    rounds = 1 if arguments.quick else ROUNDS
    if arguments.quick:
        pairs, requests = max(64, pairs // 10), requests // 10
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PLURALIGN_CACHE"] = str(Path(folder) / "cache")  # an empty cache
        found = throughput(Path(folder), arguments.encoder, pairs, arguments.clients, rounds)
        found |= long_run(Path(folder), requests, arguments.clients)
        found |= overload(Path(folder), requests // 10, 2 * arguments.clients)
    if arguments.json:
        print(json.dumps(found))
        return
    table = Table(
        box=box.SIMPLE_HEAD, title=f"{arguments.clients} clients, one pair per request, {os.cpu_count()} cores"
    )
    for heading in ("", "measured", "target"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, value in found.items():
        table.add_row(name, f"{value:,.4g}" if isinstance(value, float) else f"{value:,}", TARGETS.get(name, ""))
    Console(width=120).print(table)


TARGETS = {
    "online / offline throughput": "≥ 0.8",
    "p99 / full batch": "< 5",
    "errors": "0",
    "MB at 100 % / at 10 %": "≈ 1",
    "wrong answers after overload": "0",
    "answers neither 200 nor 503": "0",
}


# --- the parts --------------------------------------------------------------------------------------------------------


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


def long_run(folder: Path, n: int, clients: int) -> dict[str, Any]:
    """Send many requests; count errors and measure memory."""
    where = folder / "hashing"
    fit(town_hall(400).preferences, k=8, encoder="hashing", folder=where)
    pairs, megabytes, statuses = fresh_pairs(), [], []
    seconds = 0.0
    with serving(where) as server:
        for share in (0.1, 0.4, 0.5):
            done = load(server, take(pairs, round(share * n)), clients)
            statuses += done.statuses
            seconds += done.seconds
            megabytes.append(server.megabytes)
    return {
        "requests": len(statuses),
        "requests/s (hashing)": len(statuses) / seconds,
        "errors": sum(status != 200 for status in statuses),
        "server's MB at 10 %": megabytes[0],
        "server's MB at 50 %": megabytes[1],
        "server's MB at 100 %": megabytes[2],
        "MB at 100 % / at 10 %": megabytes[2] / megabytes[0],
    }


def overload(folder: Path, n: int, clients: int) -> dict[str, Any]:
    """Send more than the server accepts; count 503 responses, and wrong answers afterwards."""
    where = folder / "hashing"
    ensemble, pairs = RewardEnsemble.load(where), fresh_pairs()
    with serving(where, TIGHT) as server:
        flood = load(server, take(pairs, n), clients, pairs_per_request=8)
        after = take(pairs, 200)
        calm = load(server, after, 4)
    expected = compare_all(ensemble, "\n".join(map(json.dumps, after)).encode())
    right = [one["votes"] == other["results"][0]["votes"] for one, other in zip(expected, calm.bodies, strict=True)]
    return {
        "overload: requests": len(flood.statuses),
        "overload: answered with 503": flood.statuses.count(503),
        "overload: 503 without Retry-After": flood.without_retry_after,
        "answers neither 200 nor 503": sum(status not in (200, 503) for status in flood.statuses),
        "wrong answers after overload": len(right) - sum(right),
    }


# --- a server, and a load on it ---------------------------------------------------------------------------------------


@dataclass
class Server:
    """A running server."""

    host: str
    port: int
    pid: int

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

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


def run_server(folder: Path, limits: Limits, ready: Connection) -> None:
    """Serve an ensemble, and send its address."""
    serve(RewardEnsemble.load(folder), port=0, limits=limits, ready=ready.send)


@contextmanager
def serving(folder: Path, limits: Limits | None = None) -> Iterator[Server]:
    """Run a server in its own process."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=run_server, args=(folder, limits or Limits(), theirs))
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
    """Results of a load, one per request, in the order of the pairs."""

    seconds: float
    waits: list[float]
    statuses: list[int]
    bodies: list[Any]
    without_retry_after: int


def load(server: Server, pairs: Sequence[Pair], clients: int, pairs_per_request: int = 1) -> Load:
    """Send pairs from several clients; each waits for a response before its next request."""
    requests = [pairs[start : start + pairs_per_request] for start in range(0, len(pairs), pairs_per_request)]
    found: list[tuple[float, int, Any, bool]] = [(0.0, 0, None, False)] * len(requests)
    turns, lock = iter(range(len(requests))), threading.Lock()

    def client() -> None:
        connection = http.client.HTTPConnection(server.host, server.port, timeout=300)
        while True:
            with lock:
                turn = next(turns, None)
            if turn is None:
                connection.close()
                return
            body, started = json.dumps({"pairs": requests[turn]}), time.perf_counter()
            connection.request("POST", "/v1/compare", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = json.loads(response.read())
            lacks = response.status == 503 and not response.getheader("Retry-After")
            found[turn] = (time.perf_counter() - started, response.status, content, lacks)

    started = time.perf_counter()
    with ThreadPoolExecutor(clients) as threads:
        for one in [threads.submit(client) for _ in range(clients)]:
            one.result()
    waits, statuses, bodies, lacking = (list(column) for column in zip(*found, strict=True))
    return Load(time.perf_counter() - started, waits, statuses, bodies, sum(lacking))


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
