"""Errors as clients see them: a status, and a JSON body in the shape of OpenAI's errors."""

import json

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


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
        self, status: int, message: str, *, code: str, param: str = "", retry_after: int = 0, close: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        detail = {"message": message, "type": kind, "code": code, "param": param or None}
        self.content = json.dumps({"error": detail}).encode()
        """The response body."""
        self.headers = {"Content-Type": "application/json", "Content-Length": str(len(self.content))}
        if retry_after:
            self.headers["Retry-After"] = str(retry_after)
        if close:
            self.headers["Connection"] = "close"
