"""The size to compile for after a bucket miss, along one axis."""

from __future__ import annotations

import math

from trencadis.bucketing.rounding import round_up
from trencadis.bucketing.shapes import MAX_SIZE
from trencadis.bucketing.validators import integer

_SIZE = integer(0, MAX_SIZE)


def fallback_size(axis: str, size: int, largest: int) -> int:
    """The smallest of the plugin's fallback sizes that is at least `size`.

    Gaudi's plugin rounds a size up to a multiple of its cube root, rounded up, times 2 for the axis
    `batch` and times 32 for any other axis. So longer shapes meet fewer, wider fallbacks.
    (vllm-gaudi, `vllm_gaudi/extension/bucketing/common.py`, `calc_fallback_value`.) But its step
    grows faster than the size: 1000 becomes 1280, and 1001 becomes 1056. Here, a size becomes the
    smallest of all sizes that the plugin's rule gives: 1056 for both. So a larger size never gets a
    smaller fallback, a fallback is its own fallback, and none is larger than the plugin's.

    Args:
        axis: the name of the axis.
        size: the size to pad; 0 and 1 stay, as in the plugin.
        largest: the largest bucket of the axis; a size up to it is not padded beyond it.

    Raises:
        BucketingError: a size that is not an integer of 0 or more.
    """
    size, largest = _SIZE.checked("size", size), _SIZE.checked("largest", largest)
    if size <= 1:
        return size
    unit = 2 if axis == "batch" else 32
    root = _cube_root(size)
    padded = round_up(size, root * unit)
    # Sizes below share the step of a smaller root, whose last multiple may be at least `size`.
    smaller = root - 1
    while smaller > 1 and smaller**3 + smaller * unit > size:
        last = round_up(smaller**3, smaller * unit)
        if last >= size:
            padded = min(padded, last)
        smaller -= 1
    # Sizes above have a larger step, and a multiple of it may come sooner.
    while root**3 + 1 < padded:
        first = round_up(root**3 + 1, (root + 1) * unit)
        padded = min(padded, first)
        root += 1
    return min(padded, largest) if size <= largest else padded


def _cube_root(size: int) -> int:
    """The cube root of `size`, rounded up, without floating-point error."""
    root = round(math.pow(size, 1 / 3))
    while root**3 < size:
        root += 1
    while (root - 1) ** 3 >= size:
        root -= 1
    return root
