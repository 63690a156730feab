"""The limits of a serving engine that its prompt grid is made for."""

from __future__ import annotations

import attrs

from trencadis.bucketing.grid import PromptCost, ReachablePromptShapes
from trencadis.bucketing.rounding import ceil_div
from trencadis.bucketing.shapes import MAX_SIZE
from trencadis.bucketing.validators import integer

_LIMIT = integer(1, MAX_SIZE)


@attrs.frozen(kw_only=True)
class PromptLimits:
    """What a prompt batch of an engine with a paged KV cache can have at most.

    Attributes:
        max_model_len: tokens of one sequence, prompt and output together.
        max_num_batched_tokens: new tokens of one batch, padding included.
        max_num_seqs: sequences of one batch.
        block_size: tokens per block of the KV cache.

    Raises:
        BucketingError: a limit that is not an integer of at least 1.
    """

    max_model_len: int = attrs.field(validator=_LIMIT)
    max_num_batched_tokens: int = attrs.field(validator=_LIMIT)
    max_num_seqs: int = attrs.field(validator=_LIMIT)
    block_size: int = attrs.field(validator=_LIMIT)

    @property
    def max_query(self) -> int:
        """The most new tokens of one prompt in one batch."""
        return min(self.max_num_batched_tokens, self.max_model_len)

    @property
    def max_context_blocks(self) -> int:
        """The most blocks of context: one token at least is new."""
        return ceil_div(self.max_model_len - 1, self.block_size)

    @property
    def largest(self) -> tuple[int, int, int]:
        """The largest size of each axis (batch, query, context_blocks)."""
        return (self.max_num_seqs, self.max_query, self.max_context_blocks)

    @property
    def reachable(self) -> ReachablePromptShapes:
        """Which shapes the limits allow."""
        return ReachablePromptShapes(
            self.max_num_batched_tokens, self.max_model_len, self.block_size
        )

    @property
    def cost(self) -> PromptCost:
        """What a bucket costs."""
        return PromptCost(self.max_model_len, self.block_size)
