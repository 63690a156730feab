"""What one layer of a model keeps for the tokens before, and how it attends to them.

`layer_reading` reads the specs of a checkpoint. An `Attention` gets that of the layer with each
call, and says beforehand whether it computes it (`Attention.supports`).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from trencadis.engine.errors import ModelError
from trencadis.kvcache.state_cache import StateShape
from trencadis.kvcache.tensors import LayerShape

ATTENTION = "attention"


def _feature(words: str, default: Any = None) -> Any:
    """A field beyond plain causal attention, which an `Attention` rejects unless it names it."""
    return attrs.field(default=default, metadata={"words": words})


@attrs.frozen(kw_only=True, cache_hash=True)
class LayerSpec(LayerShape):
    """A decoder layer. Layers of equal spec compute the same attention with other weights.

    ``heads`` are those of queries, ``scale`` multiplies the scores. ``window`` and ``chunk`` are in
    tokens: a token attends to the last ``window`` tokens with itself, or to those of its own chunk.
    ``sinks``: each head has a learned score that takes weight and adds no value. Scores are bounded
    to ``softcap`` by a tanh. ``states``: what it keeps of a sequence as a whole, of fixed size, as
    Mamba does; it attends besides where ``heads`` is not 0. ``kind``: `ATTENTION`, or what
    transformers calls a layer of another kind, as one that selects keys. ``calls``: how often it
    attends in a forward pass, each time to other keys. ``others``: arguments of its attention that
    have no field here.

    ``position_scale``: ``(f, a)`` of a layer whose query at position p is multiplied by
    ``1 + a * log1p(floor((p + 1) / f))``, as in Llama 4 (`scaled_by_position`).

    ``scaled_cache``: its KV cache has keys and values divided by scales (`cache_scales`).

    ``complex_rotary``: its rotary embedding is of complex numbers, also after `use_real_rotary`.
    ``experts``: those of its feed-forward part, 0 for one that computes with all weights.
    ``state_module``: the class of the module that computes with ``states``. ``state_functions``:
    the functions of transformers that this one calls for it.
    ``results``: the length of the tuple that it returns, None for hidden states alone.
    ``arguments``: how the model's code asks for these features (`features_of`).
    """

    heads: int = 0
    scale: float = 1.0
    window: int | None = _feature("attends within a window of {} tokens")
    chunk: int | None = _feature("attends within chunks of {} tokens")
    sinks: bool = _feature("attends to sinks", default=False)
    softcap: float | None = _feature("bounds its scores to {}")
    states: tuple[StateShape, ...] = _feature("keeps a state", default=())
    kind: str = _feature("is of kind {}", default=ATTENTION)
    calls: int = _feature("attends {} times", default=1)
    others: tuple[str, ...] = _feature("passes {} to attention", default=())
    position_scale: tuple[float, float] | None = None
    scaled_cache: bool = False
    complex_rotary: bool = False
    experts: int = 0
    state_module: str = ""
    state_functions: frozenset[str] = frozenset()
    results: int | None = None
    arguments: Mapping[str, Any] = attrs.field(factory=dict, eq=False, repr=False)

    @classmethod
    def of_kind(cls, kind: str) -> LayerSpec:
        """A layer of which no more is known, as it keeps no keys and values."""
        return cls(kv_heads=0, key_width=0, value_width=0, kind=kind)

    def within(self, max_model_len: int) -> LayerSpec:
        """For sequences of so many tokens: a window or a chunk of as many is left out."""
        return attrs.evolve(
            self,
            window=self.window if self.window is None or self.window < max_model_len else None,
            chunk=self.chunk if self.chunk is None or self.chunk < max_model_len else None,
        )

    @property
    def limits(self) -> tuple[int | None, ...]:
        """The values of `LIMITS`. Layers with equal ones leave out the same keys."""
        return self.window, self.chunk

    @property
    def has_limits(self) -> bool:
        """Whether a token may attend to fewer tokens than all before it."""
        return self.window is not None or self.chunk is not None

    @property
    def most_seen(self) -> int | None:
        """How many of the last tokens, with itself, a token sees at most; None for all."""
        return min((limit for limit in self.limits if limit is not None), default=None)

    def is_limited(self, num_tokens: int) -> bool:
        """Whether the last of so many tokens attends to fewer than all."""
        return any(limit is not None and limit < num_tokens for limit in self.limits)

    @property
    def needs_scores(self) -> bool:
        """Whether it changes scores in a way that PyTorch's fused attention does not."""
        return self.softcap is not None or self.sinks

    def first_seen(self, position: int) -> int:
        """The first position to which the token at ``position`` attends."""
        of_window = 0 if self.window is None else position - self.window + 1
        of_chunk = 0 if self.chunk is None else position - position % self.chunk
        return max(0, of_window, of_chunk)

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Whether `LIMITS` leave a key to a query, by their positions, which broadcast.

        Keys after the query are not excluded here.
        """
        seen = []
        if self.window is not None:
            seen.append(keys > queries - self.window)
        if self.chunk is not None:
            seen.append(keys >= queries - queries % self.chunk)
        if not seen:
            return torch.ones((), dtype=torch.bool, device=keys.device)
        return functools.reduce(
            operator.and_, seen
        )  # without a constant: no recipe has one of bool


def seen_tokens(layers: Sequence[LayerSpec], max_model_len: int) -> list[int | None]:
    """How many of the last tokens, with itself, a token sees at most in each layer; None for all.

    A layer that does not attend needs no blocks: it has the least of the others.
    """
    windows = [layer.within(max_model_len).most_seen for layer in layers]
    attending = [window for window, layer in zip(windows, layers, strict=True) if layer.heads]
    limited = [window for window in attending if window is not None]
    least = min(limited) if limited and None not in attending else None
    return [window if layer.heads else least for window, layer in zip(windows, layers, strict=True)]


@functools.lru_cache(maxsize=1024)
def feature_beyond(layer: LayerSpec, computed: frozenset[str] = frozenset()) -> str | None:
    """What a layer needs beyond plain causal attention and the fields in ``computed``, in words.

    None where there is nothing. The first of several. A new field is rejected until it is computed.
    """
    for field in attrs.fields(LayerSpec):
        value = getattr(layer, field.name)
        if "words" in field.metadata and field.name not in computed and value != field.default:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            return str(field.metadata["words"]).format(shown)
    return None


SINKS = "s_aux"
"""What transformers calls the argument that has the sinks."""

_FIELDS = {"sliding_window": "window", "softcap": "softcap", SINKS: "sinks"}
"""The fields of `LayerSpec` that transformers passes to attention, by the names it has there."""

PASSED_FEATURES = frozenset(_FIELDS.values())

LIMITS = frozenset({"window", "chunk"})
"""Features that leave out keys by their positions alone: see `LayerSpec.sees`."""

FEATURES = frozenset({"window", "chunk", "softcap", "sinks"})
"""What the attentions here compute beyond plain causal attention. Written out, so that a name in
`_FIELDS` is rejected until they do."""

_WITHOUT_EFFECT = frozenset(
    {
        *("dropout", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "position_ids", "use_cache"),
    }
)
"""What transformers passes besides: for training, for other kernels, or from the call of a model.
Every attention here is causal."""


def features_of(mask: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The features among what a model's code passes to attention, by the fields of `LayerSpec`.

    Those without a field have their own name. Of a tensor only that it is there: True.
    """
    features: dict[str, Any] = {} if mask is None else {"attention_mask": True}
    for name, value in arguments.items():
        if value is not None and name not in _WITHOUT_EFFECT:
            is_number = isinstance(value, (int, float))
            features[_FIELDS.get(name, name)] = value if is_number else True
    return features


