"""Swap, recomputation, running limit, control requests and groups: a test per rule."""

from __future__ import annotations

import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
from harness import STOP, Memory, Runner, alone, outcome

from trencadis.kvcache import (
    BandwidthGovernor,
    BlockCopy,
    BlockManager,
    CacheConfig,
    CopyPlan,
    DefragConfig,
    Defragmenter,
    Direction,
)
from trencadis.scheduler import (
    BatchControl,
    BeamSearch,
    ConfigError,
    ControlError,
    FinishReason,
    IllegalTransition,
    PreemptionCosts,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceStatus,
    StepTiming,
    ThermalGuard,
    UnservableRequest,
)
from trencadis.scheduler.preemption_costs import CompletionRate
from trencadis.scheduler.thermal import (
    ProportionalThermalPolicy,
    SchedulerThermalPolicy,
    SchedulerView,
)

W, R, S, P, F = (
    SequenceStatus.WAITING,
    SequenceStatus.RUNNING,
    SequenceStatus.SWAPPED,
    SequenceStatus.PREEMPTED,
    SequenceStatus.FINISHED,
)


@attrs.define
class State:
    hottest_c: float | None = 20.0
    may_raise_cap: bool = True
    power_w: float | None = None
    temperatures_c: Mapping[int, float] = attrs.field(factory=dict)


@attrs.define
class Bench:
    """A scheduler with a clock, a temperature and a KV cache that the test controls."""

    blocks: BlockManager
    scheduler: Scheduler
    runner: Runner
    state: State
    clock: list[float]

    def add(self, name: str, length: int = 4, **fields: object) -> object:
        values = {"max_tokens": 12, "prompt_token_ids": tuple(range(length)), **fields}
        return self.runner.add(Request(request_id=name, **values))

    def step(self, seconds: float = 0.1) -> SchedulerOutput:
        self.clock[0] += seconds
        return self.runner.step()[0]


def make(
    *,
    num_blocks: int = 65,
    num_host_blocks: int = 64,
    governor: BandwidthGovernor | None = None,
    policy: object = None,
    costs: PreemptionCosts | None = None,
    defrag: int | None = None,
    prefixes: bool = False,
    **settings: object,
) -> Bench:
    clock, state = [0.0], State()
    blocks = BlockManager(
        CacheConfig(
            num_blocks=num_blocks,
            block_size=4,
            watermark=0.0,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=prefixes,
        ),
        governor=governor,
    )
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 64}
    scheduler = Scheduler(
        SchedulerConfig(**{**defaults, **settings}),
        blocks,
        thermal=ThermalGuard(policy, lambda: state) if policy else None,
        defragmenter=None
        if defrag is None
        else Defragmenter(blocks, DefragConfig(threshold=defrag)),
        costs=costs or PreemptionCosts(prefill_s_per_token=1.0),
        clock=lambda: clock[0],
    )
    return Bench(blocks, scheduler, Runner(scheduler, Memory(4)), state, clock)


def num_copies(output: SchedulerOutput, wanted: Direction) -> int:
    return sum(len(copies) for direction, copies in output.moves if direction is wanted)


@pytest.mark.parametrize("old", list(SequenceStatus))
@pytest.mark.parametrize("new", list(SequenceStatus))
def test_only_the_transitions_of_the_state_diagram_are_legal(
    old: SequenceStatus, new: SequenceStatus
) -> None:
    group = make().add("a")
    group.status = old
    if (old, new) in {(W, R), (R, F), (R, S), (S, R), (S, W), (R, P), (P, R), (P, W)}:
        group.transition_to(new)
        assert group.status is new
    else:
        with pytest.raises(IllegalTransition, match=f"'a' is {old.value}.*{new.value}"):
            group.transition_to(new)


