"""NVIDIA devices, through NVML (``pip install 'trencadis-scheduler[nvml]'``).

The calls are NVML's, as nvidia-ml-py wraps them in the module ``pynvml``; their units are from
the NVML API reference, https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html.
"""

from __future__ import annotations

from typing import Any

from trencadis.scheduler.telemetry.device_library import DeviceLibrarySource
from trencadis.scheduler.telemetry.errors import SensorError
from trencadis.scheduler.telemetry.source import Sensor, import_extra


class NvmlSource(DeviceLibrarySource):
    """Every device that NVML shows. ``sensor``: which temperature counts. Raises `MissingExtra`."""

    def __init__(self, sensor: Sensor = Sensor.CHIP) -> None:
        self._nvml = import_extra("pynvml", library="nvidia-ml-py", extra="nvml")
        super().__init__(sensor, self._nvml.NVMLError)

    @property
    def name(self) -> str:
        return "nvml"

    def _start(self) -> None:
        self._nvml.nvmlInit()

    def _stop(self) -> None:
        self._nvml.nvmlShutdown()

    def _count(self) -> int:
        return int(self._nvml.nvmlDeviceGetCount())

    def _handle(self, device: int) -> Any:
        return self._nvml.nvmlDeviceGetHandleByIndex(device)

    def _chip_c(self, handle: Any) -> float:
        # nvmlDeviceGetTemperature leaves with CUDA 14; older drivers lack its successor.
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
