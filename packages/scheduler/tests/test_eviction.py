"""Swapping, recomputing, capping and ordering groups about, one rule at a time."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
from harness import STOP, Memory, Runner, alone, outcome

from trencadis.kvcache import (
    BandwidthGovernor,
    BlockManager,
    CacheConfig,
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
from trencadis.scheduler.thermal import NoThermalPolicy, ProportionalThermalPolicy

W, R, S, F = (
    SequenceStatus.WAITING,
    SequenceStatus.RUNNING,
    SequenceStatus.SWAPPED,
    SequenceStatus.FINISHED,
)


@attrs.define
class State:
    hottest_c: float | None = 20.0
    may_raise_cap: bool = True
    power_w: float | None = None


@attrs.define
class Bench:
    """A scheduler with a clock, a thermometer and memory that the test can look at."""

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


def moved(output: SchedulerOutput, way: Direction) -> int:
    return sum(len(copies) for direction, copies in output.moves if direction is way)


@pytest.mark.parametrize("old", list(SequenceStatus))
@pytest.mark.parametrize("new", list(SequenceStatus))
def test_only_the_arrows_of_the_diagram_exist(old: SequenceStatus, new: SequenceStatus) -> None:
    group = make().add("a")
    group.status = old
    if (old, new) in {(W, R), (R, F), (R, S), (S, R), (S, W)}:
        group.become(new)
        assert group.status is new
    else:
        with pytest.raises(IllegalTransition, match=f"'a' is {old.value}.*{new.value}"):
            group.become(new)


def test_evicted_in_mid_prompt_continues_there() -> None:
    bench = make(max_num_batched_tokens=8)
    group = bench.add("a", 20)
    bench.step()
    assert bench.scheduler.abort_and_swap(["a", "nobody"]) == ("a",)
    assert group.status is R
    out = bench.step()
    assert (moved(out, Direction.OUT), out.is_empty, group.status) == (2, True, S)
    back = bench.step(seconds=6.0)
    assert moved(back, Direction.IN) == 2
    assert (back.prompts[0].start, len(back.prompts[0].token_ids)) == (8, 8)
    bench.runner.run()
    assert outcome(group) == alone(group.request, 64)


def test_aborted_while_swapped_gives_back_the_host() -> None:
    bench = make()
    group = bench.add("a")
    bench.step()
    bench.scheduler.abort_and_swap(["a"])
    bench.step()
    assert bench.scheduler.abort("a")
    assert group.status is W
    assert not bench.scheduler.has_work
    assert bench.blocks.host_pool.num_free_blocks == 64


@pytest.mark.parametrize(("token_s", "recomputes"), [(1e-9, 1), (1.0, 0)])
def test_the_cheaper_way_out_is_taken(token_s: float, recomputes: int) -> None:
    bench = make(costs=PreemptionCosts(prefill_s_per_token=token_s))
    group = bench.add("a", 16)
    bench.step()
    bench.scheduler.abort_and_swap(["a"])
    bench.step()
    assert (bench.scheduler.num_preemptions, bench.scheduler.num_recomputes) == (1, recomputes)
    assert group.on_host == (not recomputes)


def test_costs_are_learned_from_what_steps_took() -> None:
    bench = make()
    costs = bench.scheduler.costs
    bench.add("a", 16)
    for _ in range(80):
        output = bench.scheduler.schedule()
        timing = StepTiming(prompts_s=0.016, swap_out_s=float("nan"))
        sampled = {one.seq_id: 1 for one in (*output.prompts, *output.decodes)}
        bench.scheduler.update(output, sampled, timing=timing)
        bench.scheduler.abort("a")
        bench.add("a", 16)
    assert costs.prefill_s_per_token == pytest.approx(0.001, rel=0.01)
    assert costs.swap_out_s_per_block == 40e-6


def test_swaps_within_a_limit_come_in_order_over_several_steps() -> None:
    governor = BandwidthGovernor(1, 25.0, 0.1)  # two blocks every tenth of a second
    bench = make(governor=governor, num_blocks=33)
    group = bench.add("a", 28)
    bench.step()
    bench.scheduler.abort_and_swap(["a"])
    out = [moved(bench.step(), Direction.OUT) for _ in range(5)]
    assert out == [2, 2, 2, 1, 0]
    bench.clock[0] += 6.0
    back = [bench.step() for _ in range(5)]
    assert [moved(output, Direction.IN) for output in back[:4]] == [2, 2, 2, 1]
    assert [output.is_empty for output in back[:4]] == [True, True, True, False]
    bench.runner.run()
    assert outcome(group) == alone(group.request, 64)


def test_a_group_waits_for_blocks_on_their_way_out_rather_than_evict_one_more() -> None:
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


def test_the_cap_is_kept_within_two_steps_of_a_reading() -> None:
    bench = make(policy=ProportionalThermalPolicy(target_temp_c=80.0, k_p=1.0))
    for name in "abcdef":
        bench.add(name, max_tokens=40)
    bench.step()
    bench.state.hottest_c = 85.0
    bench.step()
    bench.step()
    assert bench.scheduler.num_running == 3
    assert bench.scheduler.num_swapped == 3


def test_a_first_step_over_the_cap_holds_admissions_where_waiting_is_shorter() -> None:
    slow = PreemptionCosts(swap_out_s_per_block=10.0, swap_in_s_per_block=10.0)
    policy = ProportionalThermalPolicy(target_temp_c=80.0, k_p=1.0)
    bench = make(policy=policy, costs=slow, num_host_blocks=0)
    slow.prefill_s_per_token = 100.0
    for name in "abcdefgh":
        bench.add(name, max_tokens=40)
    bench.step()
    bench.state.hottest_c = 82.0
    assert bench.step().preempted == ()
    assert len(bench.step().preempted) == 2


def test_lowering_max_num_seqs_takes_running_sequences_out() -> None:
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
    assert bench.scheduler.num_running == bench.scheduler.scheduler_config.max_num_seqs == 2


def test_forced_eviction_alone_does_not_bounce_straight_back() -> None:
    bench = make(evict_hold_s=5.0, max_model_len=128, num_blocks=129)
    for name in "abcd":
        bench.add(name, max_tokens=100)
    bench.step()
    bench.scheduler.control(BatchControl(force_evict=3))
    running = []
    for _ in range(60):
        bench.step()
        running.append(bench.scheduler.num_running)
    assert running[:50] == [1] * 50
    assert running[-1] == 4


def test_dry_run_tells_and_does_not_do() -> None:
    bench = make()
    for name in "abc":
        bench.add(name)
    bench.step()
    order = BatchControl(force_evict=2, max_num_seqs=1, dry_run=True)
    answer = bench.scheduler.control(order)
    bench.step()
    assert len(answer.result(timeout=0).evicted_request_ids) == 2
    assert bench.scheduler.num_running == 3
    assert bench.scheduler.scheduler_config.max_num_seqs == 8


def test_order_that_cannot_be_obeyed_is_answered_with_the_reason() -> None:
    bench = make(policy=NoThermalPolicy())
    wrong_policy = bench.scheduler.control(BatchControl(target_temp_c=80.0, max_num_seqs=1))
    too_many = bench.scheduler.control(BatchControl(max_num_seqs=33))
    bench.step()
    with pytest.raises(ControlError, match="NoThermalPolicy has no target"):
        wrong_policy.result(timeout=0)
    with pytest.raises(ConfigError, match="max_num_seqs 33 is above max_num_batched_tokens 32"):
        too_many.result(timeout=0)
    assert bench.scheduler.scheduler_config.max_num_seqs == 8, "an order is obeyed whole"
    without = make()
    answer = without.scheduler.control(BatchControl(target_temp_c=80.0))
    without.step()
    with pytest.raises(ControlError, match="needs a thermal policy"):
        answer.result(timeout=0)


def test_target_temperature_reaches_the_policy() -> None:
    bench = make(policy=ProportionalThermalPolicy(target_temp_c=90.0, k_p=1.0))
    for name in "abcdefgh":
        bench.add(name, max_tokens=40)
    bench.state.hottest_c = 85.0
    bench.step()
    assert bench.scheduler.num_running == 8
    bench.scheduler.control(BatchControl(target_temp_c=82.0))
    bench.step()
    bench.step()
    assert bench.scheduler.num_running == 5


@pytest.mark.parametrize(
    "fields",
    [{"max_num_seqs": 0}, {"force_evict": -1}, {"target_temp_c": 95.5}, {"policy": "loudest"}],
)
def test_bad_order_is_refused_where_it_is_made(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        BatchControl(**fields)


def test_orders_come_from_any_thread() -> None:
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


def test_evicted_groups_come_back_before_new_ones_start() -> None:
    bench = make(max_num_seqs=2)
    first = [bench.add(name, max_tokens=30) for name in "ab"]
    late = bench.add("c")
    bench.step()
    bench.scheduler.abort_and_swap("ab")
    bench.step()
    bench.step(seconds=6.0)
    assert [group.status for group in first] == [R, R]
    assert late.status is W


def test_a_group_that_does_not_fit_is_passed_over_only_so_often() -> None:
    bench = make(num_blocks=17, max_num_seqs=4, max_passed_over=3)
    bench.add("running", 32, max_tokens=20)
    bench.step()
    large = bench.add("large", 44, max_tokens=2)
    small = [bench.add(f"s{i}", 2, max_tokens=2) for i in range(12)]
    for _ in range(8):
        bench.step()
    assert sum(group.status is F for group in small) == 3
    assert large.passed_over == 3
    bench.runner.run()
    assert large.status is F


def test_urgent_request_takes_a_seat_where_that_is_worth_it() -> None:
    bench = priority_bench()
    slow = bench.add("slow", priority=5, max_tokens=40)
    bench.step()
    urgent = bench.add("urgent", priority=0, max_tokens=3)
    bench.step()
    bench.step()
    assert (urgent.status, slow.status) == (R, S)
    bench.runner.run()
    assert outcome(slow) == alone(slow.request, 64)


def priority_bench() -> Bench:
    clock, state = [0.0], State()
    blocks = BlockManager(CacheConfig(num_blocks=65, block_size=4, num_host_blocks=64))
    config = SchedulerConfig(
        max_num_seqs=1, max_num_batched_tokens=32, max_model_len=64, policy="priority"
    )
    scheduler = Scheduler(config, blocks, clock=lambda: clock[0])
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
        max_passed_over=3,
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
    assert output.prompts[0].sample_ids == tuple(one.seq_id for one in group.live)
    bench.step()
    assert bench.blocks.pool.num_used_blocks == 1 + 4
    assert len({tuple(one.output_token_ids) for one in group.live}) > 1
    bench.runner.run()
    assert outcome(group) == alone(group.request, 64)


def test_a_sample_that_is_finished_from_outside_leaves_alone() -> None:
    bench = make()
    group = bench.add("a", 6, n=3, max_tokens=9)
    bench.step()
    bench.step()
    one, *others = group.live
    free = bench.blocks.pool.num_free_blocks
    assert bench.scheduler.finish(one.seq_id)
    bench.step()
    assert (one.finish_reason, one.status) == (FinishReason.STOP, F)
    assert bench.blocks.pool.num_free_blocks >= free
    assert bench.scheduler.num_running == 2
    assert not bench.scheduler.finish(one.seq_id), "it has left already"
    bench.runner.run()
    assert [len(other.output_token_ids) for other in others] == [9, 9]
    assert group.results == [one, *others]


def test_the_last_sample_that_is_finished_from_outside_ends_the_request_at_once() -> None:
    bench = make()
    group = bench.add("a", 6, n=2, max_tokens=9)
    bench.step()
    for one in tuple(group.live):
        assert bench.scheduler.finish(one.seq_id)
    assert group.finish_reason is FinishReason.ABORT
    assert not bench.scheduler.has_work
    assert bench.blocks.pool.num_free_blocks == bench.blocks.pool.num_usable_blocks


def test_who_leads_the_trunk_is_finished_once_the_others_have_branched() -> None:
    bench = make(max_num_batched_tokens=8)
    group = bench.add("a", 12, n=2, max_tokens=9)
    bench.step()
    leader, other = group.live
    assert bench.scheduler.finish(leader.seq_id)
    bench.step()
    assert leader in group.live, "its blocks hold the prompt of both"
    bench.step()
    assert group.live == [other]
    bench.runner.run()
    assert leader.finish_reason is FinishReason.STOP
    assert tuple(other.output_token_ids) == alone(group.request, 64)[1][0]


def test_a_beam_cannot_be_finished_from_outside() -> None:
    bench = make()
    group = bench.add("a", 6, beam_search=BeamSearch(width=2))
    bench.step()
    assert not bench.scheduler.finish(group.live[0].seq_id)
    assert not bench.scheduler.finish(999)


def test_best_of_returns_the_most_probable_per_token() -> None:
    bench = make()
    group = bench.add("a", n=1, best_of=4, stop_token_ids=frozenset({STOP}))
    bench.runner.run()
    means = [one.cumulative_logprob / one.num_output_tokens for one in group.finished]
    assert len(means) == 4
    assert group.results == [group.finished[means.index(max(means))]]


@pytest.mark.parametrize("host", [0, 64])
@pytest.mark.parametrize(
    "branches", [{"n": 3}, {"n": 2, "beam_search": BeamSearch(width=3)}], ids=["samples", "beams"]
)
def test_branches_survive_evictions(host: int, branches: dict[str, object]) -> None:
    bench = make(num_host_blocks=host, max_num_batched_tokens=8, evict_hold_s=0.0)
    group = bench.add("a", 11, max_tokens=10, **branches)
    for step in range(60):
        if step % 3 == 2:
            bench.scheduler.abort_and_swap(["a"])
        bench.step()
    bench.runner.run()
    assert bench.scheduler.num_preemptions >= 5
    assert outcome(group) == alone(group.request, 64)
    assert bench.blocks.pool.num_free_blocks == bench.blocks.pool.num_usable_blocks


def test_prompt_with_a_prefix_that_is_being_computed_waits_for_it() -> None:
    bench = make(prefixes=True, max_num_batched_tokens=16)
    bench.add("a", 30)
    twin = bench.add("b", 31)
    other = bench.add("c", prompt_token_ids=(9, 9, 9))
    bench.step()
    bench.step()
    assert (twin.status, other.status) == (W, R)
    bench.step()
    assert twin.results[0].num_cached_prompt_tokens == 28


def test_defragmentation_is_part_of_the_moves() -> None:
    bench = make(defrag=0, num_blocks=33)
    long = [bench.add(name, 12, max_tokens=20) for name in "ab"]
    bench.step()
    bench.scheduler.abort("a")
    output = bench.step()
    assert moved(output, Direction.WITHIN) > 0
    assert len(output.copies) == moved(output, Direction.WITHIN)
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
def test_group_that_could_never_finish_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UnservableRequest, match=message):
        make().add("a", 4, **fields)


def test_clock_that_steps_back_holds_nothing_for_longer() -> None:
    bench = make(evict_hold_s=1.0)
    bench.add("a", max_tokens=50)
    bench.step()
    bench.scheduler.abort_and_swap(["a"])
    bench.step()
    bench.clock[0] -= 3600.0
    bench.step()
    for _ in range(12):
        bench.step()
    assert bench.scheduler.num_running == 1
