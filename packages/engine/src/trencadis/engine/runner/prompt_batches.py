"""Splits the prefill chunks of a step into batches with the least padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trencadis.scheduler import ScheduledSequence

Cost = Callable[[Sequence[ScheduledSequence]], float | None]
"""Cost of one padded forward pass for these chunks; None for a bucket miss."""


def split_prompts(
    chunks: Sequence[ScheduledSequence], cost: Cost
) -> list[Sequence[ScheduledSequence]]:
    """Split prefill chunks into batches of minimal total cost.

    Chunks are sorted by context and length, so that similar chunks are neighbours. Dynamic
    programming over the prefixes of that order finds the best split. A chunk that fits no bucket
    runs alone.
    """
    ordered = sorted(chunks, key=lambda chunk: (chunk.start > 0, len(chunk.token_ids), chunk.start))
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(ordered) + 1):
        options = []
        for start in range(end - 1, -1, -1):
            batch_cost = cost(ordered[start:end])
            if batch_cost is None:
                break  # a larger batch does not fit either
            options.append((best[start][0] + batch_cost, start))
        best.append(min(options, default=(best[end - 1][0], end - 1)))
    batches: list[Sequence[ScheduledSequence]] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        batches.append(ordered[start:end])
        end = start
    return batches[::-1]
