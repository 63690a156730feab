"""``/health_generate``, ``/model_info`` and ``/server_info``: SGLang's routes for probes and tools.

As in SGLang, ``/get_model_info`` and ``/get_server_info`` are their older names.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response

from trencadis.engine import (
    EngineOverloaded,
    EngineRequest,
    GenerateRequest,
    PoolingRequest,
    SamplingParams,
)
from trencadis.server import __version__
from trencadis.server.api.error_responses import error_responses
from trencadis.server.errors import RequestAbortedError
from trencadis.server.routes.context import ServingContext

_PROMPT = (0,)
"""Of a probe, as in SGLang: each vocabulary has this token."""

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


def sglang_router(context: ServingContext) -> APIRouter:
    """The routes that SGLang has beside those of OpenAI and vLLM."""
    router = APIRouter(tags=["monitoring"])

    @router.get(
        "/health_generate", response_class=Response, responses=error_responses(401, 500, 503)
    )
    async def health_generate() -> Response:
        """200 if the engine computes a token, or answers but is busy with other requests."""
        try:
            await asyncio.wait_for(_compute_token(context), context.settings.health_timeout)
        except (asyncio.TimeoutError, EngineOverloaded):
            await context.check_health()
        return Response()

    @router.get("/get_model_info", include_in_schema=False)
    @router.get("/model_info", responses=error_responses(401))
    async def model_info() -> dict[str, Any]:
        """The active model: its names, and what it does."""
        return _model_info(context)

    @router.get("/get_server_info", include_in_schema=False)
    @router.get("/server_info", responses=error_responses(401))
    async def server_info() -> dict[str, Any]:
        """The active model, and how much is served at once: sequences, tokens of the KV cache."""
        stats = context.engine.stats
        return {
            **_model_info(context),
            "version": __version__,
            "context_length": context.engine.max_model_len,
            "max_running_requests": stats.max_num_seqs,
            "max_total_num_tokens": stats.num_total_blocks * stats.block_size,
            "internal_states": [],
        }

    return router


async def _compute_token(context: ServingContext) -> None:
    """Have the engine compute one token, or one embedding, which no metric of requests counts.

    Raises the errors of `ServingEngine.generate`, and `RequestAbortedError`.
    """
    request: EngineRequest = GenerateRequest(_PROMPT, _ONE_TOKEN)
    if context.models.current.is_pooling:
        request = PoolingRequest(_PROMPT)
    async with aclosing(context.engine.generate(request)) as stream:
        async for delta in stream:
            if delta.finish_reason == "abort":
                raise RequestAbortedError("the engine aborted the request of this probe")


def _model_info(context: ServingContext) -> dict[str, Any]:
    name = context.engine.model_name
    return {
        "model_path": name,
        "served_model_name": name,
        "tokenizer_path": name,
        "is_generation": not context.models.current.is_pooling,
        "has_image_understanding": False,
        "has_audio_understanding": False,
    }
