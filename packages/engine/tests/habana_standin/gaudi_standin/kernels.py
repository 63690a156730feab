"""Which operations have a kernel, and what the kernels do otherwise than PyTorch's.

Paths are those of HabanaAI/gaudi-pytorch-bridge 1.19.0 (commit 5a56187). ``kernels.txt`` has the
names of ``scripts/hpu_op.yaml`` and ``scripts/ops_list/ops.hpu``, without those of training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

KERNELS = frozenset(Path(__file__).with_name("kernels.txt").read_text().split())

_MAX_INDEX_SELECT_RANK = 5
"""``IndexSelectFallbackCheck``, ``hpu_ops/lazy/index_select_gen.cpp:19-24``."""

_INDEX_ADD = {aten.index_add.default, aten.index_add_.default}
_INDEX_PUT = {
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
_INDEX_REDUCE = {aten.index_reduce.default, aten.index_reduce_.default}


_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}


class RoundedProducts(TorchDispatchMode):
    """fp32 matrix products of inputs with the mantissa of TF32, 10 bits.

    That is what devices may do whose matrix engines have narrower types (huggingface/transformers#
    48428). The numbers of Intel's are not public, so it applies where `Bridge.rounds_products` is
    set: by default tokens can be compared with the CPU's.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            args = (*args[:-2], *map(_with_short_mantissa, args[-2:]))
        return func(*args, **(kwargs or {}))


def _with_short_mantissa(value: torch.Tensor) -> torch.Tensor:
    if value.dtype is not torch.float32:
        return value
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def name_of(func: Any) -> str:
    """The name of an operation without namespace and overload."""
    return str(func._schema.name.split("::")[-1])


def runs_on_host(func: Any, leaves: list[Any], *, lazy: bool) -> bool:
    """Whether the operation has no kernel and is computed on the CPU.

    Rule: ``hpu_ops/cpu_fallback.cpp:90-118``, the fallback of the dispatch key HPU. Operations that
    PyTorch itself makes of others are not affected.
    """
    if func in _INDEX_ADD:
        # ``habana_eager/unused_link_symbols.cpp:109-118``: not supported by the eager frontend.
        return not lazy
    if func in _INDEX_REDUCE:
        # ``hpu_ops/backend/index_reduce_gen.cpp:20-34``: amax along the first dimension alone.
        _, dim, _, _, reduce, *include_self = leaves
        return not (dim == 0 and reduce == "amax" and (include_self or [True])[0])
    if func is aten.index_select.default:
        return bool(leaves[0].dim() > _MAX_INDEX_SELECT_RANK)
    if func.namespace != "aten" or func.is_view or name_of(func) in KERNELS:
        return False
    if name_of(func).rstrip("_") in KERNELS:
        return False
    return not torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeExplicitAutograd"
    )


def copied_bytes(func: Any, args: Any, *, lazy: bool) -> int:
    """Bytes of a tensor that the operation copies whole to change some of its rows.

    ``index_put_`` computes into a new tensor and copies that back
    (``habana_kernels/lazy_kernels.cpp:3365-3372``, ``habana_eager/ops/index_put.cpp:478-487``).
    An index of None is first expanded to the coordinates of every element that is written, one
    int32 per dimension (``generate_advanced_indexing_indices_list``, ``lazy_kernels.cpp:2376``,
    ``index_put.cpp:173-356``). ``index_add_`` copies its result back (``lazy_kernels.cpp:
    3020-3024``). ``index_copy_`` has a kernel that works in place (``scripts/hpu_op.yaml:
    3624-3629``).
    """
    target = args[0]
    if func is aten.index_add_.default:
        return int(target.nbytes) if lazy else 0
    if func not in _INDEX_PUT or not func._schema.is_mutable:
        return 0
    indices, values = args[1], args[2]
    expanded = any(index is None for index in indices) or len(indices) < target.dim()
    coordinates = values.numel() * target.dim() * 4 if expanded else 0
    return int(target.nbytes) + coordinates


def kernel_for(func: Callable[..., Any], values: list[Any], *, lazy: bool) -> Callable[..., Any]:
    """What the device computes for ``func``, on CPU tensors.

    In lazy mode ``index_add`` selects, adds and scatters unless there are more indices than rows:
    of several entries with one index, one alone is kept (``habana_kernels/lazy_kernels.cpp:
    3006-3014``, ``habana_kernels/index_kernels.cpp:501-607``).
    """
    if func is aten.index_copy_.default and values[0].itemsize == 1:
        return index_copy_
    if func in _INDEX_ADD and lazy:
        target, dim, index = values[:3]
        if index.numel() <= (target.shape[dim] if target.dim() else 1):
            return _index_add_ if func is aten.index_add_.default else _index_add
    return func


def index_copy_(
    target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    """``index_copy_`` of bytes: PyTorch has none of 8-bit floats on a CPU.

    The device has (``tests/pytest_working/any_mode/test_hpu_index_copy.py:25``).
    """
    if source.dtype != target.dtype:
        raise RuntimeError(f"index_copy_(): {target.dtype} and {source.dtype}")
    target.view(torch.uint8).index_copy_(dim, index, source.view(torch.uint8))
    return target


def _index_add(
    target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1
) -> torch.Tensor:
    return _index_add_(target.clone(), dim, index, source, alpha=alpha)


def _index_add_(
    target: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: Any = 1
) -> torch.Tensor:
    return target.index_copy_(dim, index, target.index_select(dim, index) + source * alpha)
