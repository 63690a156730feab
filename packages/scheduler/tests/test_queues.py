"""The queues: their order, and a cost that does not grow with the number of waiting groups."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import BatchControl, Request, Scheduler, SchedulerConfig, SequenceGroup
from trencadis.scheduler.group import QueueKey
from trencadis.scheduler.group_states import GroupQueue


def num_operations(scheduler: Scheduler) -> int:
    """The Python bytecode instructions of one call of ``schedule()``."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        scheduler.schedule()
    finally:
        sys.settrace(before)
    return count


def busy_scheduler(num_waiting: int, policy: str, widths: tuple[int, ...]) -> Scheduler:
    """One narrow request runs under a limit of 2; requests with ``widths`` sequences wait."""
    blocks = BlockManager(CacheConfig(num_blocks=200, block_size=4))
    config = SchedulerConfig(max_num_seqs=16, max_waiting=num_waiting + 1, policy=policy)
    scheduler = Scheduler(config, blocks)
    scheduler.add(Request(request_id="runs", prompt_token_ids=(1,), max_tokens=50))
    scheduler.control(BatchControl(max_num_seqs=2))
    for i in range(num_waiting):
        n = widths[i % len(widths)]
        scheduler.add(
            Request(request_id=f"w{i}", prompt_token_ids=(2,), max_tokens=9, n=n, priority=i % 7)
        )
    for _ in range(3):
        output = scheduler.schedule()
        scheduler.update(output, {chunk.seq_id: 5 for chunk in (*output.prompts, *output.decodes)})
    return scheduler


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_step_costs_the_same_however_many_groups_wider_than_the_limit_wait(policy: str) -> None:
    few, many = (busy_scheduler(count, policy, (3, 4, 9)) for count in (30, 1500))
    assert many.num_waiting == 1500
    assert num_operations(many) <= num_operations(few) + 100


@given(
    operations=st.lists(
        st.one_of(
            st.tuples(st.integers(0, 3), st.integers(1, 4)),  # add: priority, sequences
            st.floats(0, 1, exclude_max=True),  # remove the group at this share of the queue
        ),
        max_size=80,
    ),
    max_num_seqs=st.integers(0, 5),
    count=st.integers(1, 5),
)
def test_a_queue_returns_the_first_and_the_oldest_groups_that_fit(
    operations: list[Any], max_num_seqs: int, count: int
) -> None:
    queue, expected = GroupQueue(), []
    for arrival, operation in enumerate(operations):
        if isinstance(operation, tuple):
            priority, width = operation
            request = Request(request_id="r", prompt_token_ids=(1,), max_tokens=1, n=width)
            group = SequenceGroup(request, arrival, 4, QueueKey(priority, arrival))
            group.unfinished_seqs = [None] * width
            queue.add(group)
            expected.append(group)
        elif expected:
            queue.remove(expected.pop(int(operation * len(expected))))
        assert len(queue) == len(expected)
        fitting = [group for group in expected if group.num_seqs <= max_num_seqs]
        in_order = sorted(fitting, key=lambda group: group.queue_key)
        assert queue.first(count, max_num_seqs) == in_order[:count]
        oldest = min(fitting, key=lambda group: group.arrival, default=None)
        assert queue.oldest(max_num_seqs) is oldest
