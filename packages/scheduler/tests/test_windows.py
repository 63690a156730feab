"""Blocks of a group that have left the window are given back, and counted no more."""

from __future__ import annotations

import pytest
from harness import num_scheduled_tokens

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import Request, Scheduler, SchedulerConfig


@pytest.mark.parametrize("window", [None, 5, 8, 30])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_a_group_counts_the_blocks_that_it_holds(window: int | None, num_samples: int) -> None:
    config = CacheConfig(num_blocks=80, block_size=4, window=window, enable_prefix_caching=False)
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
    assert window in (None, 30) or held[-1] <= num_samples * (window // 4 + 2)
