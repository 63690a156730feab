"""The two-phase policy: what it cuts first, how it returns, and what readings cannot do to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.scheduler import ConfigError, SchedulerConfig
from trencadis.scheduler.thermal import BOARDS, HeatModel, TwoPhaseThermalPolicy
from trencadis.scheduler.thermal.two_phase import MAX_CUT

BUDGET = 2048
SEQUENCES = 64
DWELL_S = 5.0


@attrs.define
class View:
    """The view of a scheduler that a policy gets."""

    now_s: float = 0.0
    num_running_seqs: int = SEQUENCES
    num_prefill_tokens: int = 0
    longest_wait_s: float = 0.0
    scheduler_config: SchedulerConfig = attrs.field(
        factory=lambda: SchedulerConfig(max_num_seqs=SEQUENCES, max_num_batched_tokens=BUDGET)
    )


@attrs.define
class Device:
    """A device with a queue that never ends. Prefill is bound by compute, decode by memory.

    A step takes 20 ms and 50 microseconds for each prompt token. Base 150 W, a sequence 1.5 W, a
    prompt token 0.03 J: 750 W at most. Sequences end after some seconds, and others start while the
    cap allows.
    """

    policy: TwoPhaseThermalPolicy
    view: View = attrs.field(factory=View)
    temperature: Callable[[float], float] | None = None
    measures_power: bool = True
    demand: int = BUDGET
    watts: float = 150.0
    cap: int = SEQUENCES
    limit: int = BUDGET
    caps: list[int] = attrs.field(factory=list)
    limits: list[int] = attrs.field(factory=list)
    powers: list[float] = attrs.field(factory=list)
    at_s: list[float] = attrs.field(factory=list)
    preempted: int = 0
    _ended: float = 0.0

    def serve(self, seconds: float) -> None:
        end_s = self.view.now_s + seconds
        while self.view.now_s < end_s:
            self.step()

    def step(self) -> None:
        policy, view = self.policy, self.view
        if self.measures_power:
            policy.on_power_reading(round(self.watts, 1))
        if self.temperature is not None:
            policy.on_temp_reading(0, self.temperature(view.now_s))
        self.cap = policy.get_max_running_seqs(view)
        limit = policy.get_max_prefill_tokens(view)
        self.limit = BUDGET if limit is None else limit
        self.preempted += max(0, view.num_running_seqs - self.cap)
        tokens = min(self.limit, self.demand)
        step_s = 0.02 + 5e-5 * tokens
        self.watts = 150 + 1.5 * view.num_running_seqs + 0.03 * tokens / step_s
        self._ended += step_s * view.num_running_seqs / 20
        ending, self._ended = int(self._ended), self._ended % 1
        view.num_running_seqs = min(self.cap, view.num_running_seqs - ending + 2 * ending + 1)
        view.num_prefill_tokens += tokens
        view.now_s += step_s
        self.caps.append(self.cap)
        self.limits.append(self.limit)
        self.powers.append(self.watts)
        self.at_s.append(view.now_s)


def test_a_budget_is_kept_by_prefill_alone_where_that_suffices() -> None:
    device = Device(TwoPhaseThermalPolicy(budget_w=500.0))
    device.serve(120)
    assert set(device.caps) == {SEQUENCES}
    assert min(device.limits) > 128
    settled = device.powers[-500:]
    assert 440 < sum(settled) / len(settled) < 520


@pytest.mark.parametrize(("max_itl_s", "cuts_prefill"), [(1.0, True), (2.0, False)])
def test_steps_longer_than_a_window_are_compared_with_the_longest_that_is_allowed(
    max_itl_s: float, cuts_prefill: bool
) -> None:
    """Prompts wait: prefill is cut only where steps of 1.5 s are too long."""
    policy = TwoPhaseThermalPolicy(budget_w=500.0, max_itl_s=max_itl_s)
    view = View(longest_wait_s=60.0)
    for number in range(12):
        policy.on_power_reading(800.0 + number % 2)
        policy.get_max_running_seqs(view)
        view.now_s += 1.5
        view.num_prefill_tokens += BUDGET
    assert (policy.get_max_prefill_tokens(view) is not None) is cuts_prefill


def test_an_idle_minute_after_the_start_does_not_suspend_the_budget() -> None:
    """The time until the next request is not a step: long steps would allow all prefill tokens."""
    device = Device(TwoPhaseThermalPolicy(budget_w=500.0))
    for _ in range(5):
        device.step()
    device.view.num_running_seqs = 0
    device.view.now_s += 60
    device.step()
    device.view.num_running_seqs = SEQUENCES
    device.serve(15)
    assert min(device.limits) < BUDGET
    settled = device.powers[-100:]
    assert sum(settled) / len(settled) < 520


def test_an_idle_minute_does_not_count_as_long_steps_for_the_guard() -> None:
    policy = TwoPhaseThermalPolicy(budget_w=300.0, max_ttft_s=10.0, max_itl_s=0.2)
    view = View(num_running_seqs=40, longest_wait_s=11.0)
    for step in range(5):
        view.now_s = 0.1 * step
        view.num_prefill_tokens += 500
        policy.on_power_reading(600.0)
        policy.get_max_running_seqs(view)
    view.now_s, view.num_running_seqs = 60.0, 0
    policy.on_power_reading(601.0)
    policy.get_max_running_seqs(view)
    assert policy.get_max_prefill_tokens(view) is None


def test_a_prefill_limit_falls_by_a_fifth_at_least() -> None:
    """While a device warms up by a degree in ten seconds."""
    policy = TwoPhaseThermalPolicy(target_temp_c=80.0, min_prefill_tokens=16)
    device = Device(policy, temperature=lambda now_s: min(84.0, 72.0 + now_s / 10))
    device.serve(200)
    falls = [(high, low) for high, low in pairwise(device.limits) if low < high]
    assert len(falls) > 2
    assert all(low <= 0.8 * high or low == 16 for high, low in falls)


def test_sequences_follow_when_prefill_is_at_its_minimum() -> None:
    device = Device(TwoPhaseThermalPolicy(budget_w=260.0, min_prefill_tokens=32))
    device.serve(180)
    first_cap = next(i for i, cap in enumerate(device.caps) if cap < SEQUENCES)
    assert device.limits[first_cap] == 32
    assert device.powers[-1] < 275
    assert 1 <= device.caps[-1] < SEQUENCES


def test_nothing_is_preempted_before_no_new_sequence_has_started_for_the_dwell_time() -> None:
    policy = TwoPhaseThermalPolicy(budget_w=200.0, min_prefill_tokens=2048, dwell_s=DWELL_S)
    view = View(num_running_seqs=40)
    policy.on_power_reading(500.0)
    caps = []
    for second in range(12):
        view.now_s = float(second)
        policy.on_power_reading(500.0 + second)
        caps.append(policy.get_max_running_seqs(view))
    assert caps[0] == SEQUENCES
    assert caps[1:6] == [40] * 5
    assert caps[6] == 30
    assert policy.get_max_prefill_tokens(view) is None


@pytest.mark.parametrize(
    ("wait_s", "step_s", "cuts_prefill"),
    [(0.0, 0.1, True), (11.0, 0.1, False), (11.0, 0.5, True)],
)
def test_the_guard_spares_prefill_while_first_tokens_are_late_and_steps_are_short(
    wait_s: float, step_s: float, cuts_prefill: bool
) -> None:
    policy = TwoPhaseThermalPolicy(budget_w=300.0, max_ttft_s=10.0, max_itl_s=0.2)
    view = View(num_running_seqs=40, longest_wait_s=wait_s)
    for step in range(int(1.5 / step_s)):
        view.now_s = step * step_s
        view.num_prefill_tokens += 500
        policy.on_power_reading(600.0)
        policy.get_max_running_seqs(view)
    limit, cap = policy.get_max_prefill_tokens(view), policy.get_max_running_seqs(view)
    assert (limit is not None, cap < SEQUENCES) == (cuts_prefill, not cuts_prefill)


def test_a_cut_leaves_a_quarter_of_the_prefill_limit_at_least() -> None:
    device = Device(TwoPhaseThermalPolicy(budget_w=100.0))
    device.serve(20)
    for before, after in pairwise(device.limits):
        assert after >= int(max(128, before / MAX_CUT))


def test_sequences_return_before_prefill_and_in_the_end_nothing_is_limited() -> None:
    device = Device(TwoPhaseThermalPolicy(budget_w=240.0))
    device.serve(60)
    assert device.limit == 128
    assert device.cap < SEQUENCES
    num_hot = len(device.limits)
    device.policy.budget_w = 2000.0
    device.serve(300)
    limits, caps = device.limits[num_hot:], device.caps[num_hot:]
    first_rise = next(i for i, limit in enumerate(limits) if limit > 128)
    assert caps[first_rise] == SEQUENCES
    assert (device.policy.get_max_prefill_tokens(device.view), caps[-1]) == (None, SEQUENCES)


@pytest.mark.parametrize("measures_power", [True, False])
@pytest.mark.parametrize("event", ["warm air", "fan failure"])
def test_a_hot_board_stays_below_its_limit_with_and_without_a_power_sensor(
    measures_power: bool, event: str
) -> None:
    board = BOARDS["h200"]
    model, unprotected = HeatModel(board, 32.0), HeatModel(board, 32.0)
    device = Device(
        TwoPhaseThermalPolicy(), temperature=lambda _: model.chip_c, measures_power=measures_power
    )
    hottest = 0.0
    while device.view.now_s < 600:
        is_hot = 100 <= device.view.now_s < 400
        for each in (model, unprotected):
            each.ambient_c = 54.0 if event == "warm air" and is_hot else 32.0
            each.fan = 0.45 if event == "fan failure" and is_hot else 1.0
        began = device.view.now_s
        device.step()
        hottest = max(hottest, model.advance(device.view.now_s - began, device.watts))
        if is_hot:
            unprotected.advance(device.view.now_s - began, board.limit_w)
            hottest_without = unprotected.chip_c
    assert hottest_without > board.max_c > hottest
    assert min(device.limits) < BUDGET
    assert (device.limits[-1], device.caps[-1]) == (BUDGET, SEQUENCES)
    assert device.preempted == 0, "decode alone cools the board enough"


@pytest.mark.parametrize("wrong_w", [65_535.0, 2_000.0, 1.0])
@pytest.mark.parametrize("second", [0, 2, 5, 9, 30])
def test_one_wrong_power_reading_does_not_lift_the_limits_of_a_hot_board(
    second: int, wrong_w: float
) -> None:
    highest = []
    for wrong_second in (None, second):
        device = Device(TwoPhaseThermalPolicy(target_temp_c=82.0), temperature=lambda _: 86.0)
        while device.view.now_s < 120:
            if int(device.view.now_s) == wrong_second:
                device.watts = wrong_w
            device.step()
        late = [i for i, at_s in enumerate(device.at_s) if at_s > 40]
        highest.append(max(device.powers[i] for i in late))
        assert max(device.limits[i] for i in late) < BUDGET / 4
        assert max(device.caps[i] for i in late) <= SEQUENCES
    assert highest[1] <= 1.1 * highest[0]


def test_nothing_is_limited_without_readings_and_below_the_target() -> None:
    cool = Device(TwoPhaseThermalPolicy(), temperature=lambda _: 60.0)
    blind = Device(TwoPhaseThermalPolicy(budget_w=1000.0), measures_power=False)
    for device in (cool, blind):
        device.serve(30)
        assert set(device.limits) == {BUDGET}
        assert set(device.caps) == {SEQUENCES}


def test_a_new_target_is_validated_and_followed() -> None:
    policy = TwoPhaseThermalPolicy(target_temp_c=90.0)
    device = Device(policy, temperature=lambda _: 80.0)
    device.serve(10)
    assert device.limit == BUDGET
    assert policy.retarget(75.0)
    device.serve(10)
    assert device.limit < BUDGET
    with pytest.raises(ConfigError, match=r"target_temp_c .* at most 95, got 96\.0"):
        policy.retarget(96.0)
    assert policy.target_temp_c == 75.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"budget_w": 0.0}, "budget_w must be a finite number above 0, got 0.0"),
        ({"budget_w": math.nan}, "budget_w must be"),
        ({"dwell_s": 0.0}, "dwell_s must be a finite number above 0, got 0.0"),
        ({"min_prefill_tokens": 0}, "min_prefill_tokens must be an integer of at least 1"),
        ({"max_ttft_s": -1.0}, "max_ttft_s must be a finite number of at least 0"),
        ({"victims": "loudest"}, "victims must be one of lru"),
    ],
)
def test_an_invalid_setting_is_an_error(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TwoPhaseThermalPolicy(**values)


def reversals(at_s: list[float], values: list[int]) -> list[float]:
    """The times at which the values began to rise after a fall, or to fall after a rise."""
    times, direction = [], 0
    for i in range(1, len(values)):
        now = (values[i] > values[i - 1]) - (values[i] < values[i - 1])
        if now and direction and now != direction:
            times.append(at_s[i])
        direction = now or direction
    return times


any_reading: Any = (
    st.floats(allow_nan=True, allow_infinity=True)
    | st.floats(1, 1500)
    | st.sampled_from([300.0, 700.0, 60.0, 84.0, 95.0])
)


@settings(max_examples=200, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            any_reading,
            any_reading,
            st.sampled_from([0.0, 0.05, 0.5, 1.0, 1.5, 20.0]),
            st.integers(0, SEQUENCES),
            st.integers(0, BUDGET),
            st.floats(0, 60),
        ),
        max_size=80,
    ),
    budget_w=st.none() | st.floats(50, 1000),
    min_prefill_tokens=st.integers(1, 3000),
    min_seqs=st.integers(1, 100),
)
def test_whatever_is_read_limits_stay_in_bounds_and_reverse_once_per_dwell_time(
    steps: list[tuple[float, float, float, int, int, float]],
    budget_w: float | None,
    min_prefill_tokens: int,
    min_seqs: int,
) -> None:
    policy = TwoPhaseThermalPolicy(
        budget_w=budget_w,
        min_prefill_tokens=min_prefill_tokens,
        min_seqs=min_seqs,
        dwell_s=DWELL_S,
    )
    view, at_s, caps, limits = View(), [], [], []
    for watts, temp_c, seconds, num_running, tokens, wait_s in steps:
        view.now_s += seconds
        view.num_running_seqs, view.longest_wait_s = num_running, wait_s
        view.num_prefill_tokens += tokens
        policy.on_power_reading(watts)
        policy.on_temp_reading(0, temp_c)
        caps.append(policy.get_max_running_seqs(view))
        limit = policy.get_max_prefill_tokens(view)
        limits.append(BUDGET if limit is None else limit)
        at_s.append(view.now_s)
    assert all(min(min_seqs, SEQUENCES) <= cap <= SEQUENCES for cap in caps)
    assert all(min(min_prefill_tokens, BUDGET) <= limit <= BUDGET for limit in limits)
    for values in (caps, limits):
        times = reversals(at_s, values)
        assert all(b - a >= DWELL_S for a, b in pairwise(times))


@pytest.mark.parametrize("temp_c", [50.0, 75.0])
def test_a_budget_is_kept_although_the_device_is_cool(temp_c: float) -> None:
    device = Device(TwoPhaseThermalPolicy(budget_w=500.0), temperature=lambda _: temp_c)
    device.serve(60)
    assert min(device.limits) < BUDGET
    assert sum(device.powers[-500:]) / 500 < 520


def test_a_hold_that_ended_does_not_shorten_the_next() -> None:
    policy = TwoPhaseThermalPolicy(budget_w=400.0, min_prefill_tokens=2048, dwell_s=DWELL_S)
    view, caps = View(num_running_seqs=40), []
    for second in range(60):
        view.now_s = float(second)
        is_hot = second < 3 or second >= 40
        policy.on_power_reading((500.0 if is_hot else 395.0) + second / 100)
        caps.append(policy.get_max_running_seqs(view))
    assert min(caps[:40]) == 40
    assert min(caps[40:46]) == 40
    assert caps[-1] < 40


def test_an_order_that_asks_twice_in_a_step_changes_nothing() -> None:
    def limits(num_asked: int) -> list[int | None]:
        # Requests wait, and steps are as long as the guard allows: on average half as long, with
        # steps of 0 s among them, it would spare prefill.
        policy, view = TwoPhaseThermalPolicy(budget_w=500.0), View(longest_wait_s=11.0)
        found = []
        for step in range(100):
            view.now_s += 0.25
            view.num_prefill_tokens += 600 * (step % 2)
            policy.on_power_reading(600.0 + step % 7)
            for _ in range(num_asked):
                policy.get_max_running_seqs(view)
            found.append(policy.get_max_prefill_tokens(view))
        return found

    assert limits(1) == limits(4)
    assert limits(1)[-1] is not None