def test_a_group_swapped_out_in_its_prefill_continues_at_the_same_token() -> None:
    bench = make(max_num_batched_tokens=8)
    group = bench.add("a", 20)
    bench.step()
    assert bench.scheduler.abort_and_swap(["a", "unknown"]) == ("a",)
    assert group.status is R
    out = bench.step()
    assert (num_copies(out, Direction.OUT), out.is_empty, group.status) == (2, True, S)
    back = bench.step(seconds=6.0)
    assert num_copies(back, Direction.IN) == 2
    assert (back.prompts[0].start, len(back.prompts[0].token_ids)) == (8, 8)
    bench.runner.run()
    assert outcome(group) == alone(group.request, 64)


@pytest.mark.parametrize(("num_host_blocks", "status"), [(64, S), (0, P)])
def test_abort_of_a_preempted_group_frees_its_blocks(
    num_host_blocks: int, status: SequenceStatus
) -> None:
    bench = make(num_host_blocks=num_host_blocks)
    group = bench.add("a")
    bench.step()
    bench.scheduler.abort_and_swap(["a"])
    bench.step()
    assert group.status is status
    assert bench.scheduler.abort("a")
    assert group.status is W
    assert not bench.scheduler.has_work
    assert bench.scheduler.num_swapped == bench.scheduler.num_preempted == 0
    assert bench.blocks.host_pool.num_free_blocks == num_host_blocks
    assert bench.blocks.pool.num_free_blocks == bench.blocks.pool.num_usable_blocks


@pytest.mark.parametrize(("token_s", "recomputes"), [(1e-9, 1), (1.0, 0)])
def test_preemption_uses_the_cheaper_of_swap_and_recomputation(
    token_s: float, recomputes: int
) -> None:
    bench = make(costs=PreemptionCosts(prefill_s_per_token=token_s))
    group = bench.add("a", 16)
    bench.step()
    bench.scheduler.abort_and_swap(["a"])
    bench.step()
    assert (bench.scheduler.num_preemptions, bench.scheduler.num_recomputes) == (1, recomputes)
    assert group.status is (P if recomputes else S)
    assert (bench.scheduler.num_preempted, bench.scheduler.num_swapped) == (
        recomputes,
        1 - recomputes,
    )


@pytest.mark.parametrize(("blocks_per_state", "recomputes"), [(0.0, 0), (1e6, 1)])
def test_a_large_state_is_recomputed_and_not_swapped(
    blocks_per_state: float, recomputes: int
) -> None:
    costs = PreemptionCosts(prefill_s_per_token=1e-3, blocks_per_state=blocks_per_state)
    bench = make(costs=costs)
    bench.add("a", 16)
    bench.step()
    bench.scheduler.abort_and_swap(["a"])
    bench.step()
    assert (bench.scheduler.num_preemptions, bench.scheduler.num_recomputes) == (1, recomputes)


def test_the_copies_of_states_count_as_blocks() -> None:
    bench = make(costs=PreemptionCosts(blocks_per_state=3.0))
    costs, output = bench.scheduler.costs, bench.scheduler.schedule()
    moves, states = CopyPlan(), CopyPlan()
    moves.add(Direction.OUT, (BlockCopy(1, 1),))
    states.add(Direction.OUT, (BlockCopy(1, 1), BlockCopy(2, 2)))
    moved = attrs.evolve(output, moves=moves, state_moves=states)
    for _ in range(80):
        costs.update(moved, StepTiming(swap_out_s=0.7))
    assert costs.swap_out_s_per_block == pytest.approx(0.1)


def test_preemption_costs_follow_the_measured_step_times() -> None:
    bench = make()
    costs = bench.scheduler.costs
    bench.add("a", 16)
    for _ in range(80):
        output = bench.scheduler.schedule()
        timing = StepTiming(prompts_s=0.016, swap_out_s=float("nan"))
        sampled = {scheduled.seq_id: 1 for scheduled in (*output.prompts, *output.decodes)}
        bench.scheduler.update(output, sampled, timing=timing)
        bench.scheduler.abort("a")
        bench.add("a", 16)
    assert costs.prefill_s_per_token == pytest.approx(0.001, rel=0.01)
    assert costs.swap_out_s_per_block == 40e-6


