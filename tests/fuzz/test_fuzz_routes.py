"""Hostile requests on every route: the server answers each with a documented status and body, and goes on serving.

The requests are generated from ``/openapi.json`` and seeded: request n is always the same. ``PLURALIGN_FUZZ_CASES``
sets their number. A failure prints the number and the bytes of each request that broke the contract.
"""

import copy
import http.client
import json
import math
import random
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import pytest
from served import SECRET, Client, Writer, running

import fuzz
from pluralign import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.server.limits import Limits
from pluralign.server.schemas import ErrorBody

N_CASES = len(fuzz.cases())
SEED = 17
DOCUMENTED_5XX = (502, 503, 504)
LIMITS = Limits(body_bytes=200_000, characters=2_000, texts=40, candidates=8, body_seconds=0.2, drain_seconds=0.1)

Json: TypeAlias = Any
Random: TypeAlias = random.Random


@dataclass(frozen=True)
class Request:
    """One request, as it is sent."""

    method: bytes
    target: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes = b""
    version: bytes = b"HTTP/1.1"

    @property
    def content(self) -> bytes:
        head = b"".join(name + b": " + value + b"\r\n" for name, value in self.headers)
        return self.method + b" " + self.target + b" " + self.version + b"\r\n" + head + b"\r\n" + self.body


class Route(NamedTuple):
    """A route of the description."""

    method: str
    path: str
    schema: Mapping[str, Any] | None


# --- values -----------------------------------------------------------------------------------------------------------

# fmt: off
TEXTS = (
    "", " ", "\x00", "\x1b]0;title\x07\x1b[2J", "\r\nSet-Cookie: a=b", "\ud800", "a\udfffb", "\U0010ffff", "\ufeff",
    "<script>alert(1)</script>", "{{7*7}}", "../../etc/passwd", "%s%n", "' OR 1=1 --", "NaN", "null", "1e999", "-0",
    "é" * 50, "x" * 1_999, "x" * 2_001, "word " * 3_000, "\u202e\u2066", "a\u0301" * 400, "<|im_end|>" * 150,
    "\n" * 500,
)
NUMBERS = (
    0, -1, 1, 2, 41, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30, 10**400, True, False,
    0.5, -0.0, 1e-320, 1e308, -1e308, 1e22, math.nan, math.inf, -math.inf,
)
# fmt: on


def nested(random: Random) -> Json:
    value: Json = 1
    for _ in range(random.choice((5, 50, 200))):
        value = [value] if random.random() < 0.5 else {"prompt": value}
    return value


def hostile(random: Random, kinds: int = 6) -> Json:
    """A value of any type; with 4 kinds none is large."""
    kind = random.randrange(kinds)
    if kind <= 1:
        return random.choice(TEXTS)
    if kind == 2:
        return random.choice(NUMBERS)
    if kind == 3:
        return random.choice((None, [], {}, [[]], [None], {"": None}, [""], {"text": "a"}, [{}], [[["a"]]]))
    if kind == 4:
        return [hostile(random, 4) for _ in range(random.choice((1, 2, 9, 41)))]
    return nested(random)


def sample(schema: Mapping[str, Any], schemas: Mapping[str, Any], random: Random) -> Json:
    """A value that follows a schema; optional fields come at random."""
    if "$ref" in schema:
        return sample(schemas[schema["$ref"].rpartition("/")[2]], schemas, random)
    if "anyOf" in schema:
        return sample(random.choice(schema["anyOf"]), schemas, random)
    if "enum" in schema:
        return random.choice(schema["enum"])
    kind = schema.get("type")
    if kind == "object":
        required, properties = schema.get("required", ()), schema.get("properties", {})
        chosen = [name for name in properties if name in required or random.random() < 0.4]
        return {name: sample(properties[name], schemas, random) for name in chosen}
    if kind == "array":
        return [sample(schema["items"], schemas, random) for _ in range(random.choice((1, 1, 2, 3)))]
    if kind == "integer":
        return random.choice((1, 2, 3))
    values: Mapping[str, Sequence[Json]] = {"number": (0.5, 1), "boolean": (True, False), "null": (None,)}
    return random.choice(values.get(str(kind), ("Tea?", "Yes.", "No.", "user", "text", "town")))


