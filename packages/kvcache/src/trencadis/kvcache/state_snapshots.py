"""Snapshots of states: which prefixes have one, and in which slot.

A cached prefix is of use to a model with layers that keep a state only where the state after it is
known. So a number of slots behind those of `StateSlots` have copies of the states that sequences
had at the end of a block. `trencadis.kvcache.manager` keeps them as it caches the blocks; the
scheduler decides when one is taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NoReturn, SupportsIndex

from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.errors import CannotCopy
from trencadis.kvcache.validators import integer

_FIRST_SLOT = integer(1, remedy="pass num_slots of the StateSlots")
_NUM_SNAPSHOTS = integer(1, remedy="turn the prefix cache off instead")


class StateSnapshots:
    """The snapshots of states, at most ``num_snapshots``: the least recently used one is replaced.

    Their slots begin with ``first_slot``, the ``num_slots`` of the `StateSlots`. A slot is reserved
    for the state that a sequence will have after some tokens, and becomes a snapshot once these are
    computed. Raises `InvalidSetting` for a number below 1, and `CannotCopy` if it is copied or
    pickled.
    """

    def __init__(self, first_slot: int, num_snapshots: int) -> None:
        self.first_slot: int = _FIRST_SLOT.checked("first_slot", first_slot)
        self.num_snapshots: int = _NUM_SNAPSHOTS.checked("num_snapshots", num_snapshots)
        self._free = list(range(first_slot + self.num_snapshots - 1, first_slot - 1, -1))
        self._kept: OrderedDict[bytes, tuple[BlockKey, int]] = OrderedDict()
        """By the digest of the last block of the prefix, the least recently used one first."""
        self._reserved: dict[int, dict[int, int]] = {}
        """The slots of each sequence, by the number of tokens that the state will stand for."""
        self._replaced_first: set[tuple[int, int]] = set()
        """Sequences and tokens of reserved slots whose snapshots will count as least used."""

    def __len__(self) -> int:
        return len(self._kept)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CannotCopy(
            f"StateSnapshots of {self.num_snapshots} slots cannot be copied or pickled: both would "
            "give away the same ones. Make one with its numbers"
        )

    def slot_of(self, key: BlockKey) -> int | None:
        """The slot of the state after the block of ``key``; None where it is not kept."""
        found = self._kept.get(key.digest)
        return found[1] if found is not None and found[0].same_as(key) else None

    def longest(self, keys: Sequence[BlockKey]) -> int:
        """The length in blocks of the longest prefix of ``keys`` that has a snapshot."""
        if not self._kept:
            return 0
        return next(
            (n for n in range(len(keys), 0, -1) if self.slot_of(keys[n - 1]) is not None), 0
        )

    def use(self, key: BlockKey) -> int | None:
        """As `slot_of`; the snapshot is now the most recently used one."""
        slot = self.slot_of(key)
        if slot is not None:
            self._kept.move_to_end(key.digest)
        return slot

    def reserve(
        self, seq_id: int, num_tokens: int, *, is_replaced_first: bool = False
    ) -> int | None:
        """A slot for the state that a sequence will have after ``num_tokens``, whole blocks.

        The state is to be copied to it before it changes again. The snapshot will be replaced
        before others, if asked for, until it is used. None where all slots are reserved.
        """
        reserved = self._reserved.get(seq_id, {})
        if num_tokens in reserved:
            return reserved[num_tokens]
        if self._free:
            slot = self._free.pop()
        elif self._kept:
            _, (_, slot) = self._kept.popitem(last=False)
        else:
            return None
        self._reserved.setdefault(seq_id, {})[num_tokens] = slot
        if is_replaced_first:
            self._replaced_first.add((seq_id, num_tokens))
        return slot

    def keep(self, seq_id: int, keys: Sequence[BlockKey], block_size: int) -> None:
        """The blocks of ``keys``, the first of a sequence, are computed: what is reserved for a
        state within them becomes a snapshot, unless there is one of the same prefix."""
        reserved = self._reserved.get(seq_id, {})
        for num_tokens in [each for each in reserved if each <= len(keys) * block_size]:
            key, slot = keys[num_tokens // block_size - 1], reserved.pop(num_tokens)
            if key.digest in self._kept:
                self._free.append(slot)
            else:
                self._kept[key.digest] = key, slot
                if (seq_id, num_tokens) in self._replaced_first:
                    self._kept.move_to_end(key.digest, last=False)
            self._replaced_first.discard((seq_id, num_tokens))
        if not reserved:
            self._reserved.pop(seq_id, None)

    def release(self, seq_id: int) -> None:
        """Take back what is reserved for a sequence: what it computes is lost, or not shared."""
        for num_tokens, slot in self._reserved.pop(seq_id, {}).items():
            self._free.append(slot)
            self._replaced_first.discard((seq_id, num_tokens))

    def clear(self) -> None:
        """Drop all snapshots, and what is reserved."""
        for seq_id in tuple(self._reserved):
            self.release(seq_id)
        self._free += [slot for _, slot in self._kept.values()]
        self._kept.clear()
