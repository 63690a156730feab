"""``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank``: requests to a model of embeddings.

Scores are cosines of embeddings. The short paths and ``/v2/rerank`` are those of vLLM's server, for
clients of Jina and Cohere.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import StreamingResponse
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from trencadis.engine import POOLING, Embedding
from trencadis.server.api.error_responses import BODY_ERRORS, error_responses
from trencadis.server.api.pooling import (
    Document,
    EmbeddingList,
    EmbeddingRequest,
    PoolingRequest,
    PoolingUsage,
    RerankList,
    RerankRequest,
    RerankResult,
    ScoreList,
    ScoreObject,
    ScoreRequest,
)
from trencadis.server.generation.choice_stream import EngineRequest
from trencadis.server.generation.embedding_run import embed_all
from trencadis.server.generation.served_model import ServedModel
from trencadis.server.http.content_type import require_json
from trencadis.server.routes.context import ServingContext
from trencadis.server.routes.generation_response import Sender, with_model

Vector: TypeAlias = npt.NDArray[np.float32]

Write: TypeAlias = Callable[[str, str, Sequence[Embedding]], Response]
"""Makes the response from its id, the model's name and the embeddings, in the order of the
inputs."""


def pooling_router(context: ServingContext) -> APIRouter:
    """The routes for embeddings and scores."""
    router = APIRouter(tags=["embeddings"], dependencies=[Depends(require_json)])

    @router.post("/v1/embeddings", response_model=None, responses=_responses(EmbeddingList))
    async def create_embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """The embeddings of one or several inputs, texts or token ids."""
        return await _respond(context, request, body, partial(_embeddings, body))

    @router.post("/v1/score", response_model=None, responses=_responses(ScoreList))
    @router.post("/score", response_model=None, responses=_responses(ScoreList))
    async def create_scores(body: ScoreRequest, request: Request) -> Response:
        """How similar texts are: the cosines of their embeddings."""
        return await _respond(context, request, body, partial(_scores, body))

    @router.post("/v1/rerank", response_model=None, responses=_responses(RerankList))
    @router.post("/v2/rerank", response_model=None, responses=_responses(RerankList))
    @router.post("/rerank", response_model=None, responses=_responses(RerankList))
    async def rerank(body: RerankRequest, request: Request) -> Response:
        """Documents in the order of their similarity to a query."""
        return await _respond(context, request, body, partial(_ranking, body))

    return router


def _responses(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": whole}, **error_responses(*BODY_ERRORS, 404, 415, 429, 500, 503)}


async def _respond(
    context: ServingContext, http_request: Request, request: PoolingRequest, write: Write
) -> Response:
    """Answer a request with the embeddings of its inputs.

    A client that disconnects aborts its request.
    """

    async def answer(model: ServedModel, sender: Sender) -> Response:
        request.check_size(model.embedding_size)
        inputs = await context.encoder.inputs(
            request.named_inputs(),
            model,
            add_special_tokens=request.add_special_tokens is not False,
            max_tokens=request.max_tokens(model.max_model_len),
            client=sender.client,
        )
        requests = [_engine_request(token_ids, request, sender) for token_ids in inputs]
        name = f"{request.id_prefix}-{uuid.uuid4().hex}"
        generate = context.generate_for(model)
        found = await embed_all(generate, context.metrics, requests, name)
        return write(name, model.name, found)

    name, salt = request.model, request.cache_salt
    return await with_model(context, http_request, name, salt, answer, wants_embeddings=True)


def _engine_request(
    token_ids: Sequence[int], request: PoolingRequest, sender: Sender
) -> EngineRequest:
    return EngineRequest(
        token_ids,
        POOLING,
        request.priority or 0,
        sender.cache_salt,
        sender.trace_headers,
        sender.client,
        sender.api_key,
    )


# The responses.


def _embeddings(
    request: EmbeddingRequest, name: str, model: str, found: Sequence[Embedding]
) -> Response:
    return StreamingResponse(
        _embedding_pieces(request, model, found),
        media_type="application/json",
        headers={"X-Request-Id": name},
    )


async def _embedding_pieces(
    request: EmbeddingRequest, model: str, found: Sequence[Embedding]
) -> AsyncGenerator[str, None]:
    """The text of an `EmbeddingList`, an embedding at a time.

    As a whole it may have a hundred megabytes, and would take the event loop seconds.
    """
    yield '{"object":"list","data":['
    for index, embedding in enumerate(found):
        vector = _shortened(embedding.vector, request.dimensions)
        numbers: Any = vector.tolist()
        if request.encoding_format == "base64":
            numbers = base64.b64encode(vector.astype("<f4").tobytes()).decode()
        item = {"object": "embedding", "index": index, "embedding": numbers}
        yield ("," if index else "") + json.dumps(item, separators=(",", ":"))
        # Sending may never wait, and other requests would until the last embedding.
        await asyncio.sleep(0)
    usage = _usage(found).model_dump_json(exclude_none=True)
    yield f'],"model":{json.dumps(model)},"usage":{usage}}}'


def _scores(request: ScoreRequest, name: str, model: str, found: Sequence[Embedding]) -> Response:
    count = len(request.sides[0])
    scores = enumerate(_cosines(found[:count], found[count:]))
    response = ScoreList(
        id=name,
        object="list",
        created=int(time.time()),
        model=model,
        data=[ScoreObject(object="score", index=index, score=score) for index, score in scores],
        usage=_usage(found),
    )
    return _whole(response, name)


def _ranking(request: RerankRequest, name: str, model: str, found: Sequence[Embedding]) -> Response:
    scores = _cosines(found[:1], found[1:])
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = [_result(request, index, scores[index]) for index in ranked[: request.top_n or None]]
    return _whole(RerankList(id=name, model=model, results=results, usage=_usage(found)), name)


def _result(request: RerankRequest, index: int, score: float) -> RerankResult:
    has_document = request.return_documents is not False
    document = Document(text=request.documents[index]) if has_document else None
    return RerankResult(index=index, relevance_score=score, document=document)


def _whole(response: BaseModel, name: str) -> Response:
    content = response.model_dump_json(exclude_none=True)
    return Response(content, media_type="application/json", headers={"X-Request-Id": name})


def _usage(found: Sequence[Embedding]) -> PoolingUsage:
    total = sum(embedding.num_prompt_tokens for embedding in found)
    cached = sum(embedding.num_cached_tokens for embedding in found)
    return PoolingUsage(
        prompt_tokens=total,
        total_tokens=total,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def _shortened(vector: Vector, dimensions: int | None) -> Vector:
    """The first ``dimensions`` numbers of a vector, with length 1 again."""
    if dimensions is None:
        return vector
    part = vector[:dimensions]
    return part / (np.linalg.norm(part) or np.float32(1))


def _cosines(first: Sequence[Embedding], second: Sequence[Embedding]) -> list[float]:
    """The cosines of pairs; a single vector is paired with all others."""
    left, right = (np.stack([each.vector for each in side]) for side in (first, second))
    products = (left * right).sum(axis=-1, dtype=np.float64)
    cosines: list[float] = np.clip(products, -1.0, 1.0).tolist()  # rounding may exceed 1
    return cosines
