"""The block manager: allocates the blocks of sequences and owns their block tables.

The manager only does bookkeeping. An operation that needs block copies returns them, and the
runtime (for example `trencadis.kvcache.tensors`) carries them out before the next forward pass,
in the order in which they were returned (see `CopyPlan`).
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Sequence
from enum import Enum
from math import isfinite
from typing import NoReturn, SupportsIndex

from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.block_pool import BlockPool
from trencadis.kvcache.cache_events import NO_EVENTS, CacheEvents, CacheRecorder
from trencadis.kvcache.config import PADDING_BLOCK, CacheConfig
from trencadis.kvcache.copy_plan import BlockCopy, Copies, SwapCopies, as_block_copies
from trencadis.kvcache.errors import CannotCopy, InvalidBlock, InvalidSetting, OutOfBlocks
from trencadis.kvcache.prefix_cache import (
    PREFIX_KEYS,
    Hits,
    PrefixCache,
    PrefixKeys,
    RequestHasher,
    as_token_array,
)
from trencadis.kvcache.rounding import ceil_div, num_passed_blocks
from trencadis.kvcache.sequences import (
    BlockIds,
    BlockReferences,
    GroupState,
    SequenceState,
    SequenceTable,
)
from trencadis.kvcache.state_snapshots import StateSnapshots
from trencadis.kvcache.swapper import HostBlockPool, Swapper
from trencadis.kvcache.transfers import TIME, BandwidthGovernor
from trencadis.kvcache.validators import instance_of, integer

_NUM_TOKENS = integer(0, remedy="pass a number of tokens")
_NUM_SPARE = integer(0, remedy="pass the number of blocks to leave free")


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
    so a method that raises changes nothing. A method raises `UnknownSequence` for an id that has
    no blocks, and one that says *on the device* raises `NotResident` for a swapped sequence.

    ``pool`` and ``host_pool`` are for reading: the numbers of free and used blocks. ``hasher``
    computes the ``prefix_keys`` arguments. ``governor`` limits the bandwidth of swaps; without
    one all swap copies are due at once. ``recorder`` notes what the prefix cache gets and loses,
    for tiers below it. ``snapshots``: those of a model with layers that keep a state; a prefix hit
    ends where there is one. Raises `InvalidSetting` for a hasher of another block size.
    To copy or pickle a manager raises `CannotCopy`: two would give away the same blocks.
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        hasher: RequestHasher | None = None,
        governor: BandwidthGovernor | None = None,
        recorder: CacheRecorder | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        instance_of(CacheConfig).checked("config", config)
        self.config = config
        self.hasher = RequestHasher(config.block_size) if hasher is None else hasher
        instance_of(RequestHasher).checked("hasher", self.hasher)
        if self.hasher.block_size != config.block_size:
            raise InvalidSetting(
                f"the hasher has blocks of {self.hasher.block_size} tokens and the cache blocks of "
                f"{config.block_size}: make the hasher with the block size of the cache"
            )
        if governor is not None:
            instance_of(BandwidthGovernor).checked("governor", governor)
        if snapshots is not None:
            instance_of(StateSnapshots).checked("snapshots", snapshots)
        self.snapshots = snapshots
        self._recorder = CacheRecorder() if config.record_events else None
        recorders = [each for each in (self._recorder, recorder) if each is not None]
        self.pool = BlockPool(config.num_blocks, config.decode_buckets, recorders)
        self.host_pool = HostBlockPool(config.num_host_blocks)
        self._block_size = config.block_size
        self._num_groups = len(config.windows)
        self._has_windows = any(window is not None for window in config.windows)
        self._holds_all = config.windows == (None,)
        # Whether blocks are lacking only past the last one of one table.
        self._appends_at_end = self._num_groups == 1 and (
            config.tokens_ahead is None or not self._has_windows
        )
        self._watermark_blocks = int(config.watermark * self.pool.num_usable_blocks)
        self._references = BlockReferences(self.pool, config.block_size)
        self._swapper = Swapper(self._references, self.host_pool, config.block_size, governor)
        self._prefix_cache = PrefixCache(
            self.pool.prefix_index,
            self.hasher,
            enabled=config.enable_prefix_caching,
            windows=config.windows,
            snapshots=snapshots,
        )
        self._sequences = SequenceTable()

    def __contains__(self, seq_id: int) -> bool:
        try:
            return seq_id in self._sequences
        except TypeError:  # cannot be hashed
            return False

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise CannotCopy(
            f"a BlockManager of {self.config.num_blocks} blocks cannot be copied or pickled: both "
            "would give away the same blocks. Make one with its config"
        )

    def block_table(self, seq_id: int, group: int = 0) -> BlockIds:
        """The device blocks of a sequence in token order: a read-only ``int32[num_blocks]`` view.

        They hold the layers of a block group. First come as many padding blocks 0 as blocks were
        given back: see `CacheConfig.windows`.

        The view is valid until the sequence grows or moves, so read it again in every step. The
        table of a swapped sequence is empty. Raises `InvalidSetting` for a group that is not there.
        """
        sequence = self._sequences.find(seq_id)
        if type(group) is int and not group:
            return sequence.block_table.view
        remedy = "pass the number of a block group"
        group = integer(0, self._num_groups - 1, remedy=remedy).checked("group", group)
        return sequence.groups[group].block_table.view

    def num_tokens(self, seq_id: int) -> int:
        """The number of slots of a sequence."""
        return len(self._sequences.find(seq_id).token_ids)

    def snapshot_slot(self, seq_id: int) -> int | None:
        """The slot of the state after the computed tokens of a sequence, if there is a snapshot.

        After `allocate` that of the cached prefix, which is thereby the most recently used one.
        """
        sequence = self._sequences.find(seq_id)
        num_tokens, keys = sequence.num_computed_tokens, sequence.keys
        if self.snapshots is None or not keys or num_tokens != len(keys) * self._block_size:
            return None
        return self.snapshots.use(keys[-1])

    def reserve_snapshot(
        self, seq_id: int, num_tokens: int, *, is_replaced_first: bool = False
    ) -> int | None:
        """A slot for the state that a sequence on the device will have after ``num_tokens``.

        The runtime copies the state to it after the forward pass that computes the last of these
        tokens, and before the next one; `mark_computed` makes it a snapshot, which is replaced
        before others if ``is_replaced_first``, until there is a hit on it. None where no slot
        is free, or the content of the sequence is not shared. Raises `InvalidSetting` without
        ``snapshots``, and for tokens that are computed, have no slots, or end within a block.
        """
        sequence = self._sequences.resident(seq_id)
        if self.snapshots is None:
            raise InvalidSetting("the cache keeps no states: make it with snapshots", "snapshots")
        first, last = sequence.num_computed_tokens + 1, len(sequence.token_ids)
        num_tokens = _NUM_TOKENS.checked("num_tokens", num_tokens)
        if not first <= num_tokens <= last or num_tokens % self._block_size:
            raise InvalidSetting(
                f"num_tokens must be whole blocks of {self._block_size}, and {first} to {last} of "
                f"sequence {seq_id}, got {num_tokens}: reserve before the tokens are computed"
            )
        if sequence.keys is None:
            return None
        return self.snapshots.reserve(seq_id, num_tokens, is_replaced_first=is_replaced_first)

    def num_computed_tokens(self, seq_id: int) -> int:
        """The number of slots of a sequence that `mark_computed` has recorded."""
        return self._sequences.find(seq_id).num_computed_tokens

    def is_resident(self, seq_id: int) -> bool:
        """Whether all computed blocks of a sequence are on the device, so that it can run."""
        return self._sequences.find(seq_id).is_resident

    def num_cached_prefix_blocks(
        self,
        prefix_keys: PrefixKeys,
        *,
        num_tokens: int | None = None,
        needs_snapshot: bool = True,
    ) -> int:
        """The number of leading full blocks of a request that are in the prefix cache.

        Those that no later token sees by `CacheConfig.windows` need not be there. With
        ``num_tokens``, the length of the prompt: those that `allocate` would share, which leaves at
        least one token to compute. Without ``needs_snapshot`` the state after them need not be
        kept. Raises `InvalidSetting` for a length below 0.
        """
        num_blocks = len(PREFIX_KEYS.checked("prefix_keys", prefix_keys).blocks)
        if num_tokens is not None:
            num_tokens = _NUM_TOKENS.checked("num_tokens", num_tokens)
            num_blocks = min(num_blocks, max(0, num_tokens - 1) // self._block_size)
        if not needs_snapshot:
            return len(self._prefix_cache.hits_of_blocks(prefix_keys, num_blocks)[0])
        return len(self._prefix_cache.hits(prefix_keys, num_blocks)[0])

    def can_allocate(
        self,
        token_ids: Sequence[int],
        *,
        prefix_keys: PrefixKeys | None = None,
        extra_keys: Sequence[Hashable] = (),
        reads_cache: bool = True,
        num_spare: int = 0,
    ) -> AllocStatus:
        """Whether `allocate` with the same arguments should be called now.

        NEVER: the prompt needs more blocks than the cache has. LATER: it would leave fewer free
        blocks than the watermark and ``num_spare`` together. The watermark does not apply while no
        block is used, so without spare blocks LATER always ends. Where `append` adds blocks while
        the prompt is computed, the most that it has at a time count. Raises `InvalidSetting` as
        `allocate` does.
        """
        if type(num_spare) is not int or num_spare < 0:
            num_spare = _NUM_SPARE.checked("num_spare", num_spare)
        needed = self._num_prompt_blocks(token_ids)
        if needed > self.pool.num_usable_blocks:
            return AllocStatus.NEVER
        available = self._num_blocks_above_watermark() - num_spare
        if needed <= available or not reads_cache:
            return AllocStatus.OK if needed <= available else AllocStatus.LATER
        tokens = as_token_array(token_ids)
        _, hits = self._prefix_cache.match(tokens, prefix_keys, extra_keys)
        num_blocks = ceil_div(len(tokens), self._block_size)
        needed = 0
        for of_group, most in zip(hits, self.config.most_window_blocks, strict=True):
            of_others = sum(
                block == PADDING_BLOCK or self.pool.ref_count(block) > 0 for block, _ in of_group
            )
            own = num_blocks - of_others
            needed += own if most is None else min(own, most)
        return AllocStatus.OK if needed <= available else AllocStatus.LATER

    def allocate(
        self,
        seq_id: int,
        token_ids: Sequence[int],
        *,
        prefix_keys: PrefixKeys | None = None,
        extra_keys: Sequence[Hashable] = (),
        reads_cache: bool = True,
    ) -> int:
        """Allocate slots for all of ``token_ids``; returns the number of cached tokens.

        With `CacheConfig.tokens_ahead`, slots of groups with a window get their blocks in part from
        `append`, which is to be called before each step that computes tokens.

        The sequence shares the blocks of the longest cached prefix. At least one token is left to
        compute, because its logits are needed: if the prefix cache holds the full prompt, the last
        block is recomputed, so that no shared block is ever written.

        Without ``reads_cache`` it shares none, so that every token is computed; its own full blocks
        enter the prefix cache all the same.

        ``prefix_keys``, from `RequestHasher`, are the keys of the prompt or of a first part of it.
        Only sequences with equal ``extra_keys`` (adapter id, cache salt) share blocks;
        ``prefix_keys`` contain their extra keys. See `RequestHasher` for the types of extra keys.
        Raises `DuplicateSequence`, `OutOfBlocks`, or `InvalidSetting` for an empty prompt, for
        token ids that are not 32-bit integers, and for prefix keys of other tokens or extra keys.
        """
        self._sequences.require_new(seq_id)
        if self._num_prompt_blocks(token_ids) > self.pool.num_usable_blocks:
            raise OutOfBlocks(
                f"{len(token_ids)} tokens need more than the {self.pool.num_usable_blocks} blocks "
                "of the cache: shorten the prompt, or raise num_blocks"
            )
        tokens = as_token_array(token_ids)
        keys, hits = self._prefix_cache.match(tokens, prefix_keys, extra_keys)
        if not reads_cache:
            hits = [()] * self._num_groups
        sequence = self._new_sequence(seq_id, tokens, keys.extra, hits)
        groups, num_hits = sequence.groups, len(hits[0])
        num_new = [
            group.num_blocks_for(len(tokens), self._block_size) - num_hits for group in groups
        ]
        shared = [block for of_group in hits for block, _ in of_group if block != PADDING_BLOCK]
        self._require_free(sum(num_new) + sum(self.pool.ref_count(block) == 0 for block in shared))
        if reads_cache:
            self.pool.reuse.record_misses(keys.blocks[num_hits:])
        # All hits first: an allocation could evict them.
        for group, of_group in zip(groups, hits, strict=True):
            self._references.share_prefix(group, [block for block, _ in of_group])
            for _, key in of_group:
                key.hits += 1
        for group, count in zip(groups, num_new, strict=True):
            self._references.extend(group, count)
        self._sequences[seq_id] = sequence
        return num_hits * self._block_size

    def _new_sequence(
        self, seq_id: int, tokens: array[int], extra: bytes, hits: Sequence[Hits]
    ) -> SequenceState:
        """The state of a sequence with these cached blocks, to which it has no references yet."""
        num_computed, caches = len(hits[0]) * self._block_size, self._prefix_cache.enabled
        further = tuple(
            GroupState(tokens, num_computed, [key for _, key in of_group] if caches else None)
            for of_group in hits[1:]
        )
        keys = [key for _, key in hits[0]] if caches else None
        sequence = SequenceState(
            tokens, num_computed, keys, seq_id=seq_id, extra=extra, further=further
        )
        if self._has_windows:
            for group, window, of_group in zip(
                sequence.groups, self.config.windows, hits, strict=True
            ):
                if window is not None:
                    group.window, group.tokens_ahead = window, self.config.tokens_ahead
                    group.num_passed = sum(block == PADDING_BLOCK for block, _ in of_group)
        return sequence

    def mark_computed(self, seq_id: int, num_tokens: int) -> None:
        """Record that the first ``num_tokens`` slots of a sequence on the device are computed.

        Full blocks among them enter the prefix cache, and the states that a snapshot was reserved
        for. Blocks that no later token sees, by the window of the configuration, are given back.
        A smaller number than before has no effect. Raises `InvalidSetting` for more tokens than
        slots.
        """
        sequence = self._sequences.resident(seq_id)
        if type(num_tokens) is not int or num_tokens < 0:
            num_tokens = _NUM_TOKENS.checked("num_tokens", num_tokens)
        if num_tokens > len(sequence.token_ids):
            raise InvalidSetting(
                f"sequence {seq_id} has {len(sequence.token_ids)} slots, so {num_tokens} tokens "
                "cannot be computed: append them first"
            )
        if num_tokens <= sequence.num_computed_tokens:
            return
        keys, num_full = sequence.keys, num_tokens // self._block_size
        if keys is not None and num_full > len(keys):
            new_blocks = sequence.block_table.view[len(keys) : num_full].tolist()
            self._prefix_cache.cache_full_blocks(
                keys, new_blocks, sequence.token_ids, sequence.extra
            )
            if self.snapshots is not None:
                self.snapshots.keep(seq_id, keys, self._block_size)
        sequence.num_computed_tokens = num_tokens
        if not self._holds_all:
            self._mark_in_groups(sequence, num_tokens)

    def _mark_in_groups(self, sequence: SequenceState, num_tokens: int) -> None:
        """The part of `mark_computed` that several groups and windows need."""
        keys = sequence.keys
        for number, group in enumerate(sequence.further, 1):
            group.num_computed_tokens = num_tokens
            if keys is not None and group.keys is not None and len(keys) > len(group.keys):
                new_blocks = group.block_table.view[len(group.keys) : len(keys)].tolist()
                self._prefix_cache.cache_in_group(number, group.keys, new_blocks, keys)
        for group in sequence.groups:
            if group.window is not None:
                num_passed = num_passed_blocks(num_tokens, group.window, self._block_size)
                if num_passed > group.num_passed:
                    self._references.release_passed(group, num_passed)

    def blocks_to_append(self, seq_id: int, num_tokens: int = 1) -> int:
        """The number of free blocks that `append` of ``num_tokens`` needs, in all groups.

        Includes the copy-on-write of a shared last block. The sequence must be on the device.
        """
        sequence = self._sequences.resident(seq_id)
        if type(num_tokens) is not int or num_tokens < 0:
            num_tokens = _NUM_TOKENS.checked("num_tokens", num_tokens)
        if self._appends_at_end:
            return sum(self._append_needs(sequence, num_tokens))
        return sum(sum(self._group_needs(group, num_tokens)) for group in sequence.groups)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> Copies:
        """Allocate slots for new tokens of a sequence on the device.

        Returns the copies to carry out before the forward pass: a copy-on-write in each group if
        the last block is partial and shared with a fork. With `CacheConfig.tokens_ahead` earlier
        slots, too, get blocks in groups with a window, also without new tokens. Raises
        `OutOfBlocks`, or `InvalidSetting` for token ids that are not 32-bit integers.
        """
        sequence = self._sequences.resident(seq_id)
        tokens = as_token_array(token_ids)
        if not self._appends_at_end:
            return self._append_in_groups(sequence, tokens)
        copies_last, num_new = self._append_needs(sequence, len(tokens))
        copies: Copies = ()
        if copies_last or num_new:
            self._require_free(copies_last + num_new)
            if copies_last:
                copies = (self._references.copy_on_write(sequence),)
            for position in range(len(sequence.block_table), len(sequence.block_table) + num_new):
                sequence.block_table.append(self._references.allocate(sequence, position))
        sequence.token_ids.extend(tokens)
        return copies

    def _append_in_groups(self, sequence: SequenceState, tokens: array[int]) -> Copies:
        """`append` where there are several groups, or tokens without blocks."""
        groups = sequence.groups
        needs = [self._group_needs(group, len(tokens)) for group in groups]
        self._require_free(sum(map(sum, needs)))
        copies = tuple(
            self._references.copy_on_write(group)
            for group, (copies_last, _) in zip(groups, needs, strict=True)
            if copies_last
        )
        for group, (_, num_new) in zip(groups, needs, strict=True):
            self._references.extend(group, num_new)
        sequence.token_ids.extend(tokens)
        return copies

    def set_last_token(self, seq_id: int, token_id: int) -> None:
        """Replace the token of the last slot, which is not marked as computed yet.

        For a slot that was appended before its token was known, with any token id: prefix keys are
        computed when a block is marked as computed. Raises `InvalidSetting` for a computed slot.
        """
        sequence = self._sequences.resident(seq_id)
        last = len(sequence.token_ids) - 1
        if sequence.num_computed_tokens > last:
            raise InvalidSetting(
                f"slot {last} of sequence {seq_id} is marked as computed, so its token is final: "
                "set it before mark_computed"
            )
        (sequence.token_ids[last],) = as_token_array((token_id,))

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Give back the slots of a sequence on the device past the first ``num_tokens``.

        For tokens that were appended ahead and do not stay, such as rejected drafts. Their blocks
        are released. Raises `InvalidSetting` for less than one token or more than there are, and
        where a block that the next token sees was given back (`CacheConfig.windows`).
        """
        sequence = self._sequences.resident(seq_id)
        num_slots = len(sequence.token_ids)
        num_tokens = integer(1, remedy="one slot must stay").checked("num_tokens", num_tokens)
        if num_tokens > num_slots:
            raise InvalidSetting(
                f"num_tokens must be at most the {num_slots} slots of sequence {seq_id}, got "
                f"{num_tokens}: append adds slots"
            )
        groups = sequence.groups
        for group in groups:
            if not group.num_passed or group.window is None:
                continue
            num_passed = num_passed_blocks(num_tokens, group.window, self._block_size)
            if num_passed < group.num_passed:
                raise InvalidSetting(
                    f"the token after {num_tokens} of sequence {seq_id} sees block {num_passed}, "
                    "which was given back: truncate only tokens that are not computed"
                )
        del sequence.token_ids[num_tokens:]
        num_full = num_tokens // self._block_size
        for group in groups:
            group.num_computed_tokens = min(group.num_computed_tokens, num_tokens)
            for _ in range(len(group.block_table) - ceil_div(num_tokens, self._block_size)):
                self._references.release_last(group)
            if group.keys is not None and len(group.keys) > num_full:
                del group.keys[num_full:]
                # The rest of the last block is written again, so no later prompt may share it.
                if num_tokens % self._block_size:
                    self.pool.forget(group.block_table.last())

    def fork(self, parent_id: int, child_id: int) -> None:
        """Create ``child_id`` as a copy of ``parent_id``, on the device, that shares its blocks.

        All slots of the parent must be computed; otherwise both sequences would write the same
        slots. Raises `NotComputed` or `DuplicateSequence`.
        """
        parent = self._sequences.resident(parent_id)
        self._sequences.require_new(child_id)
        child = parent.fork(child_id)
        for group in child.groups:
            self._references.share_table(group)
        self._sequences[child_id] = child

    def free(self, seq_id: int) -> None:
        """Remove a sequence and release its blocks, on the device and on the host."""
        sequence = self._sequences.find(seq_id)
        del self._sequences[seq_id]
        if self.snapshots is not None:
            self.snapshots.release(seq_id)
        for group in sequence.groups:
            self._references.release_all(group)
        if not sequence.is_resident:
            self._swapper.free(sequence)

    def take_events(self) -> CacheEvents:
        """What the prefix cache got and lost since the last call, with ``config.record_events``.

        A host that takes them seldom loses none: content that came and went between is left out.
        """
        return NO_EVENTS if self._recorder is None else self._recorder.take()

    def uncached_after_prefix(self, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
        """The keys that follow the longest cached prefix of ``keys``, up to one that is cached.

        Raises `InvalidSetting` for a cache with several block groups.
        """
        self._require_one_group("uncached_after_prefix")
        missing = keys[len(self._prefix_cache.hits_in_group(0, keys)) :]
        lookup = self.pool.prefix_index.lookup
        end = next((i for i, key in enumerate(missing) if lookup(key) is not None), len(missing))
        return missing[:end]

    def cache_loaded(self, keys: Sequence[BlockKey], start: int) -> list[int]:
        """Make cached blocks for content that comes from elsewhere; returns them.

        ``keys`` are those of a prefix, and the content is that from position ``start`` on, up to
        which the prefix must be cached: otherwise there are no blocks. There are fewer where fewer
        are free beside those of the prefix, or where later content is cached already. Until the
        caller has copied the content to them, before the next forward pass, they hold another.
        Raises `InvalidSetting` for a cache with several block groups.
        """
        self._require_one_group("cache_loaded")
        index, hits = self.pool.prefix_index, self._prefix_cache.hits_in_group(0, keys)
        if len(hits) != start:
            return []
        held = [block for block, _ in hits if block != PADDING_BLOCK]
        for block, (_, key) in zip(held, hits[start - len(held) :], strict=True):
            self.pool.share(block)  # so that no new block evicts it
            key.hits += 1  # it counts as a prefix hit, once
        parent, loaded = (hits[-1][1] if hits else None), []
        for key in keys[start:]:
            if not self.pool.num_free_blocks or index.lookup(key) is not None:
                break
            block = self.pool.allocate()
            key.parent = parent
            parent = index.register(key, block)
            loaded.append(block)
            if block not in index:  # other content has its digest
                self.pool.release(loaded.pop())
                break
        for block in reversed([*held, *loaded]):
            self.pool.release(block)
        return loaded

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache, for example after a change of the weights or of an adapter.

        Sequences keep their blocks. Their content, and what they compute from it later, is never
        shared with prompts that are allocated after the reset.
        """
        self.pool.reset_prefix_cache()
        if self.snapshots is not None:
            self.snapshots.clear()
        self._swapper.reset_prefix_cache()
        for sequence in self._sequences.values():
            for group in sequence.groups:
                group.keys = None

    def can_swap_out(self, seq_ids: Sequence[int]) -> bool:
        """Whether the host has enough free blocks for these sequences on the device together.

        (Seed 003 compares with the free device blocks, which forbids a swap out when the device is
        full.) Raises `DuplicateSequence`.
        """
        sequences = self._sequences.all_resident(seq_ids)
        needed = self._swapper.num_host_blocks_needed(sequences)
        return needed <= self.host_pool.num_free_blocks

    def swap_out(self, seq_ids: Sequence[int], now: float = 0.0) -> Copies:
        """Swap out sequences on the device; returns the copies due at time ``now`` (seconds).

        Pass the sequences of one group together, so that shared blocks are copied once. Only
        computed blocks are copied. With a governor some copies may become due later: later calls
        and `resume_swaps` return them in order, and their device blocks stay used until then.
        Raises `OutOfHostBlocks`, `DuplicateSequence`, or `InvalidSetting` for a time that is not
        finite.
        """
        now = TIME.checked("now", now)
        self._swapper.swap_out(self._sequences.all_resident(seq_ids))
        return self._swapper.admit_outgoing(now)

    def can_swap_in(self, seq_ids: Sequence[int], *, num_spare: int = 0) -> bool:
        """Whether the device has enough free blocks above the watermark for these sequences.

        ``num_spare`` further blocks must be left. False while a transfer of one of them to the host
        is pending. Raises `NotSwapped`, `DuplicateSequence`, or `InvalidSetting` for ``num_spare``.
        """
        num_spare = _NUM_SPARE.checked("num_spare", num_spare)
        sequences = self._sequences.all_swapped(seq_ids)
        if any(self._swapper.is_swapping_out(sequence) for sequence in sequences):
            return False
        needed = self._swapper.num_device_blocks_needed(sequences)
        return needed + num_spare <= self._num_blocks_above_watermark()

    def swap_in(self, seq_ids: Sequence[int], now: float = 0.0) -> Copies:
        """Swap in sequences; returns the copies due at time ``now`` (seconds).

        Blocks in the prefix cache are shared instead of copied. With a governor some copies may
        become due later (see `resume_swaps`); `is_resident` is False until all of them were
        returned. Raises `OutOfBlocks`, `DuplicateSequence`, `NotSwapped` (also while the swap out
        is not complete), or `InvalidSetting` for a time that is not finite.
        """
        now = TIME.checked("now", now)
        self._swapper.swap_in(self._sequences.all_swapped(seq_ids))
        return self._swapper.admit_incoming(now)

    @property
    def num_queued_swaps(self) -> int:
        """Block copies of swaps, in both directions, that wait for the bandwidth limit."""
        return len(self._swapper.outgoing) + len(self._swapper.incoming)

    def resume_swaps(self, now: float) -> SwapCopies:
        """The copies of earlier swaps that are due at ``now`` (seconds); call it every step.

        Raises `InvalidSetting` for a time that is not finite.
        """
        if type(now) is not float or not isfinite(now):
            now = TIME.checked("now", now)
        if not (self._swapper.outgoing or self._swapper.incoming):
            return _NO_SWAPS
        return SwapCopies(self._swapper.admit_outgoing(now), self._swapper.admit_incoming(now))

    def relocate(self, moves: Sequence[BlockCopy], *, keep: Collection[int] = ()) -> Copies:
        """Move used blocks to free blocks and update the block tables; returns the copies.

        For `Defragmenter`. All moves happen at once: every source is a used block, every
        destination a free block, and no block occurs twice. Blocks without a computed slot move
        without a copy. If a destination in ``keep`` is a cached block, its content moves to the
        source; the content of other destinations is evicted. Raises `InvalidBlock`.
        """
        moves = as_block_copies(moves)
        instance_of(set, frozenset, list, tuple).checked("keep", keep)
        kept = {self.pool.as_block(block) for block in keep}
        if len({block for move in moves for block in move}) < 2 * len(moves):
            raise InvalidBlock(f"a block occurs twice in {moves}: move each block once")
        for src, dst in moves:
            self.pool.require_movable(src, dst)
        kept = {dst for _, dst in moves if dst in kept and dst in self.pool.prefix_index}
        copies = [move for move in moves if self._references.has_computed_slot(move.src)]
        copies += [BlockCopy(dst, src) for src, dst in moves if dst in kept]
        for src, dst in moves:
            self._references.relocate(src, dst, keep=dst in kept)
        self._swapper.relocate(dict(moves))
        return tuple(copies)

    @property
    def num_sharing_changes(self) -> int:
        """Rises with each change of what `num_sequences_of_shared` returns."""
        return self._references.num_sharing_changes

    def num_sequences_of_shared(self) -> dict[int, int]:
        """Of each block that several sequences have, how many."""
        return self._references.num_sequences_of_shared()

    def rearrange(self, pairs: Sequence[BlockCopy], *, keep: Collection[int] = ()) -> Copies:
        """Move used blocks to other blocks and update the block tables; returns the copies.

        For `Defragmenter`. As `relocate`, and where a destination is used, too, the two blocks are
        exchanged. Raises `InvalidBlock`.
        """
        pairs = as_block_copies(pairs)
        to_free = [pair for pair in pairs if not self.pool.ref_count(pair.dst)]
        exchanged = [pair for pair in pairs if self.pool.ref_count(pair.dst)]
        if len({block for pair in pairs for block in pair}) < 2 * len(pairs):
            raise InvalidBlock(f"a block occurs twice in {pairs}: move each block once")
        for src, _ in pairs:
            if not self.pool.ref_count(src):
                raise InvalidBlock(f"block {src} is free: move used blocks")
        copies = list(self.relocate(to_free, keep=keep))
        for pair in exchanged:
            both = pair, BlockCopy(pair.dst, pair.src)
            copies += [each for each in both if self._references.has_computed_slot(each.src)]
            self._references.exchange(*pair)
        self._swapper.relocate({**dict(exchanged), **{dst: src for src, dst in exchanged}})
        return tuple(copies)

    def _num_prompt_blocks(self, token_ids: Sequence[int]) -> int:
        try:
            num_tokens = len(token_ids)
        except (TypeError, OverflowError):
            num_tokens = 0
        if not num_tokens:
            raise InvalidSetting(
                f"a prompt must have at least one token, got {token_ids!r}: pass a sequence of "
                "token ids"
            )
        return self.config.num_blocks_for(num_tokens)

    def _require_one_group(self, call: str) -> None:
        if self._num_groups > 1:
            raise InvalidSetting(
                f"{call} needs a cache with one block group, and this one has {self._num_groups}: "
                "make it with one window that holds all layers",
                "windows",
            )

    def _require_free(self, num_blocks: int) -> None:
        if num_blocks > self.pool.num_free_blocks:
            raise OutOfBlocks(
                f"{num_blocks} blocks are needed and {self.pool.num_free_blocks} are free: "
                "free or swap out a sequence, or raise num_blocks"
            )

    def _num_blocks_above_watermark(self) -> int:
        watermark = self._watermark_blocks if self.pool.num_used_blocks else 0
        return self.pool.num_free_blocks - watermark

    def _group_needs(self, group: GroupState, num_tokens: int) -> tuple[bool, int]:
        """As `_append_needs` in a group, with blocks for earlier tokens that lack them."""
        num_slots, num_blocks = len(group.token_ids), len(group.block_table)
        copies_last = (
            num_tokens > 0
            and num_slots % self._block_size > 0
            and num_blocks * self._block_size > num_slots
            and self.pool.is_shared(group.block_table.last())
        )
        needed = group.num_blocks_for(num_slots + num_tokens, self._block_size)
        return copies_last, max(0, needed - num_blocks)

    def _append_needs(self, sequence: SequenceState, num_tokens: int) -> tuple[bool, int]:
        """Whether the last block is copied on write, and the number of further new blocks."""
        num_free_slots = -len(sequence.token_ids) % self._block_size
        copies_last = (
            num_free_slots > 0
            and num_tokens > 0
            and self.pool.is_shared(sequence.block_table.last())
        )
        if num_tokens <= num_free_slots:
            return copies_last, 0
        return copies_last, ceil_div(num_tokens - num_free_slots, self._block_size)
