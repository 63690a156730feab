"""Layers that keep a state of fixed size for all tokens before: Mamba, short convolutions, others.

transformers computes them: its module of a layer is called for the sequences of a batch, with an
object in place of transformers' cache that has the states of these sequences. The sequences with
one token share a call, in rows; each longer prefill chunk has a call of its own. Some modules, as
that of Mamba 1, begin a chunk with sums of zero: there a chunk with tokens before takes a call for
each of its tokens.

A forward pass reads the slots of the states and keeps the new states apart, until
`StateLayers.commit`: a pass that fails, or is repeated for fewer sequences, has changed nothing.

Compiled programs call these modules as an operator, as they do attention: how many calls there are
depends on the sequences of the batch, and the program on the number of tokens alone.

On a device whose graphs have static shapes, all sequences of a batch share one call, in rows that
are padded, with the functions of `state_functions`. Where states are read and written are tensors
of the batch (`StateTensors`), and each slot has two places (`StateCache`): the layer writes the one
that it does not read, and `StateLayers.commit` makes it the one to read.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from torch import nn

from trencadis.engine.errors import ModelError
from trencadis.engine.models.attention_operator import current_layer
from trencadis.engine.models.decoder_layers import decoder_layers
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.paged_context import PagedContext
from trencadis.engine.models.state_functions import (
    StaticFunctions,
    functions_of,
    with_functions,
)
from trencadis.kvcache import PADDING_SLOT
from trencadis.kvcache.state_cache import StateCache, StateKey, StateShape

CONV = "conv"
RECURRENT = "recurrent"
"""The kinds of states that transformers' cache has: the last inputs of a convolution, and sums."""

