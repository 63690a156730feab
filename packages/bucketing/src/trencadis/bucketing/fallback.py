"""The size to pad to where no bucket is large enough."""

from __future__ import annotations

import math

from trencadis.bucketing.rounding import round_up


def fallback_size(axis: str, size: int, largest: int) -> int:
    """`size` rounded up to a multiple of a step that grows with it, as in Gaudi's plugin.

    The step is the cube root of `size`, rounded up, times 2 for the axis `batch` and times 32 for
    any other. So longer shapes meet fewer, wider fallbacks. (vllm-gaudi,
    `vllm_gaudi/extension/bucketing/common.py`, `calc_fallback_value`.)

    Args:
        axis: the name of the axis.
        size: the size to pad.
        largest: the largest bucket of the axis; a size up to it is not padded beyond it.
    """
    if size <= 1:
        return size
    step = math.ceil(math.pow(size, 1 / 3)) * (2 if axis == "batch" else 32)
    padded = round_up(size, step)
    return min(padded, largest) if size <= largest else padded
