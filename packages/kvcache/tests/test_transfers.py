from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import BandwidthGovernor, InvalidSetting


@given(
    st.lists(st.tuples(st.floats(0, 2), st.integers(0, 50)), min_size=1),
    st.sampled_from([(7, 20.0, 1.0), (10, 10.0, 2.0), (1, 1000.0, 0.01)]),
)
def test_no_interval_sees_more_than_the_rate_and_one_window(
    requests: list[tuple[float, int]], setting: tuple[int, float, float]
) -> None:
    per_block, rate, window = setting
    governor = BandwidthGovernor(per_block, rate, window)
    now, history = 0.0, []
    for pause, num_blocks in requests:
        now += pause
        granted = governor.grant(num_blocks, now)
        assert 0 <= granted <= num_blocks
        history.append((now, granted * per_block))
    for first in range(len(history)):
        moved = 0
        for time, size in history[first:]:
            moved += size
            assert moved <= rate * (time - history[first][0] + window) * (1 + 1e-9)


def test_all_requested_blocks_are_granted_eventually() -> None:
    governor = BandwidthGovernor(bytes_per_block=10, bytes_per_s=10, window_s=2)
    assert [governor.grant(5, now) for now in (0.0, 0.0, 0.5, 1.0, 2.0, 12.0)] == [2, 0, 0, 1, 1, 2]


def test_a_clock_that_steps_back_earns_nothing() -> None:
    governor = BandwidthGovernor(bytes_per_block=10, bytes_per_s=10, window_s=2)
    assert [governor.grant(9, now) for now in (5.0, 1.0, 5.0, 6.0)] == [2, 0, 0, 1]


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), min_size=1))
def test_no_second_is_earned_twice_whatever_the_clock_does(calls: list[tuple[int, int]]) -> None:
    governor = BandwidthGovernor(bytes_per_block=10, bytes_per_s=10, window_s=2)
    granted = [governor.grant(num_blocks, float(now)) for now, num_blocks in calls]
    latest = [max(now for now, _ in calls[: i + 1]) for i in range(len(calls))]
    for first in range(len(calls)):
        for last in range(first, len(calls)):
            assert sum(granted[first : last + 1]) <= latest[last] - latest[first] + 2


@pytest.mark.parametrize("name", ["bytes_per_s", "window_s"])
def test_a_rate_and_a_window_are_above_0(name: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{name} must be a finite number above 0, got 0"):
        BandwidthGovernor(**{"bytes_per_block": 1, name: 0})
    assert BandwidthGovernor(1, 10.0, 0.1).grant(2, 0.0) == 1, "a burst of one block suffices"


def test_the_default_is_the_limit_of_seed_003() -> None:
    governor = BandwidthGovernor(bytes_per_block=16 << 20)
    first = governor.grant(10**6, 0.0)
    assert first * (16 << 20) <= 20e9 * 0.1 < (first + 1) * (16 << 20)


@pytest.mark.parametrize(
    "settings",
    [
        {"bytes_per_block": 0},
        {"bytes_per_block": 10, "bytes_per_s": 0.0},
        {"bytes_per_block": 10, "window_s": -1.0},
        {"bytes_per_block": 10, "bytes_per_s": float("nan")},
        {"bytes_per_block": 10, "bytes_per_s": 10.0, "window_s": 0.5},
    ],
)
def test_a_burst_smaller_than_a_block_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        BandwidthGovernor(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"bytes_per_block": float("inf")},
        {"bytes_per_block": 1.5},
        {"bytes_per_block": 1, "bytes_per_s": float("inf")},
        {"bytes_per_block": 1, "window_s": float("inf")},
        {"bytes_per_block": 1, "bytes_per_s": 1e200, "window_s": 1e200},
        {"bytes_per_block": 1, "bytes_per_s": 10**308, "window_s": 10},
        {"bytes_per_block": 1, "bytes_per_s": 10**400},
        {"bytes_per_block": "1"},
    ],
)
def test_a_limit_that_is_not_finite_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        BandwidthGovernor(**settings)


@pytest.mark.parametrize("now", [float("nan"), float("inf"), -float("inf"), "0", None, 10**400])
def test_a_time_that_is_not_finite_is_refused_and_the_limit_still_holds(now: Any) -> None:
    governor = BandwidthGovernor(bytes_per_block=10, bytes_per_s=10, window_s=2)
    assert governor.grant(5, 0.0) == 2
    with pytest.raises(InvalidSetting, match="now must be a finite number"):
        governor.grant(5, now)
    assert [governor.grant(5, time) for time in (0.0, 1.0)] == [0, 1]


@pytest.mark.parametrize("num_blocks", [-1, 1.5, "2", None])
def test_a_number_of_blocks_is_a_natural_number(num_blocks: Any) -> None:
    governor = BandwidthGovernor(bytes_per_block=10, bytes_per_s=10, window_s=2)
    with pytest.raises(InvalidSetting, match="num_blocks must be an integer"):
        governor.grant(num_blocks, 0.0)
    assert governor.grant(5, 0.0) == 2
