"""Block groups: which layers of a model share a block.

Layers with a window need few of the blocks that layers without one need. Where a block holds all
layers, all of them keep the same tokens. So a block holds as many layers of one window, and a
sequence has a block table for each such group. The first layers of all groups share a tensor of
the cache, the second ones the next, and so on: one pool has the blocks of all groups, and the
share of each follows from the traffic. vLLM's hybrid KV cache manager has the same division
(docs.vllm.ai, "Hybrid KV Cache Manager").
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TypeVar

import attrs

from trencadis.kvcache.config import MAX_GROUPS
from trencadis.kvcache.errors import InvalidSetting
from trencadis.kvcache.rounding import ceil_div, most_window_blocks
from trencadis.kvcache.validators import integer

_MOST_GROUPS = 32
"""Each group costs time of the host in every step."""

_MOST_PADDING = 1.05
"""How many times the least memory a division may take that has fewer groups than that one."""

_LEAST_SAVING = 0.9
"""Several groups that take more than this share of the memory of one are not worth their time."""

Layer = TypeVar("Layer")


@attrs.frozen
class LayerGroups:
    """The group and the tensor of each layer, by its number.

    ``windows``: of each group, for `CacheConfig`. ``group_of``: the group whose block table a layer
    reads. ``tensor_of``: the tensor of the cache that has the layer's keys, and that of its values.
    Layers of one group have different tensors. Raises `InvalidSetting` for others.
    """

    windows: tuple[int | None, ...]
    group_of: tuple[int, ...]
    tensor_of: tuple[int, ...]

    def __attrs_post_init__(self) -> None:
        places = set(zip(self.group_of, self.tensor_of, strict=False))
        groups, tensors = set(self.group_of), set(self.tensor_of)
        if (
            len(self.group_of) != len(self.tensor_of)
            or len(places) != len(self.group_of)
            or groups != set(range(len(self.windows)))
            or tensors != set(range(len(tensors)))
            or len(self.windows) > MAX_GROUPS
        ):
            raise InvalidSetting(
                f"the groups {self.group_of} and the tensors {self.tensor_of} do not give each "
                f"layer of {len(self.windows)} groups a tensor of its own in its group: use "
                "group_layers"
            )

    @classmethod
    def single(cls, windows: Sequence[int | None]) -> LayerGroups:
        """One group for layers of these windows. It has the largest; None if one sees all."""
        largest = None if None in windows else max(each for each in windows if each is not None)
        num_layers = len(windows)
        return cls((largest,), (0,) * num_layers, tuple(range(num_layers)))

    @property
    def num_groups(self) -> int:
        """The number of groups."""
        return len(self.windows)

    @property
    def num_tensors(self) -> int:
        """How many layers a block holds: tensors of keys, and as many of values."""
        return 1 + max(self.tensor_of)

    def first_alike(self, group: int) -> int:
        """The first group with the window of a group: a sequence has as many blocks in both."""
        return self.windows.index(self.windows[group])

    def one_of_each_tensor(self, layers: Sequence[Layer]) -> list[Layer]:
        """Of what is given for each layer, that of the first layer of each tensor."""
        found: dict[int, Layer] = {}
        for tensor, layer in zip(self.tensor_of, layers, strict=True):
            found.setdefault(tensor, layer)
        return [found[tensor] for tensor in range(self.num_tensors)]


def group_layers(
    windows: Sequence[int | None],
    shapes: Sequence[Hashable],
    *,
    num_tokens: int,
    block_size: int,
) -> LayerGroups:
    """The groups of layers with these ``windows`` that take least memory for ``num_tokens``.

    ``shapes``: what each layer keeps of a token, such as a `LayerShape`. One group where they
    differ, because a block has one size, and where several would save less than a tenth. Fewer,
    larger groups are preferred where layers that are missing in them take a twentieth at most.
    Raises `InvalidSetting` without layers, and for sizes below one.
    """
    positive = integer(1, remedy="pass a positive size")
    num_tokens = positive.checked("num_tokens", num_tokens)
    block_size = positive.checked("block_size", block_size)
    positive.checked("len(windows)", len(windows))
    if len(shapes) != len(windows):
        raise InvalidSetting(
            f"there are {len(windows)} windows and {len(shapes)} shapes: pass one for each layer",
            "shapes",
        )
    seen = [None if window is None or window >= num_tokens else window for window in windows]
    of_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(seen):
        of_window.setdefault(window, []).append(layer)
    if len(of_window) == 1 or len(set(shapes)) > 1:
        return LayerGroups.single(seen)
    all_blocks = ceil_div(num_tokens, block_size)
    blocks = {
        window: all_blocks
        if window is None
        else min(all_blocks, most_window_blocks(window, 1, block_size))
        for window in of_window
    }

    def memory(size: int) -> int:
        counts = ((ceil_div(len(layers), size), window) for window, layers in of_window.items())
        return sum(size * count * blocks[window] for count, window in counts)

    def num_groups(size: int) -> int:
        return sum(ceil_div(len(layers), size) for layers in of_window.values())

    sizes = [
        size
        for size in range(1, 1 + max(map(len, of_window.values())))
        if num_groups(size) <= _MOST_GROUPS
    ]
    if not sizes:  # more windows than groups
        return LayerGroups.single(seen)
    least = min(map(memory, sizes))
    size = max(size for size in sizes if memory(size) <= _MOST_PADDING * least)
    if memory(size) > _LEAST_SAVING * len(windows) * all_blocks:
        return LayerGroups.single(seen)
    return _divided(of_window, size, len(windows))


def _divided(of_window: dict[int | None, list[int]], size: int, num_layers: int) -> LayerGroups:
    """Groups of ``size`` layers of one window, those that see most first."""
    ordered = sorted(of_window, key=lambda window: (window is not None, -(window or 0)))
    found: list[int | None] = []
    group_of, tensor_of = [0] * num_layers, [0] * num_layers
    for window in ordered:
        for layers in _pieces(of_window[window], size):
            for tensor, layer in enumerate(layers):
                group_of[layer], tensor_of[layer] = len(found), tensor
            found.append(window)
    return LayerGroups(tuple(found), tuple(group_of), tuple(tensor_of))


def _pieces(layers: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for first in range(0, len(layers), size):
        yield layers[first : first + size]
