"""The devices that a model can run on. No code outside this package depends on which one.

To add a device: a `Device` subclass in a module of its own, a row in `DEVICES`, and its name in
`trencadis.engine.config.DEVICES`. A device of another package needs neither: its users name it as
``module:Class``.
"""

from __future__ import annotations

import logging
import pkgutil
from pathlib import Path
from typing import Any

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


_ATTRIBUTES: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "torch_device": torch.device,
    "preferred_dtype": torch.dtype,
    "default_kv_cache_memory": (int, type(None)),
}
"""The attributes of `Device` without a value, and the types that each may have."""


def select_device(
    device: str | Device,
    compile_cache: Path | None = None,
    *,
    fp32_softmax: bool = False,
    cpu_threads: int | None = None,
) -> Device:
    """A device by its name: ``auto`` (hpu, then cuda, then cpu), a key of `DEVICES`, or
    ``module:Class``. A `Device` is checked and returned.

    ``compile_cache`` is the directory for compiled programs, for a device that needs it at load
    time. ``fp32_softmax`` is for hpu, ``cpu_threads`` for cpu. Raises `ConfigError` for an unknown
    name, `DeviceError` for a device that is missing or incomplete.
    """
    selected = _select(device, compile_cache, fp32_softmax, cpu_threads)
    if cpu_threads is not None and not isinstance(selected, CPUDevice):
        raise ConfigError(
            f"cpu_threads {cpu_threads} is for device cpu, and this is {selected.name}: leave it "
            "out, or set OMP_NUM_THREADS",
            "cpu_threads",
        )
    return selected


def _select(
    device: str | Device, compile_cache: Path | None, fp32_softmax: bool, cpu_threads: int | None
) -> Device:
    if isinstance(device, Device):
        return _complete(device)
    if device == "auto":
        return _best_device(compile_cache, fp32_softmax, cpu_threads)
    if device == "simulated":
        raise ConfigError(
            "device simulated serves traces alone: use the command trencadis-simulate"
        )
    if ":" in device:
        return _complete(_import(device))
    if device not in DEVICES:
        raise ConfigError(
            f"device must be auto, {', '.join(DEVICES)} or module:Class, got {device!r}", "device"
        )
    if device == "hpu":
        return HPUDevice(compile_cache, fp32_softmax=fp32_softmax)
    return CPUDevice(cpu_threads) if device == "cpu" else DEVICES[device]()


def _import(path: str) -> Device:
    """The device of the class at ``module:Class``, which is constructed without arguments."""
    try:
        device_class: Any = pkgutil.resolve_name(path)
    except Exception as error:  # importing a module runs it, so any error may leave it
        raise DeviceError(
            f"device {path!r} cannot be imported ({type(error).__name__}: {error}): name a class "
            "as module:Class, in a module that Python finds (PYTHONPATH)",
            "device",
        ) from error
    if not isinstance(device_class, type) or not issubclass(device_class, Device):
        raise DeviceError(
            f"device {path!r} is no subclass of trencadis.engine.Device: derive it from that class",
            "device",
        )
    try:
        return device_class()
    except TypeError as error:  # it wants arguments, or lacks methods
        raise DeviceError(f"device {path!r} cannot be constructed: {error}", "device") from error


def _complete(device: Device) -> Device:
    """The device. Raises `DeviceError` for an attribute that is missing or of a wrong type."""
    for name, accepted in _ATTRIBUTES.items():
        value = getattr(device, name, ...)
        if value is ... or not isinstance(value, accepted):
            found = "does not set" if value is ... else f"has {value!r} as"
            raise DeviceError(
                f"device {type(device).__name__} {found} {name}: see trencadis.engine.Device for "
                "its meaning and type",
                "device",
            )
    return device


def _best_device(compile_cache: Path | None, fp32_softmax: bool, cpu_threads: int | None) -> Device:
    """hpu, then cuda, then cpu. A Gaudi whose software does not load gives only a warning."""
    if hpu_is_installed():
        try:
            return HPUDevice(compile_cache, fp32_softmax=fp32_softmax)
        except DeviceError as error:
            logger.warning("%s", error)
    return CUDADevice() if torch.cuda.is_available() else CPUDevice(cpu_threads)
