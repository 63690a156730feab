"""The memory of the cache, and the block copies on it. Needs torch.

A part is the keys or the values of a layer. All parts of equal heads and width are one tensor,
``[parts, num_blocks, kv_heads, block_size, width]``; most models have one. So one operation copies
a block in every layer, and each part is a contiguous view.

Heads come before positions because decode attention multiplies, for each block and kv head, the
queries with a ``[block_size, width]`` matrix. In this order ``cache[:n]`` is the batch of these
matrices: flattening over block and head needs no copy. With positions first, every step would have
to transpose all that it reads.

On Gaudi an update in place is fast only where it writes whole rows of a tensor that is not a view.
There each part is a tensor of its own with a row for each token (``token_rows``),
``[num_blocks * block_size, kv_heads, width]``, written by ``index_copy_``.

The host side is block-major, ``[num_host_blocks, parts, ...]``. No attention reads it, and a
block or a run of blocks is one contiguous transfer between host and device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from trencadis.kvcache.copy_plan import BlockCopy, Copies, Direction, as_block_copies
from trencadis.kvcache.errors import InvalidBlock, InvalidSetting, MissingExtra
from trencadis.kvcache.layer_groups import LayerGroups
from trencadis.kvcache.validators import boolean, instance_of, integer

try:
    import torch

    from trencadis.kvcache.copiers import (
        DirectCopier,
        HostMemory,
        RowCopier,
        StagedCopier,
        allocate,
        as_device,
        copier_for,
    )
    from trencadis.kvcache.state_cache import StateCache
except ModuleNotFoundError as error:
    raise MissingExtra(
        f"trencadis.kvcache.tensors needs PyTorch ({error}): "
        "install trencadis-kvcache[torch], or install torch as pytorch.org describes"
    ) from error


_POSITIVE = integer(1, remedy="pass a positive size")


@attrs.frozen
class LayerShape:
    """What a layer keeps of each token: ``kv_heads`` keys of ``key_width`` numbers, and as many
    values of ``value_width``. ``kv_heads`` 0: nothing."""

    kv_heads: int
    key_width: int
    value_width: int


def bytes_per_block(layers: Sequence[LayerShape], *, block_size: int, dtype: torch.dtype) -> int:
    """The bytes of one block in all layers, keys and values together.

    With several block groups: ``layers`` are those of one (`LayerGroups.one_of_each_tensor`).
    """
    per_token = sum(each.kv_heads * (each.key_width + each.value_width) for each in layers)
    return per_token * block_size * dtype.itemsize


class KVCache:
    """The key and value vectors of ``layers`` in blocks, initially zero.

    ``num_blocks`` includes the padding block 0. ``num_host_blocks`` is the number of host blocks
    for swapped sequences, in pinned memory on devices that support it. Swaps run on their own
    stream on devices with streams, so call `wait` before the next forward pass.
    ``token_rows`` allocates a tensor for the keys and one for the values of each layer, with a row
    for each slot. ``states``: the memory of the layers that keep a state. ``host_memory``: what
    gives the memory of the host blocks, of each kind of part by its bytes, as one that other
    processes map; a host block has the same place in each. ``groups``: which layers share a tensor,
    each with blocks of its own; none by default. Raises `InvalidSetting` for a size below one or
    another wrong argument, and `OutOfMemory` if the memory cannot be allocated.
    """

    def __init__(
        self,
        *,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        num_host_blocks: int = 0,
        token_rows: bool = False,
        states: StateCache | None = None,
        host_memory: HostMemory | None = None,
        groups: LayerGroups | None = None,
    ) -> None:
        instance_of(list, tuple).checked("layers", layers)
        _POSITIVE.checked("len(layers)", len(layers))
        for layer in layers:
            instance_of(LayerShape).checked("layers", layer)
            for name in LayerShape.__annotations__ if layer.kv_heads else ():
                _POSITIVE.checked(name, getattr(layer, name))
        num_blocks = _POSITIVE.checked("num_blocks", num_blocks)
        block_size = _POSITIVE.checked("block_size", block_size)
        not_negative = integer(0, remedy="0 turns swapping off")
        num_host_blocks = not_negative.checked("num_host_blocks", num_host_blocks)
        instance_of(torch.dtype).checked("dtype", dtype)
        boolean().checked("token_rows", token_rows)
        self.states = states
        self._given_memory = host_memory
        self.groups = _groups_of(layers) if groups is None else _checked_groups(groups, layers)
        self.num_layers = len(layers)
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.device = as_device(device)
        tensors = self.groups.one_of_each_tensor(layers)
        widths = [(each.kv_heads, each.key_width) for each in tensors]
        widths += ((each.kv_heads, each.value_width) for each in tensors)
        parts: dict[int, torch.Tensor] = {}
        self._copiers: list[DirectCopier | StagedCopier] = []
        for heads, width in dict.fromkeys(widths):
            if not heads:
                continue
            numbers = [number for number, each in enumerate(widths) if each == (heads, width)]
            make = self._rows if token_rows else self._blocks
            parts |= zip(numbers, make(len(numbers), heads, width, dtype), strict=True)
        nothing = torch.empty(0, dtype=dtype, device=self.device)
        self._parts = [
            parts.get(first + tensor, nothing)
            for first in (0, len(tensors))
            for tensor in self.groups.tensor_of
        ]

    @classmethod
    def over(
        cls,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor] = (),
        *,
        block_size: int,
        num_host_blocks: int = 0,
    ) -> KVCache:
        """The cache in tensors that a runtime has, one for each layer, without a copy of them.

        Their first dimension is the block, ``[num_blocks, ...]``; the others may have any order.
        Without ``values``, those of ``keys`` hold both. `key` and `value` return these tensors.
        Raises `InvalidSetting` for tensors that are not contiguous, or of several numbers of blocks
        or devices.
        """
        block_size = _POSITIVE.checked("block_size", block_size)
        not_negative = integer(0, remedy="0 turns swapping off")
        num_host_blocks = not_negative.checked("num_host_blocks", num_host_blocks)
        parts = _as_parts("keys", keys) + _as_parts("values", values)
        if not keys or len(values) not in (0, len(keys)):
            raise InvalidSetting(
                f"there are {len(keys)} keys and {len(values)} values: give one of each for each "
                "layer, or keys alone",
                "keys",
            )
        first = parts[0]
        for part in parts:
            if part.shape[0] != first.shape[0] or part.device != first.device:
                raise InvalidSetting(
                    f"a tensor of {part.shape[0]} blocks on {part.device} is beside one of "
                    f"{first.shape[0]} on {first.device}: give those of one cache"
                )
        cache = cls.__new__(cls)
        cache.states = cache._given_memory = None
        cache.groups = _groups_of(keys)
        cache.num_layers, cache.num_blocks = len(keys), first.shape[0]
        cache.num_host_blocks, cache.block_size = num_host_blocks, block_size
        cache.device, cache._parts = first.device, parts
        cache._copiers = []
        words = [_as_words(part.view(cache.num_blocks, -1)) for part in parts]
        for kind in dict.fromkeys((each.shape[1], each.dtype) for each in words):
            alike = [each for each in words if (each.shape[1], each.dtype) == kind]
            host = cache._host_memory(alike[0], len(alike), kind[0])
            cache._copiers.append(RowCopier(alike, host, 1))  # a block is a row
        return cache

    def _blocks(
        self, num_parts: int, heads: int, width: int, dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """Parts that are views of one tensor, and their copier."""
        shape = (num_parts, self.num_blocks, heads, self.block_size, width)
        memory = allocate("num_blocks", self.num_blocks, shape, dtype, self.device)
        words = _as_words(memory.view(num_parts, self.num_blocks, -1))
        self._copiers.append(copier_for(words, self._host_memory(words, num_parts, words.shape[2])))
        return memory.unbind()

    def _rows(
        self, num_parts: int, heads: int, width: int, dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """Parts with a row for each token, and their copier."""
        shape = (self.num_blocks * self.block_size, heads, width)
        parts = [
            allocate("num_blocks", self.num_blocks, shape, dtype, self.device)
            for _ in range(num_parts)
        ]
        # On Gaudi no views: it copies a tensor whole to change a view of it in place.
        words = parts if self.device.type == "hpu" else [_as_words(part) for part in parts]
        host = self._host_memory(words[0], num_parts, self.block_size * words[0][0].numel())
        self._copiers.append(RowCopier(words, host, self.block_size))
        return parts

    def _host_memory(
        self, words: torch.Tensor, num_parts: int, words_per_block: int
    ) -> torch.Tensor:
        """The host blocks of some parts, in the dtype of the device's ``words``, or in bytes.

        PyTorch's CPU kernels do not take 8-bit floats.
        """
        shape = (self.num_host_blocks, num_parts, words_per_block)
        # Not on Gaudi: «Pin memory is not supported on HPU» (vllm-gaudi, platform.py).
        pinned = self.device.type == "cuda"
        return allocate(
            "num_host_blocks",
            self.num_host_blocks,
            shape,
            torch.uint8 if words.itemsize == 1 else words.dtype,
            torch.device("cpu"),
            pinned=pinned,
            host_memory=self._given_memory,
        )

    def key(self, layer: int) -> torch.Tensor:
        """Keys of a layer: contiguous ``[num_blocks, kv_heads, block_size, key_width]``.

        With ``token_rows``: ``[num_blocks * block_size, kv_heads, key_width]``, and no view. Empty
        for a layer that keeps none. Raises `InvalidSetting` for one that the cache does not have.
        """
        if type(layer) is not int or not 0 <= layer < self.num_layers:
            layer = self._checked_layer(layer)
        return self._parts[layer]

    def value(self, layer: int) -> torch.Tensor:
        """Values of a layer, in the layout of its keys. Raises as `key`.

        Also for a cache over tensors without separate values.
        """
        if type(layer) is not int or not 0 <= layer < self.num_layers:
            layer = self._checked_layer(layer)
        number = self.num_layers + layer
        if number >= len(self._parts):
            raise InvalidSetting("the cache has no separate values: its keys hold both")
        return self._parts[number]

    def carry_out(self, plan: Iterable[tuple[Direction, Sequence[BlockCopy]]]) -> None:
        """Carry out the batches of a `CopyPlan` in order.

        Checks all of them first. Raises `InvalidBlock` for an id outside the cache, and
        `InvalidSetting` for anything but directions with pairs of block ids.
        """
        for direction, copies in self._checked(plan):
            for copier in self._copiers if copies else ():
                carry_out = {
                    Direction.WITHIN: copier.copy,
                    Direction.OUT: copier.swap_out,
                    Direction.IN: copier.swap_in,
                }
                carry_out[direction](copies)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks within the device, in every layer, all at once. Raises as `carry_out`."""
        self.carry_out([(Direction.WITHIN, copies)])

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy device blocks to host blocks. Raises as `carry_out`."""
        self.carry_out([(Direction.OUT, copies)])

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy host blocks to device blocks. Raises as `carry_out`."""
        self.carry_out([(Direction.IN, copies)])

    def host_content(self, block: int) -> list[memoryview]:
        """The bytes of a host block: of each kind of part a piece of the host's memory itself.

        Raises `InvalidBlock` for an id that is not a host block.
        """
        _require_valid([BlockCopy(block, 0)], self.num_host_blocks, 1)
        return [
            copier.host[block].flatten().view(torch.uint8).numpy().data for copier in self._copiers
        ]

    def wait(self) -> None:
        """Make the device's current stream wait for the swaps so far; call it before a forward.

        The host does not wait. Does nothing on the CPU, where every swap completes at once.
        """
        for copier in self._copiers:
            copier.wait()

    def _checked_layer(self, layer: int) -> int:
        remedy = "pass a layer of the cache"
        checked: int = integer(0, self.num_layers - 1, remedy=remedy).checked("layer", layer)
        return checked

    def _checked(
        self, plan: Iterable[tuple[Direction, Sequence[BlockCopy]]]
    ) -> list[tuple[Direction, Copies]]:
        """The batches of a plan whose block ids are all within the cache."""
        num_blocks = {
            Direction.WITHIN: (self.num_blocks, self.num_blocks),
            Direction.OUT: (self.num_blocks, self.num_host_blocks),
            Direction.IN: (self.num_host_blocks, self.num_blocks),
        }
        try:
            batches = [
                (Direction(direction), as_block_copies(copies)) for direction, copies in plan
            ]
        except (TypeError, ValueError) as error:
            raise InvalidSetting(
                f"{plan!r} is not a plan of (Direction, copies) batches: pass a CopyPlan"
            ) from error
        for direction, copies in batches:
            _require_valid(copies, *num_blocks[direction])
        return batches


