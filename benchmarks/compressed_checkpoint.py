"""A checkpoint with linear layers of 8 or 4 bits in compressed-tensors' format, for vLLM.

Each group of weights has the scale of its largest: speed is measured, not what text they give.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GROUP = 32
"""Inputs that share a scale, of 4 bits; as in GGUF's Q4_0."""

INPUTS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
"""How vLLM rounds a layer's inputs beside weights of 8 bits."""


def write_compressed(checkpoint: str, directory: Path, bits: int) -> None:
    """Write a checkpoint of one file with linear layers of so many bits; the head stays."""
    directory.mkdir(parents=True)
    for file in Path(checkpoint).iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, directory)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(Path(checkpoint) / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors |= _packed(name.removesuffix("weight"), tensor.float(), bits)
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    weights: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True}
    weights |= {"strategy": "channel"} if bits == 8 else {"strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights}
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group | ({"input_activations": INPUTS} if bits == 8 else {})},
    }
    file.write_text(json.dumps(config))


def _packed(prefix: str, weight: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    groups = weight.unflatten(1, (1, -1) if bits == 8 else (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-8) / (2 ** (bits - 1) - 1)
    integers = (groups / scale).round().to(torch.int32).flatten(1)
    scales = {f"{prefix}weight_scale": scale.squeeze(-1).bfloat16()}
    if bits == 8:
        return scales | {f"{prefix}weight": integers.to(torch.int8)}
    nibbles = (integers + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4, dtype=torch.int32)
    words = nibbles.sum(-1).to(torch.int32)  # of 64 bits: what is above bit 31 of a word is lost
    shape = torch.tensor(weight.shape)
    return scales | {f"{prefix}weight_packed": words, f"{prefix}weight_shape": shape}
