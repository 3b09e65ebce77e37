"""OpenAI's chat completions: which model id stands for which mode, and how an answer becomes a completion."""

import json
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.datastructures import MutableHeaders

from pluralign.answering.answer import Answer
from pluralign.answering.request import Mode
from pluralign.answering.slate import SlateEntry
from pluralign.core.errors import did_you_mean
from pluralign.core.json_values import to_json
from pluralign.server import schemas
from pluralign.server.errors import ApiError

Voice = Literal["balanced", "consensus", "distributional"]
VOICES: tuple[Voice, ...] = ("distributional", "balanced", "consensus")
PIECE = re.compile(r"\S+\s*|\s+")
"""One event of a stream: a word."""
TOKEN = re.compile(r"\w+|[^\w\s]")
"""The unit of ``usage``: words and punctuation marks. The server does not have the tokenizer of the texts' model."""


@dataclass(frozen=True)
class ModelTarget:
    """The part of the ensemble that a model id stands for: a voice of the whole ensemble, or one member."""

    voice: Voice | None
    """None for a member."""
    member: int | None

    @property
    def mode(self) -> Mode:
        """The mode of its answers."""
        if self.voice is None:
            return "steerable"
        return "distributional" if self.voice == "distributional" else "balanced"


def model_ids(name: str, k: int) -> list[str]:
    """Return all model ids of an ensemble.

    Example:
        >>> model_ids("town", 2)
        ['town', 'town:distributional', 'town:balanced', 'town:consensus', 'town:member-0', 'town:member-1']
    """
    return [name, *(f"{name}:{voice}" for voice in VOICES), *(f"{name}:member-{j}" for j in range(k))]


def find_model(model: str, name: str, k: int) -> ModelTarget:
    """Return the target of a model id.

    Args:
        model: the id of a request.
        name: first part of the server's ids.
        k: number of members.

    Raises:
        ApiError: if there is no such model.

    Example:
        >>> find_model("town:member-1", "town", 2)
        ModelTarget(voice=None, member=1)
    """
    ids = model_ids(name, k)
    if model not in ids:
        message = f"there is no model {model[:80]!r}; {did_you_mean(model[:80], ids)}."
        raise ApiError(404, message, code="model_not_found", param="model")
    position = ids.index(model)
    if position > len(VOICES):
        return ModelTarget(None, position - 1 - len(VOICES))
    return ModelTarget(VOICES[max(position - 1, 0)], None)


def answer_details(
    answers: Sequence[Answer], names: Sequence[str], seed: int, generator: str | None, ignored: Sequence[str]
) -> schemas.AnswerDetails:
    """Return an answer with member names: the body of ``/v1/answer``, and the field ``pluralign`` of completions.

    Args:
        answers: one per draw. Draws differ only in their ``answers``.
        names: of the members.
        seed: of the request.
        generator: name of the model that wrote the candidates.
        ignored: fields of the request that have no effect.
    """
    steering = answers[0].steering
    entries = (
        schemas.AnswerEntry(**vars(entry), name=None if entry.member is None else names[entry.member])
        for answer in answers
        for entry in answer.answers
    )
    own: dict[str, Any] = {
        "answers": tuple(entries),
        "texts": tuple(dict.fromkeys(text for answer in answers for text in answer.texts)),
        "steering": schemas.SteeringResponse(**vars(steering), name=names[steering.member]) if steering else None,
        "written": tuple(sorted({j for answer in answers for j in answer.written})),
    }
    return schemas.AnswerDetails(**vars(answers[0]) | own, seed=seed, generator=generator, ignored=list(ignored))


def message(index: int, answer: Answer, target: ModelTarget, names: Sequence[str]) -> schemas.CompletionChoice:
    """Return a message of a completion: the slate as readable text, the consensus, or the single answer."""
    shown = [entry.text for entry in answer.answers[: None if target.voice == "balanced" else 1]]
    if target.voice == "consensus" and answer.consensus:
        shown = [answer.consensus.text]
    content = shown[0]
    if len(shown) > 1:
        content = "\n\n".join(_heading(place, one, names) + one.text for place, one in enumerate(answer.answers, 1))
    finish: Literal["stop", "length"] = "length" if set(shown) & set(answer.cut_off) else "stop"
    return schemas.CompletionChoice(
        index=index, message=schemas.AssistantMessage(content=content), finish_reason=finish
    )


def _heading(place: int, entry: SlateEntry, names: Sequence[str]) -> str:
    """Return the line above an answer of a slate: without a share for texts unlike those people voted on."""
    share = "" if entry.share is None else f" Favourite of {entry.share:.0%} of people:"
    return f"{place}.{share}{'' if entry.member is None else f' {names[entry.member]}'}\n\n"


def completion(
    model: str, prompt: str, choices: list[schemas.CompletionChoice], details: schemas.AnswerDetails
) -> schemas.ChatCompletion:
    """Return a whole chat completion."""
    return schemas.ChatCompletion(
        id=_new_id(),
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=usage(prompt, [one.message.content for one in choices]),
        pluralign=details,
    )


