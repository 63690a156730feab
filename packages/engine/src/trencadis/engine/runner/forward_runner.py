"""One padded batch through the model: by its shape's graph, by its program, or as it is."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Generator

import attrs
import torch
from torch import nn

from trencadis.engine.devices import Device, Graph
from trencadis.engine.models.decoder_layers import DecoderLayers, Recording
from trencadis.engine.models.paged_context import LayerRun
from trencadis.engine.runner.model_input import ModelInput
from trencadis.engine.runner.shapes import ForwardShape
from trencadis.kvcache.tensors import KVCache

logger = logging.getLogger("trencadis.engine")


class ForwardRunner:
    """Runs a model in shapes that were made ready, and tells when one was not.

    ``compiled`` gives each shape a program for the decoder layers. Where shapes have to be made
    ready (`fixed_shapes`), a cold one runs the model's own code, unless ``compile_cold`` is set,
    which compiles it then and there. ``cold`` counts the cold forwards since `start_serving`,
    ``compilations`` what the device has compiled meanwhile; each is a warning too.
    """

    def __init__(
        self, model: nn.Module, device: Device, cache: KVCache, *, compiled: bool = False
    ) -> None:
        self.compile_cold = False
        self.cold = 0
        self.compilations = 0
        self._model = model
        self._device = device
        self._layers = DecoderLayers(model, cache) if compiled else None
        self._ready: set[ForwardShape] = set()
        self._layer_runs: dict[ForwardShape, LayerRun] = {}
        self._graphs: dict[ForwardShape, Graph] = {}
        self._serving = False

    @property
    def fixed_shapes(self) -> bool:
        """Whether a shape that was not made ready costs more than to run it."""
        device = self._device
        return self._layers is not None or device.supports_graphs or not device.dynamic_shapes

    def start_serving(self) -> None:
        """From now on forwards are of live traffic."""
        self._serving = True

    @torch.inference_mode()
    def run(self, batch: ModelInput) -> torch.Tensor:
        """Logits ``[num_rows, vocabulary]`` of a batch, on the host where that has to sample."""
        if not self._serving or not self.fixed_shapes:
            return self._run(batch)
        cold = batch.shape not in self._ready
        self.cold += cold
        if cold and not self.compile_cold and self._device.dynamic_shapes:
            logger.warning("%s was not warmed up and runs as it is", batch.shape)
            return self._run(batch)
        with self.watched(batch.shape):
            if cold and self.compile_cold:
                self.prepare(batch)
            return self._run(batch)

    @contextlib.contextmanager
    def watched(self, what: object) -> Generator[None, None, None]:
        """Count and log what is compiled in live traffic meanwhile, for the sake of ``what``."""
        known, started = self._device.num_compilations(), time.monotonic()
        yield
        compiled = self._device.num_compilations() - known
        # A thread that warms up in the background compiles too; it does so where nothing else does.
        if compiled and self._serving and (self.compile_cold or not self._device.dynamic_shapes):
            self.compilations += compiled
            logger.warning(
                "%s was not warmed up: %d compilations in live traffic, %.2f s",
                what,
                compiled,
                time.monotonic() - started,
            )

    @torch.inference_mode()
    def prepare(self, batch: ModelInput) -> None:
        """Compile what a batch of this shape needs, and run it once."""
        if self._layers is not None and batch.shape not in self._layer_runs:
            self._layer_runs[batch.shape] = self._compile(batch, self._layers)
        self._run(batch)
        self._ready.add(batch.shape)

    @torch.inference_mode()
    def capture(self, batch: ModelInput) -> None:
        """Record this shape; from now on it is replayed."""
        recorded = self._with_program(batch)

        def run(*tensors: torch.Tensor) -> torch.Tensor:
            return self._compute(recorded.with_tensors(tensors))

        self._graphs[batch.shape] = self._device.capture(run, batch.tensors)
        self._ready.add(batch.shape)

    def release(self, shape: ForwardShape) -> None:
        """Forget the graph of this shape; from now on it is computed anew."""
        self._graphs.pop(shape).release()

    def _compile(self, batch: ModelInput, layers: DecoderLayers) -> LayerRun:
        recording = Recording()
        self._compute(_using(batch, recording))
        module, inputs = layers.trace(recording)
        return layers.run_with(self._device.compile(module, inputs), recording.prefix_blocks)

    def _run(self, batch: ModelInput) -> torch.Tensor:
        graph = self._graphs.get(batch.shape)
        if graph is None:
            rows = self._compute(self._with_program(batch))
        else:
            rows = graph.replay(batch.tensors)
        self._device.mark_step()
        if not self._device.dynamic_shapes:
            # All of them, because a slice of other length would be compiled for each length.
            return rows.cpu()[: batch.num_rows]
        rows = rows[: batch.num_rows]
        return rows if graph is None else rows.clone()  # the next replay writes over it

    def _with_program(self, batch: ModelInput) -> ModelInput:
        layer_run = self._layer_runs.get(batch.shape)
        return batch if layer_run is None else _using(batch, layer_run)

    def _compute(self, batch: ModelInput) -> torch.Tensor:
        out = self._model(
            input_ids=batch.token_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            paged=batch.paged,
        )
        logits: torch.Tensor = out.logits[0]
        return logits


def _using(batch: ModelInput, layer_run: LayerRun) -> ModelInput:
    return attrs.evolve(batch, paged=attrs.evolve(batch.paged, layer_run=layer_run))
