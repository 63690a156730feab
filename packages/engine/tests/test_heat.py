"""Sensors and policies in a running engine: what fails there costs a cap, never a request."""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from trencadis.engine import (
    LLM,
    BatchControl,
    ConfigError,
    EngineConfig,
    EngineCore,
    EngineStats,
    GenerateRequest,
    SamplingParams,
)
from trencadis.engine.core.thermal_monitor import ThermalMonitor
from trencadis.engine.devices import CUDADevice, HPUDevice
from trencadis.scheduler import ControlError
from trencadis.scheduler.telemetry import (
    ReaderConfig,
    Reading,
    SensorError,
    TemperatureReader,
    TemperatureSource,
)
from trencadis.scheduler.thermal import NoThermalPolicy, ProportionalThermalPolicy

QUICK = ReaderConfig(
    period_s=0.002,
    stale_after_s=0.05,
    failed_after_s=0.1,
    frozen_after_s=0.1,
    frozen_coarse_after_s=0.2,
)
"""Of a reader that soon finds that a sensor fails."""

STEADY = attrs.evolve(
    QUICK, stale_after_s=300, failed_after_s=600, frozen_after_s=600, frozen_coarse_after_s=1200
)
"""Of a reader whose thread may wait for the processor."""

PARAMS = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=30, ignore_eos=True)
PROMPTS = {"a": (1, 2, 3), "b": tuple(range(60)), "c": (9,)}
LIMIT_SECONDS = 300.0


class Sensor(TemperatureSource):
    """One device, as warm as a test says, or broken in the way that it says."""

    name = "test"

    def __init__(self, degrees: float = 60.0) -> None:
        self.degrees = degrees
        self.fault = ""
        self.mended = threading.Event()
        self._noise = itertools.cycle((0.1, 0.2, 0.3))

    def read(self) -> list[Reading]:
        if self.fault == "raises":
            raise SensorError("the driver does not answer")
        if self.fault == "breaks":
            raise RuntimeError("a bug in a driver's binding")
        if self.fault == "hangs":
            self.mended.wait()
        if self.fault == "is gone":
            return []
        nan, repeats = self.fault == "says NaN", self.fault == "repeats itself"
        return [Reading(0, math.nan if nan else self.degrees + (not repeats) * next(self._noise))]

    def mend(self) -> None:
        self.fault = ""
        self.mended.set()


def start(model: Path, sensor: Sensor, policy: object, reader: ReaderConfig = STEADY) -> EngineCore:
    config = EngineConfig(
        model=str(model),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        block_size=8,
        num_blocks=80,
        num_host_blocks=64,
        warmup="none",
    )
    return EngineCore(config, thermal=ThermalMonitor(TemperatureReader(sensor, reader), policy))


def serve_until(core: EngineCore, condition: Callable[[EngineStats], bool]) -> dict[str, list[int]]:
    """Serve one request after the other until the engine's state is this; tokens by request."""
    tokens: dict[str, list[int]] = {}
    names = (f"{name}{number}" for number in itertools.count() for name in PROMPTS)
    ends = time.monotonic() + LIMIT_SECONDS
    while not condition(core.stats):
        assert time.monotonic() < ends, core.stats
        if not core.has_work:
            for name in itertools.islice(names, 3):
                core.add(name, GenerateRequest(PROMPTS[name[0]], PARAMS))
        take(core, tokens)
    while core.has_work:
        take(core, tokens)
    return tokens


def take(core: EngineCore, tokens: dict[str, list[int]]) -> None:
    for token in core.step():
        tokens.setdefault(f"{token.key}/{token.index}", []).append(token.token_id)


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, list[int]]:
    llm = LLM(str(tiny_model), dtype="float32", max_model_len=128, num_blocks=80, warmup="none")
    results = llm.generate(list(PROMPTS.values()), PARAMS)
    return {
        f"{name}/{index}": one.token_ids
        for name, result in zip(PROMPTS, results, strict=True)
        for index, one in enumerate(result.completions)
    }


