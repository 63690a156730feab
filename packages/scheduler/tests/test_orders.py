"""Control requests: the answer is what happens, and a dry run gives the answer of the request."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
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
    ThermalGuard,
)
from trencadis.scheduler.thermal import (
    VICTIM_ORDERS,
    NoThermalPolicy,
    ProportionalThermalPolicy,
    SchedulerThermalPolicy,
)

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
        num_blocks: int = 200,
        step_s: float = 0.1,
        **fields: Any,
    ) -> Bench:
        heat, ticks = Heat(), itertools.count()
        blocks = BlockManager(
            CacheConfig(num_blocks=num_blocks, block_size=4, num_host_blocks=200, watermark=0.0)
        )
        guard = ThermalGuard(thermal, lambda: heat) if senses else None
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


@pytest.mark.parametrize("senses", [True, False])
def test_a_dry_run_gives_the_errors_of_the_order(senses: bool) -> None:
    bench = Bench.of(NoThermalPolicy(), senses=senses)
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


def test_requests_start_although_an_order_arrives_in_every_step() -> None:
    bench = Bench.of()
    for name in "abc":
        bench.add(name, max_tokens=4)
    for _ in range(20):
        bench.scheduler.control(BatchControl(max_num_seqs=8))
        bench.steps(1)
    assert bench.scheduler.num_waiting == bench.scheduler.num_running == 0


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
