"""Every admitted request finishes, whatever arrives after it: bypasses, ageing and their bounds."""

from __future__ import annotations

import itertools

import attrs
import pytest
from harness import Memory, Runner, alone, outcome

from trencadis.kvcache import BandwidthGovernor, BlockManager, CacheConfig
from trencadis.scheduler import (
    BatchControl,
    BeamSearch,
    PreemptionCosts,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SequenceGroup,
    SequenceStatus,
)

WAITING, RUNNING, SWAPPED, PREEMPTED, FINISHED = (
    SequenceStatus.WAITING,
    SequenceStatus.RUNNING,
    SequenceStatus.SWAPPED,
    SequenceStatus.PREEMPTED,
    SequenceStatus.FINISHED,
)
MAX_LEN = 120


@attrs.define
class Bench:
    """A scheduler whose clock the test moves. ``num_copies`` counts copied blocks."""

    scheduler: Scheduler
    blocks: BlockManager
    runner: Runner
    clock: list[float]
    num_copies: int = 0

    def add(self, name: str, length: int, max_tokens: int, **fields: object) -> SequenceGroup:
        """A request whose prompt shares no block with that of another."""
        prompt = tuple(hash((name, i)) % 1000 for i in range(length))
        return self.runner.add(
            Request(request_id=name, prompt_token_ids=prompt, max_tokens=max_tokens, **fields)
        )

    def step(self, seconds: float = 0.02) -> SchedulerOutput:
        self.clock[0] += seconds
        output, _ = self.runner.step()
        self.num_copies += sum(len(copies) for _, copies in output.moves)
        return output


def make(
    *,
    num_blocks: int = 26,
    num_host_blocks: int = 64,
    governor: BandwidthGovernor | None = None,
    costs: PreemptionCosts | None = None,
    **settings: object,
) -> Bench:
    blocks = BlockManager(
        CacheConfig(
            num_blocks=num_blocks,
            block_size=4,
            watermark=0.0,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=False,
        ),
        governor=governor,
    )
    defaults = {"max_num_seqs": 2, "max_num_batched_tokens": 256, "max_model_len": MAX_LEN}
    clock = [0.0]
    scheduler = Scheduler(
        SchedulerConfig(**{**defaults, **settings}),
        blocks,
        costs=costs or PreemptionCosts(prefill_s_per_token=1.0),
        clock=lambda: clock[0],
    )
    return Bench(scheduler, blocks, Runner(scheduler, Memory(4)), clock)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_host_blocks", [0, 64], ids=["recompute", "swap"])
def test_a_request_finishes_while_requests_of_higher_priority_never_stop_arriving(
    policy: str, num_host_blocks: int
) -> None:
    """They leave it as many blocks as it has tokens, and none for the next token."""
    bench = make(policy=policy, num_host_blocks=num_host_blocks)
    low = bench.add("low", 9, 30, priority=9)
    names = (f"high {i}" for i in itertools.count())
    high = []
    while low.status is not FINISHED:
        while bench.scheduler.num_waiting < 2:
            high.append(bench.add(next(names), 82, 6, priority=0))
        bench.step()
        assert low.num_bypasses <= 16
        assert sum(group.status is FINISHED for group in high) <= 16 + 2
    assert outcome(low) == alone(low.request, MAX_LEN)
    assert bench.scheduler.num_preemptions <= 4
    assert bench.num_copies <= 40


@pytest.mark.parametrize("num_host_blocks", [0, 64], ids=["recompute", "swap"])
def test_a_request_loses_its_blocks_to_later_ones_at_most_max_bypasses_times(
    num_host_blocks: int,
) -> None:
    """Each request of high priority starts while it runs, so none starts in its stead."""
    bench = make(policy="priority", num_host_blocks=num_host_blocks, max_bypasses=3)
    low = bench.add("low", 9, 80, priority=9)
    num_high = num_lost = 0
    while low.status is not FINISHED:
        was_running = low.status is RUNNING
        if was_running and bench.scheduler.num_waiting == 0 and bench.scheduler.num_running == 1:
            num_high += 1
            bench.add(f"high {num_high}", 60, 30, priority=0)
        bench.step()
        num_lost += was_running and low.status in (SWAPPED, PREEMPTED)
        assert low.num_bypasses == num_lost <= 3
    assert num_lost == 3
    assert outcome(low) == alone(low.request, MAX_LEN)


