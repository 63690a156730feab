"""Strategies: the order in which graphs are captured, most useful first.

The first axis of a bucket is its batch size. The second axis is the length that a graph processes
per sequence, as in the grids of `trencadis.bucketing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

from trencadis.bucketing import Bucket, BucketGrid, TrafficRecorder
from trencadis.warmup.validators import instance_of, one_of, require_replays

STRATEGIES = ("min_tokens", "max_bs", "traffic")

Cost: TypeAlias = Callable[[Bucket], float]
"""The predicted size of a bucket's graph, bytes."""

Order: TypeAlias = Callable[[Iterable[Bucket], Cost], list[Bucket]]
"""Sorts buckets in the order of their capture."""


def capture_order(strategy: str, replays: Mapping[Bucket, float] | None = None) -> Order:
    """The order of a strategy, one of `STRATEGIES`. Source: seed 002, except ``traffic``.

    - ``max_bs``: largest batch first, then shortest length.
    - ``min_tokens``: fewest tokens first, then shortest length.
    - ``traffic``: most expected ``replays`` per byte first, then as ``min_tokens``.

    Raises `ConfigError` for another strategy, or for replays that are not finite numbers.
    """
    one_of(STRATEGIES).checked("strategy", strategy)
    expected = {} if replays is None else replays
    require_replays(expected)
    if strategy == "max_bs":
        return lambda buckets, _: sorted(buckets, key=_max_bs)
    if strategy == "min_tokens":
        return lambda buckets, _: sorted(buckets, key=_min_tokens)

    def by_replays_per_byte(buckets: Iterable[Bucket], cost: Cost) -> list[Bucket]:
        def key(bucket: Bucket) -> tuple[float, tuple[int, ...]]:
            return -expected.get(bucket, 0.0) / max(1.0, cost(bucket)), _min_tokens(bucket)

        return sorted(buckets, key=key)

    return by_replays_per_byte


def expected_replays(grid: BucketGrid, traffic: TrafficRecorder) -> dict[Bucket, float]:
    """How often each bucket of ``grid`` would have run under the recorded traffic.

    Skips shapes that no bucket holds. Raises `BucketingError` if the axes differ, and `ConfigError`
    for arguments of other types.
    """
    instance_of(BucketGrid).checked("grid", grid)
    instance_of(TrafficRecorder).checked("traffic", traffic)
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
