"""Steps that are scheduled while another is in flight: what they decide, and what has to wait."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import pytest
from harness import STOP, Memory, Runner, alone, outcome

from trencadis.kvcache import BlockManager, CacheConfig, DefragConfig, Defragmenter
from trencadis.scheduler import (
    PENDING_TOKEN,
    BatchControl,
    BeamSearch,
    InvalidResults,
    PreemptionCosts,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    SequenceStatus,
    StepOrderError,
    ThermalGuard,
)
from trencadis.scheduler.thermal import SchedulerThermalPolicy
from trencadis.scheduler.thermal.policy import SchedulerView

MAX_LEN = 64


def make(
    *,
    num_blocks: int = 65,
    thermal: ThermalGuard | None = None,
    defrag: int | None = None,
    costs: PreemptionCosts | None = None,
    **settings: object,
) -> Runner:
    blocks = BlockManager(CacheConfig(num_blocks=num_blocks, block_size=4, watermark=0.0))
    defaults = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": MAX_LEN}
    config = SchedulerConfig(**{**defaults, "max_steps_in_flight": 2, **settings})
    defragmenter = None
    if defrag is not None:
        defragmenter = Defragmenter(blocks, DefragConfig(threshold=defrag))
    scheduler = Scheduler(config, blocks, thermal=thermal, defragmenter=defragmenter, costs=costs)
    return Runner(scheduler, Memory(4))


def request(name: str, length: int = 4, first: int = 0, **fields: object) -> Request:
    values = {"max_tokens": 8, **fields}
    return Request(request_id=name, prompt_token_ids=tuple(range(first, first + length)), **values)


def launch(runner: Runner) -> SchedulerOutput:
    output = runner.scheduler.schedule()
    runner.launch(output)
    return output


def overlapped(runner: Runner, max_steps: int = 500) -> Iterator[SchedulerOutput]:
    """Every step until all requests have ended, each launched as early as it can be."""
    for _ in range(max_steps):
        while runner.scheduler.reason_to_wait is not None:
            runner.finish_oldest()
        if not runner.scheduler.has_work:
            return
        yield launch(runner)
        if len(runner.in_flight) == 2:
            runner.finish_oldest()
    raise AssertionError(f"requests are unfinished after {max_steps} steps")


def test_a_decode_is_scheduled_before_its_token_is_known() -> None:
    runner = make()
    group = runner.add(request("a"))
    launch(runner)
    assert runner.scheduler.reason_to_wait is None
    (decode,) = launch(runner).decodes
    assert (decode.start, list(decode.token_ids)) == (4, [PENDING_TOKEN])
    (update,) = runner.finish_oldest()
    (sequence,) = group.unfinished_seqs
    assert sequence.output_token_ids == [update.token_id]
    (update,) = runner.finish_oldest()
    assert sequence.output_token_ids[1:] == [update.token_id]


def test_no_more_steps_are_in_flight_than_configured() -> None:
    runner = make()
    runner.add(request("a"))
    launch(runner)
    launch(runner)
    with pytest.raises(StepOrderError, match="max_steps_in_flight is 2"):
        runner.scheduler.schedule()
    runner = make(max_steps_in_flight=1)
    runner.add(request("a"))
    launch(runner)
    with pytest.raises(StepOrderError, match="max_steps_in_flight is 1"):
        runner.scheduler.schedule()


def test_results_come_in_the_order_of_the_steps() -> None:
    runner = make()
    runner.add(request("a"))
    first, second = launch(runner), launch(runner)
    with pytest.raises(StepOrderError, match="the first one in flight"):
        runner.scheduler.update(second, {})
    runner.finish_oldest()
    with pytest.raises(StepOrderError, match="the first one in flight"):
        runner.scheduler.update(first, {})


def test_a_sequence_that_ends_by_its_length_computes_nothing_in_vain() -> None:
    runner = make()
    runner.add(request("a", max_tokens=3))
    outputs = list(overlapped(runner))
    assert sum(len(output.decodes) for output in outputs) == 2


def test_a_stop_token_costs_one_row_and_no_token() -> None:
    """The row is computed in vain, for a sequence that has ended; others go on."""
    runner = make()
    groups = [
        runner.add(request(f"r{first}", first=first, max_tokens=40, stop_token_ids={STOP}))
        for first in range(4)
    ]
    outputs = list(overlapped(runner))
    for group in groups:
        assert outcome(group) == alone(group.request, MAX_LEN)
    num_computed = sum(len(output.decodes) for output in outputs)
    needed = sum(sequence.num_output_tokens - 1 for g in groups for sequence in g.finished_seqs)
    num_stopped = sum(outcome(group)[0][1].value == "stop" for group in groups)
    assert num_stopped
    assert num_computed == needed + num_stopped
    assert runner.scheduler._blocks.pool.num_used_blocks == 0


def test_generated_tokens_are_shared_although_their_slots_came_first() -> None:
    runner = make()
    group = runner.add(request("a", max_tokens=9))
    list(overlapped(runner))
    (sequence,) = group.finished_seqs
    longer = Request(request_id="b", prompt_token_ids=(*sequence.token_ids, 0), max_tokens=1)
    group = runner.add(longer)
    list(overlapped(runner))
    assert group.finished_seqs[0].num_cached_tokens == 12


def test_a_prompt_waits_for_the_prefix_that_a_step_in_flight_computes() -> None:
    runner = make(max_num_batched_tokens=32)
    groups = [runner.add(request(name, length=9)) for name in "ab"]
    list(overlapped(runner))
    assert [group.finished_seqs[0].num_cached_tokens for group in groups] == [0, 8]


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"beam_search": BeamSearch(width=2), "n": 2}], ids=["samples", "beams"]
)
def test_branches_wait_for_the_step_that_makes_them(fields: dict[str, object]) -> None:
    runner = make()
    group = runner.add(request("a", **fields))
    launch(runner)
    assert runner.scheduler.reason_to_wait == "it has beams, or samples that fork"
    list(overlapped(runner))
    assert outcome(group) == alone(group.request, MAX_LEN)


def test_an_order_waits_for_the_step_in_flight() -> None:
    runner = make()
    groups = [runner.add(request(name, first=i)) for i, name in enumerate("ab")]
    launch(runner)
    order = runner.scheduler.control(BatchControl(max_num_seqs=1))
    assert runner.scheduler.reason_to_wait == "an order is to be carried out"
    list(overlapped(runner))
    assert order.result(timeout=0).new_running == 1
    for group in groups:
        assert outcome(group) == alone(group.request, MAX_LEN)


class OrderingPolicy(SchedulerThermalPolicy):
    """A limit that the test sets. It gives an order in the middle of a step, as a thread may."""

    limit = 4
    scheduler: Scheduler | None = None

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        if self.scheduler is not None:
            self.scheduler.control(BatchControl(force_evict=1))
            self.scheduler = None
        return self.limit

    def select_victims(
        self, running: Sequence[SequenceGroup], num_to_evict: int
    ) -> Sequence[SequenceGroup]:
        return running[len(running) - num_to_evict :]


class Cool:
    """A `ThermalState` without heat."""

    hottest_c = 20.0
    may_raise_cap = True
    power_w = None
    temperatures_c: ClassVar[Mapping[int, float]] = {}


def test_an_order_that_comes_while_a_step_is_scheduled_ahead_is_carried_out_later() -> None:
    policy = OrderingPolicy()
    runner = make(thermal=ThermalGuard(policy, Cool))
    groups = [runner.add(request(name, first=i)) for i, name in enumerate("ab")]
    launch(runner)
    policy.scheduler = runner.scheduler
    assert not launch(runner).preempted_seq_ids
    while runner.in_flight:
        runner.finish_oldest()
    assert len(launch(runner).preempted_seq_ids) == 1
    list(overlapped(runner))
    for group in groups:
        assert outcome(group) == alone(group.request, MAX_LEN)


def test_a_lower_running_limit_waits_for_the_step_in_flight() -> None:
    policy = OrderingPolicy()
    runner = make(thermal=ThermalGuard(policy, Cool))
    groups = [runner.add(request(name, first=i)) for i, name in enumerate("abc")]
    launch(runner)
    policy.limit = 1
    output = launch(runner)
    assert (output.max_running_seqs, output.preempted_seq_ids) == (1, ())
    runner.finish_oldest()
    assert runner.scheduler.reason_to_wait == "the running limit is exceeded"
    runner.finish_oldest()
    assert len(launch(runner).preempted_seq_ids) == 2
    policy.limit = 4
    list(overlapped(runner))
    for group in groups:
        assert outcome(group) == alone(group.request, MAX_LEN)


def test_a_lower_running_limit_holds_in_the_step_after_one_that_is_ahead() -> None:
    """Also where a victim takes long to resume, so that a first step alone would preempt none."""
    policy = OrderingPolicy()
    slow = PreemptionCosts(prefill_s_per_token=100.0)
    runner = make(thermal=ThermalGuard(policy, Cool), costs=slow)
    for i, name in enumerate("abc"):
        runner.add(request(name, first=i))
    launch(runner)
    policy.limit = 1
    launch(runner)
    while runner.in_flight:
        runner.finish_oldest()
    assert len(launch(runner).preempted_seq_ids) == 2


def test_blocks_that_run_out_wait_for_the_step_in_flight() -> None:
    runner = make(num_blocks=6)
    groups = [runner.add(request(name, first=i, max_tokens=12)) for i, name in enumerate("ab")]
    preempted, reasons = False, set()
    for _ in range(100):
        while (reason := runner.scheduler.reason_to_wait) is not None:
            reasons.add(reason)
            runner.finish_oldest()
        if not runner.scheduler.has_work:
            break
        output = launch(runner)
        preempted |= bool(output.preempted_seq_ids)
    assert preempted
    assert "running requests lack blocks" in reasons
    for group in groups:
        assert outcome(group) == alone(group.request, MAX_LEN)


def test_a_request_of_higher_priority_waits_for_the_step_in_flight() -> None:
    runner = make(max_num_seqs=1, policy="priority")
    runner.add(request("later", priority=1))
    launch(runner)
    assert runner.scheduler.reason_to_wait is None
    runner.add(request("first", priority=0))
    assert runner.scheduler.reason_to_wait == "a request of higher priority waits"


def test_defragmentation_waits_for_the_step_in_flight() -> None:
    runner = make(defrag=0)
    for i, name in enumerate("ab"):
        runner.add(request(name, length=8, first=20 * i))
    launch(runner)
    assert runner.scheduler.reason_to_wait is None
    runner.scheduler.abort("a")
    assert runner.scheduler.reason_to_wait == "blocks are to be defragmented"
    runner.finish_oldest()
    assert launch(runner).moves


def test_a_step_that_computes_nothing_is_followed_by_no_other() -> None:
    """All requests end by their length with the step before it."""
    runner = make()
    runner.add(request("a", max_tokens=2))
    launch(runner)
    launch(runner)
    runner.finish_oldest()
    assert launch(runner).is_empty
    runner.finish_oldest()
    assert runner.scheduler.reason_to_wait == "it computes nothing"


def test_an_abort_takes_the_pending_token_away() -> None:
    runner = make()
    group = runner.add(request("a"))
    launch(runner)
    runner.finish_oldest()
    launch(runner)
    launch(runner)
    tokens = alone(group.request, MAX_LEN)[0][0]
    runner.scheduler.abort("a")
    assert tuple(group.unfinished_seqs[0].output_token_ids) == tokens[:1]
    for _ in range(2):
        assert runner.finish_oldest() == ()
    assert runner.scheduler._blocks.pool.num_used_blocks == 0


def test_discarded_steps_are_computed_again() -> None:
    runner = make()
    group = runner.add(request("a", length=3))
    launch(runner)
    runner.finish_oldest()
    launch(runner)
    launch(runner)
    runner.scheduler.discard_step()
    runner.in_flight.clear()
    assert group.unfinished_seqs[0].num_output_tokens == 1
    runner.check_slots()
    list(overlapped(runner))
    assert outcome(group) == alone(group.request, MAX_LEN)


def test_tokens_cannot_be_forced_after_the_next_step_was_scheduled() -> None:
    runner = make()
    group = runner.add(request("a"))
    first = launch(runner)
    launch(runner)
    (seq_id,) = (sequence.seq_id for sequence in group.unfinished_seqs)
    with pytest.raises(InvalidResults, match="next token is in flight"):
        runner.scheduler.update(first, {seq_id: 1}, forced={seq_id: [2]})
    assert runner.finish_oldest()


def test_a_sample_that_the_caller_finishes_is_scheduled_once_more_at_most() -> None:
    runner = make()
    groups = [runner.add(request(name, first=i, max_tokens=30)) for i, name in enumerate("ab")]
    launch(runner)
    launch(runner)
    runner.finish_oldest()
    assert runner.scheduler.finish(groups[0].unfinished_seqs[0].seq_id)
    assert len(launch(runner).decodes) == 1
    list(overlapped(runner))
    assert outcome(groups[1]) == alone(groups[1].request, MAX_LEN)
    assert groups[0].status is not SequenceStatus.RUNNING