@pytest.mark.parametrize("fields", [{}, {"n": 3}], ids=["one sequence", "samples"])
def test_a_swapped_group_computes_a_token_for_each_sequence_in_the_step_in_which_it_returns(
    fields: dict[str, int],
) -> None:
    bench = make(max_num_seqs=4)
    group = bench.add("a", 11, 20, **fields)
    for _ in range(2):  # the last token begins a new block
        bench.step()
    bench.scheduler.abort_and_swap(["a"])
    bench.step()
    assert group.status is SWAPPED
    lengths = [len(sample.token_ids) for sample in group.unfinished_seqs]
    bench.step(seconds=6.0)
    assert group.status is RUNNING
    assert [len(sample.token_ids) for sample in group.unfinished_seqs] == [
        length + 1 for length in lengths
    ]


@pytest.mark.parametrize("num_host_blocks", [0, 200], ids=["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", range(24, 48, 3))
def test_after_a_return_each_sequence_fills_a_block_before_blocks_run_out_again(
    num_blocks: int, num_host_blocks: int
) -> None:
    """Otherwise a return costs copies or recomputation, and gives a token."""
    bench = make(
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    groups = [bench.add(f"r{i}", 3 + 5 * i, 60) for i in range(6)]
    last_return = last_admission = -1
    for step in itertools.count():
        before = [group.status for group in groups]
        output = bench.step()
        if output.preempted_seq_ids and last_return > last_admission:
            assert step - last_return >= 4
        for group, status in zip(groups, before, strict=True):
            if group.status is RUNNING and status is WAITING:
                last_admission = step
            elif group.status is RUNNING and status is not RUNNING:
                last_return = step
        if not bench.scheduler.has_work:
            break
    assert bench.scheduler.num_preemptions > 0
    assert [outcome(group) for group in groups] == [
        alone(group.request, MAX_LEN) for group in groups
    ]


@pytest.mark.parametrize("num_host_blocks", [0, 64], ids=["recompute", "swap"])
@pytest.mark.parametrize("num_blocks", [5, 6])
def test_beams_that_share_several_blocks_finish_in_a_cache_that_just_holds_them(
    num_blocks: int, num_host_blocks: int
) -> None:
    """Of the beams that share a partial block, the last one to write needs no copy of it."""
    for token in range(30):
        bench = make(num_blocks=num_blocks, num_host_blocks=num_host_blocks, max_num_seqs=4)
        group = bench.runner.add(
            Request(
                request_id="beams",
                prompt_token_ids=(token,),
                max_tokens=4,
                n=4,
                beam_search=BeamSearch(width=4),
            )
        )
        for _ in range(4):
            bench.step()
        assert outcome(group) == alone(group.request, MAX_LEN)


# Who starts next.


def test_a_preempted_request_that_does_not_fit_holds_back_later_ones_of_its_priority() -> None:
    bench = make(num_blocks=23, max_num_seqs=4, force_evict_hold_s=0.0)
    bench.add("first", 40, 40)
    second = bench.add("second", 40, 40)
    bench.step()
    bench.scheduler.abort_and_swap(["second"])
    small = bench.add("small", 3, 4)
    for _ in range(3):
        bench.step()
        assert (second.status, small.status, second.num_bypasses) == (SWAPPED, WAITING, 0)
    bench.scheduler.abort("first")
    bench.step()
    assert (second.status, small.status) == (RUNNING, RUNNING)


def test_a_request_is_not_bypassed_by_an_older_one_that_resumes() -> None:
    bench = make(max_num_seqs=2, force_evict_hold_s=0.0)
    older = bench.add("older", 40, 40)
    bench.step()
    younger = bench.add("younger", 80, 4)
    for _ in range(3):
        bench.scheduler.abort_and_swap(["older"])
        bench.step()
        bench.step()
    assert (older.status, younger.status) == (RUNNING, WAITING)
    assert bench.scheduler.num_preemptions == 3
    assert younger.num_bypasses == 0


def test_a_bypass_counts_once_for_the_oldest_request_of_each_queue() -> None:
    bench = make(num_blocks=25, max_num_seqs=4, policy="priority", force_evict_hold_s=0.0)
    running = bench.add("running", 20, 60, priority=0)
    preempted = bench.add("preempted", 40, 40, priority=5)
    bench.step()
    bench.scheduler.abort_and_swap(["preempted"])
    waiting = [bench.add(f"waiting {i}", 90, 4, priority=9) for i in range(2)]
    later = bench.add("later", 4, 2, priority=0)
    bench.step()
    assert (running.status, later.status) == (RUNNING, RUNNING)
    bypasses = [group.num_bypasses for group in (running, preempted, *waiting, later)]
    assert bypasses == [0, 1, 1, 0, 0]


def test_a_preempted_request_that_lost_samples_resumes_in_fewer_blocks_than_it_was_refused() -> (
    None
):
    bench = make(num_host_blocks=0, num_blocks=25, max_num_seqs=5, force_evict_hold_s=0.0)
    samples = bench.add("samples", 8, 24, n=3)
    for _ in range(4):
        bench.step()
    bench.add("other", 34, 30)
    for _ in range(6):
        bench.step()
    bench.scheduler.abort_and_swap(["samples"])
    bench.step()
    assert samples.status is PREEMPTED, "it needs 11 blocks and 4 spare ones, and 14 are free"
    bench.scheduler.abort("other")
    for _ in range(4):
        bench.step()
    for sample in samples.unfinished_seqs[1:]:
        bench.scheduler.finish(sample.seq_id)
    bench.add("third", 44, 30)
    bench.step()
    bench.scheduler.abort_and_swap(["samples"])
    bench.step()
    assert samples.status is RUNNING, "it needs 6 blocks and 2 spare ones, and 12 are free"
    assert bench.scheduler.num_preemptions == 2


# Who is preempted.


def test_a_request_of_higher_priority_waits_where_that_is_shorter_than_a_recomputation() -> None:
    bench = make(num_host_blocks=0, max_num_seqs=1, policy="priority")
    low = bench.add("low", 8, 6, priority=9)
    bench.step()
    high = bench.add("high", 4, 2, priority=0)
    for _ in range(4):
        bench.step()
        assert (low.status, high.status) == (RUNNING, WAITING)
    bench.runner.run()
    assert bench.scheduler.num_preemptions == 0


def test_no_request_is_preempted_for_others_of_its_own_priority() -> None:
    bench = make(max_num_seqs=2, policy="priority")
    running = [bench.add("equal", 4, 20, priority=1), bench.add("low", 4, 20, priority=9)]
    bench.step(seconds=9.0)
    samples = bench.add("samples", 4, 4, priority=1, n=2)
    bench.step(seconds=9.0)
    assert samples.status is WAITING
    assert [group.status for group in running] == [RUNNING, RUNNING]


@pytest.mark.parametrize("length", [34, 64])
def test_requests_are_preempted_for_a_higher_priority_only_if_it_can_start_then(
    length: int,
) -> None:
    """25 blocks, of which 10 have an equal priority: 9 fit in the others, 16 do not."""
    bench = make(max_num_seqs=4, policy="priority")
    bench.add("equal", 37, 20, priority=1)
    low = [bench.add(f"low {i}", 21, 20, priority=9) for i in range(2)]
    bench.step()
    high = bench.add("high", length, 4, priority=1)
    bench.step(seconds=9.0)
    if length == 34:
        assert (high.status, [group.status for group in low]) == (RUNNING, [RUNNING, SWAPPED])
    else:
        assert (high.status, [group.status for group in low]) == (WAITING, [RUNNING, RUNNING])


def test_a_request_of_higher_priority_preempts_all_that_it_needs_in_one_step() -> None:
    bench = make(max_num_seqs=4, policy="priority")
    low = [bench.add(f"low {i}", 29, 20, priority=9) for i in range(3)]
    bench.step()
    high = bench.add("high", 64, 4, priority=1)
    bench.step(seconds=9.0)
    assert (high.status, [group.status for group in low]) == (RUNNING, [RUNNING, SWAPPED, SWAPPED])


def test_no_second_request_is_preempted_while_the_blocks_of_the_first_are_copied() -> None:
    governor = BandwidthGovernor(1, 20.0, 0.1)  # two blocks every tenth of a second
    bench = make(max_num_seqs=4, policy="priority", governor=governor)
    low = [bench.add(f"low {i}", 29, 20, priority=9) for i in range(3)]
    bench.step()
    high = bench.add("high", 24, 4, priority=1)
    for _ in range(4):
        bench.step(seconds=0.1)
        assert [group.status for group in low] == [RUNNING, RUNNING, SWAPPED]
    assert high.status in (RUNNING, FINISHED)


def test_a_preemption_that_was_ordered_for_an_aborted_request_holds_back_no_other() -> None:
    bench = make()
    bench.add("a", 4, 20)
    bench.step()
    assert bench.scheduler.abort_and_swap(["a"]) == ("a",)
    bench.scheduler.abort("a")
    other = bench.add("b", 4, 20)
    bench.step()
    assert other.status is RUNNING


def test_samples_are_recomputed_where_computing_their_prompt_once_beats_the_copies() -> None:
    """44 tokens take 44 ms, 14 blocks out and in 112 ms, and four prompts would take 164 ms."""
    costs = PreemptionCosts(
        prefill_s_per_token=1e-3, swap_out_s_per_block=4e-3, swap_in_s_per_block=4e-3
    )
    bench = make(max_num_seqs=4, costs=costs)
    group = bench.add("samples", 40, 12, n=4)
    for _ in range(2):
        bench.step()
    bench.scheduler.abort_and_swap(["samples"])
    bench.step()
    assert group.status is PREEMPTED


# What a step schedules.


def test_a_prefill_chunk_of_one_token_is_a_decode_and_lru_preempts_what_then_did_not_run() -> None:
    """Three sequences and a chunk of two tokens leave nothing of a budget of five."""
    bench = make(max_num_seqs=5, max_num_batched_tokens=5, max_chunk_tokens=2)
    bench.add("samples", 2, 20, n=3)
    bench.add("second", 20, 20)
    third = bench.add("third", 20, 20)
    first = bench.step()
    assert [len(chunk.token_ids) for chunk in first.prompts] == [2, 2]
    assert [(chunk.seq_id, chunk.samples) for chunk in first.decodes] == [
        (third.unfinished_seqs[0].seq_id, False)
    ]
    second = bench.step()
    assert (len(second.decodes), len(second.prompts)) == (3, 1)
    order = bench.scheduler.control(BatchControl(force_evict=1, policy="lru"))
    bench.step()
    assert order.result(timeout=0).evicted_request_ids == ("third",)


def test_no_sample_of_a_swapped_request_runs_before_its_blocks_have_arrived() -> None:
    governor = BandwidthGovernor(1, 10.0, 0.1)  # one block every tenth of a second
    bench = make(governor=governor, max_num_seqs=3, force_evict_hold_s=0.0)
    group = bench.add("samples", 9, 24, n=3)
    for _ in range(6):
        bench.step(seconds=0.1)
    for _ in range(3):
        bench.scheduler.abort_and_swap(["samples"])
        for _ in range(20):
            bench.step(seconds=0.1)
    while bench.scheduler.has_work:
        bench.step(seconds=0.1)
    assert bench.scheduler.num_preemptions == 3
    assert outcome(group) == alone(group.request, MAX_LEN)


def test_a_request_waits_for_no_blocks_of_a_swap_out_that_an_abort_has_cancelled() -> None:
    governor = BandwidthGovernor(1, 10.0, 0.1)  # one block every tenth of a second
    bench = make(governor=governor, num_blocks=21, max_num_seqs=3, force_evict_hold_s=0.0)
    bench.add("aborted", 40, 20)
    groups = [bench.add(name, 16, 40) for name in ("first", "second")]
    bench.step(seconds=0.1)
    bench.scheduler.abort_and_swap(["aborted"])
    bench.step(seconds=0.1)
    bench.scheduler.abort("aborted")
    for _ in range(100):
        bench.step(seconds=0.1)
    assert bench.scheduler.num_preemptions > 1
    assert [group.status for group in groups] == [FINISHED, FINISHED]
