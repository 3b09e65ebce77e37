"""Sampling from a server: a real HTTP server on this machine returns scripted replies, good and bad."""

import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from conftest import WriteLines, facts_of, json_lines, printed, run
from judging import Parrot

from pluralign.answering.generate import Sampler, generate
from pluralign.core.errors import DataError, MissingExtraError, UsageError
from pluralign.text import remote
from pluralign.text.causal import Completion
from pluralign.text.judge import MAX_CHARACTERS, Question, judge_pairs
from pluralign.text.options import RemoteOptions, SamplingOptions
from pluralign.text.remote import ServerModel, read_choice, read_choices
from pluralign.votes.candidates import load_candidates
from pluralign.votes.prompts import Message

PROMPTS = [f"Question {i}?" for i in range(6)]
SECRET = "sk-very-secret"
RETRY_AT_ONCE = {"retry-after-ms": "1"}
"""A header that makes the client retry at once."""


@dataclass
class Reply:
    """A reply of the server; ``body`` is bytes, or a value to write as JSON."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    keep_back: int = 0
    """Number of bytes that are announced and never sent."""
    pause: float = 0
    """Seconds between headers and body, and between its bytes."""


Request = Mapping[str, Any]
Script = Callable[[Request], Reply]


def says(*texts: Any) -> Reply:
    return Reply({"choices": [{"index": i, "message": {"content": text}} for i, text in enumerate(texts)]})


def fails(status: int, message: str, **more: Any) -> Reply:
    return Reply({"error": {"message": message, **more}}, status, RETRY_AT_ONCE)


def prompt_of(request: Request) -> str:
    return str(request["messages"][-1]["content"])


def counts(request: Request) -> Reply:
    """Return as many different texts as were requested."""
    return says(*(f"{prompt_of(request)} {request.get('seed', 0)} {i}" for i in range(request.get("n", 1))))


class Upstream(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, script: Script, models: Reply) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.models = script, models
        self.requests: list[Request] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def model(self, name: str = "parrot", concurrency: int = 1, **changes: Any) -> ServerModel:
        return ServerModel(name, RemoteOptions(base_url=self.url, concurrency=concurrency, **changes))


class Handler(BaseHTTPRequestHandler):
    server: Upstream

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        self.send(self.server.models)

    def do_POST(self) -> None:
        self.server.keys.append(self.headers["authorization"])
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append(request)
        known = self.path == "/v1/chat/completions"
        self.send(self.server.script(request) if known else Reply(b"404 page not found", 404))

    def send(self, reply: Reply) -> None:
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in ({"content-length": str(len(body) + reply.keep_back)} | dict(reply.headers)).items():
            self.send_header(name, value)
        self.end_headers()
        try:
            for byte in [body[i : i + 1] for i in range(len(body))] if reply.pause else [body]:
                self.wfile.write(byte)
                time.sleep(reply.pause)
        except OSError:  # the client closed the connection
            pass
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


MODELS = Reply({"data": [{"id": "parrot"}, {"id": "raven"}]})
Serve = Callable[..., Upstream]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    started: list[Upstream] = []

    def start(script: Script = counts, models: Reply = MODELS) -> Upstream:
        started.append(Upstream(script, models))
        threading.Thread(target=started[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return started[-1]

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def sample(model: Sampler, prompt: Any = "Tea?", n: int = 3, seed: int = 5, **changes: Any) -> list[str]:
    return [completion.text for completion in model.sample(prompt, n, SamplingOptions(**changes), seed)]


# --- requests ---------------------------------------------------------------------------------------------------------


def test_one_request_asks_for_all_responses_with_every_setting(serve: Serve) -> None:
    server = serve()
    chat = (Message("system", "Be brief."), Message("user", "Tea?"))
    texts = sample(server.model(), chat, seed=2**55 + 5, temperature=1.3, top_p=0.9, max_new_tokens=17)
    assert texts == ["Tea? 5 0", "Tea? 5 1", "Tea? 5 2"], "seeds are below 2³¹"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tea?"}]
    settings = {"temperature": 1.3, "top_p": 0.9, "max_tokens": 17, "n": 3, "seed": 5}
    assert server.requests == [{"model": "parrot", "messages": messages, **settings}]


@pytest.mark.parametrize(
    ("at_most", "n", "requested"),
    [(1, 3, [3, 1, 1, 1, 1, 1]), (4, 10, [10, 4, 2, 4, 4, 2]), (100, 150, [100, 50] * 2)],
    ids=["one response at a time", "fewer than requested", "a limit of ours"],
)
def test_requests_shrink_to_what_a_server_returns(serve: Serve, at_most: int, n: int, requested: list[int]) -> None:
    server = serve(lambda request: counts({**request, "n": min(at_most, request.get("n", 1))}))
    model = server.model()
    for _ in range(2):
        assert len(set(sample(model, n=n))) == n, "seeds differ"
    assert [request.get("n", 1) for request in server.requests] == requested, "the model remembers the limit"


@pytest.mark.parametrize(
    ("parameter", "rejection"),
    [
        ("n", fails(400, "Only n=1 is supported")),
        ("n", fails(400, "Invalid value", param="n")),
        ("seed", Reply({"detail": [{"loc": ["body", "seed"], "msg": "extra fields not permitted"}]}, 422)),
        ("max_tokens", fails(400, "'max_tokens' is not supported; use 'max_completion_tokens' instead.")),
    ],
    ids=["n", "n by name", "seed", "max_tokens"],
)
def test_a_rejected_parameter_is_omitted_from_then_on(serve: Serve, parameter: str, rejection: Reply) -> None:
    server = serve(lambda request: rejection if parameter in request else counts(request))
    model = server.model()
    for rejected in (1, 0):
        server.requests.clear()
        assert len(sample(model)) == 3
        assert len(server.requests) == rejected + (3 if parameter == "n" else 1)
    assert (server.requests[-1].get("max_completion_tokens") == 256) == (parameter == "max_tokens")


# --- failing prompts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_stays_busy_or_broken_fails_the_prompt(serve: Serve, status: int) -> None:
    server = serve(lambda _: fails(status, "out of\norder"))
    with pytest.raises(DataError, match=rf"the server answered {status} on every attempt \(out of order\); "):
        sample(server.model())
    assert len(server.requests) == remote.RETRIES + 1


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (Reply(b"<html>Hello</html>"), r"reply is not JSON \(it begins with '<html>Hello</html>'\); check that"),
        (Reply(b"[" * 200_000), "the server's reply is not JSON"),
        (Reply(b'\xff\xfe{"choices"'), "the server's reply is not JSON"),
        (Reply([1, 2]), "the server's reply has no choices with a message each."),
        (Reply({"error": {"message": "overloaded"}}), "has no choices.*overloaded"),
        (Reply({"choices": []}), "has an empty list of choices"),
        (says(["Yes."]), "has a message whose content is not a text"),
        (Reply({"choices": []}, 302), "rejects the prompt with 302"),
        (fails(400, "temperature must be below 1"), r"rejects the prompt with 400 \(temperature must be below 1\)"),
        (fails(403, "your input was flagged"), r"rejects the prompt with 403 \(your input was flagged\)"),
        (Reply(b"<html>no</html>", 418), r"rejects the prompt with 418 \(it sent a web page\)"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_an_unusable_reply_fails_the_prompt_with_one_sentence(serve: Serve, reply: Reply, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        sample(serve(lambda _: reply).model())


def test_a_missing_text_is_empty_and_a_broken_one_is_repaired(serve: Serve) -> None:
    assert sample(serve(lambda _: says(None, "", "half \ud83d a pair")).model()) == ["", "", "half ? a pair"]
    assert read_choices(b'{"choices": [{"message": {"refusal": "No."}}]}') == [Completion("")]


def test_a_truncated_reply_is_requested_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRIES", 1)
    turns = itertools.count()
    cut = Reply(says("Yes, because").body, keep_back=20)
    server = serve(lambda request: counts(request) if next(turns) == 1 else cut)
    model = server.model()
    assert len(sample(model)) == 3
    assert len(server.requests) == 2
    turns = itertools.count(5)
    with pytest.raises(DataError, match="the server closed the connection on every attempt"):
        sample(model)


def test_a_silent_server_times_out(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRIES", 1)
    server = serve(lambda _: time.sleep(1.2) or says("late"))  # type: ignore[func-returns-value]
    with pytest.raises(DataError, match=r"did not answer within 0\.2 s, in any of 2 attempts; use a longer timeout"):
        sample(server.model(timeout=0.2))


def test_a_server_that_sends_byte_by_byte_times_out(serve: Serve) -> None:
    model = serve(lambda _: Reply(says("Yes.").body, pause=0.05)).model(timeout=0.3)
    began = time.monotonic()
    with pytest.raises(DataError, match=r"did not finish its reply within 0\.3 s"):
        sample(model)
    assert time.monotonic() - began < 1.5


def test_an_endless_reply_is_not_read_to_its_end(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_BYTES", 2**20)
    for status in (200, 418):
        server = serve(lambda _, status=status: Reply(b" " * 2**21, status))
        with pytest.raises(DataError, match="the server's reply is longer than 1 MB"):
            sample(server.model())


@pytest.mark.parametrize(
    "reply",
    [
        fails(400, "The maximum context length is 512 tokens, n given", code="context_length_exceeded"),
        fails(400, "the request exceeds the available context size"),
        fails(400, "Prompt is too long"),
        fails(413, "payload"),
    ],
    ids=lambda reply: str(reply.body["error"]["message"]),
)
def test_a_prompt_longer_than_the_window_fails_alone(serve: Serve, tmp_path: Path, reply: Reply) -> None:
    server = serve(lambda request: reply if prompt_of(request) == PROMPTS[1] else counts(request))
    done = generate(PROMPTS, tmp_path / "c.jsonl", server.model(concurrency=3), 2)
    assert done.lines == 5
    assert [failure.prompt for failure in done.failed] == [PROMPTS[1]]
    assert re.search("too long for the model.*shorten the prompt or lower max_new_tokens", done.failed[0].error)
    assert [request["n"] for request in server.requests] == [2] * 6, "the server did not reject n"


# --- errors that end a run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        (fails(401, "bad key"), r"rejects a request without a key \(bad key\); put a valid key into an environment"),
        (fails(403, "no access to this region"), r"rejects a request without a key \(no access"),
        (fails(429, "pay first", code="insufficient_quota"), r"rejects a request without a key \(pay first\)"),
        (fails(404, "no such model"), "has no model 'parot'; did you mean 'parrot'?"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_an_error_of_every_prompt_ends_the_run(serve: Serve, tmp_path: Path, reply: Reply, sentence: str) -> None:
    for concurrency in (1, 3):
        server = serve(lambda _: reply)
        with pytest.raises(UsageError, match=sentence):
            generate(PROMPTS, tmp_path / "c.jsonl", server.model("parot", concurrency), 2)
        assert len({prompt_of(request) for request in server.requests}) <= concurrency


def test_a_wrong_address_is_distinguished_from_an_unknown_model(serve: Serve) -> None:
    server = serve(models=Reply(b"<html>Welcome</html>"))
    model = ServerModel("parrot", RemoteOptions(base_url=server.url.removesuffix("/v1")))
    model.prepare()
    with pytest.raises(UsageError, match=r"has no chat completions for parrot .*most base URLs end in /v1"):
        sample(model)


def test_a_rejected_key_is_reported_before_sampling(serve: Serve) -> None:
    server = serve(models=fails(401, "who are you?"))
    with pytest.raises(UsageError, match=r"rejects a request without a key \(who are you\?\)"):
        server.model().prepare()
    for silent in (fails(403, "you may not list"), fails(404, "no list"), Reply({"data": [3]}), Reply(b"hello")):
        serve(models=silent).model().prepare()


def test_an_unreachable_server_is_one_sentence(serve: Serve, tmp_path: Path, write_jsonl: WriteLines) -> None:
    server = serve()
    server.shutdown()
    server.server_close()
    prompts = write_jsonl([{"prompt": prompt} for prompt in PROMPTS])
    done = run("generate", prompts, "-o", tmp_path / "c.jsonl", "--model", "parrot", "--base-url", server.url)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"pluralign: no server answers at {server.url} (")
    assert done.stderr.endswith("; start it, or check --base-url.\n")
    assert not (tmp_path / "c.jsonl").exists()


def test_a_server_that_goes_down_ends_the_run(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "RETRIES", 0)
    server = serve()

    def script(request: Request) -> Reply:
        if prompt_of(request) == PROMPTS[2]:
            server.shutdown()
            server.server_close()
            return Reply(b"{", keep_back=9)
        return counts(request)

    server.script = script
    with pytest.raises(UsageError, match="no server answers at"):
        generate(PROMPTS, tmp_path / "c.jsonl", server.model(), 2)
    assert [line["prompt"] for line in json_lines(tmp_path / "c.jsonl")] == PROMPTS[:2]


def test_the_openai_client_is_an_optional_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'pluralign\[server\]'"):
        ServerModel("parrot", RemoteOptions(base_url="http://localhost:1/v1")).prepare()


# --- the key ----------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_to_the_server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    sample(server.model())
    monkeypatch.setenv("OPENAI_API_KEY", f" {SECRET}\n")
    sample(server.model())
    monkeypatch.setenv("OTHER_KEY", "another")
    sample(server.model(api_key_env="OTHER_KEY"))
    assert server.keys == ["Bearer none", f"Bearer {SECRET}", "Bearer another"]


def test_the_key_does_not_follow_to_another_server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    other = serve()
    server = serve(lambda _: Reply(b"", 307, {"location": f"{other.url}/chat/completions"}))
    assert len(sample(server.model())) == 3
    assert (server.keys, other.keys) == ([f"Bearer {SECRET}"], [None])


@pytest.mark.parametrize("value", ["", "sk-\x00", "sk-é"])
def test_an_invalid_key_is_not_sent(serve: Serve, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"OTHER_KEY": value})
    with pytest.raises(UsageError, match="the environment variable OTHER_KEY has") as caught:
        serve().model(api_key_env="OTHER_KEY").prepare()
    assert "sk-" not in str(caught.value)


def test_the_key_is_never_shown_even_if_the_server_repeats_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, write_jsonl: WriteLines
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    prompts, path = write_jsonl([{"prompt": prompt} for prompt in PROMPTS]), tmp_path / "c.jsonl"
    server = serve(lambda _: fails(500, f"\x1b[31mIncorrect key {SECRET}"))
    done = run("--verbose", "generate", prompts, "-o", path, "--model", "parrot", "--base-url", server.url)
    assert done.returncode == 1, done.stderr
    assert "Incorrect key [key]" in " ".join(done.stdout.split())
    assert SECRET not in done.stdout + done.stderr + Path(f"{path}.failed").read_text()
    assert "\x1b" not in done.stdout
    server.script = lambda _: fails(401, f"Incorrect key {SECRET}")
    with pytest.raises(UsageError, match=r"rejects the key in OPENAI_API_KEY \(Incorrect key \[key\]\)"):
        sample(server.model())


# --- many prompts -----------------------------------------------------------------------------------------------------


def test_prompts_are_sampled_concurrently_and_written_in_their_order(serve: Serve, tmp_path: Path) -> None:
    meeting = threading.Barrier(3, timeout=10)

    def script(request: Request) -> Reply:
        meeting.wait()  # fails the test unless three requests arrive together
        time.sleep(0.05 * (5 - PROMPTS.index(prompt_of(request))))
        return counts(request)

    server, path = serve(script), tmp_path / "c.jsonl"
    done = generate(PROMPTS, path, server.model(concurrency=3), 2)
    assert (done.lines, done.failed, done.model) == (6, [], f"parrot at {server.url}")
    assert [one.prompt for one in load_candidates(path)] == PROMPTS
    server.script = counts
    generate(PROMPTS, tmp_path / "one.jsonl", server.model(), 2)
    assert path.read_bytes() == (tmp_path / "one.jsonl").read_bytes()


def test_threads_that_meet_the_same_rejections_together_all_continue(serve: Serve, tmp_path: Path) -> None:
    meeting = threading.Barrier(3, timeout=10)

    def script(request: Request) -> Reply:
        refused = {"max_tokens": "use max_completion_tokens", "seed": "no seed", "n": "n must be 1"}
        for parameter, words in refused.items():
            if parameter in request:
                meeting.wait()
                return fails(400, words)
        return says(f"{time.monotonic_ns()}")

    done = generate(PROMPTS[:3], tmp_path / "c.jsonl", serve(script).model(concurrency=3), 2)
    assert (done.lines, done.failed) == (3, [])


def test_an_interrupted_run_keeps_finished_prompts_and_resumes(serve: Serve, tmp_path: Path) -> None:
    interrupted = threading.Event()

    def script(request: Request) -> Reply:
        if prompt_of(request) not in PROMPTS[:2]:
            interrupted.wait(10)
        return counts(request)

    def interrupt(done: int, _: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    server, path = serve(script), tmp_path / "c.jsonl"
    with pytest.raises(KeyboardInterrupt):
        generate(PROMPTS, path, server.model(concurrency=2), 2, progress=interrupt)
    interrupted.set()
    time.sleep(0.3)
    assert len(server.requests) <= 4, "no further requests were sent"
    assert len(json_lines(path)) == 2
    done = generate(PROMPTS, path, server.model(concurrency=2), 2)
    assert (done.resumed, done.lines) == (2, 6)
    assert [one.prompt for one in load_candidates(path)] == PROMPTS


def test_control_c_does_not_wait_for_the_server(serve: Serve, tmp_path: Path, write_jsonl: WriteLines) -> None:
    finished = threading.Semaphore(0)

    def script(request: Request) -> Reply:
        if prompt_of(request) == PROMPTS[0]:
            return counts(request)
        finished.release()
        time.sleep(20)
        return counts(request)

    server, path = serve(script), tmp_path / "c.jsonl"
    prompts = write_jsonl([{"prompt": prompt} for prompt in PROMPTS])
    command = ["generate", str(prompts), "-o", str(path), "--model", "parrot", "--base-url", server.url, "-n", "2"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    process = subprocess.Popen([sys.executable, "-m", "pluralign", *command, "--concurrency", "2"], stderr=-3)
    signal.signal(signal.SIGINT, before)
    for _ in range(2):
        assert finished.acquire(timeout=20)
    written = time.monotonic() + 20
    while not path.exists() or not path.read_bytes().endswith(b"\n"):  # it may be written later
        assert time.monotonic() < written
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=15) != 0
    assert [line["prompt"] for line in json_lines(path)] == PROMPTS[:1]


def cut(*texts: str, reason: object = "length") -> Reply:
    """Return texts; the first has another finish reason than ``stop``."""
    reasons = [reason, *["stop"] * (len(texts) - 1)]
    choices = [{"message": {"content": text}, "finish_reason": why} for text, why in zip(texts, reasons, strict=True)]
    return Reply({"choices": choices})


@pytest.mark.parametrize(
    ("reason", "counted"), [("length", 2), ("stop", 0), ("content_filter", 0), (None, 0), (["length"], 0)]
)
def test_responses_that_are_cut_off_are_counted(serve: Serve, tmp_path: Path, reason: object, counted: int) -> None:
    server = serve(lambda request: cut(f"{prompt_of(request)} and", "No.", reason=reason))
    for resumed in (0, 2):
        done = generate(["Tea?", "Rum?"], tmp_path / "c.jsonl", server.model(), 2)
        assert (done.resumed, done.responses, done.cut_off) == (resumed, 4, counted)
    assert [line["responses"][0] for line in json_lines(tmp_path / "c.jsonl")] == ["Tea? and", "Rum? and"]


def test_a_dropped_response_does_not_count_as_cut_off(serve: Serve, tmp_path: Path) -> None:
    rounds = iter([cut("", "No."), cut("No."), cut("Yes"), cut("Yes")])
    done = generate(["Tea?"], tmp_path / "c.jsonl", serve(lambda _: next(rounds)).model(), 2)
    assert (done.responses, done.empty, done.repeats, done.cut_off) == (2, 1, 1, 1)


# --- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"base_url": "localhost:8000"}, "the base URL must look like http://localhost:8000/v1"),
        ({"base_url": "http://[::1/v1"}, "the base URL must look like"),
        ({"base_url": "http://host:99999/v1"}, "the base URL must look like"),
        ({"base_url": "http://ann:secret@localhost/v1"}, "must not contain a password"),
        ({"base_url": "http://localhost/v1?key=secret"}, "must not contain a password"),
        ({"base_url": "http://localhost/v1", "concurrency": 0}, "concurrency must be from 1 to 256, not 0."),
        ({"base_url": "http://localhost/v1", "timeout": 0}, "timeout must be above 0 and at most 86,400 seconds"),
        ({"concurrency": 4}, "concurrency requires base_url."),
    ],
    ids=str,
)
def test_invalid_options_are_reported_in_one_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence.replace("?", r"\?")) as caught:
        RemoteOptions(**options)
    assert "secret" not in str(caught.value)


def test_generate_reports_responses_that_were_cut_off(serve: Serve, tmp_path: Path, write_jsonl: WriteLines) -> None:
    server, path = serve(lambda _: cut("Yes, and", "No.")), tmp_path / "c.jsonl"
    prompts = write_jsonl([{"prompt": prompt} for prompt in PROMPTS])
    remote = ("--model", "parrot", "--base-url", f"{server.url}/")
    command: tuple[str | Path, ...] = ("generate", prompts, "-o", path, *remote, "-n", "2")
    assert "6 responses were cut off at --max-new-tokens; a higher value lets them end" in printed(*command)
    assert [one.prompt for one in load_candidates(path)] == PROMPTS


def test_answer_samples_from_a_server_and_distills_with_it(serve: Serve, small_folder: Path) -> None:
    def script(request: Request) -> Reply:
        return says(*["We all want tea."] * 4) if request["model"] == "raven" else says("Yes.", "", " Yes. ", "Never.")

    server = serve(script)
    models = ("--model", "parrot", "--distill", "raven", "--base-url", server.url)
    facts = facts_of("answer", small_folder, "Tea?", *models)
    assert facts["candidates"] == 2
    assert any(note.endswith("gave 2 distinct responses, not 8") for note in facts["notes"])
    assert {one["text"] for one in facts["answers"]} <= {"Yes.", "Never."}
    assert facts["distilled"]["text"] == "We all want tea."
    written = next(request for request in server.requests if request["model"] == "raven")
    assert "People were asked: Tea?" in prompt_of(written)
    assert facts["answers"][0]["text"] in prompt_of(written)
    assert (server.requests[0]["temperature"], written["temperature"]) == (1.2, 0.7)


# --- judge ------------------------------------------------------------------------------------------------------------


TREES = Question("likes trees", "Park?", "More trees, please.", "A car park.")
CARS = Question("likes parking", "Park?", "More trees, please.", "Parking for cars.")


def with_log_probs(**logprobs: float) -> Reply:
    top = [{"token": token, "logprob": value} for token, value in logprobs.items()]
    choice = {"message": {"content": "A"}, "logprobs": {"content": [{"top_logprobs": top}]}}
    return Reply({"choices": [choice], "usage": {"prompt_tokens": 90, "completion_tokens": 1}})


def test_each_pair_is_asked_in_both_orders_and_calls_are_counted() -> None:
    parrot = Parrot()
    judged = judge_pairs(parrot, [TREES, CARS])
    assert judged.prob_a.tolist() == [1.0, 0.0]
    assert len(parrot.asked) == judged.usage.calls == 4
    assert parrot.asked[1].index("A car park.") < parrot.asked[1].index("More trees")
    assert (judged.usage.tokens_in, judged.usage.tokens_out, judged.usage.unanswered) == (28, 4, 0)


@pytest.mark.parametrize(("says_a", "unanswered"), [(1.0, 0), (math.nan, 2)])
def test_a_judge_without_an_opinion_prefers_nothing(says_a: float, unanswered: int) -> None:
    judged = judge_pairs(Parrot(judges=lambda _: says_a), [TREES])
    assert (judged.prob_a.tolist(), judged.usage.unanswered) == ([0.5], unanswered)


def test_one_order_is_enough_and_many_failures_end_the_run() -> None:
    assert judge_pairs(Parrot(fails=1), [TREES] * 10).prob_a.tolist() == [1.0] * 10
    for concurrency in (1, 3):
        with pytest.raises(DataError, match="asleep"):
            judge_pairs(Parrot(fails=9), [TREES] * 10, concurrency=concurrency)


def test_threads_keep_the_order_of_the_questions() -> None:
    assert judge_pairs(Parrot(), [TREES, CARS] * 20, concurrency=4).prob_a.tolist() == [1.0, 0.0] * 20


def test_long_texts_are_shortened() -> None:
    text = Question("", "x" * 9_000, "y" * 9_000, "z" * 9_000).text()
    assert len(text) < 3 * MAX_CHARACTERS + 500
    assert "description" not in text


def test_a_server_gives_log_probabilities_of_the_letters(serve: Serve) -> None:
    upstream = serve(lambda _: with_log_probs(A=math.log(0.6), B=math.log(0.2), The=math.log(0.1)))
    choice = upstream.model().choose("A or B?", ("A", "B"))
    assert choice.prob == pytest.approx(0.75)
    assert (choice.tokens_in, choice.tokens_out) == (90, 1)
    assert upstream.requests[0]["logprobs"] is True
    assert upstream.requests[0]["temperature"] == 0


def test_a_server_without_log_probabilities_is_read_by_its_text(serve: Serve) -> None:
    def script(request: Request) -> Reply:
        if "logprobs" in request:
            return fails(400, "logprobs are not supported")
        return says("Response B, because" if "tea" in prompt_of(request) else "Neither.")

    model = serve(script).model()
    assert model.choose("tea?", ("A", "B")).prob == 0.0
    assert math.isnan(model.choose("rum?", ("A", "B")).prob)


def test_a_damaged_reply_is_an_error_and_odd_log_probabilities_are_ignored() -> None:
    with pytest.raises(DataError, match="not JSON"):
        read_choice(b"<html>", ("A", "B"))
    odd: Any
    huge = {"content": [{"top_logprobs": [{"token": "A", "logprob": 1e308}]}]}
    for odd in (None, {"content": []}, {"content": [{"top_logprobs": [{"token": None}]}]}, "?", huge):
        choices = [{"message": {"content": "A"}, "logprobs": odd}]
        for count in ("x", [1], -5, 1e400, math.nan):
            usage = {"prompt_tokens": count, "completion_tokens": 2}
            choice = read_choice(json.dumps({"choices": choices, "usage": usage}).encode(), ("A", "B"))
            assert (choice.prob, choice.tokens_in, choice.tokens_out) == (1.0, 0, 2)
