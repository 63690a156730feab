"""Compiles the decoder layers of a model: one program per shape, used by all layers of a kind.

Most models have layers of one kind: all compute the same function with different weights. One layer
of each kind is traced with weights and cache as inputs; the compiled program serves every layer of
that kind, so compilation is faster by the number of layers. ``paged.layer_run`` selects the
programs for a forward pass.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)

from trencadis.engine.errors import ModelError
from trencadis.engine.models.attention_operator import forward_pass
from trencadis.engine.models.layer_spec import LayerSpec, is_replaceable, spec_of
from trencadis.engine.models.paged_context import (
    DecodeContext,
    LayerCaches,
    LayerRun,
    PagedContext,
    is_operator,
    paged_tensors,
)
from trencadis.kvcache.state_cache import StateCache, StateKey

Program = Callable[..., Any]

MAX_KINDS = 4
"""Kinds of layers that are compiled. Where more layers differ, a start would compile for long."""


class DecoderLayers:
    """Finds a model's decoder layers and makes them use ``paged.layer_run``.

    Layers of equal type, shapes and settings are of one kind and share programs; every fourth layer
    without rotary embedding, for example, makes a second kind. ``num_kinds``: at most `MAX_KINDS`,
    else raises `ModelError`, as for a model that names no layers. ``num_layers``: all layers.
    """

    def __init__(self, model: nn.Module, caches: LayerCaches) -> None:
        layers = decoder_layers(model)
        if not layers:
            raise ModelError(f"{type(model).__name__} names no decoder layers, to be compiled")
        self.num_layers = len(layers)
        self.specs = [spec_of(layer) for layer in layers]
        self._weights = [tuple(tensors_of(layer).values()) for layer in layers]
        if any(map(_sorts_tokens, layers)) and not _is_bf16(layers[0]):
            raise ModelError(
                "layers with experts are compiled in bf16 alone, as PyTorch knows the shapes of "
                "their products for no other type: serve this model without --compile, or with "
                "--dtype bfloat16"
            )
        self._block_size = caches.block_size
        self.use_cache(caches)
        kinds: dict[Any, int] = {}
        self._kinds = [kinds.setdefault(_kind(layer), len(kinds)) for layer in layers]
        self.num_kinds = len(kinds)
        if self.num_kinds > MAX_KINDS:
            raise ModelError(
                f"the decoder layers are of {self.num_kinds} kinds, and {MAX_KINDS} at most are "
                "compiled: serve this model without --compile"
            )
        self.tensor_ids = frozenset(id(t) for own in self._weights for t in own)
        """Identities of the layers' weights."""
        self._examples = [self._kinds.index(kind) for kind in range(self.num_kinds)]
        # Tracing replaces the tensors of a layer for a while, so it uses a copy of the layer.
        self._traced = [_copy(layers[number]) for number in self._examples]
        self._layers = layers
        for number, layer in enumerate(layers):
            num_results = self.specs[number].results
            # Such layers return fp32, also for what the first one is given in bf16.
            widens = number == 0 and bool(getattr(layer, "residual_in_fp32", False))
            layer.forward = functools.partial(_forward, number, layer.forward, num_results, widens)

    @property
    def numbers(self) -> range:
        """Of all layers."""
        return range(self.num_layers)

    def use_cache(self, caches: LayerCaches) -> None:
        """Compute with another cache from now on.

        Of programs that there are, only where the cache is not an input, or is given with each
        batch (`CompiledForward`).
        """
        numbers = range(len(self._weights))
        self._caches = [(caches.key(number), caches.value(number)) for number in numbers]
        states: StateCache | None = getattr(caches, "states", None)
        self._states: list[dict[StateKey, torch.Tensor]] = [
            {} if states is None else states.parts_of(number) for number in numbers
        ]

    def release(self) -> None:
        """Give the layers their own ``forward`` back, so that others can compile them."""
        for layer in self._layers:
            del layer.forward

    def trace(self, recording: Recording, kind: int) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        """A layer of a kind as a module, called as in a recorded pass, and its example inputs."""
        number = self._examples[kind]
        inputs = [*recording.inputs(number), *self._own(number, recording.paged)]
        return make_fx(self._example(recording, kind), tracing_mode="fake")(*inputs), inputs

    def trace_for_any_tokens(
        self, recording: Recording, kind: int, num_tokens: int
    ) -> tuple[fx.GraphModule, list[torch.Tensor]] | None:
        """As `trace`, for every number of tokens from 2 on; None for a layer that depends on it.

        Where attention is an operator, tokens are the second dimension of what a layer is given.
        ``num_tokens`` is that of the recording. The inputs are fake tensors with a symbol there.
        """
        symbols = ShapeEnv()
        fake = FakeTensorMode(shape_env=symbols)
        with torch.inference_mode(mode=False), torch.no_grad():
            inputs: list[torch.Tensor] = [
                fake.from_tensor(
                    tensor.clone() if tensor.is_inference() else tensor,
                    symbolic_context=_tokens_as_symbol(tensor, num_tokens),
                    source=ConstantSource(f"given_{place}"),
                )
                for place, tensor in enumerate(recording.inputs(self._examples[kind]))
            ]
            own = self._own(self._examples[kind], recording.paged)
            inputs += [fake.from_tensor(tensor, static_shapes=True) for tensor in own]
            with fake, enable_python_dispatcher():
                traced = make_fx(self._example(recording, kind))(*inputs)
        return None if depends_on_symbols(inputs) else (traced, inputs)

    def _example(
        self, recording: Recording, kind: int
    ) -> Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]:
        """A layer of a kind as a function of the recorded tensors and of its own.

        Where it keeps a state, it returns the new one besides, in the order of its parts.
        """
        number, traced = self._examples[kind], self._traced[kind]
        given = len(recording.inputs(number))
        names = tuple(tensors_of(traced))
        states, num_results = self._states[number], self.specs[number].results

        def run(*tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
            own = tensors[given:]
            held = _LayerStates(dict(zip(states, own[len(own) - len(states) :], strict=True)))
            caches = self._traced_caches(recording, own[len(names) :], held)
            args, kwargs = recording.arguments(iter(tensors[:given]), caches, number)
            weights = dict(zip(names, own, strict=False))
            result = torch.func.functional_call(traced, weights, args, kwargs)
            if num_results is not None:
                result = result[0]
            if not isinstance(result, torch.Tensor):
                raise ModelError(
                    f"a decoder layer returns {type(result).__name__} where one tensor was "
                    "expected: serve this model without --compile"
                )
            if result.dtype is not tensors[0].dtype:
                raise ModelError(
                    f"a decoder layer returns {result.dtype} for {tensors[0].dtype}, and one "
                    "program cannot serve the layer after it too: serve this model without "
                    "--compile"
                )
            return (result, *held.written) if held.written else result

        return run

    def recording(self) -> Recording:
        """Records a forward pass up to the last layer."""
        return Recording(until=self.num_layers - 1, kinds=self._kinds)

    def of_layers(self, programs: Sequence[Program]) -> list[Program]:
        """The program of each layer, from that of each kind."""
        return [programs[kind] for kind in self._kinds]

    def run_with(self, programs: Sequence[Program], recording: Recording) -> LayerRun:
        """A layer run that calls the program of each layer's kind with the layer's tensors."""
        own, of_layers = self.own_tensors(recording.paged), self.of_layers(programs)

        def run(
            layer: int, _: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            with forward_pass(kwargs["paged"], layer, self.specs[layer]):
                return single(of_layers[layer](*layer_inputs(args, kwargs), *own[layer]))

        return run

    def own_tensors(self, paged: PagedContext | None = None) -> list[tuple[torch.Tensor, ...]]:
        """For each layer, its weights and its KV cache: the last inputs of the layer's program."""
        return [self._own(number, paged) for number in range(len(self._weights))]

    def _own(self, number: int, paged: PagedContext | None) -> tuple[torch.Tensor, ...]:
        """A layer's weights and its KV cache, cut to the prefix that a decode step reads.

        A program is compiled for one number of blocks. The size of the whole cache changes with
        the free memory at start, the size of a prefix does not. Prefill gathers blocks, and so does
        decode that reads no prefix: they see the whole cache. A cache of token rows is not cut:
        Gaudi updates no view in place. Where attention is an operator, the cache is not an input.
        """
        if is_operator(paged):
            return self._weights[number]
        prefix_blocks = (paged.prefix_blocks or None) if isinstance(paged, DecodeContext) else None
        caches = (cache[:prefix_blocks] for cache in self._caches[number])
        return (*self._weights[number], *caches, *self._states[number].values())

    def num_states(self, number: int) -> int:
        """The parts of a layer's state: so many of its tensors come last."""
        return len(self._states[number])

    def _traced_caches(
        self, recording: Recording, caches: Sequence[torch.Tensor], states: _LayerStates
    ) -> LayerCaches:
        if recording.paged is not None and is_operator(recording.paged):
            return recording.paged.cache
        return _OneLayer(self._block_size, caches[0], caches[1], states)


def depends_on_symbols(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether what was traced or compiled for these inputs holds for some sizes alone.

    A guard or a replacement of a symbol, from the trace or the compiler, says so.
    """
    environments = [x.fake_mode.shape_env for x in inputs if isinstance(x, FakeTensor)]
    return any(env is not None and (env.guards or env.replacements) for env in environments)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model of transformers, in order; none if it does not name them.

    Some models name parts of them, too.
    """
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    layers: list[nn.Module] = []
    inside: set[nn.Module] = set()
    for module in model.modules():
        if type(module).__name__ in kinds and module not in inside:
            layers.append(module)
            inside.update(module.modules())
    return layers


@contextlib.contextmanager
def one_layer_of_each_kind(model: nn.Module) -> Generator[None, None, None]:
    """Within this context the model computes the first layer of each kind and omits the others.

    For what a forward pass takes; its result means nothing.
    """
    kinds: set[Any] = set()
    omitted: list[nn.Module] = []
    further: tuple[Any, ...] | None = None
    """What a layer returns besides hidden states; None where it returns no tuple."""

    def note(_: nn.Module, __: Any, result: Any) -> None:
        nonlocal further
        further = result[1:] if isinstance(result, tuple) else None

    def omit(hidden: torch.Tensor, *_: Any, **__: Any) -> Any:
        return hidden if further is None else (hidden, *further)

    layers = decoder_layers(model)
    for layer in layers:
        if (kind := _kind(layer)) in kinds:
            layer.forward = omit
            omitted.append(layer)
        kinds.add(kind)
    hooks = [layer.register_forward_hook(note) for layer in layers[:1]]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for layer in omitted:
            del layer.forward


class LayersReached(Exception):
    """A recorded forward pass has reached its first decoder layer."""


@attrs.define(eq=False)
class Recording:
    """A layer run that records the arguments of the first layer, and ends the forward pass there.

    It raises `LayersReached`, so that nothing of the layers runs eagerly. With ``until`` the pass
    ends at this layer, and raises `ModelError` at one to which the model does not pass on what the
    layer before has returned, or that is given tensors of other forms than the first layer of its
    kind in ``kinds``. ``given``: the tensors of each layer that was reached; ``calls``: its
    arguments.
    """

    until: int = 0
    kinds: Sequence[int] = ()
    given: list[list[torch.Tensor]] = attrs.field(factory=list)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = attrs.field(factory=list)
    paged: PagedContext | None = None

    def __call__(
        self, layer: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.paged is None:
            self.paged = kwargs["paged"]
        given = layer_inputs(args, kwargs)
        self.given.append(given)
        self.calls.append((args, kwargs))
        first = self.given[self.kinds.index(self.kinds[layer]) if self.kinds else 0]
        forms = [[(tensor.shape, tensor.dtype) for tensor in each] for each in (given, first)]
        if forms[0] != forms[1] or given[0] is not self.given[0][0]:
            raise ModelError(
                f"decoder layer {layer} is given other tensors than the first one, beyond rotary "
                "embeddings of its own, and one program cannot serve both: serve this model "
                "without --compile"
            )
        if layer >= self.until:
            raise LayersReached
        return given[0]

    def distinct(self) -> list[torch.Tensor]:
        """Each tensor of the layers once, that of hidden states first."""
        return list({id(x): x for given in self.given for x in given}.values())

    def places(self) -> list[tuple[int, ...]]:
        """For each layer, where its tensors are in `distinct`."""
        numbers = {id(x): number for number, x in enumerate(self.distinct())}
        return [tuple(numbers[id(x)] for x in given) for given in self.given]

    def inputs(self, number: int = 0) -> list[torch.Tensor]:
        """The tensors among the arguments of a layer, or of the first where it was not reached."""
        return self.given[number if number < len(self.given) else 0]

    def arguments(
        self, tensors: Iterator[torch.Tensor], caches: LayerCaches, number: int = 0
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with their tensors replaced by ``tensors``, in order: see `inputs`."""
        args, kwargs = self.calls[number if number < len(self.calls) else 0]
        replaced = tuple(_replaced(value, tensors, caches) for value in args)
        named = {name: _replaced(value, tensors, caches) for name, value in kwargs.items()}
        return replaced, named


@attrs.frozen(eq=False)
class _LayerStates:
    """The state of the layer that is being traced, and what it writes. Ignores the layer index."""

    parts: dict[StateKey, torch.Tensor]
    written: list[torch.Tensor] = attrs.field(factory=list)

    def part(self, layer: int, key: StateKey) -> torch.Tensor:
        del layer
        return self.parts[key]

    def write(self, layer: int, key: StateKey, places: torch.Tensor, states: torch.Tensor) -> None:
        """Kept for the end of the forward pass: a program that reads a tensor copies it whole to
        change a part."""
        del layer, key, places
        self.written.append(states)


@attrs.frozen(eq=False)
class _OneLayer:
    """The KV cache of the layer that is being traced. Ignores the layer index."""

    block_size: int
    keys: torch.Tensor
    values: torch.Tensor
    states: _LayerStates

    def key(self, layer: int) -> torch.Tensor:
        del layer
        return self.keys

    def value(self, layer: int) -> torch.Tensor:
        del layer
        return self.values


def _forward(
    number: int,
    own: Callable[..., Any],
    num_results: int | None,
    widens: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``num_results``: the length of the tuple that the layer returns, see `LayerSpec`.

    ``widens``: hidden states are given in fp32.
    """
    run: LayerRun | None = kwargs["paged"].layer_run
    if run is None:
        return own(*args, **kwargs)
    if widens:
        args = (args[0].float(), *args[1:])
    hidden = run(number, own, args, kwargs)
    return hidden if num_results is None else (hidden, *[None] * (num_results - 1))


def layer_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Every tensor of a layer's arguments, in an order that depends only on the model."""
    tensors: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, tuple):
            tensors.extend(value)
        elif isinstance(value, PagedContext):
            tensors.extend(getattr(value, name) for name in paged_tensors(value))
    return tensors


def _replaced(value: Any, tensors: Iterator[torch.Tensor], caches: LayerCaches) -> Any:
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(next(tensors) for _ in value)
    if isinstance(value, PagedContext):
        changes: dict[str, Any] = {name: next(tensors) for name in paged_tensors(value)}
        return attrs.evolve(value, cache=caches, layer_run=None, **changes)
    return value


def _tokens_as_symbol(tensor: torch.Tensor, num_tokens: int) -> StatelessSymbolicContext[Any, Any]:
    """The second dimension is a symbol, the same one in all tensors, if it counts tokens."""
    counts_tokens = tensor.dim() > 1 and tensor.shape[:2] == (1, num_tokens)
    sizes = [DimDynamic.STATIC] * tensor.dim()
    if counts_tokens:
        sizes[1] = DimDynamic.DUCK
    return StatelessSymbolicContext(dynamic_sizes=sizes)


def _kind(layer: nn.Module) -> Any:
    """Equal for layers that compute the same function: type, tensors, and plain settings.

    Settings are the attributes of a layer and its modules, with the layer's spec
    and without its index.
    """
    tensors = tuple((name, x.shape, x.dtype) for name, x in tensors_of(layer).items())
    return type(layer), tensors, settings_of(layer, without=("layer_idx",))


def settings_of(module: nn.Module, without: Sequence[str] = ()) -> frozenset[Any]:
    """The plain attributes of a module and its modules, with their types and those of the modules.

    ``without``: names of attributes that are left out.
    """
    return frozenset(
        (module_name, type(part), name, type(value), value)
        for module_name, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float, str, type(None), LayerSpec)) and name not in without
    )


def _sorts_tokens(layer: nn.Module) -> bool:
    """Whether transformers computes each expert with its own tokens, as the device has no way."""
    experts: list[Any] = [module for module in layer.modules() if is_replaceable(module)]
    return any(each.config._experts_implementation == "grouped_mm" for each in experts)


def _is_bf16(layer: nn.Module) -> bool:
    return next(layer.parameters()).dtype is torch.bfloat16


def _copy(layer: nn.Module) -> nn.Module:
    """A copy of a layer that shares its tensors."""
    shared = {id(tensor): tensor for tensor in tensors_of(layer).values()}
    return copy.deepcopy(layer, shared)


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """The weights and buffers of a module, by name; tied ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def single(result: Any) -> Any:
    """The one result of a program, which may come in a sequence."""
    return result[0] if isinstance(result, (list, tuple)) else result
