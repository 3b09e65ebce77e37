"""Soak the server: many requests, overload, slow clients, upstream faults, and SIGTERM while requests are running.

    python benchmarks/soak.py [--requests 50000] [--json]

`pluralign serve` runs in its own process with a fitted ensemble (hashing features), and this process sends requests
over loopback; every text is new. A fake server of OpenAI's API in this process writes the candidates of chats, or
fails. Every kind of load comes in four rounds. Memory is measured after each round, when the server has returned what
it does not use. The first two rounds are the warm-up: the server's cache of rewards becomes full in the second. Memory
must not grow after it. Latencies are ratios to the first phase. The exit status is 1 if a promise is broken.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from serving import fresh_pairs
from soak_server import Client, Server, Upstream
from tables import show

from pluralign import fit, town_hall

CLIENTS = 32
OVERLOAD_CLIENTS = 256
HALF_OPEN = 200
SLOW_BODIES = 48
"""With the other clients, fewer than ``Limits.requests``."""
ROUNDS = 4
WARM_UP = 2
"""Rounds before memory must not grow any more."""
MAX_GROWTH = 2.0
"""Megabytes of resident memory, from the end of the warm-up to the end of the last round."""
SECONDS_TO_SETTLE = 12
"""The server returns unused memory every 10 seconds."""
MAX_SLOWDOWN = 3.0
"""Median latency beside slow clients, to that of the steady phase."""
FINE = ("fine", "surrogate")
FAULTS = ("500", "429", "400", "404", "401", "page", "cut", "empty", "types", "deep", "long", "drop", "silent")
LINE = re.compile(r"POST (?:/v1/compare|/v1/score|/v1/chat/completions) (\d+) \d+ ms")
"""The line of a request in the server's log."""
GONE = "499"

Request = tuple[str, dict[str, Any]]


def main() -> None:
    """Run the soak and print its table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=50_000, help="requests of all phases, without chats")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PLURALIGN_CACHE"] = str(Path(folder) / "cache")
        fit(town_hall(400).preferences, k=4, encoder="hashing", folder=Path(folder) / "ensemble")
        found = asyncio.run(soak(Path(folder), arguments.requests))
    kept = all(promise.kept for promise in found.promises)
    if arguments.json:
        promises = [vars(promise) | {"kept": promise.kept} for promise in found.promises]
        phases = [phase.figures(found.steady) for phase in found.phases]
        memory = {"megabytes": found.megabytes, "settled": found.settled}
        print(json.dumps({"kept": kept, "promises": promises, "phases": phases} | memory))
    else:
        print_tables(found)
    sys.exit(0 if kept else 1)


# --- results ----------------------------------------------------------------------------------------------------------


@dataclass
class Phase:
    """Requests of one phase, and their answers."""

    name: str
    statuses: Counter[int] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    """Seconds of the requests that were answered with 200."""
    lost: int = 0
    """Requests without a complete answer."""
    wrong: int = 0
    """Answers 200 with another content than requested, and 503 without Retry-After."""

    def figures(self, steady: "Phase | None") -> dict[str, Any]:
        """Return the numbers of the phase."""
        p50, p99 = self.quantiles / (steady or self).quantiles
        counts = {str(status): n for status, n in sorted(self.statuses.items())}
        return {"phase": self.name, "statuses": counts, "lost": self.lost, "p50_ratio": p50, "p99_ratio": p99}

    @property
    def quantiles(self) -> Any:
        """Median and 99th percentile of the latency."""
        return np.quantile(self.waits or [np.nan], [0.5, 0.99])


@dataclass
class Promise:
    """A promise, and what was measured."""

    text: str
    measured: float
    most: float = 0

    @property
    def kept(self) -> bool:
        """Whether the measured value is within the promise."""
        return bool(self.measured <= self.most)


@dataclass
class Found:
    """Results of a soak."""

    phases: list[Phase] = field(default_factory=list)
    steady: Phase | None = None
    """The phase with which latencies are compared."""
    promises: list[Promise] = field(default_factory=list)
    megabytes: dict[int, float] = field(default_factory=dict)
    """The server's resident memory by number of requests, under load."""
    settled: list[float] = field(default_factory=list)
    """The server's resident memory after each round."""
    sent: int = 0

    def phase(self, name: str) -> Phase:
        """Start a phase."""
        self.phases.append(Phase(name))
        return self.phases[-1]


