"""Reads what the layers of a checkpoint need, before its weights are loaded.

Families name heads, windows and scales in their configurations in many ways, and their code alone
says what it does with them. So a model is made on PyTorch's meta device, where tensors have shapes
and no values, and run once: each layer calls attention as it will with weights, and experts whose
shapes depend on values would raise an error there. A layer that keeps a state gives it to
transformers' cache. What transformers says by masks alone is read from the configuration: chunks,
windows of some families, and the type of a layer that does neither, or selects keys.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    DynamicCache,
    PreTrainedConfig,
)
from transformers.cache_utils import DummyLayer

from trencadis.engine.errors import ModelError
from trencadis.engine.models.broken_files import BROKEN_FILE_ERRORS, reason_of
from trencadis.engine.models.decoder_layers import decoder_layers
from trencadis.engine.models.layer_spec import (
    ATTENTION,
    PASSED_FEATURES,
    LayerSpec,
    features_of,
)
from trencadis.engine.models.layer_states import CONV, RECURRENT
from trencadis.engine.models.real_rotary import use_real_rotary
from trencadis.engine.models.state_functions import functions_of
from trencadis.engine.models.state_layers import cache_argument
from trencadis.kvcache.state_cache import StateKey, StateShape

_READING = "trencadis_reading"
"""The name under which transformers knows what notes the calls of attention."""

_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""What transformers calls layers that keep the keys and values of each token and nothing else."""


def read_layers(config: PreTrainedConfig, name: str) -> tuple[LayerSpec, ...]:
    """The layers of a model with this configuration, in order.

    Raises `ModelError` for a configuration of which no model can be made, and for an architecture
    whose attention cannot be replaced.
    """
    text = config.get_text_config(decoder=True)
    types = getattr(text, "layer_types", None) or [None] * text.num_hidden_layers
    other = set(types) - _ATTENTION_TYPES - {None}
    try:
        model = _on_meta(config, torch.bfloat16 if other else torch.float32)
        if other:
            return _read_with_states(model, config, types, text)
        calls = _calls(model, len(types), None)
    except BROKEN_FILE_ERRORS as error:
        raise ModelError(
            f"no model can be made of the config.json of {name}: {reason_of(error)}"
        ) from error
    return tuple(
        _of_layer(of_layer, each, text) for (of_layer, _), each in zip(calls, types, strict=True)
    )


def _read_with_states(
    model: Any, config: PreTrainedConfig, types: Sequence[str], text: Any
) -> tuple[LayerSpec, ...]:
    """The layers of a model some of which have other types than those that only attend."""
    named = tuple(
        LayerSpec.of_kind(ATTENTION if each in _ATTENTION_TYPES else each) for each in types
    )
    try:
        states = StateNotes(config)
        calls = _calls(model, len(types), states)
    except BROKEN_FILE_ERRORS:  # its cache is of a class of its own
        return named
    layers = []
    for number, layer_type in enumerate(types):
        state, (of_layer, known) = states.of_layer(number), calls[number]
        only_attends = layer_type in _ATTENTION_TYPES
        if only_attends and states.attends(number) and not of_layer:
            raise _own_attention(model)
        if of_layer and (only_attends or state):
            layer = _of_layer(of_layer, layer_type, text)
        elif states.is_without(number) or (state and not states.attends(number)):
            layer = LayerSpec.of_kind(ATTENTION)
        else:
            layer = named[number]
        layers.append(attrs.evolve(layer, **known, **state))
    return tuple(layers)


def declare_layers(model: nn.Module, layers: Sequence[LayerSpec]) -> None:
    """Let the modules of each layer know its spec, without states, which attention does not see.

    What attention computes in place of the layer's own code is switched off there.
    """
    modules: Any = model.modules()
    for module in modules:
        if isinstance(layer := getattr(module, "layer_idx", None), int):
            module.layer_spec = attrs.evolve(layers[layer], states=())
            if layers[layer].position_scale is not None:
                module.attn_temperature_tuning = False


