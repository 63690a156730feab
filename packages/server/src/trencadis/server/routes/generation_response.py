"""The steps that all routes of generation share: from a request to its response."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from fastapi import Request, Response
from openai.types import Completion
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from trencadis.engine import (
    EngineSleeping,
    GenerateRequest,
    InvalidRequest,
    ModelNotActiveError,
    SamplingParams,
    SwitchInProgressError,
)
from trencadis.server.api.error_responses import (
    BODY_ERRORS,
    ErrorResponse,
    error_responses,
)
from trencadis.server.api.logprobs import TokensAsIds, TokenTexts
from trencadis.server.api.protocol import (
    ChatCompletionRequest,
    GenerationRequest,
    RequestBody,
    StreamOptions,
)
from trencadis.server.errors import ApiError
from trencadis.server.generation.choice_stream import (
    PROMPTS_AT_ONCE,
    ChoiceDelta,
    ChoiceStream,
    FinishedChoice,
    Generate,
    Sender,
    Usage,
    collect,
    without_output,
)
from trencadis.server.generation.prompts import Prompt, max_output_tokens
from trencadis.server.generation.served_model import ServedModel
from trencadis.server.http.api_keys import key_name
from trencadis.server.http.auth import key_salt
from trencadis.server.http.cancelled_requests import unless_disconnected
from trencadis.server.http.event_stream import EventStream
from trencadis.server.metrics.load_report import load_headers
from trencadis.server.metrics.tracing import TRACE_HEADERS
from trencadis.server.request_ids import REQUEST_ID, given_request_id
from trencadis.server.routes.context import ServingContext, check_runner, check_token_ids
from trencadis.server.settings import ServerSettings
from trencadis.server.switching.switch_control import SwitchControl
from trencadis.server.switching.switch_queue import WaitingRequest

_AFTER_REFUSAL_SECONDS = 0.01
"""Wait of a request that a beginning switch has rejected, so that it does not occupy the loop."""

ChunkT = TypeVar("ChunkT", Completion, ChatCompletionChunk)
RequestT = TypeVar("RequestT", bound=GenerationRequest)

DONE = "data: [DONE]\n\n"
"""The last event of OpenAI's streams of chunks."""


class ResponseWriter(ABC):
    """Writes the choices of one request in the form of one API: all at once, or as events.

    ``name``: the client's for the request, with which the id of the response ends.
    """

    id_prefix: ClassVar[str]

    def __init__(
        self,
        model: ServedModel,
        request: GenerationRequest,
        prompts: Sequence[Prompt],
        name: str | None = None,
    ) -> None:
        self.request = request
        self.prompts = prompts
        self.tokenizer = model.tokenizer
        self.token_texts: TokenTexts = model.tokenizer
        """How log-probabilities write tokens."""
        if request.return_tokens_as_token_ids:
            self.token_texts = TokensAsIds(model.tokenizer)
        self.model_name = model.shown_name
        self.id = f"{self.id_prefix}{name or uuid.uuid4().hex}"
        self.created = int(time.time())
        self.usage = Usage(sum(len(prompt.token_ids) for prompt in prompts))

    @abstractmethod
    def whole(self, choices: Sequence[FinishedChoice]) -> str:
        """The response that is not streamed, as JSON."""

    @abstractmethod
    def events(self, deltas: ChoiceStream) -> AsyncGenerator[str, None]:
        """The server-sent events of a streamed response, to its end."""

    @abstractmethod
    def failure(self, error: ApiError) -> str:
        """The events that end a stream after an error."""


