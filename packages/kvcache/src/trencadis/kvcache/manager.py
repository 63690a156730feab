"""The owner of every block table: which sequence has which blocks, and which tokens are in them.

The manager does bookkeeping alone. Where memory must be touched it returns a plan, which
`trencadis.kvcache.tensors` (or another runtime) carries out before the next forward pass, in the
order in which plans were returned (see `MovePlan`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Sequence
from enum import Enum

from trencadis.kvcache.bandwidth import BandwidthGovernor
from trencadis.kvcache.block_pool import BlockPool
from trencadis.kvcache.block_table import Blocks, BlockTable
from trencadis.kvcache.config import CacheConfig
from trencadis.kvcache.decode_layout import DecodeLayout, lay_out
from trencadis.kvcache.device_blocks import DeviceBlocks
from trencadis.kvcache.errors import InvalidSetting, NotComputed, OutOfBlocks
from trencadis.kvcache.moves import BlockCopy, Copies, SwapCopies
from trencadis.kvcache.prefix import ID_TYPECODE, PrefixKeys, RequestHasher
from trencadis.kvcache.prefix_cache import PrefixCache
from trencadis.kvcache.sequence import SequenceRegistry, SequenceState
from trencadis.kvcache.swap_space import SwapSpace
from trencadis.kvcache.swapper import Swapper


class Allocation(Enum):
    """Whether a prompt can be given blocks: now, once others are freed, or in no case."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


