"""Adapters of an engine in another process: loaded, used, unloaded, and there after a restart."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from adapters import Reference, save_adapter
from child_processes import core_process

from trencadis.engine import (
    AdapterError,
    AsyncEngine,
    EngineConfig,
    EngineError,
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
    SwitchInProgressError,
)

pytestmark = pytest.mark.usefixtures("own_processes")

PROMPT = (1, 2, 3, 4, 5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        name: save_adapter(tiny_model, folder / name, rank=4, seed=number)
        for number, name in enumerate(("first", "second", "third"))
    }


async def tokens(engine: AsyncEngine, lora: str | None) -> list[int]:
    request = GenerateRequest(PROMPT, GREEDY, lora=lora)
    return [token async for delta in engine.generate(request) for token in delta.token_ids]


def settings(model: Path, folders: dict[str, Path]) -> EngineConfig:
    return EngineConfig(
        model=model,
        dtype="float32",
        device="cpu",
        warmup="none",
        max_model_len=64,
        enable_lora=True,
        max_loras=2,
        lora_modules={"first": str(folders["first"])},
    )


@pytest.mark.slow
def test_they_are_loaded_and_unloaded_and_survive_a_restart(
    tiny_model: Path, folders: dict[str, Path]
) -> None:
    reference = Reference(tiny_model, folders)
    expected = {name: reference.tokens(name, PROMPT, 8) for name in (*folders, None)}

    async def names_of(engine: AsyncEngine) -> list[str]:
        return sorted(adapter.name for adapter in engine.adapters)

    async def run() -> None:
        engine = await AsyncEngine.start(settings(tiny_model, folders))
        try:
            assert await names_of(engine) == ["first"]
            await engine.load_adapter("second", folders["second"])
            found = await asyncio.gather(
                *(tokens(engine, name) for name in ("first", "second", None))
            )
            assert found == [expected["first"], expected["second"], expected[None]]
            engine._changes.switching = "models are switched"
            for change in (
                engine.load_adapter("third", folders["third"]),
                engine.unload_adapter("first"),
            ):
                with pytest.raises(SwitchInProgressError, match="models are switched"):
                    await change
            engine._changes.switching = ""
            with pytest.raises(AdapterError, match="'second' has already been loaded"):
                await engine.load_adapter("second", folders["second"])
            with pytest.raises(AdapterError, match="cannot be read"):
                await engine.load_adapter("third", folders["third"] / "nowhere")
            with pytest.raises(InvalidRequest, match="'third' is not loaded"):
                await tokens(engine, "third")
            for within in ("/", 3, [3]):
                with pytest.raises(InvalidRequest, match="within must be directories"):
                    await engine.load_adapter("third", folders["third"], within)
            for name, path in ((3, "x"), ("x", 3), ("", "x"), ("x", "")):
                with pytest.raises(InvalidRequest):
                    await engine.load_adapter(name, path)
            await engine.unload_adapter("first")
            with pytest.raises(AdapterError, match="'first' is not loaded"):
                await engine.unload_adapter("first")
            await engine.load_adapter("third", folders["third"])
            # Under the name of the settings, which a core that starts again has at first.
            await engine.load_adapter("first", folders["third"])
            assert await names_of(engine) == ["first", "second", "third"]
            os.kill(core_process().pid, signal.SIGKILL)
            with pytest.raises(EngineError):
                await tokens(engine, "second")
            await engine.wait_until_recovered()
            # At once: none of these comes later than the core.
            paths = {adapter.name: Path(adapter.path) for adapter in engine.adapters}
            assert paths["first"] == folders["third"]
            assert await names_of(engine) == ["first", "second", "third"]
            assert await tokens(engine, "third") == expected["third"]
            assert await tokens(engine, "first") == expected["third"]
            for level in (1, 2):
                await engine.sleep(level)
                await engine.wake_up()
                assert await tokens(engine, "second") == expected["second"]
            assert engine.stats.running_adapters == ()
        finally:
            await engine.stop()

    asyncio.run(run())


@pytest.mark.slow
def test_what_is_parked_returns_with_the_content_that_it_began_with(
    tiny_model: Path, folders: dict[str, Path]
) -> None:
    async def run() -> None:
        engine = await AsyncEngine.start(settings(tiny_model, folders))
        try:
            (adapter,) = engine.adapters
            long = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
            answer = engine.generate(GenerateRequest(PROMPT, long, lora="first"))
            await anext(answer)
            (opened,) = engine._requests._requests.values()
            assert opened.resumption(None, (4,)).lora_digest == adapter.digest != ""
            await answer.aclose()
        finally:
            await engine.stop()

    asyncio.run(run())
