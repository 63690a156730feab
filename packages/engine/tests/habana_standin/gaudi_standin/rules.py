"""What an HPU graph rejects, and which operations that concerns."""

from __future__ import annotations

from typing import Any

import torch

INFERENCE_DOC = (
    "https://docs.habana.ai/en/latest/PyTorch/Inference_on_PyTorch/Inference_Using_HPU_Graphs.html"
)
"""«Data-dependent dynamic flow is not supported», «Dynamic shapes are not supported», «They mandate
device-side input while maintaining constant output addresses», «Capturing HPU Graphs on models
containing in-place view updates is not supported»."""


class GraphViolation(RuntimeError):
    """Something that an HPU graph, or a compiled region, cannot contain."""


class ScriptViolation(RuntimeError):
    """An operation of a compiled region that TorchScript turns into another one."""


class PlacementViolation(RuntimeError):
    """An operation of a compiled region for which its compiler has no place in a recipe."""


class StaleOutput(RuntimeError):
    """A graph's output is read after a later replay has overwritten it."""


class StorageMoved(RuntimeError):
    """A graph would read an address at which its input no longer is."""


_INDEXING = {
    torch.ops.aten.index.Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.index_put.default,
    torch.ops.aten._index_put_impl_.default,
}


def reads_values(func: Any) -> bool:
    """Whether the host learns a value by this operation: ``item``, ``equal``, ``is_nonzero``."""
    return torch.Tag.data_dependent_output in func.tags


def has_dynamic_shape(func: Any, leaves: list[Any]) -> bool:
    """Whether the output's shape depends on values: ``nonzero``, ``masked_select``, ``unique``.

    Indexing does where an index is a mask. "Handling Dynamic Shapes",
    https://docs.habana.ai/en/latest/PyTorch/Model_Optimization_PyTorch/Dynamic_Shapes.html
    """
    if func in _INDEXING:
        masks = (torch.bool, torch.uint8)
        indices = [leaf for leaf in leaves[1:] if isinstance(leaf, torch.Tensor)]
        # The value of an index_put comes after its indices.
        put = func is not torch.ops.aten.index.Tensor
        return any(index.dtype in masks for index in (indices[:-1] if put else indices))
    return torch.Tag.dynamic_output_shape in func.tags


def takes_host_indices(func: Any) -> bool:
    """Whether PyTorch moves indices to the device of what is indexed."""
    return func in _INDEXING