async def stream(
    model: str,
    prompt: str,
    choices: Sequence[schemas.CompletionChoice],
    details: schemas.AnswerDetails,
    *,
    include_usage: bool,
) -> AsyncIterator[str]:
    """Yield a chat completion as server-sent events; the last chunk with choices has the field ``pluralign``."""
    chunk = {"id": _new_id(), "object": "chat.completion.chunk", "created": int(time.time()), "model": model}
    empty = chunk | ({"usage": None} if include_usage else {})

    def event(index: int, delta: dict[str, str], finish: str | None = None, **more: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _sent(empty | {"choices": [choice]} | more)

    texts = [one.message.content for one in choices]
    for index, text in enumerate(texts):
        yield event(index, {"role": "assistant", "content": ""})
        for piece in PIECE.findall(text):
            yield event(index, {"content": piece})
        last = {"pluralign": details} if index == len(texts) - 1 else {}
        yield event(index, {}, choices[index].finish_reason, **last)
    if include_usage:
        yield _sent(empty | {"choices": [], "usage": usage(prompt, texts).model_dump()})
    yield "data: [DONE]\n\n"


def usage(prompt: str, texts: Sequence[str]) -> schemas.Usage:
    """Return counts of words and punctuation marks, as an estimate of tokens.

    Example:
        >>> usage("Tea?", ["Yes, please."]).total_tokens
        6
    """
    in_prompt, in_texts = len(TOKEN.findall(prompt)), sum(len(TOKEN.findall(text)) for text in texts)
    return schemas.Usage(prompt_tokens=in_prompt, completion_tokens=in_texts, total_tokens=in_prompt + in_texts)


def _new_id() -> str:
    return f"chatcmpl-{secrets.token_hex(12)}"


def _sent(chunk: Mapping[str, Any]) -> str:
    """Return a chunk as a server-sent event."""
    return f"data: {json.dumps(to_json(chunk), ensure_ascii=False, allow_nan=False)}\n\n"


# --- Fields of requests that the server does not support: refused, or ignored and named in the response.


IGNORED_HEADER = "Pluralign-Ignored"
UNLIKE_HEADER = "Pluralign-Unlike"
NAMES_SHOWN = 20
"""Maximum number of ignored fields that a response names."""
NAME_LENGTH = 60


@dataclass(frozen=True)
class Refused:
    """Why a field is refused, and which of its values have no effect and are accepted."""

    reason: str
    """What to do instead, as the second half of a sentence."""
    accepted: Callable[[Any], bool] = lambda value: not value


NO_CHOICE = (None, "none", "auto")
NO_TOOLS = "the candidates are texts, and members cannot call tools"
NO_PROBABILITIES = "answers are chosen among candidates and have no token probabilities"
NO_FORMAT = "the format of candidates cannot be enforced; ask for it in a message, or send candidates of that format"

REFUSED: Mapping[type[schemas.Body], Mapping[str, Refused]] = {
    schemas.ChatRequest: {
        **dict.fromkeys(("tools", "functions"), Refused(NO_TOOLS)),
        **dict.fromkeys(
            ("tool_choice", "function_call"), Refused(NO_TOOLS, lambda value: value in (None, "none", "auto"))
        ),
        "web_search_options": Refused(NO_TOOLS, lambda value: value is None),
        "response_format": Refused(NO_FORMAT, lambda value: not value or value == {"type": "text"}),
        **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_grammar"), Refused(NO_FORMAT)),
        "guided_choice": Refused("send the choices as candidates"),
        **dict.fromkeys(("logprobs", "top_logprobs"), Refused(NO_PROBABILITIES)),
        "prompt_logprobs": Refused(NO_PROBABILITIES, lambda value: value is None),
        "modalities": Refused("answers are texts", lambda value: not value or value == ["text"]),
        "audio": Refused("answers are texts"),
    },
    schemas.Turn: {
        "tool_calls": Refused(NO_TOOLS),
        "function_call": Refused(NO_TOOLS),
        "audio": Refused("messages are texts"),
    },
    schemas.CohereRequest: {"rank_fields": Refused("documents are texts; send each as one text")},
}
"""The fields that are refused, by the part of a request that they belong to."""


def ignored_fields(body: schemas.Body) -> list[str]:
    """Return the fields of a request that have no effect, as paths such as ``messages.name``.

    Values that turn a feature off (null, false, 0, empty) are not mentioned.

    Raises:
        ApiError: a field changes the meaning of the request and is not supported.

    Example:
        >>> turns = [{"role": "user", "content": "Tea?", "name": "Ann"}]
        >>> body = {"model": "town", "messages": turns, "user": "a", "top_k": 0}
        >>> ignored_fields(schemas.ChatRequest.model_validate(body))
        ['user', 'messages.name']
    """
    names = list(dict.fromkeys(_unsupported(body, "")))
    return names if len(names) <= NAMES_SHOWN else [*names[:NAMES_SHOWN], "..."]


def name_ignored(body: schemas.Body, headers: MutableHeaders) -> list[str]:
    """Return ``ignored_fields``, and name them in a header of the response."""
    if names := ignored_fields(body):
        headers[IGNORED_HEADER] = ", ".join(names)
    return names


def name_unlike(indices: Sequence[int], headers: MutableHeaders) -> None:
    """Name in a header of a ranking the texts unlike those that people voted on."""
    if indices:
        headers[UNLIKE_HEADER] = ", ".join(map(str, indices))


def _unsupported(part: schemas.Body, path: str) -> Iterator[str]:
    refused = REFUSED.get(type(part), {})
    for name, value in (part.model_extra or {}).items():
        # Names come from the client: escaped, they fit into UTF-8 and into a header, which may not end with a space.
        full = path + (name.encode("unicode_escape").decode().replace(" ", "\\x20")[:NAME_LENGTH] or '""')
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
            if isinstance(item, schemas.Body):
                yield from _unsupported(item, f"{path}{name}.")
