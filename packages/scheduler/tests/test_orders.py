"""Control requests: the answer is what happens, and a dry run gives the answer of the request."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import attrs
import pytest
from harness import Memory, Runner
from hypothesis import given, settings
from hypothesis import strategies as st

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import (
    BatchControl,
    BatchControlResult,
    BeamSearch,
    ControlError,
    Request,
    Scheduler,
    SchedulerConfig,
    SequenceStatus,
    ThermalGuard,
    UnservableRequest,
)
from trencadis.scheduler.telemetry import Reading, TemperatureReader, TemperatureSource
from trencadis.scheduler.thermal import (
    VICTIM_ORDERS,
    NoThermalPolicy,
    ProportionalThermalPolicy,
    SchedulerThermalPolicy,
)
from trencadis.scheduler.thermal.policy import SchedulerView

Answer = BatchControlResult | tuple[str, str | None]


@attrs.define
class Heat:
    """The reading of the hottest device."""

    hottest_c: float | None = 60.0
    may_raise_cap: bool = True
    power_w: float | None = None
    temperatures_c: Mapping[int, float] = attrs.field(factory=dict)


@attrs.define
class Bench:
    scheduler: Scheduler
    runner: Runner
    heat: Heat
    guard: ThermalGuard | None

    @classmethod
    def of(
        cls,
        thermal: SchedulerThermalPolicy | None = None,
        *,
        senses: bool = True,
        guard: ThermalGuard | None = None,
        num_blocks: int = 200,
        step_s: float = 0.1,
        **fields: Any,
    ) -> Bench:
        heat, ticks = Heat(), itertools.count()
        blocks = BlockManager(
            CacheConfig(num_blocks=num_blocks, block_size=4, num_host_blocks=200, watermark=0.0)
        )
        if guard is None and senses:
            guard = ThermalGuard(thermal, lambda: heat)
        values = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128, **fields}
        scheduler = Scheduler(
            SchedulerConfig(**values), blocks, thermal=guard, clock=lambda: next(ticks) * step_s
        )
        return cls(scheduler, Runner(scheduler, Memory(4)), heat, guard)

    def add(self, name: str, length: int = 4, **fields: Any) -> None:
        # Prompts without a common prefix, which would wait for each other.
        start = 100 * len(self.runner.sample_of)
        prompt = tuple(range(start, start + length))
        values = {"max_tokens": 100, "prompt_token_ids": prompt, **fields}
        self.runner.add(Request(request_id=name, **values))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.runner.step()

    def order(self, **fields: Any) -> BatchControlResult:
        """Carry out an order in one step, whose number of running sequences must be its answer."""
        dry = self.scheduler.control(BatchControl(**fields, dry_run=True))
        real = self.scheduler.control(BatchControl(**fields))
        output = self.scheduler.schedule()
        if not real.done():  # the step before carried out an order
            self.runner.finish(output)
            output = self.scheduler.schedule()
        answer = real.result(timeout=0)
        assert answer_of(dry) == answer
        assert answer.new_running == self.scheduler.num_running_seqs
        self.runner.finish(output)
        return answer


def answer_of(future: Future[BatchControlResult]) -> Answer:
    error = future.exception(timeout=0)
    if error is None:
        return future.result()
    assert isinstance(error, ControlError)
    return str(error), error.field


def test_the_largest_batch_of_an_order_is_that_of_a_step() -> None:
    bench = Bench.of()
    bench.add("a")
    assert bench.order(max_num_seqs=64).new_max_num_seqs == 64
    bench.steps(1)
    future = bench.scheduler.control(BatchControl(max_num_seqs=65))
    bench.steps(1)
    with pytest.raises(ControlError, match="max_num_seqs 65 is above max_num_batched_tokens 64"):
        future.result(timeout=0)


def test_an_order_that_holds_for_no_time_holds_nothing() -> None:
    bench = Bench.of(force_evict_hold_s=1000.0)
    for name in "abcd":
        bench.add(name)
    bench.steps(2)
    assert bench.order(force_evict=2, hold_s=0).new_running == 2
    bench.steps(4)
    assert bench.scheduler.num_running_seqs == 4


def test_the_answer_has_the_watts_of_what_was_evicted() -> None:
    bench = Bench.of(senses=False)
    for name in "abcd":
        bench.add(name)
    bench.steps(2)
    assert bench.order(force_evict=3).estimated_watts_saved == pytest.approx(3 * 3.2)


@pytest.mark.parametrize("max_num_seqs", [8, 6, None])
def test_evicted_sequences_stay_away_even_where_max_num_seqs_has_a_place_for_them(
    max_num_seqs: int | None,
) -> None:
    bench = Bench.of(force_evict_hold_s=5.0)
    for name in "abcdefgh":
        bench.add(name)
    bench.steps(2)
    answer = bench.order(force_evict=4, max_num_seqs=max_num_seqs)
    assert (answer.previous_running, answer.new_running) == (8, 4)
    for _ in range(48):
        bench.steps(1)
        assert bench.scheduler.num_running_seqs == 4
    bench.steps(6)
    assert bench.scheduler.num_running_seqs == (max_num_seqs or 8)


def test_a_later_order_without_an_eviction_ends_the_hold() -> None:
    bench = Bench.of(force_evict_hold_s=5.0)
    for name in "abcdefgh":
        bench.add(name)
    bench.steps(2)
    assert bench.order(force_evict=4).new_running == 4
    bench.order()
    assert bench.scheduler.num_running_seqs == 4
    bench.order(max_num_seqs=6)
    bench.steps(1)
    assert bench.scheduler.num_running_seqs == 6


def test_a_target_evicts_at_once_in_the_order_that_was_asked_for() -> None:
    bench = Bench.of(ProportionalThermalPolicy(target_temp_c=90.0, victims="lru"))
    for name, length in zip("abcde", (4, 8, 40, 12, 6), strict=True):
        bench.add(name, length)
    bench.heat.hottest_c = 85.0
    bench.steps(4)
    assert bench.scheduler.num_running_seqs == 5
    answer = bench.order(target_temp_c=80.0, policy="largest_kv")
    assert answer.new_running == 3
    assert answer.evicted_request_ids == ("c", "d")
    bench.heat.hottest_c = 87.5
    bench.steps(2)
    running = [group.request_id for group in bench.scheduler._states.running]
    assert running == ["a"], "the policy goes on in that order: it evicts b and e before a"


def test_those_with_the_most_left_to_generate_are_evicted_first() -> None:
    bench = Bench.of()
    bench.add("short", max_tokens=20)
    bench.add("long", max_tokens=60)
    bench.steps(15)
    bench.add("medium", max_tokens=40)
    bench.add("several", max_tokens=25, n=2)
    bench.steps(3)
    assert bench.scheduler.num_running_seqs == 5
    answer = bench.order(force_evict=4, policy="longest_remaining")
    assert answer.evicted_request_ids == ("several", "long", "medium")


def test_the_limit_after_a_large_first_victim_is_that_of_those_who_are_left() -> None:
    """A group that runs first may exceed the policy's limit; once it is evicted, nobody may."""
    bench = Bench.of(ProportionalThermalPolicy(target_temp_c=90.0, victims="lru"))
    bench.add("a", 40, n=4)
    for name in "bcde":
        bench.add(name)
    bench.heat.hottest_c = 85.0
    bench.steps(4)
    assert bench.scheduler.num_running_seqs == 8
    answer = bench.order(target_temp_c=79.0, policy="largest_kv")
    assert answer.evicted_request_ids[0] == "a"
    assert answer.new_running == 2


