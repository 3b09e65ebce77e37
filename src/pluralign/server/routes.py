"""Routes that answer prompts: OpenAI's chat completions, the three modes, and steering by choices."""

import html
import importlib.resources
import json
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Query, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse

from pluralign.answering.request import AnswerRequest, Mode
from pluralign.core.json_values import to_json
from pluralign.server import chat as openai_chat, schemas
from pluralign.server.chat import find_model, name_ignored, name_unlike
from pluralign.server.errors import ApiError
from pluralign.server.limits import Limits, check_count
from pluralign.server.page import PageData
from pluralign.server.service import Service
from pluralign.votes.prompts import Prompt

SAME_FIELDS = ("mode", "rule", "level", "slate_size", "cover", "distill", "member", "like")
"""Fields of ``AnswerBody`` that are fields of ``AnswerRequest``."""


def answer_routes(service: Service) -> APIRouter:
    """Return the routes that answer prompts."""
    router = APIRouter()
    k, generator = service.ensemble.k, service.answerer.generator
    generator_name = generator.name if generator else None

    @router.get("/v1/models", tags=["answers"])
    async def models() -> schemas.ModelList:
        """OpenAI's list of models: the modes of the ensemble, and every member."""
        return schemas.ModelList(data=[schemas.Model(id=model) for model in openai_chat.model_ids(service.name, k)])

    @router.get("/v1/models/{model:path}", tags=["answers"])
    async def model(model: str) -> schemas.Model:
        """OpenAI's description of one model; 404 if there is no such model."""
        openai_chat.find_model(model, service.name, k)
        return schemas.Model(id=model)

    @router.post("/v1/chat/completions", tags=["answers"], response_model=schemas.ChatCompletion)
    async def chat_completions(
        body: schemas.ChatRequest, response: Response
    ) -> schemas.ChatCompletion | StreamingResponse:
        """OpenAI's chat completion, optionally streamed. The field ``pluralign`` has the members and their weights."""
        ignored = name_ignored(body, response.headers)
        target = openai_chat.find_model(body.model, service.name, k)
        draws = body.draws or 1
        if draws > 1 and target.voice != "distributional":
            message = f"n must be 1 for {body.model}; several draws require {service.name}:distributional."
            raise ApiError(400, message, code="invalid", param="n")
        check_count(draws, service.limits.candidates, "draws", "n")
        prompt = service.prompt(body.messages, single_as_text=not service.only_chats)
        how = service.sampled(body, body.max_completion_tokens)
        request = AnswerRequest(prompt, target.mode, member=target.member, **how)
        answers = await service.answer(request, body.candidates, draws)
        choices = [openai_chat.message(i, one, target, service.names) for i, one in enumerate(answers)]
        wrote = None if body.candidates else generator_name
        details = openai_chat.answer_details(answers, service.names, request.seed, wrote, ignored)
        prompt_text = Prompt(request.prompt).text
        if not body.stream:
            return openai_chat.completion(body.model, prompt_text, choices, details)
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = openai_chat.stream(body.model, prompt_text, choices, details, include_usage=include_usage)
        return StreamingResponse(events, media_type="text/event-stream", headers=dict(response.headers))

    @router.post("/v1/answer", tags=["answers"])
    async def answer(body: schemas.AnswerBody, response: Response) -> schemas.AnswerResponse:
        """A slate and a consensus, one chosen member, or a random draw by weight, with the candidates."""
        ignored = name_ignored(body, response.headers)
        request = AnswerRequest(
            service.prompt(body.prompt),
            choices=None if body.choices is None else service.votes(body.choices),
            n=body.n_candidates,
            **service.sampled(body),
            **{name: getattr(body, name) for name in SAME_FIELDS},
        )
        answers = await service.answer(request, body.candidates)
        wrote = None if body.candidates else generator_name
        details = openai_chat.answer_details(answers, service.names, request.seed, wrote, ignored)
        return schemas.AnswerResponse(**vars(details), members=list(service.names))

    @router.post("/v1/steer", tags=["answers"])
    async def steer(body: schemas.SteerRequest, response: Response) -> schemas.SteeringResponse:
        """What a user's choices say: the most likely member, the posterior, and the probability of no member."""
        name_ignored(body, response.headers)
        return await service.steer(body.choices)

    return router


