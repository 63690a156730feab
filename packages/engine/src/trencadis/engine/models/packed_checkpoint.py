"""Loads a checkpoint with packed linear layers, which stay packed in memory."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from trencadis.engine.errors import ModelError
from trencadis.engine.models.packed_experts import (
    AwaitedExperts,
    await_experts,
    unexpected_keys,
)
from trencadis.engine.models.packed_formats import Packing, Tensors
from trencadis.engine.models.packed_weight import (
    PackedWeight,
    QuantizedEmbedding,
    QuantizedLinear,
)
from trencadis.engine.models.rank_loading import DividedModel
from trencadis.engine.models.weight_files import checkpoint_directory, weight_files

_METHOD = "trencadis"

_FP8 = ("F8_E4M3", "F8_E5M2")
"""What safetensors calls the types of weights."""


def loading_arguments(
    config: PreTrainedConfig, packing: Packing, source: str, divided: DividedModel | None = None
) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` with which it makes packed layers `QuantizedLinear`.

    A rank (``divided``) reads them one after the other, and keeps its part of each.

    Loading raises `ModelError` for a packed layer that is damaged, and for packed weights that
    belong to no linear layer, such as those of fused experts.
    """
    plain = copy.deepcopy(config)
    for each in {id(own): own for own in (plain, plain.get_text_config(decoder=True))}.values():
        if hasattr(each, "quantization_config"):
            del each.quantization_config
    return {"config": plain, "quantization_config": _Packed(packing, source, divided)}


class _Packed(QuantizationConfigMixin):
    """What transformers hands to `_PackedLayers`."""

    def __init__(self, packing: Packing, source: str, divided: DividedModel | None) -> None:
        self.quant_method = _METHOD  # type: ignore[assignment]  # of its own
        self.packing = packing
        self.source = source
        self.divided = divided


class _Awaited(nn.Module):
    """Takes the place of a packed layer while transformers loads the other weights.

    ``name``: the layer whose tensors it will have, another one where the model ties both.
    """

    def __init__(self, layer: nn.Linear | nn.Embedding, name: str) -> None:
        super().__init__()
        self.name = name
        self.is_table = isinstance(layer, nn.Embedding)
        self.bias = getattr(layer, "bias", None)
        self.shape = tuple(layer.weight.shape)


