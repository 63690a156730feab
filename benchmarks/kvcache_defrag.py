"""Bytes moved by defragmentation: this library, and a defragmenter beside the block tables.

    PYTHONPATH=packages/kvcache/src python benchmarks/kvcache_defrag.py

The baseline follows the rule of the Gaudi plugin for vLLM: blocks are handed out in the order in
which they became free; a second mapping from the pool's ids to physical ones is kept beside it;
when the highest physical block in use is more than 32 above their number, the highest used and
the lowest free blocks *exchange* their content (the free one may be cached), at most 512 at a time.

First the same fragmented states are given to both rules, then the same traffic. A reclaimed block
is one by which the highest block in use has come down. Padding to compiled sizes is not counted.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from itertools import count
from typing import Protocol

import attrs

from trencadis.kvcache import BlockManager, CacheConfig, DefragConfig, Defragmenter

NUM_BLOCKS = 1519
BLOCK = 128
MIB_PER_BLOCK = 16
"""An 8-billion-parameter model in bfloat16 (seed 000: 131,072 bytes per token)."""


@attrs.define
class Moved:
    plans: int = 0
    copies: int = 0
    reclaimed: int = 0

    def add(self, copies: int, reclaimed: int) -> None:
        self.plans += 1
        self.copies += copies
        self.reclaimed += reclaimed

    def __str__(self) -> str:
        per_block = self.copies / self.reclaimed if self.reclaimed else 0.0
        return (
            f"{self.plans:5d} plans {self.reclaimed:6d} reclaimed {self.copies:6d} copies "
            f" {MIB_PER_BLOCK * per_block:5.2f} MiB per reclaimed block"
        )


class Cache(Protocol):
    moved: Moved
    highest_sum: int

    def allocate(self, seq_id: int, tokens: list[int]) -> None: ...
    def append(self, seq_id: int, token: int) -> None: ...
    def free(self, seq_id: int) -> None: ...
    def end_step(self) -> None: ...


class Ours:
    """`BlockManager` with `Defragmenter`."""

    def __init__(self, *, prefix_caching: bool, keep_from: float = 0.05) -> None:
        config = CacheConfig(
            num_blocks=NUM_BLOCKS, block_size=BLOCK, enable_prefix_caching=prefix_caching
        )
        self.manager = BlockManager(config)
        self.defragmenter = Defragmenter(self.manager, DefragConfig(keep_from=keep_from))
        self.moved = Moved()
        self.highest_sum = 0
        self.touched: set[int] = set()

    def allocate(self, seq_id: int, tokens: list[int]) -> None:
        self.manager.allocate(seq_id, tokens)
        self.touched.add(seq_id)

    def append(self, seq_id: int, token: int) -> None:
        self.manager.append(seq_id, [token])
        self.touched.add(seq_id)

    def free(self, seq_id: int) -> None:
        self.manager.free(seq_id)

    def end_step(self) -> None:
        plan = self.defragmenter.defragment()
        if plan is not None:
            self.moved.add(len(plan.copies), plan.num_moved)
        for seq_id in self.touched:
            if seq_id in self.manager:
                self.manager.mark_computed(seq_id, self.manager.num_tokens(seq_id))
        self.touched.clear()
        self.highest_sum += self.manager.highest_in_use


class SecondMapping:
    """Blocks handed out oldest-free first, with a defragmenter that maps them once more."""

    def __init__(self, *, prefix_caching: bool) -> None:
        self.prefix_caching = prefix_caching
        self.free_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, NUM_BLOCKS))
        self.refs = [0] * NUM_BLOCKS
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.known: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.physical = list(range(NUM_BLOCKS))
        self.logical = list(range(NUM_BLOCKS))
        self.moved = Moved()
        self.highest_sum = 0

    def allocate(self, seq_id: int, tokens: list[int]) -> None:
        table, matching = [], self.prefix_caching
        for key in self._keys(tokens)[: (len(tokens) - 1) // BLOCK]:
            block = self.known.get(key)
            if not matching or block is None:
                break
            if self.refs[block] == 0:
                del self.free_ids[block]
            self.refs[block] += 1
            table.append(block)
        while len(table) * BLOCK < len(tokens):
            table.append(self._take())
        self.tables[seq_id], self.tokens[seq_id] = table, list(tokens)
        self._publish(seq_id)

    def append(self, seq_id: int, token: int) -> None:
        self.tokens[seq_id].append(token)
        if len(self.tokens[seq_id]) > len(self.tables[seq_id]) * BLOCK:
            self.tables[seq_id].append(self._take())
        if len(self.tokens[seq_id]) % BLOCK == 0:
            self._publish(seq_id)

    def free(self, seq_id: int) -> None:
        for block in reversed(self.tables.pop(seq_id)):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free_ids[block] = None
        del self.tokens[seq_id]

    def end_step(self) -> None:
        used = sorted(
            (self.physical[block] for block in range(1, NUM_BLOCKS) if self.refs[block]),
            reverse=True,
        )
        highest = used[0] if used else 0
        if used and highest - 32 > len(used):
            taken = set(used)
            free = (block for block in count(1) if block not in taken)
            pairs = [(src, dst) for src, dst in zip(used[:512], free, strict=False) if dst < src]
            for src, dst in pairs:
                a, b = self.logical[src], self.logical[dst]
                self.physical[a], self.physical[b] = dst, src
                self.logical[src], self.logical[dst] = b, a
            after = max(self.physical[block] for block in range(1, NUM_BLOCKS) if self.refs[block])
            self.moved.add((2 if self.prefix_caching else 1) * len(pairs), len(pairs))
            highest = after
        self.highest_sum += highest

    def _take(self) -> int:
        block, _ = self.free_ids.popitem(last=False)
        self.known.pop(self.key_of.pop(block, -1), None)
        self.refs[block] = 1
        return block

    def _keys(self, tokens: list[int]) -> list[int]:
        keys, parent = [], 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            parent = hash((parent, tuple(tokens[start : start + BLOCK])))
            keys.append(parent)
        return keys

    def _publish(self, seq_id: int) -> None:
        if self.prefix_caching:
            for key, block in zip(
                self._keys(self.tokens[seq_id]), self.tables[seq_id], strict=False
            ):
                if key not in self.known and block not in self.key_of:
                    self.known[key], self.key_of[block] = block, key


def drive(cache: Cache, *, reuse: float, users: int = 48, steps: int = 3000) -> None:
    """A step is one token for every running sequence; ``reuse`` is the share that comes back."""
    rng = random.Random(11)
    ids = count(1)
    running: dict[int, tuple[list[int], int]] = {}
    back: deque[tuple[int, list[int]]] = deque()
    for step in range(steps):
        target = users if (step // 400) % 2 == 0 else users // 6
        while len(running) < target:
            history: list[int] = []
            if back and back[0][0] <= step:
                history = back.popleft()[1]
            history = history + [rng.randrange(32000) for _ in range(rng.randint(100, 900))]
            seq_id = next(ids)
            cache.allocate(seq_id, history)
            running[seq_id] = (history, rng.randint(20, 400))
        for seq_id, (history, left) in list(running.items()):
            if left == 0:
                cache.free(seq_id)
                del running[seq_id]
                if rng.random() < reuse and len(history) < 2500:
                    back.append((step + 200, history))
                continue
            token = rng.randrange(32000)
            cache.append(seq_id, token)
            history.append(token)
            running[seq_id] = (history, left - 1)
        cache.end_step()


def same_states() -> None:
    """Random sets of used blocks, free ones empty or cached: the two rules on the same input."""
    rng = random.Random(3)
    for cached in (0.0, 0.5, 1.0):
        ours, theirs, reclaimed = Moved(), Moved(), 0
        evicting = Moved()
        for _ in range(200):
            used = set(rng.sample(range(1, NUM_BLOCKS), rng.randint(100, 900)))
            highest = max(used)
            sources = sum(block > len(used) for block in used)
            moves = min(512, sources)
            kept = sum(rng.random() < cached for _ in range(moves))
            theirs.copies += 2 * moves
            evicting.copies += moves
            ours.copies += min(512, moves + kept)
            reclaimed += highest - len(used)
        print(
            f"  {cached:4.0%} of free blocks cached: exchange {theirs.copies}, "
            f"evict {evicting.copies} ({evicting.copies / theirs.copies:.2f}), "
            f"keep {ours.copies} ({ours.copies / theirs.copies:.2f})"
        )


def main() -> None:
    for reuse in (0.0, 0.7):
        print(f"\nsame traffic, {reuse:.0%} of the sequences come back; {NUM_BLOCKS} blocks")
        caches: dict[str, Cache] = {
            "second mapping": SecondMapping(prefix_caching=True),
            "ours": Ours(prefix_caching=True),
            "ours, keep all": Ours(prefix_caching=True, keep_from=0.0),
            "ours, keep nothing": Ours(prefix_caching=True, keep_from=2.0),
            "second mapping, no prefix caching": SecondMapping(prefix_caching=False),
            "ours, no prefix caching": Ours(prefix_caching=False),
        }
        for name, cache in caches.items():
            drive(cache, reuse=reuse)
            print(f"  {name:34s} {cache.moved}  mean highest {cache.highest_sum / 3000:6.1f}")


if __name__ == "__main__":
    main()
