"""Prompt blocks that running groups are about to add to the prefix cache."""

from __future__ import annotations

from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.group_blocks import GroupBlocks
from trencadis.scheduler.sequence_status import SequenceStatus


class PendingPrefixes:
    """Remembers which prompt blocks are being computed, by digest.

    A group that waits for such a block gets it from the prefix cache instead of computing it.
    """

    def __init__(self, group_blocks: GroupBlocks) -> None:
        self._group_blocks = group_blocks
        self._digests: dict[SequenceGroup, frozenset[bytes]] = {}

    def add(self, group: SequenceGroup) -> None:
        """Add the blocks that a group, which has just been admitted, will compute."""
        if group.prefix_keys is None:
            return
        num_computed = group.allocated_seqs[0].num_computed_tokens // group.block_size
        digests = frozenset(key.digest for key in group.prefix_keys.blocks[num_computed:])
        if digests:
            self._digests[group] = digests

    def has_next_block(self, group: SequenceGroup) -> bool:
        """Whether the first block that ``group`` lacks in the prefix cache is being computed."""
        if not self._digests:
            return False
        digest = self._group_blocks.next_uncached_digest(group)
        return digest is not None and any(digest in pending for pending in self._digests.values())

    def discard_computed(self) -> None:
        """Remove groups that have computed their prompt or do not run any more."""
        for group in tuple(self._digests):
            if group.status is not SequenceStatus.RUNNING or (
                group.allocated_seqs[0].num_computed_tokens >= group.request.num_prompt_tokens
            ):
                del self._digests[group]
