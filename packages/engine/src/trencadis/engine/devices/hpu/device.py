"""The Intel Gaudi device, in lazy mode or in eager mode with ``torch.compile``.

Lazy mode collects operations until ``mark_step`` and captures HPU graphs. Eager mode runs
operations at once and compiles modules. Graphs need the first mode, compilation the second.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from trencadis.engine.devices.device import Device, Graph, PendingCopy
from trencadis.engine.devices.hpu.bridge import load_bridge
from trencadis.engine.devices.hpu.kernels import use_fused_kernels
from trencadis.engine.devices.recorded import RecordedGraph, own_buffers
from trencadis.engine.errors import DeviceError

logger = logging.getLogger("trencadis.engine")


class HPUDevice(Device):
    """The Gaudi that the bridge assigns to this process.

    ``recipe_cache``: directory for compiled recipes. Raises `DeviceError` if there is no Gaudi or
    its software does not load.
    """

    name = "hpu"
    preferred_dtype = torch.bfloat16
    default_kv_cache_memory = None
    dynamic_shapes = False
    updates_views = False
    temperature_source = "hlml"

    def __init__(self, recipe_cache: Path | None = None) -> None:
        self._bridge = load_bridge(recipe_cache)
        self.torch_device = torch.device("hpu")
        self.supports_graphs = self._bridge.lazy
        mode = "lazy mode" if self._bridge.lazy else "eager mode with torch.compile"
        logger.info("Gaudi in %s (PT_HPU_LAZY_MODE)", mode)

    def free_memory(self) -> int:
        return int(self._bridge.hpu.mem_get_info()[0])

    def total_memory(self) -> int:
        return int(self._bridge.hpu.mem_get_info()[1])

    def synchronize(self) -> None:
        """Execute collected operations, then wait for the device."""
        self.mark_step()
        self._bridge.hpu.synchronize()

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        # The bridge copies pageable memory to a buffer of its own before it returns, and does not
        # wait for the transfer (backend/synapse_helpers/device.cpp, copy_data_to_device_, 1177).
        return host.to(self.torch_device, non_blocking=True)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PendingCopy:
        # In lazy mode the bridge waits unless the destination is pinned, and executes what is
        # collected first (habana_kernels/lazy_kernels.cpp, copy_hpu_lazy_D2H, 823 and 846).
        copies = [torch.empty(t.shape, dtype=t.dtype).pin_memory("hpu") for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        arrived = self._bridge.hpu.Event()
        arrived.record()
        return PendingCopy(copies, arrived.synchronize)

    def mark_step(self) -> None:
        if self._bridge.lazy:
            self._bridge.core.mark_step()

    def optimize(self, model: nn.Module) -> None:
        """Use Intel's fused kernels where they give the model's own results."""
        use_fused_kernels(model, self.torch_device)

    def capture(self, run: Callable[..., torch.Tensor], inputs: Sequence[torch.Tensor]) -> Graph:
        """Capture ``run(*inputs)`` as an HPU graph, running it once.

        A graph must not contain copies to or from the host, shapes or branches that depend on
        values, or in-place updates of views:
        https://docs.habana.ai/en/latest/PyTorch/Inference_on_PyTorch/Inference_Using_HPU_Graphs.html
        Raises `DeviceError` outside lazy mode.
        """
        if not self.supports_graphs:
            raise DeviceError("HPU graphs need the bridge's lazy mode: set PT_HPU_LAZY_MODE=1")
        buffers = own_buffers(inputs)
        graph = self._bridge.hpu.HPUGraph()
        with self._bridge.hpu.graph(graph):
            output = run(*buffers)
        return RecordedGraph(buffers, output, graph.replay, graph.reset)

    def compiler_missing(self) -> str | None:
        if self._bridge.lazy:
            return "the bridge's eager mode: set PT_HPU_LAZY_MODE=0"
        return None

    def keep_compiled(self, directory: Path) -> None:
        """Nothing to do: the bridge caches recipes in the directory given when it was loaded."""

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """A module that the bridge's backend compiles in its first call.

        Raises `DeviceError` in lazy mode, which does not support ``torch.compile``
        (``vllm_gaudi/platform.py``, ``set_torch_compile``).
        """
        missing = self.compiler_missing()
        if missing is not None:
            raise DeviceError(f"torch.compile on Gaudi needs {missing}")
        return torch.compile(module, backend="hpu_backend", dynamic=False)

    def num_compilations(self) -> int:
        return self._bridge.num_compilations()
