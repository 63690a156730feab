"""Rounds the weights of linear layers and experts at load: ``--quantization``.

Not those of routers and gates, which are small and select experts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trencadis.engine.errors import ConfigError
from trencadis.engine.models.packed_experts import (
    have_plain_weights,
    is_gated_silu,
    round_experts,
)
from trencadis.engine.models.packed_weight import (
    INT4_ZERO,
    ROUNDED_AT_A_TIME,
    TINY,
    PackedWeight,
    QuantizedEmbedding,
    QuantizedLinear,
    WeightFormat,
    pack_int4,
    rounded_fp8,
)
from trencadis.engine.models.rank_modules import RowLinear
from trencadis.engine.models.replaced_layers import FoundLayer, layers_of, replace_layers
from trencadis.kvcache import ceil_div

logger = logging.getLogger("trencadis.engine")

ROUNDED_FORMATS = {
    "int8": WeightFormat("int8", bits=8),
    "int4": WeightFormat("int4", bits=4, group=32),
    "fp8": WeightFormat("fp8", bits=8, is_float=True),
    "inc": WeightFormat("inc", bits=8, is_float=True),
}
"""Those of `EngineConfig.quantization`; ``inc`` by `measured_scales`."""

_FEWEST_OUTPUTS = 32
"""Fewest outputs of a layer that is rounded: gates have fewer."""

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What models call the number of outputs of their routers."""

_GIB = 1 << 30

