"""The state for sensors that fail, freeze, jump or are implausible, and for backward clock steps.

No thread and no real time: the test polls the reader and advances its clock.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry import (
    Health,
    ReaderConfig,
    Reading,
    SensorError,
    TemperatureReader,
    TemperatureSource,
    TemperatureState,
)
from trencadis.scheduler.thermal.proportional import MAX_TARGET_C

PAGE = Path(__file__).parents[3] / "docs" / "scheduler" / "telemetry.md"


class ScriptedSource(TemperatureSource):
    """Returns the readings that the test has set, or raises its exception."""

    def __init__(self) -> None:
        self.says: list[Reading] | Exception = []
        self.closed = 0

    @property
    def name(self) -> str:
        return "scripted"

    def read(self) -> list[Reading]:
        if isinstance(self.says, Exception):
            raise self.says
        return list(self.says)

    def close(self) -> None:
        self.closed += 1


class Bench:
    """A reader with a source and a clock that the test controls."""

    def __init__(self, **settings: Any) -> None:
        self.now_s = 1000.0
        self.source = ScriptedSource()
        self.config = ReaderConfig(**settings)
        self.reader = TemperatureReader(self.source, self.config, clock=lambda: self.now_s)

    def says(self, *readings: Reading, after_s: float = 1.0) -> TemperatureState:
        return self._round(list(readings), after_s)

    def fails(self, error: Exception, after_s: float = 1.0) -> TemperatureState:
        return self._round(error, after_s)

    def wait(self, seconds: float) -> TemperatureState:
        self.now_s += seconds
        return self.reader.state()

    def _round(self, says: list[Reading] | Exception, after_s: float) -> TemperatureState:
        self.now_s += after_s
        self.source.says = says
        self.reader.poll()
        return self.reader.state()


def test_a_plausible_reading_is_fresh_and_the_hottest_device_counts() -> None:
    state = Bench().says(Reading(0, 61.0, 400.5), Reading(1, 74.5, 500.25))
    assert state.health is Health.FRESH
    assert state.hottest_c == 74.5
    assert state.power_w == 900.75
    assert state.may_raise_cap
    assert state.fault == ""


def test_before_the_first_reading_the_temperature_is_unknown_and_the_cap_may_not_rise() -> None:
    state = Bench().reader.state()
    assert (state.health, state.hottest_c, state.may_raise_cap) == (Health.STALE, None, False)


def test_a_source_that_never_answers_fails_safe() -> None:
    bench = Bench()
    assert bench.fails(SensorError("no driver")).fault == "no driver"
    state = bench.wait(bench.config.failed_after_s + 1)
    assert (state.health, state.hottest_c) == (Health.FAILED, bench.config.assumed_hot_c)


def test_a_lost_sensor_is_held_and_then_fails_safe() -> None:
    bench = Bench()
    bench.says(Reading(0, 60.0), Reading(1, 70.0))
    assert bench.says(Reading(0, 60.5)).health is Health.FRESH  # a single lost sample

    held = bench.says(Reading(0, 61.0), after_s=5.0)
    assert (held.health, held.hottest_c, held.may_raise_cap) == (Health.STALE, 70.0, False)
    assert held.fault == "device 1: its sensor does not answer"

    failed = bench.says(Reading(0, 61.5), after_s=30.0)
    assert (failed.health, failed.hottest_c) == (Health.FAILED, 95.0)
    assert [device.health for device in failed.devices] == [Health.FRESH, Health.FAILED]


def test_a_stale_sensor_does_not_hide_a_hot_device() -> None:
    bench = Bench()
    bench.says(Reading(0, 60.0), Reading(1, 70.0))
    for celsius in (75.0, 82.0, 88.0):
        state = bench.says(Reading(0, celsius), after_s=3.0)
    assert (state.health, state.hottest_c) == (Health.STALE, 88.0)


def test_a_failed_device_above_the_fail_safe_temperature_keeps_its_own() -> None:
    bench = Bench()
    bench.says(Reading(0, 99.0))
    assert bench.wait(60.0).hottest_c == 99.0


def test_a_recovered_sensor_is_fresh() -> None:
    bench = Bench()
    bench.says(Reading(0, 60.0))
    bench.fails(SensorError("GPU is lost"), after_s=60.0)
    state = bench.says(Reading(0, 63.0))
    assert (state.health, state.hottest_c) == (Health.FRESH, 63.0)


@pytest.mark.parametrize("impossible", [math.nan, math.inf, -math.inf, 0.0, -40.0, 126.0, 2**63])
def test_an_impossible_temperature_is_rejected(impossible: float) -> None:
    bench = Bench()
    bench.says(Reading(0, 66.0))
    soon = bench.says(Reading(0, impossible))
    assert (soon.health, soon.hottest_c) == (Health.FRESH, 66.0)
    late = bench.says(Reading(0, impossible), after_s=5.0)
    assert (late.health, late.hottest_c) == (Health.STALE, 66.0)
    assert "impossible temperature" in late.fault


def test_the_ends_of_what_is_plausible_are_so() -> None:
    bench = Bench()
    assert bench.says(Reading(0, bench.config.max_c)).hottest_c == 125.0
    assert bench.says(Reading(0, 90.0)).hottest_c == 90.0, "25 and 10 degrees in a second"
    assert bench.says(Reading(0, 54.9)).hottest_c == 90.0
    assert bench.says(Reading(0, 80.0, 1.0)).power_w == 1.0
    bench = Bench()
    for temperature_c in (120.0, 30.0, 55.0, 30.0):
        state = bench.says(Reading(0, temperature_c))
    assert state.hottest_c == 30.0, "the last three agree within 25 degrees"


@pytest.mark.parametrize(
    ("seconds", "health"),
    [
        (5.0, Health.FRESH),
        (5.001, Health.STALE),
        (30.0, Health.STALE),
        (30.001, Health.FAILED),
    ],
)
def test_a_device_is_stale_above_5_and_failed_above_30_seconds(
    seconds: float, health: Health
) -> None:
    bench = Bench()
    bench.now_s = 0.0
    bench.says(Reading(0, 60.0), after_s=0.0)
    state = bench.wait(seconds)
    assert state.health is health
    assert state.fault == (
        "" if health is Health.FRESH else f"device 0: no reading for {seconds:.1f} s"
    )
    assert [device.fault for device in state.devices] == [state.fault.removeprefix("device 0: ")]


@pytest.mark.parametrize(
    ("reading", "frozen_after_s"),
    [
        (Reading(0, 60.0, 300.0), 900.0),
        (Reading(0, 60.0), 900.0),
        (Reading(0, 60.5), 120.0),
        (Reading(0, 60.5, 300.0), 120.0),
        (Reading(0, 60.0, 300.5), 120.0),
    ],
)
def test_a_repeated_reading_is_frozen_from_a_time_on_that_its_fractions_decide(
    reading: Reading, frozen_after_s: float
) -> None:
    bench = Bench()
    bench.says(reading)
    bench.says(reading, after_s=frozen_after_s - 0.5)
    assert bench.says(reading, after_s=0.25).devices[0].fault == ""
    bench.says(reading, after_s=0.25)
    assert (
        bench.wait(5.5).fault
        == f"device 0: frozen at {reading.temperature_c:g} °C for {frozen_after_s:.0f} s"
    )


def test_an_error_and_a_crash_of_the_source_become_states() -> None:
    bench = Bench()
    bench.says(Reading(0, 66.0))
    assert bench.fails(SensorError("driver gone"), after_s=6.0).fault == "device 0: driver gone"
    assert bench.fails(ZeroDivisionError("bug")).fault == "device 0: ZeroDivisionError: bug"


def test_a_single_outlier_is_rejected() -> None:
    bench = Bench()
    bench.says(Reading(0, 50.0))
    assert bench.says(Reading(0, 110.0)).hottest_c == 50.0
    state = bench.says(Reading(0, 51.0))
    assert (state.health, state.hottest_c) == (Health.FRESH, 51.0)


@pytest.mark.parametrize(("before", "level"), [(93.0, 20.0), (30.0, 98.0)])
def test_a_jump_is_accepted_after_three_readings(before: float, level: float) -> None:
    bench = Bench()
    bench.says(Reading(0, before))
    assert bench.says(Reading(0, level)).hottest_c == before
    assert bench.says(Reading(0, level + 1)).hottest_c == before
    state = bench.says(Reading(0, level + 2))
    assert (state.health, state.hottest_c) == (Health.FRESH, level + 2)


def test_inconsistent_jumps_are_never_accepted() -> None:
    bench = Bench(max_slew_c_per_s=0.5)
    bench.says(Reading(0, 60.0))
    for celsius in (110.0, 10.0, 115.0, 12.0, 111.0, 9.0):
        state = bench.says(Reading(0, celsius))
    assert (state.health, state.hottest_c) == (Health.STALE, 60.0)
    assert "jumped from 60 to 9 °C" in state.fault


def test_a_fast_but_plausible_rise_is_accepted_at_once() -> None:
    bench = Bench()
    bench.says(Reading(0, 45.0))
    assert bench.says(Reading(0, 75.0)).hottest_c == 75.0


def test_a_frozen_sensor_becomes_stale_and_then_fails() -> None:
    bench = Bench(period_s=1.0)
    stuck = Reading(0, 71.0, 512.347)
    seen = [bench.says(stuck).health for _ in range(200)]
    assert seen[119] is Health.FRESH
    assert seen[130] is Health.STALE
    assert seen[199] is Health.FAILED
    assert "frozen at 71 °C" in bench.reader.state().fault
    assert bench.says(Reading(0, 72.0, 498.1)).health is Health.FRESH


def test_an_idle_device_that_reports_whole_degrees_is_not_frozen() -> None:
    bench = Bench()
    states = [bench.says(Reading(0, 34.0)) for _ in range(600)]
    assert all(state.health is Health.FRESH for state in states)


def test_the_age_of_a_buffered_sample_counts() -> None:
    bench = Bench()
    assert bench.says(Reading(0, 60.0, age_s=2.0)).age_s == 2.0
    for older in (59.0, 59.5, 60.5):
        state = bench.says(Reading(0, older, age_s=40.0))
    assert (state.hottest_c, state.age_s) == (60.0, 5.0)  # the accepted reading is newer
    assert bench.says(Reading(0, 60.0, age_s=8.0), after_s=5.0).health is Health.STALE


def test_a_clock_that_steps_back_makes_the_state_stale_until_the_next_reading() -> None:
    bench = Bench()
    bench.says(Reading(0, 60.0))
    stepped = bench.wait(-500.0)
    assert (stepped.health, stepped.hottest_c) == (Health.STALE, 60.0)
    assert stepped.fault == "device 0: the clock stepped back"
    assert stepped.age_s >= 0
    assert bench.says(Reading(0, 61.0)).health is Health.FRESH
    assert bench.wait(10.0).health is Health.STALE


def test_a_clock_that_jumps_ahead_makes_readings_too_old() -> None:
    bench = Bench()
    bench.says(Reading(0, 60.0))
    assert bench.wait(3600.0).health is Health.FAILED
    assert bench.says(Reading(0, 61.0)).health is Health.FRESH


def test_only_the_configured_devices_count() -> None:
    bench = Bench(devices=(2, 3))
    state = bench.says(Reading(0, 99.0), Reading(2, 60.0), Reading(3, 61.0))
    assert (state.hottest_c, [device.device for device in state.devices]) == (61.0, [2, 3])


def test_a_configured_device_without_readings_fails_safe() -> None:
    bench = Bench(devices=(0, 1))
    assert bench.says(Reading(0, 60.0), after_s=31.0).hottest_c == 95.0


@pytest.mark.parametrize("power_w", [math.nan, math.inf, -math.inf, 0.0, -3.0])
def test_an_impossible_power_is_unknown_and_the_temperature_counts(power_w: float) -> None:
    state = Bench().says(Reading(0, 61.5, power_w), Reading(1, 62.5, 300.0))
    assert (state.health, state.hottest_c, state.power_w) == (Health.FRESH, 62.5, None)


def test_a_sensor_whose_power_is_nan_can_be_frozen() -> None:
    bench = Bench(frozen_after_s=30.0)
    for _ in range(60):
        state = bench.says(Reading(0, 61.5, float("nan")))
    assert state.health is Health.STALE
    assert "frozen" in state.fault


@pytest.mark.parametrize(
    "reading",
    [
        None,
        (0, 61.5),
        Reading("0", 61.5),
        Reading(-1, 61.5),
        Reading(True, 61.5),
        Reading(0, "61.5"),
        Reading(0, None),
        Reading(0, 10**400),
        Reading(0, 61.5, "300"),
        Reading(0, 61.5, 300.0, None),
    ],
    ids=repr,
)
def test_what_a_source_returns_instead_of_readings_becomes_a_state(reading: Any) -> None:
    bench = Bench()
    bench.says(Reading(0, 50.5))
    state = bench.says(reading, after_s=10.0)
    assert (state.health, state.hottest_c) == (Health.STALE, 50.5)
    assert "which is not a reading" in state.fault
    assert bench.says(Reading(0, 51.5)).health is Health.FRESH


def test_power_is_unknown_if_a_device_does_not_measure_it() -> None:
    assert Bench().says(Reading(0, 60.0, 300.0), Reading(1, 60.0)).power_w is None


@given(
    st.lists(
        st.one_of(
            st.builds(
                Reading,
                st.integers(0, 3),
                st.floats(),
                st.one_of(st.none(), st.floats()),
                st.floats(),
            ),
            st.floats(-100, 100),
            st.just(SensorError("gone")),
        ),
        max_size=30,
    )
)
def test_no_input_raises_or_yields_an_implausible_temperature(script: list[Any]) -> None:
    bench = Bench()
    for item in script:
        if isinstance(item, Reading):
            state = bench.says(item)
        elif isinstance(item, Exception):
            state = bench.fails(item)
        else:
            state = bench.wait(item)
        assert state.hottest_c is None or 0 < state.hottest_c <= bench.config.max_c
        assert state.age_s >= 0
        healths = [device.health for device in state.devices]
        assert state.health is max(healths, default=state.health)
        assert not (state.may_raise_cap and not healths)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"period_s": 0}, "period_s must be a finite number above 0, got 0"),
        ({"period_s": 6.0}, "period_s 6.0 must be below stale_after_s 5.0"),
        ({"stale_after_s": 31.0}, "stale_after_s 31.0 must be below failed_after_s 30.0"),
        ({"failed_after_s": math.nan}, "failed_after_s must be a finite number"),
        ({"assumed_hot_c": 130.0}, "assumed_hot_c 130.0 must be below max_c 125.0"),
        ({"frozen_after_s": 1000.0}, "frozen_after_s 1000.0 must be below frozen_coarse_after_s"),
        ({"confirmations": 0}, "confirmations must be an integer of at least 1, got 0"),
        ({"confirmations": True}, "confirmations must be an integer of at least 1, got True"),
        ({"devices": ()}, "devices"),
        ({"devices": (0, 0)}, "devices"),
        ({"devices": (-1,)}, "devices"),
    ],
)
def test_an_invalid_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as error:
        ReaderConfig(**settings)
    assert named in str(error.value)


def test_every_setting_has_a_help_sentence() -> None:
    for field in attrs.fields(ReaderConfig):
        assert field.metadata["help"].endswith("."), field.name


def test_a_failed_device_is_at_least_as_hot_as_any_target() -> None:
    assert ReaderConfig().assumed_hot_c >= MAX_TARGET_C


def test_the_page_quotes_the_defaults() -> None:
    page = PAGE.read_text(encoding="utf-8")
    quoted = re.findall(r"`(\w+)` \((\d+) (?:s|°C)\)", page)
    assert len(quoted) >= 6
    for name, value in quoted:
        assert float(value) == getattr(ReaderConfig(), name), name
