"""Layers that keep a state of fixed size for all tokens before: Mamba, short convolutions, others.

transformers computes them: its module of a layer is called for the sequences of a batch, with an
object in place of transformers' cache that has the states of these sequences. The sequences with
one token share a call, in rows; each longer prefill chunk has a call of its own. Some modules, as
that of Mamba 1, begin a chunk with sums of zero: there a chunk with tokens before takes a call for
each of its tokens.

Each slot of states has two places (`StateCache`). A forward pass writes the one that it does not
read, and `StateLayers.commit` makes it the one to read: a pass that fails, or is repeated for fewer
sequences, has changed nothing. A kernel that computes a layer (`Mixer`) is given the places,
and transformers' module a copy of the states.

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
import logging
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

logger = logging.getLogger("trencadis.engine")

CONV = "conv"
RECURRENT = "recurrent"
"""The kinds of states that transformers' cache has: the last inputs of a convolution, and sums."""

_TOLERANCE = 0.05
"""Largest difference of a layer with a kernel, of bf16, beside the largest value."""

_LIBRARY = torch.library.Library("trencadis", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define("layer_with_state(Tensor hidden) -> Tensor")  # type: ignore[no-untyped-call]

CACHE_ARGUMENTS = ("cache_params", "past_key_values")
"""How models and their layers call the argument that has the cache."""


def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The name that a forward function has for its cache; None where it takes none."""
    parameters = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in parameters), None)


@attrs.frozen(eq=False)
class StatePlaces:
    """Where a part of the states of some rows is read and written.

    ``part``: ``[places, ...]``, of a layer, in a `StateCache`. ``reads``, ``writes``: places,
    ``[rows]``, int64; a state that is read at -1 is zero.
    """

    part: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor

    def states(self) -> torch.Tensor:
        """A copy of the states, ``[rows, ...]``."""
        found = self.part.index_select(0, self.reads.clamp(min=0))
        is_zero = self.reads < 0
        if is_zero.any():
            found[is_zero] = 0
        return found

    def write(self, states: torch.Tensor) -> None:
        """Write new ones, ``[rows, ...]``."""
        self.part.index_copy_(0, self.writes, states)


Mixer = Callable[[nn.Module, torch.Tensor, StatePlaces, StatePlaces], torch.Tensor]
"""Computes a layer that has a convolution and a sum: its module, the hidden states of some rows,
and where the states of both are."""


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
    """Rows of a batch that share a call: tokens ``[rows, tokens]``, places ``[rows]``.

    ``span``: of the tokens in the forward pass, where all are behind each other.
    """

    tokens: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor
    span: slice | None

    @classmethod
    def of(cls, rows: Sequence[StateRow], cache: StateCache | None) -> _Part:
        num_tokens, first = rows[0].num_tokens, rows[0].offset
        offsets = [row.offset for row in rows]
        end = first + num_tokens * len(rows)
        slots = [row.slot for row in rows]
        places = slots if cache is None else cache.places(slots)
        reads = [-1 if row.is_first else place for row, place in zip(rows, places, strict=True)]
        return cls(
            torch.tensor(offsets)[:, None] + torch.arange(num_tokens),
            torch.tensor(reads),
            torch.tensor(slots if cache is None else cache.next_places(slots)),
            slice(first, end) if offsets == [*range(first, end, num_tokens)] else None,
        )

    @property
    def begins(self) -> bool:
        """Whether a row has no state to read."""
        return bool((self.reads < 0).any())

    def select(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the rows have of ``[1, T, hidden size]``: ``[rows, tokens, hidden size]``."""
        if self.span is None:
            return hidden[0, self.tokens]
        return hidden[0, self.span].view(*self.tokens.shape, -1)

    def write(self, hidden: torch.Tensor, result: torch.Tensor) -> None:
        """The reverse: write ``result``, ``[rows, tokens, hidden size]``."""
        if self.span is None:
            hidden[0, self.tokens] = result
        else:
            hidden[0, self.span] = result.flatten(0, 1)


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
        self._advanced: list[int] = []
        self._functions = StaticFunctions()
        self._modules: list[tuple[int, Any, str]] = []
        self._of_layer: dict[int, Any] = {}
        self._model = weakref.ref(model)
        self.paged: PagedContext | None = None
        """That of the forward pass, in static shapes or with programs."""
        self._passes_on = False
        self._mixers: dict[int, Callable[..., torch.Tensor]] = {}
        config: Any = model.config
        self._hidden_size: int = config.get_text_config(decoder=True).hidden_size
        self._dtype = dtype
        hidden = torch.ones(1, 2, self._hidden_size, dtype=dtype)
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

    def use_mixer(self, mixer: Mixer) -> None:
        """Let a kernel compute the layers that it computes as their own ``forward`` does.

        A layer of each class is called, to compare.
        """
        values = torch.Generator().manual_seed(1)
        hidden = torch.randn(2, 3, self._hidden_size, generator=values)
        takes: dict[type[nn.Module], bool] = {}
        for number, module, argument in self._modules:
            kind = type(module)
            if kind not in takes:
                compared = mixer, argument, self._shapes[number], hidden, self._dtype
                takes[kind] = computes_the_same(module, *compared)
            if takes[kind]:
                self._mixers[number] = functools.partial(mixer, module)

    @property
    def are_mixed(self) -> bool:
        """Whether a `Mixer` computes all layers."""
        return self._mixers.keys() >= self._shapes.keys()

    @property
    def numbers(self) -> list[int]:
        """Those of the layers that keep a state."""
        return list(self._shapes)

    def use_cache(self, cache: StateCache | None) -> None:
        """Read and keep states there from now on."""
        self._cache = cache
        self.drop()

    def begin(self, rows: Sequence[StateRow]) -> None:
        """The next forward pass has these sequences. Tokens of none of them are padding.

        Not for static shapes: see `StateTensors`.
        """
        _CURRENT.layers = self
        alike: dict[int, list[StateRow]] = {}
        if self.are_mixed:
            for row in rows:
                alike.setdefault(row.num_tokens, []).append(row)
        else:
            alike = {i: [row] for i, row in enumerate(rows, 2) if row.num_tokens > 1}
            if singles := [row for row in rows if row.num_tokens == 1]:
                alike[1] = singles
        self._parts = [_Part.of(each, self._cache) for each in alike.values()]

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

    def drop(self) -> None:
        """Forget the new states: the passes have failed, or served no sequence."""
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
        computed = functools.partial(self._of_part, layer, own, argument, by_tokens, hidden_states)
        if len(self._parts) == 1 and self._parts[0].span == slice(0, hidden_states.shape[1]):
            return computed(self._parts[0]).view(hidden_states.shape)
        result = torch.zeros_like(hidden_states)
        for part in self._parts:
            part.write(result, computed(part))
        return result

    def _of_part(
        self,
        layer: int,
        own: Callable[..., torch.Tensor],
        argument: str,
        by_tokens: bool,
        hidden_states: torch.Tensor,
        part: _Part,
    ) -> torch.Tensor:
        """What a layer computes for the rows of a part: ``[rows, tokens, hidden size]``."""
        if self._cache is None:
            raise ModelError(f"layer {layer} keeps a state, and there is no cache for it")
        places = {
            shape.key: StatePlaces(self._cache.part(layer, shape.key), part.reads, part.writes)
            for shape in self._shapes[layer]
        }
        rows = part.select(hidden_states)
        if (mixer := self._mixers.get(layer)) is not None:
            return mixer(rows, *_of_mixer(places))
        states = LayerStates({key: place.states() for key, place in places.items()})
        given: dict[str, Any] = {argument: states}
        steps = rows.shape[1] if part.begins or not by_tokens else 1
        computed = [own(tokens, **given) for tokens in torch.split(rows, steps, dim=1)]
        for key, state in states.states.items():
            places[key].write(state)
        return torch.cat(computed, dim=1)

    def compute(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """A layer's part with a state, for a program that calls it as an operator."""
        result: torch.Tensor = self._of_layer[layer].forward(hidden_states)
        return result

    def decode_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a pass with a token of each sequence reads and writes states: ``[sequences]``."""
        (part,) = self._parts
        return part.reads, part.writes

    def addresses(self, layer: int) -> list[int]:
        """Of the parts of a layer's state."""
        if self._cache is None:
            raise ModelError(f"layer {layer} keeps a state, and there is no cache for it")
        parts = {shape.key: self._cache.part(layer, shape.key) for shape in self._shapes[layer]}
        return [parts[StateKey(kind, 0)].data_ptr() for kind in (CONV, RECURRENT)]


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


def _of_mixer(places: Mapping[StateKey, StatePlaces]) -> tuple[StatePlaces, StatePlaces]:
    return places[StateKey(CONV, 0)], places[StateKey(RECURRENT, 0)]


@torch.inference_mode()
def computes_the_same(
    module: nn.Module,
    mixer: Mixer,
    argument: str,
    shapes: Sequence[StateShape],
    hidden: torch.Tensor,
    dtype: torch.dtype,
) -> bool:
    """Whether a kernel computes nearly what a module does, and the same states.

    ``hidden``: ``[2, T, hidden size]``, from which T tokens are computed, and one, in ``dtype``.
    """
    reads, writes = torch.arange(2), torch.arange(2, 4)
    values = torch.Generator().manual_seed(2)
    parts = {
        shape.key: torch.randn(4, *shape.shape, generator=values).to(shape.dtype or dtype)
        for shape in shapes
    }
    places = {key: StatePlaces(part, reads, writes) for key, part in parts.items()}
    for rows in (hidden[:, :1].to(dtype), hidden.to(dtype)):
        states = LayerStates({key: place.states() for key, place in places.items()})
        given: dict[str, Any] = {argument: states}
        expected = type(module).forward(module, rows, **given)
        try:
            pairs = [(mixer(module, rows, *_of_mixer(places)), expected)]
        except (AttributeError, KeyError, ValueError) as error:
            logger.debug("%s has no kernel of its own: %s", type(module).__name__, error)
            return False
        pairs += [(parts[key][2:], state) for key, state in states.states.items()]
        for found, other in pairs:
            if not (found - other).abs().max() <= _TOLERANCE * other.abs().max():
                logger.info("%s has no kernel of its own: it differs", type(module).__name__)
                return False
    return True


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
