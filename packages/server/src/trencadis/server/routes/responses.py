"""``POST /v1/responses``: OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from trencadis.engine import CompletionDelta, PositionLogprobs, SamplingParams
from trencadis.server.api.error_responses import error_responses
from trencadis.server.api.logprobs import chat_logprobs
from trencadis.server.api.protocol import ChatCompletionRequest
from trencadis.server.api.responses import (
    CLIENT_FIELDS,
    FunctionCallItem,
    IncompleteDetails,
    InputTokensDetails,
    ItemStatus,
    NamespacedName,
    OutputItem,
    OutputMessage,
    OutputText,
    OutputTokensDetails,
    RawMessage,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
)
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
from trencadis.server.http.api_keys import key_name
from trencadis.server.http.json_body import Checked
from trencadis.server.request_ids import fits_path
from trencadis.server.routes.context import ServingContext
from trencadis.server.routes.generation_response import (
    ResponseWriter,
    event,
    generation_responses,
    respond_to_chat,
)
from trencadis.server.routes.stored_responses import (
    Keep,
    Keeping,
    continued,
    new_response_id,
    respond_in_background,
)

_EVENTS = (
    'event: response.created\ndata: {"type": "response.created", "response": {...}}\n\n',
    "those of OpenAI's Responses API",
)


def responses_router(context: ServingContext) -> APIRouter:
    """The route for responses."""
    router = APIRouter(tags=["responses"], route_class=context.bodies.route_class)

    @router.post(
        "/v1/responses",
        response_model=None,
        responses={**generation_responses(ResponseObject, _EVENTS), **error_responses(409)},
    )
    async def create_response(body: Checked[ResponsesRequest], request: Request) -> Response:
        """Answer a conversation of items, in one response or as a stream of events."""
        store, owner = context.responses, key_name(request.scope)
        body.check_store(stores=store is not None)
        keeps = store is not None and body.store is not False
        with client_fields(CLIENT_FIELDS):
            earlier = continued(store, owner, body)

            def translate() -> tuple[ChatCompletionRequest, bytes]:
                whole = body.continuing(earlier) if earlier else body
                return whole.chat(), whole.conversation() if keeps else b""

            chat, items = await context.bodies.translated(request, translate, len(earlier))
            keeping = None if store is None or not keeps else Keeping(store, owner, items)
            writer = partial(ResponsesWriter, body)
            if keeping is None or not body.background:
                keep = None if keeping is None else keeping.keep
                return await respond_to_chat(context, request, chat, partial(writer, keep))
            head = _queued(context, request, body, chat)
            return await respond_in_background(context, request, chat, head, writer, keeping)

    return router


def _queued(
    context: ServingContext,
    request: Request,
    body: ResponsesRequest,
    chat: ChatCompletionRequest,
) -> ResponseObject:
    """A response in the background before it is begun, with the defaults of the active model."""
    model = context.models.current
    return response_object(
        body,
        chat,
        chat.sampling_params(None, model.default_sampling),
        response_id=new_response_id(request),
        created=int(time.time()),
        model_name=body.model or model.name,
        status="queued",
        is_stored=True,
    )


class ResponsesWriter(ResponseWriter):
    """Writes the answer as output items: reasoning, messages and function calls.

    ``keep`` stores the response, if it is to be stored; its id is one that a path may have then.
    """

    id_prefix = "resp_"

    def __init__(
        self,
        body: ResponsesRequest,
        keep: Keep | None,
        model: ServedModel,
        request: ChatCompletionRequest,
        prompts: Sequence[Prompt],
        name: str | None = None,
    ) -> None:
        is_lost = keep is not None and name is not None and not fits_path(name)
        super().__init__(model, request, prompts, None if is_lost else name)
        self._body = body
        self._keep = keep
        self._chat = request
        self._params = request.sampling_params(None, model.default_sampling)
        plan = prompts[0].answer or AnswerPlan()
        self.usage: ReasoningUsage = ReasoningUsage.of(prompts)
        self._plan = plan
        self._names = body.function_names
        self._answer = AnswerBlocks(plan)
        self._num_events = 0
        self._logprobs: dict[int, list[dict[str, Any]]] = {}
        """The log-probabilities of each block of text."""
        self._undecided: list[dict[str, Any]] = []
        """Those of tokens whose text the parsers still hold back."""
        self._output = RawMessage(message="", tokens=[])
        """What the model wrote."""

    def whole(self, choices: Sequence[FinishedChoice]) -> str:
        (choice,) = choices
        if self._body.has_logprobs:
            self._follow(choice)
        self._output = RawMessage(message=choice.text, tokens=choice.token_ids)
        self._answer.add(choice.text, is_last=True)
        return self._finished(choice.finish_reason).model_dump_json()

    async def events(self, deltas: ChoiceStream) -> AsyncGenerator[str, None]:
        async for item in deltas:
            self.usage.add(item)
            self._write(item.delta)
            if not self._num_events:
                for kind in ("created", "in_progress"):
                    yield self._event(f"response.{kind}", response=self._response("in_progress"))
            reason = item.finish_reason
            changes = self._answer.add(item.delta.text, is_last=reason is not None)
            new = self._new_logprobs(changes, item.delta.logprobs)
            for change in changes:
                for text in self._change(change, reason, new):
                    yield text
            if reason is not None:
                response = self._finished(reason)
                yield self._event(f"response.{response.status}", response=response)

    def failure(self, error: ApiError) -> str:
        """The event ``error``, and ``response.failed`` with what there is of the answer."""
        fields = {"code": error.code, "message": error.message, "param": error.param}
        response = self._response("failed")
        response.store = False
        response.output = self._items("incomplete")
        response.error = ResponseError(code=error.code or "server_error", message=error.message)
        return self._event("error", **fields) + self._event("response.failed", response=response)

    def _event(self, kind: str, **fields: Any) -> str:
        number = self._num_events
        self._num_events += 1
        values = {
            name: value.model_dump() if isinstance(value, ResponseObject) else value
            for name, value in fields.items()
        }
        return event(kind, sequence_number=number, **values)

    def _write(self, delta: CompletionDelta) -> None:
        if self._body.enable_response_messages:
            self._output.message += delta.text
            self._output.tokens += delta.token_ids

    def _follow(self, choice: FinishedChoice) -> None:
        """Find the blocks of an answer's tokens, whose texts alone tell it."""
        answer = AnswerBlocks(self._plan)
        for position in choice.logprobs:
            text = self.tokenizer.token_text(position.chosen.token_id)
            self._new_logprobs(answer.add(text, is_last=False), [position])

    def _new_logprobs(
        self, changes: Sequence[BlockChange], positions: Sequence[PositionLogprobs]
    ) -> list[dict[str, Any]]:
        """The log-probabilities of the text that these changes add last, if they add any.

        Those of reasoning and calls are left out.
        """
        self._undecided += [
            each.model_dump() for each in chat_logprobs(self.token_texts, positions)
        ]
        texts = [change for change in changes if isinstance(change, BlockText)]
        if not texts:
            return []
        held, self._undecided = self._undecided, []
        block = texts[-1].block
        if block.kind != "text":
            return []
        # The first of them may be a marker, such as that which ends the reasoning.
        left = sum(len(change.text.encode()) for change in texts if change.block is block)
        begin = len(held)
        while begin and left > 0:
            begin -= 1
            left -= len(held[begin]["bytes"])
        self._logprobs.setdefault(block.index, []).extend(held[begin:])
        return held[begin:]

    def _change(
        self, change: BlockChange, reason: FinishReason | None, logprobs: list[dict[str, Any]]
    ) -> Iterator[str]:
        """The events of a change of the answer; ``logprobs``: of the last text of the delta."""
        block = change.block
        at = {"output_index": block.index}
        within = {"item_id": _item_id(block), **at}
        if block.kind != "call":
            within["content_index"] = 0
        if isinstance(change, BlockBegin):
            item = self._written(block, "", "in_progress").model_dump()
            if block.kind != "call":
                item["content"] = []
            yield self._event("response.output_item.added", **at, item=item)
            if block.kind != "call":
                part = _part(block, "").model_dump()
                yield self._event("response.content_part.added", **within, part=part)
        elif isinstance(change, BlockText):
            extra: dict[str, Any] = {"logprobs": logprobs} if block.kind == "text" else {}
            name = f"response.{_TEXT_EVENTS[block.kind]}.delta"
            yield self._event(name, **within, delta=change.text, **extra)
        else:
            yield from self._done(block, at, within, self._status_of(block, reason))

    def _done(
        self, block: Block, at: dict[str, Any], within: dict[str, Any], status: ItemStatus
    ) -> Iterator[str]:
        name = f"response.{_TEXT_EVENTS[block.kind]}.done"
        if block.kind == "call":
            called = self._called(block).name
            yield self._event(name, **within, name=called, arguments=block.text)
        else:
            logprobs = self._logprobs.get(block.index, [])
            extra: dict[str, Any] = {"logprobs": logprobs} if block.kind == "text" else {}
            yield self._event(name, **within, text=block.text, **extra)
            part = _part(block, block.text, logprobs).model_dump()
            yield self._event("response.content_part.done", **within, part=part)
        item = self._item(block, status).model_dump()
        yield self._event("response.output_item.done", **at, item=item)

    def _finished(self, reason: FinishReason) -> ResponseObject:
        is_cut = reason == "length"
        response = self._response("incomplete" if is_cut else "completed")
        response.output = self._items("incomplete" if is_cut else "completed")
        response.usage = self._token_counts()
        if is_cut:
            response.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        self._add_messages(response)
        if self._keep is not None:
            response.store = True  # also in what is stored
            response.store = self._keep(response)
        return response

    def _add_messages(self, response: ResponseObject) -> None:
        """Add what the model read and, unless it has reasoning that is hidden, what it wrote."""
        (prompt,) = self.prompts
        if prompt.text is None:
            return
        response.input_messages = [RawMessage(message=prompt.text, tokens=list(prompt.token_ids))]
        if self._plan.reasoning is None or self._plan.shows_reasoning:
            response.output_messages = [self._output]

    def _items(self, last: ItemStatus) -> list[OutputItem]:
        """The blocks as items; ``last`` is the status of the last one."""
        blocks = self._answer.blocks
        return [
            self._item(block, "completed" if block is not blocks[-1] else last) for block in blocks
        ]

    def _item(self, block: Block, status: ItemStatus) -> OutputItem:
        return self._written(block, block.text, status, self._logprobs.get(block.index, ()))

    def _written(
        self,
        block: Block,
        text: str,
        status: ItemStatus,
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> OutputItem:
        item_id = _item_id(block)
        if block.kind == "text":
            part = OutputText(text=text, logprobs=list(logprobs))
            return OutputMessage(id=item_id, status=status, content=[part])
        if block.kind == "reasoning":
            return ReasoningItem(id=item_id, status=status, content=[ReasoningText(text=text)])
        called = self._called(block)
        return FunctionCallItem(
            id=item_id,
            call_id=block.call_id,
            name=called.name,
            namespace=called.namespace,
            arguments=text,
            status=status,
        )

    def _called(self, block: Block) -> NamespacedName:
        """The function of a call; a model may name one that there is not."""
        return self._names.get(block.name, NamespacedName(block.name))

    def _status_of(self, block: Block, reason: FinishReason | None) -> ItemStatus:
        """The status of a block that has ended, in the delta with this finish reason."""
        is_cut = reason == "length" and block is self._answer.blocks[-1]
        return "incomplete" if is_cut else "completed"

    def _token_counts(self) -> ResponsesUsage:
        usage = self.usage
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(cached_tokens=sum(usage.cached.values())),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
        )

    def _response(self, status: Any) -> ResponseObject:
        """The response without output, with the settings that are in force."""
        return response_object(
            self._body,
            self._chat,
            self._params,
            response_id=self.id,
            created=self.created,
            model_name=self.model_name,
            status=status,
            is_stored=None if self._keep is not None else False,
        )


