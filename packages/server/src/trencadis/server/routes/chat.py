"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
from fastapi import APIRouter, Depends, Request, Response
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat import chat_completion as complete
from openai.types.chat import chat_completion_chunk as chunk

from trencadis.engine import InvalidRequest, PositionLogprobs
from trencadis.server.api.logprobs import chat_logprobs
from trencadis.server.api.protocol import ChatCompletionRequest
from trencadis.server.api.usage import Usage
from trencadis.server.generation.choice_stream import Answer, ChoiceDelta, Job, collect
from trencadis.server.generation.prompts import answer_budget
from trencadis.server.http.content_type import json_only
from trencadis.server.http.event_stream import EventStream, answer_events, unless_disconnected
from trencadis.server.routes.context import ServingContext, new_id


def chat_router(context: ServingContext) -> APIRouter:
    """The route that answers conversations."""
    router = APIRouter(tags=["chat"], dependencies=[Depends(json_only)])

    @router.post("/v1/chat/completions", response_model=None)
    async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
        """Answer a conversation, whole or as a stream of chunks."""
        try:
            return await unless_disconnected(request.receive, _respond(context, body))
        except InvalidRequest as error:
            if error.field == "prompt":  # what the engine calls the rendered messages
                raise InvalidRequest(str(error), "messages") from error
            raise

    return router


async def _respond(context: ServingContext, request: ChatCompletionRequest) -> Response:
    context.check_model(request.model)
    job = await _job(context, request)
    chat = _Chat(context, request, Usage(len(job.prompt.token_ids)))
    deltas = context.start([job], chat.id)
    if request.stream:
        await deltas.start()
        events = answer_events(deltas, chat.chunks, chat.last_chunks)
        return EventStream(events, deltas, context.settings.send_timeout, chat.id)
    answers = await collect(deltas, request.num_samples, chat.usage)
    content = chat.completion(answers).model_dump_json(exclude_unset=True)
    return Response(content, media_type="application/json", headers={"X-Request-Id": chat.id})


async def _job(context: ServingContext, request: ChatCompletionRequest) -> Job:
    field = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    requested: int | None = getattr(request, field)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    # checked before the prompt is tokenised, which takes longer
    context.check_token_ids(request.sampling_params(requested, logprobs))
    prompt = await context.encoder.chat(request)
    budget = answer_budget(requested, field, prompt, context.engine.max_model_len)
    return Job(prompt, request.sampling_params(budget, logprobs), request.priority or 0)


@attrs.define
class _Chat:
    """One chat completion: its id, its time, its cost, and how its answers are written."""

    context: ServingContext
    request: ChatCompletionRequest
    usage: Usage
    id: str = attrs.field(factory=lambda: new_id("chatcmpl"))
    created: int = attrs.field(factory=lambda: int(time.time()))
    begun: set[int] = attrs.field(factory=set)

    def completion(self, answers: Sequence[Answer]) -> ChatCompletion:
        """All answers at once."""
        return ChatCompletion(
            id=self.id,
            object="chat.completion",
            created=self.created,
            model=self.context.engine.model_name,
            choices=[self._choice(index, answer) for index, answer in enumerate(answers)],
            usage=self.usage.so_far(),
        )

    def chunks(self, item: ChoiceDelta) -> Iterator[ChatCompletionChunk]:
        """What a streamed answer gained; its first chunk says whose turn it is."""
        self.usage.add(item.prompt, item.delta)
        if item.choice not in self.begun:
            self.begun.add(item.choice)
            opening = chunk.ChoiceDelta(role="assistant", content="")
            start = chunk.Choice(
                index=item.choice, delta=opening, logprobs=None, finish_reason=None
            )
            yield self._chunk([start])
        logprobs = item.delta.logprobs if self.request.logprobs else ()
        if item.delta.text or logprobs or item.finish_reason:
            yield self._chunk([self._growth(item, logprobs)])

    def last_chunks(self) -> Iterator[ChatCompletionChunk]:
        """What follows the answers: the token counts, where they were asked for."""
        if self.request.usage_at_end:
            last = self._chunk([])
            last.usage = self.usage.so_far()
            yield last

    def _choice(self, index: int, answer: Answer) -> complete.Choice:
        logprobs = None
        if self.request.logprobs:
            entries = chat_logprobs(self.context.engine.tokenizer, answer.logprobs)
            logprobs = complete.ChoiceLogprobs(content=entries)
        vllms_own: dict[str, Any] = {"stop_reason": answer.stop_reason}
        return complete.Choice(
            index=index,
            message=ChatCompletionMessage(role="assistant", content=answer.text, refusal=None),
            logprobs=logprobs,
            finish_reason=answer.finish_reason,
            **vllms_own,
        )

    def _growth(self, item: ChoiceDelta, positions: Sequence[PositionLogprobs]) -> chunk.Choice:
        text = item.delta.text
        logprobs = None
        if positions:
            entries = chat_logprobs(self.context.engine.tokenizer, positions)
            logprobs = chunk.ChoiceLogprobs(content=entries)
        ended = item.finish_reason is not None
        vllms_own: dict[str, Any] = {"stop_reason": item.delta.stop_reason} if ended else {}
        return chunk.Choice(
            index=item.choice,
            delta=chunk.ChoiceDelta(content=text) if text else chunk.ChoiceDelta(),
            logprobs=logprobs,
            finish_reason=item.finish_reason,
            **vllms_own,
        )

    def _chunk(self, choices: list[chunk.Choice]) -> ChatCompletionChunk:
        made = ChatCompletionChunk(
            id=self.id,
            object="chat.completion.chunk",
            created=self.created,
            model=self.context.engine.model_name,
            choices=choices,
        )
        if self.request.usage_at_end:  # null until the end, says the API
            made.usage = self.usage.so_far() if self.request.usage_throughout else None
        return made
