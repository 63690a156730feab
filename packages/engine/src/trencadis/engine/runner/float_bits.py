"""Floats of their bits, without a view to another dtype.

A compiled program of a Gaudi cannot have one: the bridge strips the names of overloads, and
TorchScript takes ``view(x, torch.float32)`` for ``view(x, [6])``, a reshape
(``dynamo/compile_backend/passes.py:2398-2446`` of HabanaAI/gaudi-pytorch-bridge 1.19.0;
pytorch/pytorch#154407).
"""

from __future__ import annotations

import torch

_FRACTION = 2**23
_SIGN = 2**31 - 1
"""All bits but the sign."""


def powers_of_two() -> torch.Tensor:
    """The power of two of each exponent in an fp32 number, ``[256]``, for `floats_of`.

    The least exponent counts as 0, as on devices without subnormal numbers, the largest is that of
    infinity.
    """
    return (torch.arange(256, dtype=torch.int32) * _FRACTION).view(torch.float32)


def floats_of(bits: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """The fp32 numbers whose bits are in ``bits``, int32. Exact but for subnormal numbers and NaN.

    ``powers`` is `powers_of_two` on the device.
    """
    magnitude = bits & _SIGN
    exponent = (magnitude >> 23).reshape(-1)
    fraction = (magnitude & (_FRACTION - 1)).float() * (1.0 / _FRACTION) + 1.0
    value = fraction * powers.index_select(0, exponent).view_as(fraction)
    return torch.where(bits < 0, -value, value)
