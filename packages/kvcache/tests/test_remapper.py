"""`BlockRemapper`: the blocks of another allocator, defragmented without loss of content."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import BlockRemapper, DefragConfig, InvalidBlock, InvalidSetting

NUM_BLOCKS = 40


class Runtime:
    """An allocator of block ids in any order, and a KV cache that the remapper addresses."""

    def __init__(self, threshold: int = 2) -> None:
        self.remapper = BlockRemapper(NUM_BLOCKS, DefragConfig(threshold=threshold))
        self.users: dict[int, int] = {}
        self.written: dict[int, int] = {}
        """What each block id must hold: of the ids that are used, or were released and kept."""
        self.cache: list[int | None] = [None] * NUM_BLOCKS
        self.num_writes = 0

    def use(self, block: int) -> None:
        self.remapper.use([block])
        self.users[block] = self.users.get(block, 0) + 1
        if block not in self.written:
            self.write(block)

    def write(self, block: int) -> None:
        self.num_writes += 1
        self.written[block] = self.num_writes
        self.cache[self.remapper.physical([block])[0]] = self.num_writes

    def release(self, block: int, *, keep: bool) -> None:
        self.remapper.release([block], keep=keep)
        self.users[block] -= 1
        if not self.users[block]:
            del self.users[block]
            if not keep:
                del self.written[block]

    def defragment(self) -> int:
        plan = self.remapper.plan()
        if plan is None:
            return 0
        before = self.cache.copy()
        for src, dst in plan.padded_copies:
            self.cache[dst] = before[src]
        return len(plan.copies)

    def check(self) -> None:
        for block, content in self.written.items():
            assert self.cache[self.remapper.physical(block)] == content
        ids = sorted(self.written)
        physical = self.remapper.physical(ids).tolist()
        assert len(set(physical)) == len(ids), "no two ids have one physical block"
        assert self.remapper.pool.num_used_blocks == len(self.users)
        used = self.remapper.physical(sorted(self.users)).tolist()
        assert self.remapper.pool.highest_used_block == max(used, default=0)


steps = st.lists(
    st.tuples(st.sampled_from("ururukd"), st.integers(1, NUM_BLOCKS - 1)), max_size=150
)


@given(steps, st.integers(0, 6))
def test_every_id_keeps_its_content_and_used_blocks_stay_low(
    taken: list[tuple[str, int]], threshold: int
) -> None:
    runtime = Runtime(threshold)
    for kind, block in taken:
        if kind == "u":
            runtime.use(block)
        elif kind == "d":
            runtime.defragment()
            pool = runtime.remapper.pool
            assert pool.highest_used_block <= pool.num_used_blocks + threshold
        elif runtime.users:
            known = sorted(runtime.users)
            runtime.release(known[block % len(known)], keep=kind == "k")
        runtime.check()


def test_an_id_without_content_gets_the_lowest_block_and_costs_no_copy() -> None:
    runtime = Runtime()
    for block in range(30, 20, -1):
        runtime.use(block)
    assert runtime.remapper.physical([[30, 29], [21, 0]]).tolist() == [[1, 2], [10, 0]]
    for block in range(30, 22, -1):
        runtime.release(block, keep=False)
    assert runtime.defragment() == 2, "the blocks of 21 and 22 move and nothing moves back"
    assert runtime.remapper.physical([21, 22]).tolist() in ([1, 2], [2, 1])
    runtime.check()


def test_kept_content_is_exchanged_with_what_moves_into_its_place() -> None:
    runtime = Runtime()
    for block in range(30, 20, -1):
        runtime.use(block)
    for block in range(30, 22, -1):
        runtime.release(block, keep=True)
    assert runtime.defragment() == 4
    runtime.check()
    runtime.use(30)  # a hit in the prefix cache of the allocator
    runtime.check()


def test_a_wrong_call_changes_nothing() -> None:
    runtime = Runtime()
    runtime.use(5)
    remapper = runtime.remapper
    for wrong in ([0], [NUM_BLOCKS], [5, -1], [1.5], ["1"], [None]):
        for call in (remapper.use, remapper.release):
            with pytest.raises(InvalidBlock):
                call(wrong)  # type: ignore[arg-type]
    for wrong_release in ([5, 5], [5, 6], [7]):
        with pytest.raises(InvalidBlock, match="was released more often than it was used"):
            remapper.release(wrong_release)
    assert remapper.pool.num_used_blocks == 1
    runtime.check()
    remapper.release([5])
    assert remapper.pool.num_used_blocks == 0


@pytest.mark.parametrize("ids", [[7], [-1], [NUM_BLOCKS], [1.0], ["a"], [None]])
def test_only_ids_that_are_used_have_a_physical_block(ids: Any) -> None:
    remapper = BlockRemapper(NUM_BLOCKS)
    remapper.use([5])
    with pytest.raises(InvalidBlock):
        remapper.physical(ids)
    assert remapper.physical(np.array([[5, 0]])).tolist() == [[1, 0]]
    assert remapper.physical([]).shape == (0,)


def test_wrong_arguments_are_named() -> None:
    remapper = BlockRemapper(NUM_BLOCKS)
    for build in (
        lambda: BlockRemapper(1),
        lambda: BlockRemapper(8, {}),  # type: ignore[arg-type]
        lambda: remapper.use(5),  # type: ignore[arg-type]
        lambda: remapper.release([], keep=0),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidSetting):
            build()