def scaled_by_position(
    query: torch.Tensor, positions: torch.Tensor, scale: tuple[float, float]
) -> torch.Tensor:
    """Queries ``[1, H, T, D]`` at ``positions`` ``[T]``, by `LayerSpec.position_scale`."""
    floor, factor = scale
    steps = torch.log1p(torch.floor((positions.float() + 1.0) / floor))
    return (query * (steps * factor + 1.0).view(1, 1, -1, 1)).to(query.dtype)


def is_replaceable(module: nn.Module) -> bool:
    """Whether it has the experts of a layer and calls transformers' ``ExpertsInterface``."""
    return hasattr(module, "_is_expert_parallel")


def specs_of(module: nn.Module) -> Iterator[LayerSpec]:
    """The specs with which a module and those inside of it were declared, in order."""
    for each in module.modules():
        if isinstance(spec := vars(each).get("layer_spec"), LayerSpec):
            yield spec


def windows_of(model: nn.Module) -> tuple[int, ...]:
    """What tokens see at most in the layers of a model where they do not see all, in tokens."""
    seen = (spec.most_seen for spec in specs_of(model))
    return tuple(sorted({window for window in seen if window is not None}))


def spec_of(module: nn.Module) -> LayerSpec:
    """The spec that a module was declared with (`declare_layers`), or the first one inside of it.

    Raises `ModelError` for a model whose layers were not declared.
    """
    if (spec := next(specs_of(module), None)) is not None:
        return spec
    raise ModelError(f"{type(module).__name__} has no layer with a spec: load it by `load_model`")
