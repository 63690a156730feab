"""The common part of NVML and HLML: initialize a library, and read each device by its index."""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from typing import Any

from trencadis.scheduler.telemetry.errors import SensorError
from trencadis.scheduler.telemetry.source import Reading, Sensor, TemperatureSource


class DeviceLibrarySource(TemperatureSource):
    """Every device that a vendor's library lists, by the library's index.

    The library is initialized at the first reading, and again after all devices were lost, so that
    the driver may be reloaded while the engine runs. A failed device is skipped; the others are
    still read. ``error`` is the library's base class of errors.
    """

    def __init__(self, sensor: Sensor, error: type[Exception]) -> None:
        self._sensor = sensor
        self._error = error
        self._initialized = False

    def read(self) -> list[Reading]:
        """One reading for each device that answers. Raises `SensorError` if none does."""
        try:
            if not self._initialized:
                self._initialize()
                self._initialized = True
            count = self._count()
        except self._error as error:
            self.close()
            raise SensorError(f"{self.name} does not answer: {self._describe(error)}") from error
        readings, faults = [], [f"{self.name} lists no device"]
        for device in range(count):
            result = self._read_device(device)
            if isinstance(result, Reading):
                readings.append(result)
            else:
                faults.append(f"{self.name} device {device}: {result}")
        if not readings:
            self.close()
            raise SensorError(faults[-1])
        return readings

    def close(self) -> None:
        if self._initialized:
            self._initialized = False
            with contextlib.suppress(self._error):  # the driver may be gone
                self._shut_down()

    def _read_device(self, device: int) -> Reading | str:
        """A reading, or the fault of the device."""
        try:
            handle = self._handle(device)
            chip_c = self._chip_c(handle)
            needs_memory = self._sensor is not Sensor.CHIP
            memory_c = self._optional(self._memory_c, handle) if needs_memory else None
            temperature_c = self._sensor.select(chip_c, memory_c)
            if temperature_c is None:
                return f"it has no {self._sensor.value} sensor"
            return Reading(device, temperature_c, self._optional(self._power_w, handle))
        except self._error as error:
            return self._describe(error)

    def _optional(self, measure: Any, handle: Any) -> float | None:
        """A measurement that not every board has; None if it fails."""
        try:
            return float(measure(handle))
        except (self._error, SensorError):
            return None

    def _describe(self, error: Exception) -> str:
        return str(error)

    @abstractmethod
    def _initialize(self) -> None: ...

    @abstractmethod
    def _shut_down(self) -> None: ...

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
