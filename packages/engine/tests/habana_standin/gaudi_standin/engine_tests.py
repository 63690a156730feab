"""What the engine's tests change in its HPU device, in each process of a session on the stand-in.

The stand-in computes in fp32 what the CPU computes, so tokens can be compared in fp32. Compilations
take half a second, so grids and batches are as small as on the CPU, and a program is compiled once
for all engines of a process. ``habana_frameworks.torch`` imports this module where
``GAUDI_STANDIN_ENGINE_TESTS`` is set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gaudi_standin.bridge import BRIDGE
from trencadis.engine.devices import HPUDevice

DTYPES = (torch.bfloat16, torch.float32)

_init = HPUDevice.__init__
_compile = HPUDevice.compile
_programs: dict[Any, Callable[..., Any]] = {}


def _init_small(self: HPUDevice, *given: Any, **named: Any) -> None:
    _init(self, *given, **named)
    self.defaults = {"compile": self.defaults["compile"]}


def _compile_once(
    self: HPUDevice, module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]
) -> Callable[..., Any]:
    """One program for graphs of the same code and inputs; a graph with constants has its own."""
    if any(node.op == "get_attr" for node in module.graph.nodes):
        return _compile(self, module, inputs)
    key = (module.code, *((tuple(x.shape), x.stride(), x.dtype) for x in inputs))
    if key in _programs:  # counted all the same: without this, each engine would compile it
        BRIDGE.counters.compile_calls += 1
        BRIDGE.counters.traces += 1
    else:
        _programs[key] = _compile(self, module, inputs)
    return _programs[key]


HPUDevice.dtypes = DTYPES
HPUDevice.exponential_grid = False
HPUDevice.__init__ = _init_small  # type: ignore[method-assign]
HPUDevice.compile = _compile_once  # type: ignore[method-assign]
