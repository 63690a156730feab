"""Physical blocks for the block ids of another allocator, so that its blocks can be defragmented.

A runtime whose allocator hands out block ids keeps them; the KV cache is addressed by the physical
block of each id. The ids and the physical blocks are 1 to ``num_blocks - 1``; 0, the padding block,
is always itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.block_pool import BlockPool
from trencadis.kvcache.config import PADDING_BLOCK, DefragConfig
from trencadis.kvcache.copy_plan import BlockCopy, Copies, as_block_copies
from trencadis.kvcache.defrag import Defragmenter, DefragPlan
from trencadis.kvcache.errors import InvalidBlock, InvalidSetting
from trencadis.kvcache.validators import boolean, instance_of


class BlockRemapper:
    """Maps the block ids of an allocator to physical blocks, the lowest that are free.

    Call `use` for the blocks that a request gets and `release` for those that it gives back, once
    for each request that shares one. Once a step, after both, carry out the copies of `plan`; then
    read `physical`. A call that raises changes nothing. ``pool`` is for reading: the numbers of
    physical blocks that are used and free, and the highest one.

    ``config``: when to defragment; ``keep_from`` has no effect, because the allocator alone knows
    which content it finds again. Raises `InvalidSetting` for a wrong argument.
    """

    def __init__(self, num_blocks: int, config: DefragConfig | None = None) -> None:
        config = DefragConfig() if config is None else config
        instance_of(DefragConfig).checked("config", config)
        self.pool = BlockPool(num_blocks)
        # 0 for an id that has no physical block.
        self._physical = np.zeros(self.pool.num_blocks, np.int32)
        self._id_of = [PADDING_BLOCK] * self.pool.num_blocks
        self._defragmenter = Defragmenter(self, attrs.evolve(config, keep_from=0.0))

    def use(self, blocks: Iterable[int]) -> None:
        """Count one more user of each of these ids.

        An id whose content was kept still has it; any other gets an empty physical block. Raises
        `InvalidBlock` for an id that does not exist.
        """
        for block in self._as_blocks(blocks):
            physical = self._physical.item(block)
            if physical:
                self.pool.share(physical)
            else:
                self._assign(block, self.pool.allocate())

    def release(self, blocks: Iterable[int], *, keep: bool = True) -> None:
        """Count one user less of each of these ids.

        ``keep``: the allocator may use an id again for its content, as one with a prefix cache
        does. Without it, the physical block of an id without users is empty, and nothing copies
        it. Raises `InvalidBlock` for an id that is released more often than it was used.
        """
        boolean().checked("keep", keep)
        released = self._as_blocks(blocks)
        for block, count in Counter(released).items():
            physical = self._physical.item(block)
            if not physical or self.pool.ref_count(physical) < count:
                raise InvalidBlock(
                    f"block {block} is not in use: it was released more often than it was used"
                )
        for block in released:
            physical = self._physical.item(block)
            if self.pool.ref_count(physical) == 1:
                if keep:
                    self._keep(block, physical)
                else:
                    self.pool.forget(physical)
                    self._physical[block] = PADDING_BLOCK
            self.pool.release(physical)

    def physical(self, blocks: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """The physical blocks of these ids, in an array of the same shape, such as block tables.

        0 stays 0. Raises `InvalidBlock` for an id that has no physical block: `use` it before.
        """
        ids = np.asarray(blocks)
        if not ids.size:
            return np.zeros(ids.shape, np.int32)
        if ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= self.pool.num_blocks:
            raise InvalidBlock(
                f"blocks must be ids from 0 to {self.pool.num_blocks - 1}, got {blocks!r}: pass "
                "those of the allocator"
            )
        mapped: npt.NDArray[np.int32] = self._physical[ids]
        missing = (mapped == PADDING_BLOCK) & (ids != PADDING_BLOCK)
        if missing.any():
            raise InvalidBlock(f"block {ids[missing][0]} has no physical block: use it before")
        return mapped

    @property
    def table(self) -> npt.NDArray[np.int32]:
        """The physical block of each id, ``int32[num_blocks]``; 0 where an id has none. Read-only.

        For a host that looks single ids up. It changes with the next call.
        """
        view = self._physical.view()
        view.flags.writeable = False
        return view

    def plan(self) -> DefragPlan | None:
        """Move used blocks down if that is due; returns the copies to carry out, or None.

        As `Defragmenter.defragment`. Content that was kept is exchanged with what moves into its
        place.
        """
        return self._defragmenter.defragment()

    def relocate(self, moves: Sequence[BlockCopy], *, keep: Collection[int] = ()) -> Copies:
        """Move used physical blocks to free ones; returns the copies. For `Defragmenter`.

        ``keep`` must have each destination with content, as it has under ``keep_from`` 0. Raises
        `InvalidBlock`.
        """
        moves = as_block_copies(moves)
        for src, dst in moves:
            self.pool.require_movable(src, dst)
            if dst in self.pool.prefix_index and dst not in keep:
                raise InvalidBlock(f"block {dst} has content that the allocator may want: keep it")
        copies = [*moves, *(BlockCopy(dst, src) for src, dst in moves if dst in keep)]
        for src, dst in moves:
            moved, kept = self._id_of[src], self._id_of[dst]
            self.pool.relocate(src, dst, keep=dst in keep)
            self._assign(moved, dst)
            if dst in keep:
                self._assign(kept, src)
        return tuple(copies)

    def _assign(self, block: int, physical: int) -> None:
        self._physical[block] = physical
        self._id_of[physical] = block

    def _keep(self, block: int, physical: int) -> None:
        """Let the pool know the content of a physical block, so that it stays after its release."""
        if physical not in self.pool.prefix_index:
            digest = block.to_bytes(8, "big")
            self.pool.prefix_index.register(BlockKey(digest, digest, None, b""), physical)

    def _as_blocks(self, blocks: Iterable[int]) -> list[int]:
        try:
            listed = list(blocks)
        except TypeError:
            raise InvalidSetting(f"blocks must be block ids, got {blocks!r}: pass a list") from None
        return [self.pool.as_block(block) for block in listed]
