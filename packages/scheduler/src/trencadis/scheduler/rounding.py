"""Integer rounding."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """``dividend / divisor``, rounded up."""
    return -(-dividend // divisor)
