"""The scales of FP8 that Intel Neural Compressor (INC) measured for a model.

As vllm-gaudi's users have them: ``QUANT_CONFIG`` names a file of settings, these the beginning of
the names of the files that its calibration wrote (vllm-gaudi 091bbad, ``docs/configuration/
calibration/calibration.md``): see `calibration_files`. The rules are those of
intel/neural-compressor 9b47d09, below ``neural_compressor/torch/algorithms/fp8_quant/``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
from torch import nn

from trencadis.engine.errors import ConfigError
from trencadis.engine.models.packed_weight import (
    LARGEST_FP8,
    ROUNDED_AT_A_TIME,
    PackedWeight,
    QuantizedLinear,
)
from trencadis.engine.models.replaced_layers import FoundLayer, layers_of, replace_layers

_CHECKPOINTS_LARGEST = torch.finfo(torch.float8_e4m3fn).max
"""What `PackedWeight.input_scale` counts for."""


@attrs.frozen
class Fp8Range:
    """The largest E4M3 number of a device, and the powers of two by which its casts scale at no
    cost, from the lowest on (``_core/fp_utils.py:69-146``)."""

    largest: float
    exponents: range


FP8_RANGES: Mapping[str, Fp8Range] = {
    "GAUDI2": Fp8Range(LARGEST_FP8, range(-8, 5, 4)),
    "GAUDI3": Fp8Range(_CHECKPOINTS_LARGEST, range(-55, 8)),
}
"""By what INC and the driver call the device."""

Rounding = Callable[[torch.Tensor, Fp8Range], torch.Tensor]


def _power_of_two(scale: torch.Tensor, _: Fp8Range) -> torch.Tensor:
    return torch.exp2(torch.ceil(torch.log2(scale)))


def _hardware_power(scale: torch.Tensor, of: Fp8Range) -> torch.Tensor:
    exponent = torch.log2(_power_of_two(scale, of)) / of.exponents.step
    power = 2.0 ** (torch.ceil(exponent) * of.exponents.step)
    return power.clamp(2.0 ** of.exponents[0], 2.0 ** of.exponents[-1])


def _as_it_is(scale: torch.Tensor, _: Fp8Range) -> torch.Tensor:
    return scale


def _one(scale: torch.Tensor, _: Fp8Range) -> torch.Tensor:
    return torch.ones_like(scale)


def _largest_power(scale: torch.Tensor, of: Fp8Range) -> torch.Tensor:
    return torch.full_like(scale, 2.0 ** of.exponents[-1])


@attrs.frozen
class Rule:
    """How a scale follows from the largest number.

    That divided by ``backoff`` of what FP8 holds, rounded. ``is_fixed``: it does not follow.
    ``by_channel``: for each output of a weight, or each token. ``is_searched``: the least error
    among some, which INC computes on the device.
    """

    rounding: Rounding
    backoff: float = 1.0
    by_channel: bool = False
    is_fixed: bool = False
    is_searched: bool = False

    def scale_of(self, largest: torch.Tensor, of: Fp8Range) -> torch.Tensor:
        """In the dtype of ``largest``, as INC computes it (``_core/scale_methods/``)."""
        return self.rounding(largest / (of.largest * self.backoff), of)


_INPUTS = {
    "HW": Rule(_hardware_power, 0.25),
    "POW2": Rule(_power_of_two, 0.25),
    "ARBITRARY": Rule(_as_it_is, 0.25),
    "TOKENS": Rule(_power_of_two, by_channel=True),
}
_WEIGHTS = {
    "HW": Rule(_hardware_power, 0.5),
    "POW2": Rule(_power_of_two, 0.5),
    "ARBITRARY": Rule(_as_it_is, 0.5),
    "PCS_POW2": Rule(_power_of_two, 0.5, by_channel=True),
    "OPT": Rule(_as_it_is, 0.5, is_searched=True),
}
_ONE, _LARGEST = Rule(_one, is_fixed=True), Rule(_largest_power, is_fixed=True)

METHODS: Mapping[str, tuple[Rule, Rule]] = {
    "UNIT_SCALE": (_ONE, _ONE),
    "HW_ALIGNED_SINGLE_SCALE": (_LARGEST, _LARGEST),
    "MAXABS_HW": (_INPUTS["HW"], _WEIGHTS["HW"]),
    "MAXABS_POW2": (_INPUTS["POW2"], _WEIGHTS["POW2"]),
    "MAXABS_ARBITRARY": (_INPUTS["ARBITRARY"], _WEIGHTS["ARBITRARY"]),
    "ACT_MAXABS_HW_WEIGHTS_PCS_MAXABS_POW2": (_INPUTS["HW"], _WEIGHTS["PCS_POW2"]),
    "ACT_MAXABS_POW2_WEIGHTS_PCS_MAXABS_POW2": (_INPUTS["POW2"], _WEIGHTS["PCS_POW2"]),
    "MAXABS_HW_OPT_WEIGHT": (_INPUTS["HW"], _WEIGHTS["OPT"]),
    "MAXABS_POW2_OPT_WEIGHT": (_INPUTS["POW2"], _WEIGHTS["OPT"]),
    "ACT_MAXABS_HW_WEIGHTS_PCS_OPT_POW2": (_INPUTS["HW"], _WEIGHTS["OPT"]),
    "ACT_MAXABS_POW2_WEIGHTS_PCS_OPT_POW2": (_INPUTS["POW2"], _WEIGHTS["OPT"]),
    "ACT_MAXABS_PCS_POW2_WEIGHT_MAXABS_PTS_POW2_HW": (_INPUTS["TOKENS"], _WEIGHTS["HW"]),
    "MAXABS_PCS_POW2": (_INPUTS["TOKENS"], _WEIGHTS["PCS_POW2"]),
}
"""Rules of inputs and of weights, by `scale_method` (``_core/scale_methods/scale_method_config.py:
103-166``). The last two scale each token, and need ``dynamic_quantization``."""

_MERGED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}
"""Layers that vLLM computes, and so measures, as one."""

_TYPES = {
    "qkv_proj": "QKVParallelLinear",
    "gate_up_proj": "MergedColumnParallelLinear",
    "o_proj": "RowParallelLinear",
    "down_proj": "RowParallelLinear",
    "lm_head": "ParallelLMHead",
}
"""What vLLM calls the types of layers, by their names; `nn.Linear` is all of them."""

_CACHE = re.compile(r"\blayers\.(\d+)\.self_attn\b.*\b([kv])_cache$")
_CACHE_TYPES = ("VLLMKVCache", "KVCache")


@attrs.frozen
class Node:
    """What the files say of a layer. ``inputs``: the largest of each input, or its scale."""

    inputs: Sequence[float]
    weight: Sequence[float] = ()


@attrs.frozen(eq=False)
class MeasuredScales:
    """The scales of a model's layers under a file of INC's settings.

    ``nodes``: what was measured, by the layers' names in vLLM. ``are_scales``: of what INC made of
    it on a device, in place of the largest numbers.
    """

    file: str
    of: Fp8Range
    inputs: Rule
    weights: Rule
    dtype: torch.dtype
    nodes: Mapping[str, Node]
    are_scales: bool
    may_lack: bool
    allowed: tuple[Sequence[str], Sequence[str]]
    blocked: tuple[Sequence[str], Sequence[str]]

    @property
    def needs_inputs(self) -> bool:
        """Whether a scale of inputs follows from what was measured."""
        return not (self.inputs.is_fixed or self.inputs.by_channel)

    def rounds(self, name: str) -> bool:
        """Whether the settings let a linear layer be rounded (``_core/utils.py:60-88``)."""
        last = name.rpartition(".")[2]
        return self._are_rounded(name, ("Linear", _TYPES.get(last, "ColumnParallelLinear")))

    def _are_rounded(self, name: str, types: Sequence[str]) -> bool:
        def is_in(lists: tuple[Sequence[str], Sequence[str]]) -> bool:
            names, kinds = lists
            return any(re.search(each, name) for each in names) or any(t in kinds for t in types)

        return not is_in(self.blocked) and (not any(self.allowed) or is_in(self.allowed))

    def measured(self, name: str) -> str:
        """The name under which a layer was measured: its own, or that of the merged one."""
        before, dot, last = name.rpartition(".")
        merged = f"{before}{dot}{_MERGED.get(last, last)}"
        return name if name in self.nodes else merged

    def input_scale(self, node: str) -> torch.Tensor | None:
        """fp32 ``[1]`` for `PackedWeight.input_scale`; None where each token has its own."""
        if self.inputs.by_channel:
            return None
        if self.inputs.is_fixed:
            scale = self.inputs.scale_of(torch.ones(1), self.of)
        else:
            scale = self._of_numbers(node, self.nodes[node].inputs[:1])
        # A Gaudi 2 doubles it, as those of checkpoints.
        return scale.float() / (1 if self.of.largest == _CHECKPOINTS_LARGEST else 2)

    def _of_numbers(self, node: str, numbers: Sequence[float]) -> torch.Tensor:
        held = torch.tensor(numbers, dtype=self.dtype)
        if not len(held) or not (held > 0).all():
            raise self._error(f"has no number above 0 for the inputs of {node}: measure it again")
        return held if self.are_scales else self.inputs.scale_of(held, self.of)

    def weight_scales(self, node: str, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """fp32 ``[outputs, 1]`` of each of the weights that were measured as one."""
        sizes = [len(weight) for weight in weights]
        given = self.nodes[node].weight if node in self.nodes and self.are_scales else ()
        if given:
            scales = torch.tensor(given, dtype=self.dtype)
            if len(scales) not in (1, sum(sizes)) or not (scales > 0).all():
                raise self._error(
                    f"has {len(scales)} scales for the {sum(sizes)} outputs of {node}, or some "
                    "that are not above 0: calibrate this model"
                )
        elif self.weights.is_searched:
            raise self._error(
                f"searches scales of weights, and there is none for {node}: run step 4 of "
                "vllm-gaudi's calibration, or choose the scale_method maxabs_hw"
            )
        else:
            by_row = torch.cat([weight.abs().amax(1) for weight in weights]).to(self.dtype)
            largest = by_row if self.weights.by_channel else by_row.amax(0, keepdim=True)
            # ``MaxAbsPcs.eps``; a scale of zeros would be no number.
            largest = largest.clamp_min(torch.finfo(torch.bfloat16).tiny)
            scales = self.weights.scale_of(largest, self.of)
        of_outputs = scales.float().expand(sum(sizes)).unsqueeze(1)
        return list(torch.split(of_outputs, sizes))

    def cache_scales(self) -> Mapping[int, Mapping[str, float]]:
        """What keys and values are divided by, by the number of a layer, and ``k`` or ``v``."""
        found: dict[int, dict[str, float]] = {}
        if not self.needs_inputs:
            return found
        for name, node in self.nodes.items():
            place = _CACHE.search(name)
            if place is not None and self._are_rounded(name, _CACHE_TYPES):
                scale = float(self._of_numbers(name, node.inputs[:1]))
                found.setdefault(int(place[1]), {})[place[2]] = scale
        return found

    def _error(self, text: str) -> ConfigError:
        return ConfigError(f"quant_config {self.file} {text}", "quant_config")


def round_by_measured(model: nn.Module, scales: MeasuredScales) -> int:
    """Replace linear layers by `QuantizedLinear` in FP8; returns how many.

    Raises `ConfigError` for a layer that was not measured, unless the settings leave such layers
    out (``ignore_modules_wo_measures``). A head that the model ties to its embedding stays.
    """
    groups = _measured_as_one(model, scales)
    count = sum(map(len, groups.values()))
    while groups:  # no more than the weights of one group are there twice
        node, layers = groups.popitem()
        weights = [layer.weight.detach() for _, _, layer in layers]
        of_outputs = dict(zip(map(id, weights), scales.weight_scales(node, weights), strict=True))
        packed = {
            id(layer): PackedWeight(
                _rounded(weight, of_outputs[id(weight)], scales.of.largest),
                of_outputs[id(weight)].contiguous(),
                input_scale=scales.input_scale(node),
            )
            for (_, _, layer), weight in zip(layers, weights, strict=True)
        }
        weights.clear()
        replace_layers(layers, lambda layer: QuantizedLinear(packed.pop(id(layer)), layer.bias))  # noqa: B023
    return count


def _measured_as_one(model: nn.Module, scales: MeasuredScales) -> dict[str, list[FoundLayer]]:
    """The layers to round, in vLLM's order, by the name that they were measured under."""
    paths = {id(module): name for name, module in model.named_modules()}
    table = getattr(model, "get_input_embeddings", lambda: None)()
    groups: dict[str, list[FoundLayer]] = {}
    for found in layers_of(model, nn.Linear):
        layer = found[2]
        name = paths[id(layer)].removesuffix(".linear")  # of a rank's part
        node = scales.measured(name)
        if layer.weight is getattr(table, "weight", None) or not scales.rounds(node):
            continue
        if scales.needs_inputs and node not in scales.nodes:
            if scales.may_lack:
                continue
            raise ConfigError(
                f"quant_config {scales.file}: layer {name} was not measured: calibrate this model, "
                "name it in blocklist, or set ignore_modules_wo_measures",
                "quant_config",
            )
        groups.setdefault(node, []).append(found)
    return groups


def _rounded(weight: torch.Tensor, scales: torch.Tensor, largest: float) -> torch.Tensor:
    steps = weight.new_empty(weight.shape, dtype=torch.float8_e4m3fn)
    chunks = (torch.split(each, ROUNDED_AT_A_TIME) for each in (weight, scales, steps))
    for rows, of_outputs, of_rows in zip(*chunks, strict=True):
        of_rows.copy_((rows.float() / of_outputs).clamp_(-largest, largest))
    return steps