def print_tables(found: Found) -> None:
    """Print the tables of phases, memory and promises."""
    phases = [
        {**phase.figures(found.steady), "requests": phase.statuses.total() + phase.lost} for phase in found.phases
    ]
    show([row | {"statuses": str(row["statuses"])} for row in phases], f"{found.sent:,} requests with distinct texts")
    memory = {f"{sent:,} requests": megabytes for sent, megabytes in found.megabytes.items()}
    memory |= {f"after round {number}": megabytes for number, megabytes in enumerate(found.settled, 1)}
    show([{"": when, "resident memory, MB": megabytes} for when, megabytes in memory.items()])
    show(
        [
            {"promise": one.text, "measured": one.measured, "at most": one.most, "kept": str(one.kept)}
            for one in found.promises
        ]
    )


# --- the soak ---------------------------------------------------------------------------------------------------------


async def soak(folder: Path, n: int) -> Found:
    """Run all phases against one server."""
    found, requests, upstream = Found(), fresh_requests(), Upstream()
    server = await Server.start(folder, await upstream.start())
    try:
        every = max(n // 10, 1)

        async def run(name: str, share: float, clients: int, allowed: tuple[int, ...] = (200,)) -> Phase:
            phase = found.phase(name)
            await load(server, itertools.islice(requests, round(share * n)), clients, phase, counted)
            found.promises.append(Promise(f"{name}: answers other than {allowed}", others(phase, allowed)))
            return phase

        def counted() -> None:
            found.sent += 1
            if found.sent % every == 0:
                found.megabytes[found.sent] = server.megabytes

        for number in range(1, ROUNDS + 1):
            steady = await run(f"{number}: steady", 0.4 / ROUNDS, CLIENTS)
            found.steady = found.steady or steady

            health = asyncio.create_task(watch_health(server))
            await run(f"{number}: overload", 0.2 / ROUNDS, OVERLOAD_CLIENTS, (200, 503))
            health.cancel()
            found.promises.append(Promise(f"{number}: health checks that failed in the overload", await health))

            slow = asyncio.create_task(slow_clients(server))
            beside = await run(f"{number}: beside slow clients", 0.2 / ROUNDS, CLIENTS)
            found.promises.append(Promise(f"{number}: slow clients that the server did not end", await slow))
            slowdown = float(beside.quantiles[0] / steady.quantiles[0])
            text = f"{number}: median latency beside slow clients / steady"
            found.promises.append(Promise(text, slowdown, MAX_SLOWDOWN))

            phase = found.phase(f"{number}: chats, faults")
            chats = asyncio.create_task(fault_chats(server, max(n // (125 * ROUNDS), len(FAULTS) + len(FINE)), phase))
            await run(f"{number}: beside upstream faults", 0.2 / ROUNDS, CLIENTS)
            found.promises.append(Promise(f"{number}: faults not answered with 502, 503 or 504", await chats))
            await asyncio.sleep(SECONDS_TO_SETTLE)
            found.settled.append(server.megabytes)
        steps = np.diff(found.settled[WARM_UP - 1 :])
        text = f"memory growth after the warm-up, MB (by round: {', '.join(f'{step:+.1f}' for step in steps)})"
        found.promises.append(Promise(text, float(steps.sum()), MAX_GROWTH))
        found.promises += await stop(server, requests, upstream, found.phase("SIGTERM"))
    finally:
        server.process.kill()
        server.process.wait()
        upstream.close()
    found.promises += [
        Promise("answers 500", sum(phase.statuses[500] for phase in found.phases)),
        Promise("requests without an answer", sum(phase.lost for phase in found.phases)),
        Promise("wrong answers, 503 without Retry-After", sum(phase.wrong for phase in found.phases)),
        Promise("tracebacks in the log", server.log.count("Traceback")),
    ]
    return found


def others(phase: Phase, allowed: tuple[int, ...]) -> int:
    """Return how many answers have a status that is not allowed."""
    return phase.statuses.total() - sum(phase.statuses[status] for status in allowed)


async def watch_health(server: Server) -> int:
    """Check the server's health until cancelled; return the number of failures."""
    failures = 0
    with suppress(asyncio.CancelledError):
        while True:
            client = Client(server)
            reply = await client.send("GET", "/healthz")
            await client.close()
            failures += reply is None or reply.status != 200
            await asyncio.sleep(0.2)
    return failures


async def slow_clients(server: Server) -> int:
    """Open connections that send half of their headers, or a body byte by byte; return how many stay open."""

    async def one(start: bytes, piece: bytes) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        with suppress(ConnectionError):
            writer.write(start)
            for _ in range(120):
                writer.write(piece)
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.5):
                        await reader.read()
                        return True
            return False
        return True

    half = [one(b"GET /healthz HTTP/1.1\r\nHost: loc", b"a") for _ in range(HALF_OPEN)]
    head = (
        b"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9999\r\n\r\n"
    )
    bodies = [one(head + b"{", b" ") for _ in range(SLOW_BODIES)]
    return (await asyncio.gather(*half, *bodies)).count(False)


async def fault_chats(server: Server, n: int, phase: Phase) -> int:
    """Send chats whose candidates fail upstream; return how many got an answer that is neither right nor an error."""
    kinds = (*FAULTS, *FINE)
    unexpected = 0
    turns = iter(range(n))

    async def client() -> None:
        nonlocal unexpected
        for turn in turns:
            kind = kinds[turn % len(kinds)]
            status = await chat(server, f"{kind}: question {turn}", phase)
            unexpected += status not in ((200, 502, 503, 504) if kind in FINE else (502, 503, 504))

    await asyncio.gather(*(client() for _ in range(16)))
    for _ in range(60):  # requests to the upstream server that hang are ended by their own timeouts
        if await chat(server, "fine: is the upstream server back?", phase) == 200:
            return unexpected
        await asyncio.sleep(1)
    return unexpected + 1


async def chat(server: Server, text: str, phase: Phase) -> int:
    """Send one chat and return its status, 0 without an answer."""
    client = Client(server)
    body = {"model": "town:consensus", "messages": [{"role": "user", "content": text}]}
    reply = await client.send("POST", "/v1/chat/completions", body)
    await client.close()
    if reply is None:
        phase.lost += 1
        return 0
    phase.statuses[reply.status] += 1
    return reply.status


async def stop(server: Server, requests: Iterator[Request], upstream: Upstream, phase: Phase) -> list[Promise]:
    """Send SIGTERM while chats and other requests are running; compare the answers with the server's log."""
    before, refused = len(LINE.findall(server.log)), 0

    async def client() -> None:
        nonlocal refused
        client = Client(server)
        for path, body in requests:
            reply = await client.send("POST", path, body)
            if reply is None:  # refused, or closed before the request was accepted: the log tells them apart
                refused += 1
                return
            phase.statuses[reply.status] += 1

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    await asyncio.sleep(1)
    chats = [asyncio.create_task(chat(server, f"wait: question {number}", phase)) for number in range(4)]
    while upstream.waiting < len(chats):
        await asyncio.sleep(0.01)
    server.process.send_signal(signal.SIGTERM)
    upstream.go.set()
    await asyncio.gather(*clients)
    answered_chats = (await asyncio.gather(*chats)).count(200)
    code = await asyncio.to_thread(server.process.wait, 60)
    handled = sum(status != GONE for status in LINE.findall(server.log)[before:])
    return [
        Promise("SIGTERM: running chats not answered with 200", len(chats) - answered_chats),
        Promise("SIGTERM: requests in the log without an answer", handled - phase.statuses.total()),
        Promise("SIGTERM: answers other than 200", others(phase, (200,))),
        Promise("SIGTERM: clients that were not refused", CLIENTS - refused),
        Promise("SIGTERM: exit status", abs(code)),
    ]


# --- load -------------------------------------------------------------------------------------------------------------


async def load(
    server: Server, requests: Iterator[Request], clients: int, phase: Phase, counted: Callable[[], None]
) -> None:
    """Send requests from several clients; each waits for an answer before its next request."""

    async def one() -> None:
        client = Client(server)
        for path, body in requests:
            started = time.perf_counter()
            reply = await client.send("POST", path, body)
            counted()
            if reply is None:
                phase.lost += 1
                continue
            phase.statuses[reply.status] += 1
            if reply.status == 200:
                phase.waits.append(time.perf_counter() - started)
                phase.wrong += len(json.loads(reply.content)["results"]) != 1
            elif reply.status == 503:
                phase.wrong += "retry-after" not in reply.headers
        await client.close()

    await asyncio.gather(*(one() for _ in range(clients)))


def fresh_requests() -> Iterator[Request]:
    """Yield comparisons and scores of the town hall's texts in turn, no two texts the same."""
    for number, pair in enumerate(fresh_pairs()):
        if number % 2:
            yield "/v1/score", {"texts": [{"prompt": pair["prompt"], "response": pair["response_a"]}]}
        else:
            yield "/v1/compare", {"pairs": [pair]}


if __name__ == "__main__":
    main()
