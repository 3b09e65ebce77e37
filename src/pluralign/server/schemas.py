"""Bodies of requests and responses, with the descriptions that OpenAPI shows.

The number and the length of texts are checked in ``service``, because the server is started with these limits.
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pluralign.answering.answer import Answer
from pluralign.answering.request import Mode
from pluralign.answering.slate import SlateEntry
from pluralign.answering.steering import Steering
from pluralign.core.types import Level
from pluralign.server.errors import ApiError
from pluralign.server.explain import MemberVote
from pluralign.votes.prompts import Message


class Body(BaseModel):
    """A request body, or a part of one. Fields beyond the schema are kept for ``fields.ignored_fields``."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)


class Result(BaseModel):
    """A response body, or a part of one. Numbers that are not finite are sent as null."""

    model_config = ConfigDict(frozen=True)


def example(**body: Any) -> ConfigDict:
    """Return the configuration of a body with an example for OpenAPI and for ``/docs``."""
    return ConfigDict(json_schema_extra={"examples": [body]})


class ErrorDetail(Result):
    """The content of an error."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorBody(Result):
    """The body of every response that is not a success: the content of an ``ApiError``."""

    error: ErrorDetail


# --- prompts and responses --------------------------------------------------------------------------------------------


class Part(Body):
    """Part of a message."""

    type: str
    text: str | None = None


class Turn(Body):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]

    def as_message(self) -> Message:
        """Return it as an ensemble reads it; ``developer`` is a synonym of ``system``."""
        role = "system" if self.role == "developer" else self.role
        if isinstance(self.content, str):
            return Message(role, self.content)
        if unsupported := [part.type for part in self.content if part.type != "text" or part.text is None]:
            message = f"messages may contain only text parts, not {unsupported[0]!r}; remove the other parts."
            raise ApiError(400, message, code="unsupported_content", param="messages")
        return Message(role, "".join(part.text or "" for part in self.content))


PromptField: TypeAlias = Annotated[str | list[Turn], Field(description="A text, or the messages of a chat")]
SeedField: TypeAlias = Annotated[
    int | None, Field(ge=0, lt=2**63, description="Seed of candidates, ties and draws; random if absent")
]
MaxTokensField: TypeAlias = Annotated[
    int | None, Field(ge=1, description="Maximum length of each generated candidate, in tokens")
]
CandidatesField: TypeAlias = Annotated[
    list[str] | None, Field(min_length=1, description="Responses to choose from; generated if absent")
]


StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]
StopField: TypeAlias = Annotated[
    StopText | Annotated[list[StopText], Field(max_length=16)] | None,
    Field(description="Candidates end before the first of these texts"),
]


class Sampled(Body):
    """A request whose candidates may be generated."""

    candidates: CandidatesField = None
    seed: SeedField = None
    temperature: float | None = Field(
        default=None, ge=0, le=10, description="Sampling temperature of generated candidates; 0 is treated as 0.01"
    )
    top_p: float | None = Field(default=None, gt=0, le=1, description="Nucleus sampling of generated candidates")
    max_tokens: MaxTokensField = None
    stop: StopField = None


class Text(Body):
    """A prompt and one response, or a chat whose last message is the response."""

    prompt: PromptField | None = None
    response: str | None = None
    messages: list[Turn] | None = Field(
        default=None, description="Instead of prompt and response: a chat that ends with an assistant message"
    )

    @model_validator(mode="after")
    def _check_parts(self) -> "Text":
        """Check that there is a prompt and a response, or a chat that has both."""
        given = {name for name in ("prompt", "response", "messages") if getattr(self, name) is not None}
        if given not in ({"prompt", "response"}, {"messages"}):
            message = "a text must have prompt and response, or messages; send one of the two forms"
            raise PydanticCustomError("text_parts", message)
        if self.messages is not None and (len(self.messages) < 2 or self.messages[-1].role != "assistant"):
            message = "messages must be a prompt and a last message of the assistant, which is scored"
            raise PydanticCustomError("text_parts", message)
        return self

    def split(self) -> tuple[str | list[Turn], str]:
        """Return the prompt and the response."""
        if self.messages:
            return self.messages[:-1], self.messages[-1].as_message().content
        return self.prompt or "", self.response or ""


class Pair(Body):
    """A prompt and two responses."""

    prompt: PromptField
    response_a: str
    response_b: str


class Choice(Body):
    """What the user says about a prompt: which of two responses is better, or a ranking."""

    prompt: PromptField
    response_a: str | None = None
    response_b: str | None = None
    chosen: Literal["a", "b"] | None = None
    responses: list[str] | None = Field(default=None, description="With ranking: the responses, instead of a and b")
    ranking: list[int | list[int]] | None = Field(
        default=None, description="Indices of responses, from 0, best first; a list ties, and others were not judged"
    )

    @model_validator(mode="after")
    def _check_parts(self) -> "Choice":
        """Check that it is a choice between a and b, or a ranking."""
        given = {name for name in type(self).model_fields if getattr(self, name) is not None} - {"prompt"}
        if given not in ({"response_a", "response_b", "chosen"}, {"responses", "ranking"}):
            message = "a choice must have response_a, response_b and chosen, or responses and ranking"
            raise PydanticCustomError("choice_parts", message)
        return self


# --- scores -----------------------------------------------------------------------------------------------------------


class CompareRequest(Body):
    """Pairs to compare."""

    model_config = example(pairs=[{"prompt": "Tea?", "response_a": "Yes.", "response_b": "No."}])
    pairs: list[Pair] = Field(min_length=1)


class Comparison(Result):
    """Votes on one pair."""

    votes: list[float] = Field(description="Each member's vote: 1 for a, 0 for b, 0.5 for a tie")
    prob_hat: float | None = Field(
        description="Predicted share of people preferring a: undecided/2 + (1 - undecided) × weight of members voting a"
    )
    prob_policy: float | None = Field(description="The same with members' probabilities for their votes")
    unlike: dict[str, str] = Field(
        description="Responses (a, b) unlike those that people voted on, with the reason; then no share is stated"
    )


class CompareResponse(Result):
    """One result per pair, in order."""

    results: list[Comparison]


class ScoreRequest(Body):
    """Texts to score."""

    model_config = example(
        texts=[
            {"prompt": "Tea?", "response": "Yes."},
            {"messages": [{"role": "user", "content": "Tea?"}, {"role": "assistant", "content": "Yes."}]},
        ]
    )
    texts: list[Text] = Field(min_length=1)


class TextRewards(Result):
    """Rewards of one text."""

    rewards: list[float] = Field(description="One per member")


class ScoreResponse(Result):
    """One result per text, in order."""

    results: list[TextRewards]


class ExplainResponse(Comparison):
    """Votes on one pair, with the reasons of every member."""

    rewards: dict[Literal["a", "b"], list[float]] = Field(description="Of the two responses, one per member")
    members: list[MemberVote]
    undecided: float = Field(description="Share of votes that no member explains; predicted to split evenly")


class RerankRequest(Body):
    """Text Embeddings Inference's rerank request."""

    model_config = example(query="Tea?", texts=["Yes.", "No."])
    query: str
    texts: list[str] = Field(min_length=1)
    raw_scores: bool = False
    return_text: bool = False


