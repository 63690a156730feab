"""`EngineStats.headroom`: how much more work an engine can start, for routers."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.engine import EngineStats, ThermalStats

IDLE = EngineStats(
    max_num_seqs=16, max_running_seqs=16, max_num_batched_tokens=2048, max_prefill_tokens=2048
)
COOL = ThermalStats(hottest_c=50.0, power_w=100.0, target_temp_c=80.0, power_budget_w=400.0)


@pytest.mark.parametrize(
    ("changes", "headroom"),
    [
        ({}, 1.0),
        ({"num_running_seqs": 4}, 0.75),
        ({"num_running_seqs": 4, "num_waiting_reqs": 4}, 0.5),
        ({"num_swapped_reqs": 2, "num_preempted_reqs": 2}, 0.75),
        ({"max_running_seqs": 4}, 0.25),
        ({"max_running_seqs": 4, "num_running_seqs": 8}, 0.0),
        ({"max_prefill_tokens": 512}, 0.25),
    ],
)
def test_requests_and_limits_leave_less(changes: dict[str, int], headroom: float) -> None:
    assert attrs.evolve(IDLE, **changes).headroom == pytest.approx(headroom)


@pytest.mark.parametrize(
    ("changes", "headroom"),
    [
        ({}, 0.75),
        ({"power_w": 300.0}, 0.25),
        ({"power_w": 500.0}, 0.0),
        ({"power_w": None}, 1.0),
        ({"hottest_c": 79.0}, 0.2),
        ({"hottest_c": 85.0}, 0.0),
        ({"hottest_c": None, "power_w": None}, 1.0),
        ({"target_temp_c": None, "power_budget_w": None, "hottest_c": 99.0, "power_w": 999.0}, 1.0),
    ],
)
def test_heat_and_power_leave_less(changes: dict[str, Any], headroom: float) -> None:
    stats = attrs.evolve(IDLE, thermal=attrs.evolve(COOL, **changes))
    assert stats.headroom == pytest.approx(headroom)


COUNTS = ("num_running_seqs", "num_waiting_reqs", "num_swapped_reqs", "num_preempted_reqs")


@given(
    st.fixed_dictionaries({name: st.integers(0, 20) for name in COUNTS}),
    st.integers(0, 16),
    st.floats(20, 100),
    st.sampled_from([*COUNTS, "hottest_c", "max_running_seqs"]),
)
def test_more_load_or_heat_never_leaves_more(
    counts: dict[str, int], limit: int, hottest_c: float, what: str
) -> None:
    stats = attrs.evolve(IDLE, **counts, max_running_seqs=limit)
    thermal = attrs.evolve(COOL, hottest_c=hottest_c)
    before = attrs.evolve(stats, thermal=thermal)
    if what == "hottest_c":
        after = attrs.evolve(stats, thermal=attrs.evolve(thermal, hottest_c=hottest_c + 1))
    elif what == "max_running_seqs":
        after = attrs.evolve(before, max_running_seqs=max(0, limit - 1))
    else:
        after = attrs.evolve(before, **{what: counts[what] + 1})
    assert 0 <= after.headroom <= before.headroom <= 1
