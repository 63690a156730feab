"""Intel Gaudi devices, through HLML (``pip install 'trencadis-scheduler[hlml]'``).

The calls are those of habana-pyhlml; units and sensors are from its reference,
https://docs.habana.ai/en/latest/API_Reference_Guides/PYHLML_APIs/Per_Device_APIs.html. It needs
the Gaudi driver's ``/usr/lib/habanalabs/libhlml.so``.
"""

from __future__ import annotations

from typing import Any

from trencadis.scheduler.telemetry.device_library import DeviceLibrarySource
from trencadis.scheduler.telemetry.source import Sensor, import_extra

ON_CHIP = 0
"""``HLML_TEMPERATURE_ON_AIP``, the accelerator itself."""

HBM = 3
"""``HLML_TEMPERATURE_HBM``, its memory; not every driver knows it."""


class HlmlSource(DeviceLibrarySource):
    """Every device that HLML shows. ``sensor``: which temperature counts. Raises `MissingExtra`."""

    def __init__(self, sensor: Sensor = Sensor.CHIP) -> None:
        self._hlml = import_extra("pyhlml", library="habana-pyhlml", extra="hlml")
        super().__init__(sensor, self._hlml.HLMLError)

    @property
    def name(self) -> str:
        return "hlml"

    def _start(self) -> None:
        try:
            self._hlml.hlmlInit()
        except self._hlml.HLMLError as error:
            # Somebody else in this process got there first, and HLML is ready all the same.
            if type(error).__name__ != "HLMLError_AlreadyInitialized":
                raise

    def _stop(self) -> None:
        self._hlml.hlmlShutdown()

    def _count(self) -> int:
        return int(self._hlml.hlmlDeviceGetCount())

    def _handle(self, device: int) -> Any:
        return self._hlml.hlmlDeviceGetHandleByIndex(device)

    def _chip_c(self, handle: Any) -> float:
        return float(self._hlml.hlmlDeviceGetTemperature(handle, ON_CHIP))

    def _memory_c(self, handle: Any) -> float:
        return float(self._hlml.hlmlDeviceGetTemperature(handle, HBM))

    def _power_w(self, handle: Any) -> float:
        return float(self._hlml.hlmlDeviceGetPowerUsage(handle)) / 1000  # milliwatts

    def _named(self, error: Exception) -> str:
        """HLML's errors print a number only; their class says which."""
        return f"{error} ({type(error).__name__})"
