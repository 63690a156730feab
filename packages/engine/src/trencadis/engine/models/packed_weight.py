"""A packed weight: the integers or FP8 numbers of a linear layer, with their scales.

One description for every format of a checkpoint, and for weights that are rounded at load. Reading,
memory plan, stash and programs see its tensors as buffers of a `QuantizedLinear`; a device says by
`WeightFormat` which weights it multiplies packed, which it expands in each call, and which it
rejects.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from trencadis.engine.errors import ModelError

_Change = Callable[[torch.Tensor], torch.Tensor]

INT4_ZERO = 8
"""The number of 4 bits that means 0 where a weight has no zero points."""

LARGEST_FP8 = 240.0
"""What numbers are scaled to that are rounded to E4M3: its largest one on Gaudi 2. Elsewhere that
is 448, but the relative error of a float does not depend on its size."""

ROUNDED_AT_A_TIME = 256
"""Outputs that are rounded at a time: what rounding takes beside its result."""

TINY = torch.finfo(torch.float32).tiny


class WeightUse(enum.Enum):
    """What a device does with weights of a format."""

    MULTIPLIED = "multiplied packed"
    EXPANDED = "expanded in each call"
    REJECTED = "rejected"


@attrs.frozen
class WeightFormat:
    """How the weights of a checkpoint's linear layers are packed.

    ``name``: what users call it, such as ``int8`` or ``awq``. ``bits``: of each weight; fewer than
    4 or 8 are widened to these when they are read.
    ``is_float``: FP8 (E4M3). ``group``: inputs with one scale; 0 for all of an output.
    """

    name: str
    bits: int
    is_float: bool = False
    group: int = 0

    @property
    def steps_dtype(self) -> torch.dtype:
        """The dtype of `PackedWeight.steps`."""
        if self.is_float:
            return torch.float8_e4m3fn
        return torch.uint8 if self.bits <= 4 else torch.int8

    def __str__(self) -> str:
        kind = "FP8" if self.is_float else f"{self.bits} bits"
        return f"{self.name} ({kind}, {f'groups of {self.group}' if self.group else 'channels'})"


@attrs.frozen(eq=False)
class PackedWeight:
    """A weight ``[outputs, inputs]``: ``(step - zero point) * scale``.

    Or ``step * scale + minimum``.

    ``steps`` is int8 or FP8 ``[outputs, inputs]``, or uint8 ``[outputs, inputs / 2]``: numbers of 4
    bits from 0 to 15, the lower ones those of even columns. ``scales`` is ``[outputs, groups]``;
    a group is ``inputs / groups`` columns that follow each other. ``zero_points`` is int16
    ``[outputs, groups]``; without them 0, or 8 for 4 bits. ``order`` is int64 ``[inputs]``: the
    input that each column multiplies, where that is another one. ``minimums``, in place of zero
    points, are those of integers ``[outputs, groups]``. ``input_scale`` is fp32 ``[1]``: what is
    rounded to FP8 is inputs divided by it, or by twice that where FP8 ends at 240; a device that
    expands weights does not use it.

    Raises `ModelError` for tensors of other shapes or dtypes.
    """

    steps: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None = None
    order: torch.Tensor | None = None
    minimums: torch.Tensor | None = None
    input_scale: torch.Tensor | None = None

    def __attrs_post_init__(self) -> None:
        outputs, inputs = self.shape
        shape = (outputs, self.groups)
        zeros, order, minimums = self.zero_points, self.order, self.minimums
        if (
            self.steps.dtype not in (torch.uint8, torch.int8, torch.float8_e4m3fn)
            or not self.scales.is_floating_point()
            or self.scales.shape != shape
            or not self.groups
            or inputs % self.groups
            or (zeros is not None and (zeros.shape != shape or zeros.dtype is not torch.int16))
            or (order is not None and order.shape != (inputs,))
            or (minimums is not None and (minimums.shape != shape or zeros is not None))
        ):
            raise ModelError(
                f"a packed weight cannot be used: {self.steps.dtype} {list(self.steps.shape)} with "
                f"scales of {self.scales.dtype} {list(self.scales.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, columns = self.steps.shape
        return outputs, columns * (2 if self.steps.dtype is torch.uint8 else 1)

    @property
    def has_integers(self) -> bool:
        """Whether the steps are the numbers that scales multiply, which a kernel relies on."""
        return self.steps.dtype in (torch.int8, torch.uint8)

    @property
    def groups(self) -> int:
        return self.scales.shape[1]

    @property
    def group(self) -> int:
        """Columns of a group."""
        return self.shape[1] // self.groups

    def of_outputs(self, kept: range) -> PackedWeight:
        """The weight of some outputs."""
        rows = slice(kept.start, kept.stop)

        def change(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[rows].clone()  # not a view, which would keep all

        return self._changed(change, change)

    def in_order(self, outputs: torch.Tensor) -> PackedWeight:
        """The weight of these outputs, int64 ``[outputs]``, in their order."""

        def change(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[outputs]

        return self._changed(change, change)

    def of_inputs(self, kept: range) -> PackedWeight:
        """The weight of some inputs. Raises `ModelError` where they are not whole groups."""
        if self.order is not None:
            raise ModelError("its groups have inputs in any order (desc_act)")
        unit = self.group if self.groups > 1 else self.shape[1] // self.steps.shape[1]
        if kept.start % unit or kept.stop % unit:
            raise ModelError(f"{len(kept)} of {self.shape[1]} inputs are not groups of {unit}")
        columns, groups = (
            slice(kept.start * count // self.shape[1], kept.stop * count // self.shape[1])
            for count in (self.steps.shape[1], self.groups)
        )
        if self.groups == 1:
            groups = slice(None)
        return self._changed(
            lambda each: each[:, columns].contiguous().clone(),
            lambda each: each[:, groups].contiguous().clone(),
        )

    def _changed(self, of_steps: _Change, of_groups: _Change) -> PackedWeight:
        """The weight with other steps, and with other tensors of groups."""
        zeros, minimums = self.zero_points, self.minimums
        return attrs.evolve(
            self,
            steps=of_steps(self.steps),
            scales=of_groups(self.scales),
            zero_points=None if zeros is None else of_groups(zeros),
            minimums=None if minimums is None else of_groups(minimums),
        )

    def unpacked(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The weight, computed in fp32."""
        columns = self._of_columns(self.scales.float())
        weight = self._steps().float()
        if self.zero_points is not None:
            weight -= self._of_columns(self.zero_points.float())
        elif self.minimums is None and self.steps.dtype is torch.uint8:
            weight -= INT4_ZERO
        weight *= columns
        if self.minimums is not None:
            weight += self._of_columns(self.minimums.float())
        weight = weight.to(dtype)
        return weight if self.order is None else weight[:, self.order.argsort()]

    def _steps(self) -> torch.Tensor:
        if self.steps.dtype is not torch.uint8:
            return self.steps
        return torch.stack((self.steps & 15, self.steps >> 4), dim=-1).flatten(1)

    def _of_columns(self, of_groups: torch.Tensor) -> torch.Tensor:
        """``[outputs, groups]`` for each column."""
        if self.groups == 1:
            return of_groups
        return of_groups.repeat_interleave(self.group, dim=1)


