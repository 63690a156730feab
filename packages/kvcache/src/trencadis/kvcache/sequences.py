"""The sequences, their block tables, and for each block the sequences that reference it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NoReturn

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.block_pool import BlockPool
from trencadis.kvcache.config import PADDING_BLOCK
from trencadis.kvcache.copy_plan import BlockCopy
from trencadis.kvcache.errors import (
    DuplicateSequence,
    InvalidSetting,
    NotComputed,
    NotResident,
    NotSwapped,
    UnknownSequence,
)
from trencadis.kvcache.rounding import ceil_div
from trencadis.kvcache.validators import integer

BlockIds = npt.NDArray[np.int32]

PASSED = -1
"""In a table of host blocks: a block that was given back, because a window has passed it."""

_SEQ_ID = integer(remedy="number the sequences")


class BlockTable:
    """The block ids of one sequence, in token order: a growing ``int32`` array.

    ``view`` is a read-only view of the array, made without a copy. The table is a NumPy array
    because each step concatenates the tables of all running sequences: 256 tables of 64 blocks
    take about 40 microseconds as arrays and ten times as long as lists.
    """

    __slots__ = ("_array", "_len", "view")

    def __init__(self, blocks: Sequence[int] | BlockIds = ()) -> None:
        self._len = len(blocks)
        self._array = np.empty(max(8, self._len + 4), np.int32)
        self._array[: self._len] = blocks
        self._update_view()

    def __len__(self) -> int:
        return self._len

    def append(self, block: int) -> None:
        """Append ``block``, in amortised O(1)."""
        if self._len == len(self._array):
            self._array = np.concatenate([self._array, np.empty(self._len, np.int32)])
        self._array[self._len] = block
        self._len += 1
        self._update_view()

    def extend(self, blocks: Sequence[int]) -> None:
        """Append ``blocks``."""
        needed = self._len + len(blocks)
        if needed > len(self._array):
            self._array = np.concatenate([self._array, np.empty(needed + 4, np.int32)])
        self._array[self._len : needed] = blocks
        self._len = needed
        self._update_view()

    def pop(self) -> int:
        """Remove the last block and return it."""
        block = self.last()
        self._len -= 1
        self._update_view()
        return block

    def replace(self, position: int, block: int) -> None:
        """Set the block at ``position``. Existing views show the new block too."""
        self._array[position] = block

    def last(self) -> int:
        """The last block."""
        return self._array.item(self._len - 1)

    def _update_view(self) -> None:
        self.view: BlockIds = self._array[: self._len]
        self.view.flags.writeable = False


@attrs.define(eq=False)
class GroupState:
    """The blocks that hold the keys and values of a sequence's tokens in the layers of one group.

    ``token_ids`` are those of the sequence, one array for all its groups.
    ``keys`` are the keys of its first computed full blocks; None after a reset of the prefix
    cache, when its content must not be shared. ``block_table`` is set by
    `BlockReferences.share_prefix`.
    ``host_block_table`` is None while it is on the device. The first ``num_passed`` blocks are
    given back, because the ``window`` of the group does not see them: `PADDING_BLOCK` is in their
    place, `PASSED` in a host table. ``tokens_ahead``: how many tokens after the computed ones have
    blocks, None for all.
    """

    token_ids: array[int]
    num_computed_tokens: int
    keys: list[BlockKey] | None
    window: int | None = None
    tokens_ahead: int | None = None
    block_table: BlockTable = attrs.field(init=False)
    host_block_table: list[int] | None = None
    num_passed: int = 0

    def key_at(self, position: int) -> BlockKey | None:
        """The key of a computed full block; None for other blocks, or if nothing is shared."""
        return self.keys[position] if self.keys and position < len(self.keys) else None

    def num_blocks_for(self, num_tokens: int, block_size: int) -> int:
        """The blocks of its table, given back or not, where the sequence has so many tokens."""
        if self.tokens_ahead is not None:
            num_tokens = min(num_tokens, self.num_computed_tokens + self.tokens_ahead)
        return ceil_div(num_tokens, block_size)

    def copy_to(self, other: GroupState) -> None:
        """Give the state of a new sequence the same blocks, without references to them."""
        other.num_passed = self.num_passed
        other.block_table = BlockTable(self.block_table.view)


@attrs.define(eq=False)
class SequenceState(GroupState):
    """A sequence: what it has in the first group, and in the others as ``further``.

    ``extra`` are its encoded extra keys. ``num_pending_blocks`` counts the device blocks, of all
    groups, whose swap in is not complete.
    """

    seq_id: int = attrs.field(kw_only=True)
    extra: bytes = attrs.field(kw_only=True)
    further: tuple[GroupState, ...] = ()
    num_pending_blocks: int = 0

    @property
    def groups(self) -> tuple[GroupState, ...]:
        """What it has in each group."""
        return (self, *self.further)

    @property
    def is_resident(self) -> bool:
        """Whether all its computed blocks are on the device."""
        return self.host_block_table is None and not self.num_pending_blocks

    def fork(self, child_id: int) -> SequenceState:
        """A copy with the same blocks. Raises `NotComputed` unless all slots are computed."""
        if self.num_computed_tokens < len(self.token_ids):
            raise NotComputed(
                f"sequence {self.seq_id} has {len(self.token_ids)} slots and "
                f"{self.num_computed_tokens} of them are computed: fork it after mark_computed "
                "and before append"
            )
        token_ids = self.token_ids[:]
        further = tuple(
            GroupState(
                token_ids,
                group.num_computed_tokens,
                None if group.keys is None else group.keys[:],
                group.window,
                group.tokens_ahead,
            )
            for group in self.further
        )
        child = SequenceState(
            token_ids=token_ids,
            num_computed_tokens=self.num_computed_tokens,
            keys=None if self.keys is None else self.keys[:],
            window=self.window,
            tokens_ahead=self.tokens_ahead,
            seq_id=child_id,
            extra=self.extra,
            further=further,
        )
        for group, other in zip(self.groups, child.groups, strict=True):
            group.copy_to(other)
        return child


class SequenceTable(dict[int, SequenceState]):
    """The sequences by id."""

    def find(self, seq_id: int) -> SequenceState:
        """A sequence, on the device or not. Raises `UnknownSequence`."""
        try:
            return self[seq_id]
        except TypeError:  # an id that cannot be hashed
            self.__missing__(seq_id)

    def __missing__(self, seq_id: int) -> NoReturn:
        raise UnknownSequence(
            f"sequence {seq_id} has no blocks: allocate it first, and free it once"
        )

    def require_new(self, seq_id: int) -> None:
        """Raises `DuplicateSequence` for an id in use, and `InvalidSetting` for no integer."""
        _SEQ_ID.checked("seq_id", seq_id)
        if seq_id in self:
            raise DuplicateSequence(f"sequence {seq_id} already has blocks: free it first")

    def resident(self, seq_id: int) -> SequenceState:
        """A sequence on the device. Raises `UnknownSequence` or `NotResident`."""
        try:
            sequence = self[seq_id]
        except TypeError:  # an id that cannot be hashed
            self.__missing__(seq_id)
        if sequence.host_block_table is not None or sequence.num_pending_blocks:
            raise NotResident(f"sequence {seq_id} is not on the device: swap it in first")
        return sequence

    def all_resident(self, seq_ids: Iterable[int]) -> list[SequenceState]:
        """Distinct sequences on the device. Raises as `resident`, and `DuplicateSequence`."""
        return [self.resident(sequence.seq_id) for sequence in self._distinct(seq_ids)]

    def all_swapped(self, seq_ids: Iterable[int]) -> list[SequenceState]:
        """Distinct swapped sequences.

        Raises `UnknownSequence`, `NotSwapped` or `DuplicateSequence`.
        """
        sequences = self._distinct(seq_ids)
        for sequence in sequences:
            if sequence.host_block_table is None:
                raise NotSwapped(
                    f"sequence {sequence.seq_id} is on the device: swap in only sequences that "
                    "are swapped out"
                )
        return sequences

    def _distinct(self, seq_ids: Iterable[int]) -> list[SequenceState]:
        """Sequences by id. Raises `UnknownSequence`, `DuplicateSequence` or `InvalidSetting`."""
        try:
            remaining = iter(seq_ids)
        except TypeError as error:
            raise InvalidSetting(
                f"seq_ids must be sequence ids, got {seq_ids!r}: pass a list"
            ) from error
        sequences = [self.find(seq_id) for seq_id in remaining]
        if len({sequence.seq_id for sequence in sequences}) < len(sequences):
            ids = [sequence.seq_id for sequence in sequences]
            raise DuplicateSequence(f"sequences {ids} are not distinct: pass each id once")
        return sequences


class BlockReferences:
    """The sequences that reference each block of ``pool``, each by its group of the block.

    O(1) per block and sequence.

    The pool counts references; this records which sequences they belong to, because the tables of
    these sequences change when the defragmenter moves the block. Prefix hits, forks and swap ins
    put a shared block at the same position in every table, so a block has one position. A pending
    swap out keeps a reference that belongs to no sequence (see `detach`).
    ``num_sharing_changes`` rises with each change of which blocks several sequences have.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.num_sharing_changes = 0
        self._block_size = block_size
        # Most blocks belong to one sequence. Only further sequences need a set.
        self._first: list[GroupState | None] = [None] * pool.num_blocks
        self._others: dict[int, set[GroupState]] = {}
        self._position = [0] * pool.num_blocks

    def allocate(self, sequence: GroupState, position: int) -> int:
        """Allocate a block for a sequence. Raises `OutOfBlocks`."""
        block = self.pool.allocate()
        self._first[block] = sequence
        self._position[block] = position
        return block

    def share(self, block: int, sequence: GroupState, position: int) -> None:
        """Add a sequence's reference to a used or cached block. Raises `InvalidBlock`."""
        self.pool.share(block)
        if self._first[block] is None:
            self._first[block] = sequence
            self._position[block] = position
        else:
            self._others.setdefault(block, set()).add(sequence)
            self.num_sharing_changes += 1

    def share_prefix(self, sequence: GroupState, cached_blocks: Sequence[int]) -> None:
        """Give a new sequence its table, of ``cached_blocks``."""
        for position, block in enumerate(cached_blocks):
            if block != PADDING_BLOCK:
                self.share(block, sequence, position)
        sequence.block_table = BlockTable(cached_blocks)

    def extend(self, sequence: GroupState, num_new: int) -> None:
        """Allocate blocks at the end of a sequence's table. Raises `OutOfBlocks`."""
        start = len(sequence.block_table)
        new_blocks = [self.allocate(sequence, start + index) for index in range(num_new)]
        sequence.block_table.extend(new_blocks)

    def share_table(self, sequence: GroupState) -> None:
        """Add a sequence's references to all blocks of its table."""
        for position, block in enumerate(sequence.block_table.view.tolist()):
            if block != PADDING_BLOCK:
                self.share(block, sequence, position)

    def copy_on_write(self, sequence: GroupState) -> BlockCopy:
        """Replace the shared last block of a sequence by a new one; returns the copy to it."""
        position = len(sequence.block_table) - 1
        shared = sequence.block_table.last()
        block = self.allocate(sequence, position)
        self.release(shared, sequence)
        sequence.block_table.replace(position, block)
        return BlockCopy(shared, block)

    def release(self, block: int, sequence: GroupState) -> None:
        """Remove a sequence's reference. Raises `InvalidBlock`."""
        self.pool.release(block)
        self.detach(block, sequence)

    def release_last(self, sequence: GroupState) -> None:
        """Remove the last block of a sequence's table, and its reference."""
        self.release(sequence.block_table.pop(), sequence)

    def release_all(self, sequence: GroupState) -> None:
        """Release the blocks of a sequence, the last block first.

        So the last blocks are evicted first, and a cached prefix stays longer than its suffix.
        """
        for block in reversed(sequence.block_table.view.tolist()):
            if block != PADDING_BLOCK:
                self.release(block, sequence)

    def release_passed(self, sequence: GroupState, num_passed: int) -> None:
        """Release the blocks before position ``num_passed``, which no later token sees."""
        for position in range(sequence.num_passed, num_passed):
            self.release(sequence.block_table.view.item(position), sequence)
            sequence.block_table.replace(position, PADDING_BLOCK)
        sequence.num_passed = max(sequence.num_passed, num_passed)

    def detach(self, block: int, sequence: GroupState) -> None:
        """Keep a reference in the pool that no longer belongs to the sequence.

        `BlockPool.release` removes it.
        """
        others = self._others.get(block)
        if others is None:
            self._first[block] = None
            return
        self.num_sharing_changes += 1
        if self._first[block] is sequence:
            self._first[block] = others.pop()
        else:
            others.remove(sequence)
        if not others:
            del self._others[block]

    def relocate(self, src: int, dst: int, *, keep: bool) -> None:
        """Move a used block to a free block and update the tables of its sequences.

        See `BlockPool.relocate` for ``keep`` and the errors.
        """
        self.pool.relocate(src, dst, keep=keep)
        for sequence in self._sequences(src):
            sequence.block_table.replace(self._position[src], dst)
        self._first[src], self._first[dst] = None, self._first[src]
        self._position[dst] = self._position[src]
        if src in self._others:
            self._others[dst] = self._others.pop(src)
            self.num_sharing_changes += 1

    def exchange(self, first: int, second: int) -> None:
        """Exchange two used blocks and update the tables of their sequences.

        See `BlockPool.exchange` for the errors.
        """
        self.pool.exchange(first, second)
        for block, other in ((first, second), (second, first)):
            for sequence in self._sequences(block):
                sequence.block_table.replace(self._position[block], other)
        holders, places = self._first, self._position
        holders[first], holders[second] = holders[second], holders[first]
        places[first], places[second] = places[second], places[first]
        others = self._others.pop(first, None), self._others.pop(second, None)
        for block, of_other in zip((second, first), others, strict=True):
            if of_other is not None:
                self._others[block] = of_other
        self.num_sharing_changes += 1

    def num_sequences_of_shared(self) -> dict[int, int]:
        """Of each block that several sequences have, how many."""
        return {block: 1 + len(others) for block, others in self._others.items()}

    def has_computed_slot(self, block: int) -> bool:
        """Whether a used block has content. A block that only a pending swap out uses has.

        Raises `InvalidBlock`.
        """
        block = self.pool.as_block(block)
        sequences = self._sequences(block)
        first_slot = self._position[block] * self._block_size
        return not sequences or any(
            sequence.num_computed_tokens > first_slot for sequence in sequences
        )

    def _sequences(self, block: int) -> list[GroupState]:
        first = self._first[block]
        return [] if first is None else [first, *self._others.get(block, ())]