def assert_as_expected(tokens: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    assert tokens
    for name, found in tokens.items():
        key, _, index = name.partition("/")
        assert found == expected[f"{key[0]}/{index}"]


@pytest.fixture
def sensor() -> Iterator[Sensor]:
    sensor = Sensor()
    yield sensor
    sensor.mend()


def proportional() -> ProportionalThermalPolicy:
    return ProportionalThermalPolicy(target_temp_c=80.0, dwell_s=0.02, min_seqs=3)


def test_heat_lowers_the_cap_and_changes_no_token(
    tiny_model: Path, sensor: Sensor, expected: dict[str, list[int]]
) -> None:
    core = start(tiny_model, sensor, proportional())
    tokens = serve_until(core, lambda stats: stats.num_steps > 10)
    assert core.stats.max_running_seqs == 8
    sensor.degrees = 84.0
    tokens |= serve_until(core, lambda stats: stats.max_running_seqs == 3)
    assert core.stats.thermal is not None
    assert core.stats.thermal.hottest_c == pytest.approx(84.2, abs=0.2)
    assert core.stats.headroom == 0
    sensor.degrees = 60.0
    tokens |= serve_until(core, lambda stats: stats.max_running_seqs == 8)
    assert core.stats.headroom == 1
    assert_as_expected(tokens, expected)
    assert core.stats.num_preemptions > 0
    core.close()


@pytest.mark.parametrize(
    "fault", ["raises", "breaks", "hangs", "is gone", "says NaN", "repeats itself"]
)
def test_a_sensor_that_fails_counts_as_hot_until_it_is_mended(
    tiny_model: Path, sensor: Sensor, expected: dict[str, list[int]], fault: str
) -> None:
    core = start(tiny_model, sensor, proportional(), QUICK)
    tokens = serve_until(core, lambda s: s.thermal is not None and s.thermal.sensor == "fresh")
    sensor.fault = fault
    tokens |= serve_until(core, lambda s: s.max_running_seqs == 3 and s.thermal.sensor == "failed")
    thermal = core.stats.thermal
    assert thermal is not None
    assert thermal.hottest_c == QUICK.assumed_hot_c
    assert thermal.policy_active
    sensor.mend()
    tokens |= serve_until(core, lambda stats: stats.max_running_seqs == 8)
    assert_as_expected(tokens, expected)
    core.close()


def test_samples_that_arrive_in_lasting_heat_run_one_by_one(
    tiny_model: Path, sensor: Sensor, expected: dict[str, list[int]]
) -> None:
    sensor.degrees = 99.0
    core = start(tiny_model, sensor, ProportionalThermalPolicy(target_temp_c=80.0))
    while core.stats.max_running_seqs > 1:
        core.add("warm", GenerateRequest((1,), SamplingParams(max_tokens=1)))
        core.step()
    tokens: dict[str, list[int]] = {}
    core.add("b", GenerateRequest(PROMPTS["b"], PARAMS))
    while core.has_work:
        take(core, tokens)
    assert_as_expected(tokens, expected)
    assert len(tokens) == PARAMS.n
    core.close()


class Raising(NoThermalPolicy):
    """Fails after some steps: in its decision, or where it then has to name victims."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._steps = 0

    def get_max_running_seqs(self, scheduler: object) -> int:
        self._steps += 1
        if self._steps <= 5:
            return 8
        if self._where == "cap":
            raise ZeroDivisionError("a bug in a policy")
        return 3

    def select_victims(self, running: object, num_to_evict: int) -> list[object]:
        raise ZeroDivisionError("a bug in a policy")


@pytest.mark.parametrize("where", ["cap", "victims"])
def test_a_policy_that_raises_keeps_its_last_limit_and_serving_goes_on(
    tiny_model: Path,
    sensor: Sensor,
    expected: dict[str, list[int]],
    where: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = start(tiny_model, sensor, Raising(where))
    with caplog.at_level(logging.ERROR):
        tokens = serve_until(core, lambda stats: stats.num_steps > 20)
    assert_as_expected(tokens, expected)
    thermal = core.stats.thermal
    assert thermal is not None
    assert (thermal.policy, thermal.policy_active) == ("Raising", False)
    assert "a bug in a policy" in thermal.fault
    assert thermal.num_policy_faults >= 1
    assert caplog.text.count("Raising failed in") == 1
    assert core.stats.max_running_seqs == (8 if where == "cap" else 3)
    order = core.control(BatchControl(target_temp_c=70.0))
    core.step()
    assert order.exception() is None
    assert core.stats.thermal.policy == "Raising, control loop"
    core.close()


def test_a_policy_reads_the_sensors_of_its_device_where_no_others_are_named(tmp_path: Path) -> None:
    recording = tmp_path / "readings.csv"
    recording.write_text("time_s,device,temperature_c,power_w\n0,0,41,\n900,0,41,\n")
    settings = EngineConfig(model="m", thermal_policy="proportional")
    watch = ThermalMonitor.from_config(settings, f"recorded:{recording}")
    watch.start()
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        while watch.stats.hottest_c is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watch.stats.hottest_c == 41
        assert watch.guard is not None
    finally:
        watch.stop()
    assert (CUDADevice.temperature_source, HPUDevice.temperature_source) == ("nvml", "hlml")
    without = EngineConfig(model="m")
    assert ThermalMonitor.from_config(without, f"recorded:{recording}").stats is not None
    assert ThermalMonitor.from_config(without, "recorded:/no/such/file").stats is None


def test_the_policy_none_needs_no_sensor_and_what_nothing_uses_is_refused() -> None:
    none = EngineConfig(model="m", thermal_policy="none")
    assert ThermalMonitor.from_config(none).guard is None
    for unused in (
        {"thermal_policy_config": {"target_temp_c": 80}},
        {"thermal_policy": "none", "thermal_policy_config": {"target_temp_c": 80}},
        {"thermal_devices": (0,)},
        {"thermal_policy": "proportional"},
    ):
        with pytest.raises(ConfigError, match=r"has no policy|temperature_source"):
            ThermalMonitor.from_config(EngineConfig(model="m", **unused))


def test_only_the_devices_that_serve_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recording = tmp_path / "readings.csv"
    rows = [f"{second},{device},{40 + 30 * device}," for second in (0, 900) for device in range(2)]
    recording.write_text("\n".join(["time_s,device,temperature_c,power_w", *rows]))
    source = f"recorded:{recording}"
    for settings, own_source, hottest_c in (
        ({"temperature_source": source}, None, 70),
        ({"temperature_source": source}, "hlml", 70),
        ({"temperature_source": source}, "recorded", 40),
        ({"temperature_source": source, "thermal_devices": (0,)}, None, 40),
        ({}, source, 40),
        ({"thermal_devices": (1,)}, source, 70),
    ):
        config = EngineConfig(model="m", thermal_policy="proportional", **settings)
        monitor = ThermalMonitor.from_config(config, own_source, (0,))
        assert monitor._reader is not None
        monitor._reader.poll()
        assert monitor.stats is not None
        assert monitor.stats.hottest_c == hottest_c
        named = "of device" if hottest_c == 40 or "thermal_devices" in settings else "of every"
        assert f"Temperatures of {source}: {named}" in caplog.text
        caplog.clear()


def test_an_order_cools_an_engine_that_was_started_without_a_policy(
    tiny_model: Path, sensor: Sensor, expected: dict[str, list[int]]
) -> None:
    sensor.degrees = 91.0
    core = start(tiny_model, sensor, None)
    ends = time.monotonic() + LIMIT_SECONDS
    while core.stats.thermal.hottest_c is None:
        assert time.monotonic() < ends
        time.sleep(0.01)
    core.add("b", GenerateRequest(PROMPTS["b"], PARAMS))
    core.add("a", GenerateRequest(PROMPTS["a"], PARAMS))
    tokens: dict[str, list[int]] = {}
    while core.stats.num_running_seqs < 6:
        take(core, tokens)
    order = core.control(BatchControl(target_temp_c=80.0, policy="largest_kv"))
    take(core, tokens)
    assert order.result(timeout=0).evicted_request_ids == ("b",)
    assert core.stats.num_running_seqs == order.result().new_running == 3
    thermal = core.stats.thermal
    assert (thermal.policy, thermal.policy_active) == ("control loop", True)
    assert thermal.target_temp_c == 80.0
    sensor.degrees = 60.0
    core.scheduler._control._thermal._control_loop.dwell_s = 0.02
    while core.has_work:
        take(core, tokens)
    serve_until(core, lambda stats: stats.thermal.policy == "")
    assert core.stats.thermal.target_temp_c is None
    assert_as_expected(tokens, expected)
    core.close()


def test_an_order_reaches_the_devices_of_the_engine(tiny_model: Path, sensor: Sensor) -> None:
    core = start(tiny_model, sensor, None)
    serve_until(core, lambda stats: stats.thermal.hottest_c is not None)
    answers = [core.control(BatchControl(forget_device=device)) for device in (0, 7)]
    serve_until(core, lambda _: all(answer.done() for answer in answers))
    for answer, message in zip(answers, ("device 0 answers", "device 7 is unknown"), strict=True):
        with pytest.raises(ControlError, match=message):
            answer.result(timeout=0)
    core.close()
