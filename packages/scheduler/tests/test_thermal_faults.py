"""Thermal policies that fail or answer nonsense, readings that are none, and wide requests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import pytest
from harness import Memory, Runner

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import (
    BatchControl,
    ControlError,
    Request,
    Scheduler,
    SchedulerConfig,
    SequenceGroup,
    ThermalGuard,
)
from trencadis.scheduler.thermal import NoThermalPolicy, ProportionalThermalPolicy, SchedulerView


@attrs.define
class State:
    hottest_c: Any = 20.0
    may_raise_cap: bool = True
    power_w: Any = None
    temperatures_c: Mapping[int, float] = attrs.field(factory=dict)


@attrs.define
class View:
    now_s: float = 0.0
    num_running_seqs: int = 0
    num_prefill_tokens: int = 0
    scheduler_config: SchedulerConfig = attrs.field(
        factory=lambda: SchedulerConfig(max_num_seqs=100)
    )


@attrs.define(eq=False)
class Scripted(NoThermalPolicy):
    """Answers what the test sets; a callable is called."""

    limit: Any = 100
    victims: Any = None
    target: Any = False
    temperature: Any = None
    seen: list[float] = attrs.field(factory=list)

    def get_max_running_seqs(self, scheduler: SchedulerView) -> Any:
        return self.limit() if callable(self.limit) else self.limit

    def select_victims(self, running: Sequence[SequenceGroup], num_to_evict: int) -> Any:
        return self.victims(running) if callable(self.victims) else self.victims

    def retarget(self, target_temp_c: float) -> Any:
        return self.target() if callable(self.target) else self.target

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        self.seen.append(temp_c)
        if callable(self.temperature):
            self.temperature()

    def on_power_reading(self, watts: float) -> None:
        self.seen.append(watts)


def broken() -> None:
    raise RuntimeError("broken")


def serving(
    policy: Scripted | None,
    requests: Iterable[int],
    *,
    read: Callable[[], State] = State,
    alert: Callable[[str], None] = lambda _: None,
    **config: Any,
) -> tuple[Runner, ThermalGuard, list[SequenceGroup]]:
    """A scheduler with a policy, and a waiting request for each number of samples."""
    guard = ThermalGuard(policy, read, alert)
    blocks = BlockManager(CacheConfig(num_blocks=200, block_size=4))
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 64, **config}
    ticks = itertools.count()
    scheduler = Scheduler(
        SchedulerConfig(**settings), blocks, thermal=guard, clock=lambda: float(next(ticks))
    )
    runner = Runner(scheduler, Memory(4))
    groups = [
        runner.add(Request(request_id=f"r{i}", prompt_token_ids=(1, 2, 3), max_tokens=6, n=n))
        for i, n in enumerate(requests)
    ]
    return runner, guard, groups


def assert_complete(groups: list[SequenceGroup]) -> None:
    for group in groups:
        assert [len(sample.output_token_ids) for sample in group.results] == [6] * group.request.n


@pytest.mark.parametrize(
    "fault",
    [
        {"limit": broken},
        {"temperature": broken},
        {"limit": math.nan},
        {"limit": 2.5},
        {"limit": "x"},
        {"limit": None},
        {"limit": True},
    ],
    ids=lambda fault: ", ".join(
        f"{name} {getattr(value, '__name__', value)}" for name, value in fault.items()
    ),
)
def test_a_policy_that_fails_keeps_its_last_limit_and_serving_goes_on(
    fault: dict[str, Any],
) -> None:
    alerts: list[str] = []
    policy = Scripted(limit=2)
    runner, guard, groups = serving(policy, [1] * 5, alert=alerts.append)
    runner.step()
    policy.limit, policy.temperature = fault.get("limit", 2), fault.get("temperature")
    for _ in range(5):
        output, _ = runner.step()
        assert output.max_running_seqs == 2
    assert (guard.num_faults, len(alerts)) == (5, 1)
    assert "policy Scripted failed in get_max_running_seqs" in alerts[0]
    assert "last limit of 2" in alerts[0]
    assert guard.fault
    policy.limit, policy.temperature = 4, None
    output, _ = runner.step()
    assert (output.max_running_seqs, guard.fault) == (4, "")
    runner.run()
    assert_complete(groups)


def test_a_policy_that_calls_the_scheduler_fails_and_changes_nothing() -> None:
    policy = Scripted(limit=2)
    runner, guard, groups = serving(policy, [1] * 5)
    scheduler = runner.scheduler
    calls = [
        scheduler.schedule,
        scheduler.discard_step,
        scheduler.abort_admitted,
        lambda: scheduler.update(None, {}),  # type: ignore[arg-type]
        lambda: scheduler.abort("r0"),
        lambda: scheduler.finish(0),
        lambda: scheduler.add(Request(request_id="new", prompt_token_ids=(1,), max_tokens=1)),
    ]
    runner.step()
    for number, call in enumerate(calls, 1):
        policy.limit = call
        runner.step()
        assert guard.num_faults == number
        assert "StepOrderError" in guard.fault
        assert f"was called while schedule() decides step {number + 1}" in guard.fault
    policy.limit = 4
    runner.run()
    assert_complete(groups)


def test_a_policy_that_empties_the_list_of_running_groups_does_not_end_the_limit() -> None:
    policy = Scripted(victims=lambda running: running.clear() or [])
    runner, _, groups = serving(policy, [1] * 5)
    runner.step()
    policy.limit = 2
    runner.step()
    runner.step()
    assert runner.scheduler.num_running_seqs == 2
    policy.limit = 8
    runner.run()
    assert_complete(groups)


@pytest.mark.parametrize("limit", [0, -3])
def test_a_policy_that_answers_no_positive_limit_does_not_halt_serving(limit: int) -> None:
    alerts: list[str] = []
    runner, guard, groups = serving(Scripted(limit=limit), [1, 1], alert=alerts.append)
    output, _ = runner.step()
    assert (output.max_running_seqs, runner.scheduler.num_running) == (1, 1)
    assert guard.fault == f"ValueError: the limit must be at least 1, got {limit}"
    runner.run()
    assert_complete(groups)
    assert (len(alerts), guard.num_faults > 5) == (1, True)
    assert guard.cap(View()) == 1


@pytest.mark.parametrize("policy", [None, Scripted(limit=8)], ids=["no policy", "policy"])
def test_a_read_or_an_alert_that_raises_ends_no_step(
    policy: Scripted | None, caplog: pytest.LogCaptureFixture
) -> None:
    failing = True

    def read() -> Any:
        if failing:
            raise OSError("no bus")
        return State()

    def alert(_: str) -> None:
        raise RuntimeError("no pager")

    runner, guard, groups = serving(policy, [1] * 3, read=read, alert=alert)
    runner.step()
    assert guard.fault == "OSError: no bus"
    assert "The alert was: The sensors cannot be read (OSError: no bus)" in caplog.text
    assert "no pager" in caplog.text
    failing = False
    runner.step()
    assert "OSError" not in guard.fault
    runner.run()
    assert_complete(groups)


def test_a_sensor_that_raises_keeps_the_last_limit() -> None:
    alerts: list[str] = []
    states: list[Any] = [State()]
    runner, guard, groups = serving(
        Scripted(limit=2), [1] * 3, read=lambda: states[0], alert=alerts.append
    )
    runner.step()
    states[0] = None
    assert runner.step()[0].max_running_seqs == 2
    assert (len(alerts), guard.num_faults) == (1, 1)
    runner.run()
    assert_complete(groups)


@pytest.mark.parametrize(
    "victims",
    [
        lambda _: broken(),
        None,
        lambda _: [None],
        lambda _: ["r0"],
        lambda _: 3,
        lambda running: itertools.repeat(running[0]),
        lambda _: itertools.count(),
        lambda _: [[]],
    ],
)
def test_victims_that_are_none_are_replaced_and_the_limit_holds(victims: Any) -> None:
    policy = Scripted(victims=victims)
    runner, _, groups = serving(policy, [1] * 4)
    runner.step()
    policy.limit = 2
    runner.step()
    runner.step()
    assert runner.scheduler.num_running_seqs == 2
    policy.limit = 4
    runner.run()
    assert_complete(groups)


def test_too_few_victims_are_completed_by_the_least_recently_scheduled() -> None:
    runner, guard, groups = serving(Scripted(victims=list), [1] * 3)
    runner.step()
    guard.policy.victims = lambda _: []
    assert guard.victims(groups, 2) == groups[:2]
    guard.policy.victims = lambda running: running[2:]
    assert guard.victims(groups, 2) == [groups[2], groups[0]]


def test_an_order_is_answered_when_the_policy_cannot_set_the_target() -> None:
    alerts: list[str] = []
    policy = Scripted(target=broken)
    runner, guard, groups = serving(policy, [1, 1], alert=alerts.append)
    future = runner.scheduler.control(BatchControl(target_temp_c=70.0, max_num_seqs=1))
    runner.step()
    error = future.exception(timeout=0)
    assert isinstance(error, ControlError)
    assert error.field == "target_temp_c"
    assert "Scripted could not set its target temperature to 70.0 (RuntimeError: broken)" in str(
        error
    )
    assert runner.scheduler.scheduler_config.max_num_seqs == 8, "nothing else was changed"
    assert (len(alerts), guard.num_faults) == (1, 1)
    policy.target = None
    future = runner.scheduler.control(BatchControl(target_temp_c=70.0))
    runner.step()
    assert future.exception(timeout=0) is None, "a control loop runs beside it"
    assert guard.runs_control_loop
    runner.run()
    assert_complete(groups)


@pytest.mark.parametrize("control", [None, "stop", {"max_num_seqs": 3}])
def test_what_is_no_control_request_is_refused_at_once(control: Any) -> None:
    runner, _, _ = serving(Scripted(), [1])
    with pytest.raises(ControlError, match="must be of type BatchControl"):
        runner.scheduler.control(control)
    runner.run()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -300.0, 1e6, "hot", True])
def test_a_temperature_that_is_none_is_counted_and_does_not_raise_the_limit(value: Any) -> None:
    alerts: list[str] = []
    state, view, policy = State(), View(), Scripted(limit=5)
    guard = ThermalGuard(policy, lambda: state, alerts.append)
    assert guard.cap(view) == 5
    state.hottest_c, policy.limit = value, 7
    assert [guard.cap(view) for _ in range(3)] == [5, 5, 5]
    assert policy.seen == [20.0]
    assert (guard.num_rejected_readings, len(alerts)) == (3, 1)
    assert "A temperature of" in alerts[0]
    policy.limit = 4
    assert guard.cap(view) == 4, "it may fall"
    state.hottest_c, policy.limit = 20.0, 7
    assert guard.cap(view) == 7


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -5.0, 1e12, "much"])
def test_a_power_that_is_none_is_counted_and_does_not_raise_the_limit(value: Any) -> None:
    alerts: list[str] = []
    state, view, policy = State(power_w=300.0), View(num_running_seqs=4), Scripted(limit=5)
    guard = ThermalGuard(policy, lambda: state, alerts.append)
    assert guard.cap(view) == 5
    before = guard.power_model.per_sequence_w
    state.power_w, policy.limit = value, 7
    assert guard.cap(view) == 5
    assert policy.seen == [300.0, 20.0, 20.0]
    assert guard.power_model.per_sequence_w == before
    assert (guard.num_rejected_readings, len(alerts)) == (1, 1)
    assert "A power of" in alerts[0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1e9, None, "hot"])
def test_a_proportional_policy_keeps_its_limit_on_a_temperature_that_is_none(value: Any) -> None:
    policy, view = ProportionalThermalPolicy(target_temp_c=82.0, k_p=10.0), View()
    policy.on_temp_reading(0, 90.0)
    assert policy.get_max_running_seqs(view) == 20
    policy.on_temp_reading(0, value)
    view.now_s = 3600.0
    assert policy.get_max_running_seqs(view) == 20


def test_requests_wider_than_a_thermal_limit_run_alone_one_after_another() -> None:
    runner, _, groups = serving(Scripted(limit=1), [4, 3, 1, 4])
    limits = []
    while runner.scheduler.has_work:
        output, _ = runner.step()
        limits.append(output.max_running_seqs)
        assert runner.scheduler.num_running <= 1
    assert_complete(groups)
    assert list(dict.fromkeys(limits)) == [4, 3, 1]
    assert runner.scheduler.num_preemptions == 0


def test_one_request_keeps_running_when_the_thermal_limit_falls_below_its_samples() -> None:
    policy = Scripted(victims=list)
    runner, _, groups = serving(policy, [4, 2, 2])
    runner.step()
    assert runner.scheduler.num_running == 3
    policy.limit = 1
    runner.run(60)
    assert_complete(groups)


def test_narrow_requests_bypass_one_wider_than_a_thermal_limit_a_limited_number_of_times() -> None:
    runner, _, _ = serving(Scripted(limit=3), [1], max_bypasses=4)
    runner.step()
    wide = runner.add(Request(request_id="wide", prompt_token_ids=(8, 8), max_tokens=6, n=4))
    for i in range(100):
        runner.add(Request(request_id=f"n{i}", prompt_token_ids=(i, 7), max_tokens=3))
        runner.step()
        if wide.finish_reason is not None:
            break
    assert_complete([wide])
    assert wide.num_bypasses == 4


def test_victims_that_do_not_run_are_told_and_others_are_taken() -> None:
    alerts: list[str] = []
    policy = Scripted(limit=4, victims=lambda running: [*running[:1], "r1"])
    runner, _, groups = serving(policy, [1] * 4, alert=alerts.append)
    runner.step()
    policy.limit = 2
    for _ in range(3):
        runner.step()
    assert any("a victim must be a running group, got 'r1'" in alert for alert in alerts)
    assert runner.scheduler.num_running_seqs <= 2
    runner.run()
    assert_complete(groups)


def test_a_scheduler_without_requests_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    runner, _, _ = serving(Scripted(), [])
    runner.scheduler.control(BatchControl(max_num_seqs=2))
    for _ in range(2):
        output, _ = runner.step()
        assert output.is_empty
    assert not caplog.records


def test_an_operator_is_warned_if_nothing_runs_because_of_the_ordered_limit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner, _, groups = serving(Scripted(), [4, 3])
    runner.scheduler.control(BatchControl(max_num_seqs=2))
    for _ in range(5):
        output, _ = runner.step()
        assert output.is_empty
    assert [record.getMessage() for record in caplog.records] == [
        "Nothing runs: each of the 2 requests has more sequences than the 2 that a control request "
        "allows. Raise max_num_seqs, or abort them"
    ]
    runner.scheduler.control(BatchControl(max_num_seqs=4))
    runner.run()
    assert_complete(groups)
