"""Every admitted request finishes, whatever arrives after it: bypasses, ageing and their bounds."""

from __future__ import annotations

import itertools

import attrs
import pytest
from harness import Memory, Runner, alone, outcome

from trencadis.kvcache import BandwidthGovernor, BlockManager, CacheConfig
from trencadis.scheduler import (
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
    prefill_s_per_token: float = 1.0,
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
        costs=PreemptionCosts(prefill_s_per_token=prefill_s_per_token),
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
