"""The steady clock: it starts at zero, never runs backwards, and counts backward steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.scheduler.clock import SteadyClock


def clock_of(readings: list[float]) -> SteadyClock:
    remaining = iter(readings)
    return SteadyClock(lambda: next(remaining))


def test_it_counts_from_zero() -> None:
    clock = clock_of([1000.0, 1000.5, 1002.0])
    assert (clock.read()[0], clock.read()[0]) == (0.5, 2.0)


def test_a_backward_step_counts_as_no_time_and_is_counted() -> None:
    clock = clock_of([1000.0, 1003.0, 500.0, 501.0])
    assert [clock.read() for _ in range(3)] == [(3.0, 0), (3.0, 1), (4.0, 1)]


@given(st.lists(st.integers(-1000, 1000), min_size=2))
def test_it_advances_by_the_forward_differences_only(readings: list[int]) -> None:
    clock = clock_of([float(reading) for reading in readings])
    elapsed = 0.0
    for before, reading in pairwise(readings):
        elapsed += max(0, reading - before)
        assert clock.read()[0] == pytest.approx(elapsed)
