"""Warms up the sampler on logits of the model's own head, under every kind of settings."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.engine.api.structured_output import StructuredOutput
from trencadis.engine.devices import Device
from trencadis.engine.grammars.matcher import FixedMask
from trencadis.engine.runner.sampling_rows import Sampler
from trencadis.engine.runner.step import RowRequest, SampleSettings
from trencadis.warmup import DummyRequest, SamplerConfig

_OTHER_PROGRAMS = (
    SamplingParams(
        temperature=0.0,
        logprobs=0,
        logprob_token_ids=(0,),
        logit_bias={0: 1.0},
        structured_output=StructuredOutput(json_object=True),
    ),
    SamplingParams(use_beam_search=True),
)
"""What runs the programs that no configuration of warm-up runs: log-probabilities, changes of
logits, masks, beam search."""


class SamplerWarmup:
    """Implements warm-up's ``SamplerRuntime``."""

    def __init__(self, sampler: Sampler, device: Device, model: nn.Module) -> None:
        self._sampler = sampler
        self._device = device
        self._head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
        self._dtype = next(model.parameters()).dtype
        self._logits = torch.empty(0)
        self._requests: tuple[DummyRequest, ...] = ()

    @torch.inference_mode()
    def open_batch(self, batch_size: int, requests: tuple[DummyRequest, ...]) -> None:
        hidden = torch.rand(batch_size, self._head.in_features).to(self._dtype)
        self._logits = self._head(self._device.upload(hidden)).float()
        self._device.mark_step()
        self._requests = requests[:batch_size]
        for params in _OTHER_PROGRAMS:
            self._sample(params)

    def sample(self, config: SamplerConfig) -> None:
        self._sample(
            SamplingParams(temperature=config.temperature, top_p=config.top_p, top_k=config.top_k)
        )

    def reset(self) -> None:
        """Nothing to reset: a draw depends on seed, position and logits only."""

    def close_batch(self) -> None:
        self._logits, self._requests = torch.empty(0), ()

    def synchronize(self) -> None:
        self._device.synchronize()

    @torch.inference_mode()
    def _sample(self, params: SamplingParams) -> None:
        every_token = FixedMask(np.full((self._logits.shape[-1] + 31) // 32, -1, np.int32))
        rows = [
            RowRequest(
                len(request.prompt_token_ids) + len(request.output_token_ids),
                (SampleSettings(params, seed, len(request.prompt_token_ids)),),
                None if params.structured_output is None else every_token,
                num_candidates=2 if params.use_beam_search else 0,
            )
            for seed, request in enumerate(self._requests)
        ]
        if rows:
            self._device.begin_step()
            words = self._device.upload(torch.from_numpy(self._sampler.words(rows, len(rows))))
            pending = self._sampler.launch(self._logits, words, rows)
            self._device.fetch(pending.outputs).wait()  # not read: see `Device.compile_only`
