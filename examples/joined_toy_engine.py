"""The four libraries in a PyTorch runtime whose toy model adds up the tokens in the KV cache."""

import torch

from trencadis.bucketing import Bucket, BucketGrid, exponential_range
from trencadis.kvcache import BlockManager, CacheConfig
from trencadis.kvcache.tensors import KVCache
from trencadis.scheduler import Request, ScheduledSequence, Scheduler, SchedulerConfig
from trencadis.warmup import Phase, warm_up

NUM_BLOCKS, BLOCK_SIZE = 24, 4


class Device:
    def __init__(self) -> None:
        self.keys = torch.zeros(NUM_BLOCKS, BLOCK_SIZE)
        self.slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE).view(NUM_BLOCKS, BLOCK_SIZE)
        self.cache = KVCache.over([self.keys], block_size=BLOCK_SIZE, num_host_blocks=NUM_BLOCKS)
        self.grid = BucketGrid({"length": exponential_range(1, 4, 32, 4)})

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        torch.zeros(bucket.shape).sum()

    def synchronize(self) -> None: ...

    def free_memory(self) -> int:
        return 1 << 30

    def run(self, part: ScheduledSequence) -> int:
        start, end = part.start, part.start + len(part.token_ids)
        bucket = self.grid.find((end - start,)) or self.grid.fallback((end - start,))
        padded = torch.zeros(bucket.shape)
        padded[: end - start] = torch.tensor(part.token_ids)
        slots = self.slots[torch.from_numpy(part.block_table.astype("int64"))].flatten()[:end]
        self.keys.view(-1)[slots[start:]] = padded[: end - start]
        return int(self.keys.view(-1)[slots].sum()) % 50


def main() -> None:
    device = Device()
    warm_up(device, device.grid.buckets, ())
    sizes = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_host_blocks=NUM_BLOCKS)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=40)
    scheduler = Scheduler(config, BlockManager(sizes))
    for number in range(8):
        prompt = tuple(range(number, number + 12))
        scheduler.add(Request(request_id=f"r{number}", prompt_token_ids=prompt, max_tokens=20))
    while scheduler.has_work:
        step = scheduler.schedule()
        device.cache.carry_out(step.moves)
        parts = [(part, device.run(part)) for part in (*step.prompts, *step.decodes)]
        sampled = {i: token for part, token in parts for i in part.sample_ids}
        for update in scheduler.update(step, sampled):
            if update.finish_reason:
                print(update.request_id, "ends with", update.token_id)
    print(scheduler.num_preemptions, "preemptions")


if __name__ == "__main__":
    main()
