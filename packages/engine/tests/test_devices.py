"""A device of the user's own: the documents' example serves, and broken ones are named."""

from __future__ import annotations

import asyncio
import importlib
import logging
import re
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from trencadis.engine import (
    LLM,
    AsyncEngine,
    ConfigError,
    Device,
    DeviceError,
    EngineConfig,
    EngineCore,
    GenerateRequest,
    LogSettings,
    SamplingParams,
)
from trencadis.engine.devices import DEVICES, select_device

PAGE = (Path(__file__).parents[3] / "docs" / "engine" / "devices.md").read_text()
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)

BROKEN = """
from trencadis.engine import Device
from trencadis.engine.devices import CPUDevice

class Lacking(Device):
    def synchronize(self): pass

class Nameless(Device):
    def free_memory(self): return 1 << 30
    total_memory = free_memory
    def synchronize(self): pass

class Untyped(CPUDevice):
    torch_device = "cpu"

class Demanding(CPUDevice):
    def __init__(self, number): pass

class Stranger: pass

def function(): pass
"""


def settings(**changes: object) -> dict[str, Any]:
    return {"max_model_len": 64, "num_blocks": 20, "block_size": 8, "warmup": "none", **changes}


@pytest.fixture(scope="module", autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path, None, None]:
    """`my_device`, the documents' example, and devices that lack something."""
    directory = tmp_path_factory.mktemp("devices")
    section = PAGE.partition("## A device of your own")[2]
    (directory / "my_device.py").write_text(re.findall(r"```python\n(.*?)```", section, re.S)[0])
    (directory / "broken_devices.py").write_text(BROKEN)
    (directory / "failing_module.py").write_text("raise RuntimeError('no driver')\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(directory)
        yield directory
    for name in ("my_device", "broken_devices"):
        sys.modules.pop(name, None)


def test_the_example_of_the_page_serves_by_name_and_as_an_object(tiny_model: Path) -> None:
    answers = [
        LLM(str(tiny_model), **settings(device=device, dtype="float32")).generate("hello", GREEDY)
        for device in ("cpu", "my_device:HalfMachine", my_device())
    ]
    assert answers[0] == answers[1] == answers[2]
    core = EngineCore(EngineConfig(model=str(tiny_model), **settings(device=my_device())))
    assert core.executor.device.name == "half-machine"
    assert core.executor.worker.dtype is torch.float32, "the checkpoint's own, which it prefers"


def my_device() -> Device:
    device: Device = importlib.import_module("my_device").HalfMachine()
    return device


@pytest.mark.slow
@pytest.mark.parametrize("by_name", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_core_of_a_server_runs_on_it(tiny_model: Path, by_name: bool) -> None:
    async def body() -> None:
        device = "my_device:HalfMachine" if by_name else my_device()
        config = EngineConfig(model=str(tiny_model), **settings(device=device))
        engine = await AsyncEngine.start(config, LogSettings(level=logging.CRITICAL))
        try:
            assert engine.info["device"] == "half-machine"
            tokens = [
                token
                async for delta in engine.generate(GenerateRequest([1, 2, 3], GREEDY))
                for token in delta.token_ids
            ]
            assert len(tokens) == 4
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_compilation_is_left_out_where_the_device_has_none(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = settings(device="my_device:HalfMachine", compile=True)
    llm = LLM(str(tiny_model), **changes)
    assert "a compiler for the device half-machine" in caplog.text
    assert len(llm.generate("hello", GREEDY)[0].completions[0].token_ids) == 4


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Device", "cannot be imported .*no_such_module.*PYTHONPATH"),
        ("my_device:NoSuchClass", "cannot be imported .*NoSuchClass"),
        ("my device:Class", "cannot be imported"),
        (":", "cannot be imported"),
        ("my_device:", "not a subclass of trencadis.engine.Device"),
        ("failing_module:Device", "cannot be imported .*RuntimeError: no driver"),
        ("broken_devices:Stranger", "not a subclass of trencadis.engine.Device: derive it"),
        ("broken_devices:function", "not a subclass of trencadis.engine.Device"),
        ("broken_devices:Lacking", "cannot be constructed: .*abstract.*free_memory"),
        ("broken_devices:Demanding", "cannot be constructed: .*number"),
        ("broken_devices:Nameless", "Nameless does not set name: see trencadis.engine.Device"),
        ("broken_devices:Untyped", "Untyped has 'cpu' as torch_device"),
    ],
)
def test_a_broken_device_is_named_with_the_remedy(name: str, message: str) -> None:
    config = EngineConfig(model="m", device=name)
    with pytest.raises(DeviceError, match=message):
        select_device(config.device)


@pytest.mark.parametrize("device", ["abacus", "", 5, None, torch.device("cpu"), Device], ids=str)
def test_what_is_no_device_is_refused_before_a_model_is_loaded(device: Any) -> None:
    names = ", ".join(DEVICES)
    with pytest.raises(ConfigError, match=f"device must be auto, {names}, module:Class or"):
        EngineConfig(model="m", device=device)


def test_the_page_has_a_row_of_every_device() -> None:
    rows = re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)
    assert set(rows) - {"device"} == DEVICES.keys()
