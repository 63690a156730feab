"""``POST /v1/messages``: Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from trencadis.server.api.error_responses import (
    BODY_ERRORS,
    MessagesErrorResponse,
    error_responses,
)
from trencadis.server.api.messages import (
    CLIENT_FIELDS,
    CountTokensRequest,
    MessageObject,
    MessagesRequest,
    MessagesUsage,
    OutputBlock,
    TokenCount,
    TokenDetails,
)
from trencadis.server.api.protocol import ChatCompletionRequest
from trencadis.server.api.translation import client_fields
from trencadis.server.errors import ApiError
from trencadis.server.generation.answer_blocks import (
    AnswerBlocks,
    Block,
    BlockBegin,
    BlockChange,
    BlockText,
)
from trencadis.server.generation.answer_plan import AnswerPlan
from trencadis.server.generation.choice_stream import ChoiceStream, FinishedChoice, FinishReason
from trencadis.server.generation.prompts import Prompt
from trencadis.server.generation.reasoning_usage import ReasoningUsage
from trencadis.server.generation.served_model import ServedModel
from trencadis.server.http.cancelled_requests import unless_disconnected
from trencadis.server.http.json_body import Checked
from trencadis.server.routes.context import ServingContext
from trencadis.server.routes.generation_response import (
    ResponseWriter,
    client_of,
    event,
    generation_responses,
    respond_to_chat,
)

_EVENTS = (
    'event: message_start\ndata: {"type": "message_start", "message": {...}}\n\n',
    "those of Anthropic's Messages API",
)


def messages_router(context: ServingContext) -> APIRouter:
    """The routes for messages."""
    router = APIRouter(tags=["messages"], route_class=context.bodies.route_class)

    @router.post(
        "/v1/messages",
        response_model=None,
        responses=generation_responses(MessageObject, _EVENTS, MessagesErrorResponse),
    )
    async def create_message(body: Checked[MessagesRequest], request: Request) -> Response:
        """Answer a conversation in Anthropic's form, in one response or as a stream of events."""
        with client_fields(CLIENT_FIELDS):
            chat = await context.bodies.translated(request, body.chat)
            return await respond_to_chat(context, request, chat, MessagesWriter)

    @router.post(
        "/v1/messages/count_tokens",
        response_model=TokenCount,
        responses=error_responses(*BODY_ERRORS, 404, 415, 500, 503, model=MessagesErrorResponse),
    )
    async def count_tokens(body: Checked[CountTokensRequest], request: Request) -> TokenCount:
        """The tokens of a conversation as the model reads it, without an answer to it."""
        context.check_accepting()
        model = await context.model_to_count(body.model)
        with client_fields(CLIENT_FIELDS):
            client = client_of(request, context.settings)
            chat = await context.bodies.translated(request, body.chat)
            work = context.encoder.conversation(chat, model, client)
            return TokenCount(input_tokens=len(await unless_disconnected(request.receive, work)))

    return router


class MessagesWriter(ResponseWriter):
    """Writes the answer as content blocks: thinking, text and tool_use."""

    id_prefix = "msg_"

    def __init__(
        self,
        model: ServedModel,
        request: ChatCompletionRequest,
        prompts: Sequence[Prompt],
        name: str | None = None,
    ) -> None:
        super().__init__(model, request, prompts, name)
        plan = prompts[0].answer or AnswerPlan()
        self.usage: ReasoningUsage = ReasoningUsage.of(prompts)
        self._answer = AnswerBlocks(plan)
        self._has_started = False

    def whole(self, choices: Sequence[FinishedChoice]) -> str:
        (choice,) = choices
        self._answer.add(choice.text, is_last=True)
        content = [_content(block) for block in self._answer.blocks]
        stop = self._stop(choice.finish_reason, choice.stop_reason)
        return self._message(content, stop).model_dump_json()

    async def events(self, deltas: ChoiceStream) -> AsyncGenerator[str, None]:
        async for item in deltas:
            if not self._has_started:
                self._has_started = True
                self.usage.cached[item.prompt] = item.delta.num_cached_tokens
                message = self._message([], {"stop_reason": None, "stop_sequence": None})
                yield event("message_start", message=message.model_dump())
                yield event("ping")
            self.usage.add(item)
            reason = item.finish_reason
            for change in self._answer.add(item.delta.text, is_last=reason is not None):
                for text in _change(change):
                    yield text
            if reason is not None:
                stop = self._stop(reason, item.delta.stop_reason)
                yield event("message_delta", delta=stop, usage=self._token_counts().model_dump())
                yield event("message_stop")

    def failure(self, error: ApiError) -> str:
        return f"event: error\ndata: {json.dumps(error.anthropic_body)}\n\n"

    def _stop(self, reason: FinishReason, stop: str | int | None) -> dict[str, Any]:
        """Why the answer ended. ``stop``: the stop string or the stop token that matched."""
        kind = "end_turn"
        if reason == "length":
            kind = "max_tokens"
        elif self._answer.has_calls:
            kind = "tool_use"
        elif isinstance(stop, str):
            kind = "stop_sequence"
        return {"stop_reason": kind, "stop_sequence": stop if kind == "stop_sequence" else None}

    def _message(self, content: list[dict[str, Any]], stop: dict[str, Any]) -> MessageObject:
        return MessageObject(
            id=self.id,
            model=self.model_name,
            content=[OutputBlock(**block) for block in content],
            usage=self._token_counts(),
            **stop,
        )

    def _token_counts(self) -> MessagesUsage:
        cached = sum(self.usage.cached.values())
        return MessagesUsage(
            input_tokens=self.usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=self.usage.completion_tokens,
            output_tokens_details=TokenDetails(thinking_tokens=self.usage.reasoning_tokens),
        )


def _content(block: Block) -> dict[str, Any]:
    """A whole block. The arguments of a call that was cut, or is not JSON, are left out."""
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {**_call_begin(block), "input": _arguments(block.text)}


def _call_begin(block: Block) -> dict[str, Any]:
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _arguments(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}", strict=False)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


_EMPTY = {
    "text": {"type": "text", "text": ""},
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
}
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of the delta of a kind of block, and the name of its text."""


def _change(change: BlockChange) -> Iterator[str]:
    """The events of a change of the answer."""
    block = change.block
    if isinstance(change, BlockBegin):
        begin = _EMPTY.get(block.kind) or _call_begin(block)
        yield event("content_block_start", index=block.index, content_block=begin)
    elif isinstance(change, BlockText):
        kind, name = _DELTAS[block.kind]
        delta = {"type": kind, name: change.text}
        yield event("content_block_delta", index=block.index, delta=delta)
    else:
        yield event("content_block_stop", index=block.index)
