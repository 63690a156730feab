"""The reader's thread: it never blocks a step, and it ends with `stop`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from trencadis.scheduler.telemetry import (
    Health,
    ReaderConfig,
    Reading,
    TelemetryError,
    TemperatureReader,
    TemperatureSource,
)

QUICK = ReaderConfig(period_s=0.001)


class CountingSource(TemperatureSource):
    def __init__(self) -> None:
        self.reads = 0
        self.closed = 0
        self.threads: set[str] = set()

    @property
    def name(self) -> str:
        return "counting"

    def read(self) -> list[Reading]:
        self.reads += 1
        self.threads.add(threading.current_thread().name)
        return [Reading(0, 50.0 + self.reads % 7, 300.5)]

    def close(self) -> None:
        self.closed += 1


class HangingSource(CountingSource):
    """Answers once, then blocks, as a driver may, until the test releases it."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.hangs = threading.Event()

    def read(self) -> list[Reading]:
        if self.reads:
            self.hangs.set()
            self.released.wait(300.0)
        return super().read()


def eventually(condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition did not become true in time"
        time.sleep(0.002)


def temperature_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("temperature-")]


def test_it_reads_in_its_own_thread_and_ends_it() -> None:
    source = CountingSource()
    with TemperatureReader(source, QUICK) as reader:
        eventually(lambda: source.reads > 3)
        assert reader.state().health is Health.FRESH
    assert source.threads == {"temperature-counting"}
    assert source.closed == 1
    assert temperature_threads() == []


def test_a_hanging_sensor_blocks_no_step_and_becomes_stale() -> None:
    source = HangingSource()
    now_s = [0.0]
    reader = TemperatureReader(source, QUICK, clock=lambda: now_s[0])
    reader.start()
    assert source.hangs.wait(120.0)
    assert reader.state().health is Health.FRESH
    now_s[0] += 6.0
    assert reader.state().health is Health.STALE
    now_s[0] += 30.0
    assert (reader.state().health, reader.state().hottest_c) == (Health.FAILED, 95.0)
    source.released.set()
    assert reader.stop()


def test_stop_is_bounded_while_the_sensor_hangs() -> None:
    source = HangingSource()
    reader = TemperatureReader(source, QUICK)
    reader.start()
    assert source.hangs.wait(120.0)
    assert not reader.stop(timeout_s=0.01)
    source.released.set()
    assert reader.stop(timeout_s=120.0)
    assert source.closed == 1


def test_a_reader_that_was_never_started_closes_its_source() -> None:
    source = CountingSource()
    assert TemperatureReader(source, QUICK).stop()
    assert source.closed == 1


def test_a_reader_starts_once() -> None:
    reader = TemperatureReader(CountingSource(), QUICK)
    with reader, pytest.raises(TelemetryError, match="starts once"):
        reader.start()
    with pytest.raises(TelemetryError, match="starts once"):
        reader.start()
