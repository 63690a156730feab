"""A CPU that stands for a device with memory of its own, graphs and programs.

It runs what it has captured or compiled again as it is, so tokens are those of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from trencadis.engine.devices import CPUDevice, Graph
from trencadis.engine.devices.recorded import RecordedGraph, own_buffers
from trencadis.engine.models.block_attention import BlockAttention


class CapturingCPU(CPUDevice):
    """Captures graphs; compiles each program for its shapes, which it counts.

    ``num_graphs``: those that are not released.
    """

    shares_host_memory = False
    supports_graphs = True

    def __init__(self, product: str = "GAUDI3") -> None:
        super().__init__()
        self.attention = BlockAttention()
        self._product = product
        self._num_compiled = 0
        self.num_graphs = 0

    def product_name(self) -> str:
        return self._product

    def optimize(self, model: nn.Module) -> None:
        """Not as a CPU does, whose kernels read host memory."""

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        return host.clone()

    def compiler_missing(self) -> str | None:
        return None

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self._num_compiled += 1
        return module

    def num_compilations(self) -> int:
        return self._num_compiled

    def capture(
        self,
        run: Callable[..., Any],
        inputs: Sequence[torch.Tensor],
        own: Sequence[torch.Tensor] = (),
    ) -> Graph:
        buffers = own_buffers(inputs)
        output = run(*buffers)
        written = [output] if isinstance(output, torch.Tensor) else output

        def replay() -> None:
            again = run(*buffers)
            made = [again] if isinstance(again, torch.Tensor) else again
            for tensor, new in zip(written, made, strict=True):
                tensor.copy_(new)

        def forget() -> None:
            self.num_graphs -= 1

        self.num_graphs += 1
        return RecordedGraph(buffers, output, replay, forget)


class CompilingCPU(CapturingCPU):
    """Programs alone."""

    supports_graphs = False
