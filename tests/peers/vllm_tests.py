"""A plugin of pytest that runs vLLM's own tests of a server on engine-serve.

Tests that start no server are left out. `vllm_expected.json` lists with the reason those that fail,
and those that are skipped because they need another model than the small one. A test that is listed
to fail and passes is an error, as is a listed one that is not there.
"""

from __future__ import annotations

import inspect
import json
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_command
import vllm_server
import vllm_stub
from reference_model import HfRunner

EXPECTED = Path(__file__).with_name("vllm_expected.json")
STARTS_A_SERVER = re.compile(r'\bRemote\w+Server\(|"run-batch"')
SECONDS = 180
"""Limit of a test."""

OUTCOMES = ("passed", "failed", "error", "xfailed", "skipped")

vllm_server.install()


def expected() -> dict[str, pytest.MarkDecorator]:
    """The mark of each listed test, by its id, or by the beginning of it."""
    marks = {}
    for outcome, groups in json.loads(EXPECTED.read_text("utf-8")).items():
        for reason, tests in groups.items():
            fails = pytest.mark.xfail(reason=reason, strict=True)
            mark = fails if outcome == "fails" else pytest.mark.skip(reason=reason)
            marks |= dict.fromkeys(tests, mark)
    return marks


def _starts_a_server(item: pytest.Item) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.values()
    functions = [definition.func for fixtures in definitions for definition in fixtures]
    return any(
        STARTS_A_SERVER.search(inspect.getsource(inspect.unwrap(function)))
        for function in [item.function, *functions]
    )


def _name_of(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/").removeprefix("entrypoints/")


@pytest.fixture
def local_asset_server() -> None:
    """Serves the images of tests that need a model for them."""


@pytest.fixture(scope="module")
def hf_runner() -> type[HfRunner]:
    """What transformers computes with the model that is served."""
    return HfRunner


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _starts_a_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    marks, seen = expected(), set()
    for item in kept:
        name = _name_of(item)
        for listed in (name, name.partition("[")[0], name.partition("::")[0]):
            if listed in marks:
                seen.add(listed)
                item.add_marker(marks[listed])
                break
    files = {_name_of(item).partition("::")[0] for item in kept}
    unknown = [name for name in marks if name.partition("::")[0] in files and name not in seen]
    if unknown and not config.option.keyword and "::" not in " ".join(config.args):
        raise pytest.UsageError(f"no such test, remove it from {EXPECTED.name}: {unknown}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    vllm_stub.running = True
    try:
        return (yield)
    finally:
        vllm_stub.running = False


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[object]:
    def end(*_: object) -> None:
        raise TimeoutError(f"no end after {SECONDS} seconds")

    previous = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def pytest_configure() -> None:
    vllm_command.install(Path(tempfile.mkdtemp()))


def pytest_sessionfinish() -> None:
    vllm_server.end_all()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = Counter({name: len(terminalreporter.getreports(name)) for name in OUTCOMES})
    counts["failed"] += counts.pop("error") + counts.pop("xfailed")
    total = sum(counts.values())
    parts = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))
    terminalreporter.write_line(f"vLLM's tests of a server: {total} collected, {parts}")