def test_the_bandwidth_limit_spreads_a_swap_over_several_steps() -> None:
    governor = BandwidthGovernor(1, 25.0, 0.1)  # two blocks every tenth of a second
    bench = make(governor=governor, num_blocks=33)
    group = bench.add("a", 28)
    bench.step()
    bench.scheduler.abort_and_swap(["a"])
    out = [num_copies(bench.step(), Direction.OUT) for _ in range(5)]
    assert out == [2, 2, 2, 1, 0]
    bench.clock[0] += 6.0
    back = [bench.step() for _ in range(5)]
    assert [num_copies(output, Direction.IN) for output in back[:4]] == [2, 2, 2, 1]
    assert [output.is_empty for output in back[:4]] == [True, True, True, False]
    bench.runner.run()
    assert outcome(group) == alone(group.request, 64)


def test_a_group_that_is_being_swapped_in_does_not_run_above_a_lower_limit() -> None:
    """The limit fell when its blocks were on their way: it holds in the step in which they are."""
    governor = BandwidthGovernor(1, 25.0, 0.1)  # two blocks every tenth of a second
    # A preemption costs more than to wait for the end of a sequence, so it comes in a second step.
    costs = PreemptionCosts(
        prefill_s_per_token=1e3, swap_out_s_per_block=50.0, swap_in_s_per_block=50.0
    )
    bench = make(governor=governor, num_blocks=33, costs=costs, force_evict_hold_s=1.0)
    groups = [bench.add("a", 28, max_tokens=30), bench.add("b", 4, max_tokens=30)]
    bench.step()
    bench.scheduler.abort_and_swap(["a"])
    for _ in range(5):
        bench.step()
    bench.step(1.0)  # the hold of the eviction ends
    assert (groups[0].status, bench.scheduler.num_running_seqs) == (S, 1)
    bench.scheduler.control(BatchControl(max_num_seqs=1))
    running = [bench.step() and bench.scheduler.num_running_seqs for _ in range(20)]
    assert set(running) <= {0, 1}
    bench.scheduler.control(BatchControl(max_num_seqs=8))
    while bench.scheduler.has_work:
        bench.step()
    for group in groups:
        assert outcome(group) == alone(group.request, 64)


def test_a_group_waits_for_a_swap_out_in_progress_instead_of_a_second_preemption() -> None:
    governor = BandwidthGovernor(1, 10.0, 0.1)  # one block every tenth of a second
    bench = make(governor=governor, num_blocks=13)
    for name in "abc":
        bench.add(name, 15, max_tokens=6)
    for _ in range(4):
        bench.step()
    assert bench.scheduler.num_preemptions == 1
    while bench.scheduler.has_work:
        bench.step()
    assert bench.scheduler.num_preemptions == 1


def test_the_running_limit_holds_within_two_steps_of_a_temperature_reading() -> None:
    bench = make(policy=ProportionalThermalPolicy(target_temp_c=80.0, k_p=1.0))
    for name in "abcdef":
        bench.add(name, max_tokens=40)
    bench.step()
    bench.state.hottest_c = 85.0
    bench.step()
    bench.step()
    assert bench.scheduler.num_running_seqs == 3
    assert bench.scheduler.num_swapped == 3


def test_the_first_step_above_the_limit_preempts_only_where_waiting_is_longer() -> None:
    slow = PreemptionCosts(swap_out_s_per_block=10.0, swap_in_s_per_block=10.0)
    for costs, seconds, expected in ((slow, 0.1, (0, 2)), (None, 9.0, (2, 0))):
        policy = ProportionalThermalPolicy(target_temp_c=80.0, k_p=1.0)
        bench = make(policy=policy, costs=costs, num_host_blocks=0 if costs else 64)
        slow.prefill_s_per_token = 100.0
        for name in "abcdefgh":
            bench.add(name, max_tokens=40)
        bench.step()
        bench.state.hottest_c = 82.0
        evicted = [len(bench.step(seconds=seconds).preempted_seq_ids) for _ in range(2)]
        assert tuple(evicted) == expected


