"""The reasoning parsers: what a model writes before its answer, for each family of models.

Whether an answer begins inside of the reasoning depends on the prompt: some chat templates open it,
and close it again where the client has turned it off.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from trencadis.server.parsers.events import Event, Reasoning
from trencadis.server.parsers.text_reader import Reading
from trencadis.server.parsers.tool_parser import TextParser


class ReasoningParser(ABC):
    """Separates the reasoning from the text of one answer, as events of both.

    ``begins`` and ``ends`` are the markers around it. ``is_open``: whether the prompt ends inside
    of the reasoning (True) or after it (False); None where it says nothing. ``always_reasons``:
    None means True. `push` and `finish`: see `ToolParser`.
    """

    begins: ClassVar[tuple[str, ...]]
    ends: ClassVar[tuple[str, ...]]
    always_reasons: ClassVar[bool] = False

    def __init__(self, is_open: bool | None = None) -> None:
        self.is_open = True if is_open is None and self.always_reasons else is_open

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