class Failing(NoThermalPolicy):
    """A policy whose target cannot be set because of a fault."""

    def retarget(self, target_temp_c: float) -> bool:
        raise RuntimeError(target_temp_c)


@pytest.mark.parametrize("senses", [True, False])
def test_a_dry_run_gives_the_errors_of_the_order(senses: bool) -> None:
    bench = Bench.of(Failing(), senses=senses)
    for order in (BatchControl(target_temp_c=80.0), BatchControl(max_num_seqs=65)):
        dry = bench.scheduler.control(attrs.evolve(order, dry_run=True))
        real = bench.scheduler.control(order)
        bench.steps(1)
        assert isinstance(answer_of(real), tuple)
        assert answer_of(dry) == answer_of(real)


class Locked(ProportionalThermalPolicy):
    """A policy that cannot be copied."""

    def __deepcopy__(self, memo: object) -> Locked:
        raise TypeError("cannot copy a lock")


def test_a_dry_run_says_that_a_policy_cannot_be_copied_and_the_order_is_still_carried_out() -> None:
    bench = Bench.of(Locked())
    dry = bench.scheduler.control(BatchControl(target_temp_c=70.0, dry_run=True))
    bench.steps(1)
    with pytest.raises(ControlError, match=r"Locked cannot be copied .* leave out dry_run"):
        dry.result(timeout=0)
    real = bench.scheduler.control(BatchControl(target_temp_c=70.0))
    bench.steps(1)
    assert real.exception(timeout=0) is None
    assert bench.guard is not None
    assert bench.guard.target_temp_c == 70.0


