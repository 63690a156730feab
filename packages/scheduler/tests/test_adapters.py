"""Adapters as a resource: at most ``max_adapters`` at once, no request blocks others or starves."""

from __future__ import annotations

import random

import pytest
from harness import Memory, Runner, alone, outcome

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import (
    ConfigError,
    PreemptionCosts,
    Request,
    Scheduler,
    SchedulerConfig,
    SequenceGroup,
    SequenceStatus,
    UnservableRequest,
)

WAITING, RUNNING = SequenceStatus.WAITING, SequenceStatus.RUNNING


def make(num_blocks: int = 200, **fields: object) -> Runner:
    blocks = BlockManager(
        CacheConfig(num_blocks=num_blocks, block_size=4, num_host_blocks=100, watermark=0.0)
    )
    values = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 128,
        "max_adapters": 1,
        "max_bypasses": 3,
        "lookahead": 2,
        "force_evict_hold_s": 0.0,
        **fields,
    }
    ticks = iter(range(10**6))
    scheduler = Scheduler(
        SchedulerConfig(**values),
        blocks,
        costs=PreemptionCosts(prefill_s_per_token=1.0),
        clock=lambda: next(ticks) * 0.02,
    )
    return Runner(scheduler, Memory(4))


def add(runner: Runner, name: str, adapter: str, max_tokens: int = 8, length: int = 3):
    prompt = tuple(hash((name, i)) % 1000 for i in range(length))
    request = Request(
        request_id=name, prompt_token_ids=prompt, max_tokens=max_tokens, adapter=adapter
    )
    return runner.add(request)


def statuses(*groups: SequenceGroup) -> list[SequenceStatus]:
    return [group.status for group in groups]


def test_requests_of_one_adapter_share_its_place() -> None:
    runner = make()
    groups = [add(runner, f"a{i}", "A") for i in range(3)]
    output, _ = runner.step()
    assert statuses(*groups) == [RUNNING] * 3
    assert {chunk.adapter for chunk in output.prompts} == {"A"}
    assert runner.scheduler.adapters == {"A": 3}


def test_a_request_waits_for_its_adapter_and_others_pass_it() -> None:
    runner = make()
    add(runner, "a", "A")
    blocked = [add(runner, f"b{i}", "B") for i in range(5)]  # more than the lookahead
    base, other = add(runner, "base", ""), add(runner, "a2", "A")
    runner.step()
    assert statuses(*blocked) == [WAITING] * 5
    assert statuses(base, other) == [RUNNING] * 2


def test_later_requests_pass_a_waiting_one_a_bounded_number_of_times() -> None:
    runner = make()
    add(runner, "a", "A", max_tokens=10)
    waits = add(runner, "b", "B")
    later = []
    for step in range(200):
        later.append(add(runner, f"a{step}", "A", max_tokens=10))
        runner.step()
        if waits.status is not WAITING:
            break
    started = [group for group in later if group.status is not WAITING or group.finish_reason]
    assert waits.status is RUNNING
    assert len(started) <= 3, "max_bypasses"


def test_an_overdue_request_does_not_stop_those_without_adapters() -> None:
    runner = make(max_bypasses=0)
    add(runner, "a", "A", max_tokens=20)
    runner.step()
    waits, same, base = add(runner, "b", "B"), add(runner, "a2", "A"), add(runner, "base", "")
    runner.step()
    assert statuses(waits, same, base) == [WAITING, WAITING, RUNNING]


def test_a_preempted_request_resumes_where_an_overdue_one_waits_for_its_adapter() -> None:
    runner = make()
    first = add(runner, "a", "A", max_tokens=12)
    runner.step()
    waits = add(runner, "b", "B")
    for number in range(3):
        add(runner, f"base {number}", "", max_tokens=2)
        runner.step()
    assert waits.num_bypasses == 3, "it is overdue"
    assert runner.scheduler.abort_and_swap(["a"]) == ("a",)
    runner.step()
    assert runner.scheduler.num_preemptions == 1
    assert runner.scheduler.adapters == {"A": 1}
    runner.run(100)
    assert outcome(first) == alone(first.request, 128)
    assert outcome(waits) == alone(waits.request, 128)
    assert not runner.scheduler.adapters


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_an_aborted_request_leaves_no_adapter(num_steps: int) -> None:
    runner = make()
    add(runner, "a", "A")
    for _ in range(num_steps):
        runner.step()
    runner.scheduler.abort_and_swap(["a"])
    runner.step()
    runner.scheduler.abort("a")
    assert not runner.scheduler.adapters
    other = add(runner, "b", "B")
    runner.step()
    runner.step()
    assert other.status is RUNNING or other.finish_reason is not None


def test_everyone_is_served_under_a_flood_of_adapters() -> None:
    draw = random.Random(5)
    runner = make(max_adapters=4, max_bypasses=16, lookahead=8, num_blocks=60)
    groups = []
    for number in range(300):
        adapter = draw.choice(["", *(f"adapter {i}" for i in range(24))])
        length = draw.randint(1, 9)
        groups.append(add(runner, f"r{number}", adapter, draw.randint(1, 9), length))
    for _ in range(3000):
        if not runner.scheduler.has_work:
            break
        output, _ = runner.step()
        used = {each.adapter for each in (*output.prompts, *output.decodes) if each.adapter}
        assert len(used) <= 4
    for group in groups:
        assert outcome(group) == alone(group.request, 128)
    assert not runner.scheduler.adapters


def test_wrong_values() -> None:
    with pytest.raises(ConfigError, match="max_adapters"):
        make(max_adapters=0)
    with pytest.raises(UnservableRequest, match="adapter"):
        Request(request_id="r", prompt_token_ids=(1,), max_tokens=1, adapter=3)
