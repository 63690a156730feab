"""The power policy: where its cap settles, and what readings cannot do to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.scheduler import SchedulerConfig
from trencadis.scheduler.thermal import PowerBudgetPolicy, PowerModel

PowerOf = Callable[[int], float]


@attrs.define
class View:
    """The view of a scheduler that a policy gets."""

    now_s: float = 0.0
    num_running_seqs: int = 0
    max_num_seqs: int = 128

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(max_num_seqs=self.max_num_seqs)


def cap_after(policy: PowerBudgetPolicy, view: View, watts: float | None, seconds: float) -> int:
    """The cap after a step with a reading (None: without one), ``seconds`` after the last."""
    view.now_s += seconds
    if watts is not None:
        policy.on_power_reading(watts)
    return policy.get_max_running_seqs(view)


def serve(
    policy: PowerBudgetPolicy, view: View, power_w: PowerOf, num_readings: int, seconds: float = 5.0
) -> list[int]:
    """The caps while as many sequences run as allowed, with one reading every ``seconds``."""
    caps, cap = [], policy.get_max_running_seqs(view)
    for _ in range(num_readings):
        view.num_running_seqs = cap
        cap = cap_after(policy, view, power_w(cap), seconds)
        caps.append(cap)
    return caps


def quiet_start(num_running: int) -> float:
    """Idle 80 W; the first sequence adds 270 W, each further one 2 W."""
    return 80.0 + (270.0 + 2.0 * (num_running - 1) if num_running else 0.0)


def test_after_a_quiet_start_as_many_sequences_run_as_the_budget_allows() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0), View()
    for _ in range(100):
        cap_after(policy, view, quiet_start(0), 1.0)
    view.num_running_seqs = 1
    for _ in range(100):
        cap_after(policy, view, quiet_start(1), 1.0)
    assert serve(policy, view, quiet_start, 12)[-1] in {26, 27}


def test_the_cap_exceeds_the_budget_by_one_sequence_where_the_estimate_is_right() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0, prior_w=2.0), View()
    assert max(serve(policy, view, quiet_start, 100)) == 27


def test_the_estimate_of_a_sequence_leaves_out_what_wakes_the_device() -> None:
    model = PowerModel()
    for num_running in (0, 1, 0, 1, 2, 3, 4, 3, 2, 4):
        model.observe(quiet_start(num_running), num_running)
    assert model.per_sequence_w == pytest.approx(2.0, abs=0.5)


@pytest.mark.parametrize("watts", [math.nan, math.inf, -math.inf, 0.0, -80.0, 1e12])
def test_one_implausible_reading_changes_nothing(watts: float) -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0), View()
    before = serve(policy, view, quiet_start, 15)[-1]
    for seconds in (0.0, 1.0, 100.0):
        assert cap_after(policy, view, watts, seconds) == before
    assert serve(policy, view, quiet_start, 15)[-1] in {26, 27}


def test_the_cap_does_not_change_while_readings_are_missing() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0), View()
    before = serve(policy, view, quiet_start, 3)[-1]
    assert {cap_after(policy, view, None, 60.0) for _ in range(20)} == {before}
    above = serve(policy, view, quiet_start, 30)[-1]
    lowered = cap_after(policy, view, 404.0, 60.0)
    assert 1 < lowered < above
    assert {cap_after(policy, view, None, 60.0) for _ in range(20)} == {lowered}


def test_a_frozen_sensor_does_not_raise_the_cap_more_than_once() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0), View()
    before = serve(policy, view, quiet_start, 4)[-1]
    caps = serve(policy, view, lambda _: 399.9, 100)
    assert set(caps) == {before + 1}


def test_a_sensor_frozen_above_the_budget_lowers_the_cap_to_its_minimum() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0, min_seqs=2), View()
    serve(policy, view, quiet_start, 15)
    assert serve(policy, view, lambda _: 410.0, 10)[-1] == 2


def test_a_wrong_reading_of_a_hundred_times_the_power_costs_minutes() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0), View()
    before = serve(policy, view, quiet_start, 15)[-1]
    assert cap_after(policy, view, 40_000.0, 5.0) < before
    assert serve(policy, view, quiet_start, 40)[-1] in {26, 27}


def test_a_burst_after_a_quiet_hour_starts_with_the_cap_that_was_learned() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0), View()
    before = serve(policy, view, quiet_start, 15)[-1]
    view.num_running_seqs = 1
    for second in range(3600):
        cap_after(policy, view, quiet_start(1) + second % 2, 1.0)
    assert policy.get_max_running_seqs(view) >= before


def test_few_running_sequences_do_not_raise_a_cap_that_was_not_measured() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0), View(num_running_seqs=1)
    for second in range(3600):
        cap = cap_after(policy, view, 150.0 + second % 2, 1.0)
    assert cap == 2


def test_a_rise_waits_for_the_dwell_time() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0, dwell_s=5.0), View()
    caps = serve(policy, view, quiet_start, 11, seconds=1.0)
    assert caps == [2] * 5 + [3] * 5 + [5]


def test_a_fall_does_not_wait() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0, prior_w=2.0), View()
    before = serve(policy, view, quiet_start, 15)[-1]
    view.num_running_seqs = before
    assert cap_after(policy, view, 420.0, 0.1) <= before - 5


def test_a_number_of_sequences_above_the_budget_is_tried_again_after_the_retry_time() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0, retry_s=60.0), View()
    serve(policy, view, quiet_start, 15)
    caps = serve(policy, view, quiet_start, 120)
    assert set(caps) == {26, 27}
    assert caps.count(27) in {8, 9, 10}  # 600 seconds


def test_the_cap_takes_half_of_the_distance_to_what_exceeded_the_budget() -> None:
    """Eight sequences draw little, a ninth wakes something."""
    policy, view = PowerBudgetPolicy(budget_w=400.0, retry_s=60.0), View()
    caps = serve(policy, view, lambda n: (100.0 if n <= 8 else 1000.0) + n / 100, 24)
    grows, halves, retries = caps[:5], caps[5:9], caps[9:]
    assert grows == [2, 3, 5, 8, 12], "by half of what runs"
    assert halves == [8, 10, 8, 9]
    assert retries == [8] * 12 + [9, 8, 8]


def test_the_cap_follows_sequences_that_become_more_expensive() -> None:
    policy, view = PowerBudgetPolicy(budget_w=400.0), View()
    serve(policy, view, quiet_start, 15)
    assert serve(policy, view, lambda n: 350.0 + 10.0 * (n - 1), 40)[-1] in {6, 7}
    assert serve(policy, view, quiet_start, 40)[-1] in {26, 27}


def increasing(increments: list[float]) -> PowerOf:
    totals = [0.0]
    for increment in increments:
        totals.append(totals[-1] + increment)
    return lambda num_running: totals[num_running]


@st.composite
def power_models(draw: st.DrawFn) -> tuple[PowerOf, int]:
    """A power that grows with each sequence, and the most sequences that the scheduler may run."""
    most = draw(st.integers(1, 40))
    idle, first = draw(st.floats(10, 300)), draw(st.floats(0.01, 400))
    cost = draw(st.floats(0.01, 30))
    increments = draw(
        st.one_of(
            st.just([cost] * most),
            st.just([cost / (1 + i / 4) + 0.001 for i in range(most)]),  # it saturates
            st.just([cost * (1 + i / 4) for i in range(most)]),
            st.lists(st.floats(0.001, 5) | st.floats(0.001, 500), min_size=most, max_size=most),
        )
    )
    power_w = increasing([first, *increments])
    return lambda num_running: idle + power_w(num_running), most


histories = st.lists(
    st.tuples(
        st.floats(allow_nan=True, allow_infinity=True) | st.floats(1, 2000) | st.just(350.0),
        st.floats(0, 1),
        st.sampled_from([0.0, 0.1, 1.0, 5.0, 70.0]),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(model=power_models(), share=st.floats(0, 1), slack_w=st.floats(0, 5), history=histories)
def test_whatever_came_before_the_cap_converges_to_the_largest_within_the_budget(
    model: tuple[PowerOf, int],
    share: float,
    slack_w: float,
    history: Iterable[tuple[float, float, float]],
) -> None:
    """The law in the docstring of `PowerBudgetPolicy`."""
    power_w, most = model
    budget_w = power_w(max(1, round(share * most))) + slack_w
    policy, view = PowerBudgetPolicy(budget_w=budget_w), View(max_num_seqs=most)
    for watts, running_share, seconds in history:
        view.num_running_seqs = round(running_share * most)
        cap_after(policy, view, watts, seconds)

    caps = serve(policy, view, power_w, most + 80)

    affordable = max(n for n in range(1, most + 1) if power_w(n) <= budget_w)
    seen_within = [i for i, cap in enumerate(caps) if power_w(cap) <= budget_w]
    overshoot = max(1, math.ceil(affordable / 2))
    assert max(caps[seen_within[0] :]) <= affordable + overshoot
    settled = caps[most + 20 :]
    assert set(settled) <= {affordable, affordable + 1}
    assert settled.count(affordable + 1) <= 6  # 60 readings of 5 s, one of them every 60 s
