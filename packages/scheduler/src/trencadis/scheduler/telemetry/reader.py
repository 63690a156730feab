"""Reads a source in the background, so that no step ever waits for a sensor."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType

import attrs

from trencadis.scheduler.clock import Clock, SteadyClock
from trencadis.scheduler.telemetry.config import ReaderConfig
from trencadis.scheduler.telemetry.errors import SensorError, TelemetryError
from trencadis.scheduler.telemetry.judgement import NO_DEVICE, KnownDevice, judge, missing
from trencadis.scheduler.telemetry.source import Reading, TemperatureSource
from trencadis.scheduler.telemetry.state import Health, TemperatureState, assess

logger = logging.getLogger(__name__)


@attrs.frozen
class _Knowledge:
    """Everything that a state is made of; replaced as a whole, so that reading it needs no lock."""

    devices: tuple[KnownDevice, ...]
    clock_steps: int


class TemperatureReader:
    """Owns ``source``: reads it every ``config.period_s`` and closes it in the end.

    ``state()`` answers at once, from any thread, and never raises; ages are taken when it is
    asked, so a sensor call that hangs makes the state stale all by itself. ``poll()`` is one round
    of the thread's work, for a host (or a test) that would rather call it than have the thread.
    """

    def __init__(
        self,
        source: TemperatureSource,
        config: ReaderConfig | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._source = source
        self._config = config or ReaderConfig()
        self._clock = SteadyClock(clock)
        now_s, steps = self._clock.read()
        expected = self._config.devices or (NO_DEVICE,)
        waiting = tuple(KnownDevice(device, believed_at_s=now_s) for device in expected)
        self._knowledge = _Knowledge(waiting, steps)
        self._began_s = now_s
        self._logged = Health.FRESH
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def state(self) -> TemperatureState:
        """What is known now. Cheap: arithmetic over the devices."""
        knowledge = self._knowledge
        now_s, steps = self._clock.read()
        doubt = "the clock stepped back" if steps != knowledge.clock_steps else ""
        return assess(knowledge.devices, now_s, self._config, doubt)

    def start(self) -> None:
        """Begin to read in the background. Raises `TelemetryError` if it was started before."""
        if self._thread is not None or self._stopping.is_set():
            raise TelemetryError("a TemperatureReader starts once: make a new one")
        name = f"temperature-{self._source.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the thread and close the source; False if a sensor call still held it after that.

        Nothing can interrupt a call that hangs in a driver. The thread is a daemon, ends with that
        call and does not keep the process alive.
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
        """Read the source once and take in what it says. Never raises."""
        readings, fault = self._read()
        now_s, steps = self._clock.read()
        known = {device.device: device for device in self._knowledge.devices}
        for reading in readings:
            if self._config.devices is None:
                known.pop(NO_DEVICE, None)
            elif reading.device not in self._config.devices:
                continue
            before = known.get(reading.device, KnownDevice(reading.device, self._began_s))
            at_s = now_s - max(0.0, reading.age_s)
            known[reading.device] = judge(before, reading, at_s, self._config)
        answered = {reading.device for reading in readings}
        for device in known.keys() - answered:
            known[device] = missing(known[device], fault or "its sensor does not answer")
        ordered = tuple(known[device] for device in sorted(known))
        self._knowledge = _Knowledge(ordered, steps)
        self._log_change()

    def _read(self) -> tuple[list[Reading], str]:
        try:
            readings = self._source.read()
        except SensorError as error:
            return [], str(error)
        except Exception as error:  # a fault of a source must not end the thread that watches it
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
        if state.health is self._logged:
            return
        level = logging.INFO if state.health is Health.FRESH else logging.WARNING
        logger.log(
            level,
            "Temperature source %s is %s%s",
            self._source.name,
            state.health.name.lower(),
            f": {state.fault}" if state.fault else "",
        )
        self._logged = state.health
