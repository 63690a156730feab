"""Adapters are read beside the steps of the core: whatever happens meanwhile, each load ends."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import attrs
import pytest
from adapters import Reference, save_adapter
from child_processes import children, core_process

from trencadis.engine import (
    AdapterError,
    AsyncEngine,
    EngineConfig,
    EngineDead,
    EngineRestarting,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
    SwitchFailedError,
)
from trencadis.engine.core.adapter_loads import MAX_READERS, READ_SECONDS, AdapterLoads

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


def test_loads_are_given_up_after_their_limit_and_few_are_read_at_a_time() -> None:
    now_s, may_go_on = [0.0], threading.Event()
    started: list[str] = []

    def reader(name: str) -> Callable[[], str]:
        def read() -> str:
            started.append(name)
            assert may_go_on.wait(LIMIT_S)
            return name

        return read

    loads = AdapterLoads(lambda: now_s[0])
    names = [f"{number}" for number in range(MAX_READERS + 2)]
    for number, name in enumerate(names):
        loads.begin(number, name, f"/{name}", reader(name))
        now_s[0] += 1.0
    assert loads.take_ended() == []
    assert list(loads.names) == names
    now_s[0] = READ_SECONDS
    (late,) = loads.take_ended()
    assert late.number == 0
    with pytest.raises(AdapterError, match=r"/0 was not read within 600 s"):
        late.take()
    now_s[0] += MAX_READERS
    assert [load.name for load in loads.take_ended()] == names[1:-1]
    assert sorted(started) == names[:MAX_READERS], "threads that wait are not replaced"
    may_go_on.set()
    found = []
    while loads.names:
        found += loads.take_ended()
    assert [load.take() for load in found] == [names[-1]]