def response_object(
    body: ResponsesRequest,
    chat: ChatCompletionRequest,
    params: SamplingParams,
    *,
    response_id: str,
    created: int,
    model_name: str,
    status: Any,
    is_stored: bool | None,
) -> ResponseObject:
    """A response without output: what it repeats of its request. ``created``: seconds."""
    text_format = body.text.format if body.text and body.text.format else None
    as_sent = {"type": "text"}
    if text_format is not None:
        as_sent = text_format.model_dump(by_alias=True, exclude_none=True)
    reasoning = body.reasoning
    return ResponseObject(
        id=response_id,
        created_at=created,
        background=bool(body.background),
        status=status,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model_name,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": None if reasoning is None else reasoning.effort, "summary": None},
        service_tier=None if body.service_tier is None else "default",
        store=is_stored,
        temperature=params.temperature,
        text={"format": as_sent},
        tool_choice=_tool_choice(chat, body.function_names),
        tools=[tool.as_sent() for tool in body.tools or ()],
        top_p=params.top_p,
    )


_TEXT_EVENTS = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
}
_ID_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}


def _item_id(block: Block) -> str:
    return _ID_PREFIXES[block.kind] + block.id


def _part(
    block: Block, text: str, logprobs: Sequence[dict[str, Any]] = ()
) -> OutputText | ReasoningText:
    if block.kind == "text":
        return OutputText(text=text, logprobs=list(logprobs))
    return ReasoningText(text=text)


def _tool_choice(
    request: ChatCompletionRequest, names: Mapping[str, NamespacedName]
) -> str | dict[str, Any]:
    """The choice of tools; OpenAI's default without tools is "auto"."""
    if not request.tools:
        return "auto" if request.tool_choice is None else request.tool_choice.mode
    choice = request.choice_of_tools
    if choice.name is None:
        return choice.mode
    return {"type": "function", "name": names[choice.name].name}
