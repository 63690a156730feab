"""The block manager: allocates the blocks of sequences and owns their block tables.

The manager only does bookkeeping. An operation that needs block copies returns them, and the
runtime (for example `trencadis.kvcache.tensors`) carries them out before the next forward pass,
in the order in which they were returned (see `CopyPlan`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Sequence
from enum import Enum

from trencadis.kvcache.bandwidth import BandwidthGovernor
from trencadis.kvcache.block_keys import ID_TYPECODE, PrefixKeys, RequestHasher
from trencadis.kvcache.block_pool import BlockPool
from trencadis.kvcache.block_references import BlockReferences
from trencadis.kvcache.block_table import BlockIds, BlockTable
from trencadis.kvcache.config import CacheConfig
from trencadis.kvcache.copy_plan import BlockCopy, Copies, SwapCopies
from trencadis.kvcache.errors import InvalidSetting, NotComputed, OutOfBlocks
from trencadis.kvcache.host_block_pool import HostBlockPool
from trencadis.kvcache.prefix_cache import PrefixCache
from trencadis.kvcache.rounding import ceil_div
from trencadis.kvcache.sequences import SequenceState, SequenceTable
from trencadis.kvcache.swapper import Swapper


class AllocStatus(Enum):
    """Whether blocks for a prompt can be allocated: now, later, or never (as in vLLM)."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


_NO_SWAPS = SwapCopies((), ())