def test_a_group_resumes_only_where_there_are_blocks_for_the_slots_that_it_lacks() -> None:
    """One block of its content, the next one, and a spare one for each of the two sequences."""
    resumed = []
    for num_blocks in (5, 6):
        bench = make(num_blocks=num_blocks + 1)
        group = bench.add("a", 4, max_tokens=8)
        bench.add("b", 5, max_tokens=12)
        bench.step()
        bench.scheduler.abort_and_swap(["a"])
        bench.step()
        bench.step(seconds=6.0)
        resumed.append(group.status is R)
    assert resumed == [False, True], "b has two blocks"


def test_a_group_without_blocks_waits_for_one_that_is_swapped_in() -> None:
    """That one can be preempted once it runs; the running group would only be swapped, too."""
    governor = BandwidthGovernor(1, 2.5, 0.4)
    bench = make(num_blocks=12, governor=governor, force_evict_hold_s=0.3)
    swapped = bench.add("a", 12, max_tokens=4)
    bench.step()
    running = bench.add("b", 4, max_tokens=28)
    bench.step()
    bench.scheduler.abort_and_swap(["a"])
    bench.step()
    num_without_block = 0
    while swapped.status is S:
        output = bench.step()
        assert not output.preempted_seq_ids or swapped.status is R
        num_without_block += swapped.status is S and output.is_empty and running.status is R
    assert num_without_block > 3


class OwnPolicy(SchedulerThermalPolicy):
    """A policy of another package: the three methods that it has to have."""

    def __init__(self) -> None:
        self.readings: list[tuple[int, float]] = []
        self.cap = 100

    def on_temp_reading(self, gpu_idx: int, temp_c: float) -> None:
        self.readings.append((gpu_idx, temp_c))

    def get_max_running_seqs(self, scheduler: SchedulerView) -> int:
        return self.cap

    def select_victims(self, running: list, num_to_evict: int) -> list:
        return running[-num_to_evict:]


def test_a_policy_of_ones_own_is_asked_and_raises_no_limit() -> None:
    bench = make(policy=(policy := OwnPolicy()), max_num_seqs=3)
    for name in "abcd":
        bench.add(name, max_tokens=40)
    bench.step()
    bench.step()
    assert bench.scheduler.num_running_seqs == 3, "a cap of 100 is no more than max_num_seqs"
    assert policy.readings[-1] == (0, 20.0)
    policy.cap = 1
    bench.step()
    bench.step()
    assert [group.request_id for group in bench.scheduler._states.running] == ["a"]


def test_a_policy_below_its_target_changes_no_step() -> None:
    def steps(policy: object) -> list[object]:
        bench = make(policy=policy, max_num_seqs=3, max_num_batched_tokens=12)
        bench.state.hottest_c = 79.0
        outputs = []
        for number in range(40):
            if number < 8:
                bench.add(f"r{number}", 3 + 5 * number % 17, max_tokens=6)
            output = bench.step()
            chunks = (*output.prompts, *output.decodes)
            scheduled = [(chunk.seq_id, chunk.start, chunk.token_ids) for chunk in chunks]
            outputs.append((scheduled, output.preempted_seq_ids))
        return outputs

    assert steps(ProportionalThermalPolicy(target_temp_c=80.0)) == steps(None)


def test_a_lower_max_num_seqs_preempts_running_sequences() -> None:
    bench = make()
    for name in "abcde":
        bench.add(name)
    bench.step()
    answer = bench.scheduler.control(BatchControl(max_num_seqs=2, policy="largest_kv"))
    bench.step()
    result = answer.result(timeout=0)
    assert (result.previous_running, result.new_running, result.new_max_num_seqs) == (5, 2, 2)
    assert len(result.evicted_request_ids) == 3
    assert result.estimated_watts_saved == pytest.approx(3 * 3.2)
    assert bench.scheduler.num_running_seqs == bench.scheduler.scheduler_config.max_num_seqs == 2


def test_a_forced_eviction_holds_the_batch_size() -> None:
    bench = make(force_evict_hold_s=5.0, max_model_len=128, num_blocks=129)
    for name in "abcd":
        bench.add(name, max_tokens=100)
    bench.step()
    bench.scheduler.control(BatchControl(force_evict=3))
    running = []
    for _ in range(60):
        bench.step()
        running.append(bench.scheduler.num_running_seqs)
    assert running[:50] == [1] * 50
    assert running[-1] == 4


