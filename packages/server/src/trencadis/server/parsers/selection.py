"""Which parsers read the answers of a model: those that were named, or those of its template."""

from __future__ import annotations

import logging

import attrs

from trencadis.engine import ConfigError
from trencadis.server.parsers.chat_template import Found, TemplateTraits, template_traits
from trencadis.server.parsers.reasoning_parsers import ReasoningParser
from trencadis.server.parsers.registry import find_reasoning_parser, find_tool_parser
from trencadis.server.parsers.tool_parser import ToolParser

logger = logging.getLogger("trencadis.server")

AUTO = "auto"
NONE = "none"


@attrs.frozen
class ParserSelection:
    """The parsers of a served model, None where there is none, and the traits of its template."""

    tools: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None
    traits: TemplateTraits = attrs.field(factory=TemplateTraits)


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise `ConfigError` for a parser that does not exist. Needs no model."""
    if tool_call_parser not in (AUTO, NONE):
        find_tool_parser(tool_call_parser)
    if reasoning_parser not in (AUTO, NONE):
        find_reasoning_parser(reasoning_parser)


def select_parsers(
    tool_call_parser: str, reasoning_parser: str, template: str | None, *, needs_tools: bool
) -> ParserSelection:
    """The parsers of these names, for a model with this chat template; logs those it chooses.

    ``auto``: what the template indicates. ``none``: no parser. Raises `ConfigError` for a name that
    is unknown and, with ``needs_tools``, where there is no tool parser.
    """
    traits = template_traits(template or "")
    tools = _chosen(tool_call_parser, "tool call", traits.tool_parser)
    reasoning = _chosen(reasoning_parser, "reasoning", traits.reasoning_parser)
    if needs_tools and tools is None:
        raise ConfigError(
            "enable_auto_tool_choice needs a tool call parser, and this model's chat template "
            "indicates none: name one with --tool-call-parser",
            "enable_auto_tool_choice",
        )
    return ParserSelection(
        tools=None if tools is None else find_tool_parser(tools),
        reasoning=None if reasoning is None else find_reasoning_parser(reasoning),
        traits=traits,
    )


def _chosen(name: str, kind: str, found: Found | None) -> str | None:
    if name == NONE:
        return None
    if name != AUTO:
        return name
    if found is None:
        return None
    flag = f"--{kind.replace(' ', '-')}-parser"
    logger.info(
        "The %s parser is %s, because the chat template has %s (%s none: no parser)",
        *(kind, found.name, found.marker, flag),
    )
    return found.name
