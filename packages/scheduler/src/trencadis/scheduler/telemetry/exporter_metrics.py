"""Metric names of three vendors' Prometheus exporters for temperature and power."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class ExporterMetrics:
    """The metric names of a vendor, preferred name first.

    ``label``: the label with the device index. Every vendor has temperatures in degrees C.
    ``watts_per_unit`` converts power to watts.
    """

    vendor: str
    label: str
    chip: tuple[str, ...]
    memory: tuple[str, ...] = ()
    power: tuple[str, ...] = ()
    watts_per_unit: float = 1.0

    @property
    def names(self) -> tuple[str, ...]:
        """All metric names of the vendor that are read."""
        return (*self.chip, *self.memory, *self.power)


DCGM = ExporterMetrics(
    vendor="DCGM",
    label="gpu",
    chip=("DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_DEV_GPU_TEMP_CELSIUS"),
    memory=("DCGM_FI_DEV_MEMORY_TEMP", "DCGM_FI_DEV_MEMORY_TEMP_CELSIUS"),
    power=("DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_BOARD_POWER_WATTS"),
)
"""NVIDIA's dcgm-exporter. The collector file sets the name of each metric. The first names are the
defaults; the second ones are the field names since DCGM 4.6.
https://docs.nvidia.com/datacenter/dcgm/latest/reference/dcgm-exporter-metrics.html"""

GAUDI = ExporterMetrics(
    vendor="Gaudi",
    label="id",
    chip=("habanalabs_temperature_onchip",),
    power=("habanalabs_power_mW",),
    watts_per_unit=1e-3,
)
"""Intel's Gaudi metric exporter. It has no memory temperature.
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
"""Default prefix of AMD's operator; the exporter alone has no prefix."""

EXPORTERS = (DCGM, GAUDI, ROCM)

DCGM_BLANK = float(0x7FFFFFF0)
"""Values from here on mean "not found", "not supported" or "no permission" in DCGM, and exporters
pass them on. It is the base of the 32-bit blank values; those of 64 bits and doubles are larger.
https://docs.nvidia.com/datacenter/dcgm/latest/reference/dcgm-api/dcgm-api-enums.html"""
