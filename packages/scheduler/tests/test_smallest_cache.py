"""A request that is accepted finishes alone, in the smallest cache that accepts it."""

from __future__ import annotations

import pytest

from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.scheduler import Request, Scheduler, SchedulerConfig, UnservableRequest


def scheduler_of(num_blocks: int, block_size: int) -> Scheduler:
    blocks = BlockManager(CacheConfig(num_blocks=num_blocks, block_size=block_size, watermark=0.0))
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    return Scheduler(config, blocks)


def smallest_accepting(request: Request, block_size: int) -> Scheduler:
    for num_blocks in range(2, 200):
        scheduler = scheduler_of(num_blocks, block_size)
        try:
            scheduler.add(request)
        except UnservableRequest:
            continue
        return scheduler
    raise AssertionError("no cache accepts the request")


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 6])
def test_samples_finish_in_the_smallest_cache_that_accepts_them(
    n: int, block_size: int, max_tokens: int
) -> None:
    for length in range(1, 2 * block_size + 2):
        prompt = tuple(range(length))
        request = Request(request_id="alone", prompt_token_ids=prompt, max_tokens=max_tokens, n=n)
        scheduler = smallest_accepting(request, block_size)
        for _ in range(4 * max_tokens):
            output = scheduler.schedule()
            items = (*output.prompts, *output.decodes)
            sampled = {seq_id: 5 for item in items for seq_id in item.sample_ids}
            scheduler.update(output, sampled)
            if not scheduler.has_work:
                break
        assert not scheduler.has_work, f"{n} samples of {length} tokens never finish"
