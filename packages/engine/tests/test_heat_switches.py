"""Thermal policies in a core whose model changes: the limits are those of a core that never does.

Two cores serve the same requests under the same readings, on a clock of the test. One of them
switches, sleeps and fails to switch; the other ends the same requests at the same times.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from trencadis.engine import (
    EngineConfig,
    EngineCore,
    GenerateRequest,
    SamplingParams,
    SwitchFailedError,
)
from trencadis.engine.core.config_payload import config_payload
from trencadis.engine.core.reconfigure import ModelSwitcher
from trencadis.engine.core.thermal_monitor import ThermalMonitor
from trencadis.scheduler import BatchControl
from trencadis.scheduler.telemetry import (
    ReaderConfig,
    Reading,
    TemperatureReader,
    TemperatureSource,
)
from trencadis.scheduler.thermal import (
    PowerBudgetPolicy,
    ProportionalThermalPolicy,
    SchedulerThermalPolicy,
    TwoPhaseThermalPolicy,
)

STEP_S = 1.0
"""Seconds of the clock in a step."""

NUM_STEPS = 60
"""Steps between two changes of the model: a minute, in which every policy settles."""

MAX_SEQS = 8
HOT, COOL = (97.0, 800.0), (45.0, 180.0)
"""Degrees C and watts: under these no policy leaves more than one sequence, or limits any."""

PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


class Sensor(TemperatureSource):
    """One device, as hot as the test says. Its readings differ a little, as those of a sensor."""

    name = "test"

    def __init__(self) -> None:
        self.temp_c, self.power_w = COOL
        self._noise = itertools.cycle((0.0, 0.1, 0.2))

    def read(self) -> list[Reading]:
        noise = next(self._noise)
        return [Reading(0, self.temp_c + noise, self.power_w + noise)]


class Bench:
    """A core with a policy, on a clock that goes on by `STEP_S` in each step."""

    def __init__(self, config: EngineConfig, policy: SchedulerThermalPolicy | None) -> None:
        self.now_s = 0.0
        self.sensor = Sensor()
        self.reader = TemperatureReader(self.sensor, ReaderConfig(), clock=lambda: self.now_s)
        monitor = ThermalMonitor(self.reader, policy)
        # The reader has no thread: it reads when the clock goes on.
        monitor.start = lambda: None  # type: ignore[method-assign]
        self.core = EngineCore(config, thermal=monitor, clock=lambda: self.now_s)
        self.switcher = ModelSwitcher(self.core)
        self.keys = itertools.count()

    def serve(self, reading: tuple[float, float], num_steps: int) -> list[tuple[int, int]]:
        """Steps with a full queue; the running limit and the prefill limit of each."""
        self.sensor.temp_c, self.sensor.power_w = reading
        limits = []
        for _ in range(num_steps):
            self.now_s += STEP_S
            self.reader.poll()
            while self.core.stats.num_waiting_reqs < 4:
                number = next(self.keys)
                prompt = tuple((number * 7 + i) % 250 for i in range(24))
                self.core.add(str(number), GenerateRequest(prompt, PARAMS))
            self.core.step()
            assert not self.core.take_failures()
            stats = self.core.stats
            limits.append((stats.max_running_seqs, stats.max_prefill_tokens))
        return limits


@pytest.fixture(scope="module")
def models(
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    make_tiny_model: Callable[..., Path],
) -> tuple[EngineConfig, EngineConfig]:
    other = make_tiny_model(tmp_path_factory.mktemp("other"), num_hidden_layers=3)
    first = EngineConfig(
        model=str(tiny_model),
        dtype="float32",
        max_model_len=64,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=64,
        block_size=8,
        num_blocks=80,
        swap_space=0,
        enable_prefix_caching=False,
        warmup="none",
    )
    return first, attrs.evolve(first, model=str(other))


@pytest.mark.slow
@pytest.mark.parametrize("num_changes", [6, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "make",
    [
        lambda: ProportionalThermalPolicy(target_temp_c=82.0),
        lambda: PowerBudgetPolicy(budget_w=500.0),
        lambda: TwoPhaseThermalPolicy(target_temp_c=82.0, budget_w=500.0, min_prefill_tokens=16),
        lambda: None,
    ],
    ids=["proportional", "power", "two_phase", "control loop"],
)
def test_limits_are_those_of_a_core_that_never_changes_its_model(
    models: tuple[EngineConfig, EngineConfig],
    make: Callable[[], SchedulerThermalPolicy | None],
    num_changes: int,
) -> None:
    lasting, changing = (Bench(models[0], make()) for _ in range(2))
    broken = attrs.evolve(models[1], model="/no/such/model")
    settled: dict[tuple[float, float], set[int]] = {HOT: set(), COOL: set()}
    for number in range(num_changes):
        for bench in (lasting, changing):
            bench.core.abort_all()
        switcher, core = changing.switcher, changing.core
        if number % 3 == 0:
            following = models[1] if core.config.model == models[0].model else models[0]
            switcher.reconfigure_engine(config_payload(following), 1 << 30)
        elif number % 3 == 1:
            switcher.sleep(1 + number % 2)
            switcher.wake_up()
        else:
            with pytest.raises(SwitchFailedError):
                switcher.reconfigure_engine(config_payload(broken), 1 << 30)
        reading = COOL if number // 2 % 2 else HOT
        if make() is None and number % 4 == 0:  # the loop holds over the next change
            for bench in (lasting, changing):
                bench.serve(HOT, 1)
                bench.core.control(BatchControl(target_temp_c=82.0))
        limits = [bench.serve(reading, NUM_STEPS) for bench in (lasting, changing)]
        assert limits[1][-1] == limits[0][-1], (number, reading)
        if number % 2 and reading == HOT:  # it was hot before the change, too
            assert {limit for limit, _ in limits[1]} == {1}, "no step runs more meanwhile"
        settled[reading].add(limits[0][-1][0])
    assert settled[HOT] == {1}
    assert max(settled[COOL]) == MAX_SEQS
    for bench in (lasting, changing):
        thermal = bench.core.stats.thermal
        assert thermal is not None
        assert thermal.policy_active == (make() is not None or reading == HOT)
        assert thermal.num_policy_faults == 0
        bench.core.close()
