"""The state of each sequence, and the lookup of sequences by id."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import attrs

from trencadis.kvcache.block_keys import BlockKey
from trencadis.kvcache.block_table import BlockTable
from trencadis.kvcache.errors import DuplicateSequence, NotResident, NotSwapped, UnknownSequence


@attrs.define(eq=False)
class SequenceState:
    """The tokens of a sequence, and the blocks that hold their keys and values.

    ``keys`` are the keys of its first computed full blocks; None after a reset of the prefix
    cache, when its content must not be shared. ``extra`` are its encoded extra keys.
    ``host_block_table`` is None while it is on the device. ``num_pending_blocks`` counts the
    device blocks whose swap in is not complete.
    """

    seq_id: int
    token_ids: array[int]
    block_table: BlockTable
    num_computed_tokens: int
    keys: list[BlockKey] | None
    extra: bytes
    host_block_table: list[int] | None = None
    num_pending_blocks: int = 0

    @property
    def is_resident(self) -> bool:
        """Whether all its computed blocks are on the device."""
        return self.host_block_table is None and not self.num_pending_blocks

    def key_at(self, position: int) -> BlockKey | None:
        """The key of a computed full block; None for other blocks, or if nothing is shared."""
        return self.keys[position] if self.keys and position < len(self.keys) else None


class SequenceTable:
    """The sequences by id. Every lookup raises an error for an id that it cannot return."""

    def __init__(self) -> None:
        self._sequences: dict[int, SequenceState] = {}

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._sequences.values())

    def __getitem__(self, seq_id: int) -> SequenceState:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise UnknownSequence(
                f"sequence {seq_id} has no blocks: allocate it first, and free it once"
            ) from None

    def add(self, sequence: SequenceState) -> None:
        self._sequences[sequence.seq_id] = sequence

    def pop(self, seq_id: int) -> SequenceState:
        """Remove a sequence. Raises `UnknownSequence`."""
        sequence = self[seq_id]
        del self._sequences[seq_id]
        return sequence

    def require_new(self, seq_id: int) -> None:
        """Raises `DuplicateSequence` for an id that is in use."""
        if seq_id in self._sequences:
            raise DuplicateSequence(f"sequence {seq_id} already has blocks: free it first")

    def resident(self, seq_id: int) -> SequenceState:
        """A sequence on the device. Raises `UnknownSequence` or `NotResident`."""
        sequence = self._sequences.get(seq_id) or self[seq_id]
        if sequence.host_block_table is not None or sequence.num_pending_blocks:
            raise NotResident(f"sequence {seq_id} is not on the device: swap it in first")
        return sequence

    def all_resident(self, seq_ids: Sequence[int]) -> list[SequenceState]:
        """Distinct sequences on the device. Raises as `resident`, and `DuplicateSequence`."""
        _require_distinct(seq_ids)
        return [self.resident(seq_id) for seq_id in seq_ids]

    def all_swapped(self, seq_ids: Sequence[int]) -> list[SequenceState]:
        """Distinct swapped sequences.

        Raises `UnknownSequence`, `NotSwapped` or `DuplicateSequence`.
        """
        _require_distinct(seq_ids)
        sequences = [self[seq_id] for seq_id in seq_ids]
        for sequence in sequences:
            if sequence.host_block_table is None:
                raise NotSwapped(
                    f"sequence {sequence.seq_id} is on the device: swap in only sequences that "
                    "are swapped out"
                )
        return sequences


def _require_distinct(seq_ids: Sequence[int]) -> None:
    if len(set(seq_ids)) < len(seq_ids):
        raise DuplicateSequence(f"sequences {list(seq_ids)} are not distinct: pass each id once")
