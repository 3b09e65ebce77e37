"""The FastAPI application of ``pluralign serve``: an ensemble over HTTP, and a page for people.

This module connects the parts: the work is done in ``service``, the routes are in ``routes/``, access control is in
``middleware``, and the data of the page is computed in ``page_data``. ``run`` starts and stops the server.
"""

import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from pluralign.answering.answer import MODES, RefusalPolicy
from pluralign.answering.generate import Sampler
from pluralign.core.errors import UsageError
from pluralign.core.version import __version__
from pluralign.ensemble.ensemble import RewardEnsemble
from pluralign.ensemble.held_out import HeldOutVotes
from pluralign.ensemble.record import Evaluation
from pluralign.measuring.cards import Descriptions, with_descriptions
from pluralign.measuring.individuals import Representation
from pluralign.server.candidates import CandidateSource
from pluralign.server.chat import model_ids
from pluralign.server.errors import ErrorBody, FiniteJSONResponse, add_error_handlers
from pluralign.server.limits import Limits
from pluralign.server.middleware import AccessMiddleware, Metrics
from pluralign.server.page import collect_page_data, page_profiles
from pluralign.server.routes import EnsembleResponse, answer_routes, ops_routes, page_routes, read_pages, score_routes
from pluralign.server.service import Service
from pluralign.text.options import SamplingOptions

# --- The description of the API: FastAPI's own, where numbers that may be undefined are also null.


REFERENCE = "#/components/schemas/"


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
                if str(part.get("$ref", "")).startswith(REFERENCE):
                    waiting.append(part["$ref"].removeprefix(REFERENCE))


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
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


def create_app(
    ensemble: RewardEnsemble,
    generator: Sampler | None = None,
    *,
    held_out: HeldOutVotes | None = None,
    representation: Representation | None = None,
    descriptions: Descriptions | None = None,
    evaluation: Evaluation | None = None,
    name: str = "pluralign",
    api_key: str | None = None,
    limits: Limits | None = None,
    refusal: RefusalPolicy | None = None,
    sampling: SamplingOptions | None = None,
    n: int = 8,
    policies: Mapping[int, Sampler] | None = None,
    n_drafts: int = 1,
    seed: int | None = None,
    log_prompts: bool = False,
) -> FastAPI:
    """Return the application that serves an ensemble.

    Args:
        ensemble: its members score, vote and answer.
        generator: writes candidates if a request sends none; called in threads.
        held_out: held-out votes with the ensemble's rewards, for member cards, examples and known prompts.
        representation: how well individuals are represented, for the page.
        descriptions: of the members by a language model, for the page.
        evaluation: figures on ``held_out`` for the page, if these are other votes than those of the fit.
        name: first part of every model id.
        api_key: API key required from clients; without one the server answers only to loopback hosts.
        limits: limits of the server.
        refusal: a refusal policy; runs before any mode.
        sampling: sampling options of requests that set none.
        n: number of candidates to sample for requests that do not say.
        policies: the members' own policies, by member: they answer requests without candidates.
        n_drafts: number of drafts per policy for requests that do not say.
        seed: base seed for requests that send none (default: random).
        log_prompts: whether the log contains the bodies of requests.

    Example:
        >>> from pluralign import fit, town_hall
        >>> app = create_app(fit(town_hall(200).preferences, k=2, encoder="none"), name="town")
        >>> app.title
        'Pluralign: town'
    """
    if not re.fullmatch(r"[\w.-]{1,100}", name):
        raise UsageError(f"the name must have only letters, digits, dots, dashes and underscores, not {name[:100]!r}.")
    if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
        raise UsageError("the API key must have only printable ASCII characters and no spaces; choose another key.")
    limits, metrics = limits or Limits(), Metrics.create()
    profiles = [] if held_out is None else with_descriptions(page_profiles(ensemble, held_out), descriptions)
    page = collect_page_data(
        ensemble, held_out, name=name, profiles=profiles, representation=representation, evaluation=evaluation
    )
    candidates = CandidateSource(
        generator=generator,
        held_out=held_out,
        limits=limits,
        sampling=sampling or SamplingOptions(),
        n_candidates=n,
        policies=policies or {},
        n_drafts=n_drafts,
    )
    service = Service(
        ensemble=ensemble,
        candidates=candidates,
        name=name,
        names=[card.name for card in page.members],
        profiles=profiles,
        limits=limits,
        refusal=refusal,
        seed=seed,
        observe=metrics.count_batch,
    )
    metrics.watch_queue(lambda: service.batcher.waiting)
    shown = EnsembleResponse(
        **vars(page),
        can_generate=generator is not None,
        policies=sorted(policies or {}),
        generator=generator.name if generator else None,
        modes=list(MODES),
        models=model_ids(name, ensemble.k),
        limits=limits,
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
        AccessMiddleware, limits=limits, api_key=api_key, observe=metrics.count_request, log_prompts=log_prompts
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
