"""``torch.compile(backend="hpu_backend")``: each compiled region is one recipe for each shape.

Source: ``habana_frameworks/torch/dynamo/compile_backend/backends.py``. The real one lowers the
graph through AOTAutograd to recipes; this one runs its operations as one region.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends import registry

from gaudi_standin import torch_patches
from gaudi_standin.bridge import BRIDGE


def hpu_backend(
    graph_module: torch.fx.GraphModule, example_inputs: list[torch.Tensor], **kwargs: Any
) -> Callable[..., Any]:
    def run(*inputs: torch.Tensor) -> Any:
        with BRIDGE.compiled_region():
            return graph_module.forward(*inputs)

    return run


registry.register_backend(hpu_backend)


def _unregister() -> None:
    registry._COMPILER_FNS.pop("hpu_backend", None)
    registry._BACKENDS.pop("hpu_backend", None)
    torch._dynamo.reset()


torch_patches.on_removal(_unregister)
