"""Where the model runs. Nothing outside this package asks which device it is on."""

from __future__ import annotations

import logging

import torch

from trencadis.engine.devices.cpu import CPUDevice
from trencadis.engine.devices.cuda import CUDADevice
from trencadis.engine.devices.device import Device, Graph
from trencadis.engine.devices.hpu import HPUDevice
from trencadis.engine.devices.hpu.bridge import is_installed as hpu_is_installed
from trencadis.engine.errors import ConfigError, DeviceError

__all__ = ["CPUDevice", "CUDADevice", "Device", "Graph", "HPUDevice", "select_device"]

logger = logging.getLogger("trencadis.engine")

_DEVICES: dict[str, type[Device]] = {"cpu": CPUDevice, "cuda": CUDADevice, "hpu": HPUDevice}


def select_device(name: str) -> Device:
    """The device called ``name``; ``auto`` takes hpu, then cuda, then cpu.

    Raises `ConfigError` for a name that is not known, `DeviceError` where the device is not there.
    """
    if name == "auto":
        return _best_device()
    if name not in _DEVICES:
        raise ConfigError(f"device must be auto, {', '.join(_DEVICES)}, got {name!r}")
    return _DEVICES[name]()


def _best_device() -> Device:
    """A Gaudi whose software is there but does not work is worth a warning, not the start."""
    if hpu_is_installed():
        try:
            return HPUDevice()
        except DeviceError as error:
            logger.warning("%s", error)
    return CUDADevice() if torch.cuda.is_available() else CPUDevice()
