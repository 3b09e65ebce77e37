"""Routes for people: the files of the page, and a list of all routes without scripts."""

import html
import importlib.resources
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

MEDIA_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
NO_PAGE = b"This installation has no page. The API works: see /docs."


@dataclass(frozen=True)
class Page:
    """A file that is served as it is."""

    media_type: str
    content: bytes


def read_pages(openapi: Mapping[str, Any]) -> dict[str, Page]:
    """Return the files of the page and the list of routes, by path.

    Args:
        openapi: the description of the API, for the list of routes.
    """
    folder = importlib.resources.files("pluralign") / "server" / "static"
    files = {file.name: file.read_bytes() for file in folder.iterdir()} if folder.is_dir() else {}
    pages = {"/": Page("text/plain", NO_PAGE), "/docs": Page("text/html", list_routes(openapi).encode())}
    for name, content in files.items():
        if media_type := MEDIA_TYPES.get(name.rpartition(".")[2]):
            pages["/" if name == "index.html" else f"/{name}"] = Page(media_type, content)
    return pages


def page_routes(pages: Mapping[str, Page]) -> APIRouter:
    """Return a route per page."""
    router = APIRouter(include_in_schema=False)
    for path, page in pages.items():
        router.add_api_route(path, _send(page))
    return router


def _send(page: Page) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return Response(page.content, media_type=page.media_type)

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
