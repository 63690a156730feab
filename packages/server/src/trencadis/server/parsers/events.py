"""What a parser finds in the text of an answer, in order."""

from __future__ import annotations

from typing import TypeAlias

import attrs


@attrs.frozen
class Content:
    """Text for the reader."""

    text: str


@attrs.frozen
class Reasoning:
    """Text that the model wrote before its answer."""

    text: str


@attrs.frozen
class CallBegin:
    """A tool call. Its calls are numbered from 0 in each answer."""

    index: int
    name: str


@attrs.frozen
class CallArguments:
    """More of the arguments of call ``index``: JSON text as the model wrote it."""

    index: int
    text: str


Event: TypeAlias = Content | Reasoning | CallBegin | CallArguments
