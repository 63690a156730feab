"""What every parser of tool calls is, and the steps that the formats share."""

from __future__ import annotations

import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import ClassVar

import attrs

from trencadis.server.parsers.events import CallArguments, CallBegin, Content, Event
from trencadis.server.parsers.json_text import JsonScan, read_string, read_value
from trencadis.server.parsers.text_reader import Reading, TextReader

_CLOSERS = re.compile(r"[ \t\r\n}\]]*")
"""Whitespace, and brackets that a model closes once too often."""


@attrs.frozen(kw_only=True)
class CallFormat:
    """How a model writes calls, for calls that are forced: the texts around name and arguments.

    A call is ``before_name``, its name, ``before_arguments``, its arguments, ``after``. Calls are
    between ``begin`` and ``end``, with ``separator`` between them.
    """

    begin: str = ""
    before_name: str
    before_arguments: str
    after: str
    separator: str = ""
    end: str = ""


class ToolParser(ABC):
    """Finds tool calls in the text of one answer.

    `push` takes the text in deltas, cut anywhere, and returns what is known with it; `finish`
    returns the rest. Neither raises for any text. ``call_format`` is the format of forced calls;
    the parser reads it too. ``tool_names`` are the names of the tools that may be called.
    """

    call_format: ClassVar[CallFormat]
    markers: ClassVar[tuple[str, ...]] = ()
    """What the parser looks for that is a special token in some models."""
    stops: ClassVar[tuple[str, ...]] = ()
    """Special tokens that end an answer, also where the model's files do not name them."""

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        self.tool_names = frozenset(tool_names)

    @abstractmethod
    def push(self, text: str) -> list[Event]:
        """Add a delta; returns what it makes known."""

    @abstractmethod
    def finish(self) -> list[Event]:
        """The text is complete: returns what was held back."""

    @staticmethod
    def new_call_id() -> str:
        """An id for a call."""
        return f"call_{uuid.uuid4().hex[:24]}"