def mutated(value: Json, random: Random) -> Json:
    """Return a body with a few hostile values, fields beyond the schema, and missing fields."""
    for _ in range(random.choice((1, 1, 2, 4))):
        *above, last = ("body", *random.choice(list(fuzz.places(value))))
        whole = inside = {"body": copy.deepcopy(value)}
        for key in above:
            inside = inside[key]
        old = inside[last]
        new: Json
        if isinstance(old, dict) and old and random.random() < 0.3:
            new = {name: one for name, one in old.items() if name != random.choice(list(old))}
        elif isinstance(old, dict) and random.random() < 0.5:
            names = ("tools", "n", "logprobs", "stream", "stream_options", "seed", "__proto__", "", " ", *TEXTS)
            new = {**old, **{random.choice(names): hostile(random) for _ in range(random.choice((1, 1, 3)))}}
        elif isinstance(old, list) and random.random() < 0.3:
            new = old * random.choice((0, 2, 50))
        else:
            new = hostile(random)
        inside[last] = new
        value = whole["body"]
    return value


# --- requests ---------------------------------------------------------------------------------------------------------


def damaged(body: bytes, random: Random) -> bytes:
    """Return bytes that are not, or hardly, JSON."""
    cut = random.randrange(len(body) + 1)
    ways: Sequence[Callable[[], bytes]] = (
        lambda: body[:cut],
        lambda: body[:cut] + bytes([random.randrange(256)]) + body[cut:],
        lambda: b"[" * 100_000,
        lambda: b'{"pairs":' * 20_000 + b"1" + b"}" * 20_000,
        lambda: body[:-1] + b',"pairs":[],"texts":[],"query":1,"model":"a","messages":2}',
        lambda: body + body,
        lambda: b"\xef\xbb\xbf" + body,
        lambda: body.decode("utf-8", "surrogatepass").encode("utf-16", "surrogatepass"),
        lambda: body.replace(b'"', b"'"),
        lambda: body.replace(b"1", b"9" * 5_000),
        lambda: b"\xff\xfe\x00" + body,
        lambda: b" " * 199_000 + body,
        lambda: b"x" * 200_001,
        lambda: random.choice((b"", b"null", b"1", b'""', b"[]", b"NaN", b"-Infinity", b"\x00", b"1e99999")),
    )
    return random.choice(ways)()


MODELS = ("town", "town:consensus", "town:balanced", "town:member-0", "town:distributional")


def body_request(route: Route, schemas: Mapping[str, Any], random: Random) -> Request:
    """A request with a hostile body."""
    if route.schema is None:
        body = b"" if random.random() < 0.5 else json.dumps(hostile(random)).encode()
    else:
        value = sample(route.schema, schemas, random)
        if isinstance(value, dict) and "model" in value:
            value["model"] = random.choice(MODELS)
        body = json.dumps(value if random.random() < 0.05 else mutated(value, random)).encode()
        if random.random() < 0.2:
            body = damaged(body, random)
    member = random.choice(("1", "9", "-1", "1e9", "%00", f"{10**30}"))
    target = route.path.replace("{model}", "town") + random.choice(("", f"?member={member}"))
    return Request(route.method.encode(), target.encode(), standard_headers(body), body)


def standard_headers(body: bytes) -> tuple[tuple[bytes, bytes], ...]:
    return (
        (b"Host", b"localhost"),
        (b"Authorization", b"Bearer " + SECRET.encode()),
        (b"Content-Type", b"application/json"),
        (b"Content-Length", str(len(body)).encode()),
        (b"Connection", b"close"),
    )


