"""Slots of states: each sequence has one of its own, and finds its state there."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from trencadis.kvcache import (
    PADDING_SLOT,
    BlockCopy,
    CannotCopy,
    CopyPlan,
    Direction,
    DuplicateSequence,
    InvalidBlock,
    InvalidSetting,
    NotResident,
    NotSwapped,
    OutOfSlots,
    StateSlots,
    UnknownSequence,
)
from trencadis.kvcache.state_cache import StateCache, StateKey, StateShape

CONV, SUMS = StateKey("conv", 0), StateKey("recurrent", 0)
LAYERS = {
    0: (StateShape(CONV, (3, 2)), StateShape(SUMS, (4,), torch.float32)),
    2: (StateShape(CONV, (5,)),),
}


def make_cache(num_slots: int = 4, num_host_slots: int = 3, num_snapshots: int = 0) -> StateCache:
    sizes = {"num_slots": num_slots, "num_host_slots": num_host_slots}
    sizes["num_snapshots"] = num_snapshots
    return StateCache(layers=LAYERS, dtype=torch.bfloat16, **sizes)


def test_by_default_no_state_is_swapped_or_kept_for_prefixes() -> None:
    cache = StateCache(layers=LAYERS, dtype=torch.bfloat16, num_slots=2)
    assert (cache.num_host_slots, cache.num_snapshots) == (0, 0)
    assert str(cache.device) == "cpu"


def parts(cache: StateCache) -> list[torch.Tensor]:
    return [cache.part(layer, shape.key) for layer, shapes in LAYERS.items() for shape in shapes]


def write(cache: StateCache, slot: int, value: int) -> None:
    """A pass that is lost, and one whose states are kept."""
    for content in (-1, value):
        for layer, shapes in LAYERS.items():
            for shape in shapes:
                part = cache.part(layer, shape.key)
                new = torch.full((1, *shape.shape), content).to(part.dtype)
                cache.write(layer, shape.key, torch.tensor(cache.next_places([slot])), new)
    cache.advance([slot])


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    num_slots=st.integers(2, 6),
    num_host=st.integers(0, 4),
    num_snapshots=st.integers(0, 2),
)
def test_each_sequence_finds_its_state_whatever_happens(
    seed: int, num_slots: int, num_host: int, num_snapshots: int
) -> None:
    """Random operations, carried out in plans of several, against the contents they mean."""
    rng = random.Random(seed)
    slots, cache = (
        StateSlots(num_slots, num_host),
        make_cache(num_slots, num_host, num_snapshots),
    )
    plan = CopyPlan()
    expected, snapshots = dict[int, int](), dict[int, int]()
    swapped: set[int] = set()

    def snapshot(slot: int, value: int) -> list[BlockCopy]:
        kept = num_slots + rng.randrange(num_snapshots)
        snapshots[kept] = value
        return [BlockCopy(slot, kept)]

    for seq_id in range(60):
        here = [each for each in expected if each not in swapped]
        action = rng.choice(("allocate", "fork", "free", "out", "in", "write", "snapshot"))
        if action == "allocate" and slots.num_free:
            cache.carry_out(plan)  # its first pass begins with zeros, after the copies
            plan = CopyPlan()
            slots.allocate(seq_id)
            expected[seq_id] = seq_id
            write(cache, slots.slot(seq_id), seq_id)
        elif action == "fork" and here and slots.num_free:
            parent = rng.choice(here)
            plan.add(Direction.WITHIN, slots.fork(parent, seq_id))
            expected[seq_id] = expected[parent]
        elif action == "free" and expected:
            gone = rng.choice(list(expected))
            slots.free(gone)
            del expected[gone]
            swapped.discard(gone)
        elif action == "out" and here and slots.can_swap_out(here[:2]):
            plan.add(Direction.OUT, slots.swap_out(here[:2]))
            swapped.update(here[:2])
        elif action == "in" and swapped and slots.num_free:
            back = rng.choice(list(swapped))
            plan.add(Direction.IN, slots.swap_in([back]))
            swapped.remove(back)
        elif action == "snapshot" and here and num_snapshots:
            plan.add(Direction.WITHIN, snapshot(slots.slot(here[0]), expected[here[0]]))
        elif action == "write":
            cache.carry_out(plan)
            plan = CopyPlan()
            for each in here[:1]:
                expected[each] = seq_id
                write(cache, slots.slot(each), seq_id)
        used = [slots.slot(each) for each in expected if each not in swapped]
        assert len({PADDING_SLOT, *used}) == 1 + len(used)
        assert slots.num_free == num_slots - 1 - len(used)
    cache.carry_out(plan)
    for each, value in expected.items():
        if each not in swapped:
            place = cache.places([slots.slot(each)])[0]
            assert all(bool((part[place] == value).all()) for part in parts(cache))
    for kept, value in snapshots.items():
        place = cache.places([kept])[0]
        assert all(bool((part[place] == value).all()) for part in parts(cache))
    # What a sequence without tokens reads.
    assert all(bool((part[PADDING_SLOT] == 0).all()) for part in parts(cache))


def test_the_least_numbers_of_slots_are_accepted_and_none_below() -> None:
    slots = StateSlots(2, 1)
    slots.allocate(7)
    assert (slots.slot(7), slots.num_free) == (1, 0), "slot 0 is that of padding"
    assert slots.swap_out([7]) == (BlockCopy(1, 0),)
    assert not StateSlots(2).can_swap_out([7])
    for wrong in ((1, 0), (2, -1)):
        with pytest.raises(InvalidSetting, match=r"must be an integer of at least [20], got"):
            StateSlots(*wrong)


def test_a_method_that_raises_changes_nothing() -> None:
    slots = StateSlots(3, 1)
    slots.allocate(1)
    slots.allocate(2)
    for wrong, error in (
        (lambda: slots.allocate(1), DuplicateSequence),
        (lambda: slots.allocate(3), OutOfSlots),
        (lambda: slots.fork(1, 3), OutOfSlots),
        (lambda: slots.fork(9, 3), UnknownSequence),
        (lambda: slots.free(9), UnknownSequence),
        (lambda: slots.slot(9), UnknownSequence),
        (lambda: slots.swap_out([1, 2]), OutOfSlots),
        (lambda: slots.swap_out([1, 1]), DuplicateSequence),
        (lambda: slots.swap_in([1]), NotSwapped),
        (lambda: copy.copy(slots), CannotCopy),
        (lambda: StateSlots(1), InvalidSetting),
        (lambda: StateSlots(2, -1), InvalidSetting),
    ):
        with pytest.raises(error):
            wrong()
    assert (slots.slot(1), slots.slot(2), slots.num_free) == (1, 2, 0)
    slots.swap_out([1])
    with pytest.raises(NotResident):
        slots.slot(1)
    assert 1 in slots
    slots.allocate(3)
    with pytest.raises(OutOfSlots):
        slots.swap_in([1])
    slots.free(1)
    assert slots.can_swap_out([2])


def test_copies_are_checked_before_any_is_carried_out() -> None:
    cache = make_cache()
    for part in parts(cache):
        part[:4] = torch.arange(4).view(-1, *[1] * (part.dim() - 1))
    for direction, copy_ in (
        (Direction.WITHIN, BlockCopy(1, 4)),
        (Direction.OUT, BlockCopy(1, 3)),
        (Direction.IN, BlockCopy(3, 1)),
        (Direction.WITHIN, BlockCopy(-1, 1)),
    ):
        with pytest.raises(InvalidBlock, match=f"cannot copy slot {copy_.src} to {copy_.dst}"):
            cache.carry_out([(Direction.WITHIN, [BlockCopy(1, 2)]), (direction, [copy_])])
    assert all(part[:4].flatten(1)[:, 0].tolist() == [0, 1, 2, 3] for part in parts(cache))
    cache.carry_out([(Direction.WITHIN, [BlockCopy(1, 2), BlockCopy(2, 1)])])
    assert all(part[:4].flatten(1)[:, 0].tolist() == [0, 2, 1, 3] for part in parts(cache))


def test_parts_have_the_dtype_of_the_model_unless_they_name_one() -> None:
    cache = make_cache()
    assert cache.part(0, CONV).dtype is cache.part(2, CONV).dtype is torch.bfloat16
    assert cache.part(0, SUMS).dtype is torch.float32
    assert [shape.num_bytes(torch.bfloat16) for shape in LAYERS[0]] == [12, 16]
    with pytest.raises(InvalidSetting, match="layer 2 keeps no recurrent state 0"):
        cache.part(2, SUMS)
    with pytest.raises(InvalidSetting, match="num_slots"):
        make_cache(0)
