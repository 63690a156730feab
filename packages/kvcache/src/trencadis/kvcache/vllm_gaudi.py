"""Defragmentation of this library in vLLM's plugin for Gaudi, under the plugin's own names.

`OnlineDefragmenter` takes the place of the plugin's class of this name, whose interface is that of
vllm-project/vllm-gaudi 091bbad (``extension/defragmentation.py``, as ``hpu_model_runner.py`` calls
it). `install` in `vllm_plugin` puts it there; only the plugin's processes import this module.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm_gaudi.extension.debug import init_debug_logger
from vllm_gaudi.extension.runtime import get_config

import habana_frameworks.torch as htorch
from trencadis.kvcache.config import PADDING_BLOCK, DefragConfig
from trencadis.kvcache.copy_plan import BlockCopy, split_to_plan_sizes
from trencadis.kvcache.defrag import warm_up_defragmenter
from trencadis.kvcache.remapper import BlockRemapper

logger = logging.getLogger(__name__)

DEFAULT_THRESHOLD = 32
"""The plugin's."""


class BlockMover(nn.Module):
    """Copies blocks within caches whose rows are slots, all copies at once.

    Every source is read before a destination is written. The only update is an ``index_copy_``.
    """

    def __init__(self, block_size: int, device: Any) -> None:
        super().__init__()
        self._size = block_size
        self._slots = torch.arange(block_size, dtype=torch.long, device=device)

    def forward(self, srcs: torch.Tensor, dsts: torch.Tensor, caches: list[torch.Tensor]) -> None:
        """``srcs`` and ``dsts`` are block numbers ``int64[n]``."""
        htorch.core.mark_step()
        read = ((srcs * self._size).unsqueeze(-1) + self._slots).flatten()
        written = ((dsts * self._size).unsqueeze(-1) + self._slots).flatten()
        for cache in caches:
            cache.index_copy_(0, written, cache.index_select(0, read))
        htorch.core.mark_step()


class OnlineDefragmenter:
    """Gives vLLM's blocks the lowest places of the cache, and keeps them there.

    A block that a request gets takes the lowest free place, so that most traffic needs no move;
    content that prefix caching may want is exchanged, other content is overwritten. ``kv_caches``
    has keys and values of each layer, ``[slots, ...]``, values None for latent attention; the last
    block is the plugin's padding. ``enabled`` and the threshold are the plugin's settings;
    ``req_blocks`` are the blocks of each request.

    It is off, with a warning, where layers have caches of several lengths, as models with state
    layers do. The plugin's caches of scales are not moved, as the plugin does not move them.
    """

    def __init__(self, kv_caches: Iterable[Sequence[torch.Tensor | None]], block_size: int) -> None:
        config = get_config()
        self.kv_caches = tuple(kv_caches)
        self.block_size = block_size
        self.req_blocks: dict[str, list[int]] = {}
        self._keeps = bool(config.prefix_caching)
        self._debug = init_debug_logger("defrag")
        self._caches = _distinct(self.kv_caches)
        self._device = self._caches[0].device
        self.enabled = bool(config.defrag) and self._can_move()
        self.cache_utils = _compiled(BlockMover(block_size, self._device), config)
        self._places: list[int] = []
        """The place of each block; 0 for one that no request has."""
        self._remapper: BlockRemapper | None = None
        if self.enabled:
            threshold = config.VLLM_DEFRAG_THRESHOLD
            self._remapper = BlockRemapper(
                self._caches[0].shape[0] // block_size - 1,
                DefragConfig(threshold=DEFAULT_THRESHOLD if threshold is None else threshold),
            )
            self._note_places(self._remapper)

    def resolve(self, block_id: int) -> int:
        """The place of a block.

        One that no request has, as in a warm-up, has one that no other block has.
        """
        block = int(block_id)
        if block >= len(self._places):  # the plugin's padding; nothing is moved
            return block
        return self._places[block] or self._place_of_none(block)

    def resolve_all(self, block_table_list: list[list[int]]) -> list[list[int]]:
        """The places of the blocks of each request."""
        return [[self.resolve(block) for block in blocks] for blocks in block_table_list]

    def update_state(
        self, new_blocks: Mapping[str, Sequence[int]], finished_reqs: Iterable[str]
    ) -> None:
        """Note what a step gives to requests, and what those that have finished had.

        First what is given, because vLLM may give a block of a finished request to another in the
        same step, with its content, or to one with the same id. Block 0 stands for none.
        """
        remapper = self._remapper
        if remapper is None:
            return
        finished = [self.req_blocks.pop(request, ()) for request in finished_reqs]
        for request, given in new_blocks.items():
            blocks = [block for block in given if block != PADDING_BLOCK]
            remapper.use(blocks)
            self.req_blocks.setdefault(request, []).extend(blocks)
        for released in finished:
            remapper.release(released, keep=self._keeps)
        if new_blocks or finished:
            self._note_places(remapper)

    def defragment(self) -> None:
        """Move blocks, if the highest place in use exceeds their number by the threshold."""
        remapper = self._remapper
        plan = None if remapper is None else remapper.plan()
        if remapper is None or plan is None:
            return
        self._copy(plan.copies)
        self._note_places(remapper)
        if self._debug:
            self._debug(
                f"defragmentation done max_id_used={plan.highest_before}->{plan.highest_after} "
                f"num_used={plan.num_used} copied={len(plan.copies)}/{plan.padded_size}"
            )

    def warmup(self) -> None:
        """Run each size of a plan once, so that its graph is there; changes no content."""
        if self._remapper is not None:
            warm_up_defragmenter(self._copy, self._remapper.pool.num_blocks)

    def _note_places(self, remapper: BlockRemapper) -> None:
        self._places = remapper.table.tolist()  # of which a single one is read in nanoseconds

    def _place_of_none(self, block: int) -> int:
        """A place that no block has, another one for each block without a place.

        That of the same number, or else of the block that has it, and so on.
        """
        block_at = {place: other for other, place in enumerate(self._places) if place}
        while block in block_at:
            block = block_at[block]
        return block

    def _can_move(self) -> bool:
        lengths = {cache.shape[0] for cache in self._caches}
        if len(lengths) == 1 and self._caches[0].shape[0] >= 3 * self.block_size:
            return True
        logger.warning(
            "Defragmentation is off: the caches have %s rows, and blocks of %d of these cannot be "
            "moved in all of them",
            sorted(lengths),
            self.block_size,
        )
        return False

    def _copy(self, copies: Sequence[BlockCopy]) -> None:
        for part in split_to_plan_sizes(copies):
            srcs, dsts = torch.tensor(part, dtype=torch.long).T.contiguous().to(self._device)
            self.cache_utils(srcs, dsts, self._caches)


def _distinct(kv_caches: Iterable[Sequence[torch.Tensor | None]]) -> list[torch.Tensor]:
    """Keys and values, once each: layers may share theirs."""
    tensors = (tensor for layer in kv_caches for tensor in layer[:2] if tensor is not None)
    return list({id(tensor): tensor for tensor in tensors}.values())


def _compiled(mover: BlockMover, config: Any) -> Any:
    """As the plugin compiles its copies, by ``VLLM_DEFRAG_WITH_GRAPHS`` and the mode."""
    graphs = config.VLLM_DEFRAG_WITH_GRAPHS
    if not (config.bridge_mode == "eager" if graphs is None else graphs):
        return mover
    if config.bridge_mode == "lazy":
        return htorch.hpu.wrap_in_hpu_graph(mover, disable_tensor_cache=True)
    return torch.compile(mover, backend="hpu_backend", fullgraph=True, dynamic=False)
