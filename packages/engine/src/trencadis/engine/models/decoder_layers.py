"""The decoder layers of a model, compiled once per shape for all of them.

All layers of a decoder compute the same function of other weights. Traced with weights and cache
as inputs, one of them gives a program that serves every layer, which compiles as many times faster
as there are layers. Whose program a forward runs is in its context (``paged.layer_run``).
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
from trencadis.engine.models.paged_context import (
    DecodeContext,
    LayerCaches,
    LayerRun,
    PagedContext,
    paged_tensors,
)

Program = Callable[..., Any]


class DecoderLayers:
    """Finds a model's decoder layers, and makes them heed ``paged.layer_run``.

    Raises `ModelError` where the layers are not all alike: one program cannot serve them then.
    """

    def __init__(self, model: nn.Module, caches: LayerCaches) -> None:
        kinds = set(getattr(model, "_no_split_modules", None) or ())
        layers = [module for module in model.modules() if type(module).__name__ in kinds]
        if not layers:
            raise ModelError(f"{type(model).__name__} names no decoder layers, to be compiled")
        self._names = tuple(_tensors(layers[0]))
        self._weights = [tuple(_tensors(layer).values()) for layer in layers]
        self._caches = [(caches.key(i), caches.value(i)) for i in range(len(layers))]
        self._check_alike(layers)
        # Tracing puts other tensors into the layer for a while, so it gets one of its own.
        shared = {id(tensor): tensor for tensor in self._weights[0]}
        self._traced = copy.deepcopy(layers[0], shared)
        for number, layer in enumerate(layers):
            layer.forward = functools.partial(_forward, number, layer.forward)

    def trace(self, recording: Recording) -> tuple[fx.GraphModule, list[torch.Tensor]]:
        """The first layer of a recorded forward as a function of tensors, and those it had."""
        inputs = [*recording.inputs(), *self._own(0, recording.prefix_blocks)]
        given = len(recording.inputs())

        def run(*tensors: torch.Tensor) -> Any:
            own = tensors[given:]
            caches = _OneLayer(*own[len(self._names) :])
            args, kwargs = recording.arguments(iter(tensors[:given]), caches)
            weights = dict(zip(self._names, own, strict=False))
            return torch.func.functional_call(self._traced, weights, args, kwargs)

        return make_fx(run, tracing_mode="fake")(*inputs), inputs

    def run_with(self, program: Program, prefix_blocks: int | None) -> LayerRun:
        """A layer run that calls ``program`` with each layer's tensors."""
        own = [self._own(number, prefix_blocks) for number in range(len(self._weights))]

        def run(
            layer: int, _: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> Any:
            return _single(program(*_inputs(args, kwargs), *own[layer]))

        return run

    def _own(self, number: int, prefix_blocks: int | None) -> tuple[torch.Tensor, ...]:
        """A layer's weights and its cache, which decoding sees as far as it reads it.

        A program is for one number of blocks, and that of the whole cache changes with the memory
        that is free at start; a prefix's does not.
        """
        caches = (cache[:prefix_blocks] for cache in self._caches[number])
        return (*self._weights[number], *caches)

    def _check_alike(self, layers: Sequence[nn.Module]) -> None:
        first = [(tensor.shape, tensor.dtype) for tensor in self._weights[0]]
        for number, layer in enumerate(layers):
            shapes = [(tensor.shape, tensor.dtype) for tensor in self._weights[number]]
            if type(layer) is not type(layers[0]) or shapes != first:
                raise ModelError(
                    f"decoder layer {number} differs from layer 0, and one compiled program "
                    "cannot serve both: serve this model without --compile"
                )


@attrs.define(eq=False)
class Recording:
    """A layer run that computes as the model does, and keeps what the first layer was given."""

    paged: PagedContext | None = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = attrs.field(factory=dict)

    def __call__(
        self, layer: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = own(*args, **kwargs)
        if not isinstance(result, torch.Tensor):
            raise ModelError(
                f"a decoder layer returns {type(result).__name__} where one tensor was expected: "
                "serve this model without --compile"
            )
        if layer == 0:
            self.paged, self.args, self.kwargs = kwargs["paged"], args, kwargs
        return result

    @property
    def prefix_blocks(self) -> int | None:
        """Blocks of the cache that the forward reads; None where it may be any."""
        return self.paged.prefix_blocks if isinstance(self.paged, DecodeContext) else None

    def inputs(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return _inputs(self.args, self.kwargs)

    def arguments(
        self, tensors: Iterator[torch.Tensor], caches: LayerCaches
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors in them."""
        args = tuple(_replaced(value, tensors, caches) for value in self.args)
        kwargs = {name: _replaced(value, tensors, caches) for name, value in self.kwargs.items()}
        return args, kwargs


@attrs.frozen(eq=False)
class _OneLayer:
    """The cache of the layer that is being traced, whatever its number."""

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
    """Every tensor of a layer's arguments, in an order that depends on the model alone."""
    found: list[torch.Tensor] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            found.extend(value)
        elif isinstance(value, PagedContext):
            found.extend(getattr(value, name) for name in paged_tensors(value))
    return found


def _replaced(value: Any, tensors: Iterator[torch.Tensor], caches: LayerCaches) -> Any:
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, tuple):
        return tuple(next(tensors) for _ in value)
    if isinstance(value, PagedContext):
        changes: dict[str, Any] = {name: next(tensors) for name in paged_tensors(value)}
        return attrs.evolve(value, cache=caches, layer_run=None, **changes)
    return value


def _tensors(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def _single(result: Any) -> Any:
    return result[0] if isinstance(result, (list, tuple)) else result