# --- Routes about the server itself: the data of the page, health, and metrics.


@dataclass(frozen=True)
class EnsembleResponse(PageData):
    """Everything that the page shows: the ensemble's data, and the abilities of this server.

    Numbers that are undefined are null.
    """

    can_generate: bool
    cannot_steer: str
    """Why choices and words hardly change an answer; empty if they do."""
    generator: str | None
    policies: list[int]
    """Members whose own policy writes their answers."""
    modes: list[Mode]
    models: list[str]
    limits: Limits


def ops_routes(ensemble: EnsembleResponse, metrics: Callable[[], bytes]) -> APIRouter:
    """Return the routes about the server itself.

    Args:
        ensemble: the data of the page; converted to JSON once.
        metrics: returns the current metrics in Prometheus's text format.
    """
    router = APIRouter()
    content = json.dumps(to_json(ensemble), ensure_ascii=False, allow_nan=False).encode()

    @router.get("/v1/ensemble", tags=["answers"], response_model=EnsembleResponse)
    async def ensemble_data() -> Response:
        """Everything that the page shows: figures, member cards, examples, modes and limits."""
        return Response(content, media_type="application/json")

    @router.get("/health", tags=["server"])
    @router.get("/healthz", tags=["server"])
    async def healthz() -> schemas.Health:
        """Whether the server answers: ``{status: "ok"}``."""
        return schemas.Health()

    @router.get("/metrics", tags=["server"], response_class=PlainTextResponse)
    async def metrics_text() -> Response:
        """Counters and histograms for Prometheus."""
        return PlainTextResponse(metrics())

    return router


# --- Routes for people: the files of the page, and a list of all routes without scripts.


MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
NO_PAGE = "This installation has no page. The API works: see /docs."


def read_pages(openapi: Mapping[str, Any]) -> dict[str, Response]:
    """Return the files of the page and the list of routes, by path.

    Args:
        openapi: the description of the API, for the list of routes.
    """
    folder = importlib.resources.files("pluralign") / "server" / "static"
    files = {file.name: file.read_bytes() for file in folder.iterdir()} if folder.is_dir() else {}
    pages = {"/": PlainTextResponse(NO_PAGE), "/docs": HTMLResponse(list_routes(openapi))}
    for name, content in files.items():
        if media_type := MEDIA_TYPES.get(name.rpartition(".")[2]):
            pages["/" if name == "index.html" else f"/{name}"] = Response(content, media_type=media_type)
    return pages


def page_routes(pages: Mapping[str, Response]) -> APIRouter:
    """Return a route per page."""
    router = APIRouter(include_in_schema=False)
    for path, page in pages.items():
        router.add_api_route(path, _send(page))
    return router


def _send(page: Response) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return page

    return send


def list_routes(openapi: Mapping[str, Any]) -> str:
    """Return an HTML page without scripts that lists the routes; ``/openapi.json`` has all details."""
    models = openapi.get("components", {}).get("schemas", {})
    rows = []
    for path, methods in openapi["paths"].items():
        for method, route in methods.items():
            body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            model = models.get(body.get("$ref", "").rpartition("/")[2], {})
            examples = "".join(f"<pre>{html.escape(json.dumps(one))}</pre>" for one in model.get("examples", []))
            text = re.sub(r"``(.+?)``", r"<code>\1</code>", html.escape(route.get("description", "")))
            rows.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2><p>{text}</p>{examples}")
    title = html.escape(openapi["info"]["title"])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title></head><body><main>'
        f'<h1>{title}</h1><p>Complete description: <a href="openapi.json">openapi.json</a>.</p>{"".join(rows)}'
        "</main></body></html>"
    )


# --- Routes that score, compare and rank texts, in our own format and in those of TEI, Cohere and OpenRLHF.


Member: TypeAlias = Annotated[int | None, Query(ge=0, description="Number of one member; the whole ensemble if absent")]


