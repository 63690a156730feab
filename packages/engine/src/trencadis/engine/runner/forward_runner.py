"""Runs one padded batch through the model: graph replay, compiled layers, or eager."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Generator, Hashable, Sequence
from typing import Any

import attrs
import torch
from torch import fx, nn

from trencadis.engine.devices import Device, Graph
from trencadis.engine.errors import BucketMiss, CompileError
from trencadis.engine.models.adapter_layers import AdapterLayers
from trencadis.engine.models.compiled_forward import CompiledForward, OwnTensors
from trencadis.engine.models.decoder_layers import (
    DecoderLayers,
    LayersReached,
    Recording,
    depends_on_symbols,
    tensors_of,
)
from trencadis.engine.models.layer_spec import windows_of
from trencadis.engine.models.logit_head import take_last_hidden
from trencadis.engine.models.paged_context import LayerRun
from trencadis.engine.models.state_layers import state_layers_of
from trencadis.engine.runner.kept_programs import KeptPrograms
from trencadis.engine.runner.model_input import ModelInput, dummy_rows
from trencadis.engine.runner.replayed_steps import ReplayedSteps
from trencadis.engine.runner.shapes import ForwardShape
from trencadis.kvcache.tensors import KVCache

logger = logging.getLogger("trencadis.engine")

REFUSED = (
    "this server compiles nothing in live traffic (--on-bucket-miss refuse): start it with larger "
    "buckets, or with --on-bucket-miss compile"
)
"""The end of the message of a `BucketMiss`."""


Traced = tuple[fx.GraphModule, list[torch.Tensor]]
"""A decoder layer as a module, and example inputs."""

_ANY_TOKENS = 2
"""A program can be for every number of tokens from this on: PyTorch's compiler takes a size of 1
apart, because it broadcasts."""


@attrs.frozen(eq=False)
class ForwardOutput:
    """Tensors on the device, valid until the next forward pass.

    ``logits`` is fp32 ``[batch, vocabulary]``, padding included; of a model without a head, the
    hidden states ``[batch, hidden size]``. ``sampler_words`` is what was uploaded with the batch
    for the sampler. ``hidden``: the last hidden state of every token, ``[tokens, hidden size]``, of
    a model that keeps them (`keep_last_hidden`).
    """

    logits: torch.Tensor
    sampler_words: torch.Tensor
    hidden: torch.Tensor | None = None


class ForwardRunner:
    """Runs the model on padded batches and knows which shapes are warmed up.

    A shape is warmed up by a warm-up, or by the first batch of live traffic that compiles it.
    ``programs`` knows which are, and has the programs that hold no tensors: those of models of the
    same structure, if it is given.

    ``compiled``: compile the decoder layers for each shape. Once `start_serving` was called, a
    forward pass in a shape that was not warmed up is *cold*: it runs eagerly where the device can,
    or is compiled first if ``compile_cold`` is set or the device cannot run a new shape otherwise.
    With ``refuse_cold``, `run` raises `BucketMiss` for it.
    ``cold_forwards`` counts these passes, ``compilations`` what the device compiled in live
    traffic. Each is logged as a warning.
    """

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        cache: KVCache,
        programs: KeptPrograms | None = None,
        *,
        compiled: bool = False,
        adapters: AdapterLayers | None = None,
    ) -> None:
        self.adapters = adapters
        """Those of the model, where it has slots for adapters."""
        self.states = state_layers_of(model)
        """The layers of the model that keep a state; None without."""
        self.compile_cold = False
        self.refuse_cold = False
        self.on_cold: Callable[[object], None] = lambda shape: None
        """Called before a cold forward pass that may compile."""
        self.cold_forwards = 0
        self.compilations = 0
        self._model = model
        self._device = device
        self._dtype = next(model.parameters()).dtype
        self._cache = cache
        self._layers = DecoderLayers(model, cache) if compiled else None
        if compiled and self.states is not None:
            self.states.pass_context_on()
        self._own: OwnTensors | None = None
        self._replayed = ReplayedSteps(device.attention, self._dtype)
        self._for_graphs: list[torch.Tensor] | None = None
        self._programs = programs or KeptPrograms()
        self._layer_runs: dict[Hashable, LayerRun] = {}
        self._kept: dict[Hashable, bool] = {}
        self._failed: set[Hashable] = set()
        self._graphs: dict[ForwardShape, Graph] = {}
        self._use_states(cache)
        self.windows = windows_of(model) if device.attention.reads_recent else ()
        """Of the layers for which decode shapes may have ``recent`` blocks, in tokens."""
        self._compiling = threading.Lock()
        self._serving = False
        self._compiles_layers = compiled
        self._shares_programs = compiled and device.attention.as_operator
        self._by_tokens = False
        """Whether shared programs are for one number of tokens each, not for all from 2 on."""
        self.needs_warmup = compiled or device.supports_graphs or not device.dynamic_shapes
        """Whether the first forward pass in a new shape costs more than the following ones."""
        by_shape = device.supports_graphs or device.compiles_forward or not device.dynamic_shapes
        self.takes_any_tokens = not self.needs_warmup or (self._shares_programs and not by_shape)
        """Whether a forward pass of any number of tokens is as ready as one of a bucket's.

        So it is without programs, and where one program of the layers serves all numbers from 2 on
        and the device needs nothing else for a new shape.
        """

    @property
    def scores_shared(self) -> bool:
        """Whether decode shapes may have shared blocks, see `Attention.scores_shared`."""
        return self._device.attention.scores_shared

    @property
    def adapter_ranks(self) -> Sequence[int]:
        """The ranks of adapters that shapes are warmed up for, besides 0; none without adapters."""
        return self.adapters.ranks if self.adapters is not None and self.needs_warmup else ()

    @property
    def num_graphs(self) -> int:
        """Graphs that are captured now."""
        return len(self._graphs)

    @property
    def num_warm(self) -> int:
        """How many shapes are warmed up, those that share a program counted once.

        Grows until `release_all`, where that drops the programs.
        """
        return len(self._programs.warmed_up)

    def is_warm(self, shape: ForwardShape) -> bool:
        """Whether the shape is warmed up, itself or by another one that shares its program."""
        return self._program_key(shape) in self._programs.warmed_up

    def start_serving(self) -> None:
        """Warm-up has ended: forward passes from now on are live traffic."""
        self._serving = True

    @torch.inference_mode()
    def run(self, batch: ModelInput) -> ForwardOutput:
        """Run the model on a batch. The host does not wait for the device."""
        if not self._serving or not self.needs_warmup:
            return self._run(batch)
        cold = not self.is_warm(batch.shape)
        if cold and self.refuse_cold:
            raise BucketMiss(f"{batch.shape} was not warmed up, and {REFUSED}")
        self.cold_forwards += cold
        if cold and not self.compile_cold and self._device.dynamic_shapes:
            logger.warning("%s was not warmed up and runs eagerly", batch.shape)
            return self._run(batch)
        if cold:
            self.on_cold(batch.shape)
        with self.count_compilations(batch.shape):
            return self._run_first(batch) if cold else self._run(batch)

    @torch.inference_mode()
    def probe(self, batch: ModelInput) -> ForwardOutput:
        """As `run`, for a batch of no request: in any shape it is computed, and never counted."""
        return self._run(batch)

    @contextlib.contextmanager
    def count_compilations(self, cause: object) -> Generator[None, None, None]:
        """Count and log what the device compiles within this context, in live traffic.

        ``cause`` is what was not warmed up, for the log line.
        """
        before, started = self._device.num_compilations(), time.monotonic()
        yield
        compiled = self._device.num_compilations() - before
        # With background warm-up in a thread, compilations of that thread must not be counted;
        # such devices run cold shapes eagerly, so there is nothing else to count.
        if compiled and self._serving and (self.compile_cold or not self._device.dynamic_shapes):
            self.compilations += compiled
            logger.warning(
                "%s was not warmed up: %d compilations in live traffic, %.2f s",
                cause,
                compiled,
                time.monotonic() - started,
            )

    @torch.inference_mode()
    def prepare(self, batch: ModelInput) -> ForwardOutput | None:
        """Compile for the shape of ``batch`` where layers are compiled, then run it.

        Does nothing where `takes_any_tokens` holds and the program of the shape has run, also in
        another shape: then this one is ready. Without programs, each shape counts by itself.
        Elsewhere the batch runs each time, and its result is returned; after `capture` it replays
        the graph.
        """
        if self.takes_any_tokens and self.is_warm(batch.shape):
            return None
        return self._run_first(batch)

    @torch.inference_mode()
    def capture(self, batch: ModelInput) -> None:
        """Capture a graph for the shape of ``batch``. Later batches of this shape replay it."""
        layer_run = self._layer_runs.get(self._program_key(batch.shape))
        captured = batch if layer_run is None else attrs.evolve(batch, layer_run=layer_run)

        def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self._compute(captured.with_inputs(*inputs))

        self._graphs[batch.shape] = self._device.capture(run, batch.inputs, self._given_to_graphs())
        self._programs.warmed_up.add(self._program_key(batch.shape))

    def use_cache(self, cache: KVCache) -> None:
        """Compute with another cache of the same sizes. The programs stay those of warm-up."""
        self._cache, self._own, self._for_graphs = cache, None, None
        self._use_states(cache)
        if self._layers is not None:
            self._layers.use_cache(cache)

    def with_states(self, batch: ModelInput) -> ModelInput:
        """A batch with the places of its states, where the device has them as tensors."""
        if self.states is None or not self._device.static_states:
            return batch
        places = self.states.places(batch.state_rows, batch.shape.batch)
        return attrs.evolve(batch, state_places=self._device.upload(places))

    def _begin_states(self, batch: ModelInput) -> None:
        """Where the host alone knows the rows."""
        if self.states is not None:
            self.states.begin(batch.state_rows or dummy_rows(batch.shape))

    def _use_states(self, cache: KVCache) -> None:
        if self.states is not None:
            self.states.use_cache(cache.states)

    @property
    def keeps_programs(self) -> bool:
        """Whether programs stay valid when weights and cache are released and come back.

        A graph has the addresses of both, unless it is given them with each replay. The program of
        a layer has them too, unless all of the forward pass is programs, which are given them.
        """
        if self._keeps_graphs:
            return True
        if self._device.shares_host_memory:
            return self._shares_programs or not self._compiles_layers
        return self._device.compiles_forward and not self._device.supports_graphs

    @property
    def _keeps_graphs(self) -> bool:
        """Not with states or adapters, whose tensors are not given to graphs."""
        return (
            self._device.supports_graphs
            and self._device.graphs_take_tensors
            and self.states is None
            and self.adapters is None
            and not self._compiles_layers
        )

    def discard_model(self) -> None:
        """Release the model too. The counters stay; nothing runs any more."""
        self.release_all()
        self.release_graphs()  # no other model is given them
        self._model, self.adapters, self.states = nn.Module(), None, None

    def release_all(self) -> None:
        """Release graphs, what is held of weights and cache, and programs that hold either."""
        if not self.keeps_programs:
            self._programs.clear()
        if self._keeps_graphs:
            for graph in self._graphs.values():
                graph.forget()
        else:
            self.release_graphs()
        self._layer_runs.clear()
        self._replayed.clear()
        self._own = self._for_graphs = None
        if self._layers is not None:
            self._layers.release()
            self._layers = None

    def release_graphs(self) -> None:
        """Release all graphs. Where they were kept, no shape is warmed up any more."""
        if self._keeps_graphs:
            self._programs.clear()
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()

    def release(self, shape: ForwardShape) -> None:
        """Release the graph of this shape."""
        self._graphs.pop(shape).release()

    @torch.inference_mode()
    def is_kept(self, batch: ModelInput) -> bool:
        """Whether the compile cache has the program of this shape."""
        key = self._program_key(batch.shape)
        if self._compiles_layers and key not in self._kept:
            traced, _ = self._trace(batch, self._decoder_layers())
            key = self._program_key(batch.shape)  # tracing shows which shapes share a program
            self._kept[key] = all(self._device.is_kept(*of_kind) for of_kind in traced)
        return self._kept.get(key, True)

    def _run_first(self, batch: ModelInput) -> ForwardOutput:
        """Compile for the shape of ``batch`` where layers are compiled, and run it: it is warm."""
        if self._compiles_layers:
            # Not two threads at once: the layer that is traced is one, and so is a program's key.
            with self._compiling:
                self._compile(batch, self._decoder_layers())
        # What a lazy device collected before, such as the zeros of a new cache, would become part
        # of this shape's recipe, and the shape alone would be compiled in live traffic.
        self._device.mark_step()
        output = self._run(batch)
        self._programs.warmed_up.add(self._program_key(batch.shape))
        return output

    def _compile(self, batch: ModelInput, layers: DecoderLayers) -> None:
        """Compile for a shape, once. Where that fails, the shape runs eagerly if it can."""
        key = self._program_key(batch.shape)
        programs = self._programs.forward
        if key in self._layer_runs or batch.shape in programs or key in self._failed:
            return
        try:
            if self._device.compiles_forward:
                programs[batch.shape] = self._compile_forward(batch, layers)
            else:
                layer_run = self._compile_layers(batch, layers)
                self._layer_runs[self._program_key(batch.shape)] = layer_run
        except CompileError as error:
            if not self._device.dynamic_shapes:
                raise
            self._failed.add(self._program_key(batch.shape))
            logger.warning(
                "%s cannot be compiled and runs eagerly, which is slower (%s): free space in the "
                "directory of --compile-cache and in that of temporary files, or serve without "
                "--compile",
                batch.shape,
                error,
            )

    def _program_key(self, shape: ForwardShape) -> Hashable:
        """Equal for shapes that share the program of their decoder layers."""
        if not self._shares_programs:
            return shape
        tokens = shape.num_tokens if self._by_tokens else min(shape.num_tokens, _ANY_TOKENS)
        return tokens, shape.adapter_rank > 0

    def _compile_layers(self, batch: ModelInput, layers: DecoderLayers) -> LayerRun:
        traced, recording = self._trace(batch, layers)
        programs = []
        for module, inputs in traced:
            programs.append(self._device.compile(module, inputs))
            if depends_on_symbols(inputs):  # the compiler has taken a size for granted
                self._by_tokens, self.takes_any_tokens = True, False
                return self._compile_layers(batch, layers)
        run = layers.run_with(programs, recording)
        own = layers.own_tensors(recording.paged)
        given = layers.of_layers(programs), own, layers.specs, self.states
        return self._device.record_layers(run, *given)

    def _trace(self, batch: ModelInput, layers: DecoderLayers) -> tuple[list[Traced], Recording]:
        """A decoder layer of each kind as a module with example inputs, and what recorded them."""
        # Of layers that keep a state, others are given other tensors than the first.
        recording = Recording() if self.states is None else layers.recording()
        with contextlib.suppress(LayersReached):
            self._compute(attrs.evolve(batch, layer_run=recording))
        num_tokens, kinds = batch.shape.num_tokens, range(layers.num_kinds)
        if self._shares_programs and num_tokens >= _ANY_TOKENS and not self._by_tokens:
            traced = [layers.trace_for_any_tokens(recording, kind, num_tokens) for kind in kinds]
            of_any = [of_kind for of_kind in traced if of_kind is not None]
            if len(of_any) == len(traced):
                return of_any, recording
            self._by_tokens, self.takes_any_tokens = True, False
        return [layers.trace(recording, kind) for kind in kinds], recording

    def _compile_forward(self, batch: ModelInput, layers: DecoderLayers) -> CompiledForward:
        def compute(
            model: Callable[..., Any], tensors: Sequence[torch.Tensor], layer_run: LayerRun
        ) -> tuple[torch.Tensor, ...]:
            given = attrs.evolve(batch.with_inputs(*tensors), layer_run=layer_run)
            return self._compute(given, model)

        own = self._own_tensors()
        compile_graph = functools.partial(self._programs.compile_once, self._device.compile)
        return CompiledForward.of(self._model, layers, own, compute, batch.inputs, compile_graph)

    def _decoder_layers(self) -> DecoderLayers:
        """The model's layers with its cache, which both may have come back after `release_all`."""
        if self._layers is None:
            self._layers = DecoderLayers(self._model, self._cache)
        return self._layers

    def _own_tensors(self) -> OwnTensors:
        if self._own is None:
            self._own = OwnTensors.of(self._model, self._decoder_layers())
        return self._own

    def _given_to_graphs(self) -> Sequence[torch.Tensor]:
        """Weights, buffers and KV cache, in an order that stays."""
        if not self._keeps_graphs:
            return ()
        if self._for_graphs is None:
            cache, own = self._cache, [*tensors_of(self._model).values()]
            for number in range(cache.num_layers):
                own += (cache.key(number), cache.value(number))
            self._for_graphs = own
        return self._for_graphs

    def _run(self, batch: ModelInput) -> ForwardOutput:
        computed: Sequence[torch.Tensor]
        graph, program = self._graphs.get(batch.shape), self._programs.forward.get(batch.shape)
        # Before the step mark: a lazy device would compile a copy of its own for each shape.
        words = batch.sampler_words() if batch.num_sampler_words else batch.packed[:0]
        if program is not None:
            computed = program(batch.inputs, self._own_tensors())
        elif graph is None:
            if self._layer_runs:
                layer_run = self._layer_runs.get(self._program_key(batch.shape))
                batch = batch if layer_run is None else attrs.evolve(batch, layer_run=layer_run)
            if self._replayed.takes(batch):
                self._begin_states(batch)
                own = self._own_tensors()
                computed = self._replayed.run(batch, self._model, own, self._compute)
            else:
                computed = self._compute(batch)
        else:
            computed = graph.replay(batch.inputs, self._given_to_graphs())
        if self.states is not None:
            self.states.note(batch.state_rows)
        self._device.mark_step()
        logits, *hidden = computed
        return ForwardOutput(logits, words, *hidden)

    def _compute(
        self, batch: ModelInput, model: Callable[..., Any] | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Logits, then the hidden states of a model that keeps them.

        ``model`` is called in place of the model itself, with the same arguments.
        """
        tensors = batch.unpack()
        paged = self._device.attention.prepare(tensors.paged, self._dtype)
        if self.adapters is not None and tensors.adapter_slots is not None:
            rows = self.adapters.rows_of(tensors.adapter_slots, batch.shape.adapter_rank)
            paged = attrs.evolve(paged, adapter_rows=rows)
        is_static = tensors.states is not None
        if self.states is not None and tensors.states is not None:
            reads, writes, tokens = tensors.states
            places: Any = {"state_reads": reads, "state_writes": writes, "state_tokens": tokens}
            paged = attrs.evolve(paged, **places)
        else:
            self._begin_states(batch)
        if self.states is not None:
            self.states.paged = paged
        try:
            out = (model or self._model)(
                input_ids=tensors.token_ids,
                position_ids=tensors.position_ids,
                use_cache=False,
                logits_to_keep=tensors.logit_rows,
                paged=paged,
            )
        finally:
            if self.states is not None:
                self.states.paged = None  # it has the cache, which may go before the next pass
        if self.states is not None and not (is_static or batch.state_rows):
            self.states.drop()
        logits: torch.Tensor = out.logits[0].float()
        hidden = take_last_hidden()
        return (logits,) if hidden is None else (logits, hidden[0])
