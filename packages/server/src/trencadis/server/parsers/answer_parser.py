"""The parsers of one answer in a row: reasoning first, then calls in what follows it."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from trencadis.server.parsers.events import CallArguments, CallBegin, Content, Event
from trencadis.server.parsers.reasoning_parsers import ReasoningParser
from trencadis.server.parsers.tool_parser import ToolParser


@attrs.define
class AnswerParser:
    """Reads the text of one answer; `push` and `finish` as in `ToolParser`.

    Without a parser for them, reasoning and calls are content. ``max_calls``: later calls of the
    answer are left out; None for no limit.
    """

    reasoning: ReasoningParser | None = None
    tools: ToolParser | None = None
    max_calls: int | None = None

    def push(self, text: str) -> list[Event]:
        """Add a delta; returns what it makes known."""
        if not text:
            return []
        found = [Content(text)] if self.reasoning is None else self.reasoning.push(text)
        return self._within_limit(self._after_reasoning(found))

    def finish(self) -> list[Event]:
        """The text is complete: returns what was held back."""
        found = self._after_reasoning(() if self.reasoning is None else self.reasoning.finish())
        if self.tools is not None:
            found += self.tools.finish()
        return self._within_limit(found)

    def _after_reasoning(self, events: Iterable[Event]) -> list[Event]:
        if self.tools is None:
            return list(events)
        found: list[Event] = []
        for event in events:
            found += self.tools.push(event.text) if isinstance(event, Content) else [event]
        return found

    def _within_limit(self, events: list[Event]) -> list[Event]:
        limit = self.max_calls
        if limit is None:
            return events
        return [
            event
            for event in events
            if not isinstance(event, (CallBegin, CallArguments)) or event.index < limit
        ]
