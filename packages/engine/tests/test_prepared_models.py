"""What a switch needs besides the device is done while the active model is served."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import attrs
import psutil
import pytest
from child_processes import children

from trencadis.engine import (
    EngineConfig,
    GenerateRequest,
    LogSettings,
    ModelEntry,
    ModelError,
    MultiModelEngine,
    SamplingParams,
    SwitchFailedError,
)
from trencadis.engine.front import prepared_models
from trencadis.engine.front.async_engine import load_tokenizer
from trencadis.engine.front.prepared_models import PreparedModels
from trencadis.engine.front.tokenizer import Tokenizer
from trencadis.engine.line_process import LineProcess
from trencadis.engine.models import gguf

pytestmark = pytest.mark.usefixtures("own_processes")

QUIET = LogSettings(level=logging.CRITICAL)
PROMPT = list(range(5, 25))
LIMIT_SECONDS = 900


def entry(alias: str, model: Path | str) -> ModelEntry:
    config = EngineConfig(
        model=str(model),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=4,
        block_size=8,
        num_blocks=80,
        warmup="none",
    )
    return ModelEntry(alias, config)


@asynccontextmanager
async def running(*models: ModelEntry) -> AsyncIterator[MultiModelEngine]:
    engine = await MultiModelEngine.start(models, log=QUIET)
    try:
        yield engine
    finally:
        await engine.stop()
        assert not children(), "no process is left behind"


async def answer(engine: MultiModelEngine, model: str, max_tokens: int = 8) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    stream = engine.generate(GenerateRequest(PROMPT, params, model=model))
    return [token async for delta in stream for token in delta.token_ids]


async def preparing() -> psutil.Process:
    """The next process that prepares a model, stopped before it is asked for one."""
    start, found = LineProcess._start, []

    def stopped(process: LineProcess) -> subprocess.Popen[bytes]:
        child = start(process)
        if process._module.endswith("checkpoint_process"):
            child.send_signal(signal.SIGSTOP)
            found.append(child.pid)
        return child

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LineProcess, "_start", stopped)
        while not found:  # noqa: ASYNC110 - a thread starts it
            await asyncio.sleep(0.001)
    return psutil.Process(found[0])


@pytest.fixture
def convert(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """Makes a GGUF file whose conversion, a copy of the tiny model, is in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def copy(_: Path, target: Path) -> None:
        shutil.copytree(tiny_model, target, dirs_exist_ok=True)

    def convert(name: str) -> Path:
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(b"GGUF")
        with monkeypatch.context() as patch:
            patch.setattr(gguf, "_convert", copy)
            gguf.convert_gguf(file)
        return file

    return convert


@pytest.mark.slow
def test_the_active_model_serves_while_the_next_one_is_prepared(
    tiny_model: Path, tmp_path: Path, convert: Callable[[str], Path]
) -> None:
    """One engine for all of it: the start of a core takes seconds."""
    empty = tmp_path / "empty"
    empty.mkdir()
    shutil.copy(tiny_model / "config.json", empty)
    models = {"first": tiny_model, "next": convert("next"), "last": convert("last"), "no": empty}

    async def body() -> None:
        async with running(*map(entry, models, models.values())) as engine:
            await a_model_that_cannot_be_prepared_costs_the_active_one_no_request(engine)
            await the_active_model_serves_during_a_conversion(engine)
            switching = asyncio.create_task(engine.switch_model("last"))
            await preparing()
        # The engine that stops does not wait for the conversion.
        with pytest.raises(SwitchFailedError) as raised:
            await asyncio.wait_for(switching, 120)
        assert raised.value.step == "prepare"

    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))


async def a_model_that_cannot_be_prepared_costs_the_active_one_no_request(
    engine: MultiModelEngine,
) -> None:
    """The requests that run were aborted although the model could not be served."""
    undisturbed = await answer(engine, "first", 200)
    long = asyncio.create_task(answer(engine, "first", 200))
    with pytest.raises(SwitchFailedError, match="first is still active") as raised:
        await engine.switch_model("no", running="abort", drain_timeout_s=0)
    assert (raised.value.step, raised.value.active) == ("prepare", "first")
    with pytest.raises(SwitchFailedError, match="tokenizer"):
        await engine.prepare_model("no")
    assert await long == undisturbed


