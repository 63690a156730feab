"""The decoder layers of a decode step as a list of native calls, without Python between them.

A program is Python code that calls compiled kernels, and so are the operators that it calls. With
few sequences this code takes a third of a step. Decode steps of the same number of sequences make
the same calls: the first is recorded, and later ones make its calls again, as other devices replay
a captured graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import operator
import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from types import BuiltinFunctionType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trencadis.engine.devices.cpu.attention import OF_CACHE, changing_arguments
from trencadis.engine.devices.cpu.native_calls import (
    Address,
    CallList,
    NotRecordable,
    Replayer,
    Scratch,
    address_of,
    note,
    recorded,
)
from trencadis.engine.devices.cpu.native_kernel import no_memory
from trencadis.engine.devices.inductor import generated_code
from trencadis.engine.models.decoder_layers import layer_inputs
from trencadis.engine.models.layer_spec import LayerSpec
from trencadis.engine.models.paged_context import DecodeContext, LayerCaches, LayerRun, PagedContext
from trencadis.engine.models.state_layers import StateLayers

logger = logging.getLogger("trencadis.engine")

_OPERATORS = frozenset(
    f"trencadis.{name}.default"
    for name in (
        *("add_adapters", "largest_of_rows", "layer_with_state", "paged_attention"),
        *("plain_product", "tiled_experts", "tiled_linear", "tiled_linears"),
    )
)
"""What a program may call besides its own kernels: these note their native calls."""

_OF_STATE = 4
"""Changing arguments of a layer with a state: the addresses of its parts and of their places."""

_MOST_LISTS = 512
"""Call lists that are kept: one for each number of sequences and of threads."""


def _nothing() -> None:
    """What a weak reference gives once its object is gone."""


class _Forward(threading.local):
    """The forward pass of this thread: its result, if the first layer has computed all.

    The others are of the pass in which `RecordedLayers` sees whether the layers are a chain: what
    the first layer was given, what the last call has returned, a copy of it, the layer that is
    expected, and the input of the layer before, which the model may not keep.
    """

    def __init__(self) -> None:
        self.result: torch.Tensor | None = None
        self.first: Sequence[torch.Tensor] = ()
        self.returned: torch.Tensor | None = None
        self.copy: torch.Tensor | None = None
        self.following = 0
        self.earlier: Callable[[], torch.Tensor | None] = _nothing


class RecordedLayers:
    """A `LayerRun` that computes all layers in the call of the first, where it can.

    ``run`` computes one layer by its program in ``programs``, with the weights in ``own``, and
    attends as ``specs`` say, or advances ``states``. Where a layer is computed by something that
    cannot be recorded, all steps are computed by ``run``.
    """

    def __init__(
        self,
        run: LayerRun,
        programs: Sequence[Callable[..., Any]],
        own: Sequence[Sequence[torch.Tensor]],
        specs: Sequence[LayerSpec],
        replayer: Replayer,
        states: StateLayers | None = None,
    ) -> None:
        self._run = run
        self._programs = programs
        self._own = own
        self._specs = specs
        self._states = states
        self._with_state = [] if states is None else states.numbers
        self._attending = [layer for layer in range(len(own)) if layer not in self._with_state]
        self._limited = [(layer, spec) for layer, spec in enumerate(specs) if spec.has_limits]
        self._replayer = replayer
        self._scratch = Scratch()
        self._lists: dict[Hashable, CallList] = {}
        self._cache: Callable[[], LayerCaches | None] = lambda: None
        self._changing = np.zeros((len(own), 0), np.int64)
        self._lock = threading.Lock()
        self._forward = _Forward()
        self._is_chain = False
        self._refused = False

    def __call__(
        self, layer: int, own: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        forward = self._forward
        if layer == 0:
            forward.result = self._compute_all(args, kwargs)
        if forward.result is not None:
            return forward.result
        if self._refused or self._is_chain:
            return self._run(layer, own, args, kwargs)
        self._check_chain(layer, args, kwargs)
        forward.earlier = weakref.ref(args[0]) if layer and args else _nothing
        result = self._run(layer, own, args, kwargs)
        if not self._refused and not self._is_chain:
            forward.returned, forward.copy = result, result.clone()
        return result

    def _check_chain(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See in one forward pass that the model does nothing but pass on what layers return.

        Each layer has to be given what the one before has returned, unchanged, and the model must
        not keep what layers were given: it could add that to what a later layer returns.
        """
        forward, given = self._forward, layer_inputs(args, kwargs)
        if layer == 0:
            forward.first, forward.following, forward.earlier = given, 0, _nothing
        hidden = given[0] if layer == 0 else forward.returned
        expected = [hidden, *forward.first[1:]]
        is_chained = (
            layer == forward.following
            and len(given) == len(expected)
            and all(map(operator.is_, given, expected))
            and bool(args)
            and args[0] is given[0]
            and (layer == 0 or _equal_bits(given[0], forward.copy))
            and forward.earlier() is None
        )
        forward.following += 1
        if not is_chained:
            self._refuse("its layers are given different tensors, or something else uses these")
        elif layer == len(self._programs) - 1:
            self._is_chain = True
        if not is_chained or self._is_chain:
            forward.first, forward.returned, forward.copy = (), None, None

    def _compute_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The result of the last layer; None where the layers are to be computed one by one."""
        paged = kwargs["paged"]
        if self._refused or not self._is_chain or not isinstance(paged, DecodeContext):
            return None
        if not self._lock.acquire(blocking=False):  # another thread has the scratch memory
            return None
        try:
            given = layer_inputs(args, kwargs)
            if paged.adapter_rows is not None:
                given.append(paged.adapter_rows)
            key = (given[0].shape[1], torch.get_num_threads())
            calls = self._lists.get(key)
            if calls is None:
                return self._record(key, given, args, kwargs)
            return self._run_again(calls, given, paged)
        finally:
            self._lock.release()

    def replays(self, num_tokens: int) -> bool:
        """See `ReplayedLayers`."""
        return (num_tokens, torch.get_num_threads()) in self._lists

    def replay(self, given: Sequence[torch.Tensor], paged: PagedContext) -> torch.Tensor | None:
        """See `ReplayedLayers`."""
        calls = self._lists.get((given[0].shape[1], torch.get_num_threads()))
        if (
            not isinstance(paged, DecodeContext)
            or calls is None
            or not self._lock.acquire(blocking=False)
        ):
            return None
        try:
            return self._run_again(calls, given, paged)
        finally:
            self._lock.release()

    def _run_again(
        self, calls: CallList, given: Sequence[torch.Tensor], paged: DecodeContext
    ) -> torch.Tensor:
        status, result = calls.run(given, self._changing_arguments(paged))
        if status:
            raise no_memory()
        return result

    def _changing_arguments(self, paged: DecodeContext) -> npt.NDArray[np.int64]:
        """What attention, or a layer's state, is given in this step: a row for each layer."""
        if self._cache() is not paged.cache:
            attends = {layer: changing_arguments(layer, paged) for layer in self._attending}
            most = max(map(len, attends.values()), default=_OF_STATE)
            self._changing = np.zeros((len(self._own), most), dtype=np.int64)
            for layer, row in attends.items():
                self._changing[layer] = row
            if self._states is not None:
                for layer in self._with_state:
                    self._changing[layer, :OF_CACHE] = self._states.addresses(layer)
            self._cache = weakref.ref(paged.cache)
        elif self._attending:
            # Layers of one window differ in their part of the cache alone.
            row = changing_arguments(self._attending[0], paged)
            layers = self._attending if self._with_state else slice(None)
            self._changing[layers, OF_CACHE:] = row[OF_CACHE:]
        if self._states is not None:
            reads, writes = self._states.decode_places()
            self._changing[self._with_state, OF_CACHE] = reads.data_ptr()
            self._changing[self._with_state, OF_CACHE + 1 :] = writes.data_ptr()
        if paged.groups:
            for layer, spec in enumerate(self._specs):
                of_group = paged.groups[paged.group_of[layer]]
                self._changing[layer] = changing_arguments(layer, of_group.within(spec))
            return self._changing
        for layer, spec in self._limited:
            self._changing[layer] = changing_arguments(layer, paged.within(spec))
        return self._changing

    def _record(
        self,
        key: Hashable,
        given: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> torch.Tensor | None:
        """Compute all layers one by one, and keep their calls if they can be made again."""
        weights = (tensor for own in self._own for tensor in own)
        result = given[0]
        try:
            calls = CallList(weights, self._replayer, self._scratch)
            with _noted_kernels(self._programs), _OnlyOperators() as operators:
                for layer in range(len(self._own)):
                    with recorded() as recording:
                        result = self._run(layer, _unused, (result, *args[1:]), kwargs)
                    operators.check()
                    calls.add(recording, given, result)
                    if calls.num_changing != layer + 1:
                        raise NotRecordable("a layer does not attend, or advance a state, once")
            if result.isnan().any():
                return result  # which equals nothing: a later step is recorded
            calls.finish()
            self._try(calls, given, kwargs["paged"], result)
        except NotRecordable as error:
            self._refuse(str(error))
            return None  # computed again: a layer writes to the cache what it has written before
        except MemoryError:
            return None
        if len(self._lists) >= _MOST_LISTS:
            del self._lists[next(iter(self._lists))]
        self._lists[key] = calls
        return result

    def _try(
        self,
        calls: CallList,
        given: Sequence[torch.Tensor],
        paged: DecodeContext,
        expected: torch.Tensor,
    ) -> None:
        """Raise `NotRecordable` where the calls do not compute what the programs have computed."""
        self._scratch.clear()
        status, result = calls.run(given, self._changing_arguments(paged))
        if status:
            raise no_memory()
        if not torch.equal(result, expected):
            raise NotRecordable("the same calls have computed another result")

    def _refuse(self, reason: str) -> None:
        self._refused = True
        self._lists.clear()
        logger.info("Decode steps are not recorded, and slower with few sequences: %s", reason)


class _OnlyOperators(TorchDispatchMode):
    """Sees which operators are called; `check` raises `NotRecordable` for one that is not known."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._others: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if str(func) not in _OPERATORS:
            self._others.add(str(func))
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        if self._others:
            raise NotRecordable(f"a layer calls {', '.join(sorted(self._others))}")


@contextlib.contextmanager
def _noted_kernels(programs: Sequence[Callable[..., Any]]) -> Generator[None, None, None]:
    """Within this context, the kernels that Inductor has compiled for programs note their calls."""
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for program in {id(program): program for program in programs}.values():
            names = generated_code(program)
            if names is None:
                raise NotRecordable("the generated code of a program is not found")
            for name, value in list(names.items()):
                if isinstance(value, torch.Tensor):
                    raise NotRecordable("a program has a constant tensor")
                if isinstance(value, BuiltinFunctionType) and value.__name__ == "kernel":
                    replaced.append((names, name, value))
                    names[name] = _noted(value)
        yield
    finally:
        for names, name, value in replaced:
            names[name] = value


def _noted(kernel: Any) -> Callable[..., None]:
    """A kernel of Inductor, which notes its calls. Python calls a function that unpacks tensors."""
    function = address_of(ctypes.CDLL(kernel.__self__.__file__).kernel)

    def call(*arguments: torch.Tensor | int) -> None:
        kernel(*arguments)
        if not all(isinstance(argument, (torch.Tensor, int)) for argument in arguments):
            raise NotRecordable("a kernel takes a number that is not an integer")
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        note(
            function,
            [Address(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments],
            tensors,
        )

    return call


def _equal_bits(tensor: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and torch.equal(tensor.view(torch.uint8), other.view(torch.uint8))


def _unused(*_: Any, **__: Any) -> None:
    raise AssertionError("a layer is computed by its program")
