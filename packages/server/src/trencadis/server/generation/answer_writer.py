"""One answer of a chat request in the OpenAI API's form: content, reasoning and tool calls."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import attrs
from openai.types.chat import ChatCompletionMessage
from openai.types.chat import chat_completion_chunk as chunk
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)

from trencadis.server.generation.answer_plan import AnswerPlan
from trencadis.server.generation.choice_stream import FinishReason
from trencadis.server.parsers.events import CallBegin, Content, Event, Reasoning
from trencadis.server.parsers.tool_parser import ToolParser

ChatFinishReason: TypeAlias = FinishReason | Literal["tool_calls"]


@attrs.define
class CallText:
    """New text of the call ``index``. ``id`` and ``name`` come with its beginning alone."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: list[str] = attrs.field(factory=list)


@attrs.define
class AnswerText:
    """New text of an answer, by what it is."""

    content: list[str] = attrs.field(factory=list)
    reasoning: list[str] = attrs.field(factory=list)
    calls: dict[int, CallText] = attrs.field(factory=dict)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def message(self, echo: str = "") -> ChatCompletionMessage:
        """A whole answer. Content is null where there is none beside calls or reasoning.

        ``echo``: what the content repeats before the answer.

        Other fields of OpenAI and vLLM that have no value are null: clients read them unasked.
        """
        has_content = bool(self.content or echo) or not self
        fields: dict[str, Any] = {
            "content": echo + "".join(self.content) if has_content else None,
            **dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning")),
        }
        if self.reasoning:
            fields |= _reasoning_fields(self.reasoning)
        if self.calls:
            fields["tool_calls"] = [
                ChatCompletionMessageFunctionToolCall(
                    id=call.id or "",
                    type="function",
                    function=Function(name=call.name or "", arguments="".join(call.arguments)),
                )
                for call in self.calls.values()
            ]
        return ChatCompletionMessage(role="assistant", **fields)

    def delta(self) -> chunk.ChoiceDelta:
        """A part of a streamed answer."""
        fields: dict[str, Any] = {"content": "".join(self.content)} if self.content else {}
        if self.reasoning:
            fields |= _reasoning_fields(self.reasoning)
        if self.calls:
            fields["tool_calls"] = [_call_delta(call) for call in self.calls.values()]
        return chunk.ChoiceDelta(**fields)


class AnswerWriter:
    """Follows one answer to a prompt with this plan."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._parser = plan.new_parser()
        self._new_call_id = (plan.tools or ToolParser).new_call_id
        self._shows_reasoning = plan.shows_reasoning
        self._has_named_tool = plan.has_named_tool
        self._has_calls = False

    def add(self, text: str, *, is_last: bool) -> AnswerText:
        """Add generated text; returns what it makes known."""
        events = self._parser.push(text)
        if is_last:
            events += self._parser.finish()
        new = AnswerText()
        for event in events:
            self._add_event(event, new)
        return new

    def finish_reason(self, reason: FinishReason | None) -> ChatFinishReason | None:
        """``tool_calls`` for an answer that was not cut and whose calls the model chose.

        As of OpenAI and vLLM, the call of a tool that the client named ends with ``stop``.
        """
        chose_calls = self._has_calls and not self._has_named_tool
        return "tool_calls" if reason == "stop" and chose_calls else reason

    def _add_event(self, event: Event, new: AnswerText) -> None:
        if isinstance(event, Content):
            new.content.append(event.text)
        elif isinstance(event, Reasoning):
            if self._shows_reasoning:
                new.reasoning.append(event.text)
        elif isinstance(event, CallBegin):
            self._has_calls = True
            new.calls[event.index] = CallText(event.index, self._new_call_id(), event.name)
        else:
            new.calls.setdefault(event.index, CallText(event.index)).arguments.append(event.text)


def _call_delta(call: CallText) -> chunk.ChoiceDeltaToolCall:
    arguments = "".join(call.arguments)
    if call.name is None:
        function = chunk.ChoiceDeltaToolCallFunction(arguments=arguments)
        return chunk.ChoiceDeltaToolCall(index=call.index, function=function)
    function = chunk.ChoiceDeltaToolCallFunction(name=call.name, arguments=arguments)
    return chunk.ChoiceDeltaToolCall(
        index=call.index, id=call.id, type="function", function=function
    )


def _reasoning_fields(parts: list[str]) -> dict[str, str]:
    """vLLM's name for reasoning, and the one it had before, which many clients still read."""
    text = "".join(parts)
    return {"reasoning": text, "reasoning_content": text}
