"""A tensor that says it is on ``hpu``, and whose every operation goes to the bridge."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from gaudi_standin.memory import Buffer, DeviceMemory, Hold
from gaudi_standin.rules import StaleOutput, StorageMoved
from gaudi_standin.tree import flatten, map_only

if TYPE_CHECKING:
    import numpy as np

    from gaudi_standin.bridge import Bridge

DEVICE = torch.device("hpu", 0)

_bridge: list[Bridge] = []


def on_device(bridge: Bridge) -> None:
    """All tensors are on this one."""
    _bridge[:] = [bridge]


class HPUTensor(torch.Tensor):
    """A tensor in device memory. To PyTorch's C++ it is a CPU tensor without storage."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls, buffer: Buffer, stamp: int | None = None, *, is_view: bool = False
    ) -> HPUTensor:
        value = buffer.value
        if value.is_complex():  # backend/helpers/tensor_utils.cpp:688-691 of the bridge
            raise RuntimeError("Complex datatype is not supported on HPU device.")
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            value.size(),
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device="cpu",
            requires_grad=False,
        )
        made.buffer = buffer
        made.is_view = is_view
        made._stamp = stamp
        made._hold = Hold(buffer.allocation)
        return made

    def check_current(self) -> None:
        """Raise `StaleOutput` where a later replay has written over this output."""
        if self._stamp is not None and self._stamp != self.buffer.allocation.generation:
            raise StaleOutput(
                f"output of replay {self._stamp} read after replay "
                f"{self.buffer.allocation.generation}: its memory is written by each replay"
            )

    def move_to(self, buffer: Buffer) -> None:
        """Take another place in memory, as ``data =`` and ``set_`` do."""
        if buffer.value.shape != self.shape:
            raise NotImplementedError("the stand-in moves tensors of one shape only")
        self.buffer.allocation.moved = True
        self.buffer = buffer
        self._hold = Hold(buffer.allocation)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_traced(args, kwargs):
            return _trace(func, args, kwargs)
        if func is torch.ops.aten.set_.source_Tensor:
            args[0].move_to(args[1].buffer)
            return args[0]
        # In inference mode composite operations come whole, and may or may not return a view.
        if _is_composite(func):
            return func.decompose(*args, **kwargs)
        return _bridge[0].dispatch(func, args, kwargs)

    # For torch.compile: PyTorch traces the values that a tensor consists of.

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["value"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: Any) -> HPUTensor:
        return _untracked(inner["value"])

    @property
    def value(self) -> torch.Tensor:
        return self.buffer.value

    # What the host sees of it.

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_hpu(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        self.move_to(other.buffer)

    def data_ptr(self) -> int:
        return self.buffer.value.data_ptr()

    def get_device(self) -> int:
        return 0

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, dtype, copy = _target(*args, **kwargs)
        if device is not None and device.type != "hpu":
            blocking = not kwargs.get("non_blocking", False)
            host = _bridge[0].read(self, "to the host", blocking=blocking)
            return host if dtype is None else host.to(dtype)
        if dtype is None or dtype == self.dtype:
            return self.clone() if copy else self
        return torch.ops.aten._to_copy.default(self, dtype=dtype)

    def cpu(self) -> torch.Tensor:
        return _bridge[0].read(self, "cpu")

    def numpy(self) -> np.ndarray:
        raise TypeError("can't convert hpu:0 device type tensor to numpy: use Tensor.cpu() first")

    def item(self) -> Any:
        return _bridge[0].read(self, "item").item()

    def tolist(self) -> Any:
        return _bridge[0].read(self, "tolist").tolist()

    def __bool__(self) -> bool:
        return bool(_bridge[0].read(self, "bool"))

    def __int__(self) -> int:
        return int(_bridge[0].read(self, "int"))

    def __float__(self) -> float:
        return float(_bridge[0].read(self, "float"))

    def __index__(self) -> int:
        return int(_bridge[0].read(self, "index"))

    def __repr__(self) -> str:
        return f"HPUTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device='hpu:0')"


def check_in_place(moved: bool) -> None:
    """Raise `StorageMoved` where an input of a graph is elsewhere now."""
    if moved:
        raise StorageMoved(
            "an input of the graph lies at another address than when it was captured: "
            "copy new values into the tensor that the graph reads"
        )


def to_device(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``Tensor.to`` for host tensors, with a way to the device."""

    def moved(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device", args[0] if args else None)
        if isinstance(device, torch.Tensor):
            device = device.device
        if not (isinstance(device, (str, torch.device)) and torch.device(device).type == "hpu"):
            return to(self, *args, **kwargs)
        dtype = _target(*args, **kwargs)[1]
        return _bridge[0].upload(self if dtype is None else to(self, dtype))

    return moved


def made_on_device(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``torch.tensor`` and ``torch.as_tensor`` with a way to the device."""

    def made(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "hpu":
            return make(*args, device=device, **kwargs)
        return make(*args, **kwargs).to(DEVICE)

    return made


def _target(
    *args: Any, copy: bool = False, **kwargs: Any
) -> tuple[torch.device | None, torch.dtype | None, bool]:
    """What ``Tensor.to`` was asked for."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0].device, args[0].dtype, copy
    kwargs.pop("memory_format", None)
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, copy


@functools.cache
def _is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return key in func.py_kernels or func.has_kernel_for_dispatch_key(key)


def _is_traced(args: Any, kwargs: Any) -> bool:
    """Whether the compiler looks at shapes: nothing is computed and nothing is counted."""
    return any(
        isinstance(leaf.buffer.value if isinstance(leaf, HPUTensor) else leaf, FakeTensor)
        for leaf in flatten((args, kwargs))[0]
    )


def _trace(func: Any, args: Any, kwargs: Any) -> Any:
    # What a factory made is not a wrapper, and says itself that it is on the device.
    map_only(FakeTensor, _put_on_cpu, (args, kwargs))
    inner_args, inner_kwargs = map_only(HPUTensor, lambda t: t.buffer.value, (args, kwargs))
    if inner_kwargs.get("device") is not None:
        inner_kwargs["device"] = torch.device("cpu")
    out = func(*inner_args, **inner_kwargs)
    inference = torch.is_inference_mode_enabled()
    if func.is_view:
        inference = next(x for x in args if isinstance(x, torch.Tensor)).is_inference()
    with torch.inference_mode(mode=inference):
        wrapped = map_only(torch.Tensor, _untracked, out)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


def _put_on_cpu(tensor: FakeTensor) -> None:
    tensor.fake_device = torch.device("cpu")


class _Nowhere(DeviceMemory):
    def __init__(self) -> None:
        self.limit, self.in_use, self.peak = 1, 0, 0


_NOWHERE = _Nowhere()


def _untracked(value: torch.Tensor) -> HPUTensor:
    from gaudi_standin.memory import Allocation

    return HPUTensor(Buffer(value, Allocation(0, _NOWHERE)))