class RankedText(Result):
    """One text of a ranking."""

    index: int
    score: float
    text: str | None = Field(default=None, description="Present if the request sets return_text")


class Document(Body):
    """Cohere's document."""

    text: str


class CohereRequest(Body):
    """Cohere's rerank request."""

    model_config = example(query="Tea?", documents=["Yes.", "No."])
    model: str | None = Field(default=None, description="NAME, or NAME:member-3")
    query: str
    documents: list[str | Document] = Field(min_length=1)
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = False


class RankedDocument(Result):
    """One document of a ranking."""

    index: int
    relevance_score: float
    document: Document | None = Field(default=None, description="Present if the request sets return_documents")


class CohereResponse(Result):
    """Cohere's ranking, best first."""

    id: str
    results: list[RankedDocument]
    meta: dict[str, dict[str, str]]


class RewardRequest(Body):
    """OpenRLHF's reward request. Each query is a prompt with its response; the address names a member."""

    model_config = example(query=["Tea?Yes."], prompts=["Tea?"])
    query: list[str] = Field(min_length=1)
    prompts: list[str] | None = None


class RewardResponse(Result):
    """OpenRLHF's rewards, one per query."""

    rewards: list[float]
    scores: list[float]
    extra_logs: dict[str, list[float]] = Field(description="Rewards of every member: member_0, member_1, …")


