"""Reads an adapter: the directory that PEFT saves for LoRA, checked before it is used.

``adapter_config.json`` is PEFT's ``LoraConfig``, ``adapter_model.safetensors`` has two matrices for
each linear layer that the adapter changes, ``base_model.model.LAYER.lora_A.weight`` and
``.lora_B.weight`` (``peft/utils/save_and_load.py``). The layer's output grows by
``B @ A @ input * lora_alpha / r``, or ``/ sqrt(r)`` with ``use_rslora``
(``peft/tuners/lora/layer.py``). What PEFT computes in another way is rejected.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import torch
from safetensors.torch import load

from trencadis.engine.errors import AdapterError, shown
from trencadis.engine.models.broken_files import BROKEN_FILE_ERRORS, reason_of

CONFIG_FILE, WEIGHT_FILE = "adapter_config.json", "adapter_model.safetensors"

_MAX_CONFIG_BYTES = 1 << 20
_MAX_HEADER_BYTES = 8 << 20
"""Of a file of weights, beside its matrices: names, shapes and metadata."""

_BYTES_OF_FP32 = 4
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"

_UNCHANGED_BASES = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` with which PEFT does not change the model's own weights."""

_WITHOUT_EFFECT = frozenset(
    {
        *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
        *("revision", "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha"),
        *("lora_dropout", "use_rslora", "init_lora_weights", "layers_to_transform"),
        *("layers_pattern", "megatron_core", "qalora_group_size", "eva_config", "runtime_config"),
        *("bias", "loftq_config", "parent_library"),
    }
)
"""Settings that are read here, or that change nothing once an adapter is trained."""

_REASONS = {
    "use_dora": "DoRA scales the model's own weights, too",
    "modules_to_save": "it replaces whole modules, such as embeddings",
    "trainable_token_indices": "it changes embeddings",
    "target_parameters": "it changes parameters that are not linear layers",
    "rank_pattern": "its layers have several ranks",
    "alpha_pattern": "its layers have several scales",
    "layer_replication": "it repeats layers of the model",
    "lora_bias": "it adds biases",
    "fan_in_fan_out": "it is for layers with transposed weights",
    "alora_invocation_tokens": "it is active after certain tokens alone",
}
"""What PEFT computes with settings that are rejected. So are others that are not known here."""


class LayerShape(NamedTuple):
    """The numbers of a linear layer's inputs and outputs."""

    inputs: int
    outputs: int


class AdapterPair(NamedTuple):
    """What an adapter adds to a linear layer: ``(rows @ down.T) @ up``.

    ``down`` and ``up`` are ``[rank, inputs]`` and ``[rank, outputs]``, with the scale in ``up``.
    """

    down: torch.Tensor
    up: torch.Tensor