def score_routes(service: Service) -> APIRouter:
    """Return the routes that score, compare and rank texts."""
    router = APIRouter()

    @router.post("/v1/compare", tags=["scores"])
    async def compare(body: schemas.CompareRequest, response: Response) -> schemas.CompareResponse:
        """Members' votes and predicted shares: ``{results: [{votes, prob_hat, prob_policy, unlike}]}``."""
        name_ignored(body, response.headers)
        return schemas.CompareResponse(results=(await service.compare(body.pairs))[0])

    @router.post("/v1/score", tags=["scores"])
    async def score(body: schemas.ScoreRequest, response: Response) -> schemas.ScoreResponse:
        """Rewards of every member: ``{results: [{rewards: [k numbers]}]}``, one result per text."""
        name_ignored(body, response.headers)
        return schemas.ScoreResponse(results=await service.score_texts(body.texts))

    @router.post("/v1/explain", tags=["scores"])
    async def explain(body: schemas.Pair, response: Response) -> schemas.ExplainResponse:
        """Each member's vote on a pair, with reasons.

        ``{votes, prob_hat, prob_policy, rewards, members, undecided}``
        """
        name_ignored(body, response.headers)
        return await service.explain(body)

    @router.post("/rerank", tags=["rerank"], response_model_exclude_unset=True)
    async def rerank(
        body: schemas.RerankRequest, response: Response, member: Member = None
    ) -> list[schemas.RankedText]:
        """Text Embeddings Inference's rerank: ``[{index, score, text?}]``, best first.

        Scores are weighted pairwise support (Borda), and 0 for texts in the header ``Pluralign-Unlike``. Raw scores are
        rewards, and require ``?member=3``.
        """
        name_ignored(body, response.headers)
        ranked, unlike = await service.rank(body.query, body.texts, member, raw=body.raw_scores)
        name_unlike(unlike, response.headers)
        texts = [{"text": body.texts[i]} if body.return_text else {} for i, _ in ranked]
        return [schemas.RankedText(index=i, score=score, **own) for (i, score), own in zip(ranked, texts, strict=True)]

    @router.post("/v1/rerank", tags=["rerank"], response_model_exclude_unset=True)
    @router.post("/v2/rerank", tags=["rerank"], response_model_exclude_unset=True)
    async def cohere_rerank(body: schemas.CohereRequest, response: Response) -> schemas.CohereResponse:
        """Cohere's rerank: ``{results: [{index, relevance_score}]}``, best first. A model id can name one member."""
        name_ignored(body, response.headers)
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        target = find_model(body.model or service.name, service.name, service.ensemble.k)
        ranked, unlike = await service.rank(body.query, texts, target.member)
        name_unlike(unlike, response.headers)
        own = [{"document": schemas.Document(text=text)} if body.return_documents else {} for text in texts]
        best = ranked[: body.top_n]
        results = [schemas.RankedDocument(index=i, relevance_score=score, **own[i]) for i, score in best]
        meta = {"api_version": {"version": "2"}}
        return schemas.CohereResponse(id=secrets.token_hex(12), results=results, meta=meta)

    @router.post("/get_reward", tags=["rewards"])
    async def get_reward(
        body: schemas.RewardRequest, response: Response, member: Member = None
    ) -> schemas.RewardResponse:
        """OpenRLHF's remote reward model: ``{rewards, scores, extra_logs}``, one number per query.

        The rewards are those of the member in the address, ``?member=3``; ``extra_logs`` has every member's.
        """
        weights = service.weights(member, required=True)
        name_ignored(body, response.headers)
        prompts = body.prompts or [""] * len(body.query)
        if len(prompts) != len(body.query):
            message = f"query has {len(body.query)} texts and prompts has {len(prompts)}; send one prompt per query."
            raise ApiError(422, message, code="invalid", param="prompts")
        rewards = await service.decoded_rewards(prompts, body.query)
        own = (rewards @ weights).tolist()
        logs = {f"member_{j}": rewards[:, j].tolist() for j in range(service.ensemble.k)}
        return schemas.RewardResponse(rewards=own, scores=own, extra_logs=logs)

    return router
