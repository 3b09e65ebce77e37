"""Routes that answer prompts: OpenAI's chat completions, the three modes, and steering by choices."""

from collections.abc import AsyncIterator, Iterable

from fastapi import APIRouter, Response
from fastapi.responses import StreamingResponse

from pluralign.server import openai_chat
from pluralign.server.candidates import SamplingOverrides
from pluralign.server.chat_schemas import ChatCompletion, ChatRequest
from pluralign.server.errors import ApiError
from pluralign.server.fields import name_ignored
from pluralign.server.limits import check_count
from pluralign.server.schemas import AnswerRequest, AnswerResponse, Model, ModelList, SteeringResponse, SteerRequest
from pluralign.server.service import Service
from pluralign.votes.prompts import Prompt


def answer_routes(service: Service) -> APIRouter:
    """Return the routes that answer prompts."""
    router = APIRouter()
    k, generator = service.ensemble.k, service.candidates.generator
    generator_name = generator.name if generator else None

    @router.get("/v1/models", tags=["answers"])
    async def models() -> ModelList:
        """OpenAI's list of models: the modes of the ensemble, and every member."""
        return ModelList(data=[Model(id=model) for model in openai_chat.model_ids(service.name, k)])

    @router.get("/v1/models/{model:path}", tags=["answers"])
    async def model(model: str) -> Model:
        """OpenAI's description of one model; 404 if there is no such model."""
        openai_chat.find_model(model, service.name, k)
        return Model(id=model)

    @router.post("/v1/chat/completions", tags=["answers"], response_model=ChatCompletion)
    async def chat_completions(body: ChatRequest, response: Response) -> ChatCompletion | StreamingResponse:
        """OpenAI's chat completion, optionally streamed. The field ``pluralign`` has the members and their weights."""
        ignored = name_ignored(body, response.headers)
        target = openai_chat.find_model(body.model, service.name, k)
        draws = body.draws or 1
        if draws > 1 and target.voice != "distributional":
            message = f"n must be 1 for {body.model}; several draws require {service.name}:distributional."
            raise ApiError(400, message, code="invalid", param="n")
        check_count(draws, service.limits.candidates, "draws", "n")
        prompt = service.prompt(body.messages, single_as_text=not service.candidates.only_chats)
        seed = service.seed_for(body.seed)
        answers, _ = await service.answer(
            prompt,
            target.mode,
            candidates=body.candidates,
            seed=seed,
            sampling=SamplingOverrides(body.temperature, body.top_p, body.max_completion_tokens or body.max_tokens),
            draws=draws,
            stop=[body.stop] if isinstance(body.stop, str) else body.stop or (),
            member=target.member,
        )
        texts = [openai_chat.message_text(answer, target, service.names) for answer in answers]
        wrote = None if body.candidates else generator_name
        details = openai_chat.answer_details(answers, service.names, seed, wrote, ignored)
        prompt_text = Prompt(prompt).text
        if not body.stream:
            return openai_chat.completion(body.model, prompt_text, texts, details)
        include_usage = bool(body.stream_options and body.stream_options.include_usage)
        events = openai_chat.stream(body.model, prompt_text, texts, details, include_usage=include_usage)
        return StreamingResponse(_async(events), media_type="text/event-stream", headers=dict(response.headers))

    @router.post("/v1/answer", tags=["answers"])
    async def answer(body: AnswerRequest, response: Response) -> AnswerResponse:
        """A slate and a consensus, one chosen member, or a random draw by weight, with the candidates."""
        ignored = name_ignored(body, response.headers)
        seed = service.seed_for(body.seed)
        answers, texts = await service.answer(
            service.prompt(body.prompt),
            body.mode,
            candidates=body.candidates,
            n_candidates=body.n_candidates,
            seed=seed,
            sampling=SamplingOverrides(body.temperature, body.top_p, body.max_tokens),
            choices=body.choices,
            rule=body.rule,
            level=body.level,
            slate_size=body.slate_size,
            cover=body.cover,
            member=body.member,
            like=body.like,
        )
        wrote = None if body.candidates else generator_name
        details = openai_chat.answer_details(answers, service.names, seed, wrote, ignored)
        return AnswerResponse(**dict(details), members=list(service.names), candidate_texts=texts)

    @router.post("/v1/steer", tags=["answers"])
    async def steer(body: SteerRequest, response: Response) -> SteeringResponse:
        """What a user's choices say: the most likely member, the posterior, and the probability of no member."""
        name_ignored(body, response.headers)
        return await service.steer(body.choices)

    return router


async def _async(events: Iterable[str]) -> AsyncIterator[str]:
    """Yield events in the event loop; Starlette would move a plain iterator to a thread."""
    for event in events:
        yield event
