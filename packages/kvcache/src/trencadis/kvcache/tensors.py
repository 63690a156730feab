"""The memory of the cache, and the block copies on it. Needs torch.

The keys and values of all layers are one tensor, ``[2, layers, num_blocks, kv_heads, block_size,
head_dim]``. So one operation copies a block in every layer, and the keys and the values of each
layer are contiguous views.

Heads come before positions because decode attention multiplies, for each block and kv head, the
queries with a ``[block_size, head_dim]`` matrix. In this order ``cache[:n]`` is the batch of these
matrices: flattening over block and head needs no copy. With positions first, every step would have
to transpose all that it reads.

On Gaudi an update in place is fast only where it writes whole rows of a tensor that is no view.
There the keys and the values of each layer are separate tensors with a row for each token
(``token_rows``), ``[num_blocks * block_size, kv_heads, head_dim]``, written by ``index_copy_``.

The host side is block-major, ``[num_host_blocks, 2 * layers, ...]``. No attention reads it, and a
block or a run of blocks is one contiguous transfer between host and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from trencadis.kvcache.copiers import DirectCopier, RowCopier, StagedCopier, copier_for, zeros
from trencadis.kvcache.copy_plan import BlockCopy, Direction
from trencadis.kvcache.errors import InvalidBlock
from trencadis.kvcache.validators import require_at_least


def bytes_per_block(
    *, num_layers: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> int:
    """The bytes of one block in all layers, keys and values together."""
    return 2 * num_layers * kv_heads * block_size * head_dim * dtype.itemsize


class KVCache:
    """The key and value vectors of every layer in blocks, initially zero.

    ``num_blocks`` includes the padding block 0. ``num_host_blocks`` is the number of host blocks
    for swapped sequences, in pinned memory on devices that support it. Swaps run on their own
    stream on devices with streams, so call `wait` before the next forward pass.
    ``token_rows`` allocates a tensor for the keys and one for the values of each layer, with a row
    for each slot; without it, ``data`` is the one tensor of all layers. Raises `InvalidSetting` for
    a size below one.
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
        token_rows: bool = False,
    ) -> None:
        sizes = {
            "num_layers": num_layers,
            "num_blocks": num_blocks,
            "kv_heads": kv_heads,
            "block_size": block_size,
            "head_dim": head_dim,
        }
        for name, size in sizes.items():
            require_at_least(name, size, 1, "pass a positive size")
        require_at_least("num_host_blocks", num_host_blocks, 0, "0 turns swapping off")
        self.num_layers = num_layers
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.device = torch.device(device)
        shape = (2, *sizes.values())
        num_parts = 2 * num_layers
        if token_rows:
            rows = (num_blocks * block_size, kv_heads, head_dim)
            self._parts = tuple(zeros(rows, dtype, self.device) for _ in range(num_parts))
            words = [_as_words(part) for part in self._parts]
            self._host = self._host_memory(words[0], block_size * words[0][0].numel())
            self._copier: DirectCopier | StagedCopier = RowCopier(words, self._host, block_size)
        else:
            self.data = zeros(shape, dtype, self.device)
            self._parts = self.data.flatten(0, 1).unbind()
            blocks = _as_words(self.data.view(num_parts, num_blocks, -1))
            self._host = self._host_memory(blocks, blocks.shape[2])
            self._copier = copier_for(blocks, self._host)

    def _host_memory(self, words: torch.Tensor, words_per_block: int) -> torch.Tensor:
        """The host blocks, in the dtype of the device's ``words``."""
        shape = (self.num_host_blocks, 2 * self.num_layers, words_per_block)
        # Not on Gaudi: «Pin memory is not supported on HPU» (vllm-gaudi, platform.py).
        pinned = self.device.type == "cuda"
        return zeros(shape, words.dtype, torch.device("cpu"), pinned=pinned)

    def key(self, layer: int) -> torch.Tensor:
        """Keys of a layer: contiguous ``[num_blocks, kv_heads, block_size, head_dim]``.

        With ``token_rows``: ``[num_blocks * block_size, kv_heads, head_dim]``, and no view.
        """
        return self._parts[layer]

    def value(self, layer: int) -> torch.Tensor:
        """Values of a layer, in the shape of its keys."""
        return self._parts[self.num_layers + layer]

    def carry_out(self, plan: Iterable[tuple[Direction, Sequence[BlockCopy]]]) -> None:
        """Carry out the batches of a `CopyPlan` in order."""
        carry_out = {
            Direction.WITHIN: self.copy,
            Direction.OUT: self.swap_out,
            Direction.IN: self.swap_in,
        }
        for direction, copies in plan:
            carry_out[direction](copies)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks within the device, in every layer, all at once.

        Raises `InvalidBlock` for an id outside the cache.
        """
        _require_valid(copies, self.num_blocks, self.num_blocks)
        if copies:
            self._copier.copy(copies)

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy device blocks to host blocks. Raises `InvalidBlock` for an id outside either."""
        _require_valid(copies, self.num_blocks, self.num_host_blocks)
        if copies:
            self._copier.swap_out(copies)

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy host blocks to device blocks. Raises `InvalidBlock` for an id outside either."""
        _require_valid(copies, self.num_host_blocks, self.num_blocks)
        if copies:
            self._copier.swap_in(copies)

    def wait(self) -> None:
        """Make the device's current stream wait for the swaps so far; call it before a forward.

        The host does not wait. Does nothing on the CPU, where every swap completes at once.
        """
        self._copier.wait()


def _as_words(blocks: torch.Tensor) -> torch.Tensor:
    """The same memory in the dtype in which it is copied bit by bit."""
    if blocks.device.type == "cpu" and blocks.shape[-1] * blocks.itemsize % 8 == 0:
        return blocks.view(torch.int64)
    # Not every device can index 8-bit floats. On accelerators other dtypes stay unchanged: some
    # accelerators, Gaudi among them, treat 64-bit integers as 32-bit integers.
    return blocks.view(torch.uint8) if blocks.itemsize == 1 else blocks


def _require_valid(copies: Sequence[BlockCopy], num_src: int, num_dst: int) -> None:
    for src, dst in copies:
        if not (0 <= src < num_src and 0 <= dst < num_dst):
            raise InvalidBlock(
                f"cannot copy block {src} to {dst}: there are {num_src} source blocks "
                f"and {num_dst} destination blocks"
            )
