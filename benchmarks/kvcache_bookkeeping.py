"""The time of the bookkeeping of a step, which depends only on what the step changes.

    PYTHONPATH=packages/kvcache/src python benchmarks/kvcache_bookkeeping.py

Times are medians. The last table repeats a step of the same size in larger and larger caches.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from statistics import median

from trencadis.kvcache import (
    BlockManager,
    CacheConfig,
    DefragConfig,
    Defragmenter,
    ceil_div,
    lay_out,
)

SEQUENCES = 256
PROMPT = 2048
VOCABULARY = 32000


def seconds(act: Callable[[], object], rounds: int = 7) -> float:
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        taken.append(time.perf_counter() - start)
    return median(taken)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCABULARY) for _ in range(PROMPT)] for _ in range(SEQUENCES)]


def fill(manager: BlockManager, all_tokens: Sequence[list[int]]) -> None:
    for seq_id, tokens in enumerate(all_tokens):
        manager.allocate(seq_id, tokens)
        manager.mark_computed(seq_id, len(tokens))


def allocate_and_free(block_size: int, *, caching: bool) -> None:
    num_blocks = SEQUENCES * PROMPT // block_size + 1
    manager = BlockManager(
        CacheConfig(num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=caching)
    )
    all_tokens = prompts()
    keys = [manager.hasher(tokens) if caching else None for tokens in all_tokens]

    def act() -> None:
        for seq_id, tokens in enumerate(all_tokens):
            manager.allocate(seq_id, tokens, prefix_keys=keys[seq_id])
        for seq_id in range(SEQUENCES):
            manager.free(seq_id)

    taken = seconds(act)
    print(
        f"  blocks of {block_size:3d}, prefix caching {'on ' if caching else 'off'}:"
        f" {1e3 * taken:6.1f} ms, {1e6 * taken / (num_blocks - 1):5.2f} us per block"
    )


def decode(block_size: int, steps: int = 1000) -> None:
    """``steps`` decode steps of all sequences, with the layout of the batch in each step."""
    per_sequence = ceil_div(PROMPT + steps, block_size)
    manager = BlockManager(
        CacheConfig(num_blocks=SEQUENCES * per_sequence + 1, block_size=block_size)
    )
    fill(manager, prompts())
    batch = range(SEQUENCES)
    appends, layouts = [], []
    for _ in range(steps):
        start = time.perf_counter()
        for seq_id in batch:
            manager.append(seq_id, (7,))
        for seq_id in batch:
            manager.mark_computed(seq_id, manager.num_tokens(seq_id))
        appended = time.perf_counter()
        lay_out(
            [manager.block_table(seq_id) for seq_id in batch],
            [manager.num_tokens(seq_id) for seq_id in batch],
            block_size,
        )
        appends.append(appended - start)
        layouts.append(time.perf_counter() - appended)
    print(
        f"  blocks of {block_size:3d}: append and mark {1e6 * median(appends):6.0f} us per step"
        f" ({1e6 * median(appends) / SEQUENCES:4.2f} us per sequence),"
        f" decode layout {1e6 * median(layouts):5.0f} us"
    )


def growth(num_blocks: int) -> None:
    """A step that frees one sequence of 16 blocks and allocates another, in a full cache."""
    rng = random.Random(4)
    manager = BlockManager(CacheConfig(num_blocks=num_blocks, block_size=16))
    defragmenter = Defragmenter(manager, DefragConfig(threshold=0))
    alive = list(range((num_blocks - 1) // 16))
    for seq_id in alive:
        manager.allocate(seq_id, [seq_id] * 256)
        manager.mark_computed(seq_id, 256)
    ids = iter(range(len(alive), 10**9))
    tokens = [[rng.randrange(VOCABULARY) for _ in range(256)] for _ in range(400)]

    def replace() -> None:
        position = rng.randrange(len(alive))
        manager.free(alive[position])
        alive[position] = next(ids)
        manager.allocate(alive[position], tokens[alive[position] % 400])
        manager.mark_computed(alive[position], 256)

    def shrink() -> None:
        manager.free(alive.pop(rng.randrange(len(alive))))
        defragmenter.defragment()

    replaced = seconds(replace, 301)
    print(
        f"  {num_blocks:7d} blocks: replace a sequence {1e6 * replaced:6.1f} us,"
        f" free and defragment {1e6 * seconds(shrink, 61):6.1f} us"
    )


def main() -> None:
    print(f"allocate and free {SEQUENCES} sequences of {PROMPT} tokens")
    for block_size in (32, 128):
        for caching in (False, True):
            allocate_and_free(block_size, caching=caching)
    hasher = BlockManager(CacheConfig(num_blocks=2, block_size=128)).hasher
    tokens = prompts()[0]
    print(f"  keys of one prompt: {1e6 * seconds(lambda: hasher(tokens)):.0f} us")
    print(f"\n1,000 decode steps at {SEQUENCES} running sequences")
    for block_size in (32, 128):
        decode(block_size)
    print("\na step that changes 16 blocks")
    for num_blocks in (1_000, 4_000, 16_000, 64_000):
        growth(num_blocks)


if __name__ == "__main__":
    main()
