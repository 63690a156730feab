"""What it costs to run a bucket; a grid pads to the cheapest one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import attrs

from trencadis.bucketing.bucket import Bucket

Cost: TypeAlias = Callable[[Bucket], float]


def element_count(bucket: Bucket) -> float:
    """The default cost: the product of the sizes, where a size of 0 counts as 1."""
    return float(math.prod(size or 1 for size in bucket.shape))


@attrs.frozen
class PromptCost:
    """The cost of a prompt bucket (batch, query, context blocks), in (token, token) pairs.

    Linear layers cost per new token, attention per pair of a new token and a token it attends to.
    The weights make both equal at a context of about `max_model_len`.

    Attributes:
        max_model_len: tokens of one sequence.
        block_size: tokens per block.
    """

    max_model_len: int
    block_size: int

    def __call__(self, bucket: Bucket) -> float:
        batch, query, blocks = bucket.shape
        return float(batch * query * (self.max_model_len + query + blocks * self.block_size))