# fmt: off
PATHS = (
    b"/", b"//", b"/docs", b"/openapi.json", b"/page.js", b"*", b"/v1", b"/v1/", b"?", b"evil", b"//evil.example/",
    b"/%2e%2e/%2e%2e/etc/passwd", b"/../../etc/passwd", b"/static/../app.py", b"/docs?%", b"/\\..\\", b"/healthz#a",
    b"/v1/models/%00", b"/v1/models/%ff%fe", b"/v1/models/" + b"a/" * 500, b"/v1/models/town:member-" + b"9" * 30,
    b"/v1/models/%ed%a0%80", b"/v1/models/town%0d%0aX:y", b"/v1/models/{model}", b"/v1/models/%F0%9F%8D%B5",
    b"/" + b"a" * 5_000, b"/?" + b"a=b&" * 1_000, b"http://localhost/healthz", b"/metrics?name[]=a",
    b"/V1/COMPARE", b"/v1/compare/", b"/v1//compare", b"/v1/compare;a=b", b"/v1/compare%00",
)
METHODS = (
    b"GET", b"POST", b"PUT", b"DELETE", b"PATCH", b"HEAD", b"OPTIONS", b"TRACE", b"BREW", b"get", b"P\xc3\x96ST", b"",
    b"A" * 300,
)
VERSIONS = (b"HTTP/1.0", b"HTTP/9.9", b"HTTP/2", b"", b"HTTP/1.1\r\nHost: evil")
HEADERS: Mapping[bytes, Sequence[bytes]] = {
    b"Host": (
        b"", b"evil.example", b"localhost:evil", b"[::1", b"[::1]:80", b"\xff", b"localhost,evil", b"a" * 9_000,
    ),
    b"Content-Type": (
        b"", b"text/plain", b"application/json; charset=utf-16", b"application/json;;;=", b"multipart/form-data",
        b"application/x-www-form-urlencoded", b"APPLICATION/JSON", b"application/jsonp", b"\xff/\xfe", b"*/*",
    ),
    b"Content-Length": (b"-1", b"+5", b"0x10", b"1e3", b"9" * 25, b"\xb2", b" ", b"5, 5", b"200001"),
    b"Authorization": (
        b"", b"Bearer", b"Bearer \xff", b"Basic \xff", b"Basic YTpi", b"Basic ====", b"Basic //79", b"Digest a",
        b"Bearer " + b"a" * 9_000,
    ),
    b"Transfer-Encoding": (b"chunked", b"gzip", b"chunked, chunked", b"identity", b"\x0bchunked"),
    b"Expect": (b"100-continue", b"200-ok"),
    b"Upgrade": (b"websocket", b"h2c"),
    b"Connection": (b"Upgrade", b"keep-alive", b"\xff"),
    b"Accept": (b"application/xml", b"\xff", b"a" * 9_000),
    b"Content-Encoding": (b"gzip", b"br"),
    b"Range": (b"bytes=0-0",),
    b"Cookie": (b"a=" + b"b" * 9_000,),
    b"X-Forwarded-For": (b"\xff",),
    b"X-Forwarded-Host": (b"evil",),
    b"X": (b"b\x00c", b"b\r\n c", b"a" * 70_000),
    b"A" * 9_000: (b"b",),
    b"Bad Name": (b"b",),
    b"": (b"b",),
    b"Host:": (b"a",),
}
# fmt: on


