"""Which shapes the limits of a serving engine allow, as values that are pickled with a grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import attrs

from trencadis.bucketing.grid.bucket import Shape

Reachable: TypeAlias = Callable[[Shape, Shape], bool]
"""Whether any shape from the first to the second, size by size, can come."""


def every_shape(low: Shape, high: Shape) -> bool:
    """The default: every shape can come."""
    return True


@attrs.frozen
class ReachablePromptShapes:
    """Which prompt shapes (batch, query, context blocks) can come.

    A single prompt can come however it is padded: its tokens may exceed `max_num_batched_tokens`
    with their padding. Several prompts are a batch only where their bucket is within that limit.

    Attributes:
        max_num_batched_tokens: new tokens of a batch of several prompts, padding included.
        max_model_len: tokens of one sequence.
        block_size: tokens per block.
    """

    max_num_batched_tokens: int
    max_model_len: int
    block_size: int

    def __call__(self, low: Shape, high: Shape) -> bool:
        # The last block of a context may hold a single token.
        context = (low[2] - 1) * self.block_size + 1 if low[2] else 0
        fits = low[0] <= 1 or high[0] * high[1] <= self.max_num_batched_tokens
        return fits and max(low[1], 1) + context <= self.max_model_len


@attrs.frozen
class ReachableDecodeShapes:
    """Which decode shapes (batch, blocks) can come where `blocks` counts (sequence, block) pairs.

    Attributes:
        max_blocks_per_sequence: the most blocks of one sequence.
    """

    max_blocks_per_sequence: int

    def __call__(self, low: Shape, high: Shape) -> bool:
        # Every sequence has at least one block. Of the batches from low to high that have enough
        # blocks for that, the largest can have the most.
        batch = min(high)
        return batch >= low[0] and low[1] <= batch * self.max_blocks_per_sequence
