"""Compiles the decoder layers of a model: one program per shape, used by all layers.

All decoder layers compute the same function with different weights. One layer is traced with
weights and cache as inputs; the compiled program serves every layer, so compilation is faster by
the number of layers. ``paged.layer_run`` selects the program for a forward pass.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from trencadis.engine.errors import ModelError
from trencadis.engine.models.attention_operator import forward_pass
from trencadis.engine.models.paged_context import (
    DecodeContext,
    LayerCaches,
    LayerRun,
    PagedContext,
    is_operator,
    paged_tensors,
)

Program = Callable[..., Any]


class DecoderLayers:
    """Finds a model's decoder layers and makes them use ``paged.layer_run``.

    Raises `ModelError` if the layers differ in type, shapes or settings (as where some layers alone
    have rotary embeddings), since they cannot share a program.
    """

    def __init__(self, model: nn.Module, caches: LayerCaches) -> None:
        layers = decoder_layers(model)
        if not layers:
            raise ModelError(f"{type(model).__name__} names no decoder layers, to be compiled")
        self._names = tuple(_tensors(layers[0]))
        self._weights = [tuple(_tensors(layer).values()) for layer in layers]
        self._block_size = caches.block_size
        self._caches = [(caches.key(i), caches.value(i)) for i in range(len(layers))]
        self._check_alike(layers)
        self.tensor_ids = frozenset(id(t) for own in self._weights for t in own)
        """Identities of the layers' weights."""
        # Tracing replaces the tensors of the layer for a while, so it uses a copy of the layer.
        shared = {id(tensor): tensor for tensor in self._weights[0]}
        self._traced = copy.deepcopy(layers[0], shared)
        for number, layer in enumerate(layers):
            layer.forward = functools.partial(_forward, number, layer.forward)

    def trace(self, recording: Recording) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        """The first layer of a recorded forward pass as a module, and its example inputs."""
        inputs = [*recording.inputs(), *self._own(0, recording.paged)]
        given = len(recording.inputs())

        def run(*tensors: torch.Tensor) -> Any:
            own = tensors[given:]
            caches = self._traced_caches(recording, own[len(self._names) :])
            args, kwargs = recording.arguments(iter(tensors[:given]), caches)
            weights = dict(zip(self._names, own, strict=False))
            result = torch.func.functional_call(self._traced, weights, args, kwargs)
            if not isinstance(result, torch.Tensor):
                raise ModelError(
                    f"a decoder layer returns {type(result).__name__} where one tensor was "
                    "expected: serve this model without --compile"
                )
            return result

        return make_fx(run, tracing_mode="fake")(*inputs), inputs

    def run_with(self, program: Program, recording: Recording) -> LayerRun:
        """A layer run that calls ``program`` with each layer's tensors."""
        own = self.own_tensors(recording)

        def run(
            layer: int, _: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            with forward_pass(kwargs["paged"], layer):
                return single(program(*_inputs(args, kwargs), *own[layer]))

        return run

    def own_tensors(self, recording: Recording) -> list[tuple[torch.Tensor, ...]]:
        """For each layer, its weights and its KV cache: the last inputs of the layer's program."""
        return [self._own(number, recording.paged) for number in range(len(self._weights))]

    def _own(self, number: int, paged: PagedContext | None) -> tuple[torch.Tensor, ...]:
        """A layer's weights and its KV cache, cut to the prefix that a decode step reads.

        A program is compiled for one number of blocks. The size of the whole cache changes with
        the free memory at start, the size of a prefix does not. Prefill gathers blocks, and so does
        decode that reads no prefix: they see the whole cache. A cache of token rows is not cut:
        Gaudi updates no view in place. Where attention is an operator, the cache is no input.
        """
        if is_operator(paged):
            return self._weights[number]
        prefix_blocks = (paged.prefix_blocks or None) if isinstance(paged, DecodeContext) else None
        caches = (cache[:prefix_blocks] for cache in self._caches[number])
        return (*self._weights[number], *caches)

    def _traced_caches(self, recording: Recording, caches: Sequence[torch.Tensor]) -> LayerCaches:
        if recording.paged is not None and is_operator(recording.paged):
            return recording.paged.cache
        return _OneLayer(self._block_size, *caches)

    def _check_alike(self, layers: Sequence[nn.Module]) -> None:
        first = [(tensor.shape, tensor.dtype) for tensor in self._weights[0]]
        first_values = _plain_values(layers[0])
        for number, layer in enumerate(layers):
            shapes = [(tensor.shape, tensor.dtype) for tensor in self._weights[number]]
            is_alike = type(layer) is type(layers[0]) and shapes == first
            if not is_alike or _plain_values(layer) != first_values:
                raise ModelError(
                    f"decoder layer {number} differs from layer 0, and one compiled program "
                    "cannot serve both: serve this model without --compile"
                )


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a model of transformers, in order; none if it does not name them."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


class LayersReached(Exception):
    """A recorded forward pass has reached its first decoder layer."""


@attrs.define(eq=False)
class Recording:
    """A layer run that records the arguments of the first layer, and ends the forward pass there.

    It raises `LayersReached`, so that nothing of the layers runs eagerly.
    """

    paged: PagedContext | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = attrs.field(factory=dict)

    def __call__(
        self, layer: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.paged, self.args, self.kwargs = kwargs["paged"], args, kwargs
        raise LayersReached

    def inputs(self) -> list[torch.Tensor]:
        """The tensors among the recorded arguments."""
        return _inputs(self.args, self.kwargs)

    def arguments(
        self, tensors: Iterator[torch.Tensor], caches: LayerCaches
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The recorded arguments with their tensors replaced by ``tensors``, in order."""
        args = tuple(_replaced(value, tensors, caches) for value in self.args)
        kwargs = {name: _replaced(value, tensors, caches) for name, value in self.kwargs.items()}
        return args, kwargs


@attrs.frozen(eq=False)
class _OneLayer:
    """The KV cache of the layer that is being traced. Ignores the layer index."""

    block_size: int
    keys: torch.Tensor
    values: torch.Tensor

    def key(self, layer: int) -> torch.Tensor:
        del layer
        return self.keys

    def value(self, layer: int) -> torch.Tensor:
        del layer
        return self.values


def _forward(number: int, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    run: LayerRun | None = kwargs["paged"].layer_run
    return own(*args, **kwargs) if run is None else run(number, own, args, kwargs)


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
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


def _plain_values(layer: nn.Module) -> dict[tuple[str, str], Any]:
    """The settings that are attributes of a layer and its modules, without the layer's index."""
    return {
        (module_name, name): value
        for module_name, module in layer.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, (bool, int, float, str, type(None))) and name != "layer_idx"
    }


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def single(result: Any) -> Any:
    """The one result of a program, which may come in a sequence."""
    return result[0] if isinstance(result, (list, tuple)) else result