def test_a_target_without_a_policy_starts_a_control_loop_that_ends_below_it() -> None:
    bench = Bench.of(step_s=1.0)
    guard = bench.guard
    assert guard is not None
    for name in "abcdefgh":
        bench.add(name, max_tokens=120)
    bench.heat.hottest_c = 91.0
    bench.steps(2)
    assert bench.scheduler.num_running_seqs == 8
    assert not guard.runs_control_loop
    bench.heat.hottest_c = 84.0
    answer = bench.order(target_temp_c=80.0, policy="largest_kv")
    assert answer.new_running == 4, "half of the band of 8 degrees is half of the sequences"
    assert (guard.runs_control_loop, guard.target_temp_c) == (True, 80.0)
    bench.heat.hottest_c = 78.5
    bench.steps(40)
    assert guard.runs_control_loop, "not below the target by the hysteresis"
    assert bench.scheduler.num_running_seqs < 8
    bench.heat.hottest_c = 70.0
    for _ in range(100):
        if not guard.runs_control_loop:
            break
        bench.add("more" + str(bench.scheduler.now_s), max_tokens=20)
        bench.steps(1)
    assert (guard.runs_control_loop, guard.target_temp_c) == (False, None)
    bench.heat.hottest_c = 99.0
    bench.steps(20)
    assert bench.scheduler.num_running_seqs == 8, "the loop has ended: nothing is limited"


class FixedTarget(NoThermalPolicy):
    """As the example of seed 003, section 6: a target of its own, and no `retarget`."""

    def __init__(self, target_c: float = 82.0, k_p: float = 0.5) -> None:
        self._target_c, self._k_p, self._temp_c = target_c, k_p, 80.0

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        self._temp_c = temp_c

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        most = scheduler.scheduler_config.max_num_seqs
        return max(1, most - max(0, int((self._temp_c - self._target_c) * self._k_p)))


def test_the_order_of_the_seed_acts_beside_the_policy_of_the_seed() -> None:
    bench = Bench.of(FixedTarget(), step_s=1.0)
    guard = bench.guard
    assert guard is not None
    for i, name in enumerate("abcdefgh"):
        bench.add(name, length=4 + 4 * i)
    bench.heat.hottest_c = 84.0
    bench.steps(3)
    assert bench.scheduler.num_running_seqs == 7
    answer = bench.order(target_temp_c=80.0, policy="largest_kv")
    assert answer.new_running == 4
    assert answer.evicted_request_ids[0] == "g"
    assert (guard.runs_control_loop, guard.target_temp_c) == (True, 80.0)
    bench.heat.hottest_c = 70.0
    for _ in range(100):
        bench.steps(1)
        if not guard.runs_control_loop:
            break
    assert (guard.runs_control_loop, guard.target_temp_c) == (False, None)
    bench.heat.hottest_c = 90.0
    bench.steps(3)
    assert bench.scheduler.num_running_seqs == 4, "the policy goes on alone"


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(60, 99), st.booleans(), st.none() | st.floats(60, 95)), max_size=30
    )
)
def test_the_lower_cap_of_policy_and_control_loop_holds(
    steps: list[tuple[float, bool, float | None]],
) -> None:
    heat = Heat()
    both, policy, loop = (
        ThermalGuard(policy, lambda: heat) for policy in (FixedTarget(), FixedTarget(), None)
    )
    bench = Bench.of()
    for heat.hottest_c, heat.may_raise_cap, target in steps:
        guards = (both, policy, loop)
        caps = [guard.cap(bench.scheduler) for guard in guards]
        if target is not None:
            dry = both.retarget(target, "lru", bench.scheduler, dry_run=True)
            caps[0] = both.retarget(target, "lru", bench.scheduler)
            caps[2] = loop.retarget(target, "lru", bench.scheduler)
            assert dry == caps[0]
        assert caps[0] == min(cap for cap in caps[1:] if cap is not None)
        assert (both.runs_control_loop, both.target_temp_c) == (
            loop.runs_control_loop,
            loop.target_temp_c,
        )
        bench.steps(1)


