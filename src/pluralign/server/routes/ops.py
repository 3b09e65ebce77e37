"""Routes about the server itself: the data of the page, health, and metrics."""

from collections.abc import Callable
from dataclasses import dataclass

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse, Response

from pluralign.answering.answer import Mode
from pluralign.core.json_values import to_json
from pluralign.server.json_response import FiniteJSONResponse
from pluralign.server.limits import Limits
from pluralign.server.page_data import PageData
from pluralign.server.schemas import Health


@dataclass(frozen=True)
class EnsembleResponse(PageData):
    """Everything that the page shows: the ensemble's data, and the abilities of this server.

    Numbers that are undefined are null.
    """

    can_generate: bool
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
    content = FiniteJSONResponse(to_json(ensemble)).body

    @router.get("/v1/ensemble", tags=["answers"], response_model=EnsembleResponse)
    async def ensemble_data() -> Response:
        """Everything that the page shows: figures, member cards, examples, modes and limits."""
        return Response(content, media_type="application/json")

    @router.get("/health", tags=["server"])
    @router.get("/healthz", tags=["server"])
    async def healthz() -> Health:
        """Whether the server answers: ``{status: "ok"}``."""
        return Health()

    @router.get("/metrics", tags=["server"], response_class=PlainTextResponse)
    async def metrics_text() -> Response:
        """Counters and histograms for Prometheus."""
        return PlainTextResponse(metrics())

    return router
