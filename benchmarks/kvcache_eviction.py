"""AllocStatus order: keep cached prefixes, or keep the decode step short?

    PYTHONPATH=packages/kvcache/src python benchmarks/kvcache_eviction.py

Users with a shared system prompt send a request, and a follow-up request in 70 % or 0 % of the
cases. The load alternates between high and low. The same traffic is replayed with two allocation
policies, which differ only in ``decode_buckets``:

- spill: allocate an empty block beyond the decode bucket before evicting a cached block;
- bucket: evict a cached block inside the decode bucket before allocating a block beyond it.

Each policy runs without a defragmenter, and with a defragmenter that keeps cached content by the
measured reuse rate (the default), keeps all of it, or keeps none.

Costs are those of an 8-billion-parameter model in bfloat16 with 128-token blocks: a computed
prompt token is 2 * 8e9 operations at 400e12 per second; a block that a decode step reads is 16
MiB at 2.45e12 bytes per second; a copied block is read and written. A decode step always reads up
to the end of its bucket.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque

import attrs

from trencadis.kvcache import AllocStatus, BlockManager, CacheConfig, DefragConfig, Defragmenter

BLOCK = 128
NUM_BLOCKS = 1519
STEPS = 3000
VOCABULARY = 32000
PROMPT_TOKEN_S = 2 * 8e9 / 400e12
BLOCK_READ_S = 16 * 2**20 / 2.45e12
BLOCK_COPY_S = 2 * BLOCK_READ_S
DEFRAGMENTERS = {
    "no defragmenter": DefragConfig(threshold=NUM_BLOCKS),
    "default": DefragConfig(),
    "keep all": DefragConfig(keep_from=0.0),
    "keep none": DefragConfig(keep_from=2.0),
}


@attrs.define
class Conversation:
    """A user who sends a request, reads the answer and may send a follow-up request."""

    seq_id: int
    rng: random.Random
    history: list[int]
    left: int = 0

    def ask(self) -> None:
        self.history += self.tokens(self.rng.randint(20, 400))
        self.left = self.rng.randint(30, 300)

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(VOCABULARY) for _ in range(count)]


@attrs.define
class Outcome:
    prompt_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    decode_steps: int = 0
    blocks_read: int = 0
    copies: int = 0

    @property
    def seconds(self) -> float:
        return (
            self.computed_tokens * PROMPT_TOKEN_S
            + self.blocks_read * BLOCK_READ_S
            + self.copies * BLOCK_COPY_S
        )


class Replay:
    """The traffic of a number of users on one block manager."""

    def __init__(
        self,
        real: tuple[int, ...],
        policy: tuple[int, ...],
        defrag: DefragConfig,
        returning: float,
    ) -> None:
        config = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK, decode_buckets=policy)
        self.manager = BlockManager(config)
        self.defragmenter = Defragmenter(self.manager, defrag)
        self.real = real
        self.returning = returning
        self.outcome = Outcome()
        self.waiting: deque[Conversation] = deque()
        self.thinking: list[tuple[int, Conversation]] = []
        self.running: list[Conversation] = []
        rng = random.Random(1)
        self.systems = [
            [rng.randrange(VOCABULARY) for _ in range(length)] for length in (256, 512, 512, 1024)
        ]
        self.started = 0

    def run(self, load: int) -> Outcome:
        for step in range(STEPS):
            users = load if (step // 1000) % 2 == 0 else max(2, load // 8)
            self.admit(step, users)
            self.grow()
            self.compute(step)
        return self.outcome

    def admit(self, step: int, users: int) -> None:
        self.waiting += [user for due, user in self.thinking if due <= step]
        self.thinking = [(due, user) for due, user in self.thinking if due > step]
        while len(self.running) + len(self.waiting) < users:
            self.started += 1
            rng = random.Random(self.started)
            user = Conversation(self.started, rng, list(rng.choice(self.systems)))
            user.ask()
            self.waiting.append(user)
        while self.waiting and len(self.running) < users:
            user = self.waiting[0]
            if self.manager.can_allocate(user.history) is not AllocStatus.OK:
                break
            self.running.append(self.waiting.popleft())
            cached = self.manager.allocate(user.seq_id, user.history)
            self.outcome.prompt_tokens += len(user.history)
            self.outcome.computed_tokens += len(user.history) - cached

    def grow(self) -> None:
        for user in list(self.running):
            if self.manager.blocks_to_append(user.seq_id) > self.manager.pool.num_free_blocks:
                self.leave(user)
                self.waiting.appendleft(user)
                continue
            token = user.tokens(1)
            self.manager.append(user.seq_id, token)
            user.history += token
            user.left -= 1
        plan = self.defragmenter.defragment()
        self.outcome.copies += len(plan.copies) if plan else 0

    def compute(self, step: int) -> None:
        if self.running:
            bucket = bisect_left(self.real, self.manager.pool.highest_used_block + 1)
            self.outcome.decode_steps += 1
            self.outcome.blocks_read += self.real[bucket]
        for user in list(self.running):
            self.manager.mark_computed(user.seq_id, len(user.history))
            self.outcome.output_tokens += 1
            if user.left <= 0:
                self.leave(user)
                if user.rng.random() < self.returning and len(user.history) < 4096:
                    user.ask()
                    self.thinking.append((step + user.rng.randint(10, 600), user))

    def leave(self, user: Conversation) -> None:
        self.manager.free(user.seq_id)
        self.running.remove(user)


def main() -> None:
    buckets = (*range(128, NUM_BLOCKS, 128), NUM_BLOCKS)
    print(f"{NUM_BLOCKS} blocks of {BLOCK} tokens, decode buckets every 128, {STEPS} steps")
    for returning in (0.7, 0.0):
        for load in (16, 64, 128):
            print(f"\n{returning:.0%} follow up, {load} users")
            for name, defrag in DEFRAGMENTERS.items():
                for policy, bounds in {"spill": (), "bucket": buckets}.items():
                    result = Replay(buckets, bounds, defrag, returning).run(load)
                    print(
                        f"  {name:16s} {policy:7s}"
                        f"  hits {1 - result.computed_tokens / result.prompt_tokens:5.1%}"
                        f"  read {result.blocks_read / result.decode_steps:6.1f} blocks/step"
                        f"  copies {result.copies:5d}"
                        f"  cost {1e6 * result.seconds / result.output_tokens:6.1f} us/token"
                    )


if __name__ == "__main__":
    main()