async def the_active_model_serves_during_a_conversion(engine: MultiModelEngine) -> None:
    """Its requests were rejected for as long as the conversion took, which is minutes."""
    expected = await answer(engine, "first")
    switching = asyncio.create_task(engine.switch_model("next"))
    process = await preparing()
    counting = asyncio.create_task(engine.tokenizer_of("next"))
    assert await answer(engine, "first") == expected
    assert not engine.is_switching
    assert not switching.done()
    process.resume()
    report = await switching
    assert report.prepare_s > 0
    parts = report.drain_s + report.unload_s + report.load_s + report.warmup_s
    assert report.prepare_s + parts <= report.total_s
    assert await answer(engine, "next") == expected
    assert await counting is engine.tokenizer


@pytest.fixture
def prepared(
    convert: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[PreparedModels]:
    models = PreparedModels([entry("next", convert("next"))])
    yield models
    models.close()
    assert not children(), "no process is left behind"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of which a tokenizer was loaded."""
    loads: list[str] = []

    def load(source: str, template: str | None) -> Tokenizer:
        loads.append(source)
        return load_tokenizer(source, template)

    monkeypatch.setattr(prepared_models, "load_tokenizer", load)
    return loads


def test_the_template_of_an_entry_comes_before_that_of_its_configuration() -> None:
    first = entry("a", "m")
    of_both = attrs.evolve(first.config, chat_template="of the configuration")
    entries = (first, ModelEntry("b", of_both), ModelEntry("c", of_both, chat_template="own"))
    prepared = PreparedModels(entries)
    configs = [prepared.config_of(alias) for alias in "abc"]
    assert [config.chat_template for config in configs] == [None, "of the configuration", "own"]
    assert [config.served_model_name for config in configs] == ["a", "b", "c"]


def test_callers_who_prepare_one_model_share_one_process_and_one_tokenizer(
    prepared: PreparedModels, loads: list[str]
) -> None:
    """Sixty requests for a model that was not loaded yet loaded its tokenizer sixty times."""

    async def body() -> None:
        callers = [asyncio.create_task(prepared.prepare("next")) for _ in range(30)]
        callers += [asyncio.create_task(prepared.tokenizer_of("next")) for _ in range(30)]
        process = await preparing()
        callers[0].cancel()  # of a client that has left
        await asyncio.wait(callers[:1])
        process.resume()
        tokenizers = await asyncio.gather(*callers[1:])
        assert len(set(map(id, tokenizers))) == 1
        assert len(loads) == 1

    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))


def test_callers_share_the_error_of_a_preparation_and_a_later_one_tries_again(
    prepared: PreparedModels,
) -> None:
    """Each caller repeated the conversion that had failed for the one before it."""

    async def body() -> None:
        callers = [asyncio.create_task(prepared.prepare("next")) for _ in range(8)]
        (await preparing()).kill()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert {type(result) for result in results} == {ModelError}
        assert await prepared.prepare("next")

    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))


def test_a_preparation_ends_with_the_last_who_waits_for_it_and_another_may_begin(
    prepared: PreparedModels,
) -> None:
    async def body() -> None:
        callers = [asyncio.create_task(prepared.prepare("next")) for _ in range(2)]
        await preparing()
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
        assert await prepared.prepare("next"), "does not get the end of that one"
        assert not children()

    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))


def test_a_stop_ends_a_preparation_for_all_who_wait_and_nobody_starts_another(
    prepared: PreparedModels,
) -> None:
    """Whoever waited next started the conversion again, and the stop took as long as that."""

    async def body() -> None:
        callers = [asyncio.create_task(prepared.prepare("next")) for _ in range(4)]
        await preparing()
        prepared.close()
        results = await asyncio.gather(*callers, return_exceptions=True)
        assert {type(result) for result in results} == {ModelError}
        with pytest.raises(ModelError, match="stopped"):
            await prepared.prepare("next")
        assert not children()

    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))


@pytest.mark.slow
def test_a_switch_ends_although_the_processes_of_other_models_cannot_be_ended(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each later switch waited for it for ever."""

    def fail(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after shutdown")

    async def body() -> None:
        async with running(entry("first", tiny_model)) as engine:
            monkeypatch.setattr(PreparedModels, "release_all_but", fail)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="schedule"):
                    await engine.switch_model("first", wait_for_turn=False)

    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))


