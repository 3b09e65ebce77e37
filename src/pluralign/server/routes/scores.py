"""Routes that score, compare and rank texts, in our own format and in those of TEI, Cohere and OpenRLHF."""

import secrets
from typing import Annotated, TypeAlias

from fastapi import APIRouter, Query, Response

from pluralign.server.errors import ApiError
from pluralign.server.fields import name_ignored
from pluralign.server.openai_chat import find_model
from pluralign.server.schemas import (
    ApiVersion,
    CohereMeta,
    CohereRequest,
    CohereResponse,
    CompareRequest,
    CompareResponse,
    Document,
    ExplainResponse,
    Pair,
    RankedDocument,
    RankedText,
    RerankRequest,
    RewardRequest,
    RewardResponse,
    ScoreRequest,
    ScoreResponse,
)
from pluralign.server.service import Service

Member: TypeAlias = Annotated[int | None, Query(ge=0, description="Number of one member; the whole ensemble if absent")]


def score_routes(service: Service) -> APIRouter:
    """Return the routes that score, compare and rank texts."""
    router = APIRouter()

    @router.post("/v1/compare", tags=["scores"])
    async def compare(body: CompareRequest, response: Response) -> CompareResponse:
        """Members' votes and predicted shares: ``{results: [{votes, prob_hat, prob_policy}]}``, one result per pair."""
        name_ignored(body, response.headers)
        return CompareResponse(results=await service.compare(body.pairs))

    @router.post("/v1/score", tags=["scores"])
    async def score(body: ScoreRequest, response: Response) -> ScoreResponse:
        """Rewards of every member: ``{results: [{rewards: [k numbers]}]}``, one result per text."""
        name_ignored(body, response.headers)
        return ScoreResponse(results=await service.score_texts(body.texts))

    @router.post("/v1/explain", tags=["scores"])
    async def explain(body: Pair, response: Response) -> ExplainResponse:
        """Each member's vote on a pair, with reasons.

        ``{votes, prob_hat, prob_policy, rewards, members, undecided}``
        """
        name_ignored(body, response.headers)
        return await service.explain(body)

    @router.post("/rerank", tags=["rerank"], response_model_exclude_unset=True)
    async def rerank(body: RerankRequest, response: Response, member: Member = None) -> list[RankedText]:
        """Text Embeddings Inference's rerank: ``[{index, score, text?}]``, best first.

        Scores are weighted pairwise support (Borda); raw scores are rewards.
        """
        name_ignored(body, response.headers)
        scores = await service.rank(body.query, body.texts, member, raw=body.raw_scores)
        ranked = [RankedText(index=i, score=float(scores[i])) for i in (-scores).argsort(kind="stable").tolist()]
        if body.return_text:
            return [one.model_copy(update={"text": body.texts[one.index]}) for one in ranked]
        return ranked

    @router.post("/v1/rerank", tags=["rerank"], response_model_exclude_unset=True)
    @router.post("/v2/rerank", tags=["rerank"], response_model_exclude_unset=True)
    async def cohere_rerank(body: CohereRequest, response: Response) -> CohereResponse:
        """Cohere's rerank: ``{results: [{index, relevance_score}]}``, best first. A model id can name one member."""
        name_ignored(body, response.headers)
        texts = [document if isinstance(document, str) else document.text for document in body.documents]
        target = find_model(body.model or service.name, service.name, service.ensemble.k)
        scores = await service.rank(body.query, texts, target.member, raw=False)
        results = [
            RankedDocument(index=i, relevance_score=float(scores[i]))
            for i in (-scores).argsort(kind="stable").tolist()[: body.top_n]
        ]
        if body.return_documents:
            results = [one.model_copy(update={"document": Document(text=texts[one.index])}) for one in results]
        meta = CohereMeta(api_version=ApiVersion(version="2"))
        return CohereResponse(id=secrets.token_hex(12), results=results, meta=meta)

    @router.post("/get_reward", tags=["rewards"])
    async def get_reward(body: RewardRequest, response: Response, member: Member = None) -> RewardResponse:
        """OpenRLHF's remote reward model: ``{rewards, scores, extra_logs}``, one number per query.

        With ``?member=3`` the rewards of that member, otherwise the weighted mean. ``extra_logs`` has every member's.
        """
        name_ignored(body, response.headers)
        prompts = body.prompts or [""] * len(body.query)
        if len(prompts) != len(body.query):
            message = f"query has {len(body.query)} texts and prompts has {len(prompts)}; send one prompt per query."
            raise ApiError(422, message, code="invalid", param="prompts")
        weights, rewards = service.weights(member), await service.decoded_rewards(prompts, body.query)
        mean = (rewards @ weights).tolist()
        logs = {f"member_{j}": rewards[:, j].tolist() for j in range(service.ensemble.k)}
        return RewardResponse(rewards=mean, scores=mean, extra_logs=logs)

    return router
