"""Swapping: the pool of host blocks, and the copies that move sequences to it and back.

Only computed blocks are copied. A block that several of the sequences share is copied once. A
block whose content is on the host already is not copied out, and a block whose content is still
in the prefix cache is not copied in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import index

from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.block_pool import BlockBitmap
from trencadis.kvcache.config import NUM_HOST_BLOCKS, PADDING_BLOCK
from trencadis.kvcache.copy_plan import BlockCopy, Copies
from trencadis.kvcache.errors import InvalidBlock, NotSwapped, OutOfBlocks, OutOfHostBlocks
from trencadis.kvcache.prefix_cache import PrefixIndex
from trencadis.kvcache.rounding import ceil_div
from trencadis.kvcache.sequences import (
    PASSED,
    BlockReferences,
    BlockTable,
    GroupState,
    SequenceState,
)
from trencadis.kvcache.transfers import BandwidthGovernor, Transfer, TransferQueue


class HostBlockPool:
    """Host blocks 0 to ``num_blocks - 1`` with reference counts and an index of their content.

    Swapped sequences that share a block share one host block. A block without references is free
    and its content is lost. Raises `InvalidSetting` for a number of blocks that `CacheConfig`
    rejects.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks: int = NUM_HOST_BLOCKS.checked("num_blocks", num_blocks)
        self._free = BlockBitmap(self.num_blocks)
        self._free.add_range(0, self.num_blocks)
        self._ref_counts = [0] * self.num_blocks
        self._prefix_index = PrefixIndex()

    @property
    def num_free_blocks(self) -> int:
        """Host blocks without a reference."""
        return self._free.count

    def ref_count(self, block: int) -> int:
        """The number of references to ``block``, from sequences and pending swap ins.

        Raises `InvalidBlock`.
        """
        return self._ref_counts[self._as_block(block)]

    def lookup(self, key: BlockKey | None) -> int | None:
        """The host block that holds the content of ``key``, or will after a pending swap out."""
        return None if key is None else self._prefix_index.lookup(key)

    def allocate(self, key: BlockKey | None) -> int:
        """Allocate the lowest free block for the content of ``key``. Raises `OutOfHostBlocks`."""
        block = self._free.lowest()
        if block < 0:
            raise OutOfHostBlocks(
                f"all {self.num_blocks} host blocks are in use: raise num_host_blocks"
            )
        self._free.remove(block)
        self._ref_counts[block] = 1
        if key is not None:
            self._prefix_index.register(key, block)
        return block

    def share(self, block: int) -> None:
        """Add a reference to a used block. Raises `InvalidBlock`."""
        self._ref_counts[self._as_used_block(block)] += 1

    def release(self, block: int) -> None:
        """Remove a reference; without references a block is free. Raises `InvalidBlock`."""
        block = self._as_used_block(block)
        self._ref_counts[block] -= 1
        if self._ref_counts[block] == 0:
            self._prefix_index.drop(block)
            self._free.add(block)

    def reset_prefix_cache(self) -> None:
        """Clear the index, so that no other sequence shares what is on the host now."""
        self._prefix_index.clear()

    def _as_block(self, block: int) -> int:
        try:
            number = index(block)
        except TypeError:
            number = -1
        if not 0 <= number < self.num_blocks:
            raise InvalidBlock(
                f"host block {block} is not one of 0 to {self.num_blocks - 1}: pass a block of "
                "this pool"
            )
        return number

    def _as_used_block(self, block: int) -> int:
        number = self._as_block(block)
        if self._ref_counts[number] == 0:
            raise InvalidBlock(f"host block {block} is not in use: allocate it first")
        return number


