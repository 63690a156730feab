"""Keeps the weights of a GGUF file packed, in a file below its conversion to bf16.

transformers renames the tensors of a file, and reorders the rows of some. So each tensor is
compared with what transformers has made of the file: it is the weight of the layer that has the
same rows, and takes their order. What belongs to no layer, such as fused experts, and types that
are not read are in the conversion alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from trencadis.engine.models.gguf_blocks import BLOCK_TYPES
from trencadis.engine.models.packed_formats import Packing, Tensors
from trencadis.engine.models.packed_weight import PackedWeight

_FILE = "packed/model.safetensors"
"""In a directory of its own: other programs read all safetensors that are beside a configuration.
"""

_PLAIN_TYPES = ("F32", "F16", "BF16", "F64")

_CHUNK = 1024
"""Rows that are expanded at a time."""

_Rows = tuple[int, ...]
"""A hash of each row."""


def write_packed(gguf: Path, model: nn.Module, target: Path) -> None:
    """Write the packed weights of ``gguf``, of which transformers has made ``model``, in bf16.

    Nothing is written where none of its tensors is read packed.
    """
    from gguf import GGUFReader  # noqa: PLC0415  (an extra)

    layers = _layers_by_rows(model)
    kept: dict[str, torch.Tensor] = {}
    packed: Counter[str] = Counter()  # bytes, by the type of blocks
    expanded: Counter[str] = Counter()
    for tensor in GGUFReader(gguf).tensors:
        name = tensor.tensor_type.name
        weight, layer = None, None
        if name in BLOCK_TYPES and tensor.data.ndim == 2:
            weight = BLOCK_TYPES[name].packed(torch.from_numpy(tensor.data.copy()))
            rows = _rows_of(weight)
            layer, wanted = layers.pop(tuple(sorted(rows)), (None, rows))
        if weight is None or layer is None:
            expanded[name] += tensor.data.nbytes
            continue
        if rows != wanted:
            weight = weight.in_order(_order(rows, wanted))
        packed[name] += tensor.data.nbytes
        kept[f"{layer}.steps"], kept[f"{layer}.scales"] = weight.steps, weight.scales
        if weight.minimums is not None:
            kept[f"{layer}.minimums"] = weight.minimums
    if kept:
        others = sorted(set(expanded) - set(_PLAIN_TYPES))
        about = {"type": packed.most_common(1)[0][0], "expanded": ", ".join(others)}
        file = target / _FILE
        file.parent.mkdir()
        save_file(kept, file, {"format": "pt", **about})


def read_gguf_packing(directory: Path) -> Packing | None:
    """How a conversion keeps the weights of its GGUF file packed; None for one that does not."""
    file = directory / _FILE
    if not file.is_file():
        return None
    with safe_open(file, "pt") as content:
        about: Mapping[str, str] = content.metadata()
    form = BLOCK_TYPES[about["type"]].form(about["type"])
    return Packing(form, ("steps",), _read, file=str(file), expanded=about["expanded"])


def _read(tensors: Tensors) -> PackedWeight:
    return PackedWeight(tensors["steps"], tensors["scales"], minimums=tensors.get("minimums"))


def _layers_by_rows(model: Any) -> dict[_Rows, tuple[str, _Rows]]:
    """The names of layers and the rows of their weights, by those rows in ascending order.

    Linear layers and the input embedding, which may share its weight with the output head.
    """
    table = model.get_input_embeddings()
    found: dict[_Rows, tuple[str, _Rows]] = {}
    seen = set()
    for name, module in model.named_modules():
        if type(module) is nn.Linear or (module is table and type(module) is nn.Embedding):
            weight = module.weight
            if id(weight) not in seen and weight.dtype is torch.bfloat16:
                seen.add(id(weight))
                rows = _hashes(weight.detach())
                found[tuple(sorted(rows))] = (name, rows)
    return found


def _rows_of(weight: PackedWeight) -> _Rows:
    return tuple(
        number
        for first in range(0, weight.shape[0], _CHUNK)
        for number in _hashes(
            weight.of_outputs(range(first, first + _CHUNK)).unpacked(torch.bfloat16)
        )
    )


def _hashes(rows: torch.Tensor) -> _Rows:
    """Of bf16 ``[rows, inputs]``. Those of 0 and -0 are one."""
    return tuple(
        hash(row.tobytes())
        for chunk in torch.split(rows, _CHUNK)
        for row in (chunk + 0.0).view(torch.int16).numpy()
    )


def _order(rows: _Rows, wanted: _Rows) -> torch.Tensor:
    """Where each of the ``wanted`` rows is among ``rows``, int64."""
    places = {number: place for place, number in enumerate(rows)}
    return torch.tensor([places[number] for number in wanted])
