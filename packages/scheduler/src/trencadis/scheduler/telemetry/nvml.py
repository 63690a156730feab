"""NVIDIA devices, through NVML (``pip install 'trencadis-scheduler[nvml]'``).

nvidia-ml-py wraps NVML in the module ``pynvml``. Units: NVML API reference,
https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html.
"""

from __future__ import annotations

from typing import Any

from trencadis.scheduler.telemetry.device_library import DeviceLibrarySource
from trencadis.scheduler.telemetry.errors import SensorError
from trencadis.scheduler.telemetry.source import Sensor, import_extra


class NvmlSource(DeviceLibrarySource):
    """Every device that NVML lists. ``sensor``: which temperature counts. Raises `MissingExtra`."""

    def __init__(self, sensor: Sensor = Sensor.CHIP) -> None:
        self._nvml = import_extra("pynvml", library="nvidia-ml-py", extra="nvml")
        super().__init__(sensor, self._nvml.NVMLError)

    @classmethod
    def from_argument(cls, argument: str) -> NvmlSource:
        """The source ``nvml:argument``; the argument is the value of a `Sensor`, or empty."""
        return cls(Sensor.from_argument(argument))

    @property
    def name(self) -> str:
        return "nvml"

    def _initialize(self) -> None:
        self._nvml.nvmlInit()

    def _shut_down(self) -> None:
        self._nvml.nvmlShutdown()

    def _count(self) -> int:
        return int(self._nvml.nvmlDeviceGetCount())

    def _handle(self, device: int) -> Any:
        return self._nvml.nvmlDeviceGetHandleByIndex(device)

    def _chip_c(self, handle: Any) -> float:
        # CUDA 14 removes nvmlDeviceGetTemperature; older drivers lack its successor.
        try:
            celsius = self._nvml.nvmlDeviceGetTemperatureV(handle, self._nvml.NVML_TEMPERATURE_GPU)
        except (AttributeError, self._nvml.NVMLError_FunctionNotFound):
            celsius = self._nvml.nvmlDeviceGetTemperature(handle, self._nvml.NVML_TEMPERATURE_GPU)
        return float(celsius)

    def _memory_c(self, handle: Any) -> float:
        field = self._nvml.NVML_FI_DEV_MEMORY_TEMP
        (answer,) = self._nvml.nvmlDeviceGetFieldValues(handle, [field])
        if answer.nvmlReturn != self._nvml.NVML_SUCCESS:
            raise SensorError("no memory sensor")
        return float(answer.value.uiVal)

    def _power_w(self, handle: Any) -> float:
        return float(self._nvml.nvmlDeviceGetPowerUsage(handle)) / 1000  # milliwatts
