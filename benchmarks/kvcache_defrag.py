"""Bytes that a defragmentation moves: this library, next to a defragmenter with a second mapping.

    PYTHONPATH=packages/kvcache/src python benchmarks/kvcache_defrag.py

Both get the same traffic. The baseline follows the rule of the Gaudi plugin for vLLM
(vllm_gaudi/extension/defragmentation.py). It allocates blocks in the order in which they became
free, and keeps a second mapping from the pool's ids to physical ids. When the highest physical
block in use is more than 32 above the number of blocks in use, it exchanges the highest used blocks
with the lowest free blocks, at most 512 at a time.

The first releases of the plugin exchanged the content of both blocks, with a copy each way. Later
releases copy one way where prefix caching is off. They read the cache contiguously, and so
defragment, only where prefix caching is off, unless the user forces both. So the tables without
prefix caching compare equal conditions. With prefix caching, moving cached content costs each side
a second copy, which saves the prompt tokens that need not be computed again.

"down" counts the used blocks that got a lower id. Padding to compiled sizes is not counted.
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
"""Of an 8-billion-parameter model in bfloat16 (seed 000: 131,072 bytes per token)."""


@attrs.define
class Outcome:
    """The counts of one side. ``highest`` is the sum of the highest block in use over the steps."""

    copies: int = 0
    brought_down: int = 0
    highest: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0

    def add_plan(self, copies: int, brought_down: int) -> None:
        self.copies += copies
        self.brought_down += brought_down

    def add_prompt(self, tokens: int, cached: int) -> None:
        self.prompt_tokens += tokens
        self.computed_tokens += tokens - cached

    @property
    def mib_per_block(self) -> float:
        """MiB moved for each block brought down."""
        return MIB_PER_BLOCK * self.copies / self.brought_down

    def line(self, base: Outcome) -> str:
        """The outcome as a line, with ratios to the baseline."""
        return (
            f"{self.brought_down:6d} down {self.copies:6d} copies"
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
        self.outcome.highest += self.manager.highest_in_use


class SecondMapping:
    """Blocks allocated in the order they were freed, and a second mapping to physical blocks."""

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
    """Run `STEPS` steps of one token per running sequence; ``reuse`` is the share that returns."""
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
    """Drive every side with the same traffic; the first side is the baseline."""
    print(f"\n{title}; {reuse:.0%} of the sequences return")
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
