"""A plugin of pytest that runs vLLM's own tests of a server on engine-serve.

Tests that start no server are left out. `vllm_expected.json` lists with the reason those that fail,
and those that are skipped because they need another model than the small one. A test that is listed
to fail and passes is an error, as is a listed one that is not there.

With ``PEERS_PART=trained`` only tests that need a model which calls tools, reasons or ends its
answers run, with one that is trained on their conversations: see `trained_model`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_command
import vllm_server
import vllm_stub
from conversations import conversations
from reference_model import HfRunner, quick_model
from trained_model import trained_model

from trencadis.engine.models.default_model import default_model

EXPECTED = Path(__file__).with_name("vllm_expected.json")
STARTS_A_SERVER = re.compile(r'\bRemote\w+Server\(|"run-batch"')
IS_TRAINED = vllm_server.PART == "trained"
IS_OF_THE_SCHEMA = vllm_server.PART == "schema"
SECONDS = 1800 if IS_OF_THE_SCHEMA else 180
"""Limit of a test. That of the API description is one, with 50 requests for each operation."""

FAILING_TRAINED = "fails with the trained model"
FAILING = FAILING_TRAINED if IS_TRAINED else "fails"
"""The list of `vllm_expected.json` of the tests that fail in this part."""

TOOL_USE = "tool_use/"
"""Where all tests are for a model that calls tools."""

OUTCOMES = ("passed", "failed", "error", "xfailed", "skipped")

vllm_server.install()


def expected() -> dict[str, dict[str, str]]:
    """The reason of each listed test by its id, or by the beginning of it, of each list."""
    lists = json.loads(EXPECTED.read_text("utf-8"))
    return {
        outcome: {name: reason for reason, names in groups.items() for name in names}
        for outcome, groups in lists.items()
    }


def _starts_a_server(item: pytest.Item) -> bool:
    if IS_OF_THE_SCHEMA:
        return True  # which schemathesis asks for when it runs
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
    lists = expected()
    fails, skipped = lists[FAILING], lists["skipped"]
    trained = lists["trained"] | lists[FAILING_TRAINED]

    def is_for_the_trained_model(name: str) -> bool:
        is_listed = name in trained or name.partition("[")[0] in trained
        return name.startswith(TOOL_USE) or is_listed

    def is_of_this_part(name: str) -> bool:
        return is_for_the_trained_model(name) == IS_TRAINED

    kept = [item for item in items if is_of_this_part(_name_of(item)) and _starts_a_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept
    seen = set()
    for item in kept:
        name = _name_of(item)
        listed = {name, name.partition("[")[0], name.partition("::")[0]}
        seen |= listed
        for each in listed & fails.keys():
            item.add_marker(pytest.mark.xfail(reason=fails[each], strict=True))
        for each in listed & skipped.keys():
            item.add_marker(pytest.mark.skip(reason=skipped[each]))
    files = {_name_of(item).partition("::")[0] for item in kept}
    here = [name for name in (*fails, *skipped, *trained) if is_of_this_part(name)]
    unknown = [name for name in here if name.partition("::")[0] in files and name not in seen]
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
        if pyfuncitem.get_closest_marker("asyncio"):
            _cancel_tasks()


def _cancel_tasks() -> None:
    """End what a failed test left: one sends requests until it passes, even by a closed client."""
    for task in asyncio.all_tasks(asyncio.get_event_loop_policy().get_event_loop()):
        task.cancel()


def pytest_configure() -> None:
    sys.path.insert(0, str(Path.cwd()))  # as pytest does, once it collects
    if IS_TRAINED:
        directory = Path.cwd().parent
        vllm_server.set_model(trained_model(default_model(), conversations(), directory))
    if IS_OF_THE_SCHEMA:
        vllm_server.set_model(quick_model(default_model()))
    vllm_command.install(Path(tempfile.mkdtemp()))


def pytest_sessionfinish() -> None:
    vllm_server.end_all()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = Counter({name: len(terminalreporter.getreports(name)) for name in OUTCOMES})
    counts["failed"] += counts.pop("error") + counts.pop("xfailed")
    total = sum(counts.values())
    parts = ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "skipped"))
    terminalreporter.write_line(f"vLLM's tests of a server: {total} collected, {parts}")