def _groups_of(layers: Sequence[object]) -> LayerGroups:
    """One group, in which each layer has a tensor of its own."""
    return LayerGroups.single([None] * len(layers))


def _checked_groups(groups: LayerGroups, layers: Sequence[LayerShape]) -> LayerGroups:
    """Raise `InvalidSetting` where layers of other shapes would share a tensor."""
    instance_of(LayerGroups).checked("groups", groups)
    if len(groups.tensor_of) != len(layers):
        raise InvalidSetting(
            f"groups are of {len(groups.tensor_of)} layers, and the cache has {len(layers)}: pass "
            "those of its layers",
            "groups",
        )
    tensors = groups.one_of_each_tensor(layers)
    for number, (tensor, layer) in enumerate(zip(groups.tensor_of, layers, strict=True)):
        kept = tensors[tensor]
        sizes = [(each.kv_heads, each.key_width, each.value_width) for each in (kept, layer)]
        if sizes[0] != sizes[1]:
            raise InvalidSetting(
                f"layer {number} has heads and widths {sizes[1]}, and shares a tensor with one of "
                f"{sizes[0]}: put layers of other shapes into one group",
                "groups",
            )
    return groups


def _as_parts(name: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    instance_of(list, tuple).checked(name, tensors)
    for number, tensor in enumerate(tensors):
        instance_of(torch.Tensor).checked(f"{name}[{number}]", tensor)
        if tensor.dim() < 2 or not tensor.is_contiguous() or not tensor.numel():
            raise InvalidSetting(
                f"{name}[{number}] has the shape {list(tensor.shape)} and the strides "
                f"{tensor.stride()}: give a contiguous tensor [num_blocks, ...]",
                name,
            )
    return list(tensors)


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
