"""Loads a checkpoint with packed linear layers, which stay packed in memory."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig
from transformers.quantizers.auto import register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from trencadis.engine.errors import ModelError
from trencadis.engine.models.packed_formats import Packing
from trencadis.engine.models.packed_weight import QuantizedLinear
from trencadis.engine.models.rank_loading import DividedModel
from trencadis.engine.models.weight_files import weight_files

_METHOD = "trencadis"


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
    """Takes the place of a packed layer while transformers loads the other weights."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.shape = (linear.out_features, linear.in_features)


@register_quantizer(_METHOD)
class _PackedLayers(HfQuantizer):
    """Reads packed layers from the files itself: transformers would cast their scales."""

    quantization_config: _Packed

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        packing = self.quantization_config.packing
        self._files = _tensors_of(self.quantization_config.source)
        end = f".{packing.key}"
        awaited = {name.removesuffix(end) for name in self._files if name.endswith(end)}
        linears = {name for name, each in model.named_modules() if type(each) is nn.Linear}
        if others := sorted(awaited - linears) or (not awaited and ["none is packed"]):
            raise ModelError(
                f"packed weights ({packing.form.name}) are read for linear layers alone, under the "
                f"model's names of them: {others[0]}"
                f"{f' and {len(others) - 1} more' if others[1:] else ''}"
            )
        scaled = [name for name in self._files if name.endswith(".act.scales")]
        if scaled:
            raise ModelError(
                f"packed weights ({packing.form.name}) with scaled activations ({scaled[0]}) are "
                "not computed: serve the checkpoint in bf16"
            )
        for name in awaited:
            linear: Any = model.get_submodule(name)
            model.set_submodule(name, _Awaited(linear))
            # A packed head shares nothing with the embedding, whatever the configuration says.
            (getattr(model, "all_tied_weights_keys", None) or {}).pop(f"{name}.weight", None)
        known = "|".join(map(re.escape, sorted(awaited)))
        model._keys_to_ignore_on_load_unexpected = {
            *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
            rf"^({known})\.",
        }

    def update_parallel_plan(self, model: Any, plan: dict[str, str]) -> None:
        """transformers divides what is not packed."""
        divided = self.quantization_config.divided
        if divided is not None:
            awaited = [n for n, each in model.named_modules() if isinstance(each, _Awaited)]
            divided.leave_whole(awaited, model, plan)

    def _process_model_after_weight_loading(self, model: nn.Module, **_: Any) -> None:
        awaited = {n: each for n, each in model.named_modules() if isinstance(each, _Awaited)}
        for name, layer in awaited.items():
            model.set_submodule(name, self._read(name, layer))

    def _read(self, name: str, layer: _Awaited) -> QuantizedLinear:
        packing = self.quantization_config.packing
        prefix = f"{name}."
        tensors = {
            each.removeprefix(prefix): _read_tensor(file, each)
            for each, file in self._files.items()
            if each.startswith(prefix)
        }
        try:
            weight = packing.read(tensors)
        except (LookupError, RuntimeError, ModelError) as error:
            raise ModelError(f"layer {name} ({packing.form}) cannot be read: {error}") from error
        if weight.shape != layer.shape:
            raise ModelError(
                f"layer {name} ({packing.form}) is {list(weight.shape)} where the model has "
                f"{list(layer.shape)}"
            )
        bias: nn.Parameter | None = layer.bias
        divided = self.quantization_config.divided
        if divided is not None:
            weight, bias = divided.packed_part(name, weight, bias)
        return QuantizedLinear(weight, bias)

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False


def _tensors_of(source: str) -> Mapping[str, Path]:
    """The file of each tensor."""
    directory = Path(source)
    if not directory.is_dir():
        from huggingface_hub import snapshot_download  # noqa: PLC0415  (slow)

        directory = Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    found: dict[str, Path] = {}
    for file in weight_files(directory):
        if file.suffix != ".safetensors":
            raise ModelError(f"packed weights are read from safetensors, not from {file.name}")
        with safe_open(file, "pt") as content:
            found.update(dict.fromkeys(content.keys(), file))
    return found


def _read_tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as content:
        tensor: torch.Tensor = content.get_tensor(name)
    return tensor
