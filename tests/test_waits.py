"""Waits that look as if they had a limit."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCES = sorted(Path(__file__).parents[1].glob("packages/*/src/**/*.py"))


def waits_with_a_limit(source: str) -> list[int]:
    """The lines with a ``get`` that may time out, where the module has a SimpleQueue."""
    if "SimpleQueue(" not in source and "SimpleQueue[" not in source:
        return []
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr == "get"
        and (len(call.args) == 2 or any(each.arg == "timeout" for each in call.keywords))
    ]


def test_no_simple_queue_is_waited_for_with_a_limit() -> None:
    """Its ``get(timeout=...)`` may wait for ever, as seen with CPython 3.11.7 and 3.12.1.

    Where the thread is suspended past its deadline before it begins to wait, what is left of the
    timeout is negative, which a lock takes for no limit (``Modules/_queuemodule.c``).
    """
    assert waits_with_a_limit("q: SimpleQueue[int] = make()\nq.get(timeout=1)") == [2]
    found = {path: waits_with_a_limit(path.read_text()) for path in SOURCES}
    assert len(found) > 100
    assert not {path: lines for path, lines in found.items() if lines}
