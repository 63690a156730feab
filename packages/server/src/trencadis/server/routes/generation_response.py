"""The steps that chat completions and text completions share: from a request to its response."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from fastapi import Request, Response
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from trencadis.engine import InvalidRequest
from trencadis.server.api.error_responses import BODY_ERRORS, error_responses
from trencadis.server.api.protocol import GenerationRequest
from trencadis.server.api.usage import Usage
from trencadis.server.generation.choice_stream import (
    ChoiceDelta,
    ChoiceStream,
    EngineRequest,
    FinishedChoice,
    collect,
)
from trencadis.server.generation.prompts import Prompt, max_output_tokens
from trencadis.server.http.auth import cache_salt
from trencadis.server.http.disconnect import unless_disconnected
from trencadis.server.http.event_stream import EventStream
from trencadis.server.routes.context import ServingContext

ChunkT = TypeVar("ChunkT", Completion, ChatCompletionChunk)
RequestT = TypeVar("RequestT", bound=GenerationRequest)


class ResponseWriter(ABC, Generic[ChunkT]):
    """Writes the choices of one request as the objects of one API: all at once, or as chunks."""

    id_prefix: ClassVar[str]

    def __init__(
        self, context: ServingContext, request: GenerationRequest, prompts: Sequence[Prompt]
    ) -> None:
        self.request = request
        self.prompts = prompts
        self.tokenizer = context.engine.tokenizer
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))
        self.header: dict[str, Any] = {
            "id": self.id,
            "created": int(time.time()),
            "model": context.engine.model_name,
        }
        """Fields that every object of the response repeats."""

    @abstractmethod
    def completion(self, choices: Sequence[FinishedChoice]) -> BaseModel:
        """The response that is not streamed."""

    @abstractmethod
    def new_choices(self, delta: ChoiceDelta) -> Iterable[Any]:
        """The choice objects for one delta, each of which becomes a chunk."""

    @abstractmethod
    def make_chunk(self, choices: list[Any]) -> ChunkT:
        """A chunk with these choice objects, without token counts."""

    async def stream(self, deltas: ChoiceStream) -> AsyncGenerator[ChunkT, None]:
        """The chunks of a streamed response, with the token counts that the client asked for."""
        async for delta in deltas:
            self.usage.add(delta.prompt, delta.delta)
            for choice in self.new_choices(delta):
                chunk = self.make_chunk([choice])
                if self.request.usage_at_end:  # the API defines null for all chunks but the last
                    chunk.usage = self.usage.so_far() if self.request.usage_throughout else None
                yield chunk
        if self.request.usage_at_end:
            chunk = self.make_chunk([])
            chunk.usage = self.usage.so_far()
            yield chunk


def generation_responses(whole: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The argument ``responses`` of a route whose response is ``whole``, or a stream of events."""
    events = {
        "schema": {"type": "string"},
        "example": 'data: {"id": "cmpl-1", "choices": [...]}\n\ndata: [DONE]\n\n',
    }
    answer = {
        "model": whole,
        "content": {"text/event-stream": events},
        "description": "The answer. With `stream`, server-sent events: one chunk as a JSON object "
        "each, or an error object, and at the end `[DONE]`.",
    }
    return {200: answer, **error_responses(*BODY_ERRORS, 404, 415, 500, 503)}


async def respond(
    context: ServingContext,
    http_request: Request,
    request: RequestT,
    encode: Callable[[RequestT], Awaitable[list[Prompt]]],
    writer_class: type[ResponseWriter[Any]],
) -> Response:
    """Answer a request, streamed or not. A client that disconnects aborts its request."""
    salt = request.cache_salt
    if context.settings.prefix_cache_per_key:
        salt = cache_salt(http_request.headers, salt)
    work = _respond(context, request, salt, encode, writer_class)
    try:
        return await unless_disconnected(http_request.receive, work)
    except InvalidRequest as error:
        if error.field == "structured_output":  # the engine's name for several fields of the API
            field = request.structured_output_field
            raise InvalidRequest(f"{field}: {error}", field) from error
        raise


async def _respond(
    context: ServingContext,
    request: RequestT,
    salt: str | None,
    encode: Callable[[RequestT], Awaitable[list[Prompt]]],
    writer_class: type[ResponseWriter[Any]],
) -> Response:
    context.check_accepting()
    context.check_model(request.model)
    # before tokenisation, which takes longer
    context.check_token_ids(request.sampling_params(request.requested_tokens))
    prompts = await encode(request)
    max_model_len = context.engine.max_model_len
    requests = [_engine_request(request, prompt, salt, max_model_len) for prompt in prompts]
    writer = writer_class(context, request, prompts)
    deltas = ChoiceStream(context.engine, context.metrics, requests, writer.id)
    if request.stream:
        await deltas.start()
        timeout = context.settings.send_timeout
        return EventStream(writer.stream(deltas), deltas, timeout, writer.id)
    choices = await collect(deltas, len(prompts) * request.num_choices, writer.usage)
    content = writer.completion(choices).model_dump_json(exclude_unset=True)
    return Response(content, media_type="application/json", headers={"X-Request-Id": writer.id})


def _engine_request(
    request: GenerationRequest, prompt: Prompt, salt: str | None, max_model_len: int
) -> EngineRequest:
    field = request.max_tokens_field
    max_tokens = max_output_tokens(request.requested_tokens, field, prompt, max_model_len)
    params = request.sampling_params(max_tokens)
    if prompt.answer is not None:
        params = prompt.answer.apply_to(params)
    return EngineRequest(prompt.token_ids, params, request.priority or 0, salt)
