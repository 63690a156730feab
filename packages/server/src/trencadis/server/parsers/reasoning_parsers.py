"""The reasoning parsers: what a model writes before its answer, for each family of models.

Whether an answer begins inside of the reasoning depends on the prompt: some chat templates open it,
and close it again where the client has turned it off.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from trencadis.server.parsers import harmony
from trencadis.server.parsers.events import Content, Event, Reasoning
from trencadis.server.parsers.text_reader import Reading
from trencadis.server.parsers.tool_parser import TextParser


class ReasoningParser(ABC):
    """Separates the reasoning from the text of one answer, as events of both.

    ``begins`` and ``ends`` are the markers around it. ``is_open``: whether the prompt ends inside
    of the reasoning (True) or after it (False); None where it says nothing. ``always_reasons``:
    None means True. ``before_answer``: what the model writes before an answer that is not a call.
    ``markers``: what the parser looks for besides that is a special token in some models.
    ``stops``, `push` and `finish`: see `ToolParser`.
    """

    begins: ClassVar[tuple[str, ...]]
    ends: ClassVar[tuple[str, ...]]
    always_reasons: ClassVar[bool] = False
    before_answer: ClassVar[str] = ""
    markers: ClassVar[tuple[str, ...]] = ()
    stops: ClassVar[tuple[str, ...]] = ()

    def __init__(self, is_open: bool | None = None) -> None:
        self.is_open = True if is_open is None and self.always_reasons else is_open

    @classmethod
    def is_open_after(cls, prompt_end: str) -> bool | None:
        """Whether a prompt with this end is in the reasoning or after it; None: unknown."""
        if prompt_end.endswith(cls.begins):
            return True
        if prompt_end.endswith(cls.ends):
            return False
        return True if cls.always_reasons else None

    @abstractmethod
    def push(self, text: str) -> list[Event]:
        """Add a delta; returns what it makes known."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The text is complete: returns what was held back."""


class Qwen3ReasoningParser(TextParser, ReasoningParser):
    """Qwen 3 and most others: ``<think>`` at the beginning, by the prompt or the model."""

    begins: ClassVar[tuple[str, ...]] = ("<think>",)
    ends: ClassVar[tuple[str, ...]] = ("</think>",)

    def __init__(self, is_open: bool | None = None) -> None:
        TextParser.__init__(self)
        ReasoningParser.__init__(self, is_open)

    def parse(self) -> Reading[None]:
        if self.is_open is not False:
            self.reader.record()
            yield from self.reader.skip()
            if (yield from self.reader.accept(*self.begins)) or self.is_open:
                self.reader.forget()
                yield from self.reader.skip()
                yield from self.reader.until(self.ends, self._add_reasoning)
                yield from self.reader.skip()
            else:
                self.add_content(self.reader.recorded())
                self.reader.forget()
        yield from self.reader.rest(self.add_content)

    def _add_reasoning(self, text: str) -> None:
        self.events.append(Reasoning(text))


class DeepSeekReasoningParser(Qwen3ReasoningParser):
    """DeepSeek R1 and its distillations: every answer begins with reasoning.

    The first tag may be missing. An answer without the second one is reasoning alone.
    """

    always_reasons = True


class GraniteReasoningParser(Qwen3ReasoningParser):
    """Granite 3.2, which separates with sentences, and 3.3, which has tags."""

    begins = ("Here is my thought process:", "Here's my thought process:", "<think>")
    ends = ("Here is my response:", "Here's my response:", "</think>")


class HarmonyReasoningParser(TextParser, ReasoningParser):
    """gpt-oss: an answer is several messages, and each header says what its message is.

    Those of the channel ``analysis`` are reasoning; those for the user, of ``final`` and
    ``commentary``, are content. Messages that call tools are passed on with their headers, for
    `HarmonyToolParser`. Calls of tools that the model was trained with, as ``python``, are
    reasoning.
    """

    begins: ClassVar[tuple[str, ...]] = ("<|channel|>analysis<|message|>",)
    ends: ClassVar[tuple[str, ...]] = ("<|end|><|start|>assistant",)
    before_answer = "<|channel|>final<|message|>"
    markers = harmony.MARKERS
    stops = harmony.STOPS

    def __init__(self, is_open: bool | None = None) -> None:
        TextParser.__init__(self)
        ReasoningParser.__init__(self, is_open)
        self._passed: set[type[Content | Reasoning]] = set()

    @classmethod
    def is_open_after(cls, prompt_end: str) -> bool | None:
        if prompt_end.endswith(cls.begins):
            return True
        return False if prompt_end.endswith(cls.before_answer) else None

    def parse(self) -> Reading[None]:
        marker = yield from self._first_marker()
        while marker:
            marker = yield from self._next_marker(marker)

    def _first_marker(self) -> Reading[str]:
        if self.is_open is not None:
            return (yield from self._content(Reasoning if self.is_open else Content))
        self.reader.record()
        begin = yield from self.reader.accept(*harmony.BEGINS, harmony.RECIPIENT)
        return begin or (yield from self._content(Content))

    def _next_marker(self, marker: str) -> Reading[str]:
        """Read up to the marker after ``marker``, and that; returns it, "" at the end."""
        if marker not in harmony.ENDS:
            return (yield from self._message(marker))
        self.reader.record()
        begin = yield from self.reader.accept(*harmony.BEGINS)
        return begin or (yield from self._content(Content))

    def _message(self, begun: str) -> Reading[str]:
        header = yield from harmony.read_header(self.reader, begun)
        text = self.reader.recorded()
        if header is None:
            # The end of the answer may cut a header: it is not content.
            return (yield from self._content(Content, "" if self.reader.at_end else text))
        if header.tool_name is not None:
            return (yield from self._call(text if begun == "<|start|>" else _ROLE + text))
        is_reasoning = header.channel == "analysis" or bool(header.recipient)
        return (yield from self._content(Reasoning if is_reasoning else Content))

    def _content(self, kind: type[Content | Reasoning], before: str = "") -> Reading[str]:
        """Pass ``before`` and the content of a message on; messages of a kind on lines apart."""
        is_first = True

        def pass_on(text: str) -> None:
            nonlocal is_first
            self.events.append(kind(f"\n{text}" if is_first and kind in self._passed else text))
            self._passed.add(kind)
            is_first = False

        self.reader.forget()
        if before:
            pass_on(before)
        _, marker = yield from self.reader.until(_MARKERS, pass_on)
        self.reader.record(marker)
        return marker

    def _call(self, header: str) -> Reading[str]:
        """Pass a call on with its header and an end."""
        self.reader.forget()
        self.add_content(header)
        _, marker = yield from self.reader.until(_MARKERS, self.add_content)
        if marker:
            self.add_content(marker if marker in harmony.ENDS else "<|call|>")
        self.reader.record(marker)
        return marker


_ROLE = "<|start|>assistant"
_MARKERS = (*harmony.BEGINS, *harmony.ENDS)
