"""How the answers of a chat request are forced and read: its tools, and the model's parsers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import attrs

from trencadis.engine import InvalidRequest, SamplingParams, StructuredOutput
from trencadis.server.api.protocol import ChatCompletionRequest
from trencadis.server.engine_protocol import ServingTokenizer
from trencadis.server.parsers.answer_parser import AnswerParser
from trencadis.server.parsers.forced_calls import Thought, after_thought, forced_calls
from trencadis.server.parsers.reasoning_parsers import ReasoningParser
from trencadis.server.parsers.registry import TOOL_PARSERS
from trencadis.server.parsers.selection import ParserSelection
from trencadis.server.parsers.tool_parser import ToolParser
from trencadis.server.parsers.tool_parsers import HermesToolParser

_PROMPT_END = 16
"""Tokens at the end of a prompt in which a chat template opens or closes the reasoning."""


@attrs.frozen
class AnswerPlan:
    """How each answer to one prompt is made and read.

    ``tools``, ``reasoning``: the parsers, None for none. ``is_open``: see `ReasoningParser`.
    ``form``: what the engine forces the answer to be; None for any text. ``has_special_markers``:
    what the parsers look for are special tokens, so those must be in the text. ``stop_token_ids``:
    tokens that end an answer, besides those that the model's files name. ``has_named_tool``: the
    client named the tool that is called.
    """

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    is_open: bool | None = None
    tool_names: tuple[str, ...] = ()
    max_calls: int | None = None
    form: StructuredOutput | None = None
    shows_reasoning: bool = True
    has_special_markers: bool = False
    stop_token_ids: tuple[int, ...] = ()
    has_named_tool: bool = False

    @property
    def is_parsed(self) -> bool:
        """Whether an answer is more than content."""
        return self.tools is not None or self.reasoning is not None

    def new_parser(self) -> AnswerParser:
        """The parser of one answer."""
        return AnswerParser(
            None if self.reasoning is None else self.reasoning(self.is_open),
            None if self.tools is None else self.tools(self.tool_names),
            self.max_calls,
        )

    def apply_to(self, params: SamplingParams) -> SamplingParams:
        """Sampling parameters with this form."""
        if self.is_parsed and self.has_special_markers:
            params = attrs.evolve(params, skip_special_tokens=False)
        if self.stop_token_ids and not params.ignore_eos:
            stops = dict.fromkeys((*params.stop_token_ids, *self.stop_token_ids))
            params = attrs.evolve(params, stop_token_ids=tuple(stops))
        return attrs.evolve(params, structured_output=self.form)


class AnswerPlanner:
    """Plans the answers of chat requests, for a model with these parsers."""

    def __init__(self, parsers: ParserSelection, tokenizer: ServingTokenizer) -> None:
        self._parsers = parsers
        self._tokenizer = tokenizer
        self._tools = parsers.tools or HermesToolParser

    @cached_property
    def _special(self) -> dict[str, int]:
        """The markers that are special tokens of the model, with their ids."""
        reasoning = self._parsers.reasoning
        markers: tuple[str, ...] = ()
        if reasoning is not None:
            markers = (*reasoning.begins, *reasoning.ends, *reasoning.markers)
        return _special_tokens((*self._tools.markers, *markers), self._tokenizer)

    @cached_property
    def _stop_token_ids(self) -> tuple[int, ...]:
        """The tokens with which the model ends an answer."""
        parsers = (self._parsers.tools, self._parsers.reasoning)
        stops = {stop for parser in parsers if parser is not None for stop in parser.stops}
        return tuple(sorted(self._special[stop] for stop in stops if stop in self._special))

    def check(self, request: ChatCompletionRequest) -> None:
        """Raise `InvalidRequest` for tools that this server cannot find in an answer."""
        if request.choice_of_tools.mode != "auto":
            return
        if self._parsers.tools is None:
            raise InvalidRequest(
                'tool_choice "auto" needs a tool call parser, and this server has none: start it '
                f"with --tool-call-parser ({', '.join(TOOL_PARSERS)}), or send tool_choice "
                '"required", which needs none',
                "tool_choice",
            )
        if request.structured_output is None:
            return
        call_format = self._parsers.tools.call_format
        field = request.structured_output_field
        if _json_schema(request) is None:
            raise InvalidRequest(
                f'{field} with tools and tool_choice "auto" must be JSON: send tool_choice "none"',
                field,
            )
        if (call_format.begin or call_format.before_name).startswith("{"):
            raise InvalidRequest(
                f'{field} with tool_choice "auto" is not supported for this model, whose calls are '
                'plain JSON too: send tool_choice "none" or "required"',
                field,
            )

    def plan(self, request: ChatCompletionRequest, prompt_token_ids: Sequence[int]) -> AnswerPlan:
        """The plan for the answers to a prompt. Raises `InvalidRequest`."""
        choice = request.choice_of_tools
        is_parsed = self._parsers.reasoning is not None or choice.mode != "none"
        plan = AnswerPlan(
            reasoning=self._parsers.reasoning,
            is_open=self._is_open(request, prompt_token_ids),
            tool_names=tuple(tool.function.name for tool in request.tools or ()),
            max_calls=1 if request.parallel_tool_calls is False or choice.name else None,
            form=request.structured_output,
            shows_reasoning=request.include_reasoning is not False,
            has_special_markers=is_parsed and bool(self._special),
            stop_token_ids=self._stop_token_ids,
            has_named_tool=choice.name is not None,
        )
        if choice.mode == "none":
            return self._with_form_after_reasoning(plan, request)
        plan = attrs.evolve(plan, tools=self._tools)
        if choice.mode == "auto" and plan.form is None:
            return plan
        return self._with_forced_calls(plan, request)

    def _with_forced_calls(self, plan: AnswerPlan, request: ChatCompletionRequest) -> AnswerPlan:
        choice = request.choice_of_tools
        wanted = {
            tool.function.name: tool.schema_of_arguments
            for tool in request.tools or ()
            if choice.name in (None, tool.function.name)
        }
        try:
            form = forced_calls(
                wanted,
                self._tools.call_format,
                max_calls=plan.max_calls,
                thought=self._thought(plan.is_open),
                or_json=_json_schema(request) if choice.mode == "auto" else None,
                special=self._special,
            )
        except InvalidRequest as error:
            raise InvalidRequest(f"tools: {error}", "tools") from error
        except RecursionError as error:
            raise InvalidRequest("tools: their parameters are nested too deep", "tools") from error
        return attrs.evolve(plan, form=form)

    def _with_form_after_reasoning(
        self, plan: AnswerPlan, request: ChatCompletionRequest
    ) -> AnswerPlan:
        """JSON comes after the reasoning. Before other forms there is none."""
        thought = self._thought(plan.is_open)
        if plan.form is None or thought is None:
            return plan
        schema = _json_schema(request)
        if schema is not None:
            with suppress(InvalidRequest):  # too long with the reasoning around it
                return attrs.evolve(plan, form=after_thought(schema, thought, self._special))
        return attrs.evolve(plan, reasoning=None)

    def _thought(self, is_open: bool | None) -> Thought | None:
        reasoning = self._parsers.reasoning
        if reasoning is None or is_open is False:
            return None
        return Thought(reasoning.begins, reasoning.ends, bool(is_open), reasoning.before_answer)

    def _is_open(self, request: ChatCompletionRequest, token_ids: Sequence[int]) -> bool | None:
        """Whether the prompt ends in the reasoning or after it; None if it says nothing."""
        reasoning = self._parsers.reasoning
        if reasoning is None:
            return None
        if request.continue_final_message:
            text = request.messages[-1].content or ""
            return _last(text, reasoning.begins) > _last(text, reasoning.ends)
        tail = "".join(map(self._tokenizer.token_text, token_ids[-_PROMPT_END:])).rstrip()
        return reasoning.is_open_after(tail)


def _special_tokens(markers: Sequence[str], tokenizer: ServingTokenizer) -> dict[str, int]:
    """The markers that are special tokens, with their ids: decoding leaves those out."""
    found = {}
    for marker in markers:
        ids = tokenizer.encode(marker, False)
        if len(ids) == 1 and not tokenizer.decode(ids) and tokenizer.token_text(ids[0]) == marker:
            found[marker] = ids[0]
    return found


def _json_schema(request: ChatCompletionRequest) -> dict[str, Any] | bool | None:
    """The schema of a form in JSON; None for no form, another one, or what is not a schema."""
    form = request.structured_output
    if form is None or (form.json_schema is None and not form.json_object):
        return None
    try:
        schema = json.loads(form.json_schema or '{"type": "object"}')
    except (ValueError, RecursionError):  # the engine says what is wrong with it
        return None
    return schema if isinstance(schema, (dict, bool)) else None


def _last(text: str, markers: Sequence[str]) -> int:
    return max(map(text.rfind, markers))
