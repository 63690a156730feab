"""The prefill limit: how many prompt tokens a step computes, by setting, order and policy."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest
from harness import outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from test_orders import Bench

from trencadis.scheduler import (
    BatchControl,
    ConfigError,
    SchedulerConfig,
    SchedulerOutput,
    UnservableRequest,
)
from trencadis.scheduler.thermal import NoThermalPolicy, SchedulerView


@attrs.define(eq=False)
class Limiting(NoThermalPolicy):
    """Limits prefill as the test says; a callable is called."""

    limit: Any = None

    def get_max_prefill_tokens(self, scheduler: SchedulerView) -> Any:
        return self.limit() if callable(self.limit) else self.limit


def prefilled(output: SchedulerOutput) -> int:
    return sum(len(chunk.token_ids) for chunk in output.prompts)


def test_a_step_computes_no_more_prompt_tokens_than_the_limit() -> None:
    bench = Bench.of(max_prefill_tokens=10)
    for name in "abc":
        bench.add(name, 25, max_tokens=2)
    steps = []
    while bench.scheduler.has_work:
        output, _ = bench.runner.step()
        assert output.max_prefill_tokens == 10
        steps.append(prefilled(output))
    assert max(steps) == 10
    assert steps[:7] == [10] * 7, "the limit is used while there are prompts"


def test_a_prompt_whose_tokens_cost_more_gets_fewer_of_a_step() -> None:
    bench = Bench.of(max_num_batched_tokens=31)
    bench.add("decoding", 4)
    bench.steps(1)
    bench.add("costly", 45, prompt_token_cost=1.5)
    bench.add("plain", 30)
    # A decode takes 1 of 31 tokens; 20 tokens of the costly prompt take the others.
    chunks = [[len(chunk.token_ids) for chunk in bench.runner.step()[0].prompts] for _ in range(3)]
    assert chunks == [[20], [20], [5, 22]]


@pytest.mark.parametrize("cost", [0.5, 0, math.nan, math.inf, "2"])
def test_a_cost_that_is_none_is_rejected(cost: Any) -> None:
    with pytest.raises(UnservableRequest, match="prompt_token_cost"):
        Bench.of().add("name", prompt_token_cost=cost)


@settings(max_examples=100, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 40), st.sampled_from([1.0, 1.1, 2.5, 100.0])), min_size=1
    ),
    budget=st.integers(1, 40),
)
def test_whatever_tokens_cost_steps_keep_their_budget_and_every_prompt_finishes(
    prompts: list[tuple[int, float]], budget: int
) -> None:
    prompts = prompts[:8]
    bench = Bench.of(max_num_batched_tokens=budget, max_num_seqs=min(8, budget))
    for name, (length, cost) in enumerate(prompts):
        bench.add(str(name), length, max_tokens=3, prompt_token_cost=cost)
    costs = {
        sequence.seq_id: group.request.prompt_token_cost
        for group in bench.scheduler._states.groups.values()
        for sequence in group.unfinished_seqs
    }
    for _ in range(sum(length for length, _ in prompts) + 3 * len(prompts)):
        if not bench.scheduler.has_work:
            break
        output, _ = bench.runner.step()
        taken = [len(chunk.token_ids) * costs[chunk.seq_id] for chunk in output.prompts]
        assert output.prompts or output.decodes
        assert len(output.decodes) + sum(taken) <= budget or prefilled(output) == 1
    assert not bench.scheduler.has_work


def test_decodes_run_beside_a_prompt_that_the_limit_slows_down() -> None:
    bench = Bench.of(max_prefill_tokens=2)
    bench.add("short", 2)
    bench.steps(1)
    bench.add("long", 60)
    for _ in range(20):
        output, _ = bench.runner.step()
        assert (len(output.decodes), prefilled(output)) == (1, 2)


def test_a_limit_of_one_token_lets_every_prompt_finish() -> None:
    bench, plain = Bench.of(max_prefill_tokens=1), Bench.of()
    groups = []
    for each in (bench, plain):
        for name in "abcde":
            each.add(name, 9, max_tokens=5)
        groups.append(list(each.scheduler._states.groups.values()))
        each.runner.run()
    assert [outcome(group) for group in groups[0]] == [outcome(group) for group in groups[1]]


def test_no_prompt_starts_in_a_step_whose_prefill_is_used_up() -> None:
    bench = Bench.of(max_prefill_tokens=8)
    bench.add("first", 30)
    bench.add("second", 30)
    bench.steps(2)
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (1, 1)
    bench.steps(2)
    assert bench.scheduler.num_running == 2, "the first prompt left two tokens of the fourth step"


def test_a_swapped_sequence_resumes_although_the_prefill_of_the_step_is_used_up() -> None:
    bench = Bench.of(max_prefill_tokens=2)
    bench.add("decoding", 2)
    bench.steps(2)
    bench.add("long", 40)
    bench.steps(1)
    assert bench.scheduler.abort_and_swap(["decoding"]) == ("decoding",)
    bench.order(max_num_seqs=8)
    bench.steps(3)
    assert bench.scheduler.num_running == 2
    assert bench.runner.step()[0].decodes


def test_an_order_limits_prefill_and_another_ends_the_limit() -> None:
    bench = Bench.of(max_num_batched_tokens=64)
    bench.add("long", 100, max_tokens=5)
    answer = bench.order(max_prefill_tokens=4)
    assert answer.new_max_prefill_tokens == 4
    assert prefilled(bench.runner.step()[0]) == 4
    assert bench.order(max_num_seqs=8).new_max_prefill_tokens == 4, "another order keeps it"
    assert bench.order(max_prefill_tokens=64).new_max_prefill_tokens == 64
    assert bench.scheduler.scheduler_config.max_prefill_tokens is None
    assert prefilled(bench.runner.step()[0]) > 4


def test_an_order_takes_effect_in_the_step_that_carries_it_out() -> None:
    bench = Bench.of()
    bench.add("long", 100, max_tokens=5)
    bench.steps(1)
    bench.order(max_prefill_tokens=4)
    assert bench.scheduler.num_prefill_tokens == 64 + 4


def test_a_dry_run_of_the_limit_changes_nothing() -> None:
    bench = Bench.of()
    bench.add("long", 100)
    bench.scheduler.control(BatchControl(max_prefill_tokens=7, dry_run=True))
    assert prefilled(bench.runner.step()[0]) == 64
    assert bench.scheduler.scheduler_config.max_prefill_tokens is None


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "many"])
def test_a_limit_that_is_none_is_an_error(value: object) -> None:
    with pytest.raises(ConfigError, match="max_prefill_tokens must be an integer of at least 1"):
        SchedulerConfig(max_prefill_tokens=value)
    bench = Bench.of()
    with pytest.raises(ConfigError, match="max_prefill_tokens must be an integer from 1"):
        bench.order(max_prefill_tokens=value)


def test_the_lowest_limit_holds() -> None:
    policy = Limiting(limit=5)
    bench = Bench.of(policy, max_prefill_tokens=9)
    bench.add("long", 100)
    assert bench.runner.step()[0].max_prefill_tokens == 5
    policy.limit = 20
    assert bench.runner.step()[0].max_prefill_tokens == 9
    policy.limit = None
    assert bench.runner.step()[0].max_prefill_tokens == 9


def test_the_prefill_limit_of_a_policy_does_not_rise_while_a_sensor_is_stale() -> None:
    policy = Limiting(limit=20)
    bench = Bench.of(policy)
    bench.heat.may_raise_cap = False
    limits = []
    for limit in (20, 30, 10, None, 20):
        policy.limit = limit
        limits.append(bench.runner.step()[0].max_prefill_tokens)
    assert limits == [20, 20, 10, 10, 10]
    bench.heat.may_raise_cap = True
    policy.limit = None
    assert bench.runner.step()[0].max_prefill_tokens == 64


def fail() -> None:
    raise RuntimeError("broken")


@pytest.mark.parametrize("answer", [0, -7, 1.5, "few", math.nan, fail])
def test_a_prefill_limit_that_is_none_costs_no_request(answer: object) -> None:
    policy = Limiting(limit=12)
    alerts: list[str] = []
    bench = Bench.of(policy)
    assert bench.guard is not None
    bench.guard._alert = alerts.append
    bench.add("long", 40)
    bench.steps(1)
    policy.limit = answer
    for _ in range(3):
        limit = bench.runner.step()[0].max_prefill_tokens
        assert limit == (1 if isinstance(answer, int) else 12)
    assert len(alerts) == 1
    assert "get_max_prefill_tokens" in alerts[0]
    assert bench.guard.num_faults == 3
    policy.limit = None
    assert bench.runner.step()[0].max_prefill_tokens == 64
    assert bench.guard.fault == ""


def test_a_policy_that_ends_leaves_no_prefill_limit() -> None:
    policy = Limiting(limit=3)
    bench = Bench.of(policy)
    bench.steps(1)
    assert bench.guard is not None
    bench.guard.policy = None
    assert bench.guard.prefill_limit == 3
    assert bench.runner.step()[0].max_prefill_tokens == 64


def test_the_longest_wait_is_that_of_the_oldest_request_without_a_token() -> None:
    bench = Bench.of(step_s=1.0, max_prefill_tokens=4)
    assert bench.scheduler.longest_wait_s == 0.0
    bench.add("long", 20)
    for waited_s in range(1, 5):
        bench.steps(1)
        assert bench.scheduler.longest_wait_s == pytest.approx(waited_s)
    bench.steps(1)
    assert bench.scheduler.longest_wait_s == 0.0, "the fifth step gave it its token"
    bench.add("next", 20)
    bench.steps(1)
    assert bench.scheduler.longest_wait_s == pytest.approx(1.0)


@pytest.mark.parametrize("hold_s", [None, 0.0, 1.0, 20.0])
def test_an_eviction_holds_for_as_long_as_the_order_says(hold_s: float | None) -> None:
    bench = Bench.of(step_s=0.1, force_evict_hold_s=5.0)
    for name in "abcd":
        bench.add(name)
    bench.steps(2)
    assert bench.order(force_evict=4, hold_s=hold_s).new_running == 0
    expected_s = 5.0 if hold_s is None else hold_s
    steps = 0
    while not bench.scheduler.num_running:
        bench.steps(1)
        steps += 1
    assert steps == pytest.approx(expected_s / 0.1, abs=3)


@settings(max_examples=100, deadline=None)
@given(
    limits=st.lists(st.none() | st.integers(1, 30), min_size=1, max_size=10),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
)
def test_whatever_the_limits_each_step_with_work_computes_a_token(
    limits: list[int | None], lengths: list[int]
) -> None:
    policy = Limiting()
    bench = Bench.of(policy)
    for name, length in enumerate(lengths):
        bench.add(str(name), length, max_tokens=3)
    total = sum(lengths) + 3 * len(lengths)
    for step in range(total):
        if not bench.scheduler.has_work:
            break
        policy.limit = limits[step % len(limits)]
        output, _ = bench.runner.step()
        assert output.prompts or output.decodes
        assert prefilled(output) <= output.max_prefill_tokens
    assert not bench.scheduler.has_work
