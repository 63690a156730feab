"""The capture order of each strategy."""

from __future__ import annotations

import random
from typing import Any

import pytest

from trencadis.bucketing import Bucket, BucketGrid, BucketingError, TrafficRecorder
from trencadis.warmup import ConfigError, capture_order, expected_replays


def shapes(strategy: str, buckets: list[Bucket]) -> list[tuple[int, ...]]:
    random.Random(0).shuffle(buckets)
    return [bucket.shape for bucket in capture_order(strategy)(buckets, lambda _: 0.0)]


def test_max_bs_is_the_documented_example() -> None:
    # "HPU Graph Capture" of the plugin's page on bucketing.
    grid = BucketGrid({"batch": (1, 32, 64), "seq": (128, 256)})
    expected = [(64, 128), (64, 256), (32, 128), (32, 256), (1, 128), (1, 256)]
    assert shapes("max_bs", list(grid)) == expected


def test_min_tokens_has_the_order_of_the_logged_capture() -> None:
    grid = BucketGrid({"batch": (1, 2, 4), "seq": range(128, 1025, 128)})
    order = shapes("min_tokens", list(grid))
    assert order[0] == (1, 128)
    assert order[10] == (1, 896)
    assert order[11:15] == [(4, 256), (2, 512), (1, 1024), (2, 640)]


def test_context_does_not_count_as_tokens() -> None:
    grid = BucketGrid({"batch": (1,), "query": (128, 256), "context_blocks": (0, 64)})
    assert shapes("min_tokens", list(grid)) == [
        (1, 128, 0),
        (1, 128, 64),
        (1, 256, 0),
        (1, 256, 64),
    ]


def test_traffic_puts_most_replays_per_byte_first_and_unused_buckets_last() -> None:
    few, many, rare, unseen = (Bucket(("batch", "seq"), (1, n)) for n in (128, 256, 512, 64))
    order = capture_order("traffic", {few: 4.0, many: 6.0, rare: 0.5})
    assert order([unseen, rare, many, few], lambda b: float(b["seq"])) == [few, many, rare, unseen]


def test_replays_count_for_the_bucket_that_holds_the_shape() -> None:
    grid = BucketGrid({"batch": (1, 4), "seq": (128, 512)})
    traffic = TrafficRecorder(("batch", "seq"))
    traffic.record((3, 412), 5)
    traffic.record((4, 130), 2)
    traffic.record((1, 100), 3)
    traffic.record((9, 100), 7)  # past the grid
    replays = expected_replays(grid, traffic)
    assert {bucket.shape: count for bucket, count in replays.items()} == {(4, 512): 7, (1, 128): 3}


def test_replays_of_other_axes_are_an_error() -> None:
    traffic = TrafficRecorder(("batch",))
    traffic.record((1,))
    with pytest.raises(BucketingError, match="one size per axis"):
        expected_replays(BucketGrid({"batch": (1,), "seq": (128,)}), traffic)


@pytest.mark.parametrize("strategy", ["min_token", "", None, 5, ["max_bs"]])
def test_an_unknown_strategy_is_refused(strategy: Any) -> None:
    with pytest.raises(ConfigError, match="strategy must be one of min_tokens, max_bs, traffic"):
        capture_order(strategy)


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -1, "many"])
def test_replays_are_finite_numbers(count: Any) -> None:
    with pytest.raises(ConfigError, match="replays of Bucket"):
        capture_order("traffic", {Bucket(("batch", "seq"), (1, 1)): count})


def test_replays_need_a_grid_and_its_traffic() -> None:
    grid = BucketGrid({"batch": (1,)})
    for arguments in ((grid, grid), (grid.buckets, TrafficRecorder(("batch",)))):
        with pytest.raises(ConfigError, match="must be of type"):
            expected_replays(*arguments)  # type: ignore[arg-type]
