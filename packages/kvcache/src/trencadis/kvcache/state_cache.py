"""The memory of states: a fixed number of slots, each for the states of one sequence. Needs torch.

A layer keeps a state of fixed size for all tokens of a sequence so far: the last inputs of a
convolution, or sums over all tokens. Each part of it is a tensor ``[num_slots, ...]``.
`trencadis.kvcache.state_slots` says which sequence has which slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

import attrs

from trencadis.kvcache.copy_plan import BlockCopy, Direction, as_block_copies
from trencadis.kvcache.errors import InvalidBlock, InvalidSetting, MissingExtra
from trencadis.kvcache.validators import instance_of, integer

try:
    import torch

    from trencadis.kvcache.copiers import allocate, as_device
except ModuleNotFoundError as error:
    raise MissingExtra(
        f"trencadis.kvcache.state_cache needs PyTorch ({error}): "
        "install trencadis-kvcache[torch], or install torch as pytorch.org describes"
    ) from error


class StateKey(NamedTuple):
    """Names a part of a layer's state: its kind, such as ``recurrent``, and its number."""

    kind: str
    number: int


@attrs.frozen(cache_hash=True)
class StateShape:
    """A part of the state that a layer keeps of a sequence. ``dtype`` None: that of the model."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Its bytes in a model of this dtype."""
        return prod(self.shape) * (self.dtype or dtype).itemsize


class StateCache:
    """The states of ``layers`` in slots, initially zero.

    ``layers``: the parts that each layer keeps, by its number. ``dtype`` is that of the model.
    ``num_host_slots``: slots in host memory for swapped sequences. ``num_snapshots``: slots after
    the others, for `StateSnapshots`. Raises `InvalidSetting` for a size below one, and
    `OutOfMemory` if the memory cannot be allocated.

    Each slot has two places, except those of snapshots, which have one. `part` has all of them:
    first one of each slot, then the other ones, then those of snapshots. A forward pass reads one
    (`places`) and writes the other (`next_places`), so that it can be repeated until `advance` has
    been called.
    """

    def __init__(
        self,
        *,
        layers: Mapping[int, Sequence[StateShape]],
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_host_slots: int = 0,
        num_snapshots: int = 0,
    ) -> None:
        instance_of(dict).checked("layers", layers)
        positive = integer(1, remedy="pass a positive number")
        self.num_slots: int = positive.checked("num_slots", num_slots)
        self.num_host_slots: int = integer(0, remedy="0 turns swapping off").checked(
            "num_host_slots", num_host_slots
        )
        self.num_snapshots: int = integer(0, remedy="0 keeps none").checked(
            "num_snapshots", num_snapshots
        )
        self.device = as_device(device)
        self._is_second = [False] * self.num_slots
        num_places = 2 * self.num_slots + self.num_snapshots
        self._parts: dict[tuple[int, StateKey], torch.Tensor] = {}
        self._host: dict[tuple[int, StateKey], torch.Tensor] = {}
        for layer, parts in layers.items():
            for part in parts:
                place, own = (layer, part.key), part.dtype or dtype
                for size in part.shape:
                    positive.checked("shape", size)
                on_device = (num_places, *part.shape)
                self._parts[place] = allocate(
                    "num_slots", self.num_slots, on_device, own, self.device
                )
                on_host = (self.num_host_slots, *part.shape)
                self._host[place] = allocate(
                    "num_host_slots", self.num_host_slots, on_host, own, torch.device("cpu")
                )

    def part(self, layer: int, key: StateKey) -> torch.Tensor:
        """A part of a layer's state in all places, ``[2 * num_slots + num_snapshots, ...]``.

        Raises `InvalidSetting` for one that the layer does not keep.
        """
        found = self._parts.get((layer, key))
        if found is None:
            raise InvalidSetting(f"layer {layer} keeps no {key.kind} state {key.number}", "layer")
        return found

    def parts_of(self, layer: int) -> dict[StateKey, torch.Tensor]:
        """The parts of a layer's state, as `part`; none for a layer without."""
        return {key: part for (number, key), part in self._parts.items() if number == layer}

    def write(self, layer: int, key: StateKey, places: torch.Tensor, states: torch.Tensor) -> None:
        """Write a part of the states of some sequences, ``[sequences, ...]``, to their places."""
        self.part(layer, key).index_copy_(0, places, states)

    def places(self, slots: Sequence[int]) -> list[int]:
        """Where the states of these slots are, also of those of snapshots."""
        number, is_second = self.num_slots, self._is_second
        return [
            slot + number * (slot >= number or is_second[slot])  # snapshots are behind all places
            for slot in slots
        ]

    def next_places(self, slots: Sequence[int]) -> list[int]:
        """Where their next states are written. Not of snapshots."""
        return [slot + self.num_slots * (not self._is_second[slot]) for slot in slots]

    def advance(self, slots: Iterable[int]) -> None:
        """From now on their states are where `next_places` has said."""
        for slot in slots:
            self._is_second[slot] = not self._is_second[slot]

    def carry_out(self, plan: Iterable[tuple[Direction, Sequence[BlockCopy]]]) -> None:
        """Carry out the batches of a `CopyPlan` of slots in order, each all at once.

        Checks all of them first. Raises `InvalidBlock` for a slot that there is not.
        """
        num_within = self.num_slots + self.num_snapshots
        numbers = {
            Direction.WITHIN: (num_within, num_within),
            Direction.OUT: (self.num_slots, self.num_host_slots),
            Direction.IN: (self.num_host_slots, self.num_slots),
        }
        batches = [(direction, as_block_copies(copies)) for direction, copies in plan]
        for direction, copies in batches:
            num_sources, num_targets = numbers[direction]
            for source, target in copies:
                if not (0 <= source < num_sources and 0 <= target < num_targets):
                    raise InvalidBlock(
                        f"cannot copy slot {source} to {target}: there are {num_sources} source "
                        f"slots and {num_targets} destination slots"
                    )
        for direction, copies in batches:
            from_slots, to_slots = ([copy[end] for copy in copies] for end in (0, 1))
            if direction is not Direction.IN:
                from_slots = self.places(from_slots)
            if direction is not Direction.OUT:
                to_slots = self.places(to_slots)
            sources = torch.tensor(from_slots, dtype=torch.long)
            targets = torch.tensor(to_slots, dtype=torch.long)
            for place, part in self._parts.items():
                read = self._host[place] if direction is Direction.IN else part
                written = self._host[place] if direction is Direction.OUT else part
                moved = read.index_select(0, sources.to(read.device)).to(written.device)
                written.index_copy_(0, targets.to(written.device), moved)