def test_a_fault_of_the_policy_does_not_stop_the_control_loop() -> None:
    class Broken(FixedTarget):
        def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
            raise RuntimeError(temp_c)

    bench = Bench.of(Broken())
    for name in "abcdefgh":
        bench.add(name)
    bench.steps(1)
    bench.order(target_temp_c=80.0)
    bench.heat.hottest_c = 84.0
    bench.steps(2)
    assert bench.scheduler.num_running_seqs == 4


def test_a_control_loop_does_not_end_on_a_stale_reading() -> None:
    bench = Bench.of()
    assert bench.guard is not None
    bench.order(target_temp_c=80.0)
    bench.heat.hottest_c, bench.heat.may_raise_cap = 50.0, False
    bench.order()
    assert bench.guard.runs_control_loop
    bench.heat.may_raise_cap = True
    bench.order()
    assert not bench.guard.runs_control_loop


def test_a_control_loop_raises_no_limit_while_readings_fail() -> None:
    heat, failures = Heat(), []

    def read() -> Heat:
        if failures:
            raise failures[0]
        return heat

    bench = Bench.of(guard=ThermalGuard(None, read), step_s=10.0)
    bench.order(target_temp_c=80.0)
    heat.hottest_c = 88.0
    bench.steps(2)
    heat.hottest_c = 60.0
    limits = []
    for failures[:] in ([], [OSError("no answer")], [OSError("no answer")], []):
        output, _ = bench.runner.step()
        limits.append(output.max_running_seqs)
    assert limits[0] == limits[1] == limits[2] < limits[3]


class Node(TemperatureSource):
    """Devices by index and their temperatures."""

    def __init__(self) -> None:
        self.celsius = {0: 60.0, 3: 61.0}

    @property
    def name(self) -> str:
        return "node"

    def read(self) -> list[Reading]:
        return [Reading(device, celsius) for device, celsius in self.celsius.items()]


def test_a_device_that_was_removed_throttles_until_an_order_forgets_it() -> None:
    node, now_s = Node(), [0.0]
    reader = TemperatureReader(node, clock=lambda: now_s[0])
    guard = ThermalGuard(
        ProportionalThermalPolicy(target_temp_c=80.0, hysteresis_c=3.0, dwell_s=0.1),
        reader.state,
        forget=reader.forget,
    )
    bench = Bench.of(guard=guard)

    def passes(seconds: int) -> None:
        for _ in range(seconds):
            now_s[0] += 1.0
            node.celsius[0] = 60.0 + now_s[0] % 3
            reader.poll()

    def rejected(device: int) -> str:
        order = bench.scheduler.control(BatchControl(forget_device=device))
        bench.steps(2)
        message, field = answer_of(order)
        assert field == "forget_device"
        return str(message)

    for name in "abcdefgh":
        bench.add(name)
    passes(5)
    bench.steps(4)
    assert bench.scheduler.num_running_seqs == 8
    assert "device 3 answers" in rejected(3)
    del node.celsius[3]
    passes(100)
    bench.steps(4)
    assert bench.scheduler.num_running_seqs == 1
    assert "device 3: its sensor does not answer" in reader.state().fault
    assert "the devices are 0, 3" in rejected(2)
    bench.scheduler.control(BatchControl(forget_device=3, dry_run=True))
    bench.steps(2)
    assert reader.state().hottest_c == 95.0
    bench.order(forget_device=3)
    bench.steps(60)
    assert bench.scheduler.num_running_seqs == 8
    assert reader.state().temperatures_c.keys() == {0}
    node.celsius[3] = 70.0  # it is back
    passes(1)
    assert reader.state().hottest_c == 70.0
    del node.celsius[3]
    passes(100)
    reader.forget(3)
    node.celsius.clear()
    reader.poll()
    now_s[0] += 100.0
    assert "device 0 is the only one" in rejected(0)


def test_without_temperatures_no_device_can_be_forgotten() -> None:
    for bench, reason in ((Bench.of(senses=False), "none are read"), (Bench.of(), "no source")):
        order = bench.scheduler.control(BatchControl(forget_device=0))
        bench.steps(1)
        assert reason in str(order.exception(timeout=0))


def test_requests_start_although_an_order_arrives_in_every_step() -> None:
    bench = Bench.of()
    for name in "abc":
        bench.add(name, max_tokens=4)
    for _ in range(20):
        bench.scheduler.control(BatchControl(max_num_seqs=8))
        bench.steps(1)
    assert bench.scheduler.num_waiting == bench.scheduler.num_running == 0


