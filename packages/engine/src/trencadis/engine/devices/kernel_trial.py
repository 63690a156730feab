"""How a kernel is compared with PyTorch's operations on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Largest accepted difference, relative above 1: a few roundings of the dtype."""

KernelTrial = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Results of a kernel and of PyTorch on the host, both in host memory.

Raises `MissingKernelError` where the installed release lacks the kernel, and whatever the kernel
raises."""


class MissingKernelError(LookupError):
    """The installed release of the device's software lacks a kernel."""


class WrongShapeError(ValueError):
    """A kernel gave another shape than PyTorch."""


def largest_difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative where the expected value is above 1.

    Infinite for NaN. Raises `WrongShapeError`.
    """
    if found.shape != expected.shape:
        shapes = f"{list(found.shape)} in place of {list(expected.shape)}"
        raise WrongShapeError(f"a trial gave the shape {shapes}")
    difference = (found.float() - expected.float()).abs() / expected.float().abs().clamp_min(1.0)
    return float(difference.nan_to_num(torch.inf).max())
