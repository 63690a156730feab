"""The number of threads on the CPU: as set, or as many as other processes leave cores for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trencadis.engine import ConfigError, EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.devices import CPUDevice, Device, select_device
from trencadis.engine.devices.cpu import threads
from trencadis.engine.devices.cpu.threads import (
    AdaptiveThreads,
    CoreTimes,
    next_num_threads,
    read_core_times,
)
from trencadis.engine.runner.model_runner import ModelRunner
from trencadis.engine.runner.sampler_warmup import SamplerWarmup


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def after(seconds: float, *, waited: float, idle: float) -> CoreTimes:
    return CoreTimes(100 + seconds, 7 + waited * seconds, 50 + idle * seconds)


BEFORE = CoreTimes(100, 7, 50)


@pytest.mark.parametrize(
    ("num_threads", "most", "waited", "idle", "expected"),
    [
        (2, 2, 0.0, 0.0, 2),  # alone on the machine
        (2, 2, 0.67, 0.0, 1),  # three threads on two cores
        (1, 2, 0.0, 0.1, 1),  # a core each: the other one is still busy
        (1, 2, 0.0, 1.0, 2),  # the other process has ended
        (1, 1, 0.9, 0.0, 1),
        (16, 16, 3.2, 0.0, 13),
        (13, 16, 0.0, 2.9, 15),
    ],
)
def test_threads_follow_the_cores_that_are_free(
    num_threads: int, most: int, waited: float, idle: float, expected: int
) -> None:
    end = after(0.5, waited=waited, idle=idle)
    assert next_num_threads(num_threads, most, BEFORE, end) == expected


@given(st.integers(1, 64), st.integers(0, 64), st.floats(0, 64), st.floats(0, 64))
def test_the_number_stays_within_its_bounds(
    num_threads: int, more: int, waited: float, idle: float
) -> None:
    most = num_threads + more
    end = after(0.5, waited=waited, idle=idle)
    found = next_num_threads(num_threads, most, BEFORE, end)
    assert 1 <= found <= most
    if waited >= 0.3:
        assert found <= num_threads
    elif found > num_threads:
        assert idle >= 0.8 * (found - num_threads)


@given(st.integers(1, 16), st.lists(st.integers(0, 16), max_size=12))
def test_the_number_settles_where_others_keep_cores(most: int, others: list[int]) -> None:
    """Each thread, own or not, takes a core; time is shared evenly. No number comes and goes."""
    num_threads = most
    for busy in [*others, *[others[-1] if others else 0] * 24]:
        total = num_threads + busy
        waited = num_threads * max(0.0, 1 - most / total)
        idle = max(0.0, most - total)
        end = after(0.5, waited=waited, idle=idle)
        before, num_threads = num_threads, next_num_threads(num_threads, most, BEFORE, end)
    assert before == num_threads
    assert num_threads >= min(most, max(1, most - busy))


@pytest.mark.slow
def test_the_engine_adapts_while_it_serves(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the kernel's figures replaced: a busy core, then a quiet machine."""
    caplog.set_level("INFO")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(threads, "PERIOD_SECONDS", 0.0)
    monkeypatch.setattr(threads, "default_num_threads", lambda: 2)
    clock = [BEFORE]
    device = CPUDevice()
    config = EngineConfig(model=str(tiny_model), device="cpu", warmup="none", max_model_len=64)
    core = EngineCore(attrs.evolve(config, device=device))
    core.warm_up()
    torch.set_num_threads(2)
    device._threads = AdaptiveThreads(2, lambda: clock[0])
    core.add("a", GenerateRequest((1, 2, 3), SamplingParams(max_tokens=30, ignore_eos=True)))
    seen = []
    for waited, idle in ((0.0, 0.0), (0.7, 0.0), (0.0, 0.0), (0.0, 1.0), (0.0, 0.0)):
        last = clock[0]
        clock[0] = CoreTimes(last.clock_s + 1, last.waited_s + waited, last.idle_s + idle)
        core.step()
        seen.append(torch.get_num_threads())
    assert seen == [2, 1, 1, 2, 2]
    assert caplog.text.count("other processes use the cores (--cpu-threads fixes the number)") == 1


def test_the_engine_adapts_while_it_warms_up(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each bucket and each sampled batch, as before a step."""
    device = CPUDevice()
    begun = 0

    def begin_step() -> None:
        nonlocal begun
        begun += 1

    def counted(method: Callable[..., None]) -> tuple[Callable[..., None], list[int]]:
        counts = []

        def call(*args: Any) -> None:
            before = begun
            method(*args)
            counts.append(begun - before)

        return call, counts

    execute, of_buckets = counted(ModelRunner.execute)
    sample, of_samples = counted(SamplerWarmup.sample)
    monkeypatch.setattr(device, "begin_step", begin_step)
    monkeypatch.setattr(ModelRunner, "execute", execute)
    monkeypatch.setattr(SamplerWarmup, "sample", sample)
    core = EngineCore(EngineConfig(model=str(tiny_model), device=device, max_model_len=64))
    assert begun, "the profiling run"
    core.warm_up()
    assert all(of_buckets)
    assert any(of_samples), "a batch of no rows has nothing to run"


def test_without_figures_the_number_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "PERIOD_SECONDS", 0.0)
    torch.set_num_threads(2)
    readings = iter([BEFORE, None, after(1, waited=0.9, idle=0.0), None])
    adaptive = AdaptiveThreads(2, lambda: next(readings))
    for _ in range(4):
        adaptive.begin_step()
    assert torch.get_num_threads() == 2


def test_a_step_of_many_seconds_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    readings = iter([BEFORE, after(30, waited=0.0, idle=1.0)])
    monkeypatch.setattr(threads, "PERIOD_SECONDS", 0.0)
    adaptive = AdaptiveThreads(2, lambda: next(readings))
    adaptive.begin_step()
    adaptive.begin_step()
    assert torch.get_num_threads() == 2


@pytest.mark.skipif(sys.platform != "linux", reason="reads the figures of Linux")
def test_the_kernel_has_figures_that_grow() -> None:
    before = read_core_times()
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    end = read_core_times()
    assert before is not None
    assert end is not None
    assert end.clock_s > before.clock_s
    assert end.waited_s >= before.waited_s
    assert end.idle_s >= before.idle_s


def test_a_number_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    device = select_device("cpu", cpu_threads=3)
    assert torch.get_num_threads() == 3
    assert device._threads is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert CPUDevice()._threads is None


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "_CGROUP_LIMIT", limit)
    torch.set_num_threads(4)
    for text, expected in (("250000 100000", 2), ("max 100000", 4), ("10000 100000", 1), ("", 4)):
        limit.write_text(text)
        assert threads.default_num_threads() == expected


def test_cpu_threads_of_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_threads 2 is for device cpu, and this is other"):
        select_device(Other(), cpu_threads=2)
    assert select_device(Other()).name == "other"


class Other(Device):
    name = "other"
    torch_device = torch.device("cpu")
    preferred_dtype = torch.float32
    default_kv_cache_memory = 1 << 20

    def free_memory(self) -> int:
        return 1 << 30

    total_memory = free_memory

    def synchronize(self) -> None:
        pass
