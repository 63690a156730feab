"""Throughput of block copies, relative to a plain ``tensor.copy_`` of the same number of bytes.

    PYTHONPATH=packages/kvcache/src python benchmarks/kvcache_copies.py [cpu|cuda|hpu]

Plans: a defragmentation of a fragmented pool, a swap of four sequences, and random blocks (the
worst case). Each plan is timed alternately with the plain copy, so that other load on the machine
slows both. The ratio is the ratio of the medians; 1.00 is the speed of the plain copy.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from trencadis.kvcache import (
    BlockCopy,
    BlockManager,
    CacheConfig,
    DefragConfig,
    Defragmenter,
)
from trencadis.kvcache.tensors import KVCache, LayerShape, bytes_per_block

ROUNDS = 15
NUM_BLOCKS = 512

MODELS = {
    "135M, bfloat16, blocks of 32": (30, 3, 32, 64, torch.bfloat16),
    "135M, float32, blocks of 32": (30, 3, 32, 64, torch.float32),
    "135M, bfloat16, blocks of 128": (30, 3, 128, 64, torch.bfloat16),
    "8B (8 of 32 layers), bfloat16, blocks of 128": (8, 8, 128, 128, torch.bfloat16),
}


def churned(num_moves: int) -> list[BlockCopy]:
    """The copies of a defragmentation after many sequences were freed in random order."""
    rng = random.Random(2)
    manager = BlockManager(
        CacheConfig(num_blocks=NUM_BLOCKS, block_size=1, enable_prefix_caching=False)
    )
    alive: list[int] = []
    free = manager.pool.num_free_blocks
    while manager.pool.num_free_blocks > 20:
        seq_id, length = len(alive) + 1, rng.randint(2, 16)
        manager.allocate(seq_id, [1] * length)
        manager.mark_computed(seq_id, length)
        alive.append(seq_id)
    rng.shuffle(alive)
    while free - manager.pool.num_free_blocks > 2.4 * num_moves:
        manager.free(alive.pop())
    plan = Defragmenter(manager, DefragConfig(threshold=0)).defragment()
    return list(plan.copies) if plan else []


def scattered(num_moves: int) -> list[BlockCopy]:
    ids = random.Random(3).sample(range(1, NUM_BLOCKS), 2 * num_moves)
    return [BlockCopy(*pair) for pair in zip(ids[::2], ids[1::2], strict=True)]


def sequences(num_moves: int) -> list[BlockCopy]:
    """A swap out of four sequences, each contiguous on the device, to the lowest host blocks."""
    length = num_moves // 4
    device = [start + i for start in (300, 20, 410, 150) for i in range(length)]
    return [BlockCopy(src, dst) for dst, src in enumerate(device)]


def seconds(act: Callable[[], object], synchronize: Callable[[], object]) -> float:
    synchronize()
    start = time.perf_counter()
    act()
    synchronize()
    return time.perf_counter() - start


def report(
    name: str,
    act: Callable[[], object],
    plain: Callable[[], object],
    size: int,
    wait: Callable[[], object],
) -> None:
    seconds(act, wait), seconds(plain, wait)
    pairs = [(seconds(plain, wait), seconds(act, wait)) for _ in range(ROUNDS)]
    base, ours = (median(column) for column in zip(*pairs, strict=True))
    print(f"  {name:34s} {size / ours / 1e9:7.1f} GB/s   ratio {base / ours:5.2f}")


def main(device: str) -> None:
    def wait() -> None:
        if device != "cpu":
            torch.get_device_module(device).synchronize()

    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for model, (num_layers, heads, block_size, head_dim, dtype) in MODELS.items():
        layers = [LayerShape(heads, head_dim, head_dim)] * num_layers
        cache = KVCache(
            layers=layers,
            num_blocks=NUM_BLOCKS,
            block_size=block_size,
            dtype=dtype,
            device=device,
            num_host_blocks=128,
        )
        for layer in range(num_layers):
            cache.key(layer).fill_(1)
            cache.value(layer).fill_(1)
        per_block = bytes_per_block(layers, block_size=block_size, dtype=dtype)
        print(f"\n{model}: {per_block / 2**20:.2f} MiB per block")
        for num_moves in (64, 128):
            for name, copies in (
                ("defragment", churned(num_moves)),
                ("scattered", scattered(num_moves)),
            ):
                size = len(copies) * per_block
                source = torch.ones(size, dtype=torch.uint8, device=device)
                target = torch.ones_like(source)
                report(
                    f"{name}, {len(copies)} blocks",
                    partial(cache.copy, copies),
                    partial(target.copy_, source),
                    size,
                    wait,
                )
            out = sequences(num_moves)
            size = len(out) * per_block
            host = torch.ones(size, dtype=torch.uint8, pin_memory=device != "cpu")
            near = torch.ones(size, dtype=torch.uint8, device=device)
            back = [BlockCopy(dst, src) for src, dst in out]
            report(
                f"swap out, {len(out)} blocks",
                partial(cache.swap_out, out),
                partial(host.copy_, near, non_blocking=True),
                size,
                wait,
            )
            report(
                f"swap in, {len(out)} blocks",
                partial(cache.swap_in, back),
                partial(near.copy_, host, non_blocking=True),
                size,
                wait,
            )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")
