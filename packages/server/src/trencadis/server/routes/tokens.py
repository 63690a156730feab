"""``/tokenize``, ``/detokenize`` and ``/tokenizer_info``, with the names and answers of vLLM."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from trencadis.server.api.error_responses import BODY_ERRORS, error_responses
from trencadis.server.api.tokens import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from trencadis.server.engine_protocol import DescribedTokenizer, ServingTokenizer
from trencadis.server.http.cancelled_requests import unless_disconnected
from trencadis.server.http.json_body import Checked
from trencadis.server.routes.context import ServingContext
from trencadis.server.routes.generation_response import client_of

_ERRORS = error_responses(*BODY_ERRORS, 404, 415, 500, 503)


def tokens_router(context: ServingContext) -> APIRouter:
    """The routes between texts and token ids."""
    router = APIRouter(tags=["tokens"], route_class=context.bodies.route_class)

    @router.post("/tokenize", responses=_ERRORS)
    async def tokenize(body: Checked[TokenizeRequest], request: Request) -> TokenizeResponse:
        """The token ids of a text or a conversation, which may be longer than the context."""
        context.check_accepting()
        model = await context.model_to_count(body.model)
        client = client_of(request, context.settings)
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            work = context.encoder.text(body.prompt, model, client, add_special_tokens=special)
        else:
            chat = await context.bodies.translated(request, body.chat)
            special = body.add_special_tokens is True
            work = context.encoder.conversation(chat, model, client, add_special_tokens=special)
        token_ids = await unless_disconnected(request.receive, work)
        shown = None
        if body.return_token_strs:
            shown = await context.encoder.token_pieces(token_ids, model, client)
        return TokenizeResponse(
            count=len(token_ids),
            max_model_len=model.max_model_len,
            tokens=token_ids,
            token_strs=shown,
        )

    @router.post("/detokenize", responses=_ERRORS)
    async def detokenize(body: Checked[DetokenizeRequest], request: Request) -> DetokenizeResponse:
        """The text of token ids."""
        context.check_accepting()
        model = await context.model_to_count(body.model)
        work = context.encoder.decode(body.tokens, model, client_of(request, context.settings))
        return DetokenizeResponse(prompt=await unless_disconnected(request.receive, work))

    return router


def tokenizer_info_router(context: ServingContext) -> APIRouter:
    """The route for the tokenizer's configuration, which a setting opens."""
    router = APIRouter(tags=["tokens"])

    @router.get("/tokenizer_info", responses=error_responses(401))
    async def tokenizer_info() -> dict[str, Any]:
        """The configuration of the active model's tokenizer."""
        return _configuration(context.models.current.tokenizer)

    return router


def _configuration(tokenizer: ServingTokenizer) -> dict[str, Any]:
    """That of `DescribedTokenizer`, or of another one its class; with the chat template."""
    described: dict[str, Any] = {"tokenizer_class": type(tokenizer).__name__}
    if isinstance(tokenizer, DescribedTokenizer):
        described |= tokenizer.configuration
    if tokenizer.chat_template is not None:
        described["chat_template"] = tokenizer.chat_template
    return described
