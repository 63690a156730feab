"""Warms up the sampler with random logits, under every kind of sampling settings."""

from __future__ import annotations

import torch

from trencadis.engine.devices import Device
from trencadis.engine.runner.sampler import SamplingRow, sample
from trencadis.engine.sampling_params import SamplingParams
from trencadis.warmup import DummyRequest, SamplerConfig


class SamplerWarmup:
    """Implements warm-up's ``SamplerRuntime``."""

    def __init__(self, device: Device, vocab_size: int, dtype: torch.dtype) -> None:
        self._device = device
        self._logits_device = device.torch_device if device.dynamic_shapes else torch.device("cpu")
        self._vocab_size = vocab_size
        self._dtype = dtype
        self._logits = torch.empty(0)
        self._requests: tuple[DummyRequest, ...] = ()

    def open_batch(self, batch_size: int, requests: tuple[DummyRequest, ...]) -> None:
        shape = (batch_size, self._vocab_size)
        self._logits = torch.rand(shape, dtype=self._dtype, device=self._logits_device)
        self._requests = requests[:batch_size]

    @torch.inference_mode()
    def sample(self, config: SamplerConfig) -> None:
        params = SamplingParams(
            temperature=config.temperature, top_p=config.top_p, top_k=config.top_k
        )
        rows = [
            SamplingRow(params, seed, request.prompt_token_ids, request.output_token_ids)
            for seed, request in enumerate(self._requests)
        ]
        if rows:
            sample(self._logits, rows)

    def reset(self) -> None:
        """Nothing to reset: a draw depends on seed, position and logits only."""

    def close_batch(self) -> None:
        self._logits, self._requests = torch.empty(0), ()

    def synchronize(self) -> None:
        self._device.synchronize()
