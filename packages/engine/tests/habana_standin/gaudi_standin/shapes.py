"""The shape of a result before it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from gaudi_standin.memory import Buffer
from gaudi_standin.program import compute, constant_key
from gaudi_standin.tree import Spec, flatten


@attrs.frozen
class Outline:
    """A result's tree, with ``(size, stride, dtype)`` for each tensor and other leaves as is."""

    leaves: tuple[Any, ...]
    spec: Spec


@attrs.frozen
class TensorOutline:
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        reach = sum((n - 1) * s for n, s in zip(self.size, self.stride, strict=True))
        return 0 if 0 in self.size else (reach + 1) * self.dtype.itemsize


_known: dict[tuple[Any, ...], Outline] = {}


def outline(func: Callable[..., Any], leaves: list[Any], spec: Spec) -> Outline:
    """What ``func`` would return, from PyTorch's own shape functions; no value is read."""
    key = (func, *(x.key if isinstance(x, Buffer) else constant_key(x) for x in leaves), spec)
    try:
        found = _known.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _derive(func, leaves, spec)
    if found is None:
        found = _known[key] = _derive(func, leaves, spec)
    return found


def _derive(func: Callable[..., Any], leaves: list[Any], spec: Spec) -> Outline:
    result_leaves, result_spec = flatten(compute(func, [_meta(x) for x in leaves], spec))
    outlined = tuple(
        TensorOutline(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x
        for x in result_leaves
    )
    return Outline(outlined, result_spec)


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, Buffer):
        v = leaf.value
        return torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device="meta")
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return leaf
