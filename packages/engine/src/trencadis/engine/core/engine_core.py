"""The engine core: one loop around scheduler, model runner and sampler.

`EngineCore` is synchronous and knows no network; `trencadis.engine.core.core_process` runs it in a
process of its own, `trencadis.engine.front.llm` in the caller's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import attrs

from trencadis.engine.config import EngineConfig
from trencadis.engine.core.request_check import check_request
from trencadis.engine.core.request_table import RequestTable
from trencadis.engine.core.thermal_monitor import ThermalMonitor
from trencadis.engine.devices import Device, select_device
from trencadis.engine.errors import InvalidRequest
from trencadis.engine.ipc.messages import NewToken
from trencadis.engine.outputs import EngineStats
from trencadis.engine.runner.block_moves import swap_governor
from trencadis.engine.runner.worker import Worker
from trencadis.engine.sampling_params import SamplingParams
from trencadis.kvcache import BlockManager, CacheConfig, Defragmenter, Direction
from trencadis.scheduler import (
    BatchControl,
    BatchControlResult,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepTiming,
)
from trencadis.warmup import WarmupReport

STALLED_SECONDS = 0.01
"""Pause after a step that had nothing to do but wait."""


class EngineCore:
    """Loads a model and serves requests step by step. Not safe to share between threads.

    ``device`` and ``heat`` take the place of those that ``config`` names. Raises `ModelError` or
    `ConfigError` when the model cannot be served under ``config``.
    """

    def __init__(
        self, config: EngineConfig, device: Device | None = None, heat: ThermalMonitor | None = None
    ) -> None:
        self.config = config
        self.device = device if device is not None else _device(config)
        # First of all, since a policy that is not there should not show after the weights are.
        self._heat = heat or ThermalMonitor.from_config(config, self.device.temperature_source)
        self.worker = Worker(config, self.device)
        self.spec = self.worker.spec
        self.max_model_len = self.worker.max_model_len
        self.pause_s = 0.0
        self._stats = _Counters(max_running_seqs=config.max_num_seqs)
        self.blocks = BlockManager(
            CacheConfig(
                num_blocks=self.worker.num_blocks,
                block_size=config.block_size,
                num_host_blocks=self.worker.cache.num_host_blocks,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            governor=swap_governor(config, self.worker.block_bytes),
        )
        grids = self.worker.grids
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=self.worker.max_batched_tokens,
                max_model_len=self.max_model_len,
                # A chunk past the longest bucket would meet a shape that nobody prepared.
                max_chunk_tokens=grids.prompt.values("query")[-1] if grids else None,
                max_waiting=config.max_waiting,
                policy=config.scheduling_policy,
            ),
            self.blocks,
            thermal=self._heat.guard,
            defragmenter=Defragmenter(self.blocks, config.defrag),
        )
        rng = random.Random(config.seed)
        self.requests = RequestTable(self.scheduler, self.spec.eos_token_ids, rng)
        self._heat.start()

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> WarmupReport | None:
        """Make shapes ready as the settings say; None where that is done later or never."""
        return self.worker.warm_up(stop)

    @property
    def is_warming_up(self) -> bool:
        """Whether there are shapes to be made ready behind traffic."""
        background = self.worker.background
        return background is not None and background.unfinished

    def advance_warm_up(self) -> None:
        """Go on making shapes ready behind traffic, if there are any left."""
        if self.worker.background is not None:
            self.worker.background.advance(idle=not self.has_work)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        runner = self.worker.runner
        return EngineStats(
            num_running_reqs=self.scheduler.num_running,
            num_running_seqs=self.scheduler.num_running,
            max_running_seqs=self._stats.max_running_seqs,
            num_waiting_reqs=self.scheduler.num_waiting,
            num_swapped_reqs=self.scheduler.num_swapped,
            num_used_blocks=self.blocks.num_used_blocks,
            num_total_blocks=self.blocks.num_total_blocks,
            highest_block_in_use=self.blocks.highest_in_use,
            num_buckets=self.worker.num_buckets,
            num_ready_buckets=self.worker.num_ready_buckets,
            thermal=self._heat.stats,
            num_preemptions=self.scheduler.num_preemptions,
            num_swaps=self.scheduler.num_preemptions - self.scheduler.num_recomputes,
            num_recomputes=self.scheduler.num_recomputes,
            num_steps=self._stats.num_steps,
            num_prompt_tokens=self._stats.num_prompt_tokens,
            num_prefill_tokens=self._stats.num_prefill_tokens,
            num_generation_tokens=self._stats.num_generation_tokens,
            num_padded_tokens=runner.padded_tokens,
            num_bucket_misses=runner.bucket_misses,
            num_cold_forwards=runner.forward_runner.cold,
            num_compilations=runner.forward_runner.compilations,
        )

    def add(
        self,
        key: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        priority: int = 0,
    ) -> None:
        """Queue a request under ``key``.

        Raises `InvalidRequest`, naming the field, or `EngineOverloaded`.
        """
        check_request(prompt_token_ids, params, self.spec.vocab_size, self.max_model_len)
        most = self.scheduler.scheduler_config.max_num_seqs
        cap = min(most, self._stats.max_running_seqs)
        self.requests.add(key, prompt_token_ids, params, priority, cap)
        self._stats.num_prompt_tokens += len(prompt_token_ids)

    def abort(self, key: str) -> None:
        """Stop serving ``key`` and free its blocks; a key that is not known is ignored."""
        self.requests.abort(key)

    def finish(self, key: str, index: int) -> None:
        """End sample ``index`` of ``key``, of which no more tokens are wanted."""
        self.requests.finish(key, index)

    def control(self, order: BatchControl) -> Future[BatchControlResult]:
        """Have an order carried out at the top of the next step; see `Scheduler.control`.

        Raises `InvalidRequest` for more sequences than shapes were prepared for.
        """
        most = self.config.max_num_seqs
        if order.max_num_seqs is not None and order.max_num_seqs > most:
            raise InvalidRequest(
                f"max_num_seqs {order.max_num_seqs} is above {most}, for which this engine was "
                "prepared: start it with more",
                "max_num_seqs",
            )
        return self.scheduler.control(order)

    def step(self) -> list[NewToken]:
        """Compute one step and return its new tokens.

        Let ``pause_s`` seconds pass before the next: some after one that had nothing to do but
        wait, for blocks on their way or for a cap to rise.
        """
        output = self.scheduler.schedule()
        stalled = output.is_empty and not output.moves
        self.pause_s = STALLED_SECONDS if stalled else 0.0
        began = time.perf_counter()
        computed = self.worker.runner.run(output)
        chosen = self.requests.choose(output, computed)
        compute_s = time.perf_counter() - began - sum(computed.swap_s.values())
        updates = self.scheduler.update(
            output,
            chosen.token_ids,
            logprobs=chosen.logprobs,
            candidates=chosen.candidates,
            timing=StepTiming(
                # With decodes in the same step, nobody knows what the prompts took of it.
                prompts_s=None if output.decodes else compute_s,
                swap_out_s=computed.swap_s.get(Direction.OUT),
                swap_in_s=computed.swap_s.get(Direction.IN),
            ),
        )
        tokens = self.requests.report(updates, chosen)
        self._stats.count(output, len(tokens))
        return tokens

    def close(self) -> None:
        """Stop reading the sensors."""
        self._heat.stop()


@attrs.define
class _Counters:
    """Totals since the start."""

    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_prefill_tokens: int = 0
    num_generation_tokens: int = 0
    max_running_seqs: int = 0

    def count(self, output: SchedulerOutput, num_new: int) -> None:
        """Take in a step and how many tokens came of it."""
        self.num_steps += 1
        self.num_prefill_tokens += sum(len(chunk.token_ids) for chunk in output.prompts)
        self.num_generation_tokens += num_new
        self.max_running_seqs = output.max_running


def _device(config: EngineConfig) -> Device:
    return select_device(
        config.device, Path(config.compile_cache) if config.compile_cache else None
    )
