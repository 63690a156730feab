"""Loads the part of a model that one rank has, by transformers' plan for tensor parallelism.

transformers knows for each architecture which layers are divided by columns and which by rows
(``base_model_tp_plan``), and reads of a checkpoint only what a rank needs. It computes with
distributed tensors, whose dispatch would cost more than a small layer; so the modules become plain
ones again, with the weights of this rank, and those that need other ranks are replaced by
`rank_modules`.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from trencadis.engine.errors import ModelError
from trencadis.engine.models.adapter_files import LayerShape
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.packed_weight import PackedWeight, QuantizedLinear
from trencadis.engine.models.rank_modules import RowExperts, RowLinear, SplitEmbedding, SplitHead
from trencadis.engine.models.rank_part import RankPart
from trencadis.kvcache import ceil_div

_COLUMNS, _ROWS, _EMBEDDING = "colwise", "rowwise", "embedding_rowwise"
_HEAD, _EXPERTS, _REPLICATED = "colwise_gather_output", "moe_tp_experts", "replicate"

_STYLES = frozenset(
    {
        *(_COLUMNS, _ROWS, _EMBEDDING, _HEAD, _EXPERTS, _REPLICATED),
        *("packed_colwise", "replicated_with_grad_allreduce"),
    }
)
"""What transformers calls the ways to divide a module that this module knows. Another one, as of a
latent attention, needs a collective call of its own."""

_KEYS_AND_VALUES = ("k_proj", "v_proj")


@attrs.frozen
class DividedModel:
    """The part of a model that one rank has.

    ``plan``: how transformers divides each module, by its name. ``whole``: the layers of the model;
    ``layers``: what the rank computes of them. ``shapes``: of the whole linear layers, by name.
    """

    part: RankPart
    plan: Mapping[str, str]
    whole: Sequence[LayerSpec]
    layers: Sequence[LayerSpec]
    shapes: Mapping[str, LayerShape]

    def kept(self, name: str) -> tuple[slice, slice]:
        """The inputs and the outputs of a linear layer with which the rank computes."""
        style, (inputs, outputs) = self.plan.get(_pattern(name)), self.shapes[name]
        if style == _ROWS:
            return self._share(inputs), slice(outputs)
        if style != _COLUMNS:
            return slice(inputs), slice(outputs)
        if not (name.endswith(_KEYS_AND_VALUES) and self.part.repeats_kv_heads(self.whole)):
            return slice(inputs), self._share(outputs)
        kv_heads = _layer_of(name, self.whole).kv_heads
        width, heads = outputs // kv_heads, self.part.kv_heads_of(kv_heads)
        return slice(inputs), slice(heads.start * width, heads.stop * width)

    def _share(self, size: int) -> slice:
        """That of the rank, as transformers divides so many inputs or outputs."""
        share = ceil_div(size, self.part.size)
        first = min(size, self.part.rank * share)
        return slice(first, min(size, first + share))

    def loading_arguments(self) -> dict[str, Any]:
        """Arguments of ``from_pretrained`` with which it reads what the rank has.

        Key-value heads that several ranks share are read whole, and `keep` chooses among them.
        """
        from transformers.distributed.configuration_utils import DistributedConfig  # noqa: PLC0415

        shared = {name: _REPLICATED for name in self.plan if name.endswith(_KEYS_AND_VALUES)}
        # None: no rule changes.
        changed = shared if self.part.repeats_kv_heads(self.whole) else None
        return {"distributed_config": DistributedConfig(tp_size=self.part.size, tp_plan=changed)}

    def keep(self, model: nn.Module) -> None:
        """Make a model that was loaded so plain again, with the part of the rank, in place."""
        part = self.part
        sizes = {name: module.weight.shape[0] for name, module in _linear_or_embedding(model)}
        _make_local(model)
        for name, module in list(model.named_modules()):
            vars(module).pop("forward", None)  # which transformers has wrapped
            style = self.plan.get(_pattern(name))
            if style == _EXPERTS:
                model.set_submodule(name, RowExperts(module))
            elif style == _EMBEDDING:
                first = part.rank * ceil_div(sizes[name], part.size)
                model.set_submodule(name, SplitEmbedding(module, first))
            elif style == _HEAD:
                rows = ceil_div(sizes[name], part.size)
                model.set_submodule(name, SplitHead(_resized(module), sizes[name], rows))
            elif style == _ROWS and isinstance(module, nn.Linear):
                model.set_submodule(name, RowLinear(_resized(module)))
            elif style == _ROWS and isinstance(module, QuantizedLinear):
                model.set_submodule(name, RowLinear(module))
            elif style == _COLUMNS and isinstance(module, nn.Linear):
                if name.endswith(_KEYS_AND_VALUES) and part.repeats_kv_heads(self.whole):
                    _keep_heads(module, _layer_of(name, self.whole), part)
                _resized(module)

    def leave_whole(self, names: Collection[str], model: nn.Module, plan: dict[str, str]) -> None:
        """Take packed layers out of transformers' plan, which divides weights: `packed_part` does.

        Raises `ModelError` where a rule is that of packed and of other layers.
        """
        for pattern in {_pattern(name) for name in names}:
            plan.pop(pattern, None)
            for name, module in model.named_modules():
                if _pattern(name) == pattern and isinstance(module, nn.Linear):
                    raise ModelError(
                        f"layer {name} is not packed, and others of {pattern} are: that does not "
                        f"work with tensor_parallel_size {self.part.size} yet, leave it out"
                    )

    def packed_part(
        self, name: str, weight: PackedWeight, bias: nn.Parameter | None
    ) -> tuple[PackedWeight, nn.Parameter | None]:
        """What the rank has of a packed layer. Raises `ModelError` where it cannot be divided."""
        part, style = self.part, self.plan.get(_pattern(name))
        if style in (None, _REPLICATED):
            return weight, bias
        outputs, inputs = weight.shape
        reason = f"its rule {style} is not that of a packed layer"
        if style == _COLUMNS:
            if (kept := self._outputs_of(name, outputs)) is not None:
                own = None if bias is None else bias[kept.start : kept.stop].clone()
                return weight.of_outputs(kept), None if own is None else _fixed(own)
            reason = f"{outputs} outputs are not {part.size} equal parts"
        elif style == _ROWS:
            size = inputs // part.size
            try:
                if inputs % part.size == 0:
                    return weight.of_inputs(range(part.rank * size, (part.rank + 1) * size)), bias
                reason = f"{inputs} inputs are not {part.size} equal parts"
            except ModelError as error:
                reason = str(error)
        raise ModelError(
            f"layer {name} cannot be divided between {part.size} ranks: {reason}. Leave "
            "tensor_parallel_size out, or serve another checkpoint"
        )

    def _outputs_of(self, name: str, outputs: int) -> range | None:
        """The outputs of this rank; None where ranks cannot have as many each."""
        part = self.part
        if name.endswith(_KEYS_AND_VALUES) and part.repeats_kv_heads(self.whole):
            kv_heads = _layer_of(name, self.whole).kv_heads
            width, kept = outputs // kv_heads, part.kv_heads_of(kv_heads)
            return range(kept.start * width, kept.stop * width)
        if outputs % part.size:
            return None
        size = outputs // part.size
        return range(part.rank * size, (part.rank + 1) * size)


def divide(
    config: PreTrainedConfig, layers: Sequence[LayerSpec], name: str, part: RankPart
) -> DividedModel:
    """What ``part`` is of the model ``name``, which has these ``layers``.

    Raises `ModelError` for a model that has no plan, or one that is not known here, and for heads
    that cannot be shared equally.
    """
    try:  # older ones, which the package accepts, do not divide any vocabulary
        from transformers.distributed.tensor_parallel import EmbeddingParallel  # noqa: F401, PLC0415
    except ImportError as error:
        raise ModelError(
            f"tensor_parallel_size {part.size} needs a transformers that divides models while it "
            f"loads them ({error}): install transformers>=5.23, or leave tensor_parallel_size out"
        ) from error
    classes: Any = AutoModelForCausalLM
    with torch.device("meta"):
        model = classes.from_config(copy.deepcopy(config), trust_remote_code=False)
    plan: dict[str, str] = dict(model.tp_plan or {})
    reason = ""
    if not plan:
        reason = "transformers has no plan to divide it (base_model_tp_plan)"
    elif other := sorted(set(plan.values()) - _STYLES):
        reason = f"its plan divides modules in ways that are not supported: {', '.join(other)}"
    elif any(not _is_divided(plan, each) for each in ("q_proj", *_KEYS_AND_VALUES)):
        reason = "its plan does not divide queries, keys and values by heads"
    elif any(style == _HEAD and "*" in module for module, style in plan.items()):
        reason = "its plan gathers the outputs of a layer"
    elif any(map(_normalizes_each_head, model.named_modules())):
        reason = "it normalizes each head with weights of its own"
    if reason:
        raise ModelError(
            f"{name} cannot be served with tensor_parallel_size {part.size}: {reason}. Leave it "
            "out, or serve another model"
        )
    shapes = {
        linear: LayerShape(module.in_features, module.out_features)
        for linear, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    return DividedModel(part, plan, tuple(layers), part.layers_of(layers, name), shapes)


def _normalizes_each_head(named: tuple[str, nn.Module]) -> bool:
    """Whether a module is a norm with weights ``[heads, head_dim]``, which no plan divides."""
    name, module = named
    weight = getattr(module, "weight", None)
    return name.endswith(("q_norm", "k_norm")) and weight is not None and weight.ndim > 1


def _fixed(weight: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)


def _is_divided(plan: Mapping[str, str], projection: str) -> bool:
    return any(name.endswith(projection) and style == _COLUMNS for name, style in plan.items())


def _linear_or_embedding(model: nn.Module) -> list[tuple[str, Any]]:
    kinds = (nn.Linear, nn.Embedding)
    return [(name, each) for name, each in model.named_modules() if isinstance(each, kinds)]


def _make_local(model: nn.Module) -> None:
    """Replace each distributed weight by the part in this process. Tied weights stay tied."""
    local: dict[int, nn.Parameter] = {}
    for module in model.modules():
        weights: dict[str, Any] = module._parameters
        for name, weight in weights.items():
            if isinstance(weight, DTensor):
                plain = nn.Parameter(weight.to_local(), requires_grad=False)
                weights[name] = local.setdefault(id(weight), plain)


def _pattern(name: str) -> str:
    """The name of a module as plans have it: ``*`` for the number of a layer."""
    return ".".join("*" if each.isdigit() else each for each in name.split("."))


def _resized(linear: Any) -> nn.Linear:
    """The layer, once its numbers of inputs and outputs are those of its weights."""
    linear.out_features, linear.in_features = linear.weight.shape
    return linear  # type: ignore[no-any-return]


def _layer_of(name: str, layers: Sequence[LayerSpec]) -> LayerSpec:
    """The layer of a module, by the number in its name."""
    return layers[next(int(each) for each in name.split(".") if each.isdigit())]


def _keep_heads(linear: nn.Linear, layer: LayerSpec, part: RankPart) -> None:
    """Keep the outputs of the key-value heads of a rank."""
    width = linear.weight.shape[0] // layer.kv_heads
    kept = part.kv_heads_of(layer.kv_heads)
    for name, weight in linear._parameters.items():
        if weight is not None:  # not a view, which would keep all
            own = weight[kept.start * width : kept.stop * width].clone()
            linear._parameters[name] = nn.Parameter(own, requires_grad=False)
