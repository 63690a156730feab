"""The CUDA device: CUDA graphs with one shared memory pool."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from trencadis.engine.devices.device import Device, Graph, PendingCopy
from trencadis.engine.devices.inductor import InductorPrograms
from trencadis.engine.devices.recorded import RecordedGraph, own_buffers
from trencadis.engine.errors import DeviceError

_WARM_UP_RUNS = 3
"""Runs on a side stream before a capture, for libraries to initialise: PyTorch's notes on CUDA
graphs, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"""


class CUDADevice(Device):
    """The current GPU of the process. Raises `DeviceError` if PyTorch sees none."""

    name = "cuda"
    preferred_dtype = torch.bfloat16
    default_kv_cache_memory = None
    supports_graphs = True
    lists_programs = True
    temperature_source = "nvml"
    defaults = {"async_scheduling": True}  # noqa: RUF012 - as declared by `Device`

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise DeviceError(_what_is_missing())
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.sensor_indices = sensor_indices(torch.cuda.current_device(), os.environ)
        self._pool = torch.cuda.graph_pool_handle()
        self._programs = InductorPrograms()

    def free_memory(self) -> int:
        """Free memory of the driver, plus what PyTorch has reserved and not allocated."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        held = torch.cuda.memory_reserved(self.torch_device)
        return free + held - torch.cuda.memory_allocated(self.torch_device)

    def total_memory(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def product_name(self) -> str:
        return str(torch.cuda.get_device_name(self.torch_device))

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def peak_memory(self, run: Callable[[], object]) -> int:
        """The peak of PyTorch's tensors, which `free_memory` counts as free once they are gone.

        Memory that libraries have taken beside PyTorch is added.
        """
        device = self.torch_device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        taken = super().peak_memory(run)
        beside = max(0, taken - (torch.cuda.memory_allocated(device) - before))
        return beside + torch.cuda.max_memory_allocated(device) - before

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.pin_memory().to(self.torch_device, non_blocking=True)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> PendingCopy:
        copies = [torch.empty_like(t, device="cpu", pin_memory=True) for t in tensors]
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        return PendingCopy(copies, arrived.synchronize)

    def optimize(self, model: nn.Module) -> None:
        """Nothing to do: cuBLAS needs no special weight layout."""

    def capture(
        self,
        run: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor] = (),
    ) -> Graph:
        """Capture ``run(*inputs)`` as a CUDA graph.

        All graphs share a memory pool, so a result is valid only until any graph is replayed.
        """
        del own
        buffers = own_buffers(inputs)
        self._warm_up(run, buffers)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run(*buffers)
        return RecordedGraph(buffers, output, graph.replay, graph.reset)

    def compiler_missing(self) -> str | None:
        """Triton, which Inductor generates code for."""
        if importlib.util.find_spec("triton") is None:
            return "Triton: pip install triton"
        return None

    def keep_compiled(self, directory: Path, *, trusted: bool = False) -> None:
        self._programs.keep(directory, trusted=trusted)

    def is_kept(self, module: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        return self._programs.is_kept(module, inputs)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return self._programs.compile(module, inputs)

    def num_compilations(self) -> int:
        return self._programs.compiled

    def _warm_up(self, run: Callable[..., torch.Tensor], buffers: tuple[torch.Tensor, ...]) -> None:
        side = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_RUNS):
                run(*buffers)
        torch.cuda.current_stream(self.torch_device).wait_stream(side)


def sensor_indices(device: int, environ: Mapping[str, str]) -> tuple[int, ...] | None:
    """The index of CUDA device ``device`` in NVML, which lists every GPU of the machine.

    None if ``CUDA_VISIBLE_DEVICES`` names GPUs otherwise than by numbers.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return (device,)
    names = [name.strip() for name in visible.split(",")]
    return (int(names[device]),) if device < len(names) and names[device].isdecimal() else None


def _what_is_missing() -> str:
    if torch.version.cuda is None:
        return (
            "device cuda needs a PyTorch that is built for CUDA, and this one is not: install it "
            "from https://pytorch.org/get-started/locally, or choose another device"
        )
    return (
        "device cuda: PyTorch sees no GPU: check `nvidia-smi` and install NVIDIA's driver, or "
        "choose another device"
    )
