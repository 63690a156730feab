"""What is known of each sequence, and the one place where a sequence id is looked up."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import attrs

from trencadis.kvcache.block_table import BlockTable
from trencadis.kvcache.errors import DuplicateSequence, NotResident, NotSwapped, UnknownSequence
from trencadis.kvcache.prefix import BlockKey


@attrs.define(eq=False)
class SequenceState:
    """A sequence's tokens and where their keys and values are.

    ``keys`` are those of its first computed full blocks; None once its content must not be shared
    any more. ``host_table`` is None while it is on the device; ``arriving`` counts its blocks
    whose content is still on its way there.
    """

    seq_id: int
    tokens: array[int]
    table: BlockTable
    num_computed: int
    keys: list[BlockKey] | None
    extra: bytes
    host_table: list[int] | None = None
    arriving: int = 0
    last_access: float | None = None

    @property
    def is_resident(self) -> bool:
        """Whether all its computed blocks are on the device."""
        return self.host_table is None and not self.arriving

    def key_at(self, position: int) -> BlockKey | None:
        """The key of a computed full block; None for a partial one or where nothing is shared."""
        return self.keys[position] if self.keys and position < len(self.keys) else None


class SequenceRegistry:
    """The sequences by id; every look-up says what is wrong with an id that does not fit."""

    def __init__(self) -> None:
        self._states: dict[int, SequenceState] = {}

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._states

    def __iter__(self) -> Iterator[SequenceState]:
        return iter(self._states.values())

    def __getitem__(self, seq_id: int) -> SequenceState:
        try:
            return self._states[seq_id]
        except KeyError:
            raise UnknownSequence(
                f"sequence {seq_id} has no blocks: it was never allocated, or freed already"
            ) from None

    def add(self, state: SequenceState) -> None:
        """Make a sequence known under its id."""
        self._states[state.seq_id] = state

    def pop(self, seq_id: int) -> SequenceState:
        """Forget a sequence. Raises `UnknownSequence`."""
        state = self[seq_id]
        del self._states[seq_id]
        return state

    def require_new(self, seq_id: int) -> None:
        """Raises `DuplicateSequence` for an id that is in use."""
        if seq_id in self._states:
            raise DuplicateSequence(f"sequence {seq_id} has blocks already: free it first")

    def resident(self, seq_id: int) -> SequenceState:
        """A sequence that is on the device. Raises `UnknownSequence` or `NotResident`."""
        state = self[seq_id]
        if state.host_table is not None or state.arriving:
            raise NotResident(f"sequence {seq_id} is not on the device: swap it in first")
        return state

    def all_resident(self, seq_ids: Sequence[int]) -> list[SequenceState]:
        """Sequences on the device, each given once. Raises `DuplicateSequence` as well."""
        _require_distinct(seq_ids)
        return [self.resident(seq_id) for seq_id in seq_ids]

    def all_swapped(self, seq_ids: Sequence[int]) -> list[SequenceState]:
        """Sequences on the host, each given once. Raises `NotSwapped`, `DuplicateSequence`."""
        _require_distinct(seq_ids)
        states = [self[seq_id] for seq_id in seq_ids]
        for state in states:
            if state.host_table is None:
                raise NotSwapped(f"sequence {state.seq_id} is on the device, not swapped out")
        return states


def _require_distinct(seq_ids: Sequence[int]) -> None:
    if len(set(seq_ids)) < len(seq_ids):
        raise DuplicateSequence(f"sequences {list(seq_ids)} are not distinct: pass each once")
