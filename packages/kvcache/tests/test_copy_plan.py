from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import (
    PLAN_SIZES,
    BlockCopy,
    CopyPlan,
    Direction,
    InvalidSetting,
    split_to_plan_sizes,
)

BLOCKS = 5
COPIES = st.lists(
    st.builds(BlockCopy, st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)),
    max_size=3,
    unique_by=lambda copy: copy.dst,
)


def carry_out(steps: object, memory: dict[str, list[int]]) -> None:
    where = {
        Direction.WITHIN: ("device", "device"),
        Direction.OUT: ("device", "host"),
        Direction.IN: ("host", "device"),
    }
    for direction, copies in steps:  # type: ignore[attr-defined]
        source, target = where[direction]
        read = [memory[source][src] for src, _ in copies]
        for (_, dst), value in zip(copies, read, strict=True):
            memory[target][dst] = value


@given(st.lists(st.tuples(st.sampled_from(Direction), COPIES), max_size=8))
def test_joined_batches_have_the_same_effect_as_the_single_calls(
    calls: list[tuple[Direction, list[BlockCopy]]],
) -> None:
    plan = CopyPlan()
    for direction, copies in calls:
        plan.add(direction, copies)
    joined = {"device": list(range(BLOCKS)), "host": list(range(10, 10 + BLOCKS))}
    one_by_one = {name: list(blocks) for name, blocks in joined.items()}
    carry_out(plan, joined)
    carry_out(calls, one_by_one)
    assert joined == one_by_one
    for _, batch in plan:
        assert len({dst for _, dst in batch}) == len(batch), "two copies to one block at once"


def test_independent_copies_of_one_direction_are_one_batch() -> None:
    plan = CopyPlan()
    assert not plan
    plan.add(Direction.WITHIN, [BlockCopy(1, 2)])
    plan.add(Direction.WITHIN, [])
    plan.add(Direction.WITHIN, [BlockCopy(1, 3), BlockCopy(4, 1)])
    plan.add(Direction.OUT, [BlockCopy(2, 0)])
    assert list(plan) == [(Direction.WITHIN, ((1, 2), (1, 3), (4, 1))), (Direction.OUT, ((2, 0),))]


def test_splitting_never_separates_the_two_copies_of_an_exchange() -> None:
    plan = CopyPlan()
    plan.add(Direction.WITHIN, [BlockCopy(2000, 2001)])
    exchange = [copy for i in range(256) for copy in ((i, 1000 + i), (1000 + i, i))]
    plan.add(Direction.WITHIN, [BlockCopy(*copy) for copy in sorted(exchange)])
    at_once = {"device": list(range(3000))}
    in_parts = {"device": list(range(3000))}
    carry_out(plan, at_once)
    for direction, copies in plan:
        carry_out([(direction, part) for part in split_to_plan_sizes(copies)], in_parts)
    assert at_once == in_parts


@given(st.integers(0, 1300))
def test_parts_have_plan_sizes_and_contain_all_copies(count: int) -> None:
    copies = [BlockCopy(i, 5_000 + i) for i in range(count)]
    pieces = list(split_to_plan_sizes(copies))
    assert all(len(piece) in PLAN_SIZES for piece in pieces)
    assert list(dict.fromkeys(copy for piece in pieces for copy in piece)) == copies
    assert sum(map(len, pieces)) < 2 * count + PLAN_SIZES[0]


@pytest.mark.parametrize("copies", [None, 5, [5], [(1,)], [(1, 2, 3)], [("1", 2)], [(1, 2.0)]])
def test_anything_but_pairs_of_block_ids_is_refused(copies: Any) -> None:
    plan = CopyPlan()
    with pytest.raises(InvalidSetting, match="block copies must be"):
        plan.add(Direction.OUT, copies)
    with pytest.raises(InvalidSetting, match="block copies must be"):
        list(split_to_plan_sizes(copies))
    assert not plan


@pytest.mark.parametrize("direction", ["out", None, 1, [1]])
def test_a_direction_is_one_of_three(direction: Any) -> None:
    plan = CopyPlan()
    with pytest.raises(InvalidSetting, match="direction must be a Direction"):
        plan.add(direction, [BlockCopy(1, 2)])
    assert not plan
