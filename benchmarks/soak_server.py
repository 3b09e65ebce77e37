"""The processes of ``soak.py``: ``pluralign serve``, clients of it, and a fake server of OpenAI's API that fails."""

import asyncio
import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_SECONDS = 4
"""The server's limit for candidates."""
MAX_REQUESTS = 96
"""The server's limit of concurrent requests, which the clients of the overload exceed. The command has no option."""
START = f"""
from dataclasses import replace
from pluralign.cli.main import main
from pluralign.server.limits import Limits

of = Limits.of
Limits.of = lambda *options: replace(of(*options), requests={MAX_REQUESTS})
main()
"""


@dataclass
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    port: int
    log_file: Path

    @classmethod
    async def start(cls, folder: Path, upstream: str) -> "Server":
        """Run ``pluralign serve`` in its own process."""
        limits = {"--max-seconds": MAX_SECONDS, "--timeout": 2, "--concurrency": 16}
        options = ["--model", "m", "--base-url", upstream, "-n", "2", "--port", "0", "--name", "town", "--json"]
        for name, value in limits.items():
            options += [name, str(value)]
        command = [sys.executable, "-c", START, "serve", str(folder / "ensemble"), *options]
        log_file = folder / "log"
        with log_file.open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        assert process.stdout
        line = await asyncio.to_thread(process.stdout.readline)
        if not line:
            raise SystemExit(f"the server did not start: {log_file.read_text()}")
        return cls(process, int(json.loads(line)["address"].rpartition(":")[2]), log_file)

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    @property
    def log(self) -> str:
        """What it has written to stderr."""
        return self.log_file.read_text()


@dataclass(frozen=True)
class Reply:
    """An answer of the server."""

    status: int
    headers: dict[str, str]
    content: bytes


class Client:
    """One connection, kept open as long as the server keeps it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def send(self, method: str, path: str, body: Any = None) -> Reply | None:
        """Send a request and return the answer; None if the connection is refused or closed."""
        content = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
        try:
            self.streams = self.streams or await asyncio.open_connection("127.0.0.1", self.server.port)
            reader, writer = self.streams
            writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
            status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            reply = Reply(int(status.split()[1]), headers, await reader.readexactly(int(headers["content-length"])))
        except (ConnectionError, asyncio.IncompleteReadError):
            await self.close()
            return None
        if headers.get("connection") == "close":
            await self.close()
        return reply

    async def close(self) -> None:
        """Close the connection."""
        if self.streams:
            self.streams[1].close()
            with suppress(ConnectionError):
                await self.streams[1].wait_closed()
            self.streams = None


class Upstream:
    """A server of OpenAI's API. The first word of a question says how it fails."""

    def __init__(self) -> None:
        self.waiting = 0
        """Requests that wait for ``go``."""
        self.go = asyncio.Event()
        self.server: asyncio.Server | None = None

    async def start(self) -> str:
        """Listen on a free port, and return the base URL."""
        self.server = await asyncio.start_server(self._handle, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/v1"

    def close(self) -> None:
        """Stop to listen."""
        if self.server:
            self.server.close()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = re.search(r"content-length: (\d+)", head)
                body = await reader.readexactly(int(length[1])) if length else b""
                if head.startswith("get"):
                    status, content = 200, json.dumps({"data": [{"id": "m"}]})
                else:
                    kind = json.loads(body)["messages"][-1]["content"].partition(":")[0]
                    if kind == "silent":
                        await reader.read()  # until the client gives up
                    if kind in ("drop", "silent"):
                        break
                    status, content = await self._reply(kind)
                # The openai client waits that long between attempts.
                fields = f"Content-Length: {len(content)}\r\nContent-Type: application/json\r\nretry-after-ms: 20\r\n"
                writer.write(f"HTTP/1.1 {status} Status\r\n{fields}\r\n{content}".encode())
        writer.close()

    async def _reply(self, kind: str) -> tuple[int, str]:
        if kind == "wait":
            self.waiting += 1
            await self.go.wait()
        if kind.isdecimal():
            return int(kind), json.dumps({"error": {"message": "a fault of the soak"}})
        texts: dict[str, list[Any]] = {
            "empty": [],
            "types": [5, {}],
            "long": ["x" * 40_000],
            "surrogate": ["a\ud800", "b"],
        }
        choices = [{"message": {"content": text}} for text in texts.get(kind, ["Yes, please.", "No."])]
        whole = json.dumps({"choices": choices})
        return 200, {"page": "<html>A page</html>", "cut": whole[:-9], "deep": "[" * 100_000}.get(kind, whole)
