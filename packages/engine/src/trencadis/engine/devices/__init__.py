"""The devices that a model can run on. No code outside this package depends on which one.

To add a device: a `Device` subclass in a module of its own, a row in `DEVICES`, and its name in
`trencadis.engine.config.DEVICES`.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from trencadis.engine.devices.cpu import CPUDevice
from trencadis.engine.devices.cuda import CUDADevice
from trencadis.engine.devices.device import Device, Graph, PendingCopy
from trencadis.engine.devices.hpu import HPUDevice
from trencadis.engine.devices.hpu.bridge import is_installed as hpu_is_installed
from trencadis.engine.errors import ConfigError, DeviceError

__all__ = [
    "CPUDevice",
    "CUDADevice",
    "Device",
    "Graph",
    "HPUDevice",
    "PendingCopy",
    "select_device",
]

logger = logging.getLogger("trencadis.engine")

DEVICES: dict[str, type[Device]] = {"cpu": CPUDevice, "cuda": CUDADevice, "hpu": HPUDevice}


def select_device(name: str, compile_cache: Path | None = None) -> Device:
    """The device called ``name``; ``auto`` takes hpu, then cuda, then cpu.

    ``compile_cache`` is the directory for compiled programs, for a device that needs it at load
    time. Raises `ConfigError` for an unknown name, `DeviceError` for a missing device.
    """
    if name == "auto":
        return _best_device(compile_cache)
    if name == "simulated":
        raise ConfigError(
            "device simulated serves traces alone: use the command trencadis-simulate"
        )
    if name not in DEVICES:
        raise ConfigError(f"device must be auto, {', '.join(DEVICES)}, got {name!r}")
    return HPUDevice(compile_cache) if name == "hpu" else DEVICES[name]()


def _best_device(compile_cache: Path | None) -> Device:
    """hpu, then cuda, then cpu. A Gaudi whose software does not load gives only a warning."""
    if hpu_is_installed():
        try:
            return HPUDevice(compile_cache)
        except DeviceError as error:
            logger.warning("%s", error)
    return CUDADevice() if torch.cuda.is_available() else CPUDevice()
