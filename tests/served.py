"""A real server on a free port, a plain HTTP client, and a fake language model, for tests of the server."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

from pluralign import RewardEnsemble, SamplingOptions, create_app
from pluralign.server.limits import Limits
from pluralign.server.run import Server
from pluralign.text.causal import Completion
from pluralign.votes.prompts import Item, PromptLike

TEXTS = ["Yes, we should plant many more trees.", "No.", "Perhaps: it depends on the cost, and on who pays for it."]


SECRET = "a-secret-nobody-should-log"


HELLO = [{"role": "user", "content": "Tea?"}]


@dataclass
class Writer:
    """A fake language model."""

    name: str = "writer"
    responses: Sequence[str] = tuple(TEXTS)
    error: Exception | None = None
    go: threading.Event = field(default_factory=threading.Event)
    requests: list[tuple[PromptLike, int, SamplingOptions]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.go.set()

    def prepare(self) -> None:
        pass

    def sample(self, prompt: PromptLike, n: int, options: SamplingOptions, seed: int) -> list[Completion]:
        self.requests.append((prompt, n, options))
        self.go.wait(10)
        if self.error:
            raise self.error
        return [Completion(response) for response in self.responses][:n]


class Client:
    """A plain HTTP client."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.host, _, port = address.removeprefix("http://").partition(":")
        self.port = int(port)
        self.service: Any = None

    def send(
        self, path: str, body: Any = None, *, method: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=30)
        try:
            sent = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            own = {"Content-Type": "application/json"} if sent is not None else {}
            given = own | {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method or ("GET" if sent is None else "POST"), path, sent, given)
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def json(self, path: str, body: Any = None, **headers: str) -> Any:
        status, _, content = self.send(path, body, **headers)
        assert status == 200, content
        return json.loads(content)

    def error(self, path: str, body: Any = None, **headers: str) -> tuple[int, str, str]:
        """Return the status, code and message of an error in OpenAI's format."""
        status, _, content = self.send(path, body, **headers)
        error = json.loads(content)["error"]
        assert set(error) == {"message", "type", "code", "param"}
        return status, error["code"], error["message"]

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key="any", max_retries=0)


@contextmanager
def running(ensemble: RewardEnsemble, generator: Any = None, **options: Any) -> Iterator[Client]:
    """A real server on a free port."""
    limits = options.pop("limits", None) or Limits()
    app = create_app(ensemble, generator=generator, limits=limits, **({"name": "town"} | options))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server.of(app, limits)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            client = Client(f"http://127.0.0.1:{listening.getsockname()[1]}")
            client.service = app.state.service
            yield client
        finally:
            server.should_exit = True
            thread.join()


def pair(**changes: Any) -> dict[str, Any]:
    return {"prompt": "Tea?", "response_a": TEXTS[0], "response_b": TEXTS[1]} | changes


def wait_until(condition: Callable[[], Any]) -> None:
    for _ in range(4000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("the condition never became true")


class Counting:
    """Replaces an ensemble's scorer by one that waits for ``go`` and records the sizes of its batches."""

    def __init__(self, ensemble: RewardEnsemble, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.go = threading.Event()
        own = ensemble.scorer(average=True)

        def score(items: Sequence[Item]) -> Any:
            self.sizes.append(len(items))
            self.go.wait(10)
            return own(items)

        monkeypatch.setattr(RewardEnsemble, "scorer", lambda _, **__: score)