def check_layers(
    layers: Sequence[LayerSpec], supports: Callable[[LayerSpec], str | None], name: str
) -> None:
    """Raise `ModelError` for the first layer for which ``supports`` has a reason not to.

    A reason that stays with shorter sequences comes first.
    """
    limits = [limit for each in layers for limit in each.limits if limit]
    shortest = min(limits, default=0)
    short = [layer.within(shortest) for layer in layers] if limits else []
    for wanted, remedy in ((short, ""), (layers, f", or lower max_model_len to {shortest}")):
        for number, layer in enumerate(wanted):
            if (reason := supports(layer)) is not None:
                raise ModelError(
                    f"{name} cannot be served, because layer {number} {reason}: serve another model"
                    f"{remedy if limits else ''}"
                )


class StateNotes(DynamicCache):
    """transformers' cache, which notes what states the layers of a model give it."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self._modules: dict[int, str] = {}
        self._functions: dict[str, frozenset[str]] = {}
        self._running = ""

    def watch(self, model: Any) -> None:
        """Note which module computes a state: the last one of a layer that was entered before.

        It must make hidden states of hidden states. So does none that also makes keys, as Zaya's.
        """

        def enter(module: nn.Module, _: Any) -> None:
            self._running = type(module).__name__
            self._functions[self._running] = functions_of(module)

        def leave(module: Any, _: Any, result: Any) -> None:
            number = module.layer_idx
            if self._modules.get(number) != type(module).__name__:
                return
            width = model.config.get_text_config(decoder=True).hidden_size
            if not isinstance(result, torch.Tensor) or result.shape != (1, 2, width):
                del self._modules[number]

        for module in model.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._modules[layer_idx] = self._running
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._modules[layer_idx] = self._running
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def attends(self, number: int) -> bool:
        """Whether a layer has given keys and values."""
        is_initialized = bool(getattr(self.layers[number], "is_initialized", False))
        return is_initialized and not self.is_without(number)

    def is_without(self, number: int) -> bool:
        """Whether a layer keeps nothing, as one that is a feed-forward part alone."""
        return isinstance(self.layers[number], DummyLayer)

    def of_layer(self, number: int) -> dict[str, Any]:
        """The fields of `LayerSpec` for the state of a layer of bf16; none without a state."""
        if number not in self._modules:
            return {}
        layer: Any = self.layers[number]
        held = {CONV: layer.conv_states, RECURRENT: layer.recurrent_states}
        shapes = [
            StateShape(
                StateKey(kind, index),
                tuple(state.shape[1:]),
                None if state.dtype is torch.bfloat16 else state.dtype,
            )
            for kind, states in held.items()
            for index, state in states.items()
            if state is not None
        ]
        module = self._modules[number]
        functions = self._functions[module]
        return {"states": tuple(shapes), "state_module": module, "state_functions": functions}


def _on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> Any:
    """A model without values, whose calls of attention are noted."""
    with torch.device("meta"), torch.inference_mode():
        classes: Any = AutoModelForCausalLM
        model = classes.from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation="eager",
            experts_implementation="batched_mm",  # whose shapes do not depend on values
            trust_remote_code=False,
        )
        model.set_attn_implementation(_READING)
        use_real_rotary(model)
        for module in model.modules():
            if hasattr(module, "rope_type"):
                _compute_on_host(module)
    return model.eval()


def _own_attention(model: nn.Module) -> ModelError:
    return ModelError(
        f"{type(model).__name__} computes its own attention, so the paged one cannot be "
        "put in: serve a model of an architecture that supports transformers' "
        "AttentionInterface"
    )


def _calls(
    model: Any, num_layers: int, states: StateNotes | None
) -> list[tuple[list[LayerSpec], dict[str, Any]]]:
    """For each layer, the calls of attention in a forward pass, and fields that are not of these.

    ``states``: the cache of a model with layers that may keep a state. transformers does not say of
    these whether their attention can be replaced: those that call it there are found.
    """
    calls: list[list[LayerSpec]] = [[] for _ in range(num_layers)]
    facts: list[dict[str, Any]] = [{} for _ in range(num_layers)]
    arguments: dict[str, Any] = {"use_cache": False}
    if states is not None:
        states.watch(model)
        arguments = {"use_cache": True, str(cache_argument(model.forward)): states}
    elif not getattr(model, "_supports_attention_backend", False):
        raise _own_attention(model)
    results: dict[nn.Module, int | None] = {}

    def note_results(layer: nn.Module, _: Any, result: Any) -> None:
        results[layer] = len(result) if isinstance(result, tuple) else None

    for layer in decoder_layers(model):
        layer.register_forward_hook(note_results)
    with torch.device("meta"), torch.inference_mode():
        model(
            input_ids=torch.zeros(1, 2, dtype=torch.long),
            position_ids=torch.arange(2)[None],
            logits_to_keep=torch.zeros(1, dtype=torch.long),
            paged=calls,
            **arguments,
        )
    complex_rotary = any(getattr(module, "gives_complex", False) for module in model.modules())
    for number, layer in enumerate(decoder_layers(model)[:num_layers]):
        known: dict[str, Any] = {"experts": _num_experts(layer), "complex_rotary": complex_rotary}
        facts[number] = {**known, "results": results.get(layer)}
    return [
        ([attrs.evolve(call, **known) for call in of_layer], known)
        for of_layer, known in zip(calls, facts, strict=True)
    ]


def _compute_on_host(rotary: Any) -> None:
    """Let an embedding compute with values: some choose frequencies by the largest position."""
    own = rotary.to_empty(device="cpu").forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(
            torch.Tensor, lambda x: torch.zeros_like(x, device="cpu"), (args, kwargs)
        )
        with torch.device("cpu"):
            result = own(*args, **kwargs)
        rotary.gives_complex = any(map(torch.is_complex, tree_leaves(result)))
        return tree_map_only(torch.Tensor, lambda x: x.to("meta"), result)

    rotary.forward = forward


def _note(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: list[list[LayerSpec]] | None = None,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Called in place of attention, with the same arguments."""
    if paged is None:
        raise ModelError(
            f"{type(module).__name__} does not pass on what a model is called with, so the paged "
            "attention cannot be put in: serve a model of an architecture that supports "
            "transformers' AttentionInterface"
        )
    features = features_of(attention_mask, arguments)
    paged[module.layer_idx].append(
        LayerSpec(
            heads=query.shape[1],
            kv_heads=key.shape[1],
            key_width=key.shape[3],
            value_width=value.shape[3],
            scale=query.shape[3] ** -0.5 if scaling is None else scaling,
            position_scale=_position_scale(module),
            others=tuple(name for name in features if name not in PASSED_FEATURES),
            arguments=features,
            **{name: value for name, value in features.items() if name in PASSED_FEATURES},
        )
    )
    return value.new_empty((1, query.shape[2], query.shape[1], value.shape[3])), None


