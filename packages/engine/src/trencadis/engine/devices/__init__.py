"""The devices that a model can run on. No code outside this package depends on which one.

To add a device: a `Device` subclass in a module of its own, a row in `DEVICES`, and its name in
``DEVICES`` of `trencadis.engine.settings.engine_config`. A device of another package needs neither:
its users name it as ``module:Class``.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Callable, Mapping
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
    "class_of_device",
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
    trust_compile_cache: bool = False,
    read_only: bool = False,
    fp32_softmax: bool = False,
    cpu_threads: int | None = None,
    num_ranks: int = 1,
) -> Device:
    """A device by its name: ``auto`` (hpu, then cuda, then cpu), a key of `DEVICES`, or
    ``module:Class``. A `Device` is checked and returned.

    ``compile_cache`` is the directory for compiled programs, for a device that needs it at load
    time; with ``trust_compile_cache`` those of other users are loaded, too, and with ``read_only``
    nothing is added to it. ``fp32_softmax`` is for hpu, ``cpu_threads`` for cpu; ``num_ranks`` is
    the number of processes with such a device that serve one model.
    Raises `ConfigError` for an unknown name, `DeviceError` for a device that is missing or
    incomplete.
    """
    cpu = functools.partial(CPUDevice, cpu_threads, num_ranks=num_ranks)
    hpu = functools.partial(HPUDevice, fp32_softmax=fp32_softmax, num_ranks=num_ranks)
    makers = _makers(cpu, hpu, compile_cache, trust_compile_cache, read_only)
    selected = _select(device, makers)
    if cpu_threads is not None and not isinstance(selected, CPUDevice):
        raise ConfigError(
            f"cpu_threads {cpu_threads} is for device cpu, and this is {selected.name}: leave it "
            "out, or set OMP_NUM_THREADS",
            "cpu_threads",
        )
    return selected


def class_of_device(device: str | Device) -> type[Device] | None:
    """The class that `select_device` chooses for a name, which is not loaded.

    None for a device of another package, and for one that is loaded already.
    """
    if isinstance(device, Device):
        return None
    if device == "auto":
        device = "hpu" if hpu_is_installed() else "cuda" if torch.cuda.is_available() else "cpu"
    return DEVICES.get(device)


_Makers = Mapping[str, Callable[[], Device]]


def _makers(
    cpu: Callable[..., Device],
    hpu: Callable[..., Device],
    compile_cache: Path | None,
    trusted: bool,
    read_only: bool,
) -> _Makers:
    """How each device of `DEVICES` is made with these settings."""
    kernels = None if compile_cache is None or read_only else compile_cache / "kernels"
    return {
        **DEVICES,
        "cpu": lambda: cpu(kernels, trusted=trusted),
        "hpu": lambda: hpu(compile_cache, trusted=trusted, read_only=read_only),
    }


def _select(device: str | Device, makers: _Makers) -> Device:
    if isinstance(device, Device):
        return _complete(device)
    if device == "auto":
        return _best_device(makers)
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
    return makers[device]()


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
            f"device {path!r} is not a subclass of trencadis.engine.Device: derive it from that",
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


def _best_device(makers: _Makers) -> Device:
    """hpu, then cuda, then cpu. A Gaudi whose software does not load gives only a warning."""
    if hpu_is_installed():
        try:
            return makers["hpu"]()
        except DeviceError as error:
            logger.warning("%s", error)
    return makers["cuda" if torch.cuda.is_available() else "cpu"]()
