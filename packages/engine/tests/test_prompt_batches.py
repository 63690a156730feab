"""How the prefill chunks of a step are divided into padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from trencadis.engine.runner.shapes import split_prompts
from trencadis.scheduler import ScheduledSequence

LAUNCH = 3.0


def padded(chunks: Sequence[ScheduledSequence]) -> float | None:
    """The tokens of a padded batch, and those that a launch costs; None where no bucket fits."""
    longest = max(len(chunk.token_ids) for chunk in chunks)
    if longest > 8 or len(chunks) > 4 or len({chunk.start > 0 for chunk in chunks}) > 1:
        return None
    return LAUNCH + len(chunks) * longest


@example([(1, False), (1, False), (9, False), (8, True)])
@given(st.lists(st.tuples(st.integers(1, 10), st.booleans()), min_size=1, max_size=9))
def test_the_batches_of_a_step_cost_the_least_and_hold_each_chunk_once(
    prompts: list[tuple[int, bool]],
) -> None:
    chunks = [
        ScheduledSequence(number, 4 * has_context, (7,) * length, np.zeros(1, np.int32), True)
        for number, (length, has_context) in enumerate(prompts)
    ]
    batches = split_prompts(chunks, padded)
    assert sorted(chunk.seq_id for batch in batches for chunk in batch) == list(range(len(chunks)))
    costs = [padded(batch) for batch in batches]
    for batch, cost in zip(batches, costs, strict=True):
        assert cost is not None or len(batch) == 1, "a chunk that fits no bucket runs alone"
    ordered = [chunk for batch in batches for chunk in batch]
    assert [len(chunk.token_ids) for chunk in ordered if not chunk.start] == sorted(
        length for length, has_context in prompts if not has_context
    )

    @cache
    def least(end: int) -> float:
        """Of the first ``end`` chunks in order; those that fit no bucket cost nothing here."""
        if not end:
            return 0.0
        options = [(start, padded(ordered[start:end])) for start in range(end)]
        fitting = [least(start) + cost for start, cost in options if cost is not None]
        return min(fitting, default=least(end - 1))

    assert sum(cost for cost in costs if cost is not None) == least(len(ordered))