AttentionInterface.register(_READING, _note)


def _position_scale(module: Any) -> tuple[float, float] | None:
    """That of Llama 4's layers without rotary embedding (`LayerSpec.position_scale`).

    Its code takes the number of a token in the batch for its position, which holds for the prompt
    of one sequence alone.
    """
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return None
    return float(module.floor_scale), float(module.attn_scale)


def _of_layer(calls: Sequence[LayerSpec], layer_type: str | None, text: Any) -> LayerSpec:
    """A layer, from its calls and from what the configuration ``text`` alone says of it."""
    if not calls:
        return LayerSpec.of_kind("without attention")
    spec = attrs.evolve(calls[0], calls=len(calls))
    window = getattr(text, "sliding_window", None)
    slides = layer_type in (None, "sliding_attention")
    if slides and getattr(text, "use_sliding_window", True) is not False:
        spec = attrs.evolve(spec, window=spec.window or window)
    if layer_type == "chunked_attention":
        spec = attrs.evolve(spec, chunk=text.attention_chunk_size)
    return spec


def _num_experts(layer: nn.Module) -> int:
    """The experts of a layer; 0 without."""
    numbers = [getattr(module, "num_experts", None) for module in layer.modules()]
    return max((number for number in numbers if isinstance(number, int)), default=0)
