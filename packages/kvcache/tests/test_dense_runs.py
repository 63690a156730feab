"""Thousands of short random runs of a step loop with tiny caches, whose contents are checked.

A run has a cache of few small blocks, several tenants and samples, and a device that takes copies
at once or in padded plans. Each step does something to a random sequence: prefill, decode, fork,
swap, free at any point, defragment, reset. The value of a slot is a number that depends on all
tokens up to it and on the tenant. After every executed plan each sequence reads its own numbers.

A failure names the seed; `run` with it repeats the run.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import pytest

from trencadis.kvcache import (
    PLAN_SIZES,
    AllocStatus,
    BandwidthGovernor,
    BlockCopy,
    BlockManager,
    CacheConfig,
    CopyPlan,
    DefragConfig,
    Defragmenter,
    Direction,
    KVCacheError,
    RequestHasher,
    copy_plan,
    defrag,
    split_to_plan_sizes,
)
from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.prefix_cache import blake2b_digest

NUM_RUNS = 400
NUM_SOAK_RUNS = 20_000

TENANTS: tuple[tuple[Any, ...], ...] = ((), ("a", 1), ("a", True))


class ListMemory:
    """The cache as lists: a number for each slot."""

    def __init__(self, config: CacheConfig) -> None:
        self.device = [[0] * config.block_size for _ in range(config.num_blocks)]
        self.host = [[0] * config.block_size for _ in range(config.num_host_blocks)]

    def carry_out(self, direction: Direction, copies: Sequence[BlockCopy]) -> None:
        source = self.host if direction is Direction.IN else self.device
        target = self.host if direction is Direction.OUT else self.device
        contents = [(dst, list(source[src])) for src, dst in copies]
        for dst, content in contents:
            target[dst] = content

    def write(self, block: int, slot: int, number: int) -> None:
        self.device[block][slot] = number

    def read(self) -> list[list[int]]:
        return self.device


class TensorMemory:
    """The cache as the tensors of a `KVCache` of two layers, keys and values."""

    def __init__(self, config: CacheConfig, *, token_rows: bool) -> None:
        torch = pytest.importorskip("torch")
        from trencadis.kvcache.tensors import KVCache, LayerShape

        self.cache = KVCache(
            layers=[LayerShape(1, 1, 1)] * 2,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=torch.float64,
            num_host_blocks=config.num_host_blocks,
            token_rows=token_rows,
        )
        # NumPy arrays on the same memory: single numbers are written and read much faster.
        parts = [self.cache.key(0), self.cache.value(0), self.cache.key(1), self.cache.value(1)]
        shape = (config.num_blocks, config.block_size)
        self.parts = [part.numpy().reshape(shape) for part in parts]  # both layouts, without a copy

    def carry_out(self, direction: Direction, copies: Sequence[BlockCopy]) -> None:
        self.cache.carry_out([(direction, copies)])
        self.cache.wait()

    def write(self, block: int, slot: int, number: int) -> None:
        for index, part in enumerate(self.parts):
            part[block, slot] = number + index

    def read(self) -> list[list[int]]:
        contents: list[list[int]] = self.parts[0].tolist()
        for index, part in enumerate(self.parts):
            assert ((part == self.parts[0] + index) | (part == 0)).all(), "layers differ"
        return contents


Memory = ListMemory | TensorMemory


def colliding_digest(parent: bytes, content: bytes) -> bytes:
    """Only two digests: nearly every lookup returns a wrong candidate."""
    return bytes([(sum(parent) + sum(content)) % 2])


@attrs.define
class Expected:
    """The expected state of a sequence. ``numbers`` has one number for each token."""

    tokens: list[int]
    numbers: list[int]
    tenant: tuple[Any, ...]
    computed: int = 0
    on_host: bool = False

    def append(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self.numbers.append((self.numbers[-1] * 31 + token + 7) % (1 << 40))


class Run:
    """One run: a manager, the memory that its copies are carried out on, and what is expected."""

    def __init__(self, seed: int, make_memory: Callable[[CacheConfig, random.Random], Memory]):
        self.rng = rng = random.Random(seed)
        size = rng.choice((1, 2, 4))
        self.config = CacheConfig(
            num_blocks=rng.randint(3, 20),
            block_size=size,
            watermark=rng.choice((0.0, 0.01, 0.3)),
            num_host_blocks=rng.choice((0, *[rng.randint(1, 16)] * 4)),
            enable_prefix_caching=rng.random() < 0.8,
            decode_buckets=rng.choice(((), (), (2, 4, 8))),
            record_events=True,
        )
        governor = None
        if rng.random() < 0.5:
            governor = BandwidthGovernor(1, 1.0, rng.choice((1.0, 2.0)))
        digest = rng.choice((blake2b_digest, blake2b_digest, colliding_digest))
        self.manager = BlockManager(
            self.config, hasher=RequestHasher(size, digest), governor=governor
        )
        self.defragmenter = Defragmenter(
            self.manager,
            DefragConfig(threshold=rng.randint(0, 2), keep_from=rng.choice((0.0, 0.05, 2.0))),
            shared_within=rng.choice((0, 0, 2, 4, 6)),
        )
        self.theme = rng.randint(0, 1)
        self.tenants = TENANTS[: rng.randint(1, 3)]
        self.padded = rng.random() < 0.5
        self.memory = make_memory(self.config, rng)
        self.told: dict[bytes, BlockKey] = {}
        self.sequences: dict[int, Expected] = {}
        self.plan = CopyPlan()
        self.next_id = -1
        self.num_resets = 0
        self.now = 0.0

    def steps(self, count: int) -> None:
        weights = {
            self.allocate: 8,
            self.prefill: 6,
            self.decode: 6,
            self.fork: 2,
            self.free: 4,
            self.swap_out: 3,
            self.swap_in: 4,
            self.wait: 2,
            self.defragment: 4,
            self.carry_out: 2,
            self.reset: 0.3,
        }
        for action in self.rng.choices(list(weights), list(weights.values()), k=count):
            action()
            self.check_blocks()
            if self.rng.random() < 0.5:
                self.check_events()

    def check_events(self) -> None:
        """What the events have told is what the prefix cache has."""
        events = self.manager.take_events()
        if events.cleared:
            self.told.clear()
        for digest in events.removed:
            del self.told[digest]
        for key in events.stored:
            assert key.digest not in self.told
            self.told[key.digest] = key
        index = self.manager.pool.prefix_index
        cached = [index.key_of(block) for block in range(self.config.num_blocks)]
        held = {key.digest: key for key in cached if key is not None}
        assert self.told.keys() == held.keys()
        assert all(key.same_as(held[digest]) for digest, key in self.told.items())
        assert not self.manager.take_events()

    def end(self) -> None:
        """Free all sequences but one, which must come back; then no block is left in use."""
        last = self.rng.choice([*self.sequences, None])
        for seq_id in self.rng.sample(sorted(self.sequences), len(self.sequences)):
            if seq_id != last:
                self.remove(seq_id)
        self.finish_swaps()
        if last is not None:
            sequence = self.sequences[last]
            if sequence.on_host:
                assert self.manager.can_swap_in([last]), "a sequence alone is never resumed"
                self.bring_back([last])
                self.finish_swaps()
            assert self.manager.is_resident(last)
            self.carry_out()
            self.remove(last)
        pool, host_pool = self.manager.pool, self.manager.host_pool
        assert pool.num_free_blocks == pool.num_usable_blocks
        assert pool.highest_used_block == 0
        assert host_pool.num_free_blocks == host_pool.num_blocks

    # ---- actions ----

    def allocate(self) -> None:
        rng = self.rng
        length = rng.randint(1, 3 * self.config.block_size + 2)
        tokens = [self.theme if rng.random() < 0.95 else rng.randint(0, 2) for _ in range(length)]
        tenant = rng.choice(self.tenants)
        keys: dict[str, Any] = {"extra_keys": tenant}
        if rng.random() < 0.5:
            keys["prefix_keys"] = self.manager.hasher(tokens, tenant)
        if self.manager.can_allocate(tokens, **keys) is not AllocStatus.OK:
            self.free()
            return
        computed = self.manager.allocate(self.next_id, tokens, **keys)
        assert computed < length
        assert computed % self.config.block_size == 0
        sequence = Expected([], [hash((str(tenant), self.num_resets)) % 997], tenant)
        sequence.append(tokens)
        del sequence.numbers[0]
        sequence.computed = computed
        self.sequences[self.next_id] = sequence
        if rng.random() < 0.7:
            self.compute(self.next_id, length)
        self.next_id -= 1

    def prefill(self) -> None:
        seq_id = self.pick(self.manager.is_resident)
        if seq_id is not None:
            sequence = self.sequences[seq_id]
            self.compute(seq_id, self.rng.randint(sequence.computed, len(sequence.tokens)))

    def decode(self) -> None:
        seq_id = self.pick(self.manager.is_resident)
        if seq_id is None:
            return
        sequence = self.sequences[seq_id]
        self.compute(seq_id, len(sequence.tokens))
        tokens = [self.rng.randint(0, 2) for _ in range(self.rng.choice((1, 1, 1, 2, 5)))]
        if self.manager.blocks_to_append(seq_id, len(tokens)) > self.manager.pool.num_free_blocks:
            self.refused(lambda: self.manager.append(seq_id, tokens))
            return
        self.plan.add(Direction.WITHIN, self.manager.append(seq_id, tokens))
        sequence.append(tokens)

    def fork(self) -> None:
        seq_id = self.pick(self.manager.is_resident)
        if seq_id is None:
            return
        sequence = self.sequences[seq_id]
        if sequence.computed < len(sequence.tokens):
            self.refused(lambda: self.manager.fork(seq_id, self.next_id))
            self.compute(seq_id, len(sequence.tokens))
        for _ in range(self.rng.choice((1, 1, 2))):
            self.manager.fork(seq_id, self.next_id)
            self.sequences[self.next_id] = attrs.evolve(
                sequence, tokens=list(sequence.tokens), numbers=list(sequence.numbers)
            )
            self.next_id -= 1

    def free(self) -> None:
        seq_id = self.pick(lambda _: True)
        if seq_id is not None:
            self.remove(seq_id)

    def swap_out(self) -> None:
        group = self.pick_group(self.manager.is_resident)
        if not group:
            return
        if not self.manager.can_swap_out(group):
            self.refused(lambda: self.manager.swap_out(group, self.now))
            return
        self.plan.add(Direction.OUT, self.manager.swap_out(group, self.now))
        for seq_id in group:
            self.sequences[seq_id].on_host = True

    def swap_in(self) -> None:
        group = self.pick_group(lambda seq_id: self.sequences[seq_id].on_host)
        if group and self.manager.can_swap_in(group):
            self.bring_back(group)

    def wait(self) -> None:
        self.now += self.rng.choice((0.0, 0.5, 1.0, 3.0))
        due = self.manager.resume_swaps(self.now)
        self.plan.add(Direction.OUT, due.out)
        self.plan.add(Direction.IN, due.in_)

    def defragment(self) -> None:
        num_plans = 0
        while (plan := self.defragmenter.defragment()) is not None:
            num_plans += 1
            assert num_plans < 20, "it comes to no end"
            copies = plan.padded_copies if self.padded else plan.copies
            self.plan.add(Direction.WITHIN, copies)

    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        self.num_resets += 1

    def carry_out(self) -> None:
        for direction, copies in self.plan:
            for part in split_to_plan_sizes(copies) if self.padded else [copies]:
                self.memory.carry_out(direction, part)
        self.plan = CopyPlan()
        self.check_contents()

    # ---- helpers ----

    def bring_back(self, group: list[int]) -> None:
        self.plan.add(Direction.IN, self.manager.swap_in(group, self.now))
        for seq_id in group:
            self.sequences[seq_id].on_host = False

    def finish_swaps(self) -> None:
        """Wait until every transfer is complete, at one block per second."""
        for _ in range(self.config.num_host_blocks + 1):
            self.now += 1.0
            self.wait()

    def remove(self, seq_id: int) -> None:
        self.manager.free(seq_id)
        del self.sequences[seq_id]

    def refused(self, call: Callable[[], object]) -> None:
        free = self.manager.pool.num_free_blocks
        with pytest.raises(KVCacheError):
            call()
        assert self.manager.pool.num_free_blocks == free

    def compute(self, seq_id: int, end: int) -> None:
        """A forward pass that computes the slots up to ``end``."""
        self.carry_out()
        sequence, size = self.sequences[seq_id], self.config.block_size
        table = self.manager.block_table(seq_id).tolist()
        for position in range(sequence.computed, end):
            block = table[position // size]
            assert self.manager.pool.ref_count(block) == 1, "a shared block is written"
            self.memory.write(block, position % size, sequence.numbers[position])
        self.manager.mark_computed(seq_id, end)
        sequence.computed = end

    def pick(self, suits: Callable[[int], bool]) -> int | None:
        candidates = [seq_id for seq_id in self.sequences if suits(seq_id)]
        return self.rng.choice(candidates) if candidates else None

    def pick_group(self, suits: Callable[[int], bool]) -> list[int]:
        candidates = [seq_id for seq_id in self.sequences if suits(seq_id)]
        return self.rng.sample(candidates, self.rng.randint(0, min(3, len(candidates))))

    # ---- checks ----

    def check_contents(self) -> None:
        contents, size = self.memory.read(), self.config.block_size
        assert not any(contents[0]), "the padding block was written"
        for seq_id, sequence in self.sequences.items():
            if self.manager.is_resident(seq_id):
                table = self.manager.block_table(seq_id).tolist()
                found = [number for block in table for number in contents[block]]
                assert found[: sequence.computed] == sequence.numbers[: sequence.computed], (
                    f"sequence {seq_id} reads other tokens"
                )
                assert len(table) == -(-len(sequence.tokens) // size)

    def check_blocks(self) -> None:
        pool, host_pool = self.manager.pool, self.manager.host_pool
        swapper = self.manager._swapper
        used = Counter(
            block
            for seq_id in self.sequences
            for block in self.manager.block_table(seq_id).tolist()
        )
        used.update(transfer.device_block for transfer in swapper.outgoing)
        assert [pool.ref_count(block) for block in range(1, pool.num_blocks)] == [
            used[block] for block in range(1, pool.num_blocks)
        ]
        assert pool.num_free_blocks == pool.num_usable_blocks - len(used)
        assert pool.highest_used_block == max(used, default=0)
        hosts = Counter(
            block
            for seq_id in self.sequences
            for block in self.manager._sequences[seq_id].host_block_table or ()
        )
        hosts.update(transfer.host_block for transfer in swapper.incoming)
        assert [host_pool.ref_count(block) for block in range(host_pool.num_blocks)] == [
            hosts[block] for block in range(host_pool.num_blocks)
        ]
        assert host_pool.num_free_blocks == host_pool.num_blocks - len(hosts)


def lists(config: CacheConfig, rng: random.Random) -> Memory:
    return ListMemory(config)


def tensors(config: CacheConfig, rng: random.Random) -> Memory:
    return TensorMemory(config, token_rows=rng.random() < 0.5)


@contextmanager
def plan_sizes(sizes: tuple[int, ...]) -> Iterator[None]:
    """Other plan sizes than 8 to 512, so that the batches of tiny runs fill and split plans."""
    copy_plan.PLAN_SIZES = defrag.PLAN_SIZES = sizes
    try:
        yield
    finally:
        copy_plan.PLAN_SIZES = defrag.PLAN_SIZES = PLAN_SIZES


def run(seed: int, make_memory: Callable[[CacheConfig, random.Random], Memory]) -> None:
    try:
        with plan_sizes(random.Random(seed).choice((PLAN_SIZES, (2,), (1, 2, 4), (3, 5)))):
            dense = Run(seed, make_memory)
            dense.steps(dense.rng.randint(5, 120))
            dense.end()
    except Exception as error:
        raise AssertionError(f"the run with seed {seed} failed: {error}") from error


def run_all(count: int, make_memory: Callable[[CacheConfig, random.Random], Memory]) -> None:
    for seed in range(count):
        run(seed, make_memory)


@pytest.mark.parametrize("make_memory", [lists, tensors])
def test_every_sequence_reads_its_own_tokens(make_memory: Any) -> None:
    run_all(NUM_RUNS, make_memory)


@pytest.mark.soak
@pytest.mark.parametrize("make_memory", [lists, tensors])
def test_every_sequence_reads_its_own_tokens_in_20_000_runs(make_memory: Any) -> None:
    run_all(NUM_SOAK_RUNS, make_memory)
