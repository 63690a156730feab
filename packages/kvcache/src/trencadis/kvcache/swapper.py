"""Moves whole sequences between device and host: what must be copied, and what need not be.

Only computed blocks are copied. A block that several of the sequences share is copied once, one
whose content is on the host already is not copied out again, and one that is still cached on the
device is not copied in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trencadis.kvcache.block_table import BlockTable
from trencadis.kvcache.device_blocks import DeviceBlocks
from trencadis.kvcache.errors import NotSwapped, OutOfBlocks, OutOfHostBlocks
from trencadis.kvcache.moves import BlockCopy, Copies
from trencadis.kvcache.sequence import SequenceState
from trencadis.kvcache.swap_space import SwapSpace, Transfer


class Swapper:
    """Carries sequences over, block by block, between `DeviceBlocks` and `SwapSpace`.

    Checks that there is room; that the sequences are where they should be is the caller's part.
    """

    def __init__(self, blocks: DeviceBlocks, space: SwapSpace, block_size: int) -> None:
        self._blocks = blocks
        self._space = space
        self._size = block_size

    def host_blocks_for(self, sequences: Sequence[SequenceState]) -> int:
        """Free host blocks that swapping these sequences out together would take."""
        new: set[int] = set()
        for sequence in sequences:
            for position, block in enumerate(self._computed(sequence)):
                if self._space.find(sequence.key_at(position)) is None:
                    new.add(block)
        return len(new)

    def swap_out(self, sequences: Sequence[SequenceState], now: float) -> None:
        """Plan the way to the host; device blocks stay held until their transfer is admitted.

        Raises `OutOfHostBlocks`.
        """
        needed = self.host_blocks_for(sequences)
        if needed > self._space.num_free:
            raise OutOfHostBlocks(
                f"{needed} host blocks are needed and {self._space.num_free} are free: "
                "recompute the sequences instead, or raise num_host_blocks"
            )
        host_of: dict[int, int] = {}
        for sequence in sequences:
            self._leave_device(sequence, host_of)
            sequence.last_access = now

    def device_blocks_for(self, sequences: Sequence[SequenceState]) -> int:
        """Free device blocks that swapping these sequences in together would take."""
        new, revived, fresh = set(), set(), 0
        for sequence in sequences:
            host_table = sequence.host_table or []
            for position, host in enumerate(host_table):
                cached = self._on_device(sequence, position)
                if cached is None:
                    new.add(host)
                elif self._blocks.pool.ref_count(cached) == 0:
                    revived.add(cached)
            fresh += self._blocks_for(len(sequence.tokens)) - len(host_table)
        return len(new) + len(revived) + fresh

    def is_leaving(self, sequence: SequenceState) -> bool:
        """Whether some of its content has not reached the host yet."""
        hosts = set(sequence.host_table or ())
        return any(transfer.host in hosts for transfer in self._space.outgoing)

    def swap_in(self, sequences: Sequence[SequenceState], now: float) -> None:
        """Give the sequences device blocks and plan the way there.

        Raises `OutOfBlocks`, or `NotSwapped` for a sequence that is still leaving.
        """
        for sequence in sequences:
            if self.is_leaving(sequence):
                raise NotSwapped(
                    f"sequence {sequence.seq_id} is on its way to the host: ask can_swap_in first"
                )
        needed = self.device_blocks_for(sequences)
        if needed > self._blocks.pool.num_free:
            raise OutOfBlocks(
                f"{needed} blocks are needed and {self._blocks.pool.num_free} are free: "
                "free or swap out another sequence first"
            )
        # What is cached is claimed first, before a fresh block can evict it.
        found = [self._claim_cached(sequence) for sequence in sequences]
        arrivals: dict[int, Transfer] = {}
        for sequence, cached in zip(sequences, found, strict=True):
            self._enter_device(sequence, cached, arrivals)
            sequence.last_access = now
        self._space.incoming.extend(arrivals.values())

    def admit_outgoing(self, now: float) -> Copies:
        """Device-to-host copies to carry out now; their device blocks are free from here on."""
        admitted = self._space.admit_outgoing(now)
        for transfer in reversed(admitted):
            self._blocks.pool.release(transfer.device)
        return tuple(BlockCopy(transfer.device, transfer.host) for transfer in admitted)

    def admit_incoming(self, now: float) -> Copies:
        """Host-to-device copies to carry out now; their host blocks are free from here on."""
        admitted = self._space.admit_incoming(now)
        for transfer in admitted:
            self._space.release(transfer.host)
            for sequence in transfer.waiting:
                sequence.arriving -= 1
            if transfer.key is not None:
                self._blocks.pool.index.register(transfer.key, transfer.device)
        return tuple(BlockCopy(transfer.host, transfer.device) for transfer in admitted)

    def free(self, sequence: SequenceState) -> None:
        """Give back what a sequence has on the host and on its way, wherever it is."""
        if sequence.host_table is not None:
            for host in sequence.host_table:
                self._space.release(host)
            useless = self._space.cancel(
                self._space.outgoing, lambda transfer: self._space.ref_count(transfer.host) == 0
            )
            for transfer in useless:
                self._blocks.pool.release(transfer.device)
        elif sequence.arriving:
            pool = self._blocks.pool
            useless = self._space.cancel(
                self._space.incoming, lambda transfer: pool.ref_count(transfer.device) == 0
            )
            for transfer in useless:
                self._space.release(transfer.host)

    def relocate(self, moved: Mapping[int, int]) -> None:
        """Device blocks have moved, from key to value: planned transfers follow them."""
        self._space.relocate(moved)

    def _leave_device(self, sequence: SequenceState, host_of: dict[int, int]) -> None:
        """``host_of`` tells where the blocks that left before, in the same call, went to."""
        host_table: list[int] = []
        held: set[int] = set()
        for position, block in enumerate(self._computed(sequence)):
            key = sequence.key_at(position)
            known = host_of.get(block)
            host = self._space.find(key) if known is None else known
            if host is None:
                host = self._space.take(key)
                self._space.outgoing.append(Transfer(block, host))
                held.add(block)
            else:
                self._space.share(host)
            host_of[block] = host
            host_table.append(host)
        for block in reversed(sequence.table.view.tolist()):
            if block in held:
                self._blocks.hold(block, sequence.seq_id)
            else:
                self._blocks.release(block, sequence.seq_id)
        sequence.host_table = host_table
        sequence.table = BlockTable()

    def _claim_cached(self, sequence: SequenceState) -> dict[int, int]:
        claimed: dict[int, int] = {}
        for position in range(len(sequence.host_table or ())):
            block = self._on_device(sequence, position)
            if block is not None:
                self._blocks.share(block, sequence.seq_id, position)
                claimed[position] = block
        return claimed

    def _enter_device(
        self, sequence: SequenceState, cached: Mapping[int, int], arrivals: dict[int, Transfer]
    ) -> None:
        """``arrivals`` are the transfers, by host block, that this swap in has planned so far."""
        host_table = sequence.host_table or []
        table = BlockTable()
        for position in range(self._blocks_for(len(sequence.tokens))):
            if position >= len(host_table):
                table.append(self._blocks.take(sequence.seq_id, position))
            elif position in cached:
                table.append(cached[position])
                self._space.release(host_table[position])
            else:
                table.append(self._arrive(sequence, position, host_table[position], arrivals))
        sequence.table = table
        sequence.host_table = None

    def _arrive(
        self, sequence: SequenceState, position: int, host: int, arrivals: dict[int, Transfer]
    ) -> int:
        sequence.arriving += 1
        transfer = arrivals.get(host)
        if transfer is None:
            device = self._blocks.take(sequence.seq_id, position)
            # The transfer takes over the sequence's reference to the host block.
            arrivals[host] = Transfer(device, host, (sequence,), sequence.key_at(position))
            return device
        self._blocks.share(transfer.device, sequence.seq_id, position)
        self._space.release(host)
        transfer.waiting += (sequence,)
        return transfer.device

    def _on_device(self, sequence: SequenceState, position: int) -> int | None:
        key = sequence.key_at(position)
        return None if key is None else self._blocks.pool.index.find(key)

    def _computed(self, sequence: SequenceState) -> list[int]:
        blocks: list[int] = sequence.table.view[: self._blocks_for(sequence.num_computed)].tolist()
        return blocks

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)
