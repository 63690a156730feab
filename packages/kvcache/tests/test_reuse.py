"""The reuse rate: which share of cached content gets a prefix hit."""

from __future__ import annotations

import pytest

from trencadis.kvcache import BlockManager, CacheConfig, RequestHasher
from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.prefix_cache import ReuseEstimator


def keys(count: int) -> list[BlockKey]:
    return [RequestHasher(1)([number]).blocks[0] for number in range(count)]


def test_the_rate_is_the_share_of_contents_with_a_hit() -> None:
    estimator = ReuseEstimator(10)
    hit, hit_later, *unused = keys(7)
    assert estimator.rate == 0
    estimator.record_hit(hit)
    estimator.record_hit(hit_later)
    for key in unused:
        estimator.record_eviction(key)
    # One outcome without reuse is there from the start.
    assert estimator.rate == pytest.approx(2 / (2 + 5 + 1))


def test_a_content_counts_once_however_often_it_is_hit() -> None:
    manager = BlockManager(CacheConfig(num_blocks=8, block_size=1))
    manager.allocate(1, [5])
    manager.mark_computed(1, 1)
    manager.free(1)
    for seq_id in (2, 3, 4):
        manager.allocate(seq_id, [5, seq_id])
        manager.free(seq_id)
    assert manager.pool.reuse.rate == pytest.approx(1 / 2)


def test_a_content_that_is_asked_for_after_its_eviction_counts_as_reused() -> None:
    estimator = ReuseEstimator(10)
    evicted = keys(4)
    for key in evicted:
        estimator.record_eviction(key)
    assert estimator.rate == 0
    estimator.record_misses(evicted[:2])
    assert estimator.rate == pytest.approx(2 / (2 + 2 + 1))
    estimator.record_misses(evicted[:2])
    assert estimator.rate == pytest.approx(2 / 5), "a content is corrected once"


def test_only_the_latest_evictions_are_remembered() -> None:
    estimator = ReuseEstimator(2)
    evicted = keys(3)
    for key in evicted:
        estimator.record_eviction(key)
    estimator.record_misses(evicted[:1])
    assert estimator.rate == 0
    estimator.record_misses(evicted[1:])
    assert estimator.rate > 0


def test_an_evicted_content_with_a_hit_is_not_unused() -> None:
    estimator = ReuseEstimator(2)
    (key,) = keys(1)
    estimator.record_hit(key)
    key.hits = 1
    estimator.record_eviction(key)
    assert estimator.rate == pytest.approx(1 / 2)


@pytest.mark.parametrize(("num_evicted", "rate"), [(1021, 1 / 1023), (1023, 1 / 513)])
def test_the_weight_of_earlier_outcomes_is_halved_at_1024(num_evicted: int, rate: float) -> None:
    estimator = ReuseEstimator(10)
    hit, *evicted = keys(num_evicted + 1)
    for key in evicted:
        estimator.record_eviction(key)
    estimator.record_hit(hit)
    assert estimator.rate == pytest.approx(rate)


def test_recent_outcomes_count_more() -> None:
    estimator = ReuseEstimator(10)
    for key in keys(1500):
        estimator.record_eviction(key)
    for key in keys(1500):
        estimator.record_hit(key)
    assert estimator.rate > 0.7