def eight_running(**fields: Any) -> Bench:
    bench = Bench.of(ProportionalThermalPolicy(target_temp_c=90.0), **fields)
    for name, length in zip("abcdefgh", (4, 40, 4, 4, 4, 4, 4, 4), strict=True):
        bench.add(name, length, max_tokens=80)
    bench.heat.hottest_c = 85.0
    bench.steps(4)
    assert bench.scheduler.num_running_seqs == 8
    return bench


def most_running(**order: Any) -> int:
    """The most sequences that run in any of the steps after an order."""
    bench = eight_running()
    bench.order(**order)
    counts = []
    for _ in range(20):
        bench.steps(1)
        counts.append(bench.scheduler.num_running_seqs)
    return max(counts)


def longest_prefill(**order: Any) -> int:
    """The most prompt tokens of a step after an order."""
    bench = eight_running(max_num_seqs=16)
    bench.order(**order)
    bench.add("long", 100, max_tokens=2)
    tokens = []
    for _ in range(60):
        output, _ = bench.runner.step()
        tokens.append(sum(len(chunk.token_ids) for chunk in output.prompts))
    assert sum(tokens) >= 100
    return max(tokens)


def steps_held(**order: Any) -> int:
    """How many steps the sequences that an order has evicted stay away."""
    bench = eight_running(step_s=1.0)
    bench.order(**order)
    count = 0
    while bench.scheduler.num_running_seqs < 8:
        bench.steps(1)
        count += 1
    return count


def test_the_time_that_a_request_is_evicted_adds_up() -> None:
    bench = eight_running(step_s=1.0)
    groups = list(bench.scheduler._states.groups.values())
    for hold_s, total_s in ((17.0, 17.0), (5.0, 22.0)):
        bench.order(force_evict=5, hold_s=hold_s)
        evicted = [group for group in groups if group.status is not SequenceStatus.RUNNING]
        while bench.scheduler.num_running_seqs < 8:
            bench.steps(1)
        assert max(group.away_s for group in evicted) == pytest.approx(total_s, abs=2.0)
    assert min(group.away_s for group in groups) < 17.0


def target(**order: Any) -> float | None:
    bench = eight_running()
    bench.order(**order)
    assert bench.guard is not None
    return bench.guard.target_temp_c


def evicted(**order: Any) -> tuple[str, ...]:
    return eight_running().order(**order).evicted_request_ids


def running_after(**order: Any) -> int:
    bench = eight_running()
    future = bench.scheduler.control(BatchControl(**order))
    bench.steps(1)
    future.result(timeout=0)
    return bench.scheduler.num_running_seqs


def hottest(**order: Any) -> float | None:
    """The hottest device after an order; device 3 was at 95 degrees C and has gone."""
    node, now_s = Node(), [0.0]
    reader = TemperatureReader(node, clock=lambda: now_s[0])
    guard = ThermalGuard(ProportionalThermalPolicy(), reader.state, forget=reader.forget)
    bench = Bench.of(guard=guard)
    bench.add("a")
    reader.poll()
    del node.celsius[3]
    for _ in range(100):
        now_s[0] += 1.0
        node.celsius[0] = 60.0 + now_s[0] % 3
        reader.poll()
    bench.order(**order)
    return reader.state().hottest_c


EFFECTS: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any], tuple[Any, Any]]] = {
    "max_num_seqs": (most_running, {}, {"max_num_seqs": 5}, (8, 5)),
    "max_prefill_tokens": (longest_prefill, {}, {"max_prefill_tokens": 7}, (56, 7)),
    "force_evict": (most_running, {}, {"force_evict": 5}, (8, 3)),
    "hold_s": (steps_held, {"force_evict": 5}, {"force_evict": 5, "hold_s": 17.0}, (5, 17)),
    "target_temp_c": (target, {}, {"target_temp_c": 88.0}, (90.0, 88.0)),
    "policy": (
        evicted,
        {"force_evict": 1},
        {"force_evict": 1, "policy": "largest_kv"},
        (("a",), ("b",)),
    ),
    "forget_device": (hottest, {}, {"forget_device": 3}, (95.0, 61.0)),
    "dry_run": (running_after, {"force_evict": 5}, {"force_evict": 5, "dry_run": True}, (3, 8)),
}
"""What shows the effect of each field, orders without and with it, and what they show."""


