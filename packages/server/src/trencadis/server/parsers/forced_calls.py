"""Grammars that force an answer to be tool calls, in the format that a parser reads.

Each call has the name of a tool, and arguments that the JSON schema of its parameters accepts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from trencadis.engine import StructuredOutput
from trencadis.server.parsers.closed_schemas import ANNOTATIONS, closed, each_schema
from trencadis.server.parsers.tool_parser import CallFormat

_WHITESPACE = r"[ \n]{0,40}"
"""Whitespace between the tokens of arguments, as in other structured outputs."""


@attrs.frozen
class Thought:
    """Reasoning that comes before what is forced: its markers, and whether the prompt opens it.

    ``before_answer``: what the model writes before an answer that is not a call.
    """

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    is_open: bool
    before_answer: str = ""


SpecialTokens = Mapping[str, int]
"""Markers that are special tokens of the model, with their ids. No text has them, so a grammar
that only had their text would forbid them."""


def forced_calls(
    tools: Mapping[str, Mapping[str, Any]],
    call_format: CallFormat,
    *,
    max_calls: int | None = None,
    thought: Thought | None = None,
    or_json: Mapping[str, Any] | bool | None = None,
    special: SpecialTokens = MappingProxyType({}),
) -> StructuredOutput:
    """At least one call of one of ``tools``, names with the schemas of their parameters.

    ``max_calls``: 1, or None for no limit. ``or_json``: JSON that this schema accepts may come in
    place of the calls. ``special``: markers that the model writes as special tokens.
    Raises `InvalidRequest` for schemas that are too long.
    """
    begin = _literal(call_format.begin, special)
    end = _literal(call_format.end, special)
    separator = _literal(call_format.separator, special)
    after = _literal(call_format.after, special)
    more = "" if max_calls == 1 else f" ({separator} call)*"
    rules = [
        f"calls: {begin} call{more} {end}".rstrip(),
        f"call: {' | '.join(f'call_{number}' for number in range(len(tools)))}",
    ]
    for number, (name, schema) in enumerate(tools.items()):
        before = f"{call_format.before_name}{name}{call_format.before_arguments}"
        rules += [
            f"call_{number}: {_literal(before, special)} arguments_{number} {after}",
            f"arguments_{number}: %json {json_form(closed(_without_annotations(schema)))}",
        ]
    if or_json is None:
        return StructuredOutput(grammar=_grammar("calls", rules, thought, special))
    rules.append(_answer(or_json, thought, special))
    return StructuredOutput(grammar=_grammar("(calls | answer)", rules, thought, special))


def after_thought(
    schema: Mapping[str, Any] | bool,
    thought: Thought,
    special: SpecialTokens = MappingProxyType({}),
) -> StructuredOutput:
    """JSON that a schema accepts, after the model's reasoning. Raises as `forced_calls`."""
    rules = [_answer(schema, thought, special)]
    return StructuredOutput(grammar=_grammar("answer", rules, thought, special))


def _answer(
    schema: Mapping[str, Any] | bool, thought: Thought | None, special: SpecialTokens
) -> str:
    before = "" if thought is None else _literal(thought.before_answer, special)
    return f"answer: {before} %json {json_form(schema)}"


def _grammar(
    start: str, rules: Sequence[str], thought: Thought | None, special: SpecialTokens
) -> str:
    if thought is None:
        return "\n".join([f"start: {start}", *rules])
    begins = " | ".join(_literal(begin, special) for begin in thought.begins)
    opened = "thought gap" if thought.is_open else f"(({begins}) thought gap)?"
    tokens = [_literal(end, special) for end in thought.ends if _has_special(end, special)]
    texts = "|".join(escaped(end) for end in thought.ends if not _has_special(end, special))
    thoughts = ([f"any_text ({' | '.join(tokens)})"] if tokens else []) + (
        ["text_to_end"] if texts else []
    )
    lines = [f"start: {opened} {start}", f"thought: {' | '.join(thoughts)}"]
    if texts:
        lines.append(f"text_to_end[lazy]: /(.|\\n)*({texts})/")
    if tokens:
        lines.append(r"any_text: /(.|\n)*/")
    return "\n".join([*lines, r"gap: /[ \n]{0,4}/", *rules])


def json_form(schema: Any) -> str:
    """A schema as ``%json`` of a grammar takes it."""
    if isinstance(schema, Mapping):
        schema = {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}
    return json.dumps(schema, ensure_ascii=False)


def _without_annotations(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key not in ANNOTATIONS}
    return each_schema(kept, _without_annotations)


def _has_special(text: str, special: SpecialTokens) -> bool:
    return any(token in text for token in special)


def _literal(text: str, special: SpecialTokens) -> str:
    """A text in the grammar, its special tokens as tokens; "" for no text."""
    if not special:
        return quoted(text)
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text)
    return " ".join(
        f"<[{special[part]}]>" if part in special else quoted(part) for part in parts if part
    )


def quoted(text: str) -> str:
    """A text as a literal of a grammar; "" for no text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def escaped(text: str) -> str:
    """A text as a part of a regex."""
    # Not re.escape: in Rust's syntax, some escapes of plain characters are assertions.
    return "".join(f"\\{letter}" if letter in "\\.+*?()|[]{}^$/" else letter for letter in text)
