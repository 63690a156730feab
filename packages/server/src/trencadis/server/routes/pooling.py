"""``/v1/embeddings``, ``/v1/score`` and ``/v1/rerank``: requests to a model that generates nothing.

Scores are those of a model that reads both texts, or cosines of embeddings. The short paths and
``/v2/rerank`` are those of vLLM's server, for clients of Jina and Cohere.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from openai.types.completion_usage import PromptTokensDetails
from pydantic import BaseModel

from trencadis.engine import CompletionDelta, Embedding, PoolingRequest, Score, Scoring
from trencadis.server.api.error_responses import BODY_ERRORS, error_responses
from trencadis.server.api.pooling import (
    CohereEmbedRequest,
    CohereEmbedResponse,
    Document,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingType,
    PairRequest,
    PoolingBody,
    PoolingUsage,
    RerankList,
    RerankRequest,
    RerankResult,
    ScoreList,
    ScoreObject,
    ScoreRequest,
    VectorList,
    VectorRequest,
)
from trencadis.server.api.protocol import ChatCompletionRequest
from trencadis.server.api.translation import client_fields
from trencadis.server.engine_protocol import PairTokenizer
from trencadis.server.errors import ApiError
from trencadis.server.generation.choice_stream import Sender
from trencadis.server.generation.embedding_run import embed_all
from trencadis.server.generation.served_model import ServedModel
from trencadis.server.http.json_body import Checked
from trencadis.server.routes.context import ServingContext
from trencadis.server.routes.generation_response import with_model

Vector: TypeAlias = npt.NDArray[np.float32]

Write: TypeAlias = Callable[[str, str, Sequence[Embedding]], Response]
"""Makes the response from its id, the model's name and the embeddings, in the order of the
inputs."""

WriteScores: TypeAlias = Callable[[str, str, Sequence[float], PoolingUsage], Response]
"""Makes the response from its id, the model's name, the scores of the pairs, and their tokens."""


def pooling_router(context: ServingContext) -> APIRouter:
    """The routes for embeddings and scores."""
    router = APIRouter(tags=["embeddings"], route_class=context.bodies.route_class)

    @router.post("/v1/embeddings", response_model=None, responses=_responses(EmbeddingList))
    async def create_embeddings(body: Checked[EmbeddingRequest], request: Request) -> Response:
        """The embeddings of one or several inputs, texts or token ids."""
        return await respond_to_embedding(context, request, body)

    @router.post("/pooling", response_model=None, responses=_responses(VectorList))
    async def pool(body: Checked[VectorRequest], request: Request) -> Response:
        """The embeddings of inputs, or their scores, in the form of vLLM's /pooling."""
        return await respond_to_pooling(context, request, body)

    @router.post("/v2/embed", response_model=None, responses=_responses(CohereEmbedResponse))
    async def embed(body: Checked[CohereEmbedRequest], request: Request) -> Response:
        """The embeddings of texts in the form of Cohere's API."""
        with client_fields({"prompt_name": "input_type"}):
            return await _respond(context, request, body, partial(_of_cohere, body))

    @router.post("/v1/score", response_model=None, responses=_responses(ScoreList))
    @router.post("/score", response_model=None, responses=_responses(ScoreList))
    async def create_scores(body: Checked[ScoreRequest], request: Request) -> Response:
        """How relevant texts are to others: by a reranker, or the cosines of their embeddings."""
        return await respond_to_score(context, request, body)

    @router.post("/v1/rerank", response_model=None, responses=_responses(RerankList))
    @router.post("/v2/rerank", response_model=None, responses=_responses(RerankList))
    @router.post("/rerank", response_model=None, responses=_responses(RerankList))
    async def rerank(body: Checked[RerankRequest], request: Request) -> Response:
        """Documents in the order of their relevance to a query."""
        return await respond_to_rerank(context, request, body)

    return router


async def respond_to_embedding(
    context: ServingContext, http_request: Request, request: EmbeddingRequest
) -> Response:
    """The embeddings of a request in OpenAI's form."""
    return await _respond(context, http_request, request, partial(_embeddings, request))


