"""Blocks for whole groups: what the scheduler asks of the block manager, in its own terms.

Every copy that the manager wants goes into ``moves``, the plan of the step, in the order in which
it was asked for.
"""

from __future__ import annotations

from trencadis.kvcache import AllocStatus, BlockManager, CopyPlan, Direction
from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.group import Sequence, SequenceGroup
from trencadis.scheduler.request import Request


class GroupMemory:
    """Allocates, grows, forks, swaps and frees the blocks of groups.

    ``leaving`` counts device blocks that are free as soon as copies on their way to the host have
    been carried out: with a bandwidth limit a swap gives its blocks only bit by bit.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self.moves = CopyPlan()
        self.leaving = 0
        self._blocks = blocks
        self._size = blocks.config.block_size

    @property
    def num_free(self) -> int:
        return self._blocks.pool.num_free_blocks

    def begin_step(self, now: float) -> None:
        """A new plan, which starts with what is due of earlier swaps."""
        self.moves = CopyPlan()
        due = self._blocks.resume_swaps(now)
        self.leaving = max(0, self.leaving - len(due.out))
        self.moves.add(Direction.OUT, due.out)
        self.moves.add(Direction.IN, due.in_)

    def most_blocks(self, request: Request, config: SchedulerConfig) -> int:
        """Blocks that a request could come to need, with nobody else there.

        Its prompt is there once; what follows, for each sequence. The last token of an output is
        never computed. A copy on write is counted by the manager for each of the sequences that
        share a block, one more than are made.
        """
        prompt = len(request.prompt_token_ids)
        slots = max(prompt, min(prompt + request.max_tokens, config.max_model_len) - 1)
        shared = prompt // self._size
        own = self._blocks_for(slots) - shared
        return shared + request.width * own + (request.width > 1)

    def hash_prompt(self, group: SequenceGroup) -> None:
        """Make the prefix keys of the prompt once, not with every attempt to start the group."""
        if self._blocks.config.enable_prefix_caching:
            request = group.request
            group.keys = self._blocks.hasher(request.prompt_token_ids, request.extra_keys)

    def can_start(self, group: SequenceGroup) -> bool:
        """Whether a group without blocks can be given those of its trunk, and room to branch."""
        trunk = _trunk(group)
        rest = sum(self._blocks_for(len(one.token_ids)) - trunk // self._size for one in group.live)
        if len(group.live) > 1 and self._blocks_for(trunk) + rest > self.num_free:
            return False
        state = self._blocks.can_allocate(
            group.live[0].token_ids[:trunk],
            prefix_keys=group.keys,
            extra_keys=group.request.extra_keys,
        )
        return state is AllocStatus.OK

    def start(self, group: SequenceGroup) -> None:
        """Give the trunk of a group its blocks, those of a known prefix included."""
        leader = min(group.live, key=lambda one: len(one.token_ids))
        trunk = _trunk(group)
        cached = self._blocks.allocate(
            leader.seq_id,
            leader.token_ids[:trunk],
            prefix_keys=group.keys,
            extra_keys=group.request.extra_keys,
        )
        leader.num_computed, leader.num_slots = cached, trunk
        if not leader.num_output_tokens:
            for one in group.live:
                one.num_cached_prompt_tokens = cached
        group.active = [leader]
        group.unforked = [one for one in group.live if one is not leader]

    def fork_all(self, group: SequenceGroup) -> None:
        """The trunk is computed: every other sequence of the group goes on from it."""
        leader = group.active[0]
        for one in group.unforked:
            self.fork(leader, one)
        group.unforked = []

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let ``child`` share all blocks of ``parent``, all of whose slots are computed."""
        self._blocks.fork(parent.seq_id, child.seq_id)
        child.num_computed = child.num_slots = parent.num_slots
        child.group.active.append(child)

    def missing(self, group: SequenceGroup) -> int:
        """Free blocks that `grow` would take."""
        if group.unforked:
            return 0
        return sum(
            self._blocks.blocks_to_append(one.seq_id, len(one.token_ids) - one.num_slots)
            for one in group.active
            if len(one.token_ids) > one.num_slots
        )

    def grow(self, group: SequenceGroup) -> None:
        """Reserve a slot for each token that has none, once the trunk is computed."""
        if group.unforked:
            return
        for one in group.active:
            tokens = one.token_ids
            missing = len(tokens) - one.num_slots
            if missing:
                copies = self._blocks.append(one.seq_id, tokens[-missing:])
                one.num_slots = len(tokens)
                if copies:
                    self.moves.add(Direction.WITHIN, copies)

    def can_swap_out(self, group: SequenceGroup) -> bool:
        return self._blocks.can_swap_out(_ids(group))

    def swap_out(self, group: SequenceGroup, now: float) -> None:
        """Keep what a group has computed on the host; it frees its device blocks, in time."""
        before = self._blocks.host_pool.num_free_blocks
        copies = self._blocks.swap_out(_ids(group), now)
        self.leaving += before - self._blocks.host_pool.num_free_blocks - len(copies)
        self.moves.add(Direction.OUT, copies)
        group.on_host = True

    def can_swap_in(self, group: SequenceGroup) -> bool:
        return self._blocks.can_swap_in(_ids(group))

    def swap_in(self, group: SequenceGroup, now: float) -> None:
        """Give a group device blocks again; see `has_arrived`."""
        self.moves.add(Direction.IN, self._blocks.swap_in(_ids(group), now))
        group.on_host = False

    def has_arrived(self, group: SequenceGroup) -> bool:
        """Whether all that a group computed is on the device."""
        return all(self._blocks.is_resident(one.seq_id) for one in group.active)

    def drop(self, group: SequenceGroup) -> None:
        """Free everything that a group has; what it computed is to be computed again."""
        before = self._blocks.host_pool.num_free_blocks
        for one in group.active:
            self._blocks.free(one.seq_id)
            one.num_computed = one.num_slots = 0
        # Transfers that nobody needs any more are cancelled: their blocks do not leave, they are
        # free. This counts too many of them if anything, and so never waits for what will not come.
        self.leaving = max(0, self.leaving - (self._blocks.host_pool.num_free_blocks - before))
        group.active, group.unforked, group.on_host = [], [], False

    def free(self, sequence: Sequence) -> None:
        """Free the blocks of one sequence that has ended."""
        self._blocks.free(sequence.seq_id)

    def next_unknown_digest(self, group: SequenceGroup) -> bytes | None:
        """The digest of the first full block of the prompt that is not in the cache."""
        if group.keys is None:
            return None
        known = self._blocks.num_cached_prefix_blocks(group.keys)
        return group.keys.blocks[known].digest if known < len(group.keys.blocks) else None

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._size)


def _ids(group: SequenceGroup) -> list[int]:
    return [one.seq_id for one in group.active]


def _trunk(group: SequenceGroup) -> int:
    """How many first tokens all live sequences have in common: the prompt, at the least."""
    first = group.live[0].token_ids
    trunk = len(first)
    for one in group.live[1:]:
        trunk = min(trunk, len(one.token_ids))
        differing = (i for i in range(trunk) if first[i] != one.token_ids[i])
        trunk = next(differing, trunk)
    return trunk
