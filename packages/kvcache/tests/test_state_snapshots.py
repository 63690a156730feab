"""Snapshots of states: a prefix hit begins with the state of its tokens, and is as long as can be.

All operations in random order, against a plain model: what each state has taken in, and a list of
the prefixes whose states are kept.
"""

from __future__ import annotations

import copy

import attrs
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
    AllocStatus,
    BlockCopy,
    BlockManager,
    CacheConfig,
    CannotCopy,
    CopyPlan,
    Direction,
    InvalidSetting,
    RequestHasher,
    StateSlots,
    StateSnapshots,
)
from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.prefix_cache import blake2b_digest
from trencadis.kvcache.state_cache import StateCache, StateKey, StateShape

SIZE = 2
SUMS = StateKey("recurrent", 0)


def colliding_digest(parent: bytes, content: bytes) -> bytes:
    """Only two digests: nearly every lookup returns a wrong candidate."""
    return bytes([(sum(parent) + sum(content)) % 2])


Taken = tuple[tuple[int, int, int], ...]
"""What a state has taken in: token, tenant and weights of each."""


def number_of(taken: Taken) -> float:
    state = 0
    for token, tenant, weights in taken:
        state = (state * 31 + 1 + token + 3 * tenant + 7 * weights) % (1 << 40)
    return float(state)


@attrs.define
class Running:
    tokens: list[int]
    tenant: int
    taken: Taken
    on_host: bool = False
    is_shared: bool = True
    """Whether the prefix cache was not reset since it was allocated."""


class SnapshotMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(4, 20),
        num_slots=st.integers(1, 4),
        num_snapshots=st.integers(1, 5),
        num_host=st.integers(0, 3),
        digest=st.sampled_from([blake2b_digest, blake2b_digest, colliding_digest]),
    )
    def start(
        self, num_blocks: int, num_slots: int, num_snapshots: int, num_host: int, digest: object
    ) -> None:
        self.snapshots = StateSnapshots(1 + num_slots, num_snapshots)
        self.manager = BlockManager(
            CacheConfig(num_blocks=num_blocks, block_size=SIZE, num_host_blocks=20, watermark=0.0),
            hasher=RequestHasher(SIZE, digest),  # type: ignore[arg-type]
            snapshots=self.snapshots,
        )
        self.slots = StateSlots(1 + num_slots, num_host)
        self.cache = StateCache(
            layers={0: (StateShape(SUMS, (1,)),)},
            num_slots=1 + num_slots,
            dtype=torch.float64,
            num_host_slots=num_host,
            num_snapshots=num_snapshots,
        )
        self.plan = CopyPlan()
        self.is_exact = digest is blake2b_digest
        self.weights = self.next_id = 0
        self.running: dict[int, Running] = {}
        self.kept: list[Taken] = []
        """The prefixes whose states are kept, the least recently used one first."""

    def on_device(self) -> list[int]:
        return [seq_id for seq_id, each in self.running.items() if not each.on_host]

    def as_taken(self, tokens: list[int], tenant: int) -> Taken:
        return tuple((token, tenant, self.weights) for token in tokens)

    @rule(
        theme=st.integers(0, 1),
        length=st.integers(1, 9),
        tail=st.lists(st.integers(0, 1), max_size=3),
        tenant=st.integers(0, 1),
        reads_cache=st.sampled_from([True, True, True, False]),
    )
    def allocate(
        self, theme: int, length: int, tail: list[int], tenant: int, reads_cache: bool
    ) -> None:
        tokens = [theme] * length + tail
        keys = self.manager.hasher(tokens, (tenant,))
        given = {"prefix_keys": keys, "extra_keys": (tenant,), "reads_cache": reads_cache}
        status = self.manager.can_allocate(tokens, **given)
        if not self.slots.num_free or status is not AllocStatus.OK:
            return
        most = self.manager.num_cached_prefix_blocks(
            keys, num_tokens=len(tokens), needs_snapshot=False
        )
        promised = self.manager.num_cached_prefix_blocks(keys, num_tokens=len(tokens))
        seq_id, self.next_id = self.next_id, self.next_id + 1
        num_cached = self.manager.allocate(seq_id, tokens, **given)
        taken = self.as_taken(tokens[:num_cached], tenant)
        if self.is_exact:
            known = [
                n
                for n in range(1, most + 1)
                if self.as_taken(tokens, tenant)[: n * SIZE] in self.kept
            ]
            assert promised == max(known, default=0)
        assert num_cached == (promised * SIZE if reads_cache else 0)
        self.slots.allocate(seq_id)
        source = self.manager.snapshot_slot(seq_id)
        assert (source is None) == (not num_cached)
        if source is not None:
            self.plan.add(Direction.WITHIN, [BlockCopy(source, self.slots.slot(seq_id))])
            self._use(taken)
        self.running[seq_id] = Running(tokens, tenant, taken)

    def _use(self, taken: Taken) -> None:
        if self.is_exact:
            self.kept.remove(taken)
            self.kept.append(taken)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 6), takes=st.booleans(), is_lost=st.booleans())
    def compute(self, data: st.DataObject, count: int, takes: bool, is_lost: bool) -> None:
        """A forward pass of a sequence, after which a snapshot may be taken; it may be aborted."""
        seq_id = data.draw(st.sampled_from(list(self.running)))
        each = self.running[seq_id]
        start = len(each.taken)
        end = min(len(each.tokens), start + count)
        if each.on_host or end == start:
            return
        slot, place = self.slots.slot(seq_id), None
        if takes and end % SIZE == 0:
            place = self._reserve(seq_id, each, end)
        self._run_pass(slot, each, end)
        if place is not None:
            self.plan.add(Direction.WITHIN, [BlockCopy(slot, place)])
        if is_lost and place is not None:
            self._free(seq_id)
            return
        self.manager.mark_computed(seq_id, end)
        if place is not None and self.is_exact and each.taken not in self.kept:
            self.kept.append(each.taken)

    def _reserve(self, seq_id: int, each: Running, end: int) -> int | None:
        is_full = len(self.snapshots) == self.snapshots.num_snapshots
        place = self.manager.reserve_snapshot(seq_id, end)
        assert (place is not None) == each.is_shared
        if place is not None and is_full and self.is_exact:
            self.kept.pop(0)
        return place

    def _run_pass(self, slot: int, each: Running, end: int) -> None:
        self._carry_out()
        state = self.cache.part(0, SUMS)[slot]
        if each.taken:
            assert state.item() == number_of(each.taken), "the state has other tokens"
        new = self.as_taken(each.tokens[len(each.taken) : end], each.tenant)
        each.taken = (*each.taken, *new)
        state.fill_(number_of(each.taken))

    def _carry_out(self) -> None:
        self.cache.carry_out(self.plan)
        self.plan = CopyPlan()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def append(self, data: st.DataObject, token: int) -> None:
        seq_id = data.draw(st.sampled_from(list(self.running)))
        each = self.running[seq_id]
        if each.on_host or self.manager.pool.num_free_blocks < 2:
            return
        self.manager.append(seq_id, [token])
        each.tokens.append(token)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(list(self.running)))
        each = self.running[parent]
        if each.on_host or len(each.taken) < len(each.tokens) or not self.slots.num_free:
            return
        seq_id, self.next_id = self.next_id, self.next_id + 1
        self.manager.fork(parent, seq_id)
        self.plan.add(Direction.WITHIN, self.slots.fork(parent, seq_id))
        self.running[seq_id] = attrs.evolve(each, tokens=each.tokens[:])

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self._free(data.draw(st.sampled_from(list(self.running))))

    def _free(self, seq_id: int) -> None:
        self.manager.free(seq_id)
        self.slots.free(seq_id)
        del self.running[seq_id]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(list(self.running)))
        each = self.running[seq_id]
        if each.on_host and self.slots.num_free and self.manager.can_swap_in([seq_id]):
            self.manager.swap_in([seq_id])
            self.plan.add(Direction.IN, self.slots.swap_in([seq_id]))
            each.on_host = False
        elif not each.on_host and self.slots.can_swap_out([seq_id]):
            self.manager.swap_out([seq_id])
            self.plan.add(Direction.OUT, self.slots.swap_out([seq_id]))
            each.on_host = True

    @rule()
    def change_weights(self) -> None:
        self.manager.reset_prefix_cache()
        self.weights += 1
        self.kept.clear()
        for each in self.running.values():
            each.is_shared = False

    @invariant()
    def each_kept_state_has_taken_in_its_prefix(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert len(self.snapshots) <= self.snapshots.num_snapshots
        if not self.is_exact:
            return
        assert len(self.snapshots) == len(self.kept)
        if self.plan:
            return
        states = self.cache.part(0, SUMS)[self.snapshots.first_slot :, 0].tolist()
        assert {number_of(taken) for taken in self.kept} <= {*states}

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        for seq_id in list(self.running):
            self._free(seq_id)
        assert not self.snapshots._reserved
        assert len(self.snapshots._free) + len(self.snapshots) == self.snapshots.num_snapshots


def test_a_prefix_hit_begins_with_the_state_of_its_tokens_whatever_happens() -> None:
    run_state_machine_as_test(
        SnapshotMachine,
        settings=settings(
            max_examples=80,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def make(num_snapshots: int = 2) -> BlockManager:
    snapshots = StateSnapshots(3, num_snapshots)
    return BlockManager(CacheConfig(num_blocks=32, block_size=SIZE), snapshots=snapshots)


def keep(manager: BlockManager, seq_id: int, tokens: list[int], *ends: int) -> None:
    """Compute a prompt with snapshots after some of its tokens, and free it."""
    manager.allocate(seq_id, tokens)
    for end in ends:
        assert manager.reserve_snapshot(seq_id, end) is not None
        manager.mark_computed(seq_id, end)
    manager.mark_computed(seq_id, len(tokens))
    manager.free(seq_id)


def test_a_prefix_without_a_snapshot_is_no_hit() -> None:
    manager = make()
    keep(manager, 0, [1] * 9, 4)
    keys = manager.hasher([1] * 9)
    assert manager.num_cached_prefix_blocks(keys, num_tokens=9, needs_snapshot=False) == 4
    assert manager.num_cached_prefix_blocks(keys, num_tokens=9) == 2
    assert manager.allocate(1, [1] * 9) == 4
    assert manager.allocate(2, [1] * 4) == 0  # a token is left to compute, before the snapshot


def test_the_least_recently_used_snapshot_is_replaced() -> None:
    manager = make()
    keep(manager, 0, [1, 1, 1], 2)
    keep(manager, 1, [2, 2, 2], 2)
    assert manager.allocate(2, [1, 1, 1]) == 2
    assert manager.snapshot_slot(2) == 3
    keep(manager, 3, [4, 4, 4], 2)
    assert [manager.allocate(10 + token, [token] * 3) for token in (1, 2, 4)] == [2, 0, 2]


def test_slots_that_are_reserved_are_not_given_away() -> None:
    manager = make(1)
    for seq_id in (0, 1):
        manager.allocate(seq_id, [seq_id] * 5)
    assert manager.reserve_snapshot(0, 2) == manager.reserve_snapshot(0, 2) == 3
    assert manager.reserve_snapshot(1, 2) is None
    manager.free(0)
    assert manager.reserve_snapshot(1, 2) == 3


def test_of_two_sequences_that_compute_a_prefix_together_one_has_its_snapshot() -> None:
    manager = make(2)
    for seq_id in (0, 1):
        manager.allocate(seq_id, [1] * 5)
        assert manager.reserve_snapshot(seq_id, 2) == 3 + seq_id
    for seq_id in (0, 1):
        manager.mark_computed(seq_id, 2)
    assert manager.allocate(2, [1] * 5) == 2
    assert manager.snapshot_slot(2) == 3
    assert manager.reserve_snapshot(1, 4) == 4


def test_other_content_of_the_same_digest_has_no_snapshot() -> None:
    snapshots = StateSnapshots(1, 1)
    first, other = (BlockKey(b"d", content, None, b"") for content in (b"1", b"2"))
    snapshots.reserve(0, SIZE)
    snapshots.keep(0, [first], SIZE)
    assert snapshots.slot_of(first) == 1
    assert snapshots.slot_of(other) is snapshots.use(other) is None
    assert snapshots.longest([other]) == 0


def test_a_wrong_reservation_changes_nothing() -> None:
    manager = make()
    manager.allocate(0, [1] * 5)
    manager.mark_computed(0, 2)
    for num_tokens in (0, 2, 3, 6, -1, 2.0):
        with pytest.raises(InvalidSetting, match="num_tokens must be"):
            manager.reserve_snapshot(0, num_tokens)  # type: ignore[arg-type]
    without = BlockManager(CacheConfig(num_blocks=32, block_size=SIZE))
    without.allocate(0, [1] * 5)
    with pytest.raises(InvalidSetting, match="the cache keeps no states"):
        without.reserve_snapshot(0, 2)
    assert without.snapshot_slot(0) is None
    with pytest.raises(CannotCopy, match="both would give away the same ones"):
        copy.copy(manager.snapshots)
    with pytest.raises(InvalidSetting, match="num_snapshots"):
        StateSnapshots(3, 0)
    assert manager.reserve_snapshot(0, 4) == 3


def test_the_least_recently_used_one_is_replaced_unless_another_is_to_be_first() -> None:
    manager = make(2)
    for seq_id in (0, 1):
        manager.allocate(seq_id, [seq_id] * 5)
        manager.reserve_snapshot(seq_id, 2)
        manager.mark_computed(seq_id, 2)
    manager.allocate(3, [3] * 5)
    assert manager.reserve_snapshot(3, 2) is not None
    assert [manager.allocate(10 + token, [token] * 5) for token in (0, 1)] == [0, 2]
    snapshots = StateSnapshots(3, 1)
    assert [snapshots.reserve(seq_id, 2) for seq_id in (0, 0, 1)] == [3, 3, None]


@pytest.mark.parametrize("is_used", [False, True])
def test_one_that_is_replaced_first_is_so_until_there_is_a_hit_on_it(is_used: bool) -> None:
    manager = make(2)
    for seq_id in (0, 1):
        manager.allocate(seq_id, [seq_id] * 5)
        manager.reserve_snapshot(seq_id, 2, is_replaced_first=seq_id == 1)
        manager.mark_computed(seq_id, 2)
    if is_used:
        manager.allocate(2, [1] * 5)
        manager.snapshot_slot(2)
    manager.allocate(3, [3] * 5)
    assert manager.reserve_snapshot(3, 2) is not None
    hits = [manager.allocate(10 + token, [token] * 5) for token in (0, 1)]
    assert hits == ([0, 2] if is_used else [2, 0])