def head_request(route: Route, schemas: Mapping[str, Any], random: Random) -> Request:
    """A request with a hostile method, path, header or version."""
    body = json.dumps(sample(route.schema, schemas, random)).encode() if route.schema else b""
    target, method, version = route.path.replace("{model}", "town").encode(), route.method.encode(), b"HTTP/1.1"
    if random.random() < 0.3:
        target = random.choice(PATHS)
    if random.random() < 0.3:
        method = random.choice(METHODS)
    if random.random() < 0.05:
        version = random.choice(VERSIONS)
    pairs = list(standard_headers(body))
    for name in random.sample(list(HEADERS), random.choice((0, 1, 1, 2))):
        if random.random() < 0.7:
            pairs = [pair for pair in pairs if pair[0] != name]
        pairs.append((name, random.choice(HEADERS[name])))
    random.shuffle(pairs)
    return Request(method, target, tuple(pairs), body, version)


def routes(description: Mapping[str, Any]) -> list[Route]:
    """All routes of a description."""
    found = []
    for path, methods in description["paths"].items():
        for method, route in methods.items():
            content = route.get("requestBody", {}).get("content", {})
            found.append(Route(method.upper(), path, content.get("application/json", {}).get("schema")))
    return found


def cases(description: Mapping[str, Any], n: int = N_CASES) -> Iterator[tuple[int, Request]]:
    """Yield n numbered requests; the routes take turns, and routes with a body come three times as often."""
    schemas = description["components"]["schemas"]
    turns = [route for route in routes(description) for _ in range(3 if route.schema else 1)]
    for number in range(n):
        seeded = random.Random(f"{SEED} {number}")
        make = head_request if seeded.random() < 0.3 else body_request
        yield number, make(turns[number % len(turns)], schemas, seeded)


# --- answers ----------------------------------------------------------------------------------------------------------


def exchange(client: Client, request: Request) -> tuple[int, str, bytes]:
    """Send a request; return the status, type and body of the response."""
    with socket.create_connection((client.host, client.port), timeout=30) as connection:
        with suppress(ConnectionError):  # it may answer before it has read everything
            connection.sendall(request.content)
        response = http.client.HTTPResponse(connection, method=request.method.decode("latin-1"))
        response.begin()
        return response.status, response.getheader("Content-Type", ""), response.read()


def strict_json(text: bytes) -> Json:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return json.loads(text.decode(), parse_constant=refuse)


def broken_promise(client: Client, request: Request) -> str:
    """Return what is wrong with the response to a request, or nothing."""
    try:
        status, kind, body = exchange(client, request)
        if status >= 500 and status not in DOCUMENTED_5XX:
            return f"status {status}"
        if b"Traceback" in body:
            return "a traceback"
        if request.method == b"HEAD":
            return "" if not body else "HEAD has a body"
        if status >= 400:
            ErrorBody.model_validate(strict_json(body))
            return "" if kind == "application/json" else f"an error of type {kind}"
        if status != 200:
            return f"status {status}"
        if kind.startswith("text/event-stream"):
            for event in body.decode().split("\n\n")[:-2]:
                strict_json(event.removeprefix("data: ").encode())
        elif kind.startswith("application/json"):
            strict_json(body)
    except (ValueError, OSError, http.client.HTTPException) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(scope="module", params=[None, SECRET], ids=["open", "with a key"])
def client(request: pytest.FixtureRequest, ensemble: RewardEnsemble, held_out: HeldOutVotes) -> Iterator[Client]:
    with running(ensemble, Writer(), held_out=held_out, limits=LIMITS, api_key=request.param) as client:
        yield client


def test_hostile_requests_get_documented_answers(client: Client) -> None:
    description = client.json("/openapi.json")
    failures = [
        f"request {number}: {wrong}: {request.content[:600]!r}"
        for number, request in cases(description)
        if (wrong := broken_promise(client, request))
    ]
    assert not failures, "\n".join([f"{len(failures)} requests", *failures[:40]])
    assert client.json("/healthz") == {"status": "ok"}


def test_every_route_gets_hostile_requests(client: Client) -> None:
    description = client.json("/openapi.json")
    sent = {request.target.split(b"?")[0].decode("latin-1") for _, request in cases(description, 240)}
    assert {path.replace("{model}", "town") for path in description["paths"]} <= sent
