"""Where the model runs. Nothing outside this package asks which device it is on."""

from __future__ import annotations

from trencadis.engine.devices.cpu import CPUDevice
from trencadis.engine.devices.device import Device, Graph
from trencadis.engine.errors import ConfigError

__all__ = ["CPUDevice", "Device", "Graph", "select_device"]


def select_device(name: str) -> Device:
    """The device called ``name``; ``auto`` takes the best one present.

    Raises `ConfigError` for a name that is not known.
    """
    if name in ("auto", "cpu"):
        return CPUDevice()
    raise ConfigError(f"device must be auto or cpu, got {name!r}")
