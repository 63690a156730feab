"""In which order graphs are captured: the ones that matter most while there is memory.

A bucket's first axis is its batch, its second the length that a graph processes per sequence, as
in the grids of `trencadis.bucketing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from trencadis.bucketing import Bucket, BucketGrid, TrafficRecorder

STRATEGIES = ("min_tokens", "max_bs", "traffic")

Cost: TypeAlias = Callable[[Bucket], float]
Order: TypeAlias = Callable[[Iterable[Bucket], Cost], list[Bucket]]
"""Buckets and what each is expected to cost in bytes, to the order of their capture."""


def capture_order(strategy: str, replays: Mapping[Bucket, float] | None = None) -> Order:
    """The order of a strategy, one of `STRATEGIES` (seed 002; ``traffic`` is this library's).

    - ``max_bs``: batches from the largest down, lengths of equal batches from the shortest up.
    - ``min_tokens``: fewest tokens first, of equally many the shorter sequence.
    - ``traffic``: most of the expected ``replays`` per byte first; those that never came at the
      end, fewest tokens first.
    """
    if strategy == "max_bs":
        return lambda buckets, _: sorted(buckets, key=_max_bs)
    if strategy == "min_tokens":
        return lambda buckets, _: sorted(buckets, key=_min_tokens)
    seen = replays or {}

    def by_value(buckets: Iterable[Bucket], cost: Cost) -> list[Bucket]:
        def key(bucket: Bucket) -> tuple[float, tuple[int, ...]]:
            return -seen.get(bucket, 0.0) / max(1.0, cost(bucket)), _min_tokens(bucket)

        return sorted(buckets, key=key)

    return by_value


def expected_replays(grid: BucketGrid, traffic: TrafficRecorder) -> dict[Bucket, float]:
    """How often each bucket of ``grid`` would have run under the recorded traffic.

    Shapes past the grid are left out. Raises `BucketingError` for traffic of other axes.
    """
    replays: dict[Bucket, float] = {}
    shapes, counts = traffic.shapes()
    for shape, count in zip(shapes.tolist(), counts.tolist(), strict=True):
        bucket = grid.find(shape)
        if bucket is not None:
            replays[bucket] = replays.get(bucket, 0.0) + count
    return replays


def _max_bs(bucket: Bucket) -> tuple[int, ...]:
    batch, *rest = bucket.shape
    return (-batch, *rest)


def _min_tokens(bucket: Bucket) -> tuple[int, ...]:
    batch, *rest = bucket.shape
    return (math.prod(bucket.shape[:2]), *rest, batch)
