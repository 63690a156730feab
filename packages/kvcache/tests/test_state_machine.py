"""All operations in random order, checked against a dictionary of each sequence's tokens.

The tensors are written and read. The vector at a position is a hash of all tokens up to it, so a
block that is shared, moved or swapped wrongly has wrong values.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

torch = pytest.importorskip("torch")

from trencadis.kvcache import (
    NO_OWNER,
    AllocStatus,
    BandwidthGovernor,
    BlockManager,
    BlockPool,
    CacheConfig,
    CopyPlan,
    DecodeLayout,
    DefragConfig,
    Defragmenter,
    Direction,
    InvalidSetting,
    NotComputed,
    NotResident,
    NotSwapped,
    OutOfBlocks,
    OutOfHostBlocks,
    RequestHasher,
    UnknownSequence,
    ceil_div,
    lay_out,
)
from trencadis.kvcache.config import PADDING_BLOCK
from trencadis.kvcache.prefix_cache import blake2b_digest
from trencadis.kvcache.sequences import PASSED
from trencadis.kvcache.tensors import KVCache, LayerShape

SIZE = 4
LAYERS = 2


def colliding_digest(parent: bytes, content: bytes) -> bytes:
    """Only two digests: nearly every lookup returns a wrong candidate."""
    return bytes([(sum(parent) + sum(content)) % 2])


def fingerprints(tokens: list[int], tenant: str) -> torch.Tensor:
    """One number per position that depends on every token up to it."""
    state, values = hash(tenant) % 997, []
    for token in tokens:
        state = (state * 31 + token + 1) % (1 << 40)
        values.append(float(state))
    return torch.tensor(values, dtype=torch.float64)


@attrs.define
class Model:
    """The expected state of a sequence."""

    tokens: list[int]
    tenant: str
    computed: int = 0
    on_host: bool = False


PROMPTS = st.builds(
    lambda theme, length, tail: ([theme] * length + tail)[:18] or [theme],
    st.integers(0, 1),
    st.integers(0, 18),
    st.lists(st.integers(0, 1), max_size=4),
)
"""Prompts of up to 18 tokens that often have a common prefix."""

WINDOWS = st.lists(st.sampled_from([None, None, 1, 2, 4, 5, 7, 11]), min_size=1, max_size=3).map(
    lambda windows: tuple(sorted(windows, key=lambda window: -(window or 99)))
)
"""Those of one to three block groups."""


class CacheMachine(RuleBasedStateMachine):
    manager: BlockManager
    cache: KVCache

    @initialize(
        num_blocks=st.integers(5, 24),
        num_host_blocks=st.integers(0, 16),
        buckets=st.sampled_from([(), (4, 8, 16), (2, 3, 5, 6, 9)]),
        watermark=st.sampled_from([0.0, 0.01, 0.2]),
        caching=st.booleans(),
        digest=st.sampled_from([blake2b_digest, colliding_digest]),
        governed=st.booleans(),
        threshold=st.integers(0, 2),
        keep_from=st.sampled_from([0.0, 0.05, 2.0]),
        windows=WINDOWS,
        tokens_ahead=st.sampled_from([None, 1, 3, 4, 9]),
        shared_within=st.sampled_from([0, 2, 4, 7]),
    )
    def start(
        self,
        num_blocks: int,
        num_host_blocks: int,
        buckets: tuple[int, ...],
        watermark: float,
        caching: bool,
        digest: Any,
        governed: bool,
        threshold: int,
        keep_from: float,
        windows: tuple[int | None, ...],
        tokens_ahead: int | None,
        shared_within: int,
    ) -> None:
        config = CacheConfig(
            num_blocks=num_blocks,
            block_size=SIZE,
            watermark=watermark,
            num_host_blocks=num_host_blocks,
            enable_prefix_caching=caching,
            decode_buckets=buckets,
            windows=windows,
            tokens_ahead=tokens_ahead,
        )
        governor = BandwidthGovernor(bytes_per_block=10, bytes_per_s=10, window_s=2)
        self.manager = BlockManager(
            config, hasher=RequestHasher(SIZE, digest), governor=governor if governed else None
        )
        self.defragmenter = Defragmenter(
            self.manager,
            DefragConfig(threshold=threshold, keep_from=keep_from),
            shared_within=shared_within,
        )
        self.shared_within = shared_within
        self.cache = KVCache(
            layers=[LayerShape(1, 1, 1)] * LAYERS,
            num_blocks=num_blocks,
            block_size=SIZE,
            dtype=torch.float64,
            num_host_blocks=num_host_blocks,
        )
        self.model: dict[int, Model] = {}
        self.next_id = 1
        self.now = 0.0
        self.generation = 0
        self.plan = CopyPlan()

    # ---- rules ----

    @rule(
        prompt=PROMPTS,
        tenant=st.sampled_from(["a", "a", "a", "b"]),
        hashed=st.booleans(),
    )
    def allocate(self, prompt: list[int], tenant: str, hashed: bool) -> None:
        extra: dict[str, Any] = {"extra_keys": (tenant,)}
        if hashed:
            extra = {"prefix_keys": self.manager.hasher(prompt, (tenant,))}
        verdict = self.manager.can_allocate(prompt, **extra)
        seq_id, self.next_id = self.next_id, self.next_id + 1
        if verdict is not AllocStatus.OK:
            if self.manager.config.num_blocks_for(len(prompt)) > self.pool.num_usable_blocks:
                assert verdict is AllocStatus.NEVER
            else:
                assert verdict is AllocStatus.LATER
                assert self.pool.num_used_blocks > 0
            return
        cached = self.manager.allocate(seq_id, prompt, **extra)
        assert 0 <= cached < len(prompt)
        assert cached % SIZE == 0
        assert cached == 0 or self.manager.config.enable_prefix_caching
        self.model[seq_id] = Model(list(prompt), f"{tenant}{self.generation}", computed=cached)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), share=st.sampled_from([0.3, 0.6, 1.0]))
    def prefill(self, data: st.DataObject, share: float) -> None:
        seq_id, model = self.pick(data)
        todo = len(model.tokens) - model.computed
        if self.manager.is_resident(seq_id) and todo:
            self.compute_in_steps(seq_id, model.computed + max(1, round(share * todo)))

    @precondition(lambda self: self.model)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=6))
    def decode(self, data: st.DataObject, tokens: list[int]) -> None:
        seq_id, model = self.pick(data)
        if not self.manager.is_resident(seq_id):
            return
        if not self.compute_in_steps(seq_id, len(model.tokens)):
            return
        needed = self.manager.blocks_to_append(seq_id, len(tokens))
        free = self.pool.num_free_blocks
        if needed > free:
            with pytest.raises(OutOfBlocks):
                self.manager.append(seq_id, tokens)
            assert self.manager.num_tokens(seq_id) == len(model.tokens)
            return
        self.plan.add(Direction.WITHIN, self.manager.append(seq_id, tokens))
        assert self.pool.num_free_blocks == free - needed
        model.tokens += tokens

    @precondition(lambda self: self.model)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append_before_the_token_is_known(self, data: st.DataObject, token: int) -> None:
        seq_id, model = self.pick(data)
        if not self.manager.is_resident(seq_id):
            return
        if not self.compute_in_steps(seq_id, len(model.tokens)):
            return
        if self.manager.blocks_to_append(seq_id) > self.pool.num_free_blocks:
            return
        self.plan.add(Direction.WITHIN, self.manager.append(seq_id, [-1]))
        self.manager.set_last_token(seq_id, token)
        model.tokens.append(token)
        self.compute(seq_id, len(model.tokens))
        with pytest.raises(InvalidSetting, match="is marked as computed"):
            self.manager.set_last_token(seq_id, token)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), share=st.floats(0, 1))
    def truncate(self, data: st.DataObject, share: float) -> None:
        seq_id, model = self.pick(data)
        if not self.manager.is_resident(seq_id):
            return
        num_tokens = max(1, round(share * len(model.tokens)))
        if any(
            self.first_seen(num_tokens, group) // SIZE < self.num_passed(seq_id, group)
            for group in self.groups
        ):
            with pytest.raises(InvalidSetting, match="was given back"):
                self.manager.truncate(seq_id, num_tokens)
            return
        self.manager.truncate(seq_id, num_tokens)
        del model.tokens[num_tokens:]
        model.computed = min(model.computed, num_tokens)
        for group in self.groups:
            assert len(self.manager.block_table(seq_id, group)) <= ceil_div(num_tokens, SIZE)
        with pytest.raises(InvalidSetting, match="append adds slots"):
            self.manager.truncate(seq_id, num_tokens + 1)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        seq_id, model = self.pick(data)
        if not self.manager.is_resident(seq_id):
            return
        child, self.next_id = self.next_id, self.next_id + 1
        if model.computed < len(model.tokens):
            with pytest.raises(NotComputed):
                self.manager.fork(seq_id, child)
            if not self.compute_in_steps(seq_id, len(model.tokens)):
                return
        self.manager.fork(seq_id, child)
        self.model[child] = attrs.evolve(model, tokens=list(model.tokens))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq_id, _ = self.pick(data)
        self.manager.free(seq_id)
        del self.model[seq_id]
        with pytest.raises(UnknownSequence):
            self.manager.free(seq_id)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        group = self.pick_group(data, self.manager.is_resident)
        if not group:
            return
        fits = self.manager.can_swap_out(group)
        if not fits:
            with pytest.raises(OutOfHostBlocks):
                self.manager.swap_out(group, self.now)
            return
        self.plan.add(Direction.OUT, self.manager.swap_out(group, self.now))
        for seq_id in group:
            self.model[seq_id].on_host = True
            with pytest.raises(NotResident):
                self.manager.append(seq_id, [0])

    @precondition(lambda self: any(model.on_host for model in self.model.values()))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        group = self.pick_group(data, lambda seq_id: self.model[seq_id].on_host)
        if not group:
            return
        if not self.manager.can_swap_in(group):
            return
        self.plan.add(Direction.IN, self.manager.swap_in(group, self.now))
        for seq_id in group:
            self.model[seq_id].on_host = False
            with pytest.raises(NotSwapped):
                self.manager.swap_in([seq_id], self.now)

    @rule(seconds=st.floats(0, 3))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        due = self.manager.resume_swaps(self.now)
        self.plan.add(Direction.OUT, due.out)
        self.plan.add(Direction.IN, due.in_)

    @rule()
    def defragment(self) -> None:
        used = self.pool.num_used_blocks
        for _ in range(10):
            before, is_due = self.pool.highest_used_block, self.defragmenter.is_due()
            plan = self.defragmenter.defragment()
            assert (plan is not None) == is_due
            if plan is None:
                break
            self.plan.add(Direction.WITHIN, plan.padded_copies)
            assert self.pool.num_used_blocks == used
            assert self.pool.highest_used_block == plan.highest_after
            if not self.shared_within:
                assert before - self.defragmenter.config.threshold > used
                assert plan.highest_after == used
        else:
            raise AssertionError("it comes to no end")
        self.check_places_of_shared_blocks()

    def check_places_of_shared_blocks(self) -> None:
        """None beyond the first has twice as many sequences as one that has a place there."""
        tables = self.all_tables()
        holders = Counter(block for table in tables for block in set(table) - {0})
        beyond = [n for block, n in holders.items() if n > 1 and block >= self.shared_within]
        if self.shared_within and beyond:
            places = range(1, min(self.shared_within, self.manager.config.num_blocks))
            assert all(max(beyond) < 2 * max(1, holders[place]) for place in places)

    @rule(chance=st.integers(0, 9))
    def reset_prefix_cache(self, chance: int) -> None:
        if chance != 7:
            return
        self.manager.reset_prefix_cache()
        assert self.pool.num_cached_blocks == 0
        self.generation += 1

    @rule()
    def flush(self) -> None:
        self.cache.carry_out(self.plan)
        self.plan = CopyPlan()

    # ---- invariants ----

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        if not hasattr(self, "manager"):
            return
        pool, host_pool = self.pool, self.manager.host_pool
        swapper = self.manager._swapper
        refs = Counter(
            block for table in self.all_tables() for block in table if block != PADDING_BLOCK
        )
        refs.update(transfer.device_block for transfer in swapper.outgoing)
        for block in range(1, pool.num_blocks):
            assert pool.ref_count(block) == refs[block]
        assert pool.num_used_blocks == len(refs)
        assert pool.num_free_blocks == pool.num_blocks - 1 - len(refs)
        assert pool.highest_used_block == max(refs, default=0)
        hosts = Counter(
            host
            for seq_id in self.model
            for group in self.manager._sequences[seq_id].groups
            for host in group.host_block_table or ()
            if host != PASSED
        )
        hosts.update(transfer.host_block for transfer in swapper.incoming)
        assert all(host_pool.ref_count(host) == hosts[host] for host in range(host_pool.num_blocks))
        assert host_pool.num_free_blocks == self.manager.config.num_host_blocks - len(hosts)

    @invariant()
    def contents_are_right(self) -> None:
        if not hasattr(self, "manager") or self.plan:
            return
        for part in (self.cache.key, self.cache.value):
            assert not any(part(layer)[0].any() for layer in range(LAYERS)), "padding was written"
        for seq_id, model in self.model.items():
            assert self.manager.num_tokens(seq_id) == len(model.tokens)
            assert self.manager._sequences[seq_id].num_computed_tokens == model.computed
            if self.manager.is_resident(seq_id):
                self.check_contents(seq_id, model)

    @invariant()
    def layout_covers_the_batch(self) -> None:
        if not hasattr(self, "manager"):
            return
        resident = [seq_id for seq_id in self.model if self.manager.is_resident(seq_id)]
        for group in self.groups:
            batch = [seq_id for seq_id in resident if self.has_all_blocks(seq_id, group)]
            tables = [self.manager.block_table(seq_id, group) for seq_id in batch]
            num_tokens = [self.manager.num_tokens(seq_id) for seq_id in batch]
            highest = max((int(block) for table in tables for block in table), default=0)
            for num_shared in (0, highest // 2, highest + 1):
                layout = lay_out(tables, num_tokens, SIZE, None, num_shared)
                self.check_layout(batch, group, layout)

    @invariant()
    def no_more_blocks_are_held_than_a_window_needs(self) -> None:
        if not hasattr(self, "manager"):
            return
        for group, most in enumerate(self.manager.config.most_window_blocks):
            for seq_id in self.model:
                table = self.manager.block_table(seq_id, group)
                assert most is None or np.count_nonzero(table) <= most

    def check_layout(self, batch: list[int], group: int, layout: DecodeLayout) -> None:
        pairs = [
            (block, row, used)
            for block, (row, used) in enumerate(zip(layout.owner, layout.used, strict=True))
            if row != NO_OWNER
        ]
        pairs += zip(layout.extra_block, layout.extra_owner, layout.extra_used, strict=True)
        pairs += [
            (block, row, layout.shared_used[row, block])
            for row, block in np.argwhere(layout.shared_used)
        ]
        expected = [
            (block, row, min(SIZE, self.manager.num_tokens(seq_id) - position * SIZE))
            for row, seq_id in enumerate(batch)
            for position, block in enumerate(self.manager.block_table(seq_id, group))
            if block != PADDING_BLOCK
        ]
        assert sorted(pairs) == sorted(expected)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for seq_id in self.model:
            self.manager.free(seq_id)
        assert self.pool.num_free_blocks == self.pool.num_usable_blocks
        assert self.manager.host_pool.num_free_blocks == self.manager.config.num_host_blocks
        assert self.pool.highest_used_block == 0

    # ---- helpers ----

    def pick(self, data: st.DataObject) -> tuple[int, Model]:
        seq_id = data.draw(st.sampled_from(sorted(self.model)))
        return seq_id, self.model[seq_id]

    def pick_group(self, data: st.DataObject, suits: Any) -> list[int]:
        candidates = [seq_id for seq_id in sorted(self.model) if suits(seq_id)]
        if not candidates:
            return []
        return data.draw(st.lists(st.sampled_from(candidates), unique=True, min_size=1))

    @property
    def pool(self) -> BlockPool:
        return self.manager.pool

    @property
    def groups(self) -> range:
        return range(len(self.manager.config.windows))

    def all_tables(self) -> list[list[int]]:
        return [
            self.manager.block_table(seq_id, group).tolist()
            for seq_id in self.model
            for group in self.groups
        ]

    def has_all_blocks(self, seq_id: int, group: int) -> bool:
        """Whether all tokens have blocks, which `append` gives them in part."""
        num_blocks = ceil_div(self.manager.num_tokens(seq_id), SIZE)
        return len(self.manager.block_table(seq_id, group)) == num_blocks

    def compute_in_steps(self, seq_id: int, end: int) -> bool:
        """Compute the slots up to ``end``, as many at once as have blocks. False: blocks lack."""
        model, ahead = self.model[seq_id], self.manager.config.tokens_ahead
        while model.computed < end:
            if self.manager.blocks_to_append(seq_id, 0) > self.pool.num_free_blocks:
                with pytest.raises(OutOfBlocks):
                    self.manager.append(seq_id, [])
                return False
            assert not self.manager.append(seq_id, []), "without tokens nothing is written"
            self.compute(seq_id, end if ahead is None else min(end, model.computed + ahead))
        return True

    def compute(self, seq_id: int, end: int) -> None:
        """A forward pass that computes the slots up to ``end``. Each group has its own values."""
        self.flush()
        model = self.model[seq_id]
        values = fingerprints(model.tokens, model.tenant)
        for group in self.groups:
            table = self.manager.block_table(seq_id, group)
            for position in range(model.computed, end):
                block, slot = int(table[position // SIZE]), position % SIZE
                assert self.pool.ref_count(block) == 1, "a shared block is written"
                for layer in range(LAYERS):
                    value = values[position] + layer + group / 8
                    self.cache.key(layer)[block, 0, slot, 0] = value
                    self.cache.value(layer)[block, 0, slot, 0] = -value
        self.manager.mark_computed(seq_id, end)
        model.computed = end

    def first_seen(self, num_computed: int, group: int) -> int:
        """The first position that a token after so many sees."""
        window = self.manager.config.windows[group]
        return 0 if window is None else max(0, num_computed - window + 1)

    def num_passed(self, seq_id: int, group: int) -> int:
        """The blocks of a sequence on the device that were given back."""
        table = self.manager.block_table(seq_id, group).tolist()
        count = table.count(PADDING_BLOCK)
        assert not any(table[:count])
        return count

    def check_contents(self, seq_id: int, model: Model) -> None:
        """All that is seen is there, and nothing else is held."""
        for group in self.groups:
            table = torch.tensor(self.manager.block_table(seq_id, group).tolist())
            seen = slice(self.first_seen(model.computed, group), model.computed)
            assert self.num_passed(seq_id, group) == seen.start // SIZE
            expected = fingerprints(model.tokens, model.tenant)[seen] + group / 8
            for layer in range(LAYERS):
                keys = self.cache.key(layer)[table].flatten()[seen]
                values = self.cache.value(layer)[table].flatten()[seen]
                assert torch.equal(keys, expected + layer)
                assert torch.equal(values, -expected - layer)


def run_machine(examples: int, steps: int) -> None:
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_cache_agrees_with_a_dictionary() -> None:
    run_machine(examples=int(os.environ.get("KV_EXAMPLES", "60")), steps=60)


@pytest.mark.soak
def test_cache_agrees_with_a_dictionary_for_long() -> None:
    run_machine(examples=1000, steps=150)
