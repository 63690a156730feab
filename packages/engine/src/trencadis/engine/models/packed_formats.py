"""Reads the packed weights of quantised checkpoints, in the bits of the file.

compressed-tensors with integers of 8 and 4 bits and FP8, FP8 as the makers of models publish it,
GPTQ and AWQ. Each reader turns the tensors of a linear layer into a `PackedWeight`, which equals
what the format's own definition unpacks. Of what a checkpoint says of activations, one scale for
the inputs of a layer of FP8 is read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from trencadis.engine.errors import ModelError
from trencadis.engine.models.packed_weight import (
    INT4_ZERO,
    PackedWeight,
    WeightFormat,
    pack_int4,
)
from trencadis.kvcache import ceil_div

Tensors = Mapping[str, torch.Tensor]
"""Of a layer, by the end of their names, such as ``qweight``."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where the eight numbers of an AWQ word are: ``reverse_awq_order`` of AutoAWQ and vLLM."""


@attrs.frozen
class Packing:
    """How a checkpoint packs the weights of its linear layers.

    It can be encoded by pickle, as all that ranks tell the core. ``keys``: the tensors of which a
    packed layer has one, by the end of its name. ``read`` raises
    `LookupError` for a layer without a tensor that it needs, and `ModelError` for one of another
    form. ``file``: where packed layers are apart from the checkpoint, which has them in bf16, too;
    ``expanded``: what it has in bf16 alone, as users call it.
    """

    form: WeightFormat
    keys: tuple[str, ...]
    read: Callable[[Tensors], PackedWeight]
    file: str | None = None
    expanded: str = ""


def read_packing(config: Any, name: str) -> Packing | None:
    """How the checkpoint ``name`` is packed; None for one that is not.

    ``config`` is the model's. Raises `ModelError` for a format that is not read.
    """
    text = config.get_text_config(decoder=True)
    settings = getattr(config, "quantization_config", None) or getattr(
        text, "quantization_config", None
    )
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        settings = settings.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    try:
        return _READERS[method](settings)
    except (LookupError, TypeError, ValueError) as error:
        raise ModelError(
            f"{name} cannot be served: its weights are packed as {method}"
            f"{_detail(settings, error)}, which is not read. Serve its checkpoint in bf16, or one "
            "of compressed-tensors (int8, int4, FP8), FP8, GPTQ or AWQ"
        ) from error


def _detail(settings: Mapping[str, Any], error: Exception) -> str:
    if isinstance(error, _NotRead):
        return f" with {error}"
    return f" {settings['format']}" if "format" in settings else ""


class _NotRead(ValueError):
    """A setting of a known format that is not read."""