async def respond_to_pooling(
    context: ServingContext, http_request: Request, request: VectorRequest
) -> Response:
    """What the pooler makes of each input: an embedding or, of a model that scores, one number."""

    async def answer(model: ServedModel, sender: Sender) -> Response:
        name, scoring = _new_id(request), model.scoring
        task = "embed" if scoring is None else "classify"
        if request.task not in (None, task):
            raise ApiError(
                400,
                f"task {request.task!r} is not supported by the model {model.name!r}: ask for "
                f"{task!r}, or leave it out",
                param="task",
                code="invalid_value",
            )
        if scoring is None:
            found = await _embed(context, request, model, sender, name, chat)
            return _vectors(request, name, model.name, found)

        def read(delta: CompletionDelta) -> Embedding:
            score = Score.of(delta, scoring, request.uses_activation)
            vector = np.array([score.score], np.float32)
            return Embedding(vector, score.num_prompt_tokens, score.num_cached_tokens)

        scores = await _run(context, request, model, sender, name, chat, 1, read)
        return _vectors(request, name, model.name, scores)

    chat = await _conversation(context, http_request, request)
    return await with_model(context, http_request, request, answer, wants_embeddings=True)


async def respond_to_score(
    context: ServingContext, http_request: Request, request: ScoreRequest
) -> Response:
    """The scores of a request's pairs."""
    cosines = partial(_cosines_of_score, request)
    return await _respond_to_pairs(context, http_request, request, cosines, _scores)


async def respond_to_rerank(
    context: ServingContext, http_request: Request, request: RerankRequest
) -> Response:
    """The documents of a request in the order of their scores."""
    return await _respond_to_pairs(
        context,
        http_request,
        request,
        lambda found: _cosines(found[:1], found[1:]),
        partial(_ranking, request),
    )


