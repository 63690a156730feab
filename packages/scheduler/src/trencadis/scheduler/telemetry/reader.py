"""Reads a source in the background, so that no step waits for a sensor."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

import attrs

from trencadis.scheduler.clock import Clock, SteadyClock
from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry.config import ReaderConfig
from trencadis.scheduler.telemetry.errors import SensorError, TelemetryError
from trencadis.scheduler.telemetry.plausibility import (
    NO_DEVICE,
    DeviceRecord,
    is_well_formed,
    with_fault,
    with_reading,
)
from trencadis.scheduler.telemetry.source import Reading, TemperatureSource
from trencadis.scheduler.telemetry.temperature_state import Health, TemperatureState, assess
from trencadis.scheduler.validators import instance_of

logger = logging.getLogger(__name__)


@attrs.frozen
class _Snapshot:
    """All records after a round. It is replaced atomically, so that reading it needs no lock.

    ``backward_steps``: the backward steps of the clock until then.
    """

    records: tuple[DeviceRecord, ...]
    backward_steps: int


class TemperatureReader:
    """Reads ``source`` every ``config.period_s`` seconds, and closes it at the end.

    ``state()`` returns at once, from any thread, and never raises. It computes the ages when it is
    called, so a sensor call that hangs makes the state stale. ``poll()`` is one round of the
    thread's work, for a host (or a test) that does not want the thread. Raises `ConfigError` for an
    argument of another type.
    """

    def __init__(
        self,
        source: TemperatureSource,
        config: ReaderConfig | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        instance_of(TemperatureSource).checked("source", source)
        if config is not None:
            instance_of(ReaderConfig).checked("config", config)
        self._source = source
        self._config = config or ReaderConfig()
        self._clock = SteadyClock(clock)
        now_s, steps = self._clock.read()
        expected = self._config.devices or (NO_DEVICE,)
        records = tuple(DeviceRecord(device, accepted_at_s=now_s) for device in expected)
        self._snapshot = _Snapshot(records, steps)
        self._started_at_s = now_s
        self._logged_health = Health.FRESH
        self._updating = threading.Lock()  # guards the change of _snapshot
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def state(self) -> TemperatureState:
        """The state now. Cheap: arithmetic over the devices."""
        snapshot = self._snapshot
        now_s, steps = self._clock.read()
        clock_fault = "the clock stepped back" if steps != snapshot.backward_steps else ""
        return assess(snapshot.records, now_s, self._config, clock_fault)

    def forget(self, device: int, *, dry_run: bool = False) -> None:
        """Drop a device that does not answer, for example one that was removed from the node.

        It counts again once it answers. Thread-safe. A dry run only raises `ConfigError`: for a
        device that is unknown, answers, or is the only one, without which no temperature is known.
        """
        with self._updating:
            snapshot = self._snapshot
            left = tuple(record for record in snapshot.records if record.device != device)
            states = {each.device: each for each in self.state().devices}
            if device not in states:
                known = ", ".join(map(str, states)) or "none"
                raise ConfigError(f"device {device} is unknown: the devices are {known}")
            if states[device].health is Health.FRESH:
                raise ConfigError(
                    f"device {device} answers: to leave it out, name the devices that count with "
                    "--thermal-devices (ReaderConfig.devices)"
                )
            if not left:
                raise ConfigError(
                    f"device {device} is the only one: without it no temperature is known"
                )
            if not dry_run:
                self._snapshot = _Snapshot(left, snapshot.backward_steps)
                logger.warning("Device %d does not count any more until it answers", device)

    def start(self) -> None:
        """Start the thread. Raises `TelemetryError` if it was started before."""
        if self._thread is not None or self._stopping.is_set():
            raise TelemetryError("a TemperatureReader starts once: construct a new one")
        name = f"temperature-{self._source.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Stop the thread and close the source. False if a sensor call still blocks the thread.

        A call that hangs in a driver cannot be interrupted. The thread ends after that call. It is
        a daemon and does not keep the process alive.
        """
        self._stopping.set()
        if self._thread is None:
            self._close()
            return True
        self._thread.join(timeout_s)
        ended = not self._thread.is_alive()
        if not ended:
            logger.warning(
                "Temperature source %s still reads %.1f s after it was stopped",
                self._source.name,
                timeout_s,
            )
        return ended

    def __enter__(self) -> TemperatureReader:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def poll(self) -> None:
        """Read the source once and update the records. Never raises."""
        readings, fault = self._read()
        with self._updating:
            self._update(readings, fault)
        self._log_change()

    def _update(self, readings: list[Reading], fault: str) -> None:
        now_s, steps = self._clock.read()
        records = {record.device: record for record in self._snapshot.records}
        for reading in readings:
            if self._config.devices is None:
                records.pop(NO_DEVICE, None)
            elif reading.device not in self._config.devices:
                continue
            new = DeviceRecord(reading.device, self._started_at_s)
            record = records.get(reading.device, new)
            measured_at_s = now_s - max(0.0, reading.age_s)
            records[reading.device] = with_reading(record, reading, measured_at_s, self._config)
        answered = {reading.device for reading in readings}
        for device in records.keys() - answered:
            records[device] = with_fault(records[device], fault or "its sensor does not answer")
        ordered = tuple(records[device] for device in sorted(records))
        self._snapshot = _Snapshot(ordered, steps)

    def _read(self) -> tuple[list[Reading], str]:
        try:
            readings = self._source.read()
            if not isinstance(readings, (list, tuple)):  # an iterator may never end
                raise SensorError(
                    f"read() of {type(self._source).__name__} returned {readings!r}: return a list "
                    "of Reading"
                )
            readings = list(readings)
            for reading in readings:
                if not is_well_formed(reading):
                    raise SensorError(f"the source returned {reading!r}, which is not a reading")
        except SensorError as error:
            return [], str(error)
        except Exception as error:  # a fault of a source must not end the thread
            logger.exception("Temperature source %s failed", self._source.name)
            return [], f"{type(error).__name__}: {error}"
        return readings, "" if readings else "the source shows no device"

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self.poll()
                self._stopping.wait(self._config.period_s)
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._source.close()
        except Exception:
            logger.exception("Temperature source %s did not close cleanly", self._source.name)

    def _log_change(self) -> None:
        state = self.state()
        if state.health is self._logged_health:
            return
        level = logging.INFO if state.health is Health.FRESH else logging.WARNING
        logger.log(
            level,
            "Temperature source %s is %s%s",
            self._source.name,
            state.health.name.lower(),
            f": {state.fault}" if state.fault else "",
        )
        self._logged_health = state.health
