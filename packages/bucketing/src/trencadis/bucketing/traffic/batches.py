"""Batches of prompts as a server with limits runs them."""

from __future__ import annotations

import numpy as np

from trencadis.bucketing.rounding import IntArray


def split_to_limits(
    rows: IntArray, counts: IntArray, *, max_query: int, max_num_batched_tokens: int
) -> tuple[IntArray, IntArray]:
    """The batches that a server runs in place of those above its limits.

    A prompt longer than `max_query` is prefilled in chunks of that many tokens and a last one with
    the rest. A batch of more than `max_num_batched_tokens` tokens becomes several.

    Args:
        rows: batches (batch, length), one row each.
        counts: how often each came.
        max_query: the most new tokens of one prompt in a batch.
        max_num_batched_tokens: the most new tokens of a batch, `max_query` or more.

    Returns:
        Rows (batch, query) within the limits, and how often each comes.
    """
    batch, length = rows.T
    num_full_chunks = (length - 1) // max_query
    last_chunk = length - num_full_chunks * max_query
    split: list[tuple[IntArray, IntArray, IntArray]] = []
    for query, times in (
        (np.full_like(length, max_query), counts * num_full_chunks),
        (last_chunk, counts),
    ):
        most = max_num_batched_tokens // query
        split.append((np.minimum(batch, most), query, times * (batch // np.minimum(batch, most))))
        split.append((batch % np.minimum(batch, most), query, times))
    sizes, queries, numbers = (np.concatenate(column) for column in zip(*split, strict=True))
    came = (sizes > 0) & (numbers > 0)
    return np.column_stack([sizes[came], queries[came]]), numbers[came]
