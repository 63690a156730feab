"""What a model's chat template shows: which parsers read its answers, and how it takes calls."""

from __future__ import annotations

import re

import attrs

_TOOL_MARKERS = (
    # the first that fits: the markers of the others are in no template of it
    ("openai", re.compile(r"<\|channel\|>commentary")),
    ("deepseek_v3", re.compile("<｜tool▁calls▁begin｜>")),
    ("mistral", re.compile(r"\[TOOL_CALLS\]")),
    ("granite", re.compile(r"<\|tool_call\|>")),
    ("internlm", re.compile(r"<\|action_start\|>")),
    ("pythonic", re.compile(r"\[func_name1\(params_name1=")),
    ("hermes", re.compile("<tool_call>")),
    ("llama3_json", re.compile(r'"parameters": dictionary of argument name')),
)
_OTHER_FORMATS = re.compile("<function=|<arg_key>|<parameter=")
"""Calls between ``<tool_call>`` tags that are not JSON, as of Qwen3-Coder and GLM."""

_REASONING_MARKERS = (
    ("openai_gptoss", re.compile(r"<\|channel\|>analysis")),
    ("granite", re.compile(r"Here(?: is|'s) my thought process:")),
    ("qwen3", re.compile("</?think>")),
)

_TEXT_ARGUMENTS = re.compile(r"arguments['\"]?\]?\s*\+")
_JSON_ARGUMENTS = re.compile(r"arguments['\"]?\]?\s*\|")
_THINKING = re.compile(r"message\.thinking\b")
_TOOLS = re.compile(r"\btools\b")


@attrs.frozen
class Found:
    """A parser, and the text of the template that indicates it."""

    name: str
    marker: str


@attrs.frozen
class TemplateTraits:
    """How a template takes conversations with tools.

    ``tool_parser``, ``reasoning_parser``: the parsers for its model's answers; None if it
    indicates none. ``takes_tools``: whether it shows tools to the model. ``text_arguments``: it
    joins the arguments of earlier calls with its own text, so they have to be JSON text; otherwise
    objects. ``has_thinking``: it takes the reasoning before earlier calls as ``thinking``; it
    rejects content beside that if ``has_thinking_alone``, as that of gpt-oss.
    """

    tool_parser: Found | None = None
    reasoning_parser: Found | None = None
    takes_tools: bool = False
    text_arguments: bool = False
    has_thinking: bool = False
    has_thinking_alone: bool = False


def template_traits(template: str) -> TemplateTraits:
    """The traits of a chat template in Jinja; "" for a model without one."""
    tools = _first(_TOOL_MARKERS, template)
    if tools is not None and tools.name == "hermes" and _OTHER_FORMATS.search(template):
        tools = None
    reasoning = _first(_REASONING_MARKERS, template)
    is_harmony = reasoning is not None and reasoning.name == "openai_gptoss"
    has_thinking = _THINKING.search(template) is not None
    has_text = _TEXT_ARGUMENTS.search(template) and not _JSON_ARGUMENTS.search(template)
    return TemplateTraits(
        tool_parser=tools,
        reasoning_parser=reasoning,
        takes_tools=_TOOLS.search(template) is not None,
        text_arguments=bool(has_text),
        has_thinking=has_thinking,
        has_thinking_alone=has_thinking and is_harmony,
    )


def _first(markers: tuple[tuple[str, re.Pattern[str]], ...], template: str) -> Found | None:
    for name, pattern in markers:
        found = pattern.search(template)
        if found is not None:
            return Found(name, found[0])
    return None
