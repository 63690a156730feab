"""``torch.compile(backend="hpu_backend")``: each compiled region is recipes for one set of shapes.

Source: ``habana_frameworks/torch/dynamo/compile_backend/backends.py``; see `gaudi_standin.regions`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends import registry

from gaudi_standin import torch_patches
from gaudi_standin.bridge import BRIDGE
from gaudi_standin.regions import Region


def hpu_backend(
    graph_module: torch.fx.GraphModule, example_inputs: list[torch.Tensor], **kwargs: Any
) -> Callable[..., Any]:
    region: Region | None = None
    BRIDGE.counters.traces += 1

    def run(*inputs: torch.Tensor) -> Any:
        nonlocal region
        if region is None:
            region = Region.of(graph_module, [BRIDGE.value_of(x) for x in inputs])
        return BRIDGE.run_region(region, inputs)

    return run


registry.register_backend(hpu_backend)


def _unregister() -> None:
    registry._COMPILER_FNS.pop("hpu_backend", None)
    registry._BACKENDS.pop("hpu_backend", None)
    torch._dynamo.reset()


torch_patches.on_removal(_unregister)