def test_a_dry_run_answers_and_changes_nothing() -> None:
    bench = make()
    for name in "abc":
        bench.add(name)
    bench.step()
    control = BatchControl(force_evict=2, max_num_seqs=1, dry_run=True)
    answer = bench.scheduler.control(control)
    bench.step()
    assert len(answer.result(timeout=0).evicted_request_ids) == 2
    assert bench.scheduler.num_running_seqs == 3
    assert bench.scheduler.scheduler_config.max_num_seqs == 8


def test_a_control_request_that_cannot_be_applied_fails_with_the_reason() -> None:
    bench = make()
    no_sensor = bench.scheduler.control(BatchControl(target_temp_c=80.0, max_num_seqs=1))
    too_many = bench.scheduler.control(BatchControl(max_num_seqs=33))
    bench.step()
    with pytest.raises(ControlError, match="needs temperatures and none are read") as temperature:
        no_sensor.result(timeout=0)
    above = "max_num_seqs 33 is above max_num_batched_tokens 32"
    with pytest.raises(ControlError, match=above) as limit:
        too_many.result(timeout=0)
    assert (temperature.value.field, limit.value.field) == ("target_temp_c", "max_num_seqs")
    assert bench.scheduler.scheduler_config.max_num_seqs == 8, (
        "a request that fails changes nothing"
    )


def test_target_temperature_reaches_the_policy() -> None:
    bench = make(policy=ProportionalThermalPolicy(target_temp_c=90.0, k_p=1.0))
    for name in "abcdefgh":
        bench.add(name, max_tokens=40)
    bench.state.hottest_c = 85.0
    bench.step()
    assert bench.scheduler.num_running_seqs == 8
    bench.scheduler.control(BatchControl(target_temp_c=82.0))
    bench.step()
    bench.step()
    assert bench.scheduler.num_running_seqs == 5


@pytest.mark.parametrize(
    "fields",
    [{"max_num_seqs": 0}, {"force_evict": -1}, {"target_temp_c": 95.5}, {"policy": "loudest"}],
)
def test_an_invalid_control_request_is_refused_when_it_is_constructed(
    fields: dict[str, object],
) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        BatchControl(**fields)


def test_control_requests_come_from_any_thread() -> None:
    bench = make()
    with ThreadPoolExecutor(4) as pool:
        answers = [
            pool.submit(bench.scheduler.control, BatchControl(force_evict=0)) for _ in range(50)
        ]
        futures = [answer.result() for answer in answers]
    futures[7].cancel()
    assert bench.scheduler.has_work
    bench.step()
    assert all(future.done() for future in futures)
    assert not bench.scheduler.has_work


def test_preempted_groups_resume_before_new_groups_start() -> None:
    bench = make(max_num_seqs=2)
    first = [bench.add(name, max_tokens=30) for name in "ab"]
    late = bench.add("c")
    bench.step()
    bench.scheduler.abort_and_swap(["a", "b"])
    bench.step()
    bench.step(seconds=6.0)
    assert [group.status for group in first] == [R, R]
    assert late.status is W


def test_a_group_that_does_not_fit_is_bypassed_at_most_max_bypasses_times() -> None:
    bench = make(num_blocks=17, max_num_seqs=4, max_bypasses=3)
    bench.add("running", 32, max_tokens=20)
    bench.step()
    large = bench.add("large", 44, max_tokens=2)
    small = [bench.add(f"s{i}", 2, max_tokens=2) for i in range(12)]
    for _ in range(8):
        bench.step()
    assert sum(group.status is F for group in small) == 3
    assert large.num_bypasses == 3
    bench.runner.run()
    assert large.status is F


def test_a_request_of_higher_priority_preempts_where_that_beats_waiting() -> None:
    bench = priority_bench()
    slow = bench.add("slow", priority=5, max_tokens=40)
    bench.step()
    high = bench.add("high", priority=0, max_tokens=3)
    bench.step()
    bench.step()
    assert (high.status, slow.status) == (R, S)
    bench.runner.run()
    assert outcome(slow) == alone(slow.request, 64)


