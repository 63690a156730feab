"""Integer rounding."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """``dividend / divisor`` rounded up to an integer: how many blocks hold so many tokens."""
    return -(-dividend // divisor)