def _compressed_tensors(settings: Mapping[str, Any]) -> Packing:
    """https://github.com/vllm-project/compressed-tensors, ``compressors`` and ``quant_args.py``."""
    # A group without weights quantises activations or the KV cache, which is left out.
    groups = [own for own in settings["config_groups"].values() if own["weights"] is not None]
    if len(groups) > 1:
        raise _NotRead("settings for several groups of layers")
    (group,) = groups
    weights = group["weights"]
    bits, is_float = weights["num_bits"], weights["type"] == "float"
    strategy, size = weights["strategy"], weights.get("group_size")
    stored = group.get("format") or settings["format"]
    if strategy not in ("tensor", "channel", "group", *(("block",) if is_float else ())):
        raise _NotRead(f"scales by {strategy}")
    if (settings.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise _NotRead("sparse weights")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise _NotRead("transforms of activations")
    if (bits, is_float) not in ((8, False), (4, False), (8, True)):
        raise _NotRead(f"{weights['type']} of {bits} bits")
    if strategy == "block":
        block = _block(weights["block_structure"])
        form = WeightFormat("compressed-tensors", bits, is_float, block[1])
        return Packing(form, ("weight_scale",), functools.partial(_of_blocks, block=block))
    form = WeightFormat("compressed-tensors", bits, is_float, size if strategy == "group" else 0)
    if stored == "pack-quantized" and not is_float:
        return Packing(form, ("weight_packed",), functools.partial(_pack_quantized, bits=bits))
    if stored in ("int-quantized", "float-quantized", "naive-quantized") and bits == 8:
        inputs = group.get("input_activations") or {"dynamic": True}
        is_static = is_float and not inputs.get("dynamic") and inputs.get("strategy") == "tensor"
        return Packing(form, ("weight_scale",), _reader(scales_inputs=is_static))
    raise ValueError(stored)


def _reader(*, scales_inputs: bool) -> Callable[[Tensors], PackedWeight]:
    return _with_input_scale if scales_inputs else _plain_quantized


def _with_input_scale(tensors: Tensors) -> PackedWeight:
    """The layer rounds ``input / input_scale``; vLLM, ``Fp8LinearMethod`` of ``static``.

    transformers calls it ``activation_scale``. A layer without is one of no scale.
    """
    scale = tensors.get("input_scale", tensors.get("activation_scale"))
    if scale is None:
        return _plain_quantized(tensors)
    if scale.numel() != 1 or not 0 < float(scale) < math.inf:
        shown = float(scale) if scale.numel() == 1 else f"of {scale.numel()} numbers"
        raise ModelError(f"input_scale is {shown}, and a layer's inputs have one scale above 0")
    return attrs.evolve(_plain_quantized(tensors), input_scale=scale.float().reshape(1))


def _plain_quantized(tensors: Tensors) -> PackedWeight:
    """``(weight - weight_zero_point) * weight_scale``."""
    steps, zeros = tensors["weight"], tensors.get("weight_zero_point")
    outputs = len(steps)
    if steps.dtype is torch.float8_e4m3fn:
        zeros = None
    return _packed(
        steps,
        _of_outputs(_scales_of(tensors), outputs),
        None if zeros is None else _of_outputs(zeros, outputs),
        tensors.get("weight_g_idx"),
    )


def _scales_of(tensors: Tensors) -> torch.Tensor:
    """``weight_scale_inv`` has the scales, too, in spite of its name."""
    return tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"]


def _pack_quantized(tensors: Tensors, bits: int) -> PackedWeight:
    """Numbers from ``-2 ** (bits - 1)`` on, moved to 0, the first in the lowest bits of a word.

    Along the inputs; zero points along the outputs, but those of one number for all outputs, and
    all in files of compressed-tensors before 0.10, which are numbers around 0.
    """
    outputs, inputs = (int(size) for size in tensors["weight_shape"])
    lowest = 1 << (bits - 1)
    steps = _numbers(tensors["weight_packed"], bits)[:, :inputs] - lowest
    zeros = tensors.get("weight_zero_point")
    if zeros is not None and zeros.dtype is torch.int32:
        zeros = _numbers(zeros.T, bits)[:, :outputs].T - lowest
    elif zeros is not None:
        zeros = _of_outputs(zeros, outputs)
    scales = _of_outputs(tensors["weight_scale"], outputs)
    return _packed(_of_bits(steps, bits), scales, zeros, tensors.get("weight_g_idx"))


def _fp8(settings: Mapping[str, Any]) -> Packing:
    """With scales of blocks, as DeepSeek and Qwen publish it, or of layers, as AutoFP8 writes it.

    transformers, ``FineGrainedFP8Config``; vLLM, ``model_executor/layers/quantization/fp8.py``.
    """
    if settings.get("fmt", "e4m3") != "e4m3":
        raise _NotRead(f"numbers of {settings['fmt']}")
    if settings.get("weight_block_size") is None:
        form, names = WeightFormat("fp8", 8, is_float=True), ("weight_scale", "weight_scale_inv")
        is_static = settings.get("activation_scheme") == "static"
        return Packing(form, names, _reader(scales_inputs=is_static))
    block = _block(settings["weight_block_size"])
    form = WeightFormat("fp8", 8, is_float=True, group=block[1])
    return Packing(form, ("weight_scale_inv",), functools.partial(_of_blocks, block=block))


def _block(sizes: Sequence[int]) -> tuple[int, int]:
    rows, columns = sizes
    if not (isinstance(rows, int) and isinstance(columns, int) and min(rows, columns) > 0):
        raise _NotRead(f"blocks of {sizes}")
    return rows, columns


def _of_blocks(tensors: Tensors, block: tuple[int, int]) -> PackedWeight:
    """A scale for each block of outputs and inputs, the last of which may be smaller."""
    steps = tensors["weight"]
    scales = _scales_of(tensors)
    if steps.dtype is not torch.float8_e4m3fn:
        raise ModelError(f"weights of {steps.dtype} have no scales of blocks")
    (outputs, inputs), (rows, columns) = steps.shape, block
    expected = (ceil_div(outputs, rows), ceil_div(inputs, columns))
    if scales.shape != expected:
        raise ModelError(f"scales are {list(scales.shape)} for {list(expected)} blocks")
    group = math.gcd(columns, inputs)  # the last block may be smaller
    of_columns = scales.float()[:, torch.arange(0, inputs, group) // columns]
    return PackedWeight(steps.contiguous(), of_columns.repeat_interleave(rows, 0)[:outputs].clone())


def _gptq(settings: Mapping[str, Any]) -> Packing:
    """``gptq_v2`` stores zero points themselves; ``gptq``, the default, one less.

    https://github.com/vllm-project/vllm/blob/main/csrc/quantization/gptq/q_gemm.cu
    """
    bits, size = settings["bits"], settings["group_size"]
    if bits not in (4, 8):
        raise _NotRead(f"{bits} bits")
    if settings.get("dynamic"):
        raise _NotRead("settings of single layers (dynamic)")
    stored = settings.get("checkpoint_format", "gptq")
    less = {"gptq": 1, "gptq_v2": 0}[stored]
    form = WeightFormat("gptq", bits, group=max(size, 0))
    return Packing(form, ("qweight",), functools.partial(_read_gptq, bits=bits, less=less))


def _read_gptq(tensors: Tensors, bits: int, less: int) -> PackedWeight:
    """``scales[g] * (qweight - (qzeros[g] + less))`` with ``g = g_idx[input]``.

    Writers subtract 1 from each zero point of a word at once, so that a 0 borrows from the next
    one: https://github.com/ModelCloud/GPTQModel, ``convert_gptq_v1_to_v2_format_module``.
    """
    lowest = 1 << (bits - 1)
    ones = sum(1 << shift for shift in range(0, 32, bits))
    steps = _numbers(tensors["qweight"].T, bits) - lowest
    zeros = _numbers(tensors["qzeros"] + less * ones, bits).T - lowest
    scales = tensors["scales"].T
    return _packed(_of_bits(steps, bits), scales, zeros[: len(steps)], tensors.get("g_idx"))


def _awq(settings: Mapping[str, Any]) -> Packing:
    bits, version = settings.get("bits"), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise _NotRead(f"{bits} bits in the order {version}")
    form = WeightFormat("awq", 4, group=max(settings["group_size"], 0))
    return Packing(form, ("qweight",), _read_awq)


def _read_awq(tensors: Tensors) -> PackedWeight:
    """``scales[g] * (qweight - qzeros[g])``: `_AWQ_ORDER` along the outputs.

    https://github.com/casper-hansen/AutoAWQ/blob/main/awq/utils/packing_utils.py
    """
    steps, zeros = (_numbers(tensors[name], 4) for name in ("qweight", "qzeros"))
    steps, zeros = (
        each.view(len(each), -1, 8)[..., _AWQ_ORDER].flatten(1).T - INT4_ZERO
        for each in (steps, zeros)
    )
    return _packed(_of_bits(steps, 4), tensors["scales"].T, zeros)


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Packing]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
}


