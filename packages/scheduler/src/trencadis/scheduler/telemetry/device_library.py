"""What NVML and HLML have in common: a library that is started, counts devices and asks each."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any

from trencadis.scheduler.telemetry.errors import SensorError
from trencadis.scheduler.telemetry.source import Reading, Sensor, TemperatureSource


class DeviceLibrarySource(TemperatureSource):
    """Every device that a vendor's library shows, by the library's index.

    The library is started at the first reading, and again after every device was lost, so a driver
    that is reloaded under a running engine is picked up. A device that fails is left out: the
    others are still worth knowing. ``error`` is the library's own class of errors.
    """

    def __init__(self, sensor: Sensor, error: type[Exception]) -> None:
        self._sensor = sensor
        self._error = error
        self._started = False

    def read(self) -> list[Reading]:
        """One reading for each device that answers; raises `SensorError` where none does."""
        try:
            if not self._started:
                self._start()
                self._started = True
            count = self._count()
        except self._error as error:
            self.close()
            raise SensorError(f"{self.name} does not answer: {self._named(error)}") from error
        readings, faults = [], [f"{self.name} shows no device"]
        for device in range(count):
            answer = self._try_device(device)
            if isinstance(answer, Reading):
                readings.append(answer)
            else:
                faults.append(f"{self.name} device {device}: {answer}")
        if not readings:
            self.close()
            raise SensorError(faults[-1])
        return readings

    def close(self) -> None:
        if self._started:
            self._started = False
            with contextlib.suppress(self._error):  # a driver that is gone has nothing to stop
                self._stop()

    def _try_device(self, device: int) -> Reading | str:
        try:
            handle = self._handle(device)
            chip_c = self._chip_c(handle)
            wants_memory = self._sensor is not Sensor.CHIP
            memory_c = self._optional(self._memory_c, handle) if wants_memory else None
            temperature_c = self._sensor.pick(chip_c, memory_c)
            if temperature_c is None:
                return f"it has no {self._sensor.value} sensor"
            return Reading(device, temperature_c, self._optional(self._power_w, handle))
        except self._error as error:
            return self._named(error)

    def _optional(self, measure: Any, handle: Any) -> float | None:
        """Not every board measures its power or its memory; the chip is what counts."""
        try:
            return float(measure(handle))
        except (self._error, SensorError):
            return None

    def _named(self, error: Exception) -> str:
        return str(error)

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _stop(self) -> None: ...

    @abstractmethod
    def _count(self) -> int: ...

    @abstractmethod
    def _handle(self, device: int) -> Any: ...

    @abstractmethod
    def _chip_c(self, handle: Any) -> float: ...

    @abstractmethod
    def _memory_c(self, handle: Any) -> float: ...

    @abstractmethod
    def _power_w(self, handle: Any) -> float: ...