_TRIED_STEPS = (1.1, 1.05, 1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
"""Sizes of a step of 4 bits that are tried, beside that which reaches a group's largest weight."""

_DAMPING = 1e-3
"""Added to the squares of inputs, for a mean of 1 in a group."""

_OUTER_LAYERS = 8
"""Of this many decoder layers one at each end keeps more bits; llama.cpp's share in Q4_K_M."""


def round_weights(
    model: nn.Module,
    quantization: str,
    products: Mapping[int, torch.Tensor] | None = None,
    *,
    multiplies_experts: bool = False,
) -> None:
    """Replace linear layers of bf16 by `QuantizedLinear` in a format of `ROUNDED_FORMATS`.

    With int8, gated experts are packed, too, where the device ``multiplies_experts`` of integers:
    expanded, they would be rounded for nothing.

    ``products``: of the inputs of layers, by their ids, for int4: see `products_of_inputs`.

    With int4, those of attention are int8, and so are in the first and last eighth of the decoder
    layers those that end their feed-forward network: they cost the most perplexity for a byte.

    The input embedding becomes int8, one weight with the output head where the model ties both;
    with fp8 both stay bf16, as in checkpoints of FP8. Raises `ConfigError` where less than half of
    the weights, embeddings apart, are in such layers.
    """
    form = ROUNDED_FORMATS[quantization]
    layers = _layers_to_round(model, form)
    if form.is_float:
        _round_to_fp8(model, layers, form)
        return
    rounds_experts = multiplies_experts and quantization == "int8"
    experts = [each for each in model.modules() if rounds_experts and _are_bf16_experts(each)]
    _check_enough_is_rounded(model, [layer for _, _, layer in layers], form, experts=experts)
    # The head has the most to lose, and keeps 8 bits: llama.cpp gives it 6 in files of 4 bits.
    head = _head_of(model)
    in_8_bits = {id(head), *_keeping_8_bits(model)}
    table = getattr(model, "get_input_embeddings", lambda: None)()
    tables = [each for each in layers_of(model, nn.Embedding) if each[2] is table]
    tied: dict[int, PackedWeight] = {}

    def rounded_table(layer: nn.Embedding) -> nn.Module:
        if layer.weight.dtype is not torch.bfloat16:
            return layer
        packed = rounded_int8(layer.weight.detach())
        if head is not None and getattr(head, "weight", None) is layer.weight:
            tied[id(head)] = packed
        return QuantizedEmbedding(packed, layer.weight.dtype)

    def packed(layer: nn.Linear) -> PackedWeight:
        weight = tied.get(id(layer))
        if weight is not None:
            return weight
        if quantization == "int8" or id(layer) in in_8_bits:
            return rounded_int8(layer.weight.detach())
        return rounded_int4(layer.weight.detach(), products=(products or {}).get(id(layer)))

    def rounded(layer: nn.Linear) -> QuantizedLinear:
        # Rounded inputs cost int8 0.3 % of perplexity. Weights of 4 bits cost nearly what they may.
        rounds_inputs = quantization == "int8" and layer is not head
        return QuantizedLinear(packed(layer), layer.bias, rounds_inputs=rounds_inputs)

    replace_layers(tables, rounded_table)
    replace_layers(layers, rounded)
    round_experts(experts, rounded_int8)


def _head_of(model: nn.Module) -> nn.Module | None:
    """The linear layer of the output head; of a rank, the one that has its part."""
    output = getattr(model, "get_output_embeddings", lambda: None)()
    head: nn.Module | None = getattr(output, "linear", output)
    return head


def _round_to_fp8(model: nn.Module, layers: list[FoundLayer], form: WeightFormat) -> None:
    head = _head_of(model)
    layers[:] = [each for each in layers if each[2] is not head]  # no other list keeps them
    experts = [each for each in model.modules() if have_plain_weights(each)]
    _check_enough_is_rounded(model, [x for *_, x in layers], form, apart=head, experts=experts)
    round_experts(experts)
    replace_layers(
        layers, lambda layer: QuantizedLinear(rounded_fp8(layer.weight.detach()), layer.bias)
    )


def rounded_int8(weight: torch.Tensor) -> PackedWeight:
    """Rounded to -127 to 127 of each output's largest value."""
    steps = weight.new_empty(weight.shape, dtype=torch.int8)
    scales = weight.new_empty((len(weight), 1), dtype=torch.float32)
    chunks = (torch.split(each, ROUNDED_AT_A_TIME) for each in (weight, scales, steps))
    for rows, of_outputs, of_rows in zip(*chunks, strict=True):
        of_outputs.copy_(rows.abs().amax(1, keepdim=True)).div_(127)
        of_rows.copy_(rows.float().div_(of_outputs.clamp_min(TINY)).round_())
    return PackedWeight(steps, scales)


def rounded_int4(
    weight: torch.Tensor, group: int = 32, products: torch.Tensor | None = None
) -> PackedWeight:
    """Rounded to -8 to 7 steps of each group of inputs, a size of the step with the least error.

    ``products`` ``[groups, group, group]``: of the inputs that the weights multiply, as
    `products_of_inputs` measures them; None: all alike. For a few sizes, of which one brings the
    weight of the largest magnitude to -8, the weights are rounded one after another, and the
    following ones of a group make up for the error of each; then the scale is that of the least
    error of the outputs for these steps. Scales are bf16. Inputs are a multiple of ``group``.
    """
    outputs, inputs = weight.shape
    of_inputs = _scaled_products(products, inputs // group, group)
    makes_up = _making_up(of_inputs)
    steps = weight.new_empty((outputs, inputs // 2), dtype=torch.uint8)
    scales = weight.new_empty((outputs, inputs // group), dtype=torch.bfloat16)
    chunks = (torch.split(each, ROUNDED_AT_A_TIME) for each in (weight, scales, steps))
    for rows, of_outputs, of_rows in zip(*chunks, strict=True):
        groups = rows.float().unflatten(1, (-1, group)).permute(1, 2, 0).contiguous()
        largest = groups.gather(1, groups.abs().argmax(1, keepdim=True))
        unit = groups / largest.abs().clamp_min(TINY)  # squares of tiny weights would be 0
        unit_of_inputs = of_inputs @ unit
        best, found = torch.zeros_like(largest), torch.zeros_like(largest)
        best_steps = torch.zeros_like(groups)
        for size in _TRIED_STEPS:
            tried = _int4_steps(unit, largest.sign() * (-size / INT4_ZERO), makes_up)
            # The error is that of no weights less this, with the best scale for the steps.
            common = (unit_of_inputs * tried).sum(1, keepdim=True)
            squares = (of_inputs @ tried).mul_(tried).sum(1, keepdim=True).clamp_min_(TINY)
            explained = common.square() / squares
            is_better = explained > best
            found = torch.where(is_better, common / squares, found)
            best_steps = torch.where(is_better, tried, best_steps)
            best = torch.maximum(best, explained)
        of_outputs.copy_((found * largest.abs())[:, 0].T)
        of_rows.copy_(pack_int4((best_steps + INT4_ZERO).permute(2, 0, 1).flatten(1)))
    return PackedWeight(steps, scales)


def _scaled_products(products: torch.Tensor | None, groups: int, group: int) -> torch.Tensor:
    """With a mean square of 1 in each group, and so much more that all have an inverse."""
    alike = torch.eye(group).expand(groups, group, group)
    if products is None:
        return alike
    means = products.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    # Where no input of a group was seen, or they are not numbers, all weigh the same.
    is_known = (means > TINY) & means.isfinite()
    scaled = torch.where(is_known, products / means.clamp_min(TINY), alike)
    return scaled + _DAMPING * alike


def _making_up(products: torch.Tensor) -> torch.Tensor:
    """``[groups, group, group]``: by how much of the error of a weight (row) a later one changes.

    The rows of GPTQ's Cholesky factor of the inverse, each divided by its diagonal.
    """
    # In fp32 the inverse of inputs that nearly always go together is not positive definite.
    factor: torch.Tensor = torch.linalg.cholesky(torch.linalg.inv(products.double()), upper=True)
    return (factor / factor.diagonal(dim1=1, dim2=2)[..., None]).float()


def _int4_steps(groups: torch.Tensor, scale: torch.Tensor, makes_up: torch.Tensor) -> torch.Tensor:
    """The steps of ``groups`` ``[groups, group, outputs]``, as floats."""
    size = scale.abs().clamp_min(TINY).copysign(scale)[:, 0]
    left = groups.clone()
    for number in range(left.shape[1]):
        weights = left[:, number]
        rounded = (weights / size).round_().clamp_(-INT4_ZERO, INT4_ZERO - 1)
        error = torch.addcmul(weights, rounded, size, value=-1)
        later = makes_up[:, number, number + 1 :, None]
        left[:, number + 1 :].addcmul_(error[:, None], later, value=-1)
        weights.copy_(rounded)
    return left


def _keeping_8_bits(model: nn.Module) -> set[int]:
    """The ids of linear layers that are int8 in an int4 model, the head apart."""
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    # Of a rank, whose part of other layers may have as many outputs.
    by_rows = {id(each.linear) for each in model.modules() if isinstance(each, RowLinear)}
    num_layers = getattr(text, "num_hidden_layers", 0)
    outer = ceil_div(num_layers, _OUTER_LAYERS)
    found = set()
    attention = ""
    for path, module in model.named_modules():  # each module before its own
        name = type(module).__name__.lower()
        if "attention" in name and not name.endswith("layer"):  # that has a network, too
            attention = f"{path}."
        if type(module) is not nn.Linear:
            continue
        number = next((int(each) for each in path.split(".") if each.isdecimal()), None)
        if number is None:
            continue
        is_outer = number < outer or number >= num_layers - outer
        has_size = module.out_features == getattr(text, "hidden_size", None)
        ends_network = id(module) in by_rows if by_rows else has_size
        if (attention and path.startswith(attention)) or (is_outer and ends_network):
            found.add(id(module))
    return found


def _layers_to_round(model: nn.Module, form: WeightFormat) -> list[FoundLayer]:
    config: Any = model.config
    text = config.get_text_config(decoder=True)
    num_experts = {getattr(text, name, None) for name in _NUM_EXPERTS}
    return [
        (name, parent, layer)
        for name, parent, layer in layers_of(model, nn.Linear)
        if layer.weight.dtype is torch.bfloat16
        and layer.in_features % (form.group or 2) == 0
        and layer.out_features >= _FEWEST_OUTPUTS
        and layer.out_features not in num_experts
    ]


def _are_bf16_experts(module: Any) -> bool:
    return is_gated_silu(module) and module.down_proj.dtype is torch.bfloat16


def _check_enough_is_rounded(
    model: nn.Module,
    layers: list[nn.Linear],
    form: WeightFormat,
    apart: nn.Module | None = None,
    experts: Sequence[nn.Module] = (),
) -> None:
    """Log how much of the weights is rounded. Raises `ConfigError` for less than half.

    ``apart``: a layer that does not count, as embeddings. ``experts``: those that are rounded, too.
    """
    quantization = form.name
    dtypes = {layer.weight.dtype for _, _, layer in layers_of(model, nn.Linear)}
    if torch.bfloat16 not in dtypes:
        raise ConfigError(
            f"quantization {quantization} rounds weights of bf16: leave it out, or ask for dtype "
            "bfloat16",
            "quantization",
        )
    embeddings = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding) or module is apart
    }
    weights = {id(weight): weight for weight in model.parameters()}
    sizes = {name: weight.nbytes for name, weight in weights.items() if name not in embeddings}
    rounded = sum(sizes.get(id(layer.weight), 0) for layer in layers)
    rounded += sum(sizes[id(weight)] for each in experts for weight in each.parameters())
    of_all = sum(sizes.values())
    share = f"{rounded / _GIB:.3g} of {of_all / _GIB:.3g} GiB of weights (embeddings apart)"
    if 2 * rounded < of_all:
        raise ConfigError(
            f"quantization {quantization} would round {share}: the others are not in linear "
            f"layers of {form.group or 2} inputs or a multiple, as those of fused experts are not. "
            "Leave it out",
            "quantization",
        )
    logger.info("%s: %s", quantization, share)