_LIBRARY = torch.library.Library("trencadis", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("layer_with_state(Tensor hidden) -> Tensor")  # type: ignore[no-untyped-call]

CACHE_ARGUMENTS = ("cache_params", "past_key_values")
"""How models and their layers call the argument that has the cache."""


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name that a forward function has for its cache; None where it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


class StateRow(NamedTuple):
    """A sequence of a batch: its ``num_tokens`` tokens begin at ``offset`` in the forward pass.

    ``slot``: that of its state; `PADDING_SLOT` where no state is read or kept. ``is_first``: it has
    no tokens before, so its state is zero.
    """

    offset: int
    num_tokens: int
    slot: int = PADDING_SLOT
    is_first: bool = True


class StateTensors(NamedTuple):
    """Where the padded rows of a batch read and write their states: each ``[rows]``, int64.

    ``reads``, ``writes``: places in the tensors of a `StateCache`. ``tokens``: of each row.
    """

    reads: torch.Tensor
    writes: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def of(cls, places: torch.Tensor) -> StateTensors:
        """From `StateLayers.places`."""
        return cls(*torch.split(places.long(), places.shape[0] // 3))


@attrs.frozen(eq=False)
class _Part:
    """Rows of a batch that share a call: tokens ``[rows, tokens]``, slots ``[rows]``.

    ``begun``: ``[rows]``, 1.0 where there is a state to read and 0.0 where it is zero.
    """

    tokens: torch.Tensor
    slots: torch.Tensor
    begun: torch.Tensor | None

    @classmethod
    def of(cls, rows: Sequence[StateRow]) -> _Part:
        offsets = torch.tensor([row.offset for row in rows])
        begun = torch.tensor([not row.is_first for row in rows])
        return cls(
            offsets[:, None] + torch.arange(rows[0].num_tokens),
            torch.tensor([row.slot for row in rows]),
            None if begun.all() else begun,
        )


class _Current(threading.local):
    """The layers of the model whose forward pass this thread computes."""

    layers: StateLayers | None = None


_CURRENT = _Current()


class StateLayers:
    """The layers of a model that keep a state. Made once: it replaces their ``forward``.

    ``layers``: the specs of the model's layers, by their number. ``dtype``: that of the hidden
    states. Raises `ModelError` for a model that has no module that a spec names.
    """

    def __init__(self, model: nn.Module, layers: Sequence[LayerSpec], dtype: torch.dtype) -> None:
        self._shapes = {i: layer.states for i, layer in enumerate(layers) if layer.states}
        self._cache: StateCache | None = None
        self._parts: list[_Part] = []
        self._kept: list[tuple[int, torch.Tensor, Mapping[StateKey, torch.Tensor]]] = []
        self._advanced: list[int] = []
        self._functions = StaticFunctions()
        self._modules: list[tuple[int, Any, str]] = []
        self._of_layer: dict[int, Any] = {}
        self._model = weakref.ref(model)
        self.paged: PagedContext | None = None
        """That of the forward pass, in static shapes or with programs."""
        self._passes_on = False
        config: Any = model.config
        hidden = torch.ones(1, 2, config.get_text_config(decoder=True).hidden_size, dtype=dtype)
        by_tokens: dict[str, bool] = {}
        found: set[int] = set()
        modules: Any = model.modules()
        for module in modules:
            name, number = type(module).__name__, getattr(module, "layer_idx", None)
            if number not in self._shapes or name != layers[number].state_module:
                continue
            argument = cache_argument(module.forward) or CACHE_ARGUMENTS[0]
            if name not in by_tokens:
                by_tokens[name] = _ignores_sums(module, argument, self._shapes[number], hidden)
            of_layer = (number, module.forward, argument, by_tokens[name])
            module.forward = functools.partial(self._forward, *of_layer)
            self._modules.append((number, module, argument))
            self._of_layer[number] = module
            found.add(number)
        self.computes_by_tokens = any(by_tokens.values())
        """Whether a chunk with tokens before takes a call for each of its tokens."""
        for number in self._shapes.keys() - found:
            raise ModelError(
                f"layer {number} has no {layers[number].state_module}, which keeps its state: "
                "serve another model"
            )

    def __deepcopy__(self, _: Any) -> StateLayers:
        """Itself: a copied layer, for a trace, is one of the same model."""
        return self

    def use_static_shapes(self) -> None:
        """Compute padded rows from now on, with `StaticFunctions` where layers call others.

        For layers whose functions it has (`are_static`).
        """
        for number, module, argument in self._modules:
            own = with_functions(module, self._functions.in_place_of(functions_of(module)))
            module.forward = functools.partial(self._forward_static, number, own, argument)
        self.pass_context_on()

    def pass_context_on(self) -> None:
        """Give each decoder layer `paged`, from which it has its program, from now on."""
        model: Any = self._model()
        for layer in () if self._passes_on else decoder_layers(model):
            layer.register_forward_pre_hook(self._pass_on, with_kwargs=True)
        self._passes_on = True

    def _pass_on(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Some models do not pass on to their layers what they are called with."""
        return None if "paged" in kwargs else (args, {**kwargs, "paged": self.paged})

    def use_functions(self, functions: StaticFunctions, names: frozenset[str]) -> None:
        """Compute with those of these names where layers call others, in the same shapes."""
        for number, module, argument in self._modules:
            called = functions_of(module) & names
            if called:
                own = with_functions(module, functions.in_place_of(called))
                module.forward = functools.partial(self._forward, number, own, argument, False)

    def use_cache(self, cache: StateCache | None) -> None:
        """Read and keep states there from now on."""
        self._cache = cache
        self.drop()

    def begin(self, rows: Sequence[StateRow]) -> None:
        """The next forward pass has these sequences. Tokens of none of them are padding.

        Not for static shapes: see `StateTensors`.
        """
        singles = [row for row in rows if row.num_tokens == 1]
        _CURRENT.layers = self
        self._parts = [_Part.of(singles)] if singles else []
        self._parts += [_Part.of([row]) for row in rows if row.num_tokens > 1]

    def places(self, rows: Sequence[StateRow], batch: int) -> torch.Tensor:
        """The `StateTensors` of a batch of these sequences and so many rows: int32 ``[3 * batch]``.

        Other rows read and write the slot of padding, whose first place stays zero.
        """
        numbers = np.zeros((3, batch), np.int32)
        if self._cache is not None:
            slots = [row.slot for row in rows]
            padding = self._cache.next_places([PADDING_SLOT] * (batch - len(rows)))
            reads = self._cache.places(slots)
            numbers[0, : len(rows)] = [
                PADDING_SLOT if row.is_first else place
                for row, place in zip(rows, reads, strict=True)
            ]
            numbers[1] = [*self._cache.next_places(slots), *padding]
        numbers[2, : len(rows)] = [row.num_tokens for row in rows]
        return torch.from_numpy(numbers.reshape(-1))

    def note(self, rows: Sequence[StateRow]) -> None:
        """The next forward pass writes the states of these sequences."""
        self._advanced += [row.slot for row in rows]

    def commit(self) -> None:
        """Keep the new states of the forward passes since the last call of this or of `drop`."""
        if self._cache is not None:
            self._cache.advance(self._advanced)
        self._advanced.clear()
        kept, self._kept = self._kept, []
        for layer, slots, states in kept:
            for key, state in states.items():
                if self._cache is not None:
                    self._cache.part(layer, key).index_copy_(0, slots, state)

    def drop(self) -> None:
        """Forget the new states: the passes have failed, or served no sequence."""
        self._kept.clear()
        self._advanced.clear()

    def _forward_static(
        self,
        layer: int,
        own: Callable[..., torch.Tensor],
        argument: str,
        hidden_states: torch.Tensor,
        *_: Any,
        paged: Any,
        **__: Any,
    ) -> torch.Tensor:
        """As `_forward`, for the rows of ``paged``: ``[1, rows * tokens, hidden size]``."""
        rows = hidden_states.view(paged.state_reads.shape[0], -1, hidden_states.shape[2])
        lengths = paged.state_tokens if rows.shape[1] > 1 else None
        cache = paged.cache.states
        states = LayerStates(
            {
                shape.key: cache.part(layer, shape.key).index_select(0, paged.state_reads)
                for shape in self._shapes[layer]
            },
            lengths,
        )
        self._functions.lengths = lengths
        result = own(rows, **{argument: states})
        for key, state in states.states.items():
            cache.write(layer, key, paged.state_writes, state)
        return result.reshape(hidden_states.shape)

    def _forward(
        self,
        layer: int,
        own: Callable[..., torch.Tensor],
        argument: str,
        by_tokens: bool,
        hidden_states: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """A layer's part with a state: ``[1, T, hidden size]``, as its own ``forward``, ``own``.

        ``argument``: the name that its cache has there. ``by_tokens``: see `_ignores_sums`. What
        the model passes besides, such as masks, is for batches of another form.
        """
        if type(hidden_states) is not torch.Tensor:  # it is being traced
            traced: torch.Tensor = torch.ops.trencadis.layer_with_state(hidden_states)
            return traced
        result = torch.zeros_like(hidden_states)
        for part in self._parts:
            states = LayerStates(
                {shape.key: self._read(layer, shape, part) for shape in self._shapes[layer]}
            )
            given: dict[str, Any] = {argument: states}
            steps: Sequence[torch.Tensor] = (part.tokens,)
            if by_tokens and part.begun is None:
                steps = torch.split(part.tokens, 1, dim=1)
            for tokens in steps:
                result[0, tokens] = own(hidden_states[0, tokens], **given)
            kept = {key: _alone(state) for key, state in states.states.items()}
            self._kept.append((layer, part.slots, kept))
        return result

    def compute(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """A layer's part with a state, for a program that calls it as an operator."""
        result: torch.Tensor = self._of_layer[layer].forward(hidden_states)
        return result

    def _read(self, layer: int, shape: StateShape, part: _Part) -> torch.Tensor:
        """The states of the sequences of a part, ``[rows, ...]``: a copy."""
        if self._cache is None:
            raise ModelError(f"layer {layer} keeps a state, and there is no cache for it")
        read = self._cache.part(layer, shape.key).index_select(0, part.slots)
        if part.begun is None:
            return read
        begun = part.begun.view(-1, *[1] * (read.dim() - 1))
        return torch.where(begun, read, torch.zeros((), dtype=read.dtype))


class LayerStates:
    """What transformers' module of a layer takes for its cache: the states of some sequences.

    ``states``: each part of them, ``[sequences, ...]``; new ones once the module was called.
    ``lengths``: the tokens of each sequence, where rows have padding behind them. The
    methods are those of ``transformers.cache_utils.Cache`` that such modules call. A sequence
    without tokens before has states of zeros, which compute what no states would.
    """

    def __init__(
        self, states: dict[StateKey, torch.Tensor], lengths: torch.Tensor | None = None
    ) -> None:
        self.states = states
        self._lengths = lengths

    def is_recording_past(self, layer_idx: int) -> bool:
        del layer_idx
        return False

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        del layer_idx, state_idx
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """The last inputs of a convolution. A module may change it in place."""
        del layer_idx
        return self.states[StateKey(CONV, state_idx)]

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Add inputs; returns them after those that the state had."""
        del layer_idx
        key = StateKey(CONV, state_idx)
        known = torch.cat((self.states[key], conv_states), dim=-1)
        width = self.states[key].shape[-1]
        if self._lengths is None:
            self.states[key] = known[..., -width:]
        else:
            last = self._lengths.unsqueeze(1) + torch.arange(width, device=known.device)
            places = last.unsqueeze(1).expand(-1, known.shape[1], -1)
            self.states[key] = torch.gather(known, 2, places)
        return known

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        """A state of sums. A module may change it in place."""
        del layer_idx
        return self.states[StateKey(RECURRENT, state_idx)]

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """Replace a state."""
        del layer_idx
        key = StateKey(RECURRENT, state_idx)
        self.states[key] = recurrent_states.to(self.states[key].dtype)
        return self.states[key]


def _alone(state: torch.Tensor) -> torch.Tensor:
    """A state, copied where it is a part of a larger tensor: this one is freed with the layer."""
    is_part = state.untyped_storage().nbytes() > state.numel() * state.element_size()
    return state.clone(memory_format=torch.contiguous_format) if is_part else state


@torch.inference_mode()
def _ignores_sums(
    module: Any, argument: str, shapes: Sequence[StateShape], hidden: torch.Tensor
) -> bool:
    """Whether ``hidden``, states of tokens, come out alike after sums of zeros and of ones."""
    if not any(shape.key.kind == RECURRENT for shape in shapes):
        return False
    results = []
    for value in (0.0, 1.0):
        states = {
            shape.key: hidden.new_full(
                (1, *shape.shape),
                value if shape.key.kind == RECURRENT else 0.0,
                dtype=shape.dtype or hidden.dtype,
            )
            for shape in shapes
        }
        given: dict[str, Any] = {argument: LayerStates(states)}
        results.append(module(hidden, **given))
    return torch.equal(*results)


def state_layers_of(model: nn.Module) -> StateLayers | None:
    """Those that `load_model` has found in a model; None where no layer keeps a state."""
    found: StateLayers | None = vars(model).get(_ATTRIBUTE)
    return found


def find_state_layers(model: nn.Module, layers: Sequence[LayerSpec], dtype: torch.dtype) -> None:
    """Let a model have its `StateLayers`, where some of its layers keep a state."""
    if any(layer.states for layer in layers):
        vars(model)[_ATTRIBUTE] = StateLayers(model, layers, dtype)


_ATTRIBUTE = "trencadis_state_layers"


def _compute(hidden: torch.Tensor) -> torch.Tensor:
    layers = _CURRENT.layers
    if layers is None:
        raise RuntimeError("a program with a state runs outside of a forward pass")
    return layers.compute(current_layer(), hidden)


# The states that it reads and keeps are not among its arguments. No other operator has them, and
# the result is used, so that no compiler pass moves or removes the call.
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "layer_with_state", _compute, "CompositeExplicitAutograd"
)
torch.library.register_fake("trencadis::layer_with_state", torch.empty_like, lib=_LIBRARY)
