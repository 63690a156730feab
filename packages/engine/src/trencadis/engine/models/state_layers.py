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
from trencadis.engine.models.layer_states import RECURRENT, LayerStates, StatePlaces
from trencadis.engine.models.paged_context import PagedContext
from trencadis.engine.models.state_functions import (
    StaticFunctions,
    functions_of,
    with_functions,
)
from trencadis.engine.models.state_mixer import OF_MIXER, Mixer, computes_the_same
from trencadis.kvcache import PADDING_SLOT
from trencadis.kvcache.state_cache import StateCache, StateKey, StateShape

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
    """Rows of a batch that share a call: tokens ``[rows, tokens]``, places ``[rows]``.

    ``begins``: whether a row has no tokens before. ``span``: of the tokens in the forward pass,
    where all are behind each other.
    """

    tokens: torch.Tensor
    reads: torch.Tensor
    writes: torch.Tensor
    begins: bool
    span: slice | None

    @classmethod
    def of(cls, rows: Sequence[StateRow], cache: StateCache) -> _Part:
        num_tokens, first = rows[0].num_tokens, rows[0].offset
        offsets = [row.offset for row in rows]
        end = first + num_tokens * len(rows)
        reads, writes = _places(rows, cache)
        return cls(
            torch.tensor(offsets)[:, None] + torch.arange(num_tokens),
            torch.tensor(reads),
            torch.tensor(writes),
            any(row.is_first for row in rows),
            slice(first, end) if offsets == [*range(first, end, num_tokens)] else None,
        )

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


def _places(rows: Sequence[StateRow], cache: StateCache) -> tuple[list[int], list[int]]:
    """Where these sequences read and write their states: that of padding is read as zero."""
    slots = [row.slot for row in rows]
    reads = [
        PADDING_SLOT if row.is_first else place
        for row, place in zip(rows, cache.places(slots), strict=True)
    ]
    return reads, cache.next_places(slots)


class _Own(NamedTuple):
    """A layer's own code: its ``forward``, and the name that its cache has there.

    ``by_tokens``: see `_ignores_sums`.
    """

    layer: int
    forward: Callable[..., torch.Tensor]
    argument: str
    by_tokens: bool


class _Current(threading.local):
    """The layers of the model whose forward pass this thread computes."""

    layers: Callable[[], StateLayers | None] = staticmethod(lambda: None)


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
        size = config.get_text_config(decoder=True).hidden_size
        self._hidden = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(1)).to(dtype)
        """Such as a layer is given."""
        hidden = torch.ones(1, 2, size, dtype=dtype)
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
            of_layer = _Own(number, module.forward, argument, by_tokens[name])
            module.forward = functools.partial(self._forward, of_layer)
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
        takes: dict[type[nn.Module], bool] = {}
        for number, module, argument in self._modules:
            kind = type(module)
            if kind not in takes:
                given = argument, self._shapes[number], self._hidden
                takes[kind] = computes_the_same(mixer, module, *given)
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
        _CURRENT.layers = weakref.ref(self)  # they have the weights of their model
        if self._cache is None:
            raise ModelError("layers keep a state, and there is no cache for it")
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
            reads, writes = _places(rows, self._cache)
            padding = self._cache.next_places([PADDING_SLOT] * (batch - len(rows)))
            numbers[0, : len(rows)] = reads
            numbers[1] = [*writes, *padding]
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
        places = {
            shape.key: StatePlaces(
                cache.part(layer, shape.key), paged.state_reads, paged.state_writes
            )
            for shape in self._shapes[layer]
        }
        states = LayerStates(self._given(layer, places), lengths)
        self._functions.lengths = lengths
        result = own(rows, **{argument: states})
        for key, state in states.states.items():
            # Of a program, the cache notes it, and it is written after the last layer.
            kept = state.to(places[key].part.dtype)
            cache.write(layer, key, paged.state_writes, kept)
        return result.reshape(hidden_states.shape)

    def _forward(self, own: _Own, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """A layer's part with a state: ``[1, T, hidden size]``.

        What the model passes besides, such as masks, is for batches of another form.
        """
        if type(hidden_states) is not torch.Tensor:  # it is being traced
            traced: torch.Tensor = torch.ops.trencadis.layer_with_state(hidden_states)
            return traced
        if len(self._parts) == 1 and self._parts[0].span == slice(0, hidden_states.shape[1]):
            return self._of_part(own, self._parts[0], hidden_states).view(hidden_states.shape)
        result = torch.zeros_like(hidden_states)
        for part in self._parts:
            part.write(result, self._of_part(own, part, hidden_states))
        return result

    def _of_part(self, own: _Own, part: _Part, hidden_states: torch.Tensor) -> torch.Tensor:
        """What a layer computes for the rows of a part: ``[rows, tokens, hidden size]``."""
        places = {
            key: StatePlaces(state, part.reads, part.writes)
            for key, state in self._states(own.layer).items()
        }
        rows = part.select(hidden_states)
        if (mixer := self._mixers.get(own.layer)) is not None:
            return mixer(rows, *(places[key] for key in OF_MIXER))
        states = LayerStates(self._given(own.layer, places))
        given: dict[str, Any] = {own.argument: states}
        steps = 1 if own.by_tokens and not part.begins else rows.shape[1]
        computed = [own.forward(tokens, **given) for tokens in torch.split(rows, steps, dim=1)]
        for key, state in states.states.items():
            places[key].write(state)
        return torch.cat(computed, dim=1)

    def _given(
        self, layer: int, places: Mapping[StateKey, StatePlaces]
    ) -> dict[StateKey, torch.Tensor]:
        """The states that the code of a layer is given, in the dtypes that it computes with."""
        return {
            shape.key: places[shape.key].states(shape.dtype or self._hidden.dtype)
            for shape in self._shapes[layer]
        }

    def _states(self, layer: int) -> dict[StateKey, torch.Tensor]:
        """The parts of a layer's state in the cache."""
        if self._cache is None:
            raise ModelError(f"layer {layer} keeps a state, and there is no cache for it")
        return {shape.key: self._cache.part(layer, shape.key) for shape in self._shapes[layer]}

    def compute(self, layer: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """A layer's part with a state, for a program that calls it as an operator."""
        result: torch.Tensor = self._of_layer[layer].forward(hidden_states)
        return result

    def decode_places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a pass with a token of each sequence reads and writes states: ``[sequences]``."""
        (part,) = self._parts
        return part.reads, part.writes

    def addresses(self, layer: int) -> list[int]:
        """Of the parts of a layer's state that a `Mixer` is given."""
        states = self._states(layer)
        return [states[key].data_ptr() for key in OF_MIXER]


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
    layers = _CURRENT.layers()
    if layers is None:
        raise RuntimeError("a program with a state runs outside of a forward pass")
    return layers.compute(current_layer(), hidden)


# The states that it reads and keeps are not among its arguments. No other operator has them, and
# the result is used, so that no compiler pass moves or removes the call.
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "layer_with_state", _compute, "CompositeExplicitAutograd"
)
torch.library.register_fake("trencadis::layer_with_state", torch.empty_like, lib=_LIBRARY)