class Hub(BaseHTTPRequestHandler):
    """Files of one repository, as the hub serves them."""

    files: ClassVar[dict[str, bytes]] = {}
    asked: ClassVar[list[str]] = []
    status: ClassVar[int] = 0

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        content = self.files.get(self.path.removeprefix("/org/next/resolve/main/"))
        if self.status:
            content = None
        self.send_response(self.status or (404 if content is None else 200))
        self.send_header("X-Repo-Commit", "a" * 40)
        if content is None and not self.status:
            self.send_header("X-Error-Code", "EntryNotFound")
        elif content is not None:
            self.send_header("ETag", f'"{len(content)}"')
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()
        if with_body and content:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub for processes that start now."""
    monkeypatch.setattr(Hub, "files", {})
    monkeypatch.setattr(Hub, "asked", [])
    monkeypatch.setattr(Hub, "status", 0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        try:
            yield Hub
        finally:
            server.shutdown()


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_the_weights_of_a_hub_id_are_downloaded_before_the_switch(
    hub: type[Hub], tmp_path: Path, file: str
) -> None:
    hub.files[file] = b"weights"
    process = LineProcess("trencadis.engine.models.checkpoint_process", answer_s=600)
    try:
        for _ in range(2):
            assert process.ask("org/next") == {"source": "org/next", "has_weights": True}
        assert process.ask("/no/such/model") == {"error": "there is no directory /no/such/model"}
    finally:
        process.close()
    (kept,) = (tmp_path / "hub").glob(f"models--org--next/snapshots/*/{file}")
    assert kept.read_bytes() == b"weights"
    assert [path for path in hub.asked if path.endswith(file)] == [
        f"/org/next/resolve/main/{file}"
    ], "once"


def test_a_hub_that_refuses_the_weights_is_no_hub_without_them(hub: type[Hub]) -> None:
    """It was told as prepared, and the switch failed after the active model had left."""
    hub.files["model.safetensors"] = b"weights"
    process = LineProcess("trencadis.engine.models.checkpoint_process", answer_s=600)
    try:
        for status in (401, 403, 501):
            hub.status = status
            assert str(status) in process.ask("org/next")["error"]
        hub.status = 0
        assert process.ask("org/next") == {"source": "org/next", "has_weights": True}
        hub.status = 403
        assert process.ask("org/next")["has_weights"], "they are in the cache"
    finally:
        process.close()


@pytest.mark.slow
def test_weights_that_a_hub_does_not_have_yet_are_looked_for_again(
    hub: type[Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> None:  # this process does not know the stand-in for the hub
        raise ModelError("there is no tokenizer")

    monkeypatch.setattr(prepared_models, "load_tokenizer", load)

    async def body() -> None:
        models = PreparedModels([entry("next", "org/next")])
        try:
            for files in ({}, {"model.safetensors": b"weights"}):
                hub.files.update(files)
                with pytest.raises(ModelError, match="tokenizer"):
                    await models.prepare("next")
        finally:
            models.close()

    asyncio.run(asyncio.wait_for(body(), LIMIT_SECONDS))
    assert any(path.endswith("model.safetensors") for path in hub.asked)


def test_a_killed_server_leaves_no_process_that_downloads() -> None:
    """Its input ends with the server; it went on for as long as the download took."""
    code = (
        "import time; from trencadis.engine.models import checkpoint_process as process; "
        "process.locate = lambda _: print(flush=True) or time.sleep(600); process.main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(b'[1, "org/next"]\n')
        process.stdin.flush()
        assert process.stderr.readline() == b"\n", "it is at work"
        process.stdin.close()
        try:
            assert process.wait(120) == 0
        finally:
            process.kill()


def test_the_next_conversion_removes_what_a_killed_one_has_left_and_not_what_another_writes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each stop in a conversion left as many bytes in the cache as the model has."""
    cache = tmp_path / "cache"
    for name in ("first", "next"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF" + name.encode())
    code = (
        "import pathlib, sys, time; from trencadis.engine.models import gguf; "
        "gguf._convert = lambda *_: print(flush=True) or time.sleep(600); "
        "gguf.convert_gguf(pathlib.Path(sys.argv[1]), cache=pathlib.Path(sys.argv[2]))"
    )
    (cache / ".kept-by-the-user").mkdir(parents=True)

    def convert(_: Path, target: Path) -> None:
        shutil.copytree(tiny_model, target, dirs_exist_ok=True)

    monkeypatch.setattr(gguf, "_convert", convert)
    arguments = [sys.executable, "-c", code, str(tmp_path / "first.gguf"), str(cache)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n", "it converts"
            (scratch,) = cache.glob(".first-*")
            gguf.convert_gguf(tmp_path / "next.gguf", cache=cache)
            assert scratch.is_dir(), "another process writes it"
        finally:
            process.kill()
    assert scratch.is_dir()
    gguf.convert_gguf(tmp_path / "first.gguf", cache=cache)
    names = sorted(path.name.split("-")[0] for path in cache.iterdir())
    assert names == [".kept", "first", "next"]
