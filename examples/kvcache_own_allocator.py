"""A PyTorch runtime with its own allocator and tensors: only its physical blocks are ours.

The allocator hands out block ids in any order. Decode reads the cache up to the highest physical
block, so the remapper keeps these low, and the KV cache copies what moves.
"""

from __future__ import annotations

import torch

from trencadis.kvcache import BlockRemapper, DefragConfig
from trencadis.kvcache.tensors import KVCache

NUM_BLOCKS, NUM_LAYERS, BLOCK_SIZE = 64, 2, 16


class Allocator:
    """Yours: the newest free id first, as a stack."""

    def __init__(self) -> None:
        self.free = list(range(1, NUM_BLOCKS))
        self.tables: dict[str, list[int]] = {}

    def start(self, name: str, num_blocks: int) -> list[int]:
        self.tables[name] = [self.free.pop() for _ in range(num_blocks)]
        return self.tables[name]

    def finish(self, name: str) -> list[int]:
        self.free += self.tables[name]
        return self.tables.pop(name)


def main() -> None:
    allocator = Allocator()
    remapper = BlockRemapper(NUM_BLOCKS, DefragConfig(threshold=4))
    shape = (NUM_BLOCKS, BLOCK_SIZE, 2, 8)  # block, token, head, width
    keys, values = ([torch.zeros(shape) for _ in range(NUM_LAYERS)] for _ in range(2))
    cache = KVCache.over(keys, values, block_size=BLOCK_SIZE)
    for number in range(12):
        remapper.use(allocator.start(f"r{number}", 4))
        table = remapper.physical(allocator.tables[f"r{number}"])
        keys[0][table] = float(number)  # the forward pass of its prompt
    for number in range(9):
        remapper.release(allocator.finish(f"r{number}"), keep=False)
    before = remapper.pool.highest_used_block
    plan = remapper.plan()  # once a step
    if plan is not None:
        cache.copy(plan.copies)
    print("decode reads", before, "blocks, then", remapper.pool.highest_used_block)
    for name, ids in allocator.tables.items():
        print(name, "has", set(keys[0][remapper.physical(ids)].flatten().tolist()))


if __name__ == "__main__":
    main()
