"""The memory of the cache, and the one place that carries plans out on it. Needs torch.

The keys and values of all layers are one tensor, ``[2, layers, num_blocks, kv_heads, block_size,
head_dim]``, so that a plan is carried out for every layer at once, while each layer's keys and
values are contiguous views.

Why heads come before positions: decode attention multiplies, for each block and kv head, the
queries with a ``[block_size, head_dim]`` matrix. With the heads outside, ``cache[:n]`` is that
batch of matrices as it lies in memory, flattened over block and head with no copy. With positions
outside, every step would first have to transpose all that it reads.

A recorded graph on Gaudi cannot update a view in place. There each layer's keys, and its values,
are a tensor of their own (``separate_layers``), and a plan is carried out layer by layer.

The host side is block-major, ``[num_host_blocks, 2 * layers, ...]``: nothing computes there, and
one block, or a run of blocks, is one piece for the link between host and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trencadis.kvcache.copiers import copier_for
from trencadis.kvcache.errors import InvalidBlock, InvalidSetting
from trencadis.kvcache.memory import zeros
from trencadis.kvcache.moves import BlockCopy, Direction


def bytes_per_block(
    *, num_layers: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes that one block takes in all layers, keys and values together."""
    return 2 * num_layers * kv_heads * block_size * head_dim * dtype.itemsize


class KVCache:
    """Key and value vectors of every layer, block by block, all zero at first.

    ``num_blocks`` counts the padding block 0; ``num_host_blocks`` is the room for swapped blocks,
    in pinned memory where the device can copy from it on its own. Swaps run on a stream of their
    own where the device has streams: call `wait` before the next forward pass.
    ``separate_layers`` makes a tensor of each layer's keys, and of its values; otherwise ``data``
    is the one tensor of all. Raises `InvalidSetting` for a size below one.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_host_blocks: int = 0,
        separate_layers: bool = False,
    ) -> None:
        shape = (2, num_layers, num_blocks, kv_heads, block_size, head_dim)
        if min(shape) < 1 or num_host_blocks < 0:
            raise InvalidSetting(
                "num_layers, num_blocks, kv_heads, block_size and head_dim must be at least 1 "
                f"and num_host_blocks at least 0, got {(*shape[1:], num_host_blocks)}"
            )
        self.device = torch.device(device)
        self._shape = shape
        parts = 2 * num_layers
        if separate_layers:
            self._parts = tuple(zeros(shape[2:], dtype, self.device) for _ in range(parts))
            words: torch.Tensor | tuple[torch.Tensor, ...] = tuple(
                _as_words(part) for part in self._parts
            )
        else:
            self.data = zeros(shape, dtype, self.device)
            self._parts = self.data.flatten(0, 1).unbind()
            words = _as_words(self.data.view(parts, num_blocks, -1))
        host_shape = (num_host_blocks, parts, words[0][0].numel())
        # Not on Gaudi: «Pin memory is not supported on HPU» (vllm-gaudi, platform.py).
        pinned = self.device.type == "cuda"
        self._host = zeros(host_shape, words[0].dtype, torch.device("cpu"), pinned=pinned)
        self._copier = copier_for(words, self._host)

    @property
    def num_layers(self) -> int:
        """Layers, each with keys and values."""
        return self._shape[1]

    @property
    def num_blocks(self) -> int:
        """Device blocks, the padding block among them."""
        return self._shape[2]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._shape[4]

    @property
    def num_host_blocks(self) -> int:
        """Host blocks."""
        return self._host.shape[0]

    def key(self, layer: int) -> torch.Tensor:
        """Keys of a layer: contiguous ``[num_blocks, kv_heads, block_size, head_dim]``."""
        return self._parts[layer]

    def value(self, layer: int) -> torch.Tensor:
        """Values of a layer: contiguous ``[num_blocks, kv_heads, block_size, head_dim]``."""
        return self._parts[self.num_layers + layer]

    def carry_out(self, plan: Iterable[tuple[Direction, Sequence[BlockCopy]]]) -> None:
        """Carry out the moves of a step in their order; a `MovePlan` is such a plan."""
        act = {
            Direction.WITHIN: self.copy,
            Direction.OUT: self.swap_out,
            Direction.IN: self.swap_in,
        }
        for direction, copies in plan:
            act[direction](copies)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks within the device, in every layer, all at once.

        Raises `InvalidBlock` for an id outside the cache.
        """
        _check(copies, self.num_blocks, self.num_blocks)
        if copies:
            self._copier.copy(copies)

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy device blocks to host blocks. Raises `InvalidBlock` for an id outside either."""
        _check(copies, self.num_blocks, self.num_host_blocks)
        if copies:
            self._copier.swap_out(copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy host blocks to device blocks. Raises `InvalidBlock` for an id outside either."""
        _check(copies, self.num_host_blocks, self.num_blocks)
        if copies:
            self._copier.swap_in(copies)

    def wait(self) -> None:
        """Let the device's current stream wait for the swaps asked for so far.

        Call it before a forward pass. The host does not wait, and where swaps are never under way,
        as on the processor, nothing does.
        """
        self._copier.wait()


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    """The same memory in the dtype in which it is copied; what is copied is bits."""
    if blocks.device.type == "cpu" and blocks.shape[-1] * blocks.itemsize % 8 == 0:
        return blocks.view(torch.int64)
    # Indexing is not everywhere written for the 8-bit floats. Accelerators keep other dtypes: some
    # of them, Gaudi among them, take 64-bit integers for 32-bit ones.
    return blocks.view(torch.uint8) if blocks.itemsize == 1 else blocks


def _check(copies: Sequence[BlockCopy], num_src: int, num_dst: int) -> None:
    for src, dst in copies:
        if not (0 <= src < num_src and 0 <= dst < num_dst):
            raise InvalidBlock(
                f"cannot copy block {src} to {dst}: there are {num_src} blocks to copy from "
                f"and {num_dst} to copy to"
            )
