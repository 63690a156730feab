"""Integer rounding."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """``dividend / divisor`` rounded up to an integer: how many blocks hold so many tokens."""
    return -(-dividend // divisor)


def num_passed_blocks(num_computed: int, window: int, block_size: int) -> int:
    """The first blocks of a sequence that no token after the computed ones sees."""
    return max(0, num_computed - window + 1) // block_size
