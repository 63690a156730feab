"""``POST /invocations``: the one path to which SageMaker sends requests of all kinds."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from trencadis.server.api.error_responses import BODY_ERRORS, error_responses
from trencadis.server.api.invocations import Invocation, as_embedding
from trencadis.server.api.pooling import EmbeddingRequest, RerankRequest, ScoreRequest
from trencadis.server.api.protocol import CompletionRequest
from trencadis.server.api.translation import client_fields
from trencadis.server.http.json_body import Checked
from trencadis.server.routes.chat import ChatWriter
from trencadis.server.routes.completions import CompletionWriter
from trencadis.server.routes.context import ServingContext
from trencadis.server.routes.generation_response import respond, respond_to_chat
from trencadis.server.routes.pooling import (
    respond_to_embedding,
    respond_to_rerank,
    respond_to_score,
)


def invocations_router(context: ServingContext) -> APIRouter:
    """The route for requests of all kinds."""
    router = APIRouter(route_class=context.bodies.route_class)

    @router.post(
        "/invocations",
        response_model=None,
        responses=error_responses(*BODY_ERRORS, 404, 415, 429, 500, 503),
    )
    async def invoke(body: Checked[Invocation], request: Request) -> Response:
        """Answer a request for chat, a completion, embeddings, scores or a ranking."""
        made: Any = body  # what `Invocation.model_validate` made of it
        if isinstance(made, CompletionRequest):
            encode = context.encoder.completion
            return await respond(context, request, made, encode, CompletionWriter)
        if isinstance(made, EmbeddingRequest):
            return await respond_to_embedding(context, request, made)
        if isinstance(made, ScoreRequest):
            return await respond_to_score(context, request, made)
        if isinstance(made, RerankRequest):
            return await respond_to_rerank(context, request, made)
        context.check_name(made.model)
        if context.computes_embeddings(made.model):
            with client_fields({}):
                embedding = await context.bodies.translated(request, partial(as_embedding, made))
            return await respond_to_embedding(context, request, embedding)
        return await respond_to_chat(context, request, made, ChatWriter)

    return router
