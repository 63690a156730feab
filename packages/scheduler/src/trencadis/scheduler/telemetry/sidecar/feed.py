"""Reads the sensors of the sidecar and passes each round to the waiting streams."""

from __future__ import annotations

import logging
import threading

from trencadis.scheduler.clock import Clock
from trencadis.scheduler.telemetry.errors import SensorError
from trencadis.scheduler.telemetry.sidecar.wire import Round
from trencadis.scheduler.telemetry.source import TemperatureSource

logger = logging.getLogger(__name__)


class Feed:
    """Reads ``source`` every ``period_s`` seconds and keeps the latest round.

    The number of streams does not matter. Readings are not checked here: the reader in the engine
    does that.
    """

    def __init__(self, source: TemperatureSource, period_s: float, clock: Clock) -> None:
        self._source = source
        self._period_s = period_s
        self._clock = clock
        self._changed = threading.Condition()
        self._round: Round | None = None
        self._number = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="thermal-feed", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Wake all streams and end the thread. False if a sensor call still blocks it."""
        self._closed.set()
        self.wake()
        if self._thread.ident is None:
            self._source.close()
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def wake(self) -> None:
        """Wake all waiting streams, so that they check whether to continue."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_newer(self, number: int, timeout_s: float) -> tuple[int, Round | None]:
        """Wait for a round newer than ``number``; return its number and the round.

        After the timeout, or when the feed closes or is woken: ``number`` and None.
        """
        with self._changed:
            if self._number <= number and not self.closed:
                self._changed.wait(timeout_s)
            if self._number <= number:
                return number, None
            return self._number, self._round

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def _run(self) -> None:
        try:
            while not self.closed:
                self._publish(self._read())
                self._closed.wait(self._period_s)
        finally:
            self._source.close()

    def _read(self) -> Round:
        readings, fault = [], ""
        try:
            readings = self._source.read()
        except SensorError as error:
            fault = str(error)
        except Exception as error:  # a fault of a source must not end the sidecar
            logger.exception("Temperature source %s failed", self._source.name)
            fault = f"{type(error).__name__}: {error}"
        return Round(tuple(readings), fault, self._source.name, self._clock())

    def _publish(self, latest: Round) -> None:
        with self._changed:
            before, self._round = self._round, latest
            self._number += 1
            self._changed.notify_all()
        if latest.fault and not (before and before.fault):
            logger.warning("No readings: %s", latest.fault)
        elif before and before.fault and not latest.fault:
            logger.info("Readings again from %s", latest.source)
