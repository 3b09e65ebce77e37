"""Bodies of OpenAI's chat completions, with the descriptions that OpenAPI shows."""

from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field

from pluralign.server.schemas import (
    AnswerDetails,
    Body,
    CandidatesField,
    MaxTokensField,
    Result,
    SeedField,
    TemperatureField,
    TopPField,
    Turn,
)

StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]
StopField: TypeAlias = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=16)] | None,
    Field(description="Candidates end before the first of these texts"),
]


class StreamOptions(Body):
    """Options of a streamed completion."""

    include_usage: bool = False


class ChatRequest(Body):
    """OpenAI's chat completion request."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"model": "town:consensus", "messages": [{"role": "user", "content": "Plant more trees?"}]}]
        }
    )

    model: str = Field(
        description="NAME (the same as NAME:distributional), NAME:balanced, NAME:consensus, NAME:member-3"
    )
    messages: list[Turn] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    draws: int | None = Field(
        default=None, alias="n", ge=1, description="Number of random draws; distributional mode only"
    )
    seed: SeedField = None
    temperature: TemperatureField = None
    top_p: TopPField = None
    max_tokens: MaxTokensField = None
    max_completion_tokens: MaxTokensField = None
    stop: StopField = None
    candidates: CandidatesField = None


class AssistantMessage(Result):
    """The message of a completion."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class CompletionChoice(Result):
    """One message of a completion: one per draw."""

    index: int
    message: AssistantMessage
    logprobs: None = None
    finish_reason: Literal["stop"] = "stop"


class Usage(Result):
    """Counts of words and punctuation marks, as an estimate of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(Result):
    """OpenAI's chat completion, with details of the answer in the field ``pluralign``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    pluralign: AnswerDetails


class Delta(Result):
    """Piece of a streamed message. Fields that are not set are not sent."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(Result):
    """Piece of one message of a streamed completion."""

    index: int
    delta: Delta
    logprobs: None
    finish_reason: Literal["stop"] | None


class ChatCompletionChunk(Result):
    """One event of a streamed completion. Fields that are not set are not sent."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    pluralign: AnswerDetails | None = None