def _packed(
    steps: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    of_inputs: torch.Tensor | None = None,
) -> PackedWeight:
    """``of_inputs``: the group of each input; None, or -1s, where groups follow each other.

    ``steps`` and ``zeros`` are numbers around 0, for 4 bits from -8.
    """
    order = None
    if of_inputs is not None and (of_inputs < 0).any():
        of_inputs = None
    if of_inputs is not None and (of_inputs.diff() < 0).any():
        order = of_inputs.argsort(stable=True)
        steps = steps[:, order]
        of_inputs = of_inputs[order]
    inputs = steps.shape[1]
    groups = scales.shape[-1]
    if of_inputs is not None and not torch.equal(
        of_inputs.long(), torch.arange(groups).repeat_interleave(max(1, inputs // groups))
    ):
        raise ModelError(f"{inputs} inputs are not {groups} groups of one size")
    if zeros is not None and not zeros.any():
        zeros = None
    is_int4 = steps.dtype is torch.int16
    if zeros is not None:
        zeros = zeros.to(torch.int16) + (INT4_ZERO if is_int4 else 0)
    return PackedWeight(
        pack_int4(steps + INT4_ZERO) if is_int4 else steps.contiguous(),
        scales.contiguous(),
        None if zeros is None else zeros.contiguous(),
        order,
    )


def _numbers(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 ``[rows, words]`` as int16 ``[rows, 32 / bits * words]``, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1).to(torch.int16)


def _of_bits(steps: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 for 8 bits; for 4 int16, as `_packed` takes it."""
    return steps.to(torch.int8) if bits == 8 else steps


def _of_outputs(tensor: torch.Tensor, outputs: int) -> torch.Tensor:
    """``[outputs, groups]`` of one number, of ``[outputs]``, or of that shape."""
    if tensor.numel() == 1:
        return tensor.reshape(1, 1).repeat(outputs, 1)
    return tensor.unsqueeze(1) if tensor.ndim == 1 else tensor
