"""YAML as nodes that know their lines, so that a fault in a file can be reported with its line.

The part of YAML that settings need: mappings, lists and scalars. Anchors, aliases and tags are
rejected: with them a file of some lines can stand for gigabytes, or for objects.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import attrs
import yaml

MAX_DEPTH = 16
"""Most mappings and lists inside each other."""

_MAX_NUMBER = 64
"""Longest number, in characters."""

_INTEGER = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
    **dict.fromkeys(("null", "~", ""), None),
}
"""What plain words stand for, as in YAML 1.1, which vLLM's configuration files are read as."""


class YamlFault(Exception):
    """A text that cannot be read on; ``line`` counts from 1."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


@attrs.frozen
class YamlScalar:
    """A text, a number, True, False or None. ``is_plain``: without quotes."""

    line: int
    text: str
    is_plain: bool

    @property
    def value(self) -> str | int | float | bool | None:
        """What the text stands for."""
        if not self.is_plain:
            return self.text
        word = self.text.lower()
        if word in _WORDS:
            return _WORDS[word]
        if len(self.text) <= _MAX_NUMBER:
            if _INTEGER.fullmatch(self.text):
                return int(self.text)
            if _FLOAT.fullmatch(self.text):
                return float(self.text)
        return self.text


@attrs.frozen
class YamlList:
    """A list of nodes."""

    line: int
    items: tuple[YamlNode, ...]

    @property
    def value(self) -> list[Any]:
        """The values of the items."""
        return [item.value for item in self.items]


@attrs.frozen
class YamlMapping:
    """Pairs of a key and a node, in their order. A key may occur more than once."""

    line: int
    pairs: tuple[tuple[YamlScalar, YamlNode], ...]

    @property
    def value(self) -> dict[str, Any]:
        """The values by the texts of the keys."""
        return {key.text: node.value for key, node in self.pairs}


YamlNode: TypeAlias = "YamlScalar | YamlList | YamlMapping"


def read_yaml(text: str) -> YamlNode | None:
    """The document of a text; None for an empty one. Raises `YamlFault`."""
    events = yaml.parse(text, Loader=yaml.SafeLoader)
    try:
        next(events)  # the start of the stream
        if isinstance(next(events), yaml.StreamEndEvent):
            return None
        node = _node(next(events), events, 0)
        next(events)  # the end of the document
        further = next(events)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        raise YamlFault(line, f"no YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # a character that YAML has not
        raise YamlFault(1, f"no YAML: {error}") from None
    if not isinstance(further, yaml.StreamEndEvent):
        raise YamlFault(_line(further), "a second document begins here: write one")
    return node


def _node(event: Any, events: Iterator[Any], depth: int) -> YamlNode:
    """The node that begins with an event; takes its other events from ``events``."""
    line = _line(event)
    if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
        raise YamlFault(line, "anchors and aliases (& and *) are rejected: write the value again")
    if event.tag is not None:
        raise YamlFault(line, f"tags are rejected: leave out {event.tag}")
    if isinstance(event, yaml.ScalarEvent):
        return YamlScalar(line, event.value, event.style is None)
    if depth >= MAX_DEPTH:
        raise YamlFault(line, f"more than {MAX_DEPTH} mappings and lists are inside each other")
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            items.append(_node(event, events, depth + 1))
        return YamlList(line, tuple(items))
    pairs = []
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _node(event, events, depth + 1)
        if not isinstance(key, YamlScalar):
            raise YamlFault(key.line, "a key must be a text")
        pairs.append((key, _node(next(events), events, depth + 1)))
    return YamlMapping(line, tuple(pairs))


def _line(event: Any) -> int:
    line: int = event.start_mark.line
    return line + 1
