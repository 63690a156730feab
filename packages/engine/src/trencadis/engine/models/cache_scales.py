"""The scales that a checkpoint or a calibration has for a KV cache: one for the keys of a layer and
one for its values.

A cache without scales of its own keeps keys and values divided by them. Scores do not change where
queries are multiplied by the scale of keys, nor does attention where what it makes of values is
multiplied by theirs. Scales are rounded up to powers of two, which round no product.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import attrs
import torch
from safetensors import safe_open
from torch import nn

from trencadis.engine.errors import ModelError
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.weight_files import checkpoint_directory

_TENSOR = re.compile(r"\blayers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.|qkv_proj\.)?([kv])_scale$")
"""As compressed-tensors, vLLM and ModelOpt call them (vLLM, ``maybe_remap_kv_scale_name``)."""

_MODULE = re.compile(r"\blayers\.(\d+)\.self_attn$")

_CALIBRATED_FOR = torch.finfo(torch.float8_e4m3fn).max
"""What a scale of a checkpoint makes the largest number that was seen."""


def use_cache_scales(
    model: nn.Module,
    source: str,
    largest: float,
    measured: Mapping[int, Mapping[str, float]] | None = None,
) -> int:
    """Give the layers of a model their scales in its checkpoint; returns how many have some.

    ``largest``: what the cache holds at most. ``measured``: scales in place of the checkpoint's,
    which are for a cache of this kind. Raises `ModelError` for a scale that is not a number.
    """
    read, scaled, like = (
        _read(source) if measured is None else measured,
        0,
        next(model.parameters()),
    )
    factor = _CALIBRATED_FOR / largest if measured is None else 1.0
    for name, module in model.named_modules():
        found, spec = _MODULE.search(name), vars(module).get("layer_spec")
        if found is None or not isinstance(spec, LayerSpec) or int(found[1]) not in read:
            continue
        scales = read[int(found[1])]
        for part, buffer in (("k", "key_scale"), ("v", "value_scale")):
            scale = _power_of_two(scales[part] * factor) if part in scales else 1.0
            held = torch.tensor([scale], dtype=like.dtype, device=like.device)
            module.register_buffer(buffer, held, persistent=False)
        module.layer_spec = attrs.evolve(spec, scaled_cache=True)
        scaled += 1
    return scaled


def _power_of_two(scale: float) -> float:
    mantissa, exponent = math.frexp(scale)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def _read(source: str) -> Mapping[int, Mapping[str, float]]:
    """The scales of each layer, by ``k`` and ``v``."""
    scales: dict[int, dict[str, float]] = {}
    for file in sorted(checkpoint_directory(source).glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            names = content.keys()
            for name in names:
                if (found := _TENSOR.search(name)) is None:
                    continue
                scale = content.get_tensor(name)
                if scale.numel() != 1 or not 1e-6 < float(scale) < 1e6:
                    shown = float(scale) if scale.numel() == 1 else f"of {scale.numel()} numbers"
                    raise ModelError(
                        f"{name} of {source} is {shown}, and a layer's cache has one scale above "
                        "0: leave kv_cache_dtype out"
                    )
                scales.setdefault(int(found[1]), {})[found[2]] = float(scale)
    return scales