class Swapper:
    """Moves sequences block by block between the device pool and the host pool.

    Checks that there are enough free blocks. The caller checks that the sequences are on the
    device for a swap out, and on the host for a swap in.
    """

    def __init__(
        self,
        references: BlockReferences,
        host_pool: HostBlockPool,
        block_size: int,
        governor: BandwidthGovernor | None = None,
    ) -> None:
        self.outgoing = TransferQueue(governor)
        self.incoming = TransferQueue(governor)
        self._references = references
        self._pool = references.pool
        self._host_pool = host_pool
        self._block_size = block_size

    def num_host_blocks_needed(self, sequences: Sequence[SequenceState]) -> int:
        """Free host blocks that a swap out of these sequences together takes."""
        new: set[int] = set()
        for group in _all_groups(sequences):
            for position, block in enumerate(self._computed_blocks(group)):
                if block == PADDING_BLOCK:
                    continue
                if self._host_pool.lookup(group.key_at(position)) is None:
                    new.add(block)
        return len(new)

    def swap_out(self, sequences: Sequence[SequenceState]) -> None:
        """Queue the transfers of these sequences to the host.

        A device block stays used until its transfer is admitted. Raises `OutOfHostBlocks`.
        """
        needed = self.num_host_blocks_needed(sequences)
        if needed > self._host_pool.num_free_blocks:
            raise OutOfHostBlocks(
                f"{needed} host blocks are needed and {self._host_pool.num_free_blocks} are free: "
                "recompute the sequences instead, or raise num_host_blocks"
            )
        host_block_of: dict[int, int] = {}
        for group in _all_groups(sequences):
            self._swap_out_group(group, host_block_of)

    def num_device_blocks_needed(self, sequences: Sequence[SequenceState]) -> int:
        """Free device blocks that a swap in of these sequences together takes."""
        copied: set[int] = set()
        cached: set[int] = set()
        num_uncomputed = 0
        for group in _all_groups(sequences):
            host_blocks = group.host_block_table or []
            for position, host_block in enumerate(host_blocks):
                if host_block == PASSED:
                    continue
                hit = self._prefix_hit(group, position)
                if hit is None:
                    copied.add(host_block)
                elif self._pool.ref_count(hit) == 0:
                    cached.add(hit)
            num_uncomputed += self._num_blocks(group) - len(host_blocks)
        return len(copied) + len(cached) + num_uncomputed

    def is_swapping_out(self, sequence: SequenceState) -> bool:
        """Whether a transfer of the sequence to the host is still pending."""
        if not self.outgoing:
            return False
        tables = (group.host_block_table or () for group in sequence.groups)
        host_blocks = set(chain.from_iterable(tables))
        return any(transfer.host_block in host_blocks for transfer in self.outgoing)

    def swap_in(self, sequences: Sequence[SequenceState]) -> None:
        """Allocate device blocks for these sequences and queue the transfers to them.

        Raises `OutOfBlocks`, or `NotSwapped` for a sequence whose swap out is not complete.
        """
        for sequence in sequences:
            if self.is_swapping_out(sequence):
                raise NotSwapped(
                    f"the swap out of sequence {sequence.seq_id} is not complete: "
                    "call can_swap_in first"
                )
        needed = self.num_device_blocks_needed(sequences)
        if needed > self._pool.num_free_blocks:
            raise OutOfBlocks(
                f"{needed} blocks are needed and {self._pool.num_free_blocks} are free: "
                "free or swap out another sequence first"
            )
        # Share all prefix hits first: an allocation could evict them.
        hits = [self._share_prefix_hits(group) for group in _all_groups(sequences)]
        transfers: dict[int, Transfer] = {}
        of_groups = ((sequence, group) for sequence in sequences for group in sequence.groups)
        for (sequence, group), group_hits in zip(of_groups, hits, strict=True):
            self._swap_in_group(sequence, group, group_hits, transfers)
        self.incoming.extend(transfers.values())

    def admit_outgoing(self, now: float) -> Copies:
        """The device-to-host copies due at time ``now``; releases their device blocks."""
        admitted = self.outgoing.admit(now)
        for transfer in reversed(admitted):
            self._pool.release(transfer.device_block)
        return tuple(BlockCopy(transfer.device_block, transfer.host_block) for transfer in admitted)

    def admit_incoming(self, now: float) -> Copies:
        """The host-to-device copies due at time ``now``; releases their host blocks."""
        admitted = self.incoming.admit(now)
        for transfer in admitted:
            self._host_pool.release(transfer.host_block)
            for sequence in transfer.sequences:
                sequence.num_pending_blocks -= 1
            if transfer.key is not None:
                self._pool.prefix_index.register(transfer.key, transfer.device_block)
        return tuple(BlockCopy(transfer.host_block, transfer.device_block) for transfer in admitted)

    def free(self, sequence: SequenceState) -> None:
        """Release the host blocks of a sequence and cancel its pending transfers."""
        if sequence.host_block_table is not None:
            for group in sequence.groups:
                for host_block in (group.host_block_table or [])[group.num_passed :]:
                    self._host_pool.release(host_block)
            for transfer in self.outgoing.cancel(
                lambda transfer: self._host_pool.ref_count(transfer.host_block) == 0
            ):
                self._pool.release(transfer.device_block)
        elif sequence.num_pending_blocks:
            for transfer in self.incoming.cancel(
                lambda transfer: self._pool.ref_count(transfer.device_block) == 0
            ):
                self._host_pool.release(transfer.host_block)

    def reset_prefix_cache(self) -> None:
        """Let no other sequence share content that is on the host or being swapped in."""
        self._host_pool.reset_prefix_cache()
        for transfer in self.incoming:
            transfer.key = None

    def relocate(self, moves: Mapping[int, int]) -> None:
        """Update pending transfers after device blocks have moved, from key to value."""
        self.outgoing.relocate(moves)
        self.incoming.relocate(moves)

    def _swap_out_group(self, group: GroupState, host_block_of: dict[int, int]) -> None:
        """``host_block_of`` maps the device blocks that this swap out has handled so far."""
        host_block_table: list[int] = []
        transfers: dict[int, Transfer] = {}
        for position, block in enumerate(self._computed_blocks(group)):
            if block == PADDING_BLOCK:
                host_block_table.append(PASSED)
                continue
            key = group.key_at(position)
            host_block = host_block_of.get(block)
            if host_block is None:
                host_block = self._host_pool.lookup(key)
            if host_block is None:
                host_block = self._host_pool.allocate(key)
                transfers[block] = Transfer(block, host_block)
            else:
                self._host_pool.share(host_block)
            host_block_of[block] = host_block
            host_block_table.append(host_block)
        self.outgoing.extend(transfers.values())
        for block in reversed(group.block_table.view[group.num_passed :].tolist()):
            if block in transfers:
                self._references.detach(block, group)
            else:
                self._references.release(block, group)
        group.host_block_table = host_block_table
        group.block_table = BlockTable()

    def _share_prefix_hits(self, group: GroupState) -> dict[int, int]:
        """The blocks by position whose content is in the prefix cache, with a new reference."""
        hits: dict[int, int] = {}
        for position in range(group.num_passed, len(group.host_block_table or ())):
            block = self._prefix_hit(group, position)
            if block is not None:
                self._references.share(block, group, position)
                hits[position] = block
        return hits

    def _swap_in_group(
        self,
        sequence: SequenceState,
        group: GroupState,
        hits: Mapping[int, int],
        transfers: dict[int, Transfer],
    ) -> None:
        """``transfers`` are those that this swap in has planned so far, by host block."""
        host_blocks = group.host_block_table or []
        block_table = BlockTable()
        for position in range(self._num_blocks(group)):
            if position < group.num_passed:
                block_table.append(PADDING_BLOCK)
            elif position >= len(host_blocks):
                block_table.append(self._references.allocate(group, position))
            elif position in hits:
                block_table.append(hits[position])
                self._host_pool.release(host_blocks[position])
            else:
                block = self._plan_transfer(
                    sequence, group, position, host_blocks[position], transfers
                )
                block_table.append(block)
        group.block_table = block_table
        group.host_block_table = None

    def _plan_transfer(
        self,
        sequence: SequenceState,
        group: GroupState,
        position: int,
        host_block: int,
        transfers: dict[int, Transfer],
    ) -> int:
        """The device block that the content of ``host_block`` is copied to."""
        sequence.num_pending_blocks += 1
        transfer = transfers.get(host_block)
        if transfer is None:
            block = self._references.allocate(group, position)
            # The transfer takes over the sequence's reference to the host block.
            transfers[host_block] = Transfer(block, host_block, (sequence,), group.key_at(position))
            return block
        self._references.share(transfer.device_block, group, position)
        self._host_pool.release(host_block)
        transfer.sequences += (sequence,)
        return transfer.device_block

    def _prefix_hit(self, group: GroupState, position: int) -> int | None:
        key = group.key_at(position)
        return None if key is None else self._pool.prefix_index.lookup(key)

    def _computed_blocks(self, group: GroupState) -> list[int]:
        num_computed = ceil_div(group.num_computed_tokens, self._block_size)
        blocks: list[int] = group.block_table.view[:num_computed].tolist()
        return blocks

    def _num_blocks(self, group: GroupState) -> int:
        return group.num_blocks_for(len(group.token_ids), self._block_size)


def _all_groups(sequences: Iterable[SequenceState]) -> Iterator[GroupState]:
    """What the sequences have in each group."""
    return chain.from_iterable(sequence.groups for sequence in sequences)
