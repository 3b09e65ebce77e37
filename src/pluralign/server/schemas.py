"""What clients send: the body of each request, with the descriptions that OpenAPI shows.

Counts and lengths are checked in ``service``, by limits that the server is started with.
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from pluralign.answering.answer import Mode
from pluralign.server.limits import ApiError
from pluralign.votes.prompts import Message


class Body(BaseModel):
    """A request; fields that we do not know are ignored, as clients send many."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class Part(Body):
    """A part of a message."""

    type: str
    text: str | None = None


class Turn(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def as_message(self) -> Message:
        """Return it as an ensemble reads it; ``developer`` is another word for ``system``."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return Message(role, self.content)
        if foreign := [part.type for part in self.content if part.type != "text" or part.text is None]:
            message = f"a message may hold text and nothing else, but a part is of type {foreign[0]!r}."
            raise ApiError(400, message, code="unsupported_content", param="messages")
        return Message(role, "".join(part.text or "" for part in self.content))


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool = False


class ChatRequest(Body):
    """A chat as OpenAI's clients send it."""

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
    n: int | None = Field(None, ge=1, description="Several draws; distributional only")
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="Of candidates, ties and the draw; a fresh one if absent"
    )
    temperature: float | None = Field(None, ge=0, le=10, description="Of the candidates; 0 is read as 0.01")
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    candidates: list[str] | None = Field(
        None, min_length=1, description="Ours: choose among these responses instead of generating any"
    )


PromptField: TypeAlias = Annotated[str | list[Turn], Field(description="A text, or the messages of a chat")]


class Text(Body):
    """A response to a prompt."""

    prompt: PromptField
    response: str


class Pair(Body):
    """Two responses to a prompt."""

    prompt: PromptField
    response_a: str
    response_b: str


class Choice(Pair):
    """Two responses to a prompt, and the one that a user prefers."""

    chosen: Literal["a", "b"]


class ScoreRequest(Body):
    """Texts to score."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"texts": [{"prompt": "Tea?", "response": "Yes."}]}]})
    texts: list[Text] = Field(min_length=1)


class CompareRequest(Body):
    """Pairs to compare."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"pairs": [{"prompt": "Tea?", "response_a": "Yes.", "response_b": "No."}]}]}
    )
    pairs: list[Pair] = Field(min_length=1)


class SteerRequest(Body):
    """What a user has chosen so far."""

    choices: list[Choice]


class AnswerRequest(Body):
    """A prompt to answer in one of three modes."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"prompt": "Tea?", "mode": "balanced", "candidates": ["Yes.", "No."]}]}
    )
    prompt: PromptField
    mode: Mode = "balanced"
    candidates: list[str] | None = Field(None, min_length=1, description="Choose among these; else they are generated")
    n: int | None = Field(None, ge=1, description="How many candidates to generate")
    rule: str = Field("maximin", description="Balanced: maximin, borda, schulze or lottery")
    member: int | None = Field(None, description="Steerable: this member answers")
    like: str = Field("", description="Steerable: what the user likes, in words")
    choices: list[Choice] | None = Field(None, min_length=1, description="Steerable: what the user has chosen")
    seed: int | None = Field(None, ge=0, lt=2**63)
    temperature: float | None = Field(None, ge=0, le=10)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)


class RerankRequest(Body):
    """Text Embeddings Inference's request."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": "Tea?", "texts": ["Yes.", "No."]}]})
    query: str
    texts: list[str] = Field(min_length=1)
    raw_scores: bool = False
    return_text: bool = False


class Document(Body):
    """A document of Cohere's."""

    text: str


class CohereRequest(Body):
    """Cohere's request."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": "Tea?", "documents": ["Yes.", "No."]}]})
    model: str | None = Field(None, description="NAME, or NAME:member-3")
    query: str
    documents: list[str | Document] = Field(min_length=1)
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False


class RewardRequest(Body):
    """OpenRLHF's request: each query is a prompt with its response, as one text."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"query": ["Tea?Yes."], "prompts": ["Tea?"]}]})
    query: list[str] = Field(min_length=1)
    prompts: list[str] | None = None