@attrs.frozen(eq=False)
class Adapter:
    """The matrices of an adapter in host memory, by the name of the linear layer in the model.

    ``digest``: of the content, in hexadecimal. Adapters with the same one compute the same.
    """

    digest: str
    rank: int
    layers: Mapping[str, AdapterPair] = attrs.field(repr=False)

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrices."""
        tensors = (tensor for pair in self.layers.values() for tensor in pair)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def read_adapter(
    directory: Path,
    layers: Mapping[str, LayerShape],
    max_rank: int,
    dtype: torch.dtype,
    within: Sequence[str] = (),
) -> Adapter:
    """Read the adapter in ``directory``, for a model with these linear ``layers``.

    Its matrices are converted to ``dtype``. ``within``: directories below one of which its files
    are, wherever links lead; none for any place. Raises `AdapterError`, which names the file, for
    one that is elsewhere or damaged, of a kind that is not served, for another model, of a rank
    above ``max_rank``, or with numbers that are not finite.
    """
    settings = _read_settings(directory / CONFIG_FILE, within)
    rank, scale = _rank_and_scale(settings, directory / CONFIG_FILE, max_rank)
    file = directory / WEIGHT_FILE
    content = _read(file, _most_bytes(layers, rank), within)
    try:
        tensors = load(content)
    except BROKEN_FILE_ERRORS as error:
        raise AdapterError(f"{file} cannot be read: {reason_of(error)}") from error
    shapes = _paired(tensors, layers, rank, file)
    pairs = {name: _pair(tensors, name, scale, dtype, file) for name in shapes}
    digest = hashlib.sha256(json.dumps([rank, scale, str(dtype)]).encode())
    digest.update(content)
    return Adapter(digest.hexdigest(), rank, pairs)


def _read(file: Path, most_bytes: int, within: Sequence[str]) -> bytes:
    """The content of a file. Raises `AdapterError`, also for a pipe, without waiting for it."""
    try:
        number = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        with open(number, "rb") as opened:  # noqa: PTH123 - of an open file
            found = os.fstat(number)
            if not stat.S_ISREG(found.st_mode):
                raise AdapterError(f"{file} cannot be read: it is not a file")
            if within:
                _check_place(file, found, within)
            if found.st_size > most_bytes:
                raise AdapterError(
                    f"{file} cannot be used: it has {found.st_size} bytes, and an adapter for this "
                    f"model at most {most_bytes}"
                )
            return opened.read(most_bytes + 1)[:most_bytes]
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"{file} cannot be read: {reason_of(error)}. An adapter is a directory with "
            f"{CONFIG_FILE} and {WEIGHT_FILE}, as PEFT saves it"
        ) from error


def _check_place(file: Path, opened: os.stat_result, within: Sequence[str]) -> None:
    """Raise `AdapterError` for a file that was opened outside of directories.

    After it was opened: a link on the way may change at any time.
    """
    real = file.resolve()
    is_within = any(real.is_relative_to(Path(each).resolve()) for each in within)
    if not is_within or not os.path.samestat(opened, real.stat()):
        raise AdapterError(
            f"{file} cannot be read: it is not below a directory from which adapters may be loaded"
        )


def _read_settings(file: Path, within: Sequence[str]) -> dict[str, Any]:
    content = _read(file, _MAX_CONFIG_BYTES, within)
    try:
        settings = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{file} is not JSON: {reason_of(error)}") from error
    if not isinstance(settings, dict):
        raise AdapterError(f"{file} cannot be used: it is {shown(settings)} instead of settings")
    return settings


def _rank_and_scale(settings: Mapping[str, Any], file: Path, max_rank: int) -> tuple[int, float]:
    """The rank, and the factor of what the adapter adds. Raises `AdapterError` for other kinds."""
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{file} is of an adapter of the type {shown(kind)}: serve one of LORA")
    _check_kind(settings, file)
    rank: Any = settings.get("r")
    alpha: Any = settings.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise AdapterError(f"{file} cannot be used: r is {shown(rank)} instead of a rank from 1")
    if rank > max_rank:
        raise AdapterError(
            f"{file} has the rank {rank}, above max_lora_rank {max_rank}: start with "
            f"--max-lora-rank {rank}, or serve an adapter of a lower rank"
        )
    is_number = type(alpha) in (int, float) and abs(alpha) < math.inf
    if not is_number or abs(alpha) > torch.finfo(torch.float32).max:
        raise AdapterError(
            f"{file} cannot be used: lora_alpha is {shown(alpha)} instead of a number"
        )
    return rank, alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _check_kind(settings: Mapping[str, Any], file: Path) -> None:
    if settings.get("bias", "none") != "none":
        raise AdapterError(
            f"{file} has the bias {shown(settings['bias'])}, which is not served: train it with "
            "bias none"
        )
    if not isinstance(settings.get("use_rslora", False), (bool, type(None))):
        raise AdapterError(f"{file} cannot be used: use_rslora is {shown(settings['use_rslora'])}")
    start = settings.get("init_lora_weights")
    if not isinstance(start, (bool, str, type(None))) or start not in _UNCHANGED_BASES:
        raise AdapterError(
            f"{file} has init_lora_weights {shown(start)}, which changes the model's own weights: "
            "convert it to plain LoRA with PEFT's path_initial_model_for_weight_conversion"
        )
    for name, value in settings.items():
        if value and name not in _WITHOUT_EFFECT:
            reason = _REASONS.get(name, "what it does is not known here")
            raise AdapterError(
                f"{file} has {shown(name)} {shown(value)}, which is not served ({reason}): train "
                "plain LoRA on linear layers"
            )


def _most_bytes(layers: Mapping[str, LayerShape], rank: int) -> int:
    """The most bytes of a file of weights of this rank for these layers."""
    numbers = sum(rank * sum(shape) for shape in layers.values())
    return _MAX_HEADER_BYTES + _BYTES_OF_FP32 * numbers


def _paired(
    tensors: Mapping[str, torch.Tensor],
    layers: Mapping[str, LayerShape],
    rank: int,
    file: Path,
) -> list[str]:
    """The names of the layers, for each of which there are both matrices, of its shape."""
    names: dict[str, None] = {}
    for key, tensor in tensors.items():
        suffix = _DOWN if key.endswith(_DOWN) else _UP
        name = key.removeprefix(_PREFIX).removesuffix(suffix)
        if key != f"{_PREFIX}{name}{suffix}":
            raise AdapterError(
                f"{file} has the tensor {shown(key)}, not a matrix of LoRA for a linear layer"
            )
        if name not in layers:
            raise AdapterError(
                f"{file} changes {shown(name)}, and the served model has no such linear layer in a "
                "decoder layer: serve an adapter that was trained on it"
            )
        shape = layers[name]
        expected = (rank, shape.inputs) if suffix == _DOWN else (shape.outputs, rank)
        if tensor.shape != expected:
            raise AdapterError(
                f"{file} has {shown(key)} of the shape {list(tensor.shape)} instead of "
                f"{list(expected)}, by the rank and the served model"
            )
        if tensor.dtype not in _DTYPES:
            raise AdapterError(f"{file} has {shown(key)} of {tensor.dtype}: save it in float32")
        names[name] = None
    if not names:
        raise AdapterError(f"{file} has no matrices")
    for name in names:
        for suffix in (_DOWN, _UP):
            if f"{_PREFIX}{name}{suffix}" not in tensors:
                raise AdapterError(f"{file} lacks {_PREFIX}{name}{suffix}")
    return list(names)


def _pair(
    tensors: Mapping[str, torch.Tensor], name: str, scale: float, dtype: torch.dtype, file: Path
) -> AdapterPair:
    down = tensors[f"{_PREFIX}{name}{_DOWN}"]
    up = tensors[f"{_PREFIX}{name}{_UP}"].float().t() * scale
    pair = AdapterPair(down.to(dtype).contiguous(), up.to(dtype).contiguous())
    for key, tensor in zip((_DOWN, _UP), pair, strict=True):
        if not tensor.isfinite().all():
            raise AdapterError(
                f"{file} has numbers in {_PREFIX}{name}{key} that are not finite in "
                f"{str(dtype).removeprefix('torch.')}: NaN, infinite or too large"
            )
    return pair
