"""Adapters are read beside the steps of the core: whatever happens meanwhile, each load ends."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import attrs
import pytest
from adapters import Reference, save_adapter
from child_processes import children, core_process
from request_mix import finish

from trencadis.engine import (
    AdapterError,
    AsyncEngine,
    EngineConfig,
    EngineCore,
    EngineDead,
    EngineRestarting,
    GenerateRequest,
    InvalidRequest,
    RequestFailed,
    SamplingParams,
    SwitchFailedError,
)
from trencadis.engine.core import engine_core
from trencadis.engine.core.adapter_loads import (
    MAX_READERS,
    READ_SECONDS,
    STALLED_SECONDS,
    AdapterLoads,
)
from trencadis.engine.core.core_process import _handle
from trencadis.engine.front.adapter_calls import error_of
from trencadis.engine.ipc.messages import LoadAdapter
from trencadis.engine.models.adapter_files import Adapter, read_adapter
from trencadis.engine.runner import adapter_store

pytestmark = pytest.mark.usefixtures("own_processes")

PROMPT = (1, 2, 3, 4, 5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LIMIT_S = 120.0

Result = TypeVar("Result")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that makes a core wait for files of adapters; see `gated_files.c`."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path_factory.mktemp("gate") / "gated_files.so"
    source = Path(__file__).with_name("gated_files.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@pytest.fixture(scope="module")
def saved(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(tiny_model, folder / name, rank=4, seed=number)
        for number, name in enumerate(("first", "slow", "third"))
    }


@pytest.fixture(scope="module")
def reference(tiny_model: Path, saved: dict[str, Path]) -> Reference:
    return Reference(tiny_model, saved)


@pytest.fixture
def folders(saved: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    return {name: shutil.copytree(path, tmp_path / name) for name, path in saved.items()}


def weights(folder: Path, suffix: str) -> Path:
    return folder / f"adapter_model.safetensors{suffix}"


async def until(condition: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not condition():  # noqa: ASYNC110  (what other processes do has no event)
            await asyncio.sleep(0.01)

    await ends(poll())


@attrs.frozen
class Serving:
    """An engine, and loads that it cannot end yet."""

    engine: AsyncEngine
    folders: dict[str, Path]

    async def begin(self, name: str, folder: str = "slow") -> asyncio.Task[None]:
        """Load an adapter whose file cannot be opened before `release`."""
        path = self.folders[folder]
        weights(path, ".closed").touch()
        load = asyncio.create_task(self.engine.load_adapter(name, path))
        await until(weights(path, ".waits").exists)
        return load

    def release(self, folder: str = "slow") -> None:
        weights(self.folders[folder], ".closed").unlink()

    @property
    def names(self) -> list[str]:
        return sorted(adapter.name for adapter in self.engine.adapters)

    async def tokens(self, lora: str | None) -> list[int]:
        request = GenerateRequest(PROMPT, GREEDY, lora=lora)

        async def collect() -> list[int]:
            return [t async for delta in self.engine.generate(request) for t in delta.token_ids]

        return await ends(collect())


async def ends(call: Awaitable[Result]) -> Result:
    return await asyncio.wait_for(call, LIMIT_S)


@pytest.fixture
def serve(
    tiny_model: Path, folders: dict[str, Path], gate: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Runs a test with an engine that has the adapter ``first``."""
    monkeypatch.setenv("LD_PRELOAD", str(gate))

    @asynccontextmanager
    async def serving(**settings: object) -> AsyncIterator[Serving]:
        values = {
            "model": tiny_model,
            "dtype": "float32",
            "device": "cpu",
            "warmup": "none",
            "max_model_len": 64,
            "enable_lora": True,
            "max_loras": 2,
            "lora_modules": {"first": str(folders["first"])},
            **settings,
        }
        engine = await AsyncEngine.start(EngineConfig(**values))
        try:
            yield Serving(engine, folders)
        finally:
            await engine.stop()

    def run(test: Callable[[Serving], Awaitable[None]], **settings: object) -> None:
        async def with_engine() -> None:
            async with serving(**settings) as engine:
                await test(engine)

        asyncio.run(with_engine())

    return run


