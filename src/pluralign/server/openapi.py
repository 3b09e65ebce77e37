"""The description of the API: FastAPI's own, where numbers that may be undefined are also null."""

from collections.abc import Iterator, Mapping
from typing import Any

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