class TextParser(ABC):
    """Runs `parse`, a generator that reads ``reader`` and collects events, with each delta."""

    def __init__(self) -> None:
        self.reader = TextReader()
        self.events: list[Event] = []
        self._reading: Reading[None] | None = None

    @abstractmethod
    def parse(self) -> Reading[None]:
        """Read the whole text."""

    def push(self, text: str) -> list[Event]:
        """Add a delta; returns what it makes known."""
        self.reader.feed(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """The text is complete: returns what was held back."""
        self.reader.end()
        return self._advance()

    def add_content(self, text: str) -> None:
        """Add text for the reader, if there is any."""
        if text:
            self.events.append(Content(text))

    def _advance(self) -> list[Event]:
        if self._reading is None:
            self._reading = self.parse()
        next(self._reading, None)
        events, self.events = self.events, []
        return events


class CallEnd(Enum):
    """How the reading of a call ended."""

    COMPLETE = auto()
    BROKEN = auto()
    """It has begun, but its arguments are not JSON. They were passed on, and all up to a marker."""
    NO_CALL = auto()
    """What was read is not a call; it has been passed on as content."""


@attrs.define
class _FoundCall:
    """What is known of a call object. ``arguments`` are those that had to wait for the name."""

    name: str | None = None
    arguments: str = "{}"
    has_begun: bool = False
    is_broken: bool = False


class TextToolParser(TextParser, ToolParser):
    """A tool parser whose formats have JSON arguments.

    A call that is malformed before its arguments begin is content. Later the client has its
    beginning, so the arguments go on as the model wrote them up to one of ``ends``: they are then
    no JSON, which the OpenAI API allows.
    """

    ends: ClassVar[tuple[str, ...]]
    """Markers that end malformed arguments."""

    def __init__(self, tool_names: Collection[str] = ()) -> None:
        TextParser.__init__(self)
        ToolParser.__init__(self, tool_names)
        self._num_calls = 0

    def content_until(self, *markers: str) -> Reading[str]:
        """Pass content on up to a marker, from which on text is recorded; "" at the end."""
        space, marker = yield from self.reader.until(markers, self.add_content)
        self.reader.record(space + marker)
        return marker

    def no_call(self) -> CallEnd:
        """What was recorded is not a call, but content."""
        self.add_content(self.reader.recorded())
        self.reader.forget()
        return CallEnd.NO_CALL

    def call_object(self, names: Collection[str] | None = None) -> Reading[CallEnd]:
        """Read ``{"name": …, "arguments": {…}}``, in any order, or with ``parameters``.

        Other keys are ignored. A call whose name is not in ``names`` is none.
        """
        found = _FoundCall()
        separator = yield from self.reader.accept("{")
        is_whole = bool(separator)
        while is_whole and separator in ("{", ","):
            yield from self.reader.skip()
            if (yield from self.reader.accept("}")):
                break
            is_whole = yield from self._field(found, names)
            if found.is_broken:
                return CallEnd.BROKEN
            yield from self.reader.skip()
            separator = yield from self.reader.accept(",", "}")
            is_whole = is_whole and bool(separator)
        if found.has_begun:
            return CallEnd.COMPLETE
        if not is_whole or found.name is None:
            return self.no_call()
        self._pass_arguments(self._begin(found.name))(found.arguments)
        return CallEnd.COMPLETE

    def _field(self, found: _FoundCall, names: Collection[str] | None) -> Reading[bool]:
        """Read a key and its value; False for what is none, or no part of a call."""
        key = yield from read_string(self.reader)
        yield from self.reader.skip()
        if key is None or not (yield from self.reader.accept(":")):
            return False
        yield from self.reader.skip()
        if key == "name" and found.name is None:
            found.name = yield from read_string(self.reader)
            return bool(found.name) and (names is None or found.name in names)
        if key in ("arguments", "parameters") and not found.has_begun:
            return (yield from self._arguments_field(found))
        return (yield from read_value(self.reader)) is not None

    def _arguments_field(self, found: _FoundCall) -> Reading[bool]:
        if found.name is not None and (yield from self.reader.peek()) == "{":
            found.has_begun = True
            found.is_broken = (yield from self.arguments(found.name)) is CallEnd.BROKEN
            return True
        text = yield from self._held_arguments()
        found.arguments = text or ""
        return text is not None

    def arguments(self, name: str) -> Reading[CallEnd]:
        """Begin a call whose arguments, a JSON object, come next, and pass them on."""
        pass_on = self._pass_arguments(self._begin(name))
        scan = JsonScan()
        yield from self.reader.pass_on(scan.step, pass_on)
        if scan.done:
            return CallEnd.COMPLETE
        yield from self.reader.until(self.ends, pass_on)
        return CallEnd.BROKEN

    def call_without_arguments(self, name: str) -> None:
        """Add a call whose arguments are an empty object."""
        self._pass_arguments(self._begin(name))("{}")

    def close(self, *ends: str) -> Reading[None]:
        """Read what closes a call or a list of calls."""
        yield from self.reader.skip(_CLOSERS)
        if ends:
            yield from self.reader.accept(*ends)
            yield from self.reader.skip()

    def call_list(self) -> Reading[CallEnd]:
        """Read call objects between ``[``, which was read, and ``]``."""
        while True:
            yield from self.reader.skip()
            end = yield from self.call_object()
            if end is not CallEnd.COMPLETE:
                return end
            self.reader.record()
            yield from self.reader.skip()
            if not (yield from self.reader.accept(",")):
                yield from self.reader.skip(_CLOSERS)
                self.reader.forget()
                return CallEnd.COMPLETE

    def _held_arguments(self) -> Reading[str | None]:
        """Arguments that cannot be passed on yet: the name is unknown, or they are JSON in a text.

        None for what is not an object.
        """
        quoted = (yield from self.reader.peek()) == '"'
        text = yield from (read_string(self.reader) if quoted else read_value(self.reader))
        if text == "null" or (quoted and text is not None and not text.strip()):
            return "{}"
        return text if text is not None and text.lstrip().startswith("{") else None

    def _begin(self, name: str) -> int:
        self.reader.forget()
        self.events.append(CallBegin(self._num_calls, name))
        self._num_calls += 1
        return self._num_calls - 1

    def _pass_arguments(self, index: int) -> Callable[[str], None]:
        return lambda text: self.events.append(CallArguments(index, text))
