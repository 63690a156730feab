"""What shapes serving can bring, and what they cost, as values that travel with a grid."""

from __future__ import annotations

import attrs

from trencadis.bucketing.bucket import Bucket


@attrs.frozen
class PromptReach:
    """Which prompt shapes (batch, query, context blocks) can come.

    Attributes:
        max_num_batched_tokens: new tokens of a batch of several prompts, padding included.
        max_model_len: tokens of one sequence.
        block_size: tokens per block.
        alone: the batch size that a single prompt is padded to; it may go past the token limit.
    """

    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    alone: int

    def __call__(self, low: tuple[int, ...], high: tuple[int, ...]) -> bool:
        # The last block of a context may hold one token only.
        context = (low[2] - 1) * self.block_size + 1 if low[2] else 0
        fits = high[0] <= self.alone or high[0] * high[1] <= self.max_num_batched_tokens
        return fits and max(low[1], 1) + context <= self.max_model_len


@attrs.frozen
class DecodeReach:
    """Which decode shapes (batch, blocks) can come where `blocks` counts (sequence, block) pairs.

    Attributes:
        per_sequence: the most blocks of one sequence.
    """

    per_sequence: int

    def __call__(self, low: tuple[int, ...], high: tuple[int, ...]) -> bool:
        # Of the batches in between, the largest that has a block each reaches the most blocks.
        batch = min(high)
        return batch >= low[0] and low[1] <= batch * self.per_sequence


@attrs.frozen
class PromptCost:
    """What a prompt bucket costs to run, in token-sized units.

    Linear layers cost by the new token, attention by the pair of a new token and one it attends
    to; the two weigh alike at a context of about `max_model_len`.
    """

    max_model_len: int
    block_size: int

    def __call__(self, bucket: Bucket) -> float:
        batch, query, blocks = bucket.shape
        return float(batch * query * (self.max_model_len + query + blocks * self.block_size))
