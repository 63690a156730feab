"""Intel Gaudi devices, through HLML (``pip install 'trencadis-scheduler[hlml]'``).

Calls, units and sensors: reference of habana-pyhlml,
https://docs.habana.ai/en/latest/API_Reference_Guides/PYHLML_APIs/Per_Device_APIs.html. It needs
``/usr/lib/habanalabs/libhlml.so`` of the Gaudi driver.
"""

from __future__ import annotations

from typing import Any

from trencadis.scheduler.telemetry.device_library import DeviceLibrarySource
from trencadis.scheduler.telemetry.errors import SensorError
from trencadis.scheduler.telemetry.source import Sensor, import_extra

ON_CHIP = 0
"""``HLML_TEMPERATURE_ON_AIP``: the chip."""

HBM = 3
"""``HLML_TEMPERATURE_HBM``: the memory; not every driver supports it."""


class HlmlSource(DeviceLibrarySource):
    """Every device that HLML lists. ``sensor``: which temperature counts. Raises `MissingExtra`."""

    def __init__(self, sensor: Sensor = Sensor.CHIP) -> None:
        self._hlml = import_extra("pyhlml", library="habana-pyhlml", extra="hlml")
        super().__init__(sensor, self._hlml.HLMLError)

    @classmethod
    def from_argument(cls, argument: str) -> HlmlSource:
        """The source ``hlml:argument``; the argument is the value of a `Sensor`, or empty."""
        return cls(Sensor.from_argument(argument))

    @property
    def name(self) -> str:
        return "hlml"

    def index_of_module(self, module: int) -> int | None:
        """The index of the device with this module id; None if no device has it.

        A process chooses its device by module id, and HLML lists devices in another order.
        """
        try:
            if not self._initialized:
                self._initialize()
                self._initialized = True
            for device in range(self._count()):
                if int(self._hlml.hlmlDeviceGetModuleID(self._handle(device))) == module:
                    return device
        except self._error as error:
            raise SensorError(
                f"hlml cannot tell which device is module {module}: {self._describe(error)}"
            ) from error
        return None

    def _initialize(self) -> None:
        try:
            self._hlml.hlmlInit()
        except self._hlml.HLMLError as error:
            # Another part of this process has initialized HLML: it is ready.
            if type(error).__name__ != "HLMLError_AlreadyInitialized":
                raise

    def _shut_down(self) -> None:
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

    def _describe(self, error: Exception) -> str:
        """HLML's errors print only a number, so the name of the class is added."""
        return f"{error} ({type(error).__name__})"