@pytest.mark.parametrize("field", [field.name for field in attrs.fields(BatchControl)])
def test_every_field_of_an_order_has_an_effect(field: str) -> None:
    measure, without, with_it, expected = EFFECTS[field]
    assert (measure(**without), measure(**with_it)) == expected


def test_a_limit_that_an_order_raises_holds_for_what_may_be_added() -> None:
    """Admission, the queues and the limit have the same settings."""
    bench = Bench.of(max_num_seqs=4)
    with pytest.raises(UnservableRequest, match="max_num_seqs is 4"):
        bench.add("wide", n=6, max_tokens=10)
    bench.order(max_num_seqs=6)
    bench.add("wide", n=6, max_tokens=10)
    bench.steps(2)
    assert bench.scheduler.num_running_seqs == 6
    bench.order(max_num_seqs=2)
    bench.add("later", n=4, max_tokens=10)  # it waits until an order raises the limit again
    bench.order(max_num_seqs=6)
    bench.runner.run()
    assert not bench.scheduler.has_work


@pytest.mark.parametrize("fields", [{}, {"force_evict": 0}, {"max_num_seqs": 4}])
def test_a_hold_without_an_eviction_is_rejected_and_nothing_changes(fields: Any) -> None:
    bench = eight_running()
    for dry_run in (True, False):
        answer = bench.scheduler.control(BatchControl(hold_s=5.0, dry_run=dry_run, **fields))
        bench.steps(1)
        with pytest.raises(ControlError, match="give force_evict, or leave hold_s out") as caught:
            answer.result(timeout=0)
        assert caught.value.field == "hold_s"
    bench.steps(3)
    assert bench.scheduler.num_running_seqs == 8


ORDERS = st.builds(
    BatchControl,
    max_num_seqs=st.none() | st.integers(1, 70),
    force_evict=st.none() | st.integers(0, 10),
    target_temp_c=st.none() | st.floats(60.0, 95.0),
    policy=st.sampled_from(list(VICTIM_ORDERS)),
)


@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_a_dry_run_answers_what_the_order_does(data: st.DataObject) -> None:
    policies = (None, NoThermalPolicy(), ProportionalThermalPolicy(target_temp_c=80.0, dwell_s=0.3))
    bench = Bench.of(
        data.draw(st.sampled_from(policies)),
        senses=data.draw(st.booleans()),
        num_blocks=data.draw(st.sampled_from([48, 80, 200])),
        policy=data.draw(st.sampled_from(["fcfs", "priority"])),
        force_evict_hold_s=data.draw(st.sampled_from([0.0, 0.3, 5.0])),
    )
    names = itertools.count()
    for _ in range(data.draw(st.integers(1, 6))):
        for _ in range(data.draw(st.integers(0, 4))):
            n = data.draw(st.integers(1, 3))
            beams = BeamSearch(width=n) if n > 1 and data.draw(st.booleans()) else None
            bench.add(
                f"r{next(names)}",
                data.draw(st.integers(1, 30)),
                n=n,
                beam_search=beams,
                priority=data.draw(st.integers(0, 2)),
                max_tokens=40,
            )
        bench.heat.hottest_c = data.draw(st.none() | st.floats(50.0, 100.0))
        bench.heat.may_raise_cap = data.draw(st.booleans())
        bench.steps(data.draw(st.integers(0, 4)))
        order = data.draw(ORDERS)
        if data.draw(st.booleans()):
            before = bench.scheduler.scheduler_config
            bench.scheduler.control(attrs.evolve(order, dry_run=True))
            bench.steps(1)
            assert bench.scheduler.scheduler_config == before
        dry = bench.scheduler.control(attrs.evolve(order, dry_run=True))
        real = bench.scheduler.control(order)
        output = bench.scheduler.schedule()
        if not real.done():
            bench.runner.finish(output)
            output = bench.scheduler.schedule()
        assert answer_of(dry) == answer_of(real)
        if isinstance(answer := answer_of(real), BatchControlResult):
            assert answer.new_running == bench.scheduler.num_running_seqs
            assert answer.new_running <= answer.new_max_num_seqs
            assert bench.scheduler.scheduler_config.max_num_seqs == answer.new_max_num_seqs
        bench.runner.finish(output)
    bench.heat.hottest_c, bench.heat.may_raise_cap = 20.0, True
    bench.scheduler.control(BatchControl(max_num_seqs=8))
    bench.runner.run()