def test_each_sequence_of_a_finished_beam_search_shortens_the_expected_wait() -> None:
    """Four finish within 8 s: a wait of 2 s, which is less than computing 4 tokens again."""
    costs = PreemptionCosts(prefill_s_per_token=1.0)
    bench = priority_bench(num_host_blocks=0, max_num_seqs=4, costs=costs)
    bench.add("beams", beam_search=BeamSearch(width=4), max_tokens=1)
    bench.step(8.0)
    slow = bench.add("slow", priority=5, n=4)
    bench.step()
    high = bench.add("high", priority=0, n=4)
    bench.step()
    assert (high.status, slow.status) == (W, R)
    bench.step(60.0)
    assert (high.status, slow.status) == (R, P)


def test_a_wait_is_expected_to_last_as_long_as_between_the_last_finished_sequences() -> None:
    """One finishes each 8 s; the steps in which none does are no interval."""
    costs = PreemptionCosts(prefill_s_per_token=0.1)
    bench = priority_bench(num_host_blocks=0, costs=costs)
    for name in "abcd":
        bench.add(name, max_tokens=1)
        bench.step(8.0)
    low = bench.add("low", priority=5, max_tokens=40)
    for _ in range(20):
        bench.step(0.01)
    high = bench.add("high", priority=0)
    bench.step()
    assert (high.status, low.status) == (R, P)


def priority_bench(num_host_blocks: int = 64, max_num_seqs: int = 1, **fields: object) -> Bench:
    clock, state = [0.0], State()
    blocks = BlockManager(CacheConfig(num_blocks=65, block_size=4, num_host_blocks=num_host_blocks))
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=32, max_model_len=64, policy="priority"
    )
    scheduler = Scheduler(config, blocks, clock=lambda: clock[0], **fields)
    return Bench(blocks, scheduler, Runner(scheduler, Memory(4)), state, clock)


@pytest.mark.parametrize("seed", range(6))
def test_every_request_finishes_under_priorities(seed: int) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(CacheConfig(num_blocks=37, block_size=4))
    clock = [0.0]
    config = SchedulerConfig(
        max_num_seqs=5,
        max_num_batched_tokens=10,
        max_model_len=24,
        policy="priority",
        lookahead=3,
        max_bypasses=3,
    )
    costs = PreemptionCosts(prefill_s_per_token=0.0)
    scheduler = Scheduler(config, blocks, costs=costs, clock=lambda: clock[0])
    runner = Runner(scheduler, Memory(4))
    for i in range(60):
        width = rng.choice([1, 1, 1, 3])
        runner.add(
            Request(
                request_id=f"r{i}",
                prompt_token_ids=[rng.randint(0, 2) for _ in range(rng.randint(1, 14))],
                max_tokens=rng.randint(1, 10),
                priority=rng.randint(0, 2),
                beam_search=BeamSearch(width=width) if width > 1 else None,
            )
        )
    for _ in range(600):
        clock[0] += 1.0
        runner.step()
    assert not scheduler.has_work


def test_samples_share_the_prompt_and_differ_after_it() -> None:
    bench = make()
    group = bench.add("a", 6, n=4, max_tokens=6)
    output = bench.step()
    assert output.prompts[0].sample_ids == tuple(
        sequence.seq_id for sequence in group.unfinished_seqs
    )
    bench.step()
    assert bench.blocks.pool.num_used_blocks == 1 + 4
    assert len({tuple(sequence.output_token_ids) for sequence in group.unfinished_seqs}) > 1
    bench.runner.run()
    assert outcome(group) == alone(group.request, 64)


def test_finish_ends_one_sample_and_the_others_continue() -> None:
    bench = make()
    group = bench.add("a", 6, n=3, max_tokens=9)
    bench.step()
    bench.step()
    first, *others = group.unfinished_seqs
    free = bench.blocks.pool.num_free_blocks
    assert bench.scheduler.finish(first.seq_id)
    bench.step()
    assert first.finish_reason is FinishReason.STOP
    assert bench.blocks.pool.num_free_blocks >= free
    assert bench.scheduler.num_running_seqs == 2
    assert not bench.scheduler.finish(first.seq_id), "it has finished"
    bench.runner.run()
    assert [len(other.output_token_ids) for other in others] == [9, 9]
    assert group.results == [first, *others]


