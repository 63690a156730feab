"""The engine core: one loop around scheduler, model runner and sampler.

`EngineCore` is synchronous and knows no network; `trencadis.engine.core_process` runs it in a
process of its own, `trencadis.engine.llm` in the caller's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import attrs

from trencadis.engine.config import EngineConfig
from trencadis.engine.devices import Device, select_device
from trencadis.engine.errors import InvalidRequest
from trencadis.engine.executor import Executor
from trencadis.engine.heat_watch import HeatWatch
from trencadis.engine.messages import NewToken
from trencadis.engine.outputs import EngineStats
from trencadis.engine.request_check import check_request
from trencadis.engine.sampling_params import SamplingParams
from trencadis.engine.serving import Requests
from trencadis.engine.swaps import swap_governor
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
        self, config: EngineConfig, device: Device | None = None, heat: HeatWatch | None = None
    ) -> None:
        self.config = config
        self.device = device if device is not None else _device(config)
        # First of all, since a policy that is not there should not show after the weights are.
        self._heat = heat or HeatWatch.from_config(config, self.device.temperature_source)
        self.executor = Executor(config, self.device)
        self.spec = self.executor.spec
        self.max_model_len = self.executor.max_model_len
        self.pause_s = 0.0
        self._stats = _Counters(max_running=config.max_num_seqs)
        self.blocks = BlockManager(
            CacheConfig(
                num_blocks=self.executor.num_blocks,
                block_size=config.block_size,
                num_host_blocks=self.executor.cache.num_host_blocks,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            governor=swap_governor(config, self.executor.block_bytes),
        )
        grids = self.executor.grids
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=self.executor.max_batched_tokens,
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
        self.requests = Requests(self.scheduler, self.spec.eos_token_ids, rng)
        self._heat.start()

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> WarmupReport | None:
        """Make shapes ready as the settings say; None where that is done later or never."""
        return self.executor.warm_up(stop)

    @property
    def is_warming_up(self) -> bool:
        """Whether there are shapes to be made ready behind traffic."""
        background = self.executor.background
        return background is not None and background.unfinished

    def advance_warm_up(self) -> None:
        """Go on making shapes ready behind traffic, if there are any left."""
        if self.executor.background is not None:
            self.executor.background.advance(idle=not self.has_work)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        runner = self.executor.runner
        return EngineStats(
            num_running=self.scheduler.num_running_seqs,
            num_waiting=self.scheduler.num_waiting,
            num_swapped=self.scheduler.num_swapped + self.scheduler.num_preempted,
            num_preemptions=self.scheduler.num_preemptions,
            num_swaps=self.scheduler.num_preemptions - self.scheduler.num_recomputes,
            num_recomputes=self.scheduler.num_recomputes,
            max_running=self._stats.max_running,
            used_blocks=self.blocks.num_used_blocks,
            total_blocks=self.blocks.num_total_blocks,
            highest_block_in_use=self.blocks.highest_in_use,
            steps=self._stats.steps,
            prompt_tokens=self._stats.prompt_tokens,
            generation_tokens=self._stats.generation_tokens,
            padded_tokens=runner.padded_tokens,
            bucket_misses=runner.bucket_misses,
            buckets=self.executor.num_buckets,
            ready_buckets=self.executor.num_ready_buckets,
            cold_forwards=runner.forwards.cold,
            compilations=runner.forwards.compilations,
            thermal=self._heat.stats,
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
        cap = min(most, self._stats.max_running)
        self.requests.add(key, prompt_token_ids, params, priority, cap)

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
        computed = self.executor.runner.run(output)
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

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    max_running: int = 0

    def count(self, output: SchedulerOutput, num_new: int) -> None:
        """Take in a step and how many tokens came of it."""
        self.steps += 1
        self.prompt_tokens += sum(len(chunk.token_ids) for chunk in output.prompts)
        self.generation_tokens += num_new
        self.max_running = output.max_running_seqs


def _device(config: EngineConfig) -> Device:
    return select_device(
        config.device, Path(config.compile_cache) if config.compile_cache else None
    )
