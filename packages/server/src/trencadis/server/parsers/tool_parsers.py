"""The tool parsers: one class for each format in which models write calls.

The formats are those of the models' chat templates.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable

from trencadis.server.parsers import harmony
from trencadis.server.parsers.python_text import pass_literal
from trencadis.server.parsers.text_reader import Reading
from trencadis.server.parsers.tool_parser import CallEnd, CallFormat, TextToolParser


class HermesToolParser(TextToolParser):
    """Hermes 2 and 3, Qwen 2.5 and 3: each call is an object between ``<tool_call>`` tags."""

    call_format = CallFormat(
        before_name='<tool_call>\n{"name": "',
        before_arguments='", "arguments": ',
        after="}\n</tool_call>",
        separator="\n",
    )
    markers = ("<tool_call>", "</tool_call>")
    ends = ("</tool_call>",)

    def parse(self) -> Reading[None]:
        while (yield from self.content_until("<tool_call>")):
            yield from self.reader.skip()
            if (yield from self.call_object()) is CallEnd.COMPLETE:
                yield from self.close("</tool_call>")


class LlamaToolParser(TextToolParser):
    """Llama 3.1 and later: the whole answer is one object with ``name`` and ``parameters``.

    ``<|python_tag|>`` may come before it, and further calls after a semicolon. Without the tag, an
    object is a call only if its name is that of a tool: an answer in JSON is none.
    """

    call_format = CallFormat(
        before_name='{"name": "', before_arguments='", "parameters": ', after="}", separator="; "
    )
    markers = ("<|python_tag|>",)
    ends = ("<|python_tag|>",)

    def parse(self) -> Reading[None]:
        self.reader.record()
        yield from self.reader.skip()
        tag = yield from self.reader.accept("<|python_tag|>")
        if tag or (yield from self.reader.peek()) == "{":
            yield from self._calls(is_tagged=bool(tag))
        else:
            self.no_call()
        while (yield from self.content_until("<|python_tag|>")):
            yield from self._calls(is_tagged=True)

    def _calls(self, is_tagged: bool) -> Reading[None]:
        names = None if is_tagged else self.tool_names
        while True:
            yield from self.reader.skip()
            if (yield from self.call_object(names)) is not CallEnd.COMPLETE:
                return
            yield from self.close()
            self.reader.record()
            if not (yield from self.reader.accept(";", ",")):
                self.reader.forget()
                return


class MistralToolParser(TextToolParser):
    """Mistral: ``[TOOL_CALLS]``, then a list of objects or, in newer models, a name and arguments.

    The newer models write ``[TOOL_CALLS]name[ARGS]{…}`` for each call. Their chat templates take
    only ids of nine letters and digits.
    """

    call_format = CallFormat(
        begin="[TOOL_CALLS][",
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after="}",
        separator=", ",
        end="]",
    )
    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    ends = ("[TOOL_CALLS]",)

    def parse(self) -> Reading[None]:
        marker = yield from self.content_until("[TOOL_CALLS]")
        while marker:
            yield from self.reader.skip()
            if (yield from self.reader.accept("[")):
                end = yield from self.call_list()
            else:
                end = yield from self._named_call()
            if end is CallEnd.COMPLETE:
                yield from self.close()
            if end is CallEnd.BROKEN and not self.reader.at_end:
                self.reader.record("[TOOL_CALLS]")  # it ended the arguments, and begins a call
            else:
                marker = yield from self.content_until("[TOOL_CALLS]")

    def _named_call(self) -> Reading[CallEnd]:
        name = yield from self.reader.name()
        if (yield from self.reader.accept("[CALL_ID]")):
            yield from self.reader.name()
        yield from self.reader.accept("[ARGS]")
        yield from self.reader.skip()
        if not name or (yield from self.reader.peek()) != "{":
            return self.no_call()
        return (yield from self.arguments(name))

    @staticmethod
    def new_call_id() -> str:
        alphabet = string.ascii_letters + string.digits
        return "".join(secrets.choice(alphabet) for _ in range(9))


class DeepSeekToolParser(TextToolParser):
    """DeepSeek V3, R1 and V3.1: each call is between tags, its arguments in a code block.

    V3.1 has no code block, and the name before the separator instead of ``function``.
    """

    call_format = CallFormat(
        begin="<｜tool▁calls▁begin｜>",
        before_name="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        before_arguments="\n```json\n",
        after="\n```<｜tool▁call▁end｜>",
        separator="\n",
        end="<｜tool▁calls▁end｜>",
    )
    markers = (
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    )
    ends = ("<｜tool▁call▁end｜>",)

    def parse(self) -> Reading[None]:
        while (yield from self.content_until("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")):
            is_first_read = self.reader.recorded().endswith("<｜tool▁call▁begin｜>")
            yield from self._calls(is_first_read)

    def _calls(self, begin_was_read: bool) -> Reading[None]:
        while True:
            yield from self.reader.skip()
            if not begin_was_read and not (yield from self.reader.accept("<｜tool▁call▁begin｜>")):
                if not (yield from self.reader.accept("<｜tool▁calls▁end｜>")):
                    self.no_call()
                self.reader.forget()
                yield from self.reader.skip()
                return
            begin_was_read = False
            end = yield from self._call()
            if end is CallEnd.NO_CALL:
                return
            if end is CallEnd.COMPLETE:
                yield from self.reader.skip()
                yield from self.reader.accept("```")
                yield from self.close("<｜tool▁call▁end｜>")
            self.reader.record()

    def _call(self) -> Reading[CallEnd]:
        yield from self.reader.skip()
        name = yield from self.reader.name()
        if not (yield from self.reader.accept("<｜tool▁sep｜>")):
            return self.no_call()
        yield from self.reader.skip()
        if (yield from self.reader.peek()) != "{":
            name = yield from self.reader.name()
            yield from self.reader.skip()
            yield from self.reader.accept("```json")
            yield from self.reader.skip()
        if not name or (yield from self.reader.peek()) != "{":
            return self.no_call()
        return (yield from self.arguments(name))


class GraniteToolParser(TextToolParser):
    """Granite 3: ``<|tool_call|>`` or ``<tool_call>``, then a list of objects.

    A single object between ``<tool_call>`` tags, as of Granite 4, is read too.
    """

    call_format = CallFormat(
        begin="<|tool_call|>[",
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after="}",
        separator=", ",
        end="]",
    )
    markers = ("<|tool_call|>", "<tool_call>", "</tool_call>")
    ends = ("</tool_call>",)

    def parse(self) -> Reading[None]:
        while (yield from self.content_until("<|tool_call|>", "<tool_call>")):
            yield from self.reader.skip()
            is_list = yield from self.reader.accept("[")
            end = yield from (self.call_list() if is_list else self.call_object())
            if end is CallEnd.COMPLETE:
                yield from self.close("</tool_call>")


class InternLmToolParser(TextToolParser):
    """InternLM 2.5 and 3: each call is an object between ``<|action_start|><|plugin|>`` and an end.

    InternLM 2.5 writes ``parameters``, InternLM 3 ``arguments``.
    """

    call_format = CallFormat(
        before_name='<|action_start|><|plugin|>\n{"name": "',
        before_arguments='", "parameters": ',
        after="}<|action_end|>",
        separator="\n",
    )
    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    ends = ("<|action_end|>",)

    def parse(self) -> Reading[None]:
        while (yield from self.content_until("<|action_start|>")):
            yield from self.reader.skip()
            yield from self.reader.accept("<|plugin|>")
            yield from self.reader.skip()
            if (yield from self.call_object()) is CallEnd.COMPLETE:
                yield from self.close("<|action_end|>")


class PythonicToolParser(TextToolParser):
    """Llama 4, Llama 3.2 and ToolACE: the whole answer is a list of calls, written as in Python.

    ``[get(city="Paris", days=[1, 2]), put()]``, between ``<|python_start|>`` and an end or not. A
    call has named arguments alone, and is one only if its name is that of a tool. Arguments are
    passed on as JSON. Forced calls are JSON objects in the list, which is read, too.
    """

    call_format = CallFormat(
        begin="[",
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after="}",
        separator=", ",
        end="]",
    )
    markers = ("<|python_start|>", "<|python_end|>")
    ends = ("<|python_end|>",)

    def parse(self) -> Reading[None]:
        self.reader.record()
        yield from self.reader.skip()
        yield from self.reader.accept("<|python_start|>", "<|python_tag|>")
        yield from self.reader.skip()
        if (yield from self.reader.accept("[")):
            yield from self._calls()
        else:
            self.no_call()
        yield from self.reader.rest(self.add_content)

    def _calls(self) -> Reading[None]:
        while True:
            yield from self.reader.skip()
            is_object = (yield from self.reader.peek()) == "{"
            call = self.call_object(self.tool_names) if is_object else self._python_call()
            if (yield from call) is not CallEnd.COMPLETE:
                return
            self.reader.record()
            yield from self.reader.skip()
            if not (yield from self.reader.accept(",")):
                self.reader.forget()
                yield from self.close("<|python_end|>")
                return

    def _python_call(self) -> Reading[CallEnd]:
        name = yield from self.reader.name()
        if name not in self.tool_names or not (yield from self.reader.accept("(")):
            return self.no_call()
        yield from self.reader.skip()
        if (yield from self.reader.accept(")")):
            self.call_without_arguments(name)
            return CallEnd.COMPLETE
        key = yield from self._key()
        if not key:
            return self.no_call()
        return (yield from self._python_arguments(key, self._pass_arguments(self._begin(name))))

    def _key(self) -> Reading[str]:
        """The name of an argument and what comes before its value; "" where they are not there."""
        key = yield from self.reader.name()
        yield from self.reader.skip()
        return key if key and (yield from self.reader.accept("=")) else ""

    def _python_arguments(self, key: str, pass_on: Callable[[str], None]) -> Reading[CallEnd]:
        """Pass on the arguments of a call, of which the first ``key`` was read."""
        pass_on("{")
        while key:
            pass_on(f"{json.dumps(key)}: ")
            if not (yield from pass_literal(self.reader, pass_on)):
                break
            self.reader.record()
            yield from self.reader.skip()
            has_next = yield from self.reader.accept(",")
            yield from self.reader.skip()
            if (yield from self.reader.accept(")")):
                self.reader.forget()
                pass_on("}")
                return CallEnd.COMPLETE
            key = (yield from self._key()) if has_next else ""
            pass_on(", " if key else self.reader.recorded())
        self.reader.forget()
        yield from self.reader.until(self.ends, pass_on)
        return CallEnd.BROKEN


class HarmonyToolParser(TextToolParser):
    """gpt-oss: a message to ``functions.NAME``, whose content is the arguments.

    The model ends its answer with a call, so there is usually one. The recipient may come before
    the channel, and the type of the content may be missing.
    """

    call_format = CallFormat(
        before_name="<|channel|>commentary to=functions.",
        before_arguments=" <|constrain|>json<|message|>",
        after="",
        separator="<|end|><|start|>assistant",
    )
    markers = harmony.MARKERS
    stops = harmony.STOPS
    ends = harmony.ENDS

    def parse(self) -> Reading[None]:
        self.reader.record()
        if (yield from self.reader.accept(harmony.RECIPIENT)):
            yield from self._message(harmony.RECIPIENT)
        self.reader.forget()
        while marker := (yield from self.content_until(*harmony.BEGINS)):
            yield from self._message(marker)

    def _message(self, begun: str) -> Reading[None]:
        header = yield from harmony.read_header(self.reader, begun)
        name = None if header is None else header.tool_name
        if name is None:
            self.no_call()
            return
        yield from self.reader.skip()
        if (yield from self.reader.peek()) == "{":
            if (yield from self.arguments(name)) is CallEnd.COMPLETE:
                yield from self.close(*harmony.ENDS)
        elif self.reader.at_end or (yield from self.reader.accept(*harmony.ENDS)):
            self.call_without_arguments(name)
        else:
            self.no_call()
