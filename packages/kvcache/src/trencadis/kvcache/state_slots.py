"""Which slot has the state of each sequence, for models with layers that keep one.

A state stands for all tokens of a sequence so far, so it is never shared and never cut: each
sequence has a slot of its own, on the device or on the host. `trencadis.kvcache.state_cache` has
the memory, and carries out the copies that the methods return, before the next forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, SupportsIndex

from trencadis.kvcache.copy_plan import BlockCopy, Copies
from trencadis.kvcache.errors import (
    CannotCopy,
    DuplicateSequence,
    NotResident,
    NotSwapped,
    OutOfSlots,
    UnknownSequence,
)
from trencadis.kvcache.validators import integer

PADDING_SLOT = 0
"""The slot of padding rows. It is never allocated."""

_NUM_SLOTS = integer(2, remedy="slot 0 is that of padding, so only a second one can have a state")
_NUM_HOST_SLOTS = integer(0, remedy="0 turns swapping off")


class StateSlots:
    """Gives each sequence a slot. Every method checks first, so one that raises changes nothing.

    ``num_slots`` are on the device, `PADDING_SLOT` included, ``num_host_slots`` on the host. Raises
    `InvalidSetting` for a number below the least, `UnknownSequence` for an id without a slot, and
    `CannotCopy` if it is copied or pickled.
    """

    def __init__(self, num_slots: int, num_host_slots: int = 0) -> None:
        self.num_slots: int = _NUM_SLOTS.checked("num_slots", num_slots)
        self.num_host_slots: int = _NUM_HOST_SLOTS.checked("num_host_slots", num_host_slots)
        # Descending: the lowest slot is taken first.
        self._free = list(range(self.num_slots - 1, PADDING_SLOT, -1))
        self._free_on_host = list(range(self.num_host_slots - 1, -1, -1))
        self._slots: dict[int, int] = {}
        self._host_slots: dict[int, int] = {}

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._slots or seq_id in self._host_slots

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CannotCopy(
            f"StateSlots of {self.num_slots} slots cannot be copied or pickled: both would give "
            "away the same ones. Make one with its numbers"
        )

    @property
    def num_free(self) -> int:
        """Slots on the device that no sequence has."""
        return len(self._free)

    def slot(self, seq_id: int) -> int:
        """The slot of a sequence on the device. Raises `NotResident` for a swapped one."""
        slot = self._slots.get(seq_id)
        if slot is None:
            self._require_known(seq_id)
            raise NotResident(f"sequence {seq_id} is not on the device: swap it in first")
        return slot

    def allocate(self, seq_id: int) -> None:
        """Give a new sequence a slot, whose content is that of an earlier one.

        The first forward pass of the sequence begins with a zero state instead of reading it.
        Raises `DuplicateSequence` or `OutOfSlots`.
        """
        self._require_new(seq_id)
        self._require_free(1)
        self._slots[seq_id] = self._free.pop()

    def fork(self, parent_id: int, child_id: int) -> Copies:
        """Give ``child_id`` a slot with the state of ``parent_id``; returns the copy to it.

        The state must be that of the tokens that both have in common. Raises `DuplicateSequence`,
        `NotResident` or `OutOfSlots`.
        """
        source = self.slot(parent_id)
        self.allocate(child_id)
        return (BlockCopy(source, self._slots[child_id]),)

    def free(self, seq_id: int) -> None:
        """Take the slot of a sequence back, on the device or on the host."""
        self._require_known(seq_id)
        if seq_id in self._slots:
            self._free.append(self._slots.pop(seq_id))
        else:
            self._free_on_host.append(self._host_slots.pop(seq_id))

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether the host has slots for these sequences together."""
        return len(seq_ids) <= len(self._free_on_host)

    def swap_out(self, seq_ids: Sequence[int]) -> Copies:
        """Move sequences to slots on the host; returns the copies to these.

        Raises `NotResident`, `DuplicateSequence` or `OutOfSlots`.
        """
        sources = [self.slot(seq_id) for seq_id in _distinct(seq_ids)]
        if not self.can_swap_out(seq_ids):
            raise OutOfSlots(
                f"{len(seq_ids)} slots on the host are needed and {len(self._free_on_host)} are "
                "free: recompute the sequences instead, or raise num_host_slots"
            )
        for seq_id in seq_ids:
            self._free.append(self._slots.pop(seq_id))
            self._host_slots[seq_id] = self._free_on_host.pop()
        return tuple(
            BlockCopy(source, self._host_slots[seq_id])
            for source, seq_id in zip(sources, seq_ids, strict=True)
        )

    def swap_in(self, seq_ids: Sequence[int]) -> Copies:
        """Move sequences back to slots on the device; returns the copies to these.

        Raises `NotSwapped`, `DuplicateSequence` or `OutOfSlots`.
        """
        for seq_id in _distinct(seq_ids):
            self._require_known(seq_id)
            if seq_id in self._slots:
                raise NotSwapped(f"sequence {seq_id} is on the device: swap in only swapped ones")
        self._require_free(len(seq_ids))
        sources = [self._host_slots.pop(seq_id) for seq_id in seq_ids]
        self._free_on_host += sources
        for seq_id in seq_ids:
            self._slots[seq_id] = self._free.pop()
        return tuple(
            BlockCopy(source, self._slots[seq_id])
            for source, seq_id in zip(sources, seq_ids, strict=True)
        )

    def _require_free(self, count: int) -> None:
        if count > len(self._free):
            raise OutOfSlots(
                f"{count} slots are needed and {len(self._free)} of {self.num_slots} are free: "
                "free or swap out a sequence, or raise num_slots"
            )

    def _require_new(self, seq_id: int) -> None:
        if seq_id in self:
            raise DuplicateSequence(f"sequence {seq_id} already has a slot: free it first")

    def _require_known(self, seq_id: int) -> None:
        if seq_id not in self:
            raise UnknownSequence(
                f"sequence {seq_id} has no slot: allocate it first, and free it once"
            )


def _distinct(seq_ids: Sequence[int]) -> Sequence[int]:
    if len(set(seq_ids)) < len(seq_ids):
        raise DuplicateSequence(f"sequences {list(seq_ids)} are not distinct: pass each id once")
    return seq_ids