def test_a_request_that_is_aborted_delays_the_end_of_no_sample_of_another() -> None:
    bench = make()
    first, second = (bench.add(name, 6, n=2, max_tokens=9) for name in "ab")
    bench.step()
    bench.step()
    ended = second.unfinished_seqs[0]
    assert bench.scheduler.finish(first.unfinished_seqs[0].seq_id)
    assert bench.scheduler.finish(ended.seq_id)
    bench.scheduler.abort("a")
    num_tokens = ended.num_output_tokens
    bench.step()
    assert (ended.finish_reason, ended.num_output_tokens) == (FinishReason.STOP, num_tokens)


def test_finish_of_the_last_sample_aborts_the_request_at_once() -> None:
    bench = make()
    group = bench.add("a", 6, n=2, max_tokens=9)
    bench.step()
    for sample in tuple(group.unfinished_seqs):
        assert bench.scheduler.finish(sample.seq_id)
    assert group.finish_reason is FinishReason.ABORT
    assert not bench.scheduler.has_work
    assert bench.blocks.pool.num_free_blocks == bench.blocks.pool.num_usable_blocks


def test_finish_of_the_leader_waits_until_the_others_have_forked() -> None:
    bench = make(max_num_batched_tokens=8)
    group = bench.add("a", 12, n=2, max_tokens=9)
    bench.step()
    leader, other = group.unfinished_seqs
    assert bench.scheduler.finish(leader.seq_id)
    bench.step()
    assert leader in group.unfinished_seqs, "its blocks hold the prompt of both"
    bench.step()
    assert group.unfinished_seqs == [other]
    bench.runner.run()
    assert leader.finish_reason is FinishReason.STOP
    assert tuple(other.output_token_ids) == alone(group.request, 64)[1][0]


def test_finish_refuses_beams_and_unknown_sequences() -> None:
    bench = make()
    group = bench.add("a", 6, beam_search=BeamSearch(width=2))
    bench.step()
    assert not bench.scheduler.finish(group.unfinished_seqs[0].seq_id)
    assert not bench.scheduler.finish(999)


def test_best_of_returns_the_sample_with_the_highest_mean_logprob() -> None:
    bench = make()
    group = bench.add("a", n=1, best_of=4, stop_token_ids=frozenset({STOP}))
    bench.runner.run()
    means = [
        sequence.cumulative_logprob / sequence.num_output_tokens for sequence in group.finished_seqs
    ]
    assert len(means) == 4
    assert group.results == [group.finished_seqs[means.index(max(means))]]


def test_best_of_does_not_depend_on_which_of_two_equal_samples_finishes_first() -> None:
    bench = make()
    group = bench.add("a", n=1, best_of=2, max_tokens=2, stop_token_ids=frozenset({STOP}))
    first, second = group.unfinished_seqs
    for tokens in ({first.seq_id: 5, second.seq_id: STOP}, {first.seq_id: 5}):
        output = bench.scheduler.schedule()
        bench.scheduler.update(output, tokens, logprobs=dict.fromkeys(tokens, -1.0))
    assert group.finished_seqs == [second, first]
    assert group.results == [first]


@pytest.mark.parametrize("host", [0, 64])
@pytest.mark.parametrize(
    "branches", [{"n": 3}, {"n": 2, "beam_search": BeamSearch(width=3)}], ids=["samples", "beams"]
)
def test_samples_and_beams_survive_preemption(host: int, branches: dict[str, object]) -> None:
    bench = make(num_host_blocks=host, max_num_batched_tokens=8, force_evict_hold_s=0.0)
    group = bench.add("a", 11, max_tokens=20, **branches)
    for step in range(60):
        if step % 3 == 2:
            bench.scheduler.abort_and_swap(["a"])
        bench.step()
    bench.runner.run()
    assert bench.scheduler.num_preemptions >= 5
    assert outcome(group) == alone(group.request, 64)
    assert bench.blocks.pool.num_free_blocks == bench.blocks.pool.num_usable_blocks