class ChunkWriter(ResponseWriter, Generic[ChunkT]):
    """Writes the choices as OpenAI's completions do: a stream is one chunk for each delta.

    A chunk is the object of the whole response, with a part of its choices.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.header: dict[str, Any] = {
            "id": self.id,
            "created": self.created,
            "model": self.model_name,
        }
        """Fields that every object of the response repeats."""

    @abstractmethod
    def completion(self, choices: Sequence[FinishedChoice]) -> BaseModel:
        """The response that is not streamed."""

    def opening(self, delta: ChoiceDelta) -> Iterable[Any]:
        """The choice objects before the first token of a choice, which carry none."""
        del delta
        return ()

    @abstractmethod
    def new_choices(self, delta: ChoiceDelta) -> Iterable[Any]:
        """The choice objects for one delta, each of which becomes a chunk."""

    @abstractmethod
    def make_chunk(self, choices: list[Any]) -> ChunkT:
        """A chunk with these choice objects, without token counts."""

    def whole(self, choices: Sequence[FinishedChoice]) -> str:
        return self.completion(choices).model_dump_json(exclude_unset=True)

    async def events(self, deltas: ChoiceStream) -> AsyncGenerator[str, None]:
        async for chunk in self._chunks(deltas):
            # no warnings: the type of a text completion's chunk requires a finish_reason
            text = chunk.model_dump_json(exclude_unset=True, warnings=False)
            yield f"data: {text}\n\n"
        yield DONE

    def failure(self, error: ApiError) -> str:
        return f"data: {json.dumps(error.body)}\n\n{DONE}"

    async def _chunks(self, deltas: ChoiceStream) -> AsyncGenerator[ChunkT, None]:
        """The chunks of a streamed response, with the token counts that the client asked for."""
        async for delta in deltas:
            self.usage.cached[delta.prompt] = delta.delta.num_cached_tokens
            for choice in self.opening(delta):
                yield self._chunk(choice)
            self.usage.add(delta)
            for choice in self.new_choices(delta):
                yield self._chunk(choice)
        if self.request.usage_at_end:
            chunk = self.make_chunk([])
            chunk.usage = self.usage.so_far()
            yield chunk

    def _chunk(self, choice: Any) -> ChunkT:
        chunk = self.make_chunk([choice])
        if self.request.usage_at_end:  # the API defines null for all chunks but the last
            chunk.usage = self.usage.so_far() if self.request.usage_throughout else None
        return chunk


Encode: TypeAlias = Callable[[RequestT, ServedModel, str], Awaitable[list[Prompt]]]
"""Makes the prompts of a request to a model."""

NewWriter: TypeAlias = Callable[[ServedModel, Any, Sequence[Prompt], str | None], ResponseWriter]
"""Makes the writer of a response; the class of a writer does."""


def event(kind: str, **fields: Any) -> str:
    """A server-sent event that has a name, which its object repeats as ``type``."""
    content = json.dumps({"type": kind, **fields}, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {content}\n\n"


_CHUNKS = (
    'data: {"id": "cmpl-1", "choices": [...]}\n\ndata: [DONE]\n\n',
    "one chunk as a JSON object each, or an error object, and at the end `[DONE]`",
)


def generation_responses(
    whole: type[BaseModel],
    stream: tuple[str, str] = _CHUNKS,
    error: type[BaseModel] = ErrorResponse,
) -> dict[int | str, dict[str, Any]]:
    """The argument ``responses`` of a route whose response is ``whole``, or a stream of events.

    ``stream``: an example of its events, and what they are. ``error``: the body of every error.
    """
    example, meaning = stream
    answer = {
        "model": whole,
        "content": {
            # Without a schema: clients would check each event by it, and an event is not text.
            "text/event-stream": {"example": example},
        },
        "description": f"The answer. With `stream`, server-sent events: {meaning}.",
    }
    errors = error_responses(*BODY_ERRORS, 404, 415, 429, 500, 503, model=error)
    return {200: answer, **errors}


async def respond_to_chat(
    context: ServingContext,
    http_request: Request,
    request: ChatCompletionRequest,
    new_writer: NewWriter,
    encode: Encode[ChatCompletionRequest] | None = None,
) -> Response:
    """Answer a conversation, as `respond` does. Raises `InvalidRequest`.

    ``encode``: for the prompts of several conversations, of which ``request`` is the first.
    """
    encode = encode or context.encoder.chat
    try:
        return await respond(context, http_request, request, encode, new_writer)
    except InvalidRequest as error:
        if error.field == "prompt":  # the engine's name for the rendered messages
            raise InvalidRequest(str(error), "messages") from error
        raise


def _sender_of(request: Request, body: RequestBody, settings: ServerSettings) -> Sender:
    client, fields = client_of(request, settings), body.engine_fields
    fields["client"] = client
    if settings.prefix_cache_per_key:
        fields["cache_salt"] = key_salt(request.headers, body.cache_salt)
    trace = {name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
    return Sender(key_name(request.scope), client, fields, trace)


def client_of(request: Request, settings: ServerSettings) -> str:
    """With whose requests a request shares its part of the server; "" with all others."""
    return key_name(request.scope) if settings.fair_share == "key" else ""


async def respond(
    context: ServingContext,
    http_request: Request,
    request: RequestT,
    encode: Encode[RequestT],
    new_writer: NewWriter,
) -> Response:
    """Answer a request, streamed or not. A client that disconnects aborts its request."""
    if request.stream and context.settings.enable_force_include_usage:
        request.stream_options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    if request.return_tokens_as_token_ids is None:
        request.return_tokens_as_token_ids = context.settings.return_tokens_as_token_ids

    async def answer(model: ServedModel, sender: Sender) -> Response:
        # before tokenisation, which takes longer
        check_token_ids(request.sampling_params(request.requested_tokens), model)
        prompts = await encode(request, model, sender.client)
        sampling = request.sampling_params(request.requested_tokens, model.default_sampling)
        name = given_request_id(http_request.headers) or request.request_id
        writer = new_writer(model, request, prompts, name)
        # Clients give several requests one name, as to the attempts of one call.
        engine_id = f"{writer.id}-{uuid.uuid4().hex[:8]}" if name else writer.id
        fields = sender.fields.copy()
        fields["lora"] = model.lora
        requests = []
        for number, prompt in enumerate(prompts):
            if number and number % PROMPTS_AT_ONCE == 0:
                await asyncio.sleep(0)
            engine_request = GenerateRequest(
                prompt.token_ids,
                _params(request, prompt, model, sampling),
                request_id=f"{engine_id}-{number}",
                model=model.name,
                **fields,
            )
            requests.append(engine_request)
        generate: Generate = context.engine.generate
        if request.drops_output:
            generate = without_output(generate)
        deltas = ChoiceStream(generate, context.metrics, requests, sender)
        if request.stream:
            await deltas.start()
            timeout = context.settings.send_timeout
            return EventStream(writer.events(deltas), writer.failure, deltas, timeout, writer.id)
        choices = await collect(deltas, len(prompts) * request.num_choices, writer.usage)
        content = writer.whole(choices)
        return Response(content, media_type="application/json", headers={REQUEST_ID: writer.id})

    try:
        return await with_model(context, http_request, request, answer)
    except InvalidRequest as error:
        if error.field == "structured_output":  # the engine's name for several fields of the API
            field = request.structured_output_field
            raise InvalidRequest(f"{field}: {error}", field) from error
        if error.field == "lora":  # it was unloaded since the request came
            raise ApiError(404, str(error), param="model", code="model_not_found") from error
        raise


Answer: TypeAlias = Callable[[ServedModel, Sender], Awaitable[Response]]
"""Answers a request of a sender by the model that serves it."""


async def with_model(
    context: ServingContext,
    http_request: Request,
    body: RequestBody,
    answer: Answer,
    *,
    wants_embeddings: bool = False,
) -> Response:
    """Answer a request by the model that it names, or by the active one.

    Cancels ``answer`` where the client disconnects. Raises 400 for a model with the runner for
    other requests: see ``wants_embeddings``.
    """
    name, sender = body.model, _sender_of(http_request, body, context.settings)

    async def checked(model: ServedModel, sender: Sender) -> Response:
        # The active one may not be that of before.
        check_runner(model.name, model.is_pooling, wants_embeddings=wants_embeddings)
        return await answer(model, sender)

    context.check_accepting()
    context.check_name(name)
    context.check_runner(name, wants_embeddings=wants_embeddings)
    if context.settings.auto_switch and context.switcher is not None:
        work = _after_switch(context, context.switcher, name, sender, checked)
    else:
        work = checked(context.model_for(name), sender)
    response = await unless_disconnected(http_request.receive, work)
    response.headers.update(load_headers(http_request.headers, context.engine.stats))
    if given := given_request_id(http_request.headers):
        response.headers[REQUEST_ID] = given
    return response


async def _after_switch(
    context: ServingContext,
    switcher: SwitchControl,
    name: str | None,
    sender: Sender,
    answer: Answer,
) -> Response:
    """Answer a request when its model is active.

    A switch that begins while the prompt is encoded rejects it before its first token, and so does
    an engine that falls asleep. Then it waits again, at its old place.
    """
    alias = context.alias_of(name)
    waiting = WaitingRequest(alias, client=sender.client)
    while True:
        context.metrics.num_open += 1  # a drain waits for it
        try:
            await switcher.wait_for(waiting)
        finally:
            context.metrics.num_open -= 1
        try:
            if alias not in (None, context.engine.model_name):  # an order came between
                raise ModelNotActiveError(f"the model {alias!r} is not active any more")
            model = context.model_for(name)
            with switcher.idle.in_use():  # also while its prompt is encoded
                return await answer(model, sender)
        except (ModelNotActiveError, SwitchInProgressError, EngineSleeping):
            await asyncio.sleep(_AFTER_REFUSAL_SECONDS)


def _params(
    request: GenerationRequest, prompt: Prompt, model: ServedModel, sampling: SamplingParams
) -> SamplingParams:
    max_tokens = max_output_tokens(
        request.requested_tokens,
        request.max_tokens_field,
        prompt,
        model.max_model_len,
        None if request.sets_max_tokens else model.default_sampling.get("max_tokens"),
    )
    params = sampling.with_max_tokens(max_tokens)
    return params if prompt.answer is None else prompt.answer.apply_to(params)