def _responses(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return {200: {"model": whole}, **error_responses(*BODY_ERRORS, 404, 415, 429, 500, 503)}


async def _respond(
    context: ServingContext, http_request: Request, request: PoolingBody, write: Write
) -> Response:
    """Answer a request with the embeddings of its inputs.

    A client that disconnects aborts its request.
    """

    async def answer(model: ServedModel, sender: Sender) -> Response:
        if model.scoring is not None:
            raise ApiError(
                400,
                f"the model {model.name!r} scores pairs of texts and computes no embeddings: send "
                "the request to /v1/score or /v1/rerank",
                param="model",
                code="invalid_value",
            )
        name = _new_id(request)
        return write(name, model.name, await _embed(context, request, model, sender, name, chat))

    chat = await _conversation(context, http_request, request)
    return await with_model(context, http_request, request, answer, wants_embeddings=True)


async def _respond_to_pairs(
    context: ServingContext,
    http_request: Request,
    request: PairRequest,
    cosines: Callable[[Sequence[Embedding]], list[float]],
    write: WriteScores,
) -> Response:
    """Answer a request with the scores of its pairs.

    ``cosines``: those of the embeddings of its inputs, which are the scores of a model that does
    not read both texts. A client that disconnects aborts its request.
    """

    async def answer(model: ServedModel, sender: Sender) -> Response:
        name = _new_id(request)
        read: PairRequest = request
        if isinstance(request, RerankRequest) and request.max_tokens_per_doc:
            limit, encoder = request.max_tokens_per_doc, context.encoder
            texts = await encoder.beginnings(request.documents, limit, model, sender.client)
            read = request.with_documents(texts)
        if model.scoring is not None:
            found = await _score(context, read, model, model.scoring, sender, name)
            scores = [score.score for score in found]
            return write(name, model.name, scores, _usage(found))
        embeddings = await _embed(context, read, model, sender, name)
        return write(name, model.name, cosines(embeddings), _usage(embeddings))

    return await with_model(context, http_request, request, answer, wants_embeddings=True)


async def _embed(
    context: ServingContext,
    request: PoolingBody,
    model: ServedModel,
    sender: Sender,
    name: str,
    chat: ChatCompletionRequest | None = None,
) -> list[Embedding]:
    """The embeddings of the inputs of a request, in their order, and of its conversation."""
    size, read = model.embedding_size, partial(Embedding.of, use_activation=request.uses_activation)
    return await _run(context, request, model, sender, name, chat, size, read)


async def _conversation(
    context: ServingContext, http_request: Request, request: PoolingBody
) -> ChatCompletionRequest | None:
    with client_fields({}):
        return await context.bodies.translated(http_request, request.conversation)


async def _run(
    context: ServingContext,
    request: PoolingBody,
    model: ServedModel,
    sender: Sender,
    name: str,
    chat: ChatCompletionRequest | None,
    size: int,
    read: Callable[[CompletionDelta], Embedding],
) -> list[Embedding]:
    """What ``read`` makes of the pooler's result for each input: so many numbers."""
    request.check_embeddings(size)
    prefix = model.text_prompts.prefix(request.text_prompt)
    given = {
        field: prefix + each if isinstance(each, str) else each
        for field, each in request.named_inputs().items()
    }
    if chat is not None:
        given["messages"] = await context.encoder.conversation(
            chat, model, sender.client, add_special_tokens=request.add_special_tokens is True
        )
    inputs = await context.encoder.inputs(
        given,
        model,
        add_special_tokens=request.add_special_tokens is not False,
        max_tokens=request.kept_tokens(model.max_model_len),
        keeps_end=request.keeps_end,
        client=sender.client,
    )
    requests = _engine_requests(inputs, model, sender, name)
    return await embed_all(context.engine.generate, context.metrics, requests, sender, read)


async def _score(
    context: ServingContext,
    request: PairRequest,
    model: ServedModel,
    scoring: Scoring,
    sender: Sender,
    name: str,
) -> list[Score]:
    """The scores of the pairs of a request, in their order."""
    tokenizer = cast(PairTokenizer, model.tokenizer)
    prompts = await context.encoder.pairs(
        request.pairs(),
        model,
        partial(
            tokenizer.render_pair,
            scoring.prompt,
            instruction=request.instruction,
            chat_template_kwargs=request.chat_template_kwargs,
            add_special_tokens=request.add_special_tokens is not False,
        ),
        max_tokens=request.kept_tokens(model.max_model_len),
        client=sender.client,
    )
    requests = _engine_requests(prompts, model, sender, name)

    def read(delta: CompletionDelta) -> Score:
        return Score.of(delta, scoring, request.uses_activation)

    return await embed_all(context.engine.generate, context.metrics, requests, sender, read)


def _new_id(request: PoolingBody) -> str:
    return f"{request.id_prefix}-{uuid.uuid4().hex}"


def _engine_requests(
    prompts: Sequence[Sequence[int]], model: ServedModel, sender: Sender, name: str
) -> list[PoolingRequest]:
    return [
        PoolingRequest(prompt, request_id=f"{name}-{number}", model=model.name, **sender.fields)
        for number, prompt in enumerate(prompts)
    ]


# The responses.


def _embeddings(
    request: EmbeddingRequest, name: str, model: str, found: Sequence[Embedding]
) -> Response:
    def item(index: int, vector: Vector) -> dict[str, Any]:
        numbers = _written(vector, request.encoding_format)
        return {"object": "embedding", "index": index, "embedding": numbers}

    rows = _rows(found, request, request.dimensions, item)
    tail = {"model": model, "usage": _usage(found).model_dump(exclude_none=True)}
    return _streamed(name, _listed({"object": "list"}, "data", rows, tail))


def _vectors(request: VectorRequest, name: str, model: str, found: Sequence[Embedding]) -> Response:
    def item(index: int, vector: Vector) -> dict[str, Any]:
        numbers = _written(vector, request.encoding_format)
        return {"object": "pooling", "index": index, "data": numbers}

    head = {"id": name, "object": "list", "created": int(time.time()), "model": model}
    tail = {"usage": _usage(found).model_dump(exclude_none=True)}
    rows = _rows(found, request, request.dimensions, item)
    return _streamed(name, _listed(head, "data", rows, tail))


def _of_cohere(
    request: CohereEmbedRequest, name: str, model: str, found: Sequence[Embedding]
) -> Response:
    del model  # which Cohere's response does not name
    tokens = {"input_tokens": sum(each.num_prompt_tokens for each in found), "image_tokens": 0}
    tail = {
        "texts": request.texts,
        "meta": {"api_version": {"version": "2"}, "billed_units": tokens},
        "response_type": "embeddings_by_type",
    }
    forms: dict[EmbeddingType, None] = dict.fromkeys(request.embedding_types or ["float"])

    def item(form: EmbeddingType, _: int, vector: Vector) -> Any:
        return _written(vector, form)

    async def pieces() -> AsyncGenerator[str, None]:
        yield f'{{"id":{json.dumps(name)},"embeddings":{{'
        for number, form in enumerate(forms):
            rows = _rows(found, request, request.output_dimension, partial(item, form))
            yield f'{"," if number else ""}"{form}":['
            async for piece in rows:
                yield piece
            yield "]"
        yield f"}},{json.dumps(tail, separators=(',', ':'))[1:]}"

    return _streamed(name, pieces())


def _streamed(name: str, pieces: AsyncGenerator[str, None]) -> Response:
    """A response an embedding at a time.

    As a whole it may have a hundred megabytes, and would take the event loop seconds.
    """
    return StreamingResponse(pieces, media_type="application/json", headers={"X-Request-Id": name})


async def _listed(
    head: Mapping[str, Any], name: str, rows: AsyncGenerator[str, None], tail: Mapping[str, Any]
) -> AsyncGenerator[str, None]:
    """The text of an object with these fields around a list."""
    yield f'{json.dumps(head, separators=(",", ":"))[:-1]},"{name}":['
    async for piece in rows:
        yield piece
    yield f"],{json.dumps(tail, separators=(',', ':'))[1:]}"


async def _rows(
    found: Sequence[Embedding],
    request: PoolingBody,
    dimensions: int | None,
    item: Callable[[int, Vector], Any],
) -> AsyncGenerator[str, None]:
    """The items of a list, each made of an embedding with so many dimensions."""
    for index, embedding in enumerate(found):
        vector = embedding.vector[:dimensions]
        if dimensions is not None and request.uses_activation:
            vector = vector / (np.linalg.norm(vector) or np.float32(1))
        row = json.dumps(item(index, vector), separators=(",", ":"))
        yield ("," if index else "") + row
        # Sending may never wait, and other requests would until the last embedding.
        await asyncio.sleep(0)


def _written(vector: Vector, form: EmbeddingType | None) -> Any:
    """A vector in the form of a response."""
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    if form in ("binary", "ubinary"):
        packed = np.packbits(vector >= 0)
        return (packed.astype(np.int16) - 128 if form == "binary" else packed).tolist()
    return vector.tolist()


def _cosines_of_score(request: ScoreRequest, found: Sequence[Embedding]) -> list[float]:
    count = len(request.sides[0])
    return _cosines(found[:count], found[count:])


def _scores(name: str, model: str, scores: Sequence[float], usage: PoolingUsage) -> Response:
    response = ScoreList(
        id=name,
        object="list",
        created=int(time.time()),
        model=model,
        data=[
            ScoreObject(object="score", index=index, score=score)
            for index, score in enumerate(scores)
        ],
        usage=usage,
    )
    return _whole(response, name)


def _ranking(
    request: RerankRequest, name: str, model: str, scores: Sequence[float], usage: PoolingUsage
) -> Response:
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = [_result(request, index, scores[index]) for index in ranked[: request.top_n or None]]
    return _whole(RerankList(id=name, model=model, results=results, usage=usage), name)


def _result(request: RerankRequest, index: int, score: float) -> RerankResult:
    has_document = request.return_documents is not False
    document = Document(text=request.documents[index]) if has_document else None
    return RerankResult(index=index, relevance_score=score, document=document)


def _whole(response: BaseModel, name: str) -> Response:
    content = response.model_dump_json(exclude_none=True)
    return Response(content, media_type="application/json", headers={"X-Request-Id": name})


def _usage(found: Sequence[Embedding] | Sequence[Score]) -> PoolingUsage:
    total = sum(each.num_prompt_tokens for each in found)
    cached = sum(each.num_cached_tokens for each in found)
    return PoolingUsage(
        prompt_tokens=total,
        total_tokens=total,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
    )


def _cosines(first: Sequence[Embedding], second: Sequence[Embedding]) -> list[float]:
    """The cosines of pairs; a single vector is paired with all others."""
    left, right = (np.stack([each.vector for each in side]) for side in (first, second))
    products = (left * right).sum(axis=-1, dtype=np.float64)
    cosines: list[float] = np.clip(products, -1.0, 1.0).tolist()  # rounding may exceed 1
    return cosines
