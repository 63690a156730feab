"""The programs of models, which outlive their weights.

Where all of a forward pass is programs (`CompiledForward`), none of them holds a tensor. So they
stay when a model sleeps, is switched away or loses its weights, and whatever model of the same
structure is served next under the same settings uses them: it traces and compiles nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import torch
from torch import fx, nn

from trencadis.engine.models.compiled_forward import Compile, CompiledForward
from trencadis.engine.models.decoder_layers import Program, settings_of, tensors_of
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.shapes import ForwardShape
from trencadis.engine.settings.engine_config import EngineConfig

logger = logging.getLogger("trencadis.engine")

MAX_KEPT = 8
"""Structures whose programs are kept. A program of an 8B model takes about a megabyte of host
memory, and a default grid has hundreds of them."""


@attrs.define(eq=False)
class KeptPrograms:
    """The programs of models of one structure under the same settings.

    ``forward``: by shape. ``sampler``: by name and shapes. ``by_operations``: see `compile_once`.
    ``warmed_up``: keys of shapes whose programs have run. ``num_blocks`` and ``grids``: the cache
    and the buckets that they were compiled for; 0 and None before. ``is_complete``: a full warm-up
    has ended.
    """

    forward: dict[ForwardShape, CompiledForward] = attrs.field(factory=dict)
    sampler: dict[Hashable, Callable[..., Any]] = attrs.field(factory=dict)
    by_operations: dict[Hashable, Program] = attrs.field(factory=dict)
    warmed_up: set[Hashable] = attrs.field(factory=set)
    num_blocks: int = 0
    grids: Grids | None = None
    is_complete: bool = False

    def clear(self) -> None:
        """Drop all of them."""
        for kept in (self.forward, self.sampler, self.by_operations, self.warmed_up):
            kept.clear()
        self.num_blocks, self.grids, self.is_complete = 0, None, False

    def compile_once(
        self, compile_graph: Compile, module: fx.GraphModule, inputs: Sequence[torch.Tensor]
    ) -> Program:
        """The program of a graph, compiled once for the same operations and inputs of these forms.

        A graph with constants has one of its own.
        """
        if any(node.op == "get_attr" for node in module.graph.nodes):
            return compile_graph(module, inputs)
        forms = tuple((x.shape, x.stride(), x.dtype) for x in inputs)
        key = hashlib.sha256(repr(_operations(module.graph)).encode()).digest(), forms
        if key not in self.by_operations:
            self.by_operations[key] = compile_graph(module, inputs)
        return self.by_operations[key]


class ProgramStore:
    """The programs of the `MAX_KEPT` structures that were served last."""

    def __init__(self) -> None:
        self._kept: list[tuple[Hashable, EngineConfig, KeptPrograms]] = []

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_programs(self) -> int:
        """Compiled forward passes of all of them."""
        return sum(len(programs.forward) for _, _, programs in self._kept)

    def of(
        self, model: nn.Module, config: EngineConfig, own: KeptPrograms | None = None
    ) -> KeptPrograms:
        """The programs for a model, which is served next.

        Where there are none of its structure, ``own``, which it had when it was served before, or
        new ones.
        """
        structure, settings = structure_of(model), _settings_of_programs(config)
        for number, (*key, programs) in enumerate(self._kept):
            if key == [structure, settings]:
                self._kept.append(self._kept.pop(number))
                return programs
        self._kept.append((structure, settings, KeptPrograms() if own is None else own))
        if len(self._kept) > MAX_KEPT:
            dropped = self._kept.pop(0)[2]
            logger.info("%d programs that were not used last are dropped", len(dropped.forward))
        return self._kept[-1][2]

    def renewed(self, programs: KeptPrograms) -> KeptPrograms:
        """Those of the sampler alone in place of ``programs``, which a sleeping model may use.

        The others read a cache of the size that they were compiled for.
        """
        empty = KeptPrograms(sampler=dict(programs.sampler))
        self._kept = [
            (structure, settings, empty if old is programs else old)
            for structure, settings, old in self._kept
        ]
        return empty


def _operations(graph: fx.Graph) -> list[Any]:
    """A graph without the names of its nodes, which count what the trace left out, too."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}

    def numbered(values: Any) -> Any:
        return fx.map_arg(values, lambda node: f"%{numbers[node]}")

    return [
        (
            node.op,
            "" if node.op == "placeholder" else str(node.target),
            numbered(node.args),
            numbered(node.kwargs),
        )
        for node in graph.nodes
    ]


def structure_of(model: nn.Module) -> Hashable:
    """Equal for models that compute the same function of their tensors.

    What a trace can read of a model: types and settings of its modules, its configuration, and the
    names, shapes, strides and types of its tensors. Not where it was loaded from.
    """
    config: Any = getattr(model, "config", None)
    described = {} if config is None else dict(config.to_dict())
    # Of the file, of training, and of how the file is read: the tensors tell what weights are.
    for name in ("_name_or_path", "initializer_range", "quantization_config"):
        described.pop(name, None)
    tensors = tuple((name, x.shape, x.stride(), x.dtype) for name, x in tensors_of(model).items())
    settings = settings_of(model, without=("name_or_path",))
    return type(model), repr(sorted(described.items())), tensors, settings


def _settings_of_programs(config: EngineConfig) -> EngineConfig:
    """The settings, without those that name a model and its adapters."""
    return attrs.evolve(
        config, model="-", served_model_name=None, chat_template=None, lora_modules={}
    )