@register_quantizer(_METHOD)
class _PackedLayers(HfQuantizer):
    """Reads packed layers from the files itself: transformers would cast their scales."""

    quantization_config: _Packed

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        packing = self.quantization_config.packing
        self._files = _tensors_of(self.quantization_config.source, packing)
        ends = tuple(f".{key}" for key in packing.keys)
        awaited = {name.rpartition(".")[0] for name in self._files if name.endswith(ends)}
        table = model.get_input_embeddings()
        linears = {
            name
            for name, each in model.named_modules()
            if type(each) is nn.Linear or (packing.file is not None and each is table)
        }
        in_experts = set[str]()
        if packing.form.is_float and awaited - linears:
            in_experts = await_experts(model, awaited - linears)
        if in_experts and self.quantization_config.divided is not None:
            raise ModelError(
                f"experts in FP8 ({min(in_experts)}) are not divided between ranks: leave "
                "tensor_parallel_size out, or serve the checkpoint in bf16"
            )
        if others := sorted(awaited - linears - in_experts) or (not awaited and ["none is packed"]):
            raise ModelError(
                f"packed weights ({packing.form.name}) are read for linear layers alone, under the "
                f"model's names of them: {others[0]}"
                f"{f' and {len(others) - 1} more' if others[1:] else ''}"
            )
        if unscaled := _fp8_in(self._files) - {f"{name}.weight" for name in awaited}:
            raise ModelError(
                f"weights of FP8 without scales of their own are not read: {min(unscaled)}"
                f"{f' and {len(unscaled) - 1} more' if len(unscaled) > 1 else ''}"
            )
        scaled = [name for name in self._files if name.endswith(".act.scales")]
        if scaled:
            raise ModelError(
                f"packed weights ({packing.form.name}) with scaled activations ({scaled[0]}) are "
                "not computed: serve the checkpoint in bf16"
            )
        awaited -= in_experts
        tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
        for target, source in list(tied.items()):
            name, of_name = target.removesuffix(".weight"), source.removesuffix(".weight")
            if name not in awaited and of_name in awaited:
                model.set_submodule(name, _Awaited(model.get_submodule(name), of_name))
                del tied[target]
        for name in awaited:
            model.set_submodule(name, _Awaited(model.get_submodule(name), name))
            # A packed head shares nothing with the embedding, whatever the configuration says.
            tied.pop(f"{name}.weight", None)
        known = "|".join(map(re.escape, sorted(awaited)))
        model._keys_to_ignore_on_load_unexpected = {
            *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
            rf"^({known})\.",
            *unexpected_keys(in_experts),
        }

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """transformers divides what is not packed."""
        divided = self.quantization_config.divided
        if divided is not None:
            awaited = [n for n, each in model.named_modules() if isinstance(each, _Awaited)]
            divided.leave_whole(awaited, model, plan)

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        awaited = {n: each for n, each in model.named_modules() if isinstance(each, _Awaited)}
        experts = {n: each for n, each in model.named_modules() if isinstance(each, AwaitedExperts)}
        names: dict[str, list[str]] = {}
        for tensor in self._files:
            names.setdefault(tensor.rpartition(".")[0], []).append(tensor)
        read: dict[str, tuple[PackedWeight, nn.Parameter | None]] = {}
        with contextlib.ExitStack() as stack:
            files = {
                file: stack.enter_context(safe_open(file, "pt"))
                for file in set(self._files.values())
            }

            def tensors_of(name: str) -> Tensors:
                return {
                    each.rpartition(".")[2]: files[self._files[each]].get_tensor(each)
                    for each in names[name]
                }

            for name, module in experts.items():
                model.set_submodule(
                    name,
                    module.filled(lambda own, shape: self._weight(own, shape, tensors_of(own))),
                )
            for name, layer in awaited.items():
                if layer.name not in read:
                    read[layer.name] = self._read(layer, tensors_of(layer.name))
                weight, bias = read[layer.name]
                made: nn.Module = QuantizedLinear(weight, bias)
                if layer.is_table:
                    made = QuantizedEmbedding(weight, model.config.dtype)
                model.set_submodule(name, made)

    def _weight(self, name: str, shape: Sequence[int], tensors: Tensors) -> PackedWeight:
        packing = self.quantization_config.packing
        try:
            weight = packing.read(tensors)
        except (LookupError, RuntimeError, ModelError) as error:
            raise ModelError(f"layer {name} ({packing.form}) cannot be read: {error}") from error
        if weight.shape != tuple(shape):
            raise ModelError(
                f"layer {name} ({packing.form}) is {list(weight.shape)} where the model has "
                f"{list(shape)}"
            )
        return weight

    def _read(self, layer: _Awaited, tensors: Tensors) -> tuple[PackedWeight, nn.Parameter | None]:
        name = layer.name
        weight = self._weight(name, layer.shape, tensors)
        bias: nn.Parameter | None = layer.bias
        divided = self.quantization_config.divided
        if divided is not None:
            weight, bias = divided.packed_part(name, weight, bias)
        return weight, bias

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False


def _tensors_of(source: str, packing: Packing) -> Mapping[str, Path]:
    """The file of each tensor."""
    if packing.file is not None:
        return _tensors_in([Path(packing.file)])
    return _tensors_in(weight_files(checkpoint_directory(source)))


def _tensors_in(files: Sequence[Path]) -> Mapping[str, Path]:
    found: dict[str, Path] = {}
    for file in files:
        if file.suffix != ".safetensors":
            raise ModelError(f"packed weights are read from safetensors, not from {file.name}")
        with safe_open(file, "pt") as content:
            found.update(dict.fromkeys(content.keys(), file))
    return found


def _fp8_in(files: Mapping[str, Path]) -> set[str]:
    """The tensors in FP8: transformers would take one that nothing scales for numbers."""
    found = set()
    for file in set(files.values()):
        with safe_open(file, "pt") as content:
            names = content.keys()
            found |= {n for n in names if content.get_slice(n).get_dtype() in _FP8}
    return found
