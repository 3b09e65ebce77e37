"""JSON responses without NaN and infinities, which JSON does not have."""

import json
from typing import Any

from fastapi.responses import JSONResponse

from pluralign.core.json_values import without_nan


class FiniteJSONResponse(JSONResponse):
    """A response as UTF-8 JSON; numbers that are not finite become null."""

    def render(self, content: Any) -> bytes:
        """Return the body. Only content with numbers that are not finite is copied."""
        try:
            text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        except ValueError:
            text = json.dumps(without_nan(content), ensure_ascii=False, allow_nan=False)
        return text.encode()
