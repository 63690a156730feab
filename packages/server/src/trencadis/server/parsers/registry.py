"""Finds parsers by name: built in, from another package, or ``module:Class``."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from trencadis.engine import ConfigError
from trencadis.server.parsers.reasoning_parsers import ReasoningParser
from trencadis.server.parsers.tool_parser import ToolParser

_TOOLS = "trencadis.server.parsers.tool_parsers"
_REASONING = "trencadis.server.parsers.reasoning_parsers"

TOOL_PARSERS: Mapping[str, str] = {
    "hermes": f"{_TOOLS}:HermesToolParser",
    "llama3_json": f"{_TOOLS}:LlamaToolParser",
    "mistral": f"{_TOOLS}:MistralToolParser",
    "deepseek_v3": f"{_TOOLS}:DeepSeekToolParser",
    "granite": f"{_TOOLS}:GraniteToolParser",
    "internlm": f"{_TOOLS}:InternLmToolParser",
    "pythonic": f"{_TOOLS}:PythonicToolParser",
    "openai": f"{_TOOLS}:HarmonyToolParser",
}
"""The built-in tool parsers, by vLLM's names. To add one, write a class in `tool_parsers` and add a
line here, and its markers in `chat_template`."""

REASONING_PARSERS: Mapping[str, str] = {
    "qwen3": f"{_REASONING}:Qwen3ReasoningParser",
    "deepseek_r1": f"{_REASONING}:DeepSeekReasoningParser",
    "granite": f"{_REASONING}:GraniteReasoningParser",
    "openai_gptoss": f"{_REASONING}:HarmonyReasoningParser",
}
"""The built-in reasoning parsers, by vLLM's names."""

TOOL_PARSER_GROUP = "trencadis.tool_parsers"
REASONING_PARSER_GROUP = "trencadis.reasoning_parsers"
"""The entry point groups in which other packages register their parsers."""


def find_tool_parser(name: str) -> type[ToolParser]:
    """The class of a tool parser: a key of `TOOL_PARSERS`, an entry point, or ``module:Class``.

    Raises `ConfigError`.
    """
    found = _load(name, "tool_call_parser", TOOL_PARSERS, TOOL_PARSER_GROUP)
    if not isinstance(found, type) or not issubclass(found, ToolParser):
        raise ConfigError(
            f"tool_call_parser {name!r} is not a ToolParser: derive it from that",
            "tool_call_parser",
        )
    return found


def find_reasoning_parser(name: str) -> type[ReasoningParser]:
    """The class of a reasoning parser, as `find_tool_parser` finds those of tools."""
    found = _load(name, "reasoning_parser", REASONING_PARSERS, REASONING_PARSER_GROUP)
    if not isinstance(found, type) or not issubclass(found, ReasoningParser):
        raise ConfigError(
            f"reasoning_parser {name!r} is not a ReasoningParser: derive it from that",
            "reasoning_parser",
        )
    return found


def _load(name: str, setting: str, known: Mapping[str, str], group: str) -> Any:
    path = known.get(name, name)
    load: Callable[[], Any]
    if ":" in path:
        load = lambda: pkgutil.resolve_name(path)  # noqa: E731
    else:
        from importlib.metadata import entry_points  # noqa: PLC0415  takes tens of milliseconds

        registered = {point.name: point for point in entry_points(group=group)}
        if name not in registered:
            names = ", ".join(sorted({*known, *registered}))
            raise ConfigError(
                f"{setting} {name!r} is unknown: use one of {names}, module:Class, auto or none",
                setting,
            )
        load = registered[name].load
    try:
        return load()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{setting} {name!r} cannot be imported: {error}", setting) from error
