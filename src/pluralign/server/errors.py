"""Errors as clients see them: a status, and a JSON body in the shape of OpenAI's errors."""

import json
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from pluralign.core.errors import PluralignError
from pluralign.core.json_values import to_json

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
NOT_JSON = "the body is not valid JSON; send a JSON object."


class ErrorDetail(BaseModel):
    """The content of an error."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorBody(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """An error that is sent to the client.

    Args:
        status: of the HTTP response.
        message: one sentence: what must hold, what was given, what to do.
        code: a fixed identifier that programs can test.
        param: the field or parameter at fault.
        retry_after: seconds after which the client may try again.
        close: whether the connection is closed after the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str = "",
        retry_after: int | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
        if close:
            self.headers["Connection"] = "close"

    @property
    def body(self) -> ErrorBody:
        """The response body."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return ErrorBody(
            error=ErrorDetail(message=self.message, type=kind, code=self.code, param=self.param or None),
        )

    @property
    def content(self) -> bytes:
        """The response body as JSON."""
        return json.dumps(self.body.model_dump()).encode()


def add_error_handlers(app: FastAPI) -> None:
    """Send every error of an application in OpenAI's shape."""

    def response(error: ApiError) -> Response:
        return Response(error.content, error.status, error.headers, "application/json")

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return response(error)

    @app.exception_handler(PluralignError)
    async def library_error(_: Request, error: PluralignError) -> Response:
        return response(ApiError(400, str(error), code="unusable"))

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return response(ApiError(404, "there is no such path; GET /docs lists all paths.", code="not_found"))
        if error.status_code == 405:
            message = "this path does not support the request's method; GET /docs lists the methods of every path."
            return response(ApiError(405, message, code="method_not_allowed"))
        return response(ApiError(error.status_code, NOT_JSON, code="not_json"))

    @app.exception_handler(RequestValidationError)
    async def validation_error(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return response(ApiError(400, NOT_JSON, code="not_json"))
        field = ".".join(str(part) for part in first["loc"] if part != "body")
        return response(ApiError(422, f"{field or 'the body'}: {first['msg']}.", code="invalid", param=field))


# --- JSON responses without NaN and infinities, which JSON does not have.


class FiniteJSONResponse(JSONResponse):
    """A response as UTF-8 JSON; numbers that are not finite become null."""

    def render(self, content: Any) -> bytes:
        """Return the body. Only content with numbers that are not finite is copied."""
        try:
            text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        except ValueError:
            text = json.dumps(to_json(content), ensure_ascii=False, allow_nan=False)
        return text.encode()
