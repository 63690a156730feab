"""The device, and the engine with the model in its default mode, as the checks share them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from trencadis.engine.api.requests import GenerateRequest
from trencadis.engine.core.engine_core import EngineCore
from trencadis.engine.devices import Device, select_device
from trencadis.engine.doctor.device_counts import DeviceCounts, count_calls
from trencadis.engine.errors import ModelError
from trencadis.engine.models.loader import ModelSpec, inspect_model, resolve_dtype
from trencadis.engine.models.packed_weight import WeightUse
from trencadis.engine.runner.in_process import InProcessExecutor
from trencadis.engine.runner.worker import Worker
from trencadis.engine.settings.engine_config import EngineConfig


class ServedEngine:
    """The settings are the user's. No warm-up: each check compiles what it runs, but where
    `start_again` says otherwise.

    ``counts`` are those of the device. ``used_before``: bytes of its memory in use when it was
    opened. ``is_broken``: a step has raised, after which the engine may have lost its state.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device: Device = select_device(
            config.device,
            Path(config.compile_cache) if config.compile_cache else None,
            trust_compile_cache=config.trust_compile_cache,
            fp32_softmax=config.fp32_softmax,
            cpu_threads=config.cpu_threads,
        )
        self.counts: DeviceCounts = count_calls(self.device)
        self.used_before = self.used_bytes()
        self.is_broken = False
        self._spec: ModelSpec | None = None
        self._started: tuple[EngineCore, InProcessExecutor] | None = None
        self._changes: dict[str, Any] = {}
        self._num_prompts = 0

    def used_bytes(self) -> int:
        """Bytes of the device's memory that are in use."""
        return self.device.total_memory() - self.device.free_memory()

    @property
    def rounds_cache(self) -> bool:
        """Whether keys and values are rounded to 8 bits."""
        return self.config.kv_cache_dtype != "auto"

    @property
    def rounds_inputs(self) -> bool:
        """Whether layers round what they multiply, as a product with weights in FP8 does."""
        form = self.spec.weight_format(self.config.rounding)
        if form is None or not form.is_float:
            return False
        return self.device.weight_use(form) is WeightUse.MULTIPLIED

    @property
    def spec(self) -> ModelSpec:
        """The facts about the checkpoint, also before it is loaded."""
        if self._spec is None:
            self._spec = inspect_model(self.config.model)
        return self._spec

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and KV cache."""
        device = self.device
        return resolve_dtype(self.config.dtype, self.spec, device.preferred_dtype, device.dtypes)

    @property
    def core(self) -> EngineCore:
        """The engine, started by its first use."""
        return self._start()[0]

    @property
    def worker(self) -> Worker:
        """What has the weights and the KV cache."""
        return self._start()[1].worker

    def _start(self) -> tuple[EngineCore, InProcessExecutor]:
        if self._started is None:
            changes: dict[str, Any] = {"warmup": "none", "on_bucket_miss": "auto"}
            changes |= {"kv_events_config": {}, "kv_tiers": "", **self._changes}
            config = attrs.evolve(self.config, device=self.device, **changes)
            executor = InProcessExecutor(config, records=False)
            core = EngineCore(config, executor)
            core.warm_up()
            self._started = core, executor  # what is half started is collected
        return self._started

    def start_again(self, **changes: Any) -> None:
        """Release the engine; its next use starts one with these settings beside the user's."""
        if self._started is not None:
            core, executor = self._started
            core.close()
            executor.worker.discard()
        self._started = None
        self._changes = changes
        gc.collect()
        self.device.synchronize()

    def answers(
        self,
        requests: Sequence[GenerateRequest],
        on_step: Callable[[int], None] = lambda num_tokens: None,
    ) -> list[list[list[int]]]:
        """The tokens of each request, by sample. Raises `ModelError` for one that an error ends.

        ``on_step`` is called after each step with the number of its tokens.
        """
        core = self.core
        first, self._num_prompts = self._num_prompts, self._num_prompts + len(requests)
        tokens: list[list[list[int]]] = [[[] for _ in range(each.params.n)] for each in requests]
        self.is_broken = True
        for number, request in enumerate(requests, first):
            core.add(str(number), request)
        while core.has_work:
            made = core.step()
            for failure in core.take_failures():
                core.abort_all()
                self.is_broken = core.blocks.pool.num_used_blocks > 0
                raise ModelError(f"a request ended: {getattr(failure, 'message', failure)}")
            for token in made:
                tokens[int(token.key) - first][token.index].append(token.token_id)
            on_step(len(made))
        self.is_broken = False
        return tokens

    # Prompts, of any tokens.

    def prompt(self, length: int, *, number: int | None = None) -> tuple[int, ...]:
        """Token ids. Prompts of different ``number`` begin differently, as do those without one."""
        vocabulary = self.core.spec.vocab_size
        first = self._num_prompts if number is None else number
        return tuple((first * 31 + i * 7) % vocabulary for i in range(length))

    def prompts_with_block(self, count: int) -> list[tuple[int, ...]]:
        """Prompts that share a full block and end differently; none where they would be too long.

        8 tokens follow the block.
        """
        core = self.core
        length = core.config.block_size + 8
        if length + 8 > core.max_model_len:
            return []
        prompt, vocabulary = self.prompt(length), core.spec.vocab_size
        return [(*prompt[:-1], (prompt[-1] + i) % vocabulary) for i in range(count)]
