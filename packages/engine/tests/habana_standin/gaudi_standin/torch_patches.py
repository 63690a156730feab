"""What the bridge changes in PyTorch when it is imported, and how that is taken back.

The real one registers kernels for the ``HPU`` dispatch key and replaces functions of ``torch``
(``habana_frameworks/torch/core/torch_overwrites.py``).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch.utils._device import _device_constructors

from gaudi_standin.bridge import BRIDGE
from gaudi_standin.custom_ops import register
from gaudi_standin.tensor import made_on_device, to_device

_MADE_WHOLE = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace")
"""Factories that would otherwise make an empty tensor and let an operation resize it."""

_undo: list[Any] = []


def apply(module: ModuleType) -> None:
    """Make ``hpu`` a device on which tensors can be made, and ``module`` be ``torch.hpu``."""
    torch._register_device_module("hpu", module)
    _undo.append(_forget_module)
    library = torch.library.Library("aten", "IMPL", "HPU")
    library.impl("empty.memory_format", _empty)
    library.impl("empty_strided", _empty_strided)
    for name in _MADE_WHOLE:
        library.impl(name, _factory(name))
    _undo.append(library._destroy)
    _undo.append(register()._destroy)
    # `with torch.device(...)` knows constructors by identity, and lists them once.
    _device_constructors()
    _replace(torch.Tensor, "to", to_device(torch.Tensor.to))
    _replace(torch, "tensor", made_on_device(torch.tensor))
    _replace(torch.Tensor, "pin_memory", _pin_memory)
    _replace(torch, "as_tensor", made_on_device(torch.as_tensor))
    _replace(torch, "compile", _counted(torch.compile))


def on_removal(undo: Callable[[], None]) -> None:
    """Call ``undo`` when the stand-in is taken out of the process."""
    _undo.append(undo)


def take_back() -> None:
    """Leave PyTorch as it was."""
    while _undo:
        _undo.pop()()


def _counted(compiler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiler)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        BRIDGE.counters.compile_calls += 1
        return compiler(*args, **kwargs)

    return compiled


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """A copy; that it is pinned changes time alone (``HPUHooks::getPinnedMemoryAllocator``)."""
    return self.clone()


def _forget_module() -> None:
    del torch.hpu
    sys.modules.pop("torch.hpu", None)


def _replace(owner: Any, name: str, new: Any) -> None:
    old = getattr(owner, name)
    setattr(owner, name, new)
    _undo.append(lambda: setattr(owner, name, old))


def _factory(name: str) -> Callable[..., torch.Tensor]:
    packet, _, overload = name.partition(".")
    func = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def make(*args: Any, **kwargs: Any) -> Any:
        kwargs.update(device=torch.device("cpu"), pin_memory=None)
        return BRIDGE.dispatch(func, args, kwargs)

    return make


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        value = torch.empty(size, dtype=dtype)
    return BRIDGE.place(value)


def _empty_strided(
    size: Any,
    stride: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
) -> torch.Tensor:
    with torch.inference_mode(mode=False):
        value = torch.empty_strided(size, stride, dtype=dtype)
    return BRIDGE.place(value)
