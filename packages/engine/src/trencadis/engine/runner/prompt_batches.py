"""How the prompt chunks of a step are split into forwards so that padding is least."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trencadis.scheduler import ScheduledSequence

Cost = Callable[[Sequence[ScheduledSequence]], float | None]
"""Cost of running these chunks as one padded forward; None where no bucket holds them."""


def split_prompts(
    chunks: Sequence[ScheduledSequence], cost: Cost
) -> list[Sequence[ScheduledSequence]]:
    """Split chunks into forwards of least total cost.

    Chunks are ordered by context and length first, so that alike ones stand together; the best
    cut of that order is found by dynamic programming over its prefixes. A chunk that no bucket
    holds even alone runs alone.
    """
    ordered = sorted(chunks, key=lambda chunk: (chunk.start > 0, len(chunk.token_ids), chunk.start))
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(ordered) + 1):
        options = []
        for start in range(end - 1, -1, -1):
            price = cost(ordered[start:end])
            if price is None:
                break  # a longer batch does not fit either
            options.append((best[start][0] + price, start))
        best.append(min(options, default=(best[end - 1][0], end - 1)))
    batches: list[Sequence[ScheduledSequence]] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        batches.append(ordered[start:end])
        end = start
    return batches[::-1]
