"""One answer as a row of blocks: reasoning, text and tool calls, in the order of the answer.

The APIs whose answers are lists, Responses and Messages, are written from it. `AnswerWriter` has
the same of an answer as the fields of one message.
"""

from __future__ import annotations

import uuid
from typing import Literal, TypeAlias

import attrs

from trencadis.server.generation.answer_plan import AnswerPlan
from trencadis.server.parsers.events import CallBegin, Content, Event, Reasoning
from trencadis.server.parsers.tool_parser import ToolParser

BlockKind = Literal["reasoning", "text", "call"]


@attrs.define
class Block:
    """A part of an answer. ``call_id`` and ``name`` are those of a call, whose text is arguments.

    ``index``: its number in the answer. ``id``: random hexadecimal digits.
    """

    index: int
    kind: BlockKind
    call_id: str = ""
    name: str = ""
    id: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    parts: list[str] = attrs.field(factory=list)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.parts)


@attrs.frozen
class BlockBegin:
    """A block begins; its text follows."""

    block: Block


@attrs.frozen
class BlockText:
    """New text of the current block."""

    block: Block
    text: str


@attrs.frozen
class BlockEnd:
    """The current block has ended."""

    block: Block


BlockChange: TypeAlias = BlockBegin | BlockText | BlockEnd


class AnswerBlocks:
    """Follows one answer to a prompt with this plan. Each block ends before the next one begins."""

    def __init__(self, plan: AnswerPlan) -> None:
        self.blocks: list[Block] = []
        self._parser = plan.new_parser()
        self._new_call_id = (plan.tools or ToolParser).new_call_id
        self._shows_reasoning = plan.shows_reasoning
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        """Whether there is a call so far."""
        return any(block.kind == "call" for block in self.blocks)

    def add(self, text: str, *, is_last: bool) -> list[BlockChange]:
        """Add generated text; returns what changes, in order."""
        events = self._parser.push(text)
        if is_last:
            events += self._parser.finish()
        changes: list[BlockChange] = []
        for event in events:
            self._add_event(event, changes)
        if is_last:
            self._end(changes)
        return changes

    def _add_event(self, event: Event, changes: list[BlockChange]) -> None:
        if isinstance(event, CallBegin):
            self._begin("call", changes, call_id=self._new_call_id(), name=event.name)
        elif isinstance(event, Content):
            self._add_text("text", event.text, changes)
        elif not isinstance(event, Reasoning):
            self._add_text("call", event.text, changes)
        elif self._shows_reasoning:
            self._add_text("reasoning", event.text, changes)

    def _add_text(self, kind: BlockKind, text: str, changes: list[BlockChange]) -> None:
        if not self._is_open or self.blocks[-1].kind != kind:
            self._begin(kind, changes)
        block = self.blocks[-1]
        block.parts.append(text)
        changes.append(BlockText(block, text))

    def _begin(
        self, kind: BlockKind, changes: list[BlockChange], *, call_id: str = "", name: str = ""
    ) -> None:
        self._end(changes)
        self.blocks.append(Block(len(self.blocks), kind, call_id, name))
        self._is_open = True
        changes.append(BlockBegin(self.blocks[-1]))

    def _end(self, changes: list[BlockChange]) -> None:
        if self._is_open:
            self._is_open = False
            changes.append(BlockEnd(self.blocks[-1]))
