"""JSON responses without NaN and infinities, which JSON does not have."""

import json
from typing import Any

from fastapi.responses import JSONResponse

from pluralign.core.json_values import to_json


class FiniteJSONResponse(JSONResponse):
    """A response as UTF-8 JSON; numbers that are not finite become null."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(to_json(content), ensure_ascii=False, allow_nan=False).encode()
