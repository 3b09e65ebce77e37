"""Fields of requests that the server does not support: refused, or ignored and named in the response.

Fields of the schemas are honoured. ``REFUSED`` lists the fields that change the meaning of a request; they get a 400
that names them. All others, known or unknown, are ignored: the response names them in a header, and in the field
``ignored`` of answers. Nothing is dropped silently. ``docs/how-to/serve.md`` has the same table.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import MutableHeaders

from pluralign.server.chat_schemas import ChatRequest
from pluralign.server.errors import ApiError
from pluralign.server.schemas import Body, CohereRequest, Turn

IGNORED_HEADER = "Pluralign-Ignored"
NAMES_SHOWN = 20
"""Maximum number of ignored fields that a response names."""
NAME_LENGTH = 60


@dataclass(frozen=True)
class Refused:
    """Why a field is refused, and which of its values have no effect and are accepted."""

    reason: str
    """What to do instead, as the second half of a sentence."""
    accepted: Callable[[Any], bool] = lambda value: not value


def _is_text_format(value: Any) -> bool:
    return not value or value == {"type": "text"}


def _calls_nothing(value: Any) -> bool:
    return value in (None, "none", "auto")


NO_TOOLS = "the candidates are texts, and members cannot call tools"
NO_PROBABILITIES = "answers are chosen among candidates and have no token probabilities"
NO_FORMAT = "the format of candidates cannot be enforced; ask for it in a message, or send candidates of that format"

REFUSED: Mapping[type[Body], Mapping[str, Refused]] = {
    ChatRequest: {
        "tools": Refused(NO_TOOLS),
        "tool_choice": Refused(NO_TOOLS, _calls_nothing),
        "functions": Refused(NO_TOOLS),
        "function_call": Refused(NO_TOOLS, _calls_nothing),
        "web_search_options": Refused(NO_TOOLS, lambda value: value is None),
        "response_format": Refused(NO_FORMAT, _is_text_format),
        "structured_outputs": Refused(NO_FORMAT),
        "guided_json": Refused(NO_FORMAT),
        "guided_regex": Refused(NO_FORMAT),
        "guided_choice": Refused("send the choices as candidates"),
        "guided_grammar": Refused(NO_FORMAT),
        "logprobs": Refused(NO_PROBABILITIES),
        "top_logprobs": Refused(NO_PROBABILITIES),
        "prompt_logprobs": Refused(NO_PROBABILITIES, lambda value: value is None),
        "modalities": Refused("answers are texts", lambda value: not value or value == ["text"]),
        "audio": Refused("answers are texts"),
    },
    Turn: {
        "tool_calls": Refused(NO_TOOLS),
        "function_call": Refused(NO_TOOLS),
        "audio": Refused("messages are texts"),
    },
    CohereRequest: {"rank_fields": Refused("documents are texts; send each as one text")},
}
"""The fields that are refused, by the part of a request that they belong to."""


def ignored_fields(body: Body) -> list[str]:
    """Return the fields of a request that have no effect, as paths such as ``messages.name``.

    Values that turn a feature off (null, false, 0, empty) are not mentioned.

    Raises:
        ApiError: a field changes the meaning of the request and is not supported.

    Example:
        >>> turns = [{"role": "user", "content": "Tea?", "name": "Ann"}]
        >>> ignored_fields(ChatRequest.model_validate({"model": "town", "messages": turns, "user": "a", "top_k": 0}))
        ['user', 'messages.name']
    """
    names = list(dict.fromkeys(_unsupported(body, "")))
    return names if len(names) <= NAMES_SHOWN else [*names[:NAMES_SHOWN], "..."]


def name_ignored(body: Body, headers: MutableHeaders) -> list[str]:
    """Return ``ignored_fields``, and name them in a header of the response."""
    if names := ignored_fields(body):
        headers[IGNORED_HEADER] = ", ".join(names)
    return names


def _unsupported(part: Body, path: str) -> Iterator[str]:
    refused = REFUSED.get(type(part), {})
    for name, value in (part.model_extra or {}).items():
        # Names come from the client: escaped, they fit into UTF-8 and into a header, which may not end with a space.
        full = path + name.encode("unicode_escape").decode().replace(" ", "\\x20")[:NAME_LENGTH]
        rule = refused.get(name)
        if rule is None:
            if value:
                yield full
        elif not rule.accepted(value):
            message = f"{full} is not supported: {rule.reason}."
            raise ApiError(400, message, code="unsupported_field", param=full)
    for name in type(part).model_fields:
        value = getattr(part, name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Body):
                yield from _unsupported(item, f"{path}{name}.")