class BlockManager:
    """Allocates blocks to sequences, shares common content, and swaps sequences.

    A sequence is known by an integer id. A *slot* is a token position with memory in a block; it
    is *computed* when the key and value vectors of its token are in the cache. Only full blocks
    of computed slots are shared between prompts. Every method checks first and changes afterwards,
    so a method that raises changes nothing.

    ``pool`` and ``host_pool`` are for reading: the numbers of free and used blocks. ``hasher``
    computes the ``prefix_keys`` arguments. ``governor`` limits the bandwidth of swaps; without
    one all swap copies are due at once.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        hasher: RequestHasher | None = None,
        governor: BandwidthGovernor | None = None,
    ) -> None:
        self.config = config
        self.hasher = hasher or RequestHasher(config.block_size)
        self.pool = BlockPool(config.num_blocks, config.decode_buckets)
        self.host_pool = HostBlockPool(config.num_host_blocks)
        self._block_size = config.block_size
        self._watermark_blocks = int(config.watermark * self.pool.num_usable_blocks)
        self._references = BlockReferences(self.pool)
        self._swapper = Swapper(self._references, self.host_pool, config.block_size, governor)
        self._prefix_cache = PrefixCache(
            self.pool, self.hasher, enabled=config.enable_prefix_caching
        )
        self._sequences = SequenceTable()

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def block_table(self, seq_id: int) -> BlockIds:
        """The device blocks of a sequence in token order: a read-only ``int32[num_blocks]`` view.

        The view is valid until the sequence grows or moves, so read it again in every step. The
        table of a swapped sequence is empty. Raises `UnknownSequence`.
        """
        return self._sequences[seq_id].block_table.view

    def num_tokens(self, seq_id: int) -> int:
        """The number of slots of a sequence. Raises `UnknownSequence`."""
        return len(self._sequences[seq_id].token_ids)

    def is_resident(self, seq_id: int) -> bool:
        """Whether all computed blocks of a sequence are on the device, so that it can run.

        Raises `UnknownSequence`.
        """
        return self._sequences[seq_id].is_resident

    def num_cached_prefix_blocks(self, prefix_keys: PrefixKeys) -> int:
        """The number of leading full blocks of a request that are in the prefix cache."""
        return len(self.pool.prefix_index.match(prefix_keys.blocks))

    def can_allocate(
        self,
        token_ids: Sequence[int],
        *,
        prefix_keys: PrefixKeys | None = None,
        extra_keys: Sequence[Hashable] = (),
    ) -> AllocStatus:
        """Whether `allocate` with the same arguments should be called now.

        NEVER: the prompt needs more blocks than the cache has. LATER: it would leave fewer free
        blocks than the watermark. The watermark does not apply while no block is used, so LATER
        always ends.
        """
        needed = ceil_div(len(token_ids), self._block_size)
        if needed > self.pool.num_usable_blocks:
            return AllocStatus.NEVER
        available = self._num_blocks_above_watermark()
        if needed <= available:
            return AllocStatus.OK
        tokens = array(ID_TYPECODE, token_ids)
        keys = self._prefix_cache.complete_keys(tokens, prefix_keys, extra_keys)
        hits = self._prefix_cache.match(len(tokens), keys)
        needed -= sum(self.pool.ref_count(block) > 0 for block, _ in hits)
        return AllocStatus.OK if needed <= available else AllocStatus.LATER

    def allocate(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        *,
        prefix_keys: PrefixKeys | None = None,
        extra_keys: Sequence[Hashable] = (),
    ) -> int:
        """Allocate slots for all of ``token_ids``; returns the number of cached tokens.

        The sequence shares the blocks of the longest cached prefix. At least one token is left to
        compute, because its logits are needed: if the prefix cache holds the full prompt, the last
        block is recomputed, so that no shared block is ever written.

        ``prefix_keys``, from `RequestHasher`, are the keys of the prompt or of a first part of it.
        Only sequences with equal ``extra_keys`` (adapter id, cache salt) share blocks;
        ``prefix_keys`` contain their extra keys. Raises `DuplicateSequence`, `OutOfBlocks`, or
        `InvalidSetting` for an empty prompt or the keys of other tokens.
        """
        self._sequences.require_new(seq_id)
        if not len(token_ids):
            raise InvalidSetting(f"sequence {seq_id} has 0 tokens: allocate at least one")
        tokens = array(ID_TYPECODE, token_ids)
        keys = self._prefix_cache.complete_keys(tokens, prefix_keys, extra_keys)
        hits = self._prefix_cache.match(len(tokens), keys)
        num_new = ceil_div(len(tokens), self._block_size) - len(hits)
        self._require_free(num_new + sum(self.pool.ref_count(block) == 0 for block, _ in hits))
        self.pool.reuse.record_misses(keys.blocks[len(hits) :])
        blocks: list[int] = []
        for block, key in hits:
            self._references.share(block, seq_id, len(blocks))
            key.hits += 1
            blocks.append(block)
        for _ in range(num_new):
            blocks.append(self._references.allocate(seq_id, len(blocks)))
        num_cached_tokens = len(hits) * self._block_size
        self._sequences.add(
            SequenceState(
                seq_id=seq_id,
                token_ids=tokens,
                block_table=BlockTable(blocks),
                num_computed_tokens=num_cached_tokens,
                keys=[key for _, key in hits] if self._prefix_cache.enabled else None,
                extra=keys.extra,
            )
        )
        return num_cached_tokens

    def mark_computed(self, seq_id: int, num_tokens: int) -> None:
        """Record that the first ``num_tokens`` slots of a sequence are computed.

        Full blocks among them enter the prefix cache. A smaller number than before has no effect.
        Raises `UnknownSequence`, `NotResident`, or `InvalidSetting` for more tokens than slots.
        """
        sequence = self._sequences.resident(seq_id)
        if num_tokens > len(sequence.token_ids):
            raise InvalidSetting(
                f"sequence {seq_id} has {len(sequence.token_ids)} slots, so {num_tokens} tokens "
                "cannot be computed: append them first"
            )
        if num_tokens <= sequence.num_computed_tokens:
            return
        sequence.num_computed_tokens = num_tokens
        self._prefix_cache.cache_full_blocks(sequence)

    def blocks_to_append(self, seq_id: int, num_tokens: int = 1) -> int:
        """The number of free blocks that `append` of ``num_tokens`` needs.

        Includes the copy-on-write of a shared last block. Raises `UnknownSequence` or
        `NotResident`.
        """
        return self._num_blocks_to_append(self._sequences.resident(seq_id), num_tokens)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> Copies:
        """Allocate slots for new tokens; returns the copies to carry out before the forward pass.

        A copy-on-write is needed if the last block is partial and shared with a fork. Raises
        `UnknownSequence`, `NotResident` or `OutOfBlocks`.
        """
        sequence = self._sequences.resident(seq_id)
        tokens = array(ID_TYPECODE, token_ids)
        needed = self._num_blocks_to_append(sequence, len(tokens))
        copies: Copies = ()
        if needed:
            self._require_free(needed)
            if self._needs_copy_on_write(sequence):
                copies = (self._copy_last_block(sequence),)
                needed -= 1
            for _ in range(needed):
                position = len(sequence.block_table)
                sequence.block_table.append(self._references.allocate(seq_id, position))
        sequence.token_ids.extend(tokens)
        return copies

    def fork(self, parent_id: int, child_id: int) -> None:
        """Create ``child_id`` as a copy of ``parent_id`` that shares all its blocks.

        All slots of the parent must be computed; otherwise both sequences would write the same
        slots. Raises `UnknownSequence`, `NotResident`, `NotComputed` or `DuplicateSequence`.
        """
        parent = self._sequences.resident(parent_id)
        self._sequences.require_new(child_id)
        if parent.num_computed_tokens < len(parent.token_ids):
            raise NotComputed(
                f"sequence {parent_id} has {len(parent.token_ids)} slots and "
                f"{parent.num_computed_tokens} of them are computed: fork it after mark_computed "
                "and before append"
            )
        for position, block in enumerate(parent.block_table.view.tolist()):
            self._references.share(block, child_id, position)
        self._sequences.add(
            SequenceState(
                seq_id=child_id,
                token_ids=parent.token_ids[:],
                block_table=BlockTable(parent.block_table.view),
                num_computed_tokens=parent.num_computed_tokens,
                keys=None if parent.keys is None else parent.keys[:],
                extra=parent.extra,
            )
        )

    def free(self, seq_id: int) -> None:
        """Remove a sequence and release its blocks, on the device and on the host.

        Raises `UnknownSequence`, also if the sequence was freed already.
        """
        sequence = self._sequences.pop(seq_id)
        self._references.release_all(sequence.block_table.view.tolist(), seq_id)
        self._swapper.free(sequence)

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache, for example after a change of the weights or of an adapter.

        Sequences keep their blocks. Their content, and what they compute from it later, is never
        shared with prompts that are allocated after the reset.
        """
        self.pool.reset_prefix_cache()
        self._swapper.reset_prefix_cache()
        for sequence in self._sequences:
            sequence.keys = None

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether the host has enough free blocks to swap out these sequences together.

        A swap out needs host blocks and releases device blocks. (Seed 003 compares with the free
        device blocks, which forbids a swap out when the device is full.) Raises
        `UnknownSequence`, `NotResident` or `DuplicateSequence`.
        """
        sequences = self._sequences.all_resident(seq_ids)
        needed = self._swapper.num_host_blocks_needed(sequences)
        return needed <= self.host_pool.num_free_blocks

    def swap_out(self, seq_ids: Sequence[int], now: float = 0.0) -> Copies:
        """Swap out sequences; returns the device-to-host copies due at time ``now`` (seconds).

        Pass the sequences of one group together, so that shared blocks are copied once. Only
        computed blocks are copied. With a governor some copies may become due later: later calls
        and `resume_swaps` return them in order, and their device blocks stay used until then.
        Raises `OutOfHostBlocks`, `UnknownSequence`, `NotResident` or `DuplicateSequence`.
        """
        self._swapper.swap_out(self._sequences.all_resident(seq_ids))
        return self._swapper.admit_outgoing(now)

    def can_swap_in(self, seq_ids: Sequence[int]) -> bool:
        """Whether the device has enough free blocks above the watermark for these sequences.

        False while a transfer of one of them to the host is pending. Raises `UnknownSequence`,
        `NotSwapped` or `DuplicateSequence`.
        """
        sequences = self._sequences.all_swapped(seq_ids)
        if any(self._swapper.is_swapping_out(sequence) for sequence in sequences):
            return False
        needed = self._swapper.num_device_blocks_needed(sequences)
        return needed <= self._num_blocks_above_watermark()

    def swap_in(self, seq_ids: Sequence[int], now: float = 0.0) -> Copies:
        """Swap in sequences; returns the host-to-device copies due at time ``now`` (seconds).

        Blocks in the prefix cache are shared instead of copied. With a governor some copies may
        become due later (see `resume_swaps`); `is_resident` is False until all of them were
        returned. Raises `OutOfBlocks`, `UnknownSequence`, `NotSwapped` (also while the swap out
        is not complete) or `DuplicateSequence`.
        """
        self._swapper.swap_in(self._sequences.all_swapped(seq_ids))
        return self._swapper.admit_incoming(now)

    def resume_swaps(self, now: float) -> SwapCopies:
        """The copies of earlier swaps that are due at ``now`` (seconds); call it every step."""
        if not self._swapper.has_pending:
            return _NO_SWAPS
        return SwapCopies(self._swapper.admit_outgoing(now), self._swapper.admit_incoming(now))

    def relocate(self, moves: Sequence[BlockCopy], *, keep: Collection[int] = ()) -> Copies:
        """Move used blocks to free blocks and update the block tables; returns the copies.

        For `Defragmenter`. Blocks without a computed slot move without a copy. If a destination
        in ``keep`` is a cached block, its content moves to the source; the content of other
        destinations is evicted. Raises `InvalidBlock`.
        """
        copies = [move for move in moves if self._has_computed_slot(move.src)]
        copies += [BlockCopy(dst, src) for src, dst in moves if dst in keep]
        for src, dst in moves:
            position, seq_ids = self._references.relocate(src, dst, keep=dst in keep)
            for seq_id in seq_ids:
                self._sequences[seq_id].block_table.replace(position, dst)
        self._swapper.relocate(dict(moves))
        return tuple(copies)

    def _require_free(self, num_blocks: int) -> None:
        if num_blocks > self.pool.num_free_blocks:
            raise OutOfBlocks(
                f"{num_blocks} blocks are needed and {self.pool.num_free_blocks} are free: "
                "free or swap out a sequence, or raise num_blocks"
            )

    def _num_blocks_above_watermark(self) -> int:
        watermark = self._watermark_blocks if self.pool.num_used_blocks else 0
        return self.pool.num_free_blocks - watermark

    def _num_blocks_to_append(self, sequence: SequenceState, num_tokens: int) -> int:
        if num_tokens == 0:
            return 0
        num_slots = len(sequence.token_ids) + num_tokens
        num_new = ceil_div(num_slots, self._block_size) - len(sequence.block_table)
        return num_new + self._needs_copy_on_write(sequence)

    def _needs_copy_on_write(self, sequence: SequenceState) -> bool:
        is_partial = len(sequence.token_ids) % self._block_size > 0
        return is_partial and self.pool.is_shared(sequence.block_table.last())

    def _copy_last_block(self, sequence: SequenceState) -> BlockCopy:
        position = len(sequence.block_table) - 1
        shared = sequence.block_table.last()
        copy = self._references.allocate(sequence.seq_id, position)
        self._references.release(shared, sequence.seq_id)
        sequence.block_table.replace(position, copy)
        return BlockCopy(shared, copy)

    def _has_computed_slot(self, block: int) -> bool:
        """A block that only a pending swap out references counts as computed."""
        seq_ids = self._references.sequences(block)
        first_slot = self._references.position(block) * self._block_size
        return not seq_ids or any(
            self._sequences[seq_id].num_computed_tokens > first_slot for seq_id in seq_ids
        )
