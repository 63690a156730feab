"""Grammars are checked and compiled for clients in rotation, whatever one of them has sent."""

from __future__ import annotations

import asyncio
import threading

import pytest

from trencadis.engine import EngineOverloaded, StructuredOutput
from trencadis.engine.front.grammar_checks import GrammarChecks
from trencadis.engine.grammars.checker import GrammarChecker
from trencadis.engine.grammars.compiler import GrammarCompiler


def grammars(count: int) -> list[StructuredOutput]:
    return [StructuredOutput(regex="a" * length) for length in range(1, count + 1)]


class Turns:
    """Work that is recorded, and of which the first piece waits for `go_on`."""

    def __init__(self) -> None:
        self.done: list[int] = []
        self.began, self._may_go_on = threading.Event(), threading.Event()

    def work(self, structured_output: StructuredOutput) -> None:
        self.began.set()
        assert self._may_go_on.wait(60)
        assert structured_output.regex is not None
        self.done.append(len(structured_output.regex))

    def go_on(self) -> None:
        self._may_go_on.set()


def test_a_client_waits_for_one_check_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns()
    monkeypatch.setattr(GrammarChecker, "check", turns.work)

    async def body() -> list[BaseException | None]:
        checks = GrammarChecks(lambda: "")
        flood = [asyncio.ensure_future(checks.check(each, "flood")) for each in grammars(40)]
        await asyncio.to_thread(turns.began.wait, 60)
        other = asyncio.ensure_future(checks.check(StructuredOutput(regex="b" * 99), "other"))
        await asyncio.sleep(0)
        turns.go_on()
        await other
        results = await asyncio.gather(*flood, return_exceptions=True)
        checks.close()
        return results

    results = asyncio.run(body())
    assert turns.done[:3].index(99) <= 2
    assert [type(each) for each in results[:32]] == [type(None)] * 32
    assert [type(each) for each in results[32:]] == [EngineOverloaded] * 8


def test_a_client_waits_for_one_compilation_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llguidance")
    turns = Turns()
    monkeypatch.setattr(GrammarCompiler, "_compile", turns.work)
    compiler = GrammarCompiler(lambda: "", 8, frozenset())
    flood = [compiler.compile(each, "flood") for each in grammars(10)]
    assert turns.began.wait(60)
    other = compiler.compile(StructuredOutput(regex="b" * 99), "other")
    turns.go_on()
    other.result(timeout=60)
    for each in flood:
        each.result(timeout=60)
    assert turns.done.index(99) <= 2
    compiler.close()
