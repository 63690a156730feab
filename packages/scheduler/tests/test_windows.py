"""Blocks of a group that have left the window are given back, and counted no more."""

from __future__ import annotations

import attrs
import pytest
from harness import Memory, Runner, alone, num_scheduled_tokens, outcome

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import (
    ConfigError,
    Request,
    Scheduler,
    SchedulerConfig,
    UnservableRequest,
)


@pytest.mark.parametrize("windows", [(None,), (5,), (8,), (30,), (None, 8, 5)])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_group_counts_the_blocks_that_it_holds(
    windows: tuple[int | None, ...], num_samples: int
) -> None:
    config = CacheConfig(num_blocks=160, block_size=4, windows=windows, enable_prefix_caching=False)
    blocks = BlockManager(config)
    scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8), blocks)
    prompt = tuple(range(18))
    request = Request(request_id="a", prompt_token_ids=prompt, max_tokens=40, n=num_samples)
    group = scheduler.add(request).group
    held = []
    for _ in range(30):
        output = scheduler.schedule()
        assert num_scheduled_tokens(output)
        rows = (*output.prompts, *output.decodes)
        scheduler.update(output, {seq_id: 5 for row in rows for seq_id in row.sample_ids})
        held.append(group.get_num_kv_blocks())
        if num_samples == 1 or blocks.num_tokens(0) > len(prompt):
            assert held[-1] == blocks.pool.num_used_blocks
        else:  # forks have not written to the last block of the prompt yet, which they share
            assert held[-1] >= blocks.pool.num_used_blocks
    of_window = [window // 4 + 2 for window in windows if window is not None]
    assert None in windows or 30 in windows or held[-1] <= num_samples * sum(of_window)


def test_a_long_prompt_holds_blocks_of_a_window_and_a_chunk() -> None:
    """4,000 tokens in a cache that has blocks for 4,020 in one group, and 22 for the other.

    The window of 20 tokens needs so many while chunks of 64 are computed, and 6 afterwards.
    """
    config = CacheConfig(
        num_blocks=1028, block_size=4, windows=(None, 20), tokens_ahead=64, watermark=0.0
    )
    blocks = BlockManager(config)
    settings = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=4096)
    scheduler = Scheduler(settings, blocks)
    runner = Runner(scheduler, Memory(4))
    request = Request(request_id="a", prompt_token_ids=tuple(range(4000)), max_tokens=20)
    group, held = runner.add(request), []
    while group.finish_reason is None:
        output = scheduler.schedule()
        held.append(blocks.pool.num_used_blocks - len(blocks.block_table(0)))
        runner.finish(output)
    assert max(held) == 21, "chunks begin with a block"
    assert held[-1] <= 6
    assert outcome(group) == alone(request, 4096)


@pytest.mark.parametrize("num_blocks", range(35, 60, 4))
def test_a_chunk_waits_for_blocks_that_no_step_in_flight_gives(num_blocks: int) -> None:
    """While a step is in flight nothing is preempted, and chunks may lack blocks."""
    config = CacheConfig(
        num_blocks=num_blocks, block_size=4, windows=(None, 8), tokens_ahead=16, watermark=0.0
    )
    settings = SchedulerConfig(
        max_num_seqs=4, max_num_batched_tokens=8, max_model_len=96, max_steps_in_flight=2
    )
    scheduler = Scheduler(settings, BlockManager(config))
    runner = Runner(scheduler, Memory(4))
    requests = [
        Request(request_id=f"{n}", prompt_token_ids=tuple(range(n, n + 60)), max_tokens=30)
        for n in range(4)
    ]
    groups = [runner.add(request) for request in requests]
    while scheduler.has_work:
        while scheduler.reason_to_wait is not None:
            runner.finish_oldest()
        runner.launch(scheduler.schedule())
        if len(runner.in_flight) == 2:
            runner.finish_oldest()
    assert [outcome(group) for group in groups] == [alone(each, 96) for each in requests]


def test_the_last_of_two_samples_writes_without_a_copy_in_each_group() -> None:
    """A prompt of five tokens has two blocks in each group; a sample needs one more in each."""
    config = CacheConfig(num_blocks=7, block_size=4, windows=(None, 8), watermark=0.0)
    settings = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=8)
    scheduler = Scheduler(settings, BlockManager(config))
    runner = Runner(scheduler, Memory(4))
    request = Request(request_id="a", prompt_token_ids=tuple(range(5)), max_tokens=3, n=2)
    group = runner.add(request)
    runner.run()
    assert scheduler.num_preemptions == 0
    assert outcome(group) == alone(request, 8)


def test_a_prompt_that_needs_more_blocks_than_the_cache_has_in_all_groups_is_rejected() -> None:
    config = CacheConfig(num_blocks=30, block_size=4, windows=(None, 8), tokens_ahead=8)
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8), BlockManager(config)
    )
    scheduler.add(Request(request_id="a", prompt_token_ids=tuple(range(95)), max_tokens=1))
    with pytest.raises(UnservableRequest, match="could need 30 blocks"):
        scheduler.add(Request(request_id="b", prompt_token_ids=tuple(range(97)), max_tokens=1))


def test_steps_compute_no_tokens_without_blocks() -> None:
    blocks = BlockManager(CacheConfig(num_blocks=30, block_size=4, windows=(8,), tokens_ahead=8))
    settings = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_chunk_tokens=8)
    Scheduler(settings, blocks)
    with pytest.raises(ConfigError, match="set tokens_ahead=16"):
        Scheduler(attrs.evolve(settings, max_steps_in_flight=2), blocks)