class QuantizedLinear(nn.Module):
    """A linear layer with a packed weight, which it expands in each call.

    The tensors of the weight are buffers: they move, count and are traced as those of any layer.
    ``rounds_inputs``: a device may round its inputs to int8, where it then computes faster.
    """

    steps: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    order: torch.Tensor | None
    minimums: torch.Tensor | None
    input_scale: torch.Tensor | None

    def __init__(
        self,
        weight: PackedWeight,
        bias: nn.Parameter | None = None,
        *,
        rounds_inputs: bool = False,
    ) -> None:
        super().__init__()
        self.rounds_inputs = rounds_inputs
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        register_tensors(self, weight)

    @property
    def packed(self) -> PackedWeight:
        return packed_of(self)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        weight = attrs.evolve(self.packed, order=None)
        if self.order is not None:
            rows = rows[..., self.order]
        return F.linear(rows, weight.unpacked(rows.dtype), self.bias)


class QuantizedEmbedding(nn.Module):
    """An embedding with a packed weight, whose outputs are tokens: gives rows of ``dtype``.

    Its tensors may be those of the output head, where the model ties both.
    """

    steps: torch.Tensor

    def __init__(self, weight: PackedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        register_tensors(self, weight)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Vectors ``[..., hidden size]`` of ``token_ids`` ``[...]``."""
        rows = packed_of(self).in_order(token_ids.flatten()).unpacked(self.dtype)
        return rows.view(*token_ids.shape, -1)


def register_tensors(module: nn.Module, weight: PackedWeight) -> None:
    """Make the tensors of a weight buffers of a module, by their names."""
    for field in attrs.fields(PackedWeight):
        module.register_buffer(field.name, getattr(weight, field.name), persistent=False)


def packed_of(module: nn.Module) -> PackedWeight:
    """The weight whose tensors a module has."""
    names = (field.name for field in attrs.fields(PackedWeight))
    return PackedWeight(**{name: getattr(module, name) for name in names})


def rounded_fp8(weight: torch.Tensor) -> PackedWeight:
    """A weight ``[outputs, inputs]`` in E4M3, the largest of each output at `LARGEST_FP8`."""
    steps = weight.new_empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = weight.new_empty((len(weight), 1), dtype=torch.float32)
    chunks = (torch.split(each, ROUNDED_AT_A_TIME) for each in (weight, scales, steps))
    for rows, of_outputs, of_rows in zip(*chunks, strict=True):
        of_outputs.copy_(rows.abs().amax(1, keepdim=True)).div_(LARGEST_FP8)
        of_rows.copy_(rows.float() / of_outputs.clamp_min(TINY))
    return PackedWeight(steps, scales)


def pack_int4(steps: torch.Tensor) -> torch.Tensor:
    """uint8 ``[outputs, inputs / 2]`` of numbers from 0 to 15, ``[outputs, inputs]``."""
    return steps[:, 0::2].to(torch.uint8) | (steps[:, 1::2].to(torch.uint8) << 4)
