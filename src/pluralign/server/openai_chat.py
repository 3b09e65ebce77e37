"""OpenAI's chat shapes: which model id stands for which mode, and what clients get.

Decided here: whom a model id asks for, how an answer becomes a completion, and what its field ``pluralign`` holds.
"""

import json
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pluralign.answering.answer import Answer, Mode
from pluralign.answering.consensus import SlateEntry
from pluralign.core.errors import did_you_mean
from pluralign.server.limits import ApiError

Voice = Literal["balanced", "consensus", "distributional"]
VOICES: tuple[Voice, ...] = ("distributional", "balanced", "consensus")
COLDEST = 0.01
"""What a temperature of 0 is read as: candidates must be sampled."""
PIECE = re.compile(r"\S+\s*|\s+")
"""What a stream sends at a time: a word."""
TOKEN = re.compile(r"\w+|[^\w\s]")
"""What ``usage`` counts: words and marks, since the server has no tokenizer of whatever wrote the texts."""


@dataclass(frozen=True)
class Asked:
    """Whom a model id asks for."""

    voice: Voice | None
    """None where a member is asked for."""
    member: int | None

    @property
    def mode(self) -> Mode:
        """The mode that answers."""
        if self.voice is None:
            return "steerable"
        return "distributional" if self.voice == "distributional" else "balanced"


def model_ids(name: str, k: int) -> list[str]:
    """Return the ids of everything that may be asked.

    Example:
        >>> model_ids("town", 2)
        ['town', 'town:distributional', 'town:balanced', 'town:consensus', 'town:member-0', 'town:member-1']
    """
    return [name, *(f"{name}:{voice}" for voice in VOICES), *(f"{name}:member-{j}" for j in range(k))]


def who(model: str, name: str, k: int) -> Asked:
    """Return whom a model id asks for.

    Example:
        >>> who("town:member-1", "town", 2)
        Asked(voice=None, member=1)
    """
    ids = model_ids(name, k)
    if model not in ids:
        message = f"there is no model {model[:80]!r}; {did_you_mean(model[:80], ids)}."
        raise ApiError(404, message, code="model_not_found", param="model")
    place = ids.index(model)
    if place > len(VOICES):
        return Asked(None, place - 1 - len(VOICES))
    return Asked(VOICES[max(place - 1, 0)], None)


# --- what is sent back ----------------------------------------------------------------------------------------------


def facts(answers: Sequence[Answer], names: Sequence[str], seed: int, generator: str | None) -> dict[str, Any]:
    """Return an answer as JSON, with member names: the body of ``/v1/answer``, and the field ``pluralign`` in chats.

    Of several draws each gives one of its ``answers``; the rest is the same for all.
    """
    found = asdict(answers[0])
    found["answers"] = [_named(given, names) for one in answers for given in one.answers]
    if found["steering"]:
        found["steering"]["name"] = names[found["steering"]["member"]]
    return {**found, "seed": seed, "generator": generator}


def _named(given: SlateEntry, names: Sequence[str]) -> dict[str, Any]:
    return {**asdict(given), "name": None if given.member is None else names[given.member]}


def spoken(answer: Answer, asked: Asked, names: Sequence[str]) -> str:
    """Return what a chat shows: the slate as readable text, the consensus, or the one answer."""
    if asked.voice == "consensus" and answer.consensus:
        return answer.consensus.text
    if asked.voice == "balanced" and len(answer.answers) > 1:
        entries = [
            f"{place}. {given.weight:.0%}: {'' if given.member is None else names[given.member]}\n\n{given.text}"
            for place, given in enumerate(answer.answers, 1)
        ]
        return "\n\n".join(entries)
    return answer.answers[0].text


def completion(model: str, prompt: str, texts: Sequence[str], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole chat completion."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
        for index, text in enumerate(texts)
    ]
    head = _head("chat.completion", model)
    return {**head, "choices": choices, "usage": usage(prompt, texts), "pluralign": extra}


def chunks(
    model: str, prompt: str, texts: Sequence[str], extra: Mapping[str, Any], *, include_usage: bool
) -> Iterator[str]:
    """Yield a chat completion as server-sent events; the last chunk with choices has the field ``pluralign``."""
    head = _head("chat.completion.chunk", model)

    def event(index: int, delta: dict[str, str], finish: str | None = None, **more: Any) -> str:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return _event({**head, "choices": [choice], **({"usage": None} if include_usage else {}), **more})

    for index, text in enumerate(texts):
        yield event(index, {"role": "assistant", "content": ""})
        for piece in PIECE.findall(text):
            yield event(index, {"content": piece})
        last = index == len(texts) - 1
        yield event(index, {}, "stop", **({"pluralign": extra} if last else {}))
    if include_usage:
        yield _event({**head, "choices": [], "usage": usage(prompt, texts)})
    yield "data: [DONE]\n\n"


def usage(prompt: str, texts: Sequence[str]) -> dict[str, int]:
    """Return counts of words and marks, as an estimate of tokens.

    Example:
        >>> usage("Tea?", ["Yes, please."])
        {'prompt_tokens': 2, 'completion_tokens': 4, 'total_tokens': 6}
    """
    asked, said = len(TOKEN.findall(prompt)), sum(len(TOKEN.findall(text)) for text in texts)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def _event(data: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(data, ensure_ascii=False, allow_nan=False)}\n\n"
