"""HPU graphs: recorded once, replayed on the same memory.

Sources: ``habana_frameworks/torch/hpu/graphs.py``; ``HPUGraph.cpp`` of the bridge («step marker due
to HPUGraph::capture_begin», «graph Capture already in progress», «Capture in progress», «Mark User
Input Sizes is not same Replay Input Sizes»); and, for what a graph cannot contain,
https://docs.habana.ai/en/latest/PyTorch/Inference_on_PyTorch/Inference_Using_HPU_Graphs.html
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from gaudi_standin.bridge import BRIDGE
from gaudi_standin.program import FrozenProgram
from gaudi_standin.rules import GraphViolation
from gaudi_standin.tensor import check_in_place
from habana_frameworks.torch.hpu.streams import Stream, default_stream, stream

__all__ = ["HPUGraph", "graph", "wrap_in_hpu_graph", "wrap_in_hpu_graph_func"]


class HPUGraph:
    def __init__(self) -> None:
        self._programs: list[FrozenProgram] = []
        self._sizes: list[torch.Size] = []
        self._written: list[torch.Tensor] = []
        self._generation = 0

    def capture_begin(self, dry_run: bool = False) -> None:
        BRIDGE.begin_capture(dry_run=dry_run)

    def capture_end(self) -> None:
        self._programs = BRIDGE.end_capture()

    def replay(self, asynchronous: bool = False) -> None:
        """Run it again on what its input tensors hold now. A `StorageMoved` names no tensor."""
        self._run(())

    def _run(self, given: tuple[torch.Tensor, ...]) -> None:
        if BRIDGE.capturing:
            raise RuntimeError("GRAPH:: Capture in progress")
        BRIDGE.flush()
        for program in self._programs:
            check_in_place(any(allocation.moved for allocation in program.inputs))
        self._generation += 1
        if BRIDGE.compile_only:
            return
        BRIDGE.counters.launches += len(self._programs)
        BRIDGE.counters.replays += 1
        with torch.inference_mode(mode=False), torch.no_grad():
            for program in self._programs:
                program.run(given)
                BRIDGE.counters.move(program.traffic)
                for allocation in program.outputs:
                    allocation.generation = self._generation

    def replayV3(self, tlistI: list[torch.Tensor], asynchronous: bool = False) -> None:  # noqa: N803
        """Replay on these tensors, which must have the sizes of those marked at capture.

        Of a view a copy is taken unless it is contiguous (``HPUGraph.cpp:574-583``,
        ``habana_lazy/view_utils.cpp:551-620``): what is written to it would be lost.
        """
        for size, given in zip(self._sizes, tlistI, strict=True):
            if size != given.shape:
                raise RuntimeError(
                    "HPU GRAPH:: Mark User Input Sizes is not same Replay Input Sizes"
                )
        written = {number for program in self._programs for number in program.written}
        copied = {n for n, t in enumerate(tlistI) if t.is_view and not t.is_contiguous()}
        if written & copied:
            raise GraphViolation("a graph is given a view to write to: it would write to a copy")
        BRIDGE.counters.copied_bytes += sum(tlistI[number].nbytes for number in copied)
        BRIDGE.flush()
        self._run(tuple(BRIDGE.value_of(tensor).contiguous() for tensor in tlistI))
        self._written = [tlistI[number] for number in written]

    def mark_user_inputs(self, static_tlist: list[torch.Tensor]) -> None:
        if not BRIDGE.capturing:
            raise RuntimeError("GRAPH:: mark_user_inputs must be while capturing in progress")
        BRIDGE.mark_inputs(static_tlist)
        self._sizes = [tensor.shape for tensor in static_tlist]

    def mark_user_outputs(self, static_tlist: list[torch.Tensor]) -> None:
        """These stay between replays; all others are given back. So it is here anyway."""
        if BRIDGE.capturing:
            raise RuntimeError("GRAPH:: Capture in progress")

    def clear_inputs(self) -> None:
        """Let go of the inputs that the last replay wrote (``HPUGraph.cpp:211-219``)."""
        self._written = []

    def reset(self) -> None:
        """Forget what was captured. ``HPUGraph::destroy`` also ends whatever capture is open."""
        if BRIDGE.capturing:
            raise GraphViolation("a graph is destroyed while another is captured: it would end it")
        self._programs = []


class graph:  # noqa: N801 - the real one's name
    """``with torch.hpu.graph(g):`` captures into ``g`` on a stream of its own."""

    def __init__(
        self, hpu_graph: HPUGraph, stream: Stream | None = None, dry_run: bool = False
    ) -> None:
        self._graph = hpu_graph
        self._stream = stream or Stream()
        self._dry_run = dry_run
        self._on_stream: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._on_stream = stream(self._stream)
        self._on_stream.__enter__()
        self._graph.capture_begin(self._dry_run)

    def __exit__(self, *exc: Any) -> None:
        self._graph.capture_end()
        assert self._on_stream is not None
        self._on_stream.__exit__(*exc)


def wrap_in_hpu_graph_func(
    func: Callable[..., Any],
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> Callable[..., Any]:
    """A function that captures once for each shape of its inputs and replays after that.

    With ``disable_tensor_cache`` a replay reads the inputs where they lie (``replayV3``); without
    it they are copied to those of the capture (``wrapped_hpugraph_forward``, graphs.py:641-655).
    """
    return _Wrapped(func, disable_tensor_cache, dry_run, max_graphs)


def wrap_in_hpu_graph(
    module: torch.nn.Module,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
) -> torch.nn.Module:
    """``module`` with a forward that captures once for each shape, and ``clear_cache``."""
    wrapped = _Wrapped(module.forward, disable_tensor_cache, dry_run, max_graphs)

    @wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    module.forward = forward
    module.clear_cache = wrapped.graphs.clear
    return module


class _Wrapped:
    def __init__(
        self,
        func: Callable[..., Any],
        disable_tensor_cache: bool,
        dry_run: bool,
        max_graphs: int | None,
    ) -> None:
        self._func = func
        self._in_place = disable_tensor_cache
        self._dry_run = dry_run or disable_tensor_cache
        self._max_graphs = max_graphs
        self.graphs: dict[Any, tuple[HPUGraph, list[torch.Tensor], Any]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("bypass_hpu_graphs", False):
            return self._func(*args, **kwargs)
        key = _input_hash((args, kwargs))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)]
        if key not in self.graphs:
            if len(self.graphs) == self._max_graphs:
                return self._func(*args, **kwargs)
            self.graphs[key] = self._capture(tensors, args, kwargs)
        captured, marked, outputs = self.graphs[key]
        if self._in_place:
            captured.replayV3(tensors)
        else:
            for buffer, given in zip(marked, tensors, strict=True):
                buffer.copy_(given)
            captured.replay()
        return tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)

    def _capture(
        self, tensors: list[torch.Tensor], args: Any, kwargs: Any
    ) -> tuple[HPUGraph, list[torch.Tensor], Any]:
        captured = HPUGraph()
        with stream(default_stream()):
            captured.capture_begin(dry_run=True)
            if self._in_place:
                captured.mark_user_inputs(tensors)
            try:
                outputs = self._func(*args, **kwargs)
            finally:
                captured.capture_end()
        return captured, tensors, outputs


def _input_hash(inputs: Any) -> Any:
    return tuple(
        tuple(leaf.shape) if torch.is_tensor(leaf) else leaf for leaf in tree_leaves(inputs)
    )
