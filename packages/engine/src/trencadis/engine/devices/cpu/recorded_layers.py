"""The decoder layers of a decode step as a list of native calls, without Python between them.

A program is Python code that calls compiled kernels, and so are the operators that it calls. With
few sequences this code takes a third of a step. A decode step of so many sequences always makes
the same calls: the first is recorded, and later ones make its calls anew. This is to the CPU what a
captured graph is to other devices; nothing is set apart for it but what a layer computes.
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

from trencadis.engine.devices.cpu.attention import OF_CACHE, changing_arguments, check_status
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
from trencadis.engine.devices.inductor import generated_code
from trencadis.engine.models.decoder_layers import layer_inputs
from trencadis.engine.models.paged_context import DecodeContext, LayerCaches, LayerRun

logger = logging.getLogger("trencadis.engine")

_OPERATORS = frozenset(
    f"trencadis.{name}.default" for name in ("tiled_linear", "tiled_linears", "paged_attention")
)
"""What a program may call besides its own kernels: these note their native calls."""

_MOST_LISTS = 128
"""Call lists that are kept: one for each number of sequences and of threads."""


class _Forward(threading.local):
    """The forward pass of this thread: its result, if the first layer has computed all."""

    result: torch.Tensor | None = None
    first: Sequence[torch.Tensor] = ()
    returned: torch.Tensor | None = None


class RecordedLayers:
    """A `LayerRun` that computes all layers in the call of the first, where it can.

    ``run`` computes one layer by its program in ``programs``, with the weights in ``own``. Where a
    layer is computed by something that cannot be recorded, all steps are computed by ``run``.
    """

    def __init__(
        self,
        run: LayerRun,
        programs: Sequence[Callable[..., Any]],
        own: Sequence[Sequence[torch.Tensor]],
        replayer: Replayer,
    ) -> None:
        self._run = run
        self._programs = programs
        self._own = own
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
        forward.returned = self._run(layer, own, args, kwargs)
        return forward.returned

    def _check_chain(self, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See in one forward pass that each layer is given what the one before has returned."""
        forward, given = self._forward, layer_inputs(args, kwargs)
        if layer == 0:
            forward.first = given
        hidden = given[0] if layer == 0 else forward.returned
        expected = [hidden, *forward.first[1:]]
        is_chained = len(given) == len(expected) and all(map(operator.is_, given, expected))
        if not is_chained or not args or args[0] is not given[0]:
            self._refuse(
                "its layers are given different tensors, or something is computed between them"
            )
        elif layer == len(self._programs) - 1:
            self._is_chain = True
            forward.first, forward.returned = (), None

    def _compute_all(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The result of the last layer; None where the layers are to be computed one by one."""
        paged = kwargs["paged"]
        if self._refused or not self._is_chain or not isinstance(paged, DecodeContext):
            return None
        if not self._lock.acquire(blocking=False):  # another thread has the scratch memory
            return None
        try:
            given = layer_inputs(args, kwargs)
            key = (given[0].shape, torch.get_num_threads())
            calls = self._lists.get(key)
            if calls is None:
                return self._record(key, given, args, kwargs)
            status, result = calls.run(given, self._changing_arguments(paged))
            check_status(status)
            return result
        finally:
            self._lock.release()

    def _changing_arguments(self, paged: DecodeContext) -> npt.NDArray[np.int64]:
        """What attention is given in this step: a row for each layer."""
        if self._cache() is not paged.cache:
            layers = range(len(self._own))
            rows = [changing_arguments(layer, paged) for layer in layers]
            self._changing = np.array(rows, dtype=np.int64)
            self._cache = weakref.ref(paged.cache)
        else:
            # Layers differ in their part of the cache alone.
            self._changing[:, OF_CACHE:] = changing_arguments(0, paged)[OF_CACHE:]
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
        calls = CallList(weights, self._replayer, self._scratch)
        result = given[0]
        try:
            with _noted_kernels(self._programs), _OnlyOperators() as operators:
                for layer in range(len(self._own)):
                    with recorded() as recording:
                        result = self._run(layer, _unused, (result, *args[1:]), kwargs)
                    operators.check()
                    calls.add(recording, given, result)
            calls.finish()
            self._try(calls, given, kwargs["paged"], result)
        except NotRecordable as error:
            self._refuse(str(error))
            return None  # computed again: a layer writes to the cache what it has written before
        if len(self._lists) >= _MOST_LISTS:
            self._lists.clear()
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
        changing = self._changing_arguments(paged)
        if calls.num_changing != len(changing):
            raise NotRecordable("a layer does not attend once")
        self._scratch.clear()
        status, result = calls.run(given, changing)
        check_status(status)
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
            raise NotRecordable("a kernel takes a number that is no integer")
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        note(
            function,
            [Address(x.data_ptr()) if isinstance(x, torch.Tensor) else x for x in arguments],
            tensors,
        )

    return call


def _unused(*_: Any, **__: Any) -> None:
    raise AssertionError("a layer is computed by its program")
