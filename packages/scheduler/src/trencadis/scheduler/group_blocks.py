"""The KV-cache blocks of sequence groups: the block manager's operations on whole groups.

And the slots of their states, for a model with layers that keep one.
"""

from __future__ import annotations

from collections import Counter
from itertools import takewhile

from trencadis.kvcache import (
    AllocStatus,
    BlockCopy,
    BlockManager,
    CopyPlan,
    Direction,
    KVCacheError,
    PrefixKeys,
    StateSlots,
    ceil_div,
)
from trencadis.scheduler.errors import UnservableRequest
from trencadis.scheduler.group import Sequence, SequenceGroup
from trencadis.scheduler.request import Request
from trencadis.scheduler.snapshot_points import SnapshotPoints


class GroupBlocks:
    """Allocates, appends, forks, swaps and frees the blocks of groups.

    - ``pool``: the device blocks.
    - ``moves``: the copies of the current step, in the order in which they must be carried out.
    - ``state_slots``: the slots of states; None for a model without.
    - ``state_moves``: the copies of states of the current step, as ``moves``.
    - ``snapshots``: where the states of prefixes are kept; None for a model without, or without
      prefix caching.
    - ``num_swapping_out``: device blocks that become free once copies to the host that the
      bandwidth limit deferred are carried out.
    - ``num_groups``: block groups, in each of which a sequence has a block table.
    """

    def __init__(self, blocks: BlockManager, state_slots: StateSlots | None = None) -> None:
        self.pool = blocks.pool
        self.moves = CopyPlan()
        self.state_slots = state_slots
        self.state_moves = CopyPlan()
        self.snapshots: SnapshotPoints | None = None
        if state_slots is not None and blocks.snapshots is not None:
            self.snapshots = SnapshotPoints(blocks, state_slots)
        self.num_swapping_out = 0
        self._blocks = blocks
        self._block_size = blocks.config.block_size
        self.num_groups = len(blocks.config.windows)
        self._most_window_blocks = blocks.config.most_window_blocks
        self.appends_ahead = any(most is not None for most in self._most_window_blocks)
        """Whether computed tokens, too, make `append` take blocks."""

    def begin_step(self, now: float) -> None:
        """Add the deferred copies that are due at ``now`` (seconds) to the moves of the step."""
        due = self._blocks.resume_swaps(now)
        self.num_swapping_out = max(0, self.num_swapping_out - len(due.out))
        if due.out:
            self.moves.add(Direction.OUT, due.out)
        if due.in_:
            self.moves.add(Direction.IN, due.in_)

    def take_moves(self) -> CopyPlan:
        """The moves of the step, which is complete. Those of a step that failed are kept."""
        moves, self.moves = self.moves, CopyPlan()
        return moves

    def take_state_moves(self) -> CopyPlan:
        """The copies of states of the step, which is complete.

        Snapshots of the states that it computes come first in the next step: before these change,
        and before other sequences have their slots.
        """
        moves, self.state_moves = self.state_moves, CopyPlan()
        if self.snapshots is not None:
            self.state_moves.add(Direction.WITHIN, self.snapshots.take())
        return moves

    def discard_content(self) -> None:
        """Forget all moves and cached prefixes: the content of the blocks is unknown."""
        self.moves, self.state_moves = CopyPlan(), CopyPlan()
        if self.snapshots is not None:
            self.snapshots.take()
        self._blocks.reset_prefix_cache()

    def max_num_blocks(self, request: Request, max_model_len: int) -> int:
        """The most blocks that a request can need when it runs alone.

        Its sequences share the full blocks of the prompt; every other block belongs to one of
        them. The last token of an output needs no slot.
        """
        length = request.num_prompt_tokens
        num_slots = max(length, min(length + request.max_tokens, max_model_len) - 1)
        num_shared = length // self._block_size
        num_own = ceil_div(num_slots, self._block_size) - num_shared
        return self._in_groups(num_shared + request.num_seqs * num_own, request.num_seqs)

    def _in_groups(self, num_blocks: int, num_seqs: int) -> int:
        """So many blocks of ``num_seqs`` sequences in each group, or those that windows allow."""
        return sum(
            num_blocks if most is None else min(num_blocks, num_seqs * most)
            for most in self._most_window_blocks
        )

    # Allocation: a group starts with blocks for the common prefix of its sequences.

    def hash_prompt(self, request: Request) -> PrefixKeys | None:
        """The prefix keys of the prompt, computed once and not on every attempt to admit it.

        None without prefix caching. Raises `UnservableRequest` for ``extra_keys`` that the prefix
        cache cannot compare.
        """
        if not self._blocks.config.enable_prefix_caching:
            return None
        try:
            return self._blocks.hasher(request.prompt_token_ids, request.extra_keys)
        except KVCacheError as error:
            raise UnservableRequest(f"extra_keys of {request.request_id!r}: {error}") from error

    def num_blocks_to_allocate(self, group: SequenceGroup) -> int:
        """Free blocks that a waiting group needs to start, if its cached prefix is in use."""
        num_tokens = group.request.num_prompt_tokens
        num_blocks = ceil_div(num_tokens, self._block_size)
        keys = group.prefix_keys
        if keys is not None and group.request.reads_prefix_cache:
            num_blocks -= self._blocks.num_cached_prefix_blocks(keys, num_tokens=num_tokens)
        return self._in_groups(num_blocks, 1)

    def can_allocate(self, group: SequenceGroup, num_spare: int = 0) -> bool:
        """Whether there are free blocks for the common prefix and, after the fork, for the rest.

        ``num_spare`` further blocks must be left.
        """
        sequences = group.unfinished_seqs
        prefix_len = _common_prefix_len(sequences)
        if len(sequences) > 1:
            num_shared = prefix_len // self._block_size
            num_own = sum(
                ceil_div(len(sequence.token_ids), self._block_size) - num_shared
                for sequence in sequences
            )
            num_needed = self._in_groups(num_shared + num_own, len(sequences))
            if num_needed + num_spare > self.pool.num_free_blocks:
                return False
        allocation = self._blocks.can_allocate(
            sequences[0].token_ids[:prefix_len],
            prefix_keys=group.prefix_keys,
            extra_keys=group.request.extra_keys,
            reads_cache=group.request.reads_prefix_cache,
            num_spare=num_spare,
        )
        return allocation is AllocStatus.OK

    def allocate(self, group: SequenceGroup) -> None:
        """Allocate the common prefix to the leader, the sequence with the fewest tokens.

        Blocks from the prefix cache count as computed.
        """
        leader = min(group.unfinished_seqs, key=lambda sequence: len(sequence.token_ids))
        prefix_len = _common_prefix_len(group.unfinished_seqs)
        num_known = 0 if self.snapshots is None else self._num_known_tokens(group)
        num_cached = self._blocks.allocate(
            leader.seq_id,
            leader.token_ids[:prefix_len],
            prefix_keys=group.prefix_keys,
            extra_keys=group.request.extra_keys,
            reads_cache=group.request.reads_prefix_cache,
        )
        if self.state_slots is not None:
            self.state_slots.allocate(leader.seq_id)
            self._copy_snapshot(leader.seq_id)
        if self.snapshots is not None:
            self.snapshots.begin(group, num_cached, num_known)
        leader.num_computed_tokens, leader.num_slots = num_cached, prefix_len
        if not leader.num_output_tokens:
            for sequence in group.unfinished_seqs:
                sequence.num_cached_tokens = num_cached
        group.allocated_seqs = [leader]
        group.unforked_seqs = [
            sequence for sequence in group.unfinished_seqs if sequence is not leader
        ]

    def _num_known_tokens(self, group: SequenceGroup) -> int:
        """Tokens at the beginning of a prompt whose blocks are cached, whatever their state."""
        keys, num_tokens = group.prefix_keys, group.request.num_prompt_tokens
        if keys is None:
            return 0
        num_blocks = self._blocks.num_cached_prefix_blocks(
            keys, num_tokens=num_tokens, needs_snapshot=False
        )
        return num_blocks * self._block_size

    def _copy_snapshot(self, seq_id: int) -> None:
        """Let a sequence begin with the state of its cached prefix, if it has one."""
        source = self._blocks.snapshot_slot(seq_id)
        if source is not None and self.state_slots is not None:
            copy = BlockCopy(source, self.state_slots.slot(seq_id))
            self.state_moves.add(Direction.WITHIN, (copy,))

    def next_uncached_digest(self, group: SequenceGroup) -> bytes | None:
        """The digest of the first full prompt block that is not in the prefix cache, or None.

        None for a group that reads no cached blocks, too.
        """
        if group.prefix_keys is None or not group.request.reads_prefix_cache:
            return None
        keys = group.prefix_keys.blocks
        num_cached = self._blocks.num_cached_prefix_blocks(group.prefix_keys)
        return keys[num_cached].digest if num_cached < len(keys) else None

    def takes_snapshot(self, running: SequenceGroup, waiting: SequenceGroup) -> bool:
        """Whether a waiting group will find the prefix that it has in common with a running one.

        Where layers keep states, it needs a snapshot, which is taken where their prompts diverge
        unless the running group has computed that.
        """
        if self.snapshots is None:
            return True
        keys = waiting.prefix_keys
        if keys is None or running.prefix_keys is None or not waiting.request.reads_prefix_cache:
            return False
        of_both = zip(running.prefix_keys.blocks, keys.blocks, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0].digest == pair[1].digest, of_both))
        num_usable = (waiting.request.num_prompt_tokens - 1) // self._block_size
        num_hits = self._blocks.num_cached_prefix_blocks(keys)
        size = self._block_size
        return self.snapshots.add(running, num_hits * size, min(same, num_usable) * size)

    # Growth.

    def fork_all(self, group: SequenceGroup) -> None:
        """Fork all other sequences of a group from its leader, which has computed the prefix."""
        leader = group.allocated_seqs[0]
        for sequence in group.unforked_seqs:
            self.fork(leader, sequence)
        group.unforked_seqs = []

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Share all blocks of ``parent``, whose slots are all computed, with ``child``.

        A state is copied: it is that of the tokens that both have in common.
        """
        self._blocks.fork(parent.seq_id, child.seq_id)
        if self.state_slots is not None:
            copies = self.state_slots.fork(parent.seq_id, child.seq_id)
            self.state_moves.add(Direction.WITHIN, copies)
        child.num_computed_tokens = child.num_slots = parent.num_slots
        child.group.allocated_seqs.append(child)

    def lacks_at_most_one_slot(self, group: SequenceGroup) -> bool:
        """Whether each sequence of a group has at most one token without a slot.

        False where its slots may lack blocks because it computes more than one token.
        """
        for sequence in group.allocated_seqs:
            if self.appends_ahead and sequence.num_slots - sequence.num_computed_tokens > 1:
                return False
            if len(sequence.token_ids) - sequence.num_slots > 1:
                return False
        return True

    def num_blocks_to_append(self, group: SequenceGroup) -> int:
        """Free blocks that `append_slots` takes, including those of copy-on-write."""
        if group.unforked_seqs:
            if not self.appends_ahead:
                return 0
            leader = group.allocated_seqs[0]
            return self._blocks.blocks_to_append(leader.seq_id, 0)
        growing = [
            sequence
            for sequence in group.allocated_seqs
            if self.appends_ahead or len(sequence.token_ids) > sequence.num_slots
        ]
        num_blocks = sum(
            self._blocks.blocks_to_append(
                sequence.seq_id, len(sequence.token_ids) - sequence.num_slots
            )
            for sequence in growing
        )
        return num_blocks - self._num_kept_blocks(growing) if len(growing) > 1 else num_blocks

    def _num_kept_blocks(self, growing: list[Sequence]) -> int:
        """Partial blocks whose sequences all grow: the last of them writes without a copy."""
        num_growing = Counter(
            int(self._blocks.block_table(sequence.seq_id, number)[-1])
            for sequence in growing
            if sequence.num_slots % self._block_size
            and len(sequence.token_ids) > sequence.num_slots
            for number in range(self.num_groups)
        )
        return sum(
            count > 1 and count == self.pool.ref_count(block)
            for block, count in num_growing.items()
        )

    def append_slots(self, group: SequenceGroup) -> None:
        """Reserve a slot for each token without one, none before the group has forked.

        Slots that the next steps compute get their blocks (`CacheConfig.tokens_ahead`).
        """
        if group.unforked_seqs:
            if self.appends_ahead:
                self._blocks.append(group.allocated_seqs[0].seq_id, ())
            return
        for sequence in group.allocated_seqs:
            tokens = sequence.token_ids
            num_new = len(tokens) - sequence.num_slots
            if num_new or self.appends_ahead:
                copies = self._blocks.append(sequence.seq_id, tokens[sequence.num_slots :])
                sequence.num_slots = len(tokens)
                if copies:
                    self.moves.add(Direction.WITHIN, copies)

    def set_pending_token(self, sequence: Sequence, token_id: int) -> None:
        """Give a sequence its pending token, whose slot is there unless blocks were lacking."""
        sequence.token_ids[-1] = token_id
        sequence.is_pending = False
        if sequence.num_slots == len(sequence.token_ids):
            self._blocks.set_last_token(sequence.seq_id, token_id)

    def drop_pending_token(self, sequence: Sequence) -> None:
        """Take back a pending token, whose step is discarded, and its slot."""
        sequence.token_ids.pop()
        sequence.is_pending = False
        if sequence.num_slots > len(sequence.token_ids):
            sequence.num_slots = len(sequence.token_ids)
            self._blocks.truncate(sequence.seq_id, sequence.num_slots)

    def is_computed(self, group: SequenceGroup) -> bool:
        """Whether the prompt of a running group is computed by steps whose results are known."""
        num_computed = self._blocks.num_computed_tokens(group.allocated_seqs[0].seq_id)
        return num_computed >= group.request.num_prompt_tokens

    def max_blocks_to_append(self, group: SequenceGroup) -> int:
        """An upper bound of `num_blocks_to_append`, which is known on the device only."""
        if group.unforked_seqs:
            return 0
        size, shares_blocks = self._block_size, len(group.allocated_seqs) > 1
        num_blocks = 0
        for sequence in group.allocated_seqs:
            num_tokens, num_slots = len(sequence.token_ids), sequence.num_slots
            if num_tokens > num_slots:
                copies_last = shares_blocks and num_slots % size > 0
                num_blocks += ceil_div(num_tokens, size) - ceil_div(num_slots, size) + copies_last
        return num_blocks * self.num_groups

    def append_slots_if_free(self, group: SequenceGroup) -> None:
        """As `append_slots`, if there are free blocks for all its sequences."""
        if self.num_blocks_to_append(group) <= self.pool.num_free_blocks:
            self.append_slots(group)

    # Swaps.

    def can_swap_out(self, group: SequenceGroup) -> bool:
        seq_ids = _seq_ids(group)
        if self.state_slots is not None and not self.state_slots.can_swap_out(seq_ids):
            return False
        return self._blocks.can_swap_out(seq_ids)

    def swap_out(self, group: SequenceGroup, now: float) -> None:
        """Copy the computed blocks to the host; the device blocks become free after the copies."""
        num_free_before = self._blocks.host_pool.num_free_blocks
        copies = self._blocks.swap_out(_seq_ids(group), now)
        num_host_blocks = num_free_before - self._blocks.host_pool.num_free_blocks
        self.num_swapping_out += num_host_blocks - len(copies)
        self.moves.add(Direction.OUT, copies)
        if self.state_slots is not None:
            self.state_moves.add(Direction.OUT, self.state_slots.swap_out(_seq_ids(group)))

    def can_swap_in(self, group: SequenceGroup, num_spare: int) -> bool:
        """Whether a swap-in leaves ``num_spare`` blocks free."""
        return self._blocks.can_swap_in(_seq_ids(group), num_spare=num_spare)

    def swap_in(self, group: SequenceGroup, now: float) -> None:
        """Allocate device blocks and copy the content back. It may arrive later: `is_resident`."""
        self.moves.add(Direction.IN, self._blocks.swap_in(_seq_ids(group), now))
        if self.state_slots is not None:
            self.state_moves.add(Direction.IN, self.state_slots.swap_in(_seq_ids(group)))

    def is_resident(self, group: SequenceGroup) -> bool:
        """Whether all computed blocks of a group are on the device."""
        return all(self._blocks.is_resident(sequence.seq_id) for sequence in group.allocated_seqs)

    # Release.

    def free(self, group: SequenceGroup) -> None:
        """Free all blocks of a group, on the device and on the host."""
        num_free_before = self._blocks.host_pool.num_free_blocks
        for sequence in group.allocated_seqs:
            if sequence.is_pending:
                self.drop_pending_token(sequence)
            self.free_sequence(sequence)
            sequence.num_computed_tokens = sequence.num_slots = 0
        # Freed host blocks include those of cancelled copies, whose device blocks are free at once.
        # This may subtract too much, so the scheduler never waits for blocks that do not come.
        num_freed = self._blocks.host_pool.num_free_blocks - num_free_before
        self.num_swapping_out = max(0, self.num_swapping_out - num_freed)
        group.allocated_seqs, group.unforked_seqs = [], []

    def free_sequence(self, sequence: Sequence) -> None:
        """Free the blocks of one sequence of a group that keeps running."""
        self._blocks.free(sequence.seq_id)
        if self.state_slots is not None:
            self.state_slots.free(sequence.seq_id)
        if self.snapshots is not None:
            self.snapshots.forget(sequence.seq_id)


def _seq_ids(group: SequenceGroup) -> list[int]:
    return [sequence.seq_id for sequence in group.allocated_seqs]


def _common_prefix_len(sequences: list[Sequence]) -> int:
    """The number of first tokens that all sequences have in common: at least the prompt."""
    tokens = sequences[0].token_ids
    length = len(tokens)
    for sequence in sequences[1:]:
        others = sequence.token_ids
        length = min(length, len(others))
        length = next((i for i in range(length) if tokens[i] != others[i]), length)
    return length
