"""Graphs of lazy mode, which hold no weights, no cache and no results."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trencadis.engine.devices.device import Graph
from trencadis.engine.devices.hpu.bridge import Bridge
from trencadis.engine.devices.recorded import check_inputs, new_aliases, own_buffers
from trencadis.engine.errors import GraphError

logger = logging.getLogger("trencadis.engine")

_Size = tuple[torch.Size, torch.dtype]

Results = weakref.WeakValueDictionary[tuple[int, _Size], torch.Tensor]
"""Buffers of results, by their place in a result and their size, while a graph has them."""


class HPUGraph(Graph):
    """A graph of the bridge, for inputs of one shape, which it reads where they lie.

    It must not contain copies to or from the host, shapes or branches that depend on values, or
    in-place updates of views:
    https://docs.habana.ai/en/latest/PyTorch/Inference_on_PyTorch/Inference_Using_HPU_Graphs.html
    It is captured and replayed as those of vllm-gaudi, which keep no tensors of their own between
    replays (``vllm_gaudi/v1/worker/hpu_model_runner.py:1093-1096``; ``wrapped_hpugraph_forward`` of
    the bridge, ``hpu/graphs.py:592-657``), but for what that wrapper does for each tensor in each
    replay. The bridge does not hold inputs that are marked as the user's, and each replay takes
    those that it is given (``habana_lazy/lazy_executor.cpp:140-168``, ``HPUGraph.cpp:540-545,
    567-592``): so are ``own``.

    The bridge keeps what a graph makes until its next replay (``hpu_lazy_tensors.cpp:1569-1577``):
    66 MB for the scores of 128 sequences and 128,256 tokens. With ``results``, the graph writes
    them into buffers from there, which all graphs share, and which are marked as inputs too.
    """

    def __init__(
        self,
        bridge: Bridge,
        run: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor] = (),
        results: Results | None = None,
    ) -> None:
        self._recorded = [(tuple(t.shape), t.dtype) for t in inputs]
        self._results = results
        self._sizes: tuple[_Size, ...] = ()
        self._buffers: tuple[torch.Tensor, ...] = ()
        self._device = inputs[0].device
        given = own_buffers(inputs)
        if results is not None:
            made = run(*given)  # for the sizes; the recipes are those of the capture
            self._is_tuple = not isinstance(made, torch.Tensor)
            self._sizes = tuple((each.shape, each.dtype) for each in _listed(made))
            del made
            self._take_buffers()
            bridge.core.mark_step()
        self._captured: Any = bridge.hpu.HPUGraph()
        with bridge.hpu.stream(bridge.hpu.default_stream()):
            self._captured.capture_begin(dry_run=True)
            try:
                self._captured.mark_user_inputs([*given, *own, *self._buffers])
                self._outputs = run(*given)
                if results is not None:
                    self._write_outputs()
            finally:
                self._captured.capture_end()
        kept = [] if self._outputs is None else _listed(self._outputs)
        self._captured.mark_user_outputs(kept)
        self.replay(given, own)
        bridge.core.mark_step()  # what follows is compiled apart from it, as in traffic

    def replay(self, inputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor] = ()) -> Any:
        if self._captured is None:
            raise GraphError("the graph was released: capture its shape again")
        check_inputs(self._recorded, inputs)
        self._take_buffers()
        self._captured.replayV3([*inputs, *own, *self._buffers])
        if self._results is None:
            return new_aliases(self._outputs)
        return new_aliases(self._buffers if self._is_tuple else self._buffers[0])

    def forget(self) -> None:
        """The bridge holds what a replay has written (``HPUGraph.cpp:211-219``)."""
        if self._captured is not None:
            self._captured.clear_inputs()
        self._buffers = ()

    def release(self) -> None:
        self._captured = self._outputs = None
        self._buffers = ()

    def _write_outputs(self) -> None:
        """Copy them in place (``habana_kernels/lazy_kernels.cpp:80-115``), and hold none."""
        for buffer, output in zip(self._buffers, _listed(self._outputs), strict=True):
            buffer.copy_(output)
        self._outputs = None

    def _take_buffers(self) -> None:
        if self._results is None or self._buffers:
            return
        taken = []
        for key in enumerate(self._sizes):
            buffer = self._results.get(key)
            if buffer is None:
                size, dtype = key[1]
                buffer = torch.empty(size, dtype=dtype, device=self._device)
                self._results[key] = buffer
            taken.append(buffer)
        self._buffers = tuple(taken)


def graphs_take_tensors(bridge: Bridge, device: torch.device) -> bool:
    """Whether a graph computes with the tensors that a replay is given, as the source says.

    A small graph reads a weight, writes rows of a cache, and is replayed on others of both.
    """

    def made(value: float) -> list[torch.Tensor]:
        return [torch.full((2, 3), value).to(device), torch.zeros(4, 3).to(device)]

    def run(rows: torch.Tensor) -> torch.Tensor:
        weight, cache = held
        return cache.index_copy_(0, rows, weight * 2).sum(1)

    try:
        rows = torch.tensor([3, 1]).to(device)
        held = made(1.0)
        graph = HPUGraph(bridge, run, [rows], held, weakref.WeakValueDictionary())
        for value in (3.0, 5.0):
            held = made(value)
            found = graph.replay([rows], held).cpu().tolist(), held[1].cpu().tolist()
            full = 2 * value
            if found != ([0, 3 * full, 0, 3 * full], [[0.0] * 3, [full] * 3] * 2):
                logger.warning("HPU graphs are captured again after a sleep: one gave %s", found)
                return False
    except RuntimeError as error:
        logger.warning("HPU graphs are captured again after a sleep: %s", error)
        return False
    return True


def _listed(outputs: torch.Tensor | tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
