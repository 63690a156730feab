"""Integer rounding."""

from __future__ import annotations


def ceil_div(dividend: int, divisor: int) -> int:
    """``dividend / divisor`` rounded up to an integer: how many blocks hold so many tokens."""
    return -(-dividend // divisor)


def num_passed_blocks(num_computed: int, window: int, block_size: int) -> int:
    """The first blocks of a sequence that no token after the computed ones sees."""
    return max(0, num_computed - window + 1) // block_size


def most_window_blocks(window: int, tokens_ahead: int, block_size: int) -> int:
    """The most blocks of what a token sees and of ``tokens_ahead`` tokens, it being the first.

    They follow each other, and may begin with the last token of a block.
    """
    return (window + tokens_ahead + block_size - 3) // block_size + 1
