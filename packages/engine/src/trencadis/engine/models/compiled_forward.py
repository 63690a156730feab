"""A forward pass that consists of programs alone: start, decoder layers, end.

`DecoderLayers` compiles the layers. On a device where each operation outside of a program is a
launch of its own, what comes before the first layer (embedding, rotary angles, what attention
derives from the batch) and what comes after the last (norm, logits) are programs, too. Nothing of
the model's Python code runs then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from trencadis.engine.errors import ModelError
from trencadis.engine.models.decoder_layers import (
    DecoderLayers,
    LayersReached,
    Program,
    Recording,
    single,
)
from trencadis.engine.models.logit_head import take_last_hidden
from trencadis.engine.models.paged_context import LayerRun, PagedContext

Compute = Callable[[Callable[..., Any], Sequence[torch.Tensor], LayerRun], tuple[torch.Tensor, ...]]
"""Computes logits, and perhaps hidden states. Arguments: how the model is called, the tensors of a
batch, the layer run."""

Compile = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Program]


@attrs.frozen(eq=False)
class OwnTensors:
    """What the programs of a model read besides a batch.

    ``outside``: weights and buffers outside of the decoder layers, by name. ``layers``: for each
    layer, its weights and its KV cache.
    """

    outside: dict[str, torch.Tensor]
    layers: Sequence[tuple[torch.Tensor, ...]]

    @classmethod
    def of(cls, model: nn.Module, layers: DecoderLayers) -> OwnTensors:
        named = (*model.named_parameters(), *model.named_buffers())
        outside = {name: tensor for name, tensor in named if id(tensor) not in layers.tensor_ids}
        return cls(outside, layers.own_tensors())


@attrs.frozen(eq=False)
class CompiledForward:
    """Computes what `Compute` does from the tensors of a batch, for one shape.

    It holds no tensor of a model: the weights and the KV cache of any model of the same structure
    are given to it with each batch.
    """

    _start: _Part
    _layers: Sequence[Program]
    _places: Sequence[tuple[int, ...]]
    _end: _Part
    _keep: Program | None
    _written_at: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layers: DecoderLayers,
        own: OwnTensors,
        compute: Compute,
        tensors: Sequence[torch.Tensor],
        compile_graph: Compile,
    ) -> CompiledForward:
        """Trace and compile the programs for a batch of ``tensors``: three for most models.

        Where layers keep a state, a further one writes the new states after the last layer.

        Layers may have rotary embeddings of their own: the start computes all. Raises `ModelError`
        for a model whose layers are given tensors of different forms.
        """

        rows: list[torch.Tensor] = []

        def call_with(outside: Sequence[torch.Tensor], *kept: torch.Tensor) -> Callable[..., Any]:
            """Calls the model, with the logit rows ``kept`` or else those of the batch."""
            named = dict(zip(own.outside, outside, strict=True))

            def call(**kwargs: Any) -> Any:
                rows[:] = kept or [kwargs["logits_to_keep"]]
                kwargs["logits_to_keep"] = rows[0]
                return torch.func.functional_call(model, named, (), kwargs)

            return call

        def start(*given: torch.Tensor) -> list[torch.Tensor]:
            recording = layers.recording()
            try:
                compute(call_with(given[len(tensors) :]), given[: len(tensors)], recording)
            except LayersReached:
                return [*recording.distinct(), *rows]
            raise ModelError("the model has no decoder layers: serve it without --compile")

        def end(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            def skip(*_: Any) -> torch.Tensor:
                return given[0]

            # With the rows from the start it reads nothing of the batch, whose form differs with
            # the blocks: shapes with as many tokens and rows have one program.
            batch, outside = given[2 : 2 + len(tensors)], given[2 + len(tensors) :]
            return compute(call_with(outside, given[1]), batch, skip)

        recording = layers.recording()
        with contextlib.suppress(LayersReached):
            compute(call_with([*own.outside.values()]), tensors, recording)
        programs = [
            compile_graph(*layers.trace(recording, kind)) for kind in range(layers.num_kinds)
        ]
        inputs = (recording.inputs()[0], rows[0], *tensors)
        writes: Any = getattr(recording.paged, "state_writes", None)
        held = [own.layers[i][len(own.layers[i]) - layers.num_states(i) :] for i in layers.numbers]
        states = [part for parts in held for part in parts]
        return cls(
            _Part.of(start, tensors, own.outside, compile_graph),
            layers.of_layers(programs),
            recording.places(),
            _Part.of(end, inputs, own.outside, compile_graph),
            _compile_writes(states, writes, compile_graph) if states else None,
            next((i for i, each in enumerate(recording.distinct()) if each is writes), 0),
        )

    def __call__(self, tensors: Sequence[torch.Tensor], own: OwnTensors) -> list[torch.Tensor]:
        """Logits ``[rows, vocabulary]``, and hidden states ``[tokens, hidden size]`` if kept."""
        made = self._start(tensors, own.outside)
        hidden = made[0]
        held: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        for layer, places, of_layer in zip(self._layers, self._places, own.layers, strict=True):
            given = (made[place] for place in places[1:])
            result = layer(hidden, *given, *of_layer)
            hidden = single(result)
            if self._keep is not None and not isinstance(result, torch.Tensor):
                written += result[1:]
                held += of_layer[len(of_layer) - len(result) + 1 :]
        if self._keep is not None:
            self._keep(made[self._written_at], *held, *written)
        return self._end((hidden, made[-1], *tensors), own.outside)


@attrs.frozen(eq=False)
class OuterParts:
    """What a model computes before its first decoder layer and after its last, for one shape.

    The operations that a trace has seen, without the model's Python code around them. It holds no
    tensor of a model, as `CompiledForward`.
    """

    _start: _Part
    _end: _Part

    @classmethod
    def of(
        cls,
        model: nn.Module,
        own: OwnTensors,
        paged: PagedContext,
        tensors: Sequence[torch.Tensor],
    ) -> OuterParts:
        """Trace a batch: token ids, position ids and logit rows, as the model takes them.

        Its layers must be a chain that gives each what the first one is given.
        """

        def compute(
            weights: Sequence[torch.Tensor], batch: Sequence[torch.Tensor], layer_run: LayerRun
        ) -> list[torch.Tensor]:
            token_ids, position_ids, rows = batch
            given: dict[str, Any] = {
                "input_ids": token_ids,
                "position_ids": position_ids,
                "use_cache": False,
                "logits_to_keep": rows,
                "paged": attrs.evolve(paged, layer_run=layer_run),
            }
            named = dict(zip(own.outside, weights, strict=True))
            out = torch.func.functional_call(model, named, (), given)
            hidden = take_last_hidden()
            return [out.logits[0].float(), *(() if hidden is None else (hidden[0],))]

        recording = Recording()

        def start(*given: torch.Tensor) -> list[torch.Tensor]:
            recording.given.clear()
            with contextlib.suppress(LayersReached):
                compute(given[len(tensors) :], given[: len(tensors)], recording)
            return recording.inputs()

        def end(hidden: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
            return compute(given[len(tensors) :], given[: len(tensors)], lambda *_: hidden)

        def as_traced(module: fx.GraphModule, _: Sequence[torch.Tensor]) -> Program:
            return module

        hidden = start(*tensors, *own.outside.values())[0]
        return cls(
            _Part.of(start, tensors, own.outside, as_traced),
            _Part.of(end, (hidden, *tensors), own.outside, as_traced),
        )

    def layer_inputs(self, tensors: Sequence[torch.Tensor], own: OwnTensors) -> list[torch.Tensor]:
        """What the first layer is given, hidden states first."""
        return self._start(tensors, own.outside)

    def logits(
        self, hidden: torch.Tensor, tensors: Sequence[torch.Tensor], own: OwnTensors
    ) -> list[torch.Tensor]:
        """Logits ``[rows, vocabulary]`` from what the last layer has returned, and hidden states
        ``[tokens, hidden size]`` if the model keeps them."""
        return self._end((hidden, *tensors), own.outside)


def _compile_writes(
    states: Sequence[torch.Tensor], places: torch.Tensor, compile_graph: Compile
) -> Program:
    """A program that writes new states to ``places`` of all ``states``: nothing else uses these.

    It is given the places, the states, and the new ones.
    """

    def write(places: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
        held, written = tensors[: len(states)], tensors[len(states) :]
        return [part.index_copy_(0, places, new) for part, new in zip(held, written, strict=True)]

    batch = places.shape[0]
    new = [part.new_empty((batch, *part.shape[1:])) for part in states]
    inputs = [places, *states, *new]
    return compile_graph(make_fx(write, tracing_mode="fake")(*inputs), inputs)


@attrs.frozen(eq=False)
class _Part:
    """A program of a forward pass, without inputs that it does not read.

    ``used``: which of the given tensors it reads; ``weights``: the names of further inputs.
    ``sources``: for each result the given tensor that it is, None for a result of the program.
    """

    program: Program
    used: tuple[int, ...]
    weights: tuple[str, ...]
    sources: tuple[int | None, ...]

    @classmethod
    def of(
        cls,
        function: Callable[..., Any],
        given: Sequence[torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        compile_graph: Compile,
    ) -> _Part:
        names, inputs = tuple(weights), (*given, *weights.values())
        traced = make_fx(function, tracing_mode="fake")(*inputs)
        places = {node: i for i, node in enumerate(traced.graph.find_nodes(op="placeholder"))}
        (output,) = traced.graph.find_nodes(op="output")
        found = output.args[0]
        results = found if isinstance(found, (list, tuple)) else (found,)
        sources = tuple(places.get(node) for node in results)
        output.args = (tuple(node for node in results if node not in places),)
        traced.graph.eliminate_dead_code()
        for node in places:
            if not node.users:
                traced.graph.erase_node(node)
        traced.recompile()
        kept = [place for node, place in places.items() if node.users]
        return cls(
            compile_graph(traced, [inputs[place] for place in kept]),
            tuple(place for place in kept if place < len(given)),
            tuple(names[place - len(given)] for place in kept if place >= len(given)),
            sources,
        )

    def __call__(
        self, given: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        read = (*(given[place] for place in self.used), *(weights[name] for name in self.weights))
        made = iter(self.program(*read))
        return [next(made) if place is None else given[place] for place in self.sources]
