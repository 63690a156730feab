"""`BatchLimiter`: the limits, orders and victims of a scheduler that is not ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import (
    BatchControl,
    BatchLimiter,
    ConfigError,
    ControlError,
    HostError,
    Request,
    Scheduler,
    SchedulerConfig,
    SequenceGroup,
    StepOrderError,
    ThermalGuard,
    Victim,
)
from trencadis.scheduler.thermal import VICTIM_ORDERS, NoThermalPolicy, ProportionalThermalPolicy

NUM_SLOTS, NUM_TOKENS = 16, 256


@attrs.define  # without a hash: hosts have such requests
class Served:
    request_id: str
    arrival: int
    num_seqs: int = 1
    priority: int = 0
    started_at_s: float = 0.0
    last_scheduled_step: int = 0
    num_tokens_left: int = 8
    num_kv_blocks: int = 1

    def get_num_kv_blocks(self) -> int:
        return self.num_kv_blocks


class Host:
    """Runs what waits, up to the limit, in order of arrival."""

    def __init__(self, *num_seqs: int) -> None:
        self.running: list[Served] = []
        self.waiting = [Served(f"r{i}", i, num) for i, num in enumerate(num_seqs)]

    def preempt(self, victim: Served) -> None:
        self.running.remove(victim)
        self.waiting.insert(0, victim)

    @property
    def num_running_seqs(self) -> int:
        return sum(served.num_seqs for served in self.running)

    def step(self, limiter: BatchLimiter[Served]) -> int:
        limit = limiter.begin_step().max_num_seqs
        assert self.num_running_seqs <= max(limit, self.running[0].num_seqs if self.running else 0)
        while self.waiting and self.num_running_seqs + self.waiting[0].num_seqs <= limit:
            self.running.append(self.waiting.pop(0))
        return limit


@attrs.define
class State:
    hottest_c: float | None = 20.0
    temperatures_c: dict[int, float] = attrs.field(factory=dict)
    may_raise_cap: bool = True
    power_w: float | None = None


def limited(host: Host, **options: Any) -> BatchLimiter[Served]:
    ticks = itertools.count()
    return BatchLimiter(
        host,
        max_num_seqs=NUM_SLOTS,
        max_num_batched_tokens=NUM_TOKENS,
        clock=lambda: float(next(ticks)),
        **options,
    )


def test_our_own_groups_are_victims() -> None:
    blocks = BlockManager(CacheConfig(num_blocks=16, block_size=4))
    scheduler = Scheduler(SchedulerConfig(), blocks)
    group: Victim = scheduler.add(
        Request(request_id="a", prompt_token_ids=(1, 2), max_tokens=5, n=2)
    ).group
    assert isinstance(group, SequenceGroup)
    assert (group.num_tokens_left, group.get_num_kv_blocks()) == (10, 0)


def test_an_order_may_give_a_host_all_the_sequences_that_it_can_run() -> None:
    host = Host(*[1] * 20)
    limiter = limited(host)
    host.step(limiter)
    answers = [limiter.control(BatchControl(max_num_seqs=NUM_SLOTS + more)) for more in (0, 1)]
    host.step(limiter)
    host.step(limiter)
    assert answers[0].result(timeout=60).new_max_num_seqs == NUM_SLOTS
    with pytest.raises(ControlError, match=f"is above the {NUM_SLOTS} sequences that the host can"):
        answers[1].result(timeout=60)
    assert not limiter.has_orders


def test_what_a_step_tells_is_at_least_0() -> None:
    limiter = limited(Host())
    assert limiter.begin_step(num_prefill_tokens=0, longest_wait_s=0).max_num_seqs == NUM_SLOTS
    for name in ("num_prefill_tokens", "longest_wait_s"):
        with pytest.raises(ConfigError, match=f"{name} must be .* of at least 0, got -1"):
            limiter.begin_step(**{name: -1})


def test_an_order_lowers_the_batch_at_once_and_starts_nothing_in_its_step() -> None:
    host = Host(*[1] * 20)
    limiter = limited(host)
    assert host.step(limiter) == NUM_SLOTS
    answer = limiter.control(BatchControl(max_num_seqs=4, policy="lowest_priority"))
    assert limiter.has_orders
    assert host.step(limiter) == 4
    result = answer.result(timeout=60)
    assert (result.previous_running, result.new_running) == (16, 4)
    assert result.evicted_request_ids == tuple(f"r{i}" for i in range(15, 3, -1))
    assert [served.request_id for served in host.running] == ["r0", "r1", "r2", "r3"]
    evicted = limiter.control(BatchControl(force_evict=3, hold_s=5.0))
    assert host.step(limiter) == 4, "the last step carried out an order"
    assert host.step(limiter) == 1
    assert evicted.result(timeout=60).new_running == 1
    assert [host.step(limiter) for _ in range(6)] == [1, 1, 1, 1, 4, 4]
    assert limiter.abort_and_swap(["r0", "unknown"]) == ("r0",)
    assert host.step(limiter) == 3
    assert "r0" not in {served.request_id for served in host.running}


def test_an_order_that_preempts_nothing_starts_nothing_in_its_step_either() -> None:
    host = Host(1, 1)
    limiter = limited(host)
    host.step(limiter)
    host.waiting = [Served("late", 2)]
    limiter.control(BatchControl(max_num_seqs=8))
    assert (host.step(limiter), len(host.running)) == (2, 2)
    assert (host.step(limiter), len(host.running)) == (8, 3)


def test_an_order_above_the_slots_of_the_host_is_refused() -> None:
    limiter = limited(Host(1))
    answer = limiter.control(BatchControl(max_num_seqs=99))
    assert limiter.begin_step().max_num_seqs == NUM_SLOTS
    with pytest.raises(ControlError, match="max_num_seqs 99 is above the 16 sequences") as caught:
        answer.result(timeout=60)
    assert caught.value.field == "max_num_seqs"


def test_a_limit_of_prefill_tokens_is_that_of_the_order_or_of_the_policy() -> None:
    class Prefill(NoThermalPolicy):
        def get_max_prefill_tokens(self, scheduler: Any) -> int:
            return 64 if scheduler.num_prefill_tokens == 100 and scheduler.longest_wait_s else 512

    limiter = limited(Host(1), thermal=ThermalGuard(Prefill(), State))
    assert limiter.begin_step().max_prefill_tokens == NUM_TOKENS
    limits = limiter.begin_step(num_prefill_tokens=100, longest_wait_s=2.0)
    assert limits.max_prefill_tokens == 64
    limiter.control(BatchControl(max_prefill_tokens=32))
    assert limiter.begin_step(longest_wait_s=2.0).max_prefill_tokens == 32


@given(
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=24),
    heat=st.lists(
        st.one_of(st.floats(20.0, 110.0), st.just(float("nan"))), min_size=1, max_size=30
    ),
    order=st.sampled_from(sorted(VICTIM_ORDERS)),
)
def test_under_any_heat_the_batch_is_within_the_limit_in_each_step(
    widths: list[int], heat: list[float], order: str
) -> None:
    state = State()
    policy = ProportionalThermalPolicy(target_temp_c=60.0, victims=order)
    host = Host(*widths)
    limiter = limited(host, thermal=ThermalGuard(policy, lambda: state))
    for state.hottest_c in heat:
        limit = host.step(limiter)
        assert 1 <= limit <= NUM_SLOTS
        assert {served.arrival for served in host.running + host.waiting} == set(range(len(widths)))


def test_a_lower_limit_of_the_policy_preempts_no_more_than_the_excess() -> None:
    state, host = State(), Host(*[1] * 20)
    policy = ProportionalThermalPolicy(target_temp_c=70.0, k_p=1.0)
    limiter = limited(host, thermal=ThermalGuard(policy, lambda: state))
    assert host.step(limiter) == NUM_SLOTS
    state.hottest_c = 73.0
    limit = limiter.begin_step().max_num_seqs
    assert 1 < limit < NUM_SLOTS
    assert host.num_running_seqs == limit


def test_a_lower_temperature_lets_the_batch_grow_again() -> None:
    state, host = State(hottest_c=90.0), Host(*[1] * 20)
    policy = ProportionalThermalPolicy(target_temp_c=70.0, dwell_s=1.0)
    limiter = limited(host, thermal=ThermalGuard(policy, lambda: state))
    assert host.step(limiter) == 1
    state.hottest_c = 30.0
    limits = [host.step(limiter) for _ in range(60)]
    assert limits == sorted(limits)
    assert limits[-1] == NUM_SLOTS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": None}, "host None has no running requests"),
        ({"host": Host}, "host <class"),
        ({"max_num_seqs": 0}, "max_num_seqs must be an integer of at least 1"),
        ({"max_num_batched_tokens": 2}, "max_num_batched_tokens 2 is below max_num_seqs"),
        ({"thermal": NoThermalPolicy()}, "thermal must be of type ThermalGuard"),
        ({"clock": None}, "clock must be a function"),
    ],
)
def test_a_wrong_argument_is_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"max_num_seqs": 4, "max_num_batched_tokens": 8, **options}
    host = arguments.pop("host", Host())
    with pytest.raises(ConfigError, match=message):
        BatchLimiter(host, **arguments)


@pytest.mark.parametrize("wrong", [-1, None, "1", float("nan")])
@pytest.mark.parametrize("name", ["num_prefill_tokens", "longest_wait_s"])
def test_what_a_host_tells_of_a_step_is_checked(name: str, wrong: Any) -> None:
    limiter = limited(Host(1))
    with pytest.raises(ConfigError, match=name):
        limiter.begin_step(**{name: wrong})
    assert limiter.begin_step().max_num_seqs == NUM_SLOTS


def test_a_host_that_goes_on_running_a_victim_is_told_so() -> None:
    host = Host(1, 1)
    host.preempt = lambda victim: None  # type: ignore[method-assign]
    limiter = limited(host)
    host.step(limiter)
    answer = limiter.control(BatchControl(force_evict=1))
    with pytest.raises(HostError, match=r"preempt\(\) of Host left request 'r0' running"):
        limiter.begin_step()
    with pytest.raises(HostError):
        answer.result(timeout=60)
    assert limiter.begin_step()


def test_a_running_request_without_the_attributes_of_a_victim_is_named() -> None:
    host = Host(1)
    host.running = [{"request_id": "a"}]  # type: ignore[list-item]
    with pytest.raises(HostError, match="of Host is of type dict, which has no request_id, num_"):
        limited(host).begin_step()


def test_a_step_does_not_begin_inside_another() -> None:
    class Eager(Host):
        def preempt(self, victim: Served) -> None:
            super().preempt(victim)
            self.nested()

        nested: Callable[[], object]

    host = Eager(1, 1)
    limiter = limited(host)
    host.nested = limiter.begin_step
    host.step(limiter)
    answer = limiter.control(BatchControl(force_evict=1))
    with pytest.raises(StepOrderError, match=r"begin_step\(\) was called from a policy or from"):
        limiter.begin_step()
    with pytest.raises(StepOrderError):
        answer.result(timeout=60)
    assert limiter.begin_step()
