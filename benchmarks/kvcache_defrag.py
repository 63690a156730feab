"""Bytes copied by defragmentation: this library, and a defragmenter with a second mapping.

    PYTHONPATH=packages/kvcache/src python benchmarks/kvcache_defrag.py

Both get the same traffic. The baseline follows the rule of the vLLM plugin for Gaudi
(vllm_gaudi/extension/defragmentation.py). It allocates blocks in the order in which they were
freed. A second mapping maps the ids of the pool to physical blocks. When the highest used
physical block is more than 32 blocks above the number of used blocks, the highest used and the
lowest free blocks are exchanged, at most 512 at a time.

The first releases of the plugin exchange the content with two copies. Later releases copy one way
if prefix caching is off. The plugin uses contiguous attention, and with it defragmentation, only
if prefix caching is off, unless the user forces both. So the main comparison is without prefix
caching. With prefix caching, cached content that is kept needs a second copy on both sides; the
benefit is the number of prompt tokens that are not recomputed.

A moved block is a used block that moved to a lower id. Padding to compiled sizes is not counted.
"""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from itertools import count
from typing import Protocol

import attrs

from trencadis.kvcache import BlockManager, CacheConfig, DefragConfig, Defragmenter

NUM_BLOCKS = 1519
STEPS = 3000
BLOCK = 128
MIB_PER_BLOCK = 16
"""An 8-billion-parameter model in bfloat16 (seed 000: 131,072 bytes per token)."""


@attrs.define
class Outcome:
    """The totals of one side. ``highest`` is the sum of the highest used block over the steps."""

    copies: int = 0
    num_moved: int = 0
    highest: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0

    def add_plan(self, copies: int, num_moved: int) -> None:
        self.copies += copies
        self.num_moved += num_moved

    def add_prompt(self, tokens: int, cached: int) -> None:
        self.prompt_tokens += tokens
        self.computed_tokens += tokens - cached

    @property
    def mib_per_block(self) -> float:
        """MiB copied per moved block."""
        return MIB_PER_BLOCK * self.copies / self.num_moved

    def line(self, base: Outcome) -> str:
        """The totals, with ratios to the baseline."""
        return (
            f"{self.num_moved:6d} moved {self.copies:6d} copies"
            f" {self.mib_per_block:5.1f} MiB each ({self.mib_per_block / base.mib_per_block:.2f})"
            f"  in all {self.copies / base.copies:.2f}"
            f"  mean highest {self.highest / STEPS:5.1f}"
            f"  computed {self.computed_tokens / self.prompt_tokens:4.0%} of prompts"
        )


class Cache(Protocol):
    outcome: Outcome

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
        self.outcome = Outcome()
        self.touched: set[int] = set()

    def allocate(self, seq_id: int, tokens: list[int]) -> None:
        self.outcome.add_prompt(len(tokens), self.manager.allocate(seq_id, tokens))
        self.touched.add(seq_id)

    def append(self, seq_id: int, token: int) -> None:
        self.manager.append(seq_id, [token])
        self.touched.add(seq_id)

    def free(self, seq_id: int) -> None:
        self.manager.free(seq_id)

    def end_step(self) -> None:
        plan = self.defragmenter.defragment()
        if plan is not None:
            self.outcome.add_plan(len(plan.copies), plan.num_moved)
        for seq_id in self.touched:
            if seq_id in self.manager:
                self.manager.mark_computed(seq_id, self.manager.num_tokens(seq_id))
        self.touched.clear()
        self.outcome.highest += self.manager.pool.highest_used_block


class SecondMapping:
    """A pool that allocates the oldest free block, and a defragmenter with a second mapping."""

    def __init__(self, *, prefix_caching: bool, exchange: bool = True) -> None:
        self.prefix_caching = prefix_caching
        self.copies_per_move = 2 if exchange else 1
        self.free_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, NUM_BLOCKS))
        self.refs = [0] * NUM_BLOCKS
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.known: dict[int, int] = {}
        self.key_of: dict[int, int] = {}
        self.physical = list(range(NUM_BLOCKS))
        self.logical = list(range(NUM_BLOCKS))
        self.outcome = Outcome()

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
        self.outcome.add_prompt(len(tokens), BLOCK * len(table))
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
            self.outcome.add_plan(self.copies_per_move * len(pairs), len(pairs))
            highest = after
        self.outcome.highest += highest

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


def drive(cache: Cache, *, reuse: float, users: int = 48) -> None:
    """Each step appends one token to every running sequence. ``reuse`` is the follow-up share."""
    rng = random.Random(11)
    ids = count(1)
    running: dict[int, tuple[list[int], int]] = {}
    back: deque[tuple[int, list[int]]] = deque()
    for step in range(STEPS):
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


def compare(title: str, sides: dict[str, Cache], *, reuse: float) -> list[Outcome]:
    """Run all sides with the same traffic. The first side is the baseline."""
    print(f"\n{title}; {reuse:.0%} of the sequences follow up")
    outcomes: list[Outcome] = []
    for name, side in sides.items():
        drive(side, reuse=reuse)
        outcomes.append(side.outcome)
        print(f"  {name:22s} {side.outcome.line(outcomes[0])}")
    return outcomes


def main() -> None:
    print(f"{NUM_BLOCKS} blocks of {BLOCK} tokens, {MIB_PER_BLOCK} MiB each, {STEPS} steps")
    for reuse in (0.0, 0.7):
        compare(
            "no prefix caching on either side",
            {
                "exchange": SecondMapping(prefix_caching=False),
                "one way": SecondMapping(prefix_caching=False, exchange=False),
                "this library": Ours(prefix_caching=False),
            },
            reuse=reuse,
        )
    for reuse in (0.0, 0.7):
        _, kept, evicted = compare(
            "prefix caching on both sides",
            {
                "exchange": SecondMapping(prefix_caching=True),
                "this library": Ours(prefix_caching=True),
                "this, keep_from=2": Ours(prefix_caching=True, keep_from=2.0),
            },
            reuse=reuse,
        )
        extra_copies = kept.copies - evicted.copies
        if extra_copies:
            saved = evicted.computed_tokens - kept.computed_tokens
            print(f"  each additional copy saves {saved / extra_copies:.0f} tokens of prefill")


if __name__ == "__main__":
    main()
