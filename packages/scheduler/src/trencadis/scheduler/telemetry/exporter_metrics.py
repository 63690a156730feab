"""What three vendors' Prometheus exporters call a device's temperature and power."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ExporterMetrics:
    """Metric names by meaning, first the one to prefer; ``label`` holds the device's index.

    Temperatures are in degrees C with every vendor; ``watts_per_unit`` turns power into watts.
    """

    vendor: str
    label: str
    chip: tuple[str, ...]
    memory: tuple[str, ...] = ()
    power: tuple[str, ...] = ()
    watts_per_unit: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """Every metric name that means something here."""
        return (*self.chip, *self.memory, *self.power)


DCGM = ExporterMetrics(
    vendor="DCGM",
    label="gpu",
    chip=("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS"),
    memory=("DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_MEMORY_TEMP_CELSIUS"),
    power=("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS"),
)
"""NVIDIA's dcgm-exporter. An exported metric is called what its collector file calls the field:
the first names are the shipped ones, the second those that DCGM 4.6 renamed the fields to.
https://docs.nvidia.com/datacenter/dcgm/latest/reference/dcgm-exporter-metrics.html"""

GAUDI = ExporterMetrics(
    vendor="Gaudi",
    label="id",
    chip=("habanalabs_temperature_onchip",),
    power=("habanalabs_power_mW",),
    watts_per_unit=1e-3,
)
"""Intel's Gaudi metric exporter; it has no sensor of the memory.
https://docs.habana.ai/en/latest/Orchestration/Prometheus_Metric_Exporter.html"""

ROCM = ExporterMetrics(
    vendor="ROCm",
    label="gpu_id",
    chip=("gpu_junction_temperature", "gpu_edge_temperature"),
    memory=("gpu_memory_temperature", "gpu_hbm_temperature"),
    power=("gpu_package_power", "gpu_average_package_power", "gpu_power_usage"),
)
"""AMD's device metrics exporter: junction on MI3xx, edge on MI2xx.
https://github.com/ROCm/device-metrics-exporter/blob/main/docs/configuration/metricslist.md"""

ROCM_PREFIX = "amd_"
"""What AMD's operator puts before each name by default; the exporter alone puts nothing."""

EXPORTERS = (DCGM, GAUDI, ROCM)

DCGM_BLANK = float(0x7FFFFFF0)
"""From here on DCGM means "not found", "not supported" or "no permission", and exporters pass it
on as if it were a value: the base of its 32-bit blanks, below those of 64 bits and of doubles.
https://docs.nvidia.com/datacenter/dcgm/latest/reference/dcgm-api/dcgm-api-enums.html"""