@pytest.mark.slow
def test_requests_get_tokens_while_a_file_is_read(
    serve: Callable[..., None], reference: Reference
) -> None:
    async def test(serving: Serving) -> None:
        load = await serving.begin("slow")
        found = await asyncio.gather(*map(serving.tokens, ("first", None, "first")))
        expected = {name: reference.tokens(name, PROMPT, 8) for name in ("first", "slow", None)}
        assert found == [expected["first"], expected[None], expected["first"]]
        await ends(serving.engine.load_adapter("third", serving.folders["third"]))
        await ends(serving.engine.unload_adapter("third"))
        assert not load.done()
        assert await serving.engine.check_health() is None, "it is not busy"
        with pytest.raises(InvalidRequest, match="'slow' is not loaded"):
            await serving.tokens("slow")
        serving.release()
        await ends(load)
        assert serving.names == ["first", "slow"]
        assert await serving.tokens("slow") == expected["slow"]

    serve(test)


@pytest.mark.slow
def test_a_name_that_is_being_loaded_is_neither_loaded_nor_unloaded(
    serve: Callable[..., None],
) -> None:
    async def test(serving: Serving) -> None:
        engine = serving.engine
        load = await serving.begin("slow")
        with pytest.raises(AdapterError, match="'slow' is being loaded already"):
            await ends(engine.load_adapter("slow", serving.folders["third"]))
        with pytest.raises(AdapterError, match="'slow' is being loaded: wait"):
            await ends(engine.unload_adapter("slow"))
        serving.release()
        await ends(load)
        await ends(engine.unload_adapter("slow"))
        assert serving.names == ["first"]

    serve(test)


@pytest.mark.slow
def test_the_last_place_in_host_memory_is_of_the_load_that_is_read_first(
    serve: Callable[..., None],
) -> None:
    async def test(serving: Serving) -> None:
        engine = serving.engine
        load = await serving.begin("slow")
        await ends(engine.load_adapter("third", serving.folders["third"]))
        serving.release()
        with pytest.raises(AdapterError, match="max_cpu_loras is 2"):
            await ends(load)
        assert serving.names == ["first", "third"]
        # What is held already takes none.
        await ends(engine.load_adapter("other", serving.folders["first"]))
        await ends(engine.unload_adapter("third"))
        await ends(engine.load_adapter("slow", serving.folders["slow"]))

    serve(test, max_cpu_loras=2)


@pytest.mark.slow
@pytest.mark.parametrize("change", ["sleep", "deep sleep", "switch", "failed switch"])
def test_what_is_read_for_a_model_that_goes_is_dropped(
    change: str, serve: Callable[..., None], reference: Reference, tiny_model: Path
) -> None:
    async def test(serving: Serving) -> None:
        engine = serving.engine
        load = await serving.begin("slow")
        if "sleep" in change:
            await ends(engine.sleep(1 if change == "sleep" else 2))
        else:
            other = attrs.evolve(engine.config, served_model_name="other", lora_modules={})
            if change == "failed switch":
                other = attrs.evolve(other, model="/nowhere")
                with pytest.raises(SwitchFailedError):
                    await ends(engine._changes.reconfigure(other, engine.tokenizer, 1 << 30))
            else:
                await ends(engine._changes.reconfigure(other, engine.tokenizer, 1 << 30))
        with pytest.raises(AdapterError, match="load it again"):
            await ends(load)
        if "sleep" in change:
            await engine.wake_up()
        serving.release()
        assert serving.names == ([] if change == "switch" else ["first"])
        await ends(engine.load_adapter("slow", serving.folders["slow"]))
        assert await serving.tokens("slow") == reference.tokens("slow", PROMPT, 8)

    serve(test)


@pytest.mark.slow
def test_a_core_that_ends_in_mid_load_is_stopped_or_restarted(
    serve: Callable[..., None], reference: Reference
) -> None:
    async def test(serving: Serving) -> None:
        engine = serving.engine
        load = await serving.begin("slow")
        core_process().send_signal(signal.SIGKILL)
        with pytest.raises(EngineRestarting):
            await ends(load)
        await ends(engine.wait_until_recovered())
        assert serving.names == ["first"]
        weights(serving.folders["slow"], ".waits").unlink()
        load = await serving.begin("slow")
        await ends(engine.stop())
        with pytest.raises(EngineDead, match="was stopped"):
            await ends(load)
        assert not children(), "nothing waits for the file any more"

    serve(test)


# How many are read at a time, and for how long.