def test_a_prompt_waits_for_a_shared_prefix_that_is_being_computed() -> None:
    bench = make(prefixes=True, max_num_batched_tokens=16)
    bench.add("a", 30)
    twin = bench.add("b", 31)
    other = bench.add("c", prompt_token_ids=(9, 9, 9))
    bench.step()
    bench.step()
    assert (twin.status, other.status) == (W, R)
    bench.step()
    assert twin.results[0].num_cached_tokens == 28


def test_defragmentation_is_part_of_the_moves() -> None:
    bench = make(defrag=0, num_blocks=33)
    long = [bench.add(name, 12, max_tokens=20) for name in "ab"]
    bench.step()
    bench.scheduler.abort("a")
    output = bench.step()
    assert num_copies(output, Direction.WITHIN) > 0
    assert bench.blocks.pool.highest_used_block == bench.blocks.pool.num_used_blocks
    bench.runner.run()
    assert outcome(long[1]) == alone(long[1].request, 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 9}, "9 sequences at once, max_num_seqs is 8"),
        ({"n": 8, "max_tokens": 40}, "8 × 40 more could need .* blocks.*KV cache of 64"),
    ],
)
def test_a_group_that_could_never_finish_is_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(UnservableRequest, match=message):
        make().add("a", 4, **fields)


def test_a_clock_that_steps_back_does_not_extend_the_hold() -> None:
    bench = make(force_evict_hold_s=1.0)
    bench.add("a", max_tokens=50)
    bench.step()
    bench.scheduler.abort_and_swap(["a"])
    bench.step()
    bench.clock[0] -= 3600.0
    bench.step()
    for _ in range(12):
        bench.step()
    assert bench.scheduler.num_running_seqs == 1


def test_a_recomputed_sample_whose_sibling_finishes_preempts_for_the_blocks_it_lacks() -> None:
    """It lacks a slot for each of its tokens, although its group has a single sequence by then."""
    bench = make(
        num_blocks=41,
        num_host_blocks=0,
        prefixes=True,
        max_num_seqs=3,
        max_num_batched_tokens=16,
        max_model_len=160,
    )
    group = bench.add("samples", 8, n=2, max_tokens=60)
    second = group.unfinished_seqs[1].seq_id
    for _ in range(50):
        bench.step(1.0)
    bench.add("long", prompt_token_ids=tuple(range(100, 232)), max_tokens=4)
    bench.scheduler.abort_and_swap(["samples"])
    bench.step(1.0)
    bench.scheduler.finish(second)
    for _ in range(100):
        assert not bench.step(1.0).failed
    assert group.status is F


def test_the_first_sequence_that_finishes_tells_how_long_others_take() -> None:
    rate = CompletionRate()
    rate.update(1, 8.0)
    assert rate.expected_wait_s(9.0) == 8.0


def test_a_victim_that_needs_as_long_to_resume_as_a_request_waits_stays() -> None:
    """Only a longer wait is worth a preemption (seed 003, 4.1.2)."""
    now = [0.0]
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=1, policy="priority"),
        BlockManager(CacheConfig(num_blocks=16, block_size=4)),
        costs=PreemptionCosts(prefill_s_per_token=1.0),
        clock=lambda: now[0],
    )
    scheduler.add(Request(request_id="low", prompt_token_ids=(1,) * 4, max_tokens=8, priority=1))
    runs(scheduler)
    scheduler.add(Request(request_id="high", prompt_token_ids=(1,) * 4, max_tokens=8))
    now[0] = 4.0  # the first has four tokens to compute again
    assert runs(scheduler).preempted_seq_ids == ()
    now[0] = 5.5
    assert runs(scheduler).preempted_seq_ids == (0,)


def runs(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    ids = [
        seq_id
        for part in (output.prompts, output.decodes)
        for item in part
        for seq_id in item.sample_ids
    ]
    scheduler.update(output, dict.fromkeys(ids, 1))
    return output
