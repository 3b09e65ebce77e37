"""``pluralign serve``: the ensemble over HTTP, in the shapes that existing clients speak, and a page.

Decided here: which routes there are and what each returns, and how the server starts and stops. What they do is in
``service``, who may ask is decided in ``gate``, how texts are scored together in ``batching``, OpenAI's shapes in
``chat``.
"""

import html
import importlib.resources
import ipaddress
import json
import logging
import os
import re
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Annotated, Any, TypeAlias

import uvicorn
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse, Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException

from pluralign.answering.answer import RefusalPolicy
from pluralign.answering.generate import Sampler
from pluralign.core.errors import PluralignError, UsageError
from pluralign.core.json_values import without_nan
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.models.options import SamplingOptions
from pluralign.server import openai_chat as chat
from pluralign.server.limits import LOOPBACK, ApiError, Gate, Limits
from pluralign.server.schemas import (
    AnswerRequest,
    ChatRequest,
    CohereRequest,
    CompareRequest,
    Pair,
    RerankRequest,
    RewardRequest,
    ScoreRequest,
    SteerRequest,
)
from pluralign.server.service import Service
from pluralign.votes.prompts import Prompt

MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
NOT_JSON = "the body cannot be read as JSON."
NO_PAGE = b"This installation has no page; the API works: see /docs."
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Member: TypeAlias = Annotated[int | None, Query(ge=0, description="This member alone; else the whole ensemble")]

logger = logging.getLogger("pluralign.server.app")


@dataclass(frozen=True)
class Metrics:
    """What Prometheus reads; each application counts for itself."""

    registry: CollectorRegistry
    requests: Counter
    seconds: Histogram
    rejected: Counter
    batch_texts: Histogram
    batch_seconds: Histogram
    routes: set[str] = field(default_factory=set)
    """Paths that are told apart."""

    @classmethod
    def fresh(cls) -> "Metrics":
        """Return counters at zero."""
        own = CollectorRegistry()
        return cls(
            own,
            Counter("pluralign_requests", "Requests answered.", ["route", "status"], registry=own),
            Histogram("pluralign_request_seconds", "Time to answer.", ["route"], registry=own),
            Counter("pluralign_rejected", "Requests refused with 503.", ["route"], registry=own),
            Histogram("pluralign_batch_texts", "Texts of a batch.", buckets=BATCH_BUCKETS, registry=own),
            Histogram("pluralign_batch_seconds", "Time to score a batch.", registry=own),
        )

    def request(self, path: str, status: int, seconds: float) -> None:
        """Count a request; paths that we do not have count as one."""
        route = path if path in self.routes else "other"
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)
        if status == 503:
            self.rejected.labels(route).inc()

    def batch(self, texts: int, seconds: float) -> None:
        """Count a batch."""
        self.batch_texts.observe(texts)
        self.batch_seconds.observe(seconds)


def _json(data: Any) -> Response:
    body = json.dumps(without_nan(data), ensure_ascii=False, allow_nan=False)
    return Response(body, media_type="application/json")


# --- the application ------------------------------------------------------------------------------------------------