class Reads:
    """Loads whose files are read when a test says so, at the times of its clock."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.loads = AdapterLoads(lambda: self.now_s)
        self.started: list[str] = []
        self._may_end: dict[str, threading.Event] = {}

    def begin(self, *names: str) -> None:
        for name in names:
            self._may_end[name] = threading.Event()
            self.loads.begin(len(self._may_end), name, f"/{name}", partial(self._read, name))

    def _read(self, name: str) -> str:
        self.started.append(name)
        assert self._may_end[name].wait(LIMIT_S)
        return name

    def release(self, *names: str) -> None:
        """Let reads end, and wait until they have."""
        ending = [load for load in self.loads._reading if load.name in names]
        for name in names:
            self._may_end[name].set()
        for load in ending:
            load.result.result(LIMIT_S)


NAMES = [f"{number}" for number in range(MAX_READERS + 2)]
READ, WAITING = NAMES[:MAX_READERS], NAMES[MAX_READERS:]


def test_few_are_read_at_a_time_and_given_up_after_their_limit() -> None:
    reads = Reads()
    reads.begin(*READ)
    assert reads.loads.take_ended() == []
    reads.now_s = READ_SECONDS
    late = reads.loads.take_ended()
    assert [load.name for load in late] == READ
    with pytest.raises(AdapterError, match=r"/0 was not read within 600 s"):
        late[0].take()
    reads.release(*READ)
    assert sorted(reads.started) == READ
    reads.begin("next")
    reads.release("next")
    (load,) = reads.loads.take_ended()
    assert load.take() == "next"


def test_a_load_waits_while_others_are_read_and_not_where_these_have_no_end() -> None:
    reads = Reads()
    reads.begin(*NAMES)
    reads.now_s = STALLED_SECONDS - 1
    reads.release("0")
    assert [load.take() for load in reads.loads.take_ended()] == ["0"]
    reads.now_s += STALLED_SECONDS - 1
    assert reads.loads.take_ended() == []
    reads.now_s += 1
    (stalled,) = reads.loads.take_ended()
    assert stalled.name == WAITING[1]
    with pytest.raises(AdapterError, match=r"none was in the last 60 s: '/1', '/2', '/3', '/4'"):
        stalled.take()
    with pytest.raises(AdapterError, match="4 adapters are being read"):
        reads.begin("late")
    assert list(reads.loads.names) == [*READ[1:], WAITING[0]]
    reads.now_s += READ_SECONDS
    assert len(reads.loads.take_ended()) == MAX_READERS
    with pytest.raises(AdapterError, match="4 adapters are being read"):
        reads.begin("later")
    reads.release("1")
    reads.begin("last")
    reads.release("2", "3", "4", "last")
    assert [load.take() for load in reads.loads.take_ended()] == ["last"]


@pytest.mark.slow
def test_a_file_that_is_not_read_is_lost_when_a_core_starts_again(
    tiny_model: Path,
    saved: dict[str, Path],
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go_on = threading.Event()

    def read(directory: Path, **settings: Any) -> Adapter:
        assert directory != saved["slow"] or may_go_on.wait(LIMIT_S)
        return read_adapter(directory, **settings)

    monkeypatch.setattr(adapter_store, "read_adapter", read)
    monkeypatch.setattr(engine_core, "AGAIN_SECONDS", 5.0, raising=False)
    settings = {"dtype": "float32", "warmup": "none", "max_model_len": 64, "enable_lora": True}
    config = EngineConfig(model=tiny_model, device="cpu", **settings)
    earlier = {name: str(path) for name, path in saved.items()}
    core = EngineCore(config, adapters={config.name: earlier})
    assert sorted(adapter.name for adapter in core.adapters) == ["first", "third"]
    core.add("r", GenerateRequest(PROMPT, GREEDY, lora="third"))
    tokens = [token.token_id for token in finish(core)["r"]]
    assert tokens == reference.tokens("third", PROMPT, 8)
    may_go_on.set()
    core.close()


def test_an_error_of_the_core_is_not_one_of_who_asked() -> None:
    """A server answers 500 to it, and 400 to others."""
    answers: list[Any] = []
    channel = SimpleNamespace(send=answers.append)
    order = LoadAdapter(7, "sql", "/adapters/sql")

    def reader(error: Exception) -> Callable[..., object]:
        def fail(*_: object) -> None:
            raise error

        return fail

    for error in (OSError("no threads"), AdapterError("another name", "lora_name")):
        core = SimpleNamespace(adapter_reader=reader(error))
        _handle(core, channel, order, {}, AdapterLoads())
    internal, wrong = map(error_of, answers)
    assert isinstance(internal, RequestFailed)
    assert "no threads" in str(internal)
    assert isinstance(wrong, AdapterError)
    assert wrong.field == "lora_name"
