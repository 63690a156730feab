"""Linear layers that compute adapters: each has slots for the matrices of several.

Letters in shapes: T tokens, S slots, R the highest rank. A slot's matrices are rows of two stacked
ones, so that one product serves all slots: what a token has computed with the rows of other slots
is replaced by zeros. So its result does not depend on the adapters of other tokens, shapes depend
on none of them, and an adapter is loaded by copying. Slot 0 is that of tokens without an adapter;
it has no rows.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from trencadis.engine.models.adapter_files import Adapter, AdapterPair, LayerShape
from trencadis.engine.models.decoder_layers import decoder_layers
from trencadis.engine.models.rank_loading import DividedModel
from trencadis.engine.models.rank_modules import RowLinear

AdapterKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None
]
"""Adds to the results of a linear layer, in place, what the adapters of its rows compute.

Arguments: rows and results ``[..., inputs]`` and ``[..., outputs]``; `sorted_slots` of the
rows; the ranks of the slots from 0, int32 ``[1 + S]``; the layer's ``down`` and ``up``."""


class _Current(threading.local):
    """What the decoder layer that this thread computes was given."""

    rows: torch.Tensor | None = None


_CURRENT = _Current()


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
        ranks: torch.Tensor,
        kernel: AdapterKernel | None,
    ) -> None:
        super().__init__()
        self._ranks, self._kernel = ranks, kernel
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
        of_tokens = _CURRENT.rows
        if of_tokens is None:
            return out
        if self._kernel is not None:
            self._kernel(rows, out, of_tokens, self._ranks, self.down, self.up)
            return out
        inner = F.linear(rows, self.down)
        # Not a product: an overflow in another slot's rows would make it NaN.
        inner = inner.masked_fill(of_tokens.view(*inner.shape[:-1], -1), 0.0)
        return out + inner @ self.up


class AdapterLayers:
    """The linear layers in the decoder layers of a model, with ``num_slots`` slots each.

    Made once for a model that is loaded, it replaces these layers. ``upload``: `Device.upload`;
    ``end_copy``: called after each copy, `Device.mark_step`. ``kernel``: `Device.adapter_kernel`.
    ``divided``: for a rank that has a part of the model. ``shapes``: of the whole layers, by
    their names in the model. ``max_rank``: that of a slot. ``num_loads``: adapters that were copied
    to slots.
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
    ) -> None:
        self._divided = divided
        self.num_slots, self.max_rank = num_slots, max_rank
        self._kernel = kernel
        self._ranks = torch.zeros(1 + num_slots, dtype=torch.int32)
        self._upload, self._end_copy = upload, end_copy
        self.num_loads = 0
        self.dtype = next(model.parameters()).dtype
        self._layers: dict[str, AdaptedLinear] = {}
        self._held: dict[int, str] = {}
        names = {id(module): name for name, module in model.named_modules()}
        found: list[_Place] = []
        for layer in decoder_layers(model):
            found += _linear_layers(layer, names[id(layer)])
            layer.register_forward_pre_hook(_note_slots, with_kwargs=True)
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
            layer = AdaptedLinear(base, next(matrices), next(matrices), self._ranks, self._kernel)
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
        rows = self._upload(torch.arange((slot - 1) * self.max_rank, slot * self.max_rank))
        for name, layer in self._layers.items():
            pair = pairs.get(name)
            for place, held in enumerate((layer.down, layer.up)):
                of_slot = torch.zeros(self.max_rank, held.shape[1], dtype=held.dtype)
                if pair is not None:
                    of_slot[: len(pair[place])] = pair[place]
                held.index_copy_(0, rows, self._upload(of_slot))
                self._end_copy()

    def rows_of(self, slots: torch.Tensor) -> torch.Tensor:
        """``[T, S * R]`` bool: true in the rows of slots other than that of a token.

        ``slots``: int32 ``[T]``, from 0. A kernel gets `sorted_slots` instead.
        """
        if self._kernel is not None:
            return sorted_slots(slots)
        numbers = torch.arange(1, 1 + self.num_slots, device=slots.device)
        is_other = slots[:, None] != numbers
        return is_other[:, :, None].expand(-1, -1, self.max_rank).flatten(1)


def sorted_slots(slots: torch.Tensor) -> torch.Tensor:
    """int32 ``[2, T]``: the tokens in the order of their slots, and these slots."""
    found, order = torch.sort(slots, stable=True)
    return torch.stack((order, found)).int()


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


def _note_slots(_: nn.Module, __: Any, arguments: dict[str, Any]) -> None:
    """Before a decoder layer: its linear layers compute with what the forward pass has."""
    _CURRENT.rows = arguments["paged"].adapter_rows