# --- answers ----------------------------------------------------------------------------------------------------------


class AnswerBody(Sampled):
    """A prompt to answer in one of three modes."""

    model_config = example(prompt="Tea?", mode="balanced", candidates=["Yes.", "No."])
    prompt: PromptField
    mode: Mode = "balanced"
    n_candidates: int | None = Field(
        default=None, alias="n", ge=1, description="Number of candidates to generate, or of drafts per policy"
    )
    rule: str = Field(default="borda", description="Balanced mode: borda, maximin, schulze or lottery")
    slate_size: int | None = Field(default=None, ge=1, description="Balanced mode: size of the slate; 2 or 3 if absent")
    cover: str = Field(
        default="favourite", description="Balanced mode: the slate contains people's favourite, or one of their top-two"
    )
    level: Level = Field(
        default="policy",
        description="Balanced and distributional mode: members choose by their policy, or each takes its favourite",
    )
    distill: bool = Field(
        default=False, description="Balanced mode: the language model writes a statement from the slate"
    )
    member: int | None = Field(default=None, description="Steerable mode: the member that answers")
    like: str = Field(default="", description="Steerable mode: a preference in words")
    choices: list[Choice] | None = Field(
        default=None, min_length=1, description="Steerable mode: the user's own choices and rankings"
    )


@dataclass(frozen=True)
class AnswerEntry(SlateEntry):
    """One answer, and the members that support it."""

    name: str | None = None
    """Name of the member that answers."""


@dataclass(frozen=True)
class SteeringResponse(Steering):
    """What is known about the user."""

    name: str = ""
    """Name of the most likely member."""


@dataclass(frozen=True, kw_only=True)
class AnswerDetails(Answer):
    """The answer in one mode, and the reasons for it. ``answers`` is the slate, or has one entry per draw."""

    answers: tuple[AnswerEntry, ...]
    steering: SteeringResponse | None
    seed: int
    generator: str | None
    """Name of the model that wrote the candidates."""
    ignored: list[str]
    """Fields of the request that have no effect."""


@dataclass(frozen=True, kw_only=True)
class AnswerResponse(AnswerDetails):
    """The answer, with the names of the members."""

    members: list[str]


class SteerRequest(Body):
    """The user's choices so far."""

    choices: list[Choice] = Field(min_length=1)


class Model(Result):
    """OpenAI's description of a model."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "pluralign"


class ModelList(Result):
    """OpenAI's list of models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(Result):
    """Status of the server."""

    status: Literal["ok"] = "ok"


# --- Bodies of OpenAI's chat completions, with the descriptions that OpenAPI shows.


class StreamOptions(Body):
    """Options of a streamed completion."""

    include_usage: bool = False


class ChatRequest(Sampled):
    """OpenAI's chat completion request."""

    model_config = example(model="town:consensus", messages=[{"role": "user", "content": "Plant more trees?"}])
    model: str = Field(
        description="NAME (the same as NAME:distributional), NAME:balanced, NAME:consensus, NAME:member-3"
    )
    messages: list[Turn] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    draws: int | None = Field(
        default=None, alias="n", ge=1, description="Number of random draws; distributional mode only"
    )
    max_completion_tokens: MaxTokensField = None


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
    finish_reason: Literal["stop", "length"]


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