def create_app(
    ensemble: RewardEnsemble,
    generator: Sampler | None = None,
    *,
    evidence: HeldOutVotes | None = None,
    name: str = "pluralign",
    api_key: str | None = None,
    limits: Limits | None = None,
    refusal: RefusalPolicy | None = None,
    sampling: SamplingOptions | None = None,
    n: int = 8,
    seed: int | None = None,
    log_prompts: bool = False,
) -> FastAPI:
    """Return the application that serves an ensemble.

    Args:
        ensemble: whose members score, vote and answer.
        generator: writes candidates where a request brings none; called in threads of its own.
        evidence: held-out votes with the ensemble's rewards: for cards, examples and known prompts.
        name: the first part of every model id.
        api_key: what clients must send; without one the server answers only to the names of this machine.
        limits: how much it takes on.
        refusal: a team's own policy; runs before any mode.
        sampling: how candidates are sampled unless a request says otherwise.
        n: how many candidates are sampled unless a request says otherwise.
        seed: gives requests without a seed theirs, in turn; without one nobody can foretell them.
        log_prompts: whether the log holds the texts of requests.

    Example:
        >>> from pluralign import fit, town_hall
        >>> app = create_app(fit(town_hall(200).preferences, k=2, encoder="none"), name="town")
        >>> app.title
        'Pluralign: town'
    """
    if not re.fullmatch(r"[\w.-]{1,100}", name):
        raise UsageError(f"the name {name[:100]!r} must be letters, digits, dots, dashes and underscores.")
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise UsageError("the key must be letters, digits and signs that a header can hold, without spaces.")
    limits, metrics = limits or Limits(), Metrics.fresh()
    sampling = sampling or SamplingOptions()
    service = Service(ensemble, generator, evidence, name, limits, refusal, sampling, n, seed, metrics.batch)
    waiting = Gauge("pluralign_queue_texts", "Texts that wait to be scored.", registry=metrics.registry)
    waiting.set_function(lambda: service.batcher.waiting)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.batcher.close()

    app = FastAPI(
        title=f"Pluralign: {name}",
        version=__version__,
        description="A weighted ensemble of reward models: votes, rewards, and answers in three modes.",
        docs_url=None,  # FastAPI's page loads scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.service = service
    app.add_middleware(Gate, limits=limits, api_key=api_key, observe=metrics.request, log_prompts=log_prompts)
    _add_errors(app)
    _add_scoring(app, service)
    _add_answering(app, service)
    _add_server(app, service, metrics)
    pages = _add_pages(app)
    metrics.routes.update(app.openapi()["paths"], pages)
    return app


def _add_errors(app: FastAPI) -> None:
    """Every error has OpenAI's shape."""

    def answer(error: ApiError) -> Response:
        return Response(json.dumps(error.body), error.status, error.headers, "application/json")

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return answer(error)

    @app.exception_handler(PluralignError)
    async def unusable(_: Request, error: PluralignError) -> Response:
        return answer(ApiError(400, str(error), code="unusable"))

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            message = "there is nothing at this path; GET /docs lists what there is."
            return answer(ApiError(404, message, code="not_found"))
        if error.status_code == 405:
            message = "this path is asked with another method; GET /docs says which."
            return answer(ApiError(405, message, code="method_not_allowed"))
        return answer(ApiError(error.status_code, NOT_JSON, code="not_json"))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        if first["type"] == "json_invalid":
            return answer(ApiError(400, NOT_JSON, code="not_json"))
        message = f"{place or 'the body'}: {first['msg']}."
        return answer(ApiError(422, message, code="invalid", param=place))


def _add_scoring(app: FastAPI, service: Service) -> None:
    @app.post("/v1/compare", tags=["scores"])
    async def compare(body: CompareRequest) -> Response:
        """Votes of the members and predicted shares: ``{results: [{votes, prob_hat, prob_policy}]}``, one a pair."""
        return _json({"results": await service.compare(body.pairs)})

    @app.post("/v1/score", tags=["scores"])
    async def score(body: ScoreRequest) -> Response:
        """Rewards of every member: ``{results: [{rewards: [k numbers]}]}``, one a text."""
        return _json({"results": await service.score_texts(body.texts)})

    @app.post("/v1/explain", tags=["scores"])
    async def explained(body: Pair) -> Response:
        """Who votes for which of two responses, and why: ``{votes, prob_hat, prob_policy, rewards, members}``."""
        return _json(await service.explain(body))

    @app.post("/rerank", tags=["rerank"])
    async def rerank(body: RerankRequest, member: Member = None) -> Response:
        """Text Embeddings Inference's rerank: ``[{index, score, text?}]``, the best first.

        Scores are weighted pairwise support (Borda); raw scores are rewards.
        """
        scores = await service.rank(body.query, body.texts, member, raw=body.raw_scores)
        ranked = [{"index": i, "score": float(scores[i])} for i in (-scores).argsort(kind="stable").tolist()]
        return _json([one | {"text": body.texts[one["index"]]} if body.return_text else one for one in ranked])

    @app.post("/v1/rerank", tags=["rerank"])
    @app.post("/v2/rerank", tags=["rerank"])
    async def cohere_rerank(body: CohereRequest) -> Response:
        """Cohere's rerank: ``{results: [{index, relevance_score}]}``, the best first; a member by its model id."""
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        asked = chat.who(body.model or service.name, service.name, service.ensemble.k)
        scores = await service.rank(body.query, texts, asked.member, raw=False)
        results = [
            {"index": i, "relevance_score": float(scores[i])}
            | ({"document": {"text": texts[i]}} if body.return_documents else {})
            for i in (-scores).argsort(kind="stable").tolist()[: body.top_n]
        ]
        return _json({"id": secrets.token_hex(12), "results": results, "meta": {"api_version": {"version": "2"}}})

    @app.post("/get_reward", tags=["rewards"])
    async def get_reward(body: RewardRequest, member: Member = None) -> Response:
        """OpenRLHF's remote reward model: ``{rewards, scores, extra_logs}``, one number a query.

        With ``?member=3`` that member's reward, else the weighted mean; ``extra_logs`` has every member's.
        """
        prompts = body.prompts or [""] * len(body.query)
        if len(prompts) != len(body.query):
            message = f"there are {len(body.query)} queries and {len(prompts)} prompts; give one prompt a query."
            raise ApiError(422, message, code="invalid", param="prompts")
        weights, rewards = service.weights(member), await service.decoded_rewards(prompts, body.query)
        found = (rewards @ weights).tolist()
        logs = {f"member_{j}": rewards[:, j].tolist() for j in range(service.ensemble.k)}
        return _json({"rewards": found, "scores": found, "extra_logs": logs})


def _add_answering(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", tags=["answers"])
    async def models() -> Response:
        """OpenAI's list of models: every voice and every member."""
        ids = chat.model_ids(service.name, service.ensemble.k)
        listed = [{"id": one, "object": "model", "created": 0, "owned_by": "pluralign"} for one in ids]
        return _json({"object": "list", "data": listed})

    @app.post("/v1/chat/completions", tags=["answers"])
    async def chat_completions(body: ChatRequest) -> Response:
        """OpenAI's chat completion, also streamed; the field ``pluralign`` says who answers, with what weight."""
        asked = chat.who(body.model, service.name, service.ensemble.k)
        draws = body.n or 1
        if draws > 1 and asked.voice != "distributional":
            message = "n may be above 1 for draws only, that is for distributional answers."
            raise ApiError(400, message, code="invalid", param="n")
        service.check_count(draws, service.limits.candidates, "draws asked for")
        prompt = service.prompt(body.messages, single_as_text=not service.only_chats)
        seed = service.seed_of(body.seed)
        answers, _ = await service.answer(
            prompt,
            asked.mode,
            candidates=body.candidates,
            seed=seed,
            sampling={
                "temperature": body.temperature,
                "top_p": body.top_p,
                "max_new_tokens": body.max_completion_tokens or body.max_tokens,
            },
            draws=draws,
            member=asked.member,
        )
        texts = [chat.spoken(one, asked, service.names) for one in answers]
        facts = without_nan(
            chat.facts(answers, service.names, seed, None if body.candidates else service.shown["generator"])
        )
        if not body.stream:
            return _json(chat.completion(body.model, Prompt(prompt).text, texts, facts))
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = chat.chunks(body.model, Prompt(prompt).text, texts, facts, include_usage=include_usage)

        async def stream() -> AsyncIterator[str]:
            for event in events:
                yield event

        return StreamingResponse(stream(), media_type="text/event-stream")

    @app.post("/v1/answer", tags=["answers"])
    async def answer(body: AnswerRequest) -> Response:
        """A slate and a consensus, one chosen voice, or a draw in proportion, with the candidates that were used."""
        seed = service.seed_of(body.seed)
        answers, texts = await service.answer(
            service.prompt(body.prompt),
            body.mode,
            candidates=body.candidates,
            n=body.n,
            seed=seed,
            sampling={"temperature": body.temperature, "top_p": body.top_p, "max_new_tokens": body.max_tokens},
            choices=body.choices,
            rule=body.rule,
            member=body.member,
            like=body.like,
        )
        facts = chat.facts(answers, service.names, seed, None if body.candidates else service.shown["generator"])
        return _json({**facts, "members": service.names, "candidate_texts": texts})

    @app.post("/v1/steer", tags=["answers"])
    async def steer(body: SteerRequest) -> Response:
        """Which member a user's choices point to: ``{member, name, why, sure, posterior, path}``."""
        return _json(await service.steer(body.choices))


def _add_server(app: FastAPI, service: Service, metrics: Metrics) -> None:
    shown = bytes(_json(service.shown).body)

    @app.get("/v1/ensemble", tags=["answers"])
    async def ensemble() -> Response:
        """Everything that the page shows: figures, member cards, examples, modes and limits."""
        return Response(shown, media_type="application/json")

    @app.get("/healthz", tags=["server"])
    async def healthz() -> Response:
        """Whether the server answers: ``{status: "ok"}``."""
        return _json({"status": "ok"})

    @app.get("/metrics", tags=["server"])
    async def metric_lines() -> Response:
        """Counters and histograms for Prometheus."""
        return PlainTextResponse(generate_latest(metrics.registry))


def _add_pages(app: FastAPI) -> list[str]:
    """Add the files of the page, read once, and a list of all routes; return their paths."""
    folder = importlib.resources.files("pluralign") / "server" / "static"
    files = {file.name: file.read_bytes() for file in folder.iterdir()} if folder.is_dir() else {}
    pages = {"/": ("txt", NO_PAGE), "/docs": ("html", _listing(app.openapi()).encode())}
    for name, content in files.items():
        if (kind := name.rpartition(".")[2]) in MEDIA_TYPES:
            pages["/" if name == "index.html" else f"/{name}"] = kind, content
    for path, (kind, content) in pages.items():
        app.add_api_route(path, _page(content, MEDIA_TYPES.get(kind, "text/plain")), include_in_schema=False)
    return list(pages)


def _page(content: bytes, media_type: str) -> Callable[[], Any]:
    async def page() -> Response:
        return Response(content, media_type=media_type)

    return page


def _listing(schema: Mapping[str, Any]) -> str:
    """Return a page without scripts that lists the routes; whoever wants more reads /openapi.json."""
    rows = []
    for path, methods in schema["paths"].items():
        for method, route in methods.items():
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            name = body.get("$ref", "").rpartition("/")[2]
            model = schema.get("components", {}).get("schemas", {}).get(name, {})
            examples = "".join(f"<pre>{html.escape(json.dumps(one))}</pre>" for one in model.get("examples", []))
            said = re.sub(r"``(.+?)``", r"<code>\1</code>", html.escape(route.get("description", "")))
            rows.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{said}</p>{examples}")
    title = html.escape(schema["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head><body><main>'
        f'<h1>{title}</h1><p>The whole description: <a href="openapi.json">openapi.json</a>.</p>{"".join(rows)}'
        "</main></body></html>"
    )


# --- running it -----------------------------------------------------------------------------------------------------


def serve(
    ensemble: RewardEnsemble,
    generator: Sampler | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: str | None = None,
    ready: Callable[[str], None] | None = None,
    **options: Any,
) -> None:
    """Serve an ensemble until the process is told to stop; what is running then is finished, unless it is told twice.

    Args:
        ensemble: the one to serve.
        generator: writes candidates where a request brings none.
        host: where to listen; other than this machine only with a key.
        port: 0 takes any free one.
        api_key: what clients must send.
        ready: called with the server's address once it listens.
        options: those of ``create_app``.
    """
    if not api_key and not _is_loopback(host):
        raise UsageError(f"{host} can be reached by others: give --api-key or set PLURALIGN_API_KEY, or use 127.0.0.1.")
    listening = _listen(host, port)
    try:
        app = create_app(ensemble, generator, api_key=api_key or None, **options)
        app.state.service.score([("Are you awake?", "Yes.")])  # loads the encoder, or says why it cannot
        if generator:
            generator.prepare()
        address = f"[{host}]" if ":" in host else host
        server = _Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False))
        before = {one: signal.signal(one, server.handle_exit) for one in (signal.SIGTERM, signal.SIGINT)}
        try:
            if ready:
                ready(f"http://{address}:{listening.getsockname()[1]}")
            logger.setLevel(logging.INFO)
            server.run(sockets=[listening])
        finally:
            for one, handler in before.items():
                signal.signal(one, handler)
    finally:
        listening.close()


class _Server(uvicorn.Server):
    """Stops by a signal, which is no mishap; a second Ctrl-C waits for nothing."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """``serve`` has done so already; uvicorn's way would raise the signals again after the end."""
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish what is running, or end at once."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(128 + sig)  # else requests that are cut off would each leave a traceback
        super().handle_exit(sig, frame)


def greeting(address: str, name: str, k: int, generates: bool, has_key: bool) -> str:
    """Return what the command line says once the server listens."""
    asked = {"model": f"{name}:consensus", "messages": [{"role": "user", "content": "Plant more trees?"}]}
    if not generates:
        asked["candidates"] = ["Yes, many.", "No, they cost too much."]
    key = "\n       -H 'Authorization: Bearer '\"$PLURALIGN_API_KEY\" \\" if has_key else ""
    return (
        f"{name}, {k} members, listens at {address}/v1\n"
        f"Page: {address}/   What there is: {address}/docs   Stop: Ctrl-C\n"
        f"Try: curl {address}/v1/chat/completions -H 'Content-Type: application/json' \\{key}\n"
        f"       -d '{json.dumps(asked)}'"
    )


def _is_loopback(host: str) -> bool:
    try:
        return host in LOOPBACK or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        plain = isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno
        reason = (
            os.strerror(plain) if plain else str(getattr(error, "strerror", error))
        )  # create_server adds the address
        raise UsageError(
            f"port {port} of {host} cannot be used ({reason.lower()}); name another with --port."
        ) from None
