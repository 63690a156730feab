"""Linear layers that compute adapters: each has slots for the matrices of several.

Letters in shapes: T tokens, S slots, R the highest rank. A slot's matrices are rows of two stacked
ones, so that one product serves all slots: what a token has computed with the rows of other slots
is replaced by zeros. So its result does not depend on the adapters of other tokens, and an adapter
is loaded by copying. Slot 0 is that of tokens without an adapter; it has no rows.

The first S rows are the first of each slot, and so on: a batch computes no further than the rank of
its adapters, rounded up to one of few (`AdapterLayers.ranks`), and shapes depend on nothing else.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trencadis.engine.models.adapter_files import Adapter, AdapterPair, LayerShape
from trencadis.engine.models.adapter_operator import (
    CURRENT,
    AdapterKernel,
    AdapterProducts,
    add_in_program,
    note_slots,
)
from trencadis.engine.models.decoder_layers import decoder_layers
from trencadis.engine.models.rank_loading import DividedModel
from trencadis.engine.models.rank_modules import RowLinear

_FIRST_RANK, _NEXT_RANK = 16, 4
"""The lowest rank that shapes are for, and by how much the next is higher. Each is another program
for every bucket. Four slots of rank 16 have 2 % of the bytes of an 8B Llama's weights."""


class AdaptedLinear(nn.Module):
    """A linear layer, of any kind of weight, and the matrices of adapters for it.

    ``down`` and ``up`` are ``[S * R, inputs]`` and ``[S * R, outputs]``, with zeros where there is
    no adapter, or one of a lower rank.
    """

    down: torch.Tensor
    up: torch.Tensor

    def __init__(
        self,
        base: Any,
        down: torch.Tensor,
        up: torch.Tensor,
        products: AdapterProducts,
        *,
        as_operator: bool,
    ) -> None:
        super().__init__()
        self._products, self._as_operator = products, as_operator
        self.base = base
        self.in_features: int = base.in_features
        self.out_features: int = base.out_features
        self.register_buffer("down", down, persistent=False)
        self.register_buffer("up", up, persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """That of the layer without adapters, for code of a model that asks for it."""
        weight: torch.Tensor = self.base.weight
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """That of the layer without adapters."""
        bias: torch.Tensor | None = self.base.bias
        return bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(rows)
        of_tokens = CURRENT.rows
        if of_tokens is None:
            return out
        if self._as_operator and type(rows) is not torch.Tensor:  # it is being traced
            return add_in_program(rows, out, self.down, self.up)
        return self._products.added(rows, out, of_tokens, self.down, self.up, in_place=True)


class AdapterLayers:
    """The linear layers in the decoder layers of a model, with ``num_slots`` slots each.

    Made once for a model that is loaded, it replaces these layers. ``upload``: `Device.upload`;
    ``end_copy``: called after each copy, `Device.mark_step`. ``kernel``: `Device.adapter_kernel`.
    ``as_operator``: whether compiled programs call what adapters add, as they do attention.
    ``divided``: for a rank that has a part of the model. ``shapes``: of the whole layers, by
    their names in the model. ``max_rank``: that of a slot. ``ranks``: those up to which a batch may
    compute, in order; a kernel computes each adapter up to its own. ``num_loads``: adapters that
    were copied to slots.
    """

    def __init__(
        self,
        model: nn.Module,
        num_slots: int,
        max_rank: int,
        upload: Callable[[torch.Tensor], torch.Tensor],
        end_copy: Callable[[], None],
        kernel: AdapterKernel | None = None,
        divided: DividedModel | None = None,
        *,
        as_operator: bool = False,
    ) -> None:
        self._divided = divided
        self._as_operator = as_operator
        self.num_slots, self.max_rank = num_slots, max_rank
        self._kernel = kernel
        self.ranks = (max_rank,) if kernel is not None else ranks_up_to(max_rank)
        self._ranks = torch.zeros(1 + num_slots, dtype=torch.int32)
        self._products = AdapterProducts(kernel, max_rank)
        self._upload, self._end_copy = upload, end_copy
        self.num_loads = 0
        self.dtype = next(model.parameters()).dtype
        self._layers: dict[str, AdaptedLinear] = {}
        self._held: dict[int, str] = {}
        names = {id(module): name for name, module in model.named_modules()}
        found: list[_Place] = []
        for layer in decoder_layers(model):
            found += _linear_layers(layer, names[id(layer)])
            note = functools.partial(note_slots, self._products)
            layer.register_forward_pre_hook(note, with_kwargs=True)
        self._replace(found)
        self.shapes: Mapping[str, LayerShape] = {
            name: LayerShape(layer.in_features, layer.out_features)
            if divided is None
            else divided.shapes[name]
            for name, layer in self._layers.items()
        }

    def _replace(self, found: Sequence[_Place]) -> None:
        """Replace linear layers by those with slots."""
        if not found:
            return
        num_rows = self.num_slots * self.max_rank
        bases = [getattr(place.module, place.name) for place in found]
        shapes = [
            (num_rows, width) for base in bases for width in (base.in_features, base.out_features)
        ]
        device = next(iter((*bases[0].parameters(), *bases[0].buffers()))).device
        matrices = iter(_zeros(shapes, self.dtype, device))
        for place, base in zip(found, bases, strict=True):
            held, operator = (next(matrices), next(matrices)), self._as_operator
            layer = AdaptedLinear(base, *held, self._products, as_operator=operator)
            self._layers[place.path] = layer
            setattr(place.module, place.name, layer)

    def part_of(self, adapter: Adapter) -> Adapter:
        """What a rank computes of an adapter: all of one matrix and its part of the other."""
        if self._divided is None:
            return adapter
        parts: dict[str, AdapterPair] = {}
        for name, pair in adapter.layers.items():
            inputs, outputs = self._divided.kept(name)
            parts[name] = AdapterPair(pair.down[:, inputs].clone(), pair.up[:, outputs].clone())
        return attrs.evolve(adapter, layers=parts)

    @torch.inference_mode()
    def put(self, slot: int, adapter: Adapter) -> None:
        """Copy an adapter to a slot, from 1 to ``num_slots``, unless it is there already."""
        if self._held.get(slot) == adapter.digest:
            return
        self._held.pop(slot, None)  # until all layers have it
        self._copy(slot, adapter.layers)
        self._ranks[slot] = adapter.rank
        self._held[slot] = adapter.digest
        self.num_loads += 1

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Copy zeros to the first slot as `put` copies an adapter, so that this is compiled."""
        self._held.pop(1, None)
        self._copy(1, {})

    def _copy(self, slot: int, pairs: Mapping[str, AdapterPair]) -> None:
        """Copy matrices to the rows of a slot, and zeros to the others of them.

        The rows are uploaded, so that a device that compiles each operation needs one for all
        slots.
        """
        places = torch.arange(self.max_rank * self.num_slots)
        of_slots = places.view(self.max_rank, self.num_slots).t()
        if self._kernel is not None:
            of_slots = places.view(self.num_slots, self.max_rank)
        rows = self._upload(of_slots[slot - 1].contiguous())
        for name, layer in self._layers.items():
            pair = pairs.get(name)
            for place, held in enumerate((layer.down, layer.up)):
                of_slot = torch.zeros(self.max_rank, held.shape[1], dtype=held.dtype)
                if pair is not None:
                    of_slot[: len(pair[place])] = pair[place]
                held.index_copy_(0, rows, self._upload(of_slot))
                self._end_copy()

    def rank_of(self, slots: npt.NDArray[np.int32]) -> int:
        """The lowest of ``ranks`` that has all rows of the adapters in these slots."""
        highest = int(self._ranks.numpy()[slots].max())
        return self.ranks[bisect.bisect_left(self.ranks, highest)]

    def rows_of(self, slots: torch.Tensor, rank: int) -> torch.Tensor:
        """``[T, S * rank]`` bool: true in the rows of slots other than that of a token.

        ``slots``: int32 ``[T]``, from 0. ``rank``: one of ``ranks``. A kernel gets `sorted_slots`
        instead.
        """
        if self._kernel is not None:
            return sorted_slots(slots, self._ranks)
        numbers = torch.arange(1, 1 + self.num_slots, device=slots.device)
        is_other = slots[:, None] != numbers
        return is_other[:, None].expand(-1, rank, -1).flatten(1)


def ranks_up_to(max_rank: int) -> tuple[int, ...]:
    """16, 64, 256 and so on below ``max_rank``, and that."""
    found, rank = [], _FIRST_RANK
    while rank < max_rank:
        found.append(rank)
        rank *= _NEXT_RANK
    return (*found, max_rank)


def sorted_slots(slots: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    """int32 ``[3, T]``: the tokens in the order of their slots, these slots, and their ranks.

    ``ranks``: of the slots from 0, int32 ``[1 + S]``.
    """
    found, order = torch.sort(slots, stable=True)
    return torch.stack((order, found, ranks[found])).int()


class _Place(NamedTuple):
    """Where a linear layer is: in ``module`` as ``name``, in the model as ``path``."""

    module: nn.Module
    name: str
    path: str


def _linear_layers(module: nn.Module, path: str) -> Iterator[_Place]:
    """The linear layers below a module, whose name in the model is ``path``."""
    for name, child in module.named_children():
        if isinstance(child, RowLinear):  # before the sum over ranks, which adds adapters, too
            yield _Place(child, "linear", f"{path}.{name}")
        elif _is_linear(child):
            yield _Place(module, name, f"{path}.{name}")
        else:
            yield from _linear_layers(child, f"{path}.{name}")


def _zeros(
    shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Matrices of zeros. In host memory they lie side by side.

    NumPy asks Linux for huge pages where an array is large, and PyTorch does not. A step with many
    adapters reads so much memory that without them it takes a third longer.
    """
    if device.type != "cpu":
        return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
    sizes = [math.prod(shape) for shape in shapes]
    content = torch.from_numpy(np.empty(sum(sizes) * dtype.itemsize, np.uint8)).view(dtype).zero_()
    parts = torch.split(content, sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _is_linear(module: nn.Module) -> bool:
    """Whether a module gives the product of one matrix, and nothing beside it.

    Subclasses in models' code may give more, such as a router the indices of experts.
    """
    if type(module).__module__.startswith("trencadis."):
        return hasattr(module, "in_features") and hasattr(module, "out_features")
    return type(module) is nn.Linear
