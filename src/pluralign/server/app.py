"""The FastAPI application of ``pluralign serve``: an ensemble over HTTP, and a page for people.

This module connects the parts: the work is done in ``service``, the routes are in ``routes``, access control is in
``middleware``, and the data of the page is computed in ``page``. ``run`` starts and stops the server.
"""

import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields, replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from pluralign.answering.answer import Answerer
from pluralign.answering.request import MODES, Voters
from pluralign.core.errors import PluralignError
from pluralign.core.json_values import JsonObject, to_json
from pluralign.core.options import with_changes
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.measuring.cards import member_profiles, with_descriptions
from pluralign.server.chat import model_ids
from pluralign.server.errors import ApiError
from pluralign.server.limits import ServerSettings
from pluralign.server.middleware import AccessMiddleware, Metrics
from pluralign.server.page import collect_page_data
from pluralign.server.routes import EnsembleResponse, answer_routes, ops_routes, page_routes, read_pages, score_routes
from pluralign.server.schemas import ErrorBody
from pluralign.server.service import Service

# --- The description of the API: FastAPI's own, where numbers that may be undefined are also null.


def allow_null_numbers(description: Mapping[str, Any], root: str) -> None:
    """Change the schema of a response, and all schemas that it refers to: every number may be null.

    Undefined figures are NaN in Python and null in JSON. Pydantic describes both as numbers.

    Args:
        description: an OpenAPI description; changed in place.
        root: name of the response's schema.

    Example:
        >>> figures = {"properties": {"noise": {"type": "number"}}}
        >>> allow_null_numbers({"components": {"schemas": {"Figures": figures}}}, "Figures")
        >>> figures
        {'properties': {'noise': {'type': ['number', 'null']}}}
    """
    schemas, done, waiting = description["components"]["schemas"], set(), [root]
    while waiting:
        name = waiting.pop()
        if name not in done:
            done.add(name)
            for part in _parts(schemas[name]):
                if part.get("type") == "number":
                    part["type"] = ["number", "null"]
                if "$ref" in part:
                    waiting.append(str(part["$ref"]).rpartition("/")[2])


def _parts(schema: Any) -> Iterator[JsonObject]:
    """Yield a schema and all schemas inside it."""
    if isinstance(schema, dict):
        yield schema
    for inner in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _parts(inner)


ERRORS: dict[int | str, dict[str, Any]] = {
    422: {"model": ErrorBody, "description": "Invalid request"},
    "4XX": {"model": ErrorBody, "description": "Rejected request"},
    "5XX": {"model": ErrorBody, "description": "Server error"},
}
"""Errors of every route, for OpenAPI."""


NOT_JSON = "the body is not valid JSON; send a JSON object."
HTTP_ERRORS = {
    404: ("there is no such path; GET /docs lists all paths.", "not_found"),
    405: (
        "this path does not support the request's method; GET /docs lists the methods of every path.",
        "method_not_allowed",
    ),
}
"""Messages and codes of the errors that FastAPI raises; any other one is about JSON."""


def add_error_handlers(app: FastAPI) -> None:
    """Send every error of an application in OpenAI's shape."""

    def response(status: int, message: str, code: str, param: str = "") -> Response:
        return sent(ApiError(status, message, code=code, param=param))

    def sent(error: ApiError) -> Response:
        return Response(error.content, error.status, error.headers)

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return sent(error)

    @app.exception_handler(PluralignError)
    async def library_error(_: Request, error: PluralignError) -> Response:
        return response(400, str(error), "unusable")

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return response(error.status_code, *HTTP_ERRORS.get(error.status_code, (NOT_JSON, "not_json")))

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return response(400, NOT_JSON, "not_json")
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        return response(422, f"{field or 'the body'}: {first['msg']}.", "invalid", field)


class FiniteJSONResponse(JSONResponse):
    """A response as UTF-8 JSON; numbers that are not finite, which JSON does not have, become null."""

    def render(self, content: Any) -> bytes:
        """Return the body. Only content with numbers that are not finite is copied."""
        try:
            text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        except ValueError:
            text = json.dumps(to_json(content), ensure_ascii=False, allow_nan=False)
        return text.encode()


def create_app(
    ensemble: "RewardEnsemble | Answerer | str | os.PathLike[str]",
    settings: ServerSettings | None = None,
    **options: Any,
) -> FastAPI:
    """Return the application that serves an ensemble.

    Args:
        ensemble: an ensemble or its folder, or an ``Answerer``.
        settings: of the server.
        **options: fields of ``ServerSettings``, such as ``name``, and of ``Answerer``, such as ``generator``.

    Example:
        >>> from pluralign import fit, town_hall
        >>> app = create_app(fit(town_hall(200).preferences, k=2, encoder="none"), name="town")
        >>> app.title
        'Pluralign: town'
    """
    known = {field.name for field in fields(ServerSettings)}
    settings = with_changes(settings or ServerSettings(), {key: options.pop(key) for key in known & set(options)})
    answerer = with_changes(ensemble if isinstance(ensemble, Answerer) else Answerer.of(ensemble), options)
    held_out, name = answerer.held_out, settings.name
    if held_out is not None and answerer.profiles is None:
        cards = with_descriptions(member_profiles(answerer.ensemble.weights, held_out), settings.descriptions)
        answerer = replace(answerer, profiles=cards)
    page = collect_page_data(
        answerer.ensemble,
        held_out,
        name=name,
        profiles=answerer.cards,
        representation=settings.representation,
        evaluation=settings.evaluation,
    )
    metrics = Metrics()
    names = [card.name for card in page.members]
    service = Service(answerer=answerer, settings=settings, names=names, observe=metrics.count_batch)
    metrics.watch_queue(lambda: service.batcher.waiting)
    generator = answerer.generator
    shown = EnsembleResponse(
        **vars(page),
        can_generate=generator is not None,
        cannot_steer=Voters.of(answerer.ensemble).cannot_steer,
        policies=sorted(answerer.policies),
        generator=generator.name if generator else None,
        modes=list(MODES),
        models=model_ids(name, answerer.ensemble.k),
        limits=settings.limits,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.batcher.close()

    app = FastAPI(
        title=f"Pluralign: {name}",
        version=__version__,
        description="A weighted ensemble of reward models: votes, rewards, and answers in three modes.",
        docs_url=None,  # FastAPI's own page loads scripts from another site
        redoc_url=None,
        redirect_slashes=False,  # a redirected POST loses its body in many clients
        lifespan=lifespan,
        default_response_class=FiniteJSONResponse,
        responses=ERRORS,
    )
    app.state.service = service
    app.add_middleware(
        AccessMiddleware,
        limits=settings.limits,
        api_key=settings.api_key,
        observe=metrics.count_request,
        log_prompts=settings.log_prompts,
    )
    add_error_handlers(app)
    app.include_router(score_routes(service))
    app.include_router(answer_routes(service))
    app.include_router(ops_routes(shown, metrics.text))
    description = app.openapi()
    allow_null_numbers(description, EnsembleResponse.__name__)
    # FastAPI's own way to change it: https://fastapi.tiangolo.com/how-to/extending-openapi/
    app.openapi = lambda: description  # type: ignore[method-assign]
    pages = read_pages(description)
    app.include_router(page_routes(pages))
    metrics.routes.update(description["paths"], pages)
    return app