class BlockManager:
    """Gives sequences blocks, shares what they have in common, and takes blocks back.

    A sequence is known by an integer id. Its *slots* are the token positions for which it has
    room; a slot is *computed* once its key and value vectors are in the cache. Only full, computed
    blocks are shared between prompts. Every method checks first and changes afterwards, so a
    raised error leaves everything as it was.

    ``hasher`` must be the one that makes the keys given to `allocate`. ``governor`` limits swap
    traffic; without one every swap is due at once. ``pool`` is there to be looked at.
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
        self._size = config.block_size
        self._watermark = int(config.watermark * (config.num_blocks - 1))
        self._blocks = DeviceBlocks(self.pool)
        self._space = SwapSpace(config.num_host_blocks, governor)
        self._swapper = Swapper(self._blocks, self._space, config.block_size)
        self._prefixes = PrefixCache(self.pool, self.hasher, enabled=config.enable_prefix_caching)
        self._sequences = SequenceRegistry()

    @property
    def num_total_blocks(self) -> int:
        """Device blocks that sequences can have: all but the padding block."""
        return self.config.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Device blocks that can be handed out, cached ones among them."""
        return self.pool.num_free

    @property
    def num_used_blocks(self) -> int:
        """Device blocks that belong to a sequence, or to a swap that is not carried out yet."""
        return self.pool.num_used

    @property
    def num_free_host_blocks(self) -> int:
        """Host blocks that hold nothing."""
        return self._space.num_free

    @property
    def highest_in_use(self) -> int:
        """The highest device block in use, 0 for none; a decode step reads the blocks up to it."""
        return self.pool.highest_in_use

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    def block_table(self, seq_id: int) -> Blocks:
        """The device blocks of a sequence: a read-only ``int32[num_blocks]`` view, in token order.

        The view costs nothing. It is good until the sequence or the placement changes: take it
        anew each step. A swapped sequence has no device blocks.
        """
        return self._sequences[seq_id].table.view

    def num_tokens(self, seq_id: int) -> int:
        """Slots reserved for the sequence."""
        return len(self._sequences[seq_id].tokens)

    def num_computed_tokens(self, seq_id: int) -> int:
        """Slots, from the first, whose key and value vectors are in the cache."""
        return self._sequences[seq_id].num_computed

    def is_resident(self, seq_id: int) -> bool:
        """Whether the sequence can run: it is on the device with all its computed blocks."""
        return self._sequences[seq_id].is_resident

    def last_access(self, seq_id: int) -> float | None:
        """When the sequence was last swapped out or in, in the caller's clock; None for never."""
        return self._sequences[seq_id].last_access

    def decode_layout(
        self, seq_ids: Sequence[int], *, num_blocks: int | None = None
    ) -> DecodeLayout:
        """How a decode batch, one row per sequence, reads the contiguous prefix of the cache.

        ``num_blocks`` pads the prefix to a bucket, of ``highest_in_use + 1`` blocks or more.
        Raises `UnknownSequence`, `NotResident`, or `InvalidSetting` for a bucket too small.
        """
        rows = [self._sequences.resident(seq_id) for seq_id in seq_ids]
        return lay_out(
            [row.table.view for row in rows],
            [len(row.tokens) for row in rows],
            self._size,
            num_blocks,
        )

    def can_allocate(
        self,
        token_ids: Sequence[int],
        *,
        hashes: PrefixKeys | None = None,
        extra_keys: Sequence[Hashable] = (),
    ) -> Allocation:
        """Whether `allocate`, with the same arguments, would find room for a prompt.

        NEVER: not even an empty cache holds it. LATER: it would leave fewer free blocks than the
        watermark, which is waived while nothing is in use, so that LATER never lasts for ever.
        """
        needed = self._blocks_for(len(token_ids))
        if needed > self.num_total_blocks:
            return Allocation.NEVER
        room = self._room_above_watermark()
        if needed <= room:
            return Allocation.OK
        keys = self._prefixes.keys_of(array(ID_TYPECODE, token_ids), hashes, extra_keys)
        hits = self._prefixes.match(len(token_ids), keys)
        needed -= sum(self.pool.ref_count(block) > 0 for block, _ in hits)
        return Allocation.OK if needed <= room else Allocation.LATER

    def allocate(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        *,
        hashes: PrefixKeys | None = None,
        extra_keys: Sequence[Hashable] = (),
    ) -> int:
        """Reserve slots for all of ``token_ids``; returns how many of them need no computing.

        The longest known prefix in full blocks is shared rather than computed again. At least one
        token is left to compute, as its logits are wanted: where the whole prompt is known, that
        is its last block, so that no shared block is ever written.

        ``hashes`` are the keys of the prompt, or of the first part of it, from `RequestHasher`.
        ``extra_keys`` (adapter id, cache salt) restrict sharing to sequences with equal ones; with
        ``hashes`` they are known from there. Raises `DuplicateSequence`, `OutOfBlocks`, or
        `InvalidSetting` for an empty prompt and for keys of other tokens.
        """
        self._sequences.require_new(seq_id)
        if not len(token_ids):
            raise InvalidSetting(f"sequence {seq_id} has no tokens: allocate at least one")
        tokens = array(ID_TYPECODE, token_ids)
        keys = self._prefixes.keys_of(tokens, hashes, extra_keys)
        hits = self._prefixes.match(len(tokens), keys)
        num_new = self._blocks_for(len(tokens)) - len(hits)
        self._require(num_new + sum(self.pool.ref_count(block) == 0 for block, _ in hits))
        self.pool.reuse.missed(keys.blocks[len(hits) :])
        table: list[int] = []
        for block, key in hits:
            self._blocks.share(block, seq_id, len(table))
            key.hits += 1
            table.append(block)
        for _ in range(num_new):
            table.append(self._blocks.take(seq_id, len(table)))
        state = SequenceState(
            seq_id=seq_id,
            tokens=tokens,
            table=BlockTable(table),
            num_computed=len(hits) * self._size,
            keys=[key for _, key in hits] if self._prefixes.enabled else None,
            extra=keys.extra,
        )
        self._sequences.add(state)
        return len(hits) * self._size

    def mark_computed(self, seq_id: int, num_tokens: int) -> None:
        """The key and value vectors of the first ``num_tokens`` slots are in the cache now.

        Full blocks among them become shareable. Never takes back what was computed. Raises
        `UnknownSequence`, `NotResident`, or `InvalidSetting` for more tokens than slots.
        """
        sequence = self._sequences.resident(seq_id)
        if num_tokens > len(sequence.tokens):
            raise InvalidSetting(
                f"sequence {seq_id} has {len(sequence.tokens)} slots, so {num_tokens} tokens "
                "cannot be computed: append them first"
            )
        if num_tokens <= sequence.num_computed:
            return
        sequence.num_computed = num_tokens
        self._prefixes.publish(sequence)

    def blocks_to_append(self, seq_id: int, num_tokens: int = 1) -> int:
        """Free blocks that `append` of ``num_tokens`` would take, a copy on write included."""
        return self._growth(self._sequences.resident(seq_id), num_tokens)

    def can_append(self, seq_id: int, num_tokens: int = 1) -> bool:
        """Whether `append` of ``num_tokens`` would find room."""
        return self.blocks_to_append(seq_id, num_tokens) <= self.pool.num_free

    def can_append_all(self, seq_ids: Collection[int], num_tokens: int = 1) -> bool:
        """Whether all sequences can be appended ``num_tokens`` each, one after the other.

        True at once where there is room for the worst case. Where several sequences share an
        unfinished block this counts a copy for each of them, one more than they will need.
        """
        worst = self._blocks_for(num_tokens) + 1
        if worst * len(seq_ids) <= self.pool.num_free:
            return True
        needed = sum(self.blocks_to_append(seq_id, num_tokens) for seq_id in seq_ids)
        return needed <= self.pool.num_free

    def append(self, seq_id: int, token_ids: Sequence[int]) -> Copies:
        """Reserve slots for new tokens; returns the copies to carry out before they are computed.

        A copy is due where the last block is unfinished and shared with a fork: the sequence
        goes on in a block of its own. Raises `UnknownSequence`, `NotResident` or `OutOfBlocks`.
        """
        sequence = self._sequences.resident(seq_id)
        new = array(ID_TYPECODE, token_ids)
        needed = self._growth(sequence, len(new))
        copies: Copies = ()
        if needed:
            self._require(needed)
            if self._must_copy(sequence):
                copies = (self._own_last_block(sequence),)
                needed -= 1
            for _ in range(needed):
                sequence.table.append(self._blocks.take(seq_id, len(sequence.table)))
        sequence.tokens.extend(new)
        return copies

    def fork(self, parent_id: int, child_id: int) -> None:
        """Start ``child_id`` as a copy of ``parent_id`` that shares all its blocks.

        The parent's slots must all be computed: two sequences that fill the same slots would write
        to one block. Raises `UnknownSequence`, `NotResident`, `NotComputed`, `DuplicateSequence`.
        """
        parent = self._sequences.resident(parent_id)
        self._sequences.require_new(child_id)
        if parent.num_computed < len(parent.tokens):
            raise NotComputed(
                f"sequence {parent_id} has {len(parent.tokens)} slots and {parent.num_computed} of "
                "them are computed: fork it after mark_computed, before append"
            )
        for position, block in enumerate(parent.table.view.tolist()):
            self._blocks.share(block, child_id, position)
        child = SequenceState(
            seq_id=child_id,
            tokens=parent.tokens[:],
            table=BlockTable(parent.table.view),
            num_computed=parent.num_computed,
            keys=None if parent.keys is None else parent.keys[:],
            extra=parent.extra,
        )
        self._sequences.add(child)

    def free(self, seq_id: int) -> None:
        """Forget a sequence, wherever it is, and give back its blocks.

        Raises `UnknownSequence`, also when called twice.
        """
        sequence = self._sequences.pop(seq_id)
        self._blocks.release_all(sequence.table.view.tolist(), seq_id)
        self._swapper.free(sequence)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content, as after a change of weights or of an adapter.

        Sequences keep their blocks, but nothing that they computed so far, or go on to compute
        from it, will be shared with a prompt that is allocated from now on.
        """
        self.pool.forget_cached()
        self._space.forget_contents()
        for sequence in self._sequences:
            sequence.keys = None

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether the host has room for these sequences, swapped out together.

        What must fit is the *host* side: swapping out takes host blocks and gives device blocks.
        (Seed 003 compares with the free device blocks, which would refuse to swap just when the
        device is full.) Raises `UnknownSequence` or `NotResident`.
        """
        sequences = self._sequences.all_resident(seq_ids)
        return self._swapper.host_blocks_for(sequences) <= self._space.num_free

    def swap_out(self, seq_ids: Sequence[int], now: float = 0.0) -> Copies:
        """Move sequences to the host; returns the device-to-host copies that are due at ``now``.

        Pass the sequences of one request together, so that what they share moves once. Only
        computed blocks move. With a governor, copies may be left over: they follow, in order,
        from later calls and from `resume_swaps`, and their device blocks stay in use until then.
        Raises `OutOfHostBlocks`, `UnknownSequence`, `NotResident`, or `DuplicateSequence` for an
        id given twice.
        """
        self._swapper.swap_out(self._sequences.all_resident(seq_ids), now)
        return self._swapper.admit_outgoing(now)

    def can_swap_in(self, seq_ids: Sequence[int]) -> bool:
        """Whether these sequences, all on the host, would fit on the device with the watermark.

        False while some of their content is still on its way to the host. Raises
        `UnknownSequence` or `NotSwapped`.
        """
        sequences = self._sequences.all_swapped(seq_ids)
        if any(self._swapper.is_leaving(sequence) for sequence in sequences):
            return False
        return self._swapper.device_blocks_for(sequences) <= self._room_above_watermark()

    def swap_in(self, seq_ids: Sequence[int], now: float = 0.0) -> Copies:
        """Move sequences to the device; returns the host-to-device copies due at ``now``.

        Blocks whose content is still cached on the device are taken from there. With a governor
        the sequences may have to wait for later copies: see `is_resident` and `resume_swaps`.
        Raises `OutOfBlocks`, `UnknownSequence`, `NotSwapped`, also for one still on its way out,
        or `DuplicateSequence` for an id given twice.
        """
        self._swapper.swap_in(self._sequences.all_swapped(seq_ids), now)
        return self._swapper.admit_incoming(now)

    def resume_swaps(self, now: float) -> SwapCopies:
        """The copies of earlier swaps that are due at ``now`` (seconds); call it every step."""
        return SwapCopies(self._swapper.admit_outgoing(now), self._swapper.admit_incoming(now))

    def has_content(self, block: int) -> bool:
        """Whether anything in a used block has been computed: if not, it moves without a copy."""
        holders = self._blocks.holders(block)
        first_slot = self._blocks.position(block) * self._size
        return not holders or any(
            self._sequences[seq_id].num_computed > first_slot for seq_id in holders
        )

    def relocate(self, moves: Sequence[BlockCopy], *, keep: Collection[int] = ()) -> None:
        """Move used blocks to free ones, for all their sequences; `Defragmenter` plans this.

        Content that a destination in ``keep`` is cached for moves to the source in exchange, that
        of others is evicted. Raises `InvalidBlock`.
        """
        for src, dst in moves:
            position, holders = self._blocks.relocate(src, dst, keep=dst in keep)
            for seq_id in holders:
                self._sequences[seq_id].table.replace(position, dst)
        self._swapper.relocate(dict(moves))

    def _require(self, num_blocks: int) -> None:
        if num_blocks > self.pool.num_free:
            raise OutOfBlocks(
                f"{num_blocks} blocks are needed and {self.pool.num_free} are free: "
                "free or swap out a sequence, or raise num_blocks"
            )

    def _room_above_watermark(self) -> int:
        return self.pool.num_free - (self._watermark if self.pool.num_used else 0)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)

    def _growth(self, sequence: SequenceState, num_tokens: int) -> int:
        if num_tokens == 0:
            return 0
        slots = len(sequence.tokens) + num_tokens
        return self._blocks_for(slots) - len(sequence.table) + self._must_copy(sequence)

    def _must_copy(self, sequence: SequenceState) -> bool:
        unfinished = len(sequence.tokens) % self._size
        return unfinished > 0 and self.pool.is_shared(sequence.table.last())

    def _own_last_block(self, sequence: SequenceState) -> BlockCopy:
        position = len(sequence.table) - 1
        shared = sequence.table.last()
        own = self._blocks.take(sequence.seq_id, position)
        self._blocks.release(shared, sequence.seq_id)
        sequence.table.replace(position, own)
        return BlockCopy(shared, own)
