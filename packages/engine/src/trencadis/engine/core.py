"""The engine core: one loop around scheduler, model runner and sampler.

`EngineCore` is synchronous and knows no network; `trencadis.engine.core_process` runs it in a
process of its own, `trencadis.engine.llm` in the caller's.
"""

from __future__ import annotations

import logging
import random
import time
from concurrent.futures import Future

import attrs

from trencadis.bucketing import BucketingError
from trencadis.engine.config import EngineConfig
from trencadis.engine.devices import Device, select_device
from trencadis.engine.errors import ConfigError, InvalidRequest
from trencadis.engine.grids import Grids, ShapeLimits, build_grids
from trencadis.engine.heat_watch import HeatWatch
from trencadis.engine.messages import NewToken
from trencadis.engine.models.loader import ModelSpec, inspect_model, load_model, resolve_dtype
from trencadis.engine.outputs import EngineStats
from trencadis.engine.request_check import check_request
from trencadis.engine.runner import ModelRunner
from trencadis.engine.sampling_params import SamplingParams
from trencadis.engine.serving import Requests
from trencadis.engine.swaps import carry_out, plan_host_blocks, swap_governor
from trencadis.kvcache import BlockManager, CacheConfig, Defragmenter, Direction, MovePlan
from trencadis.kvcache.tensors import KVCache, bytes_per_block
from trencadis.scheduler import (
    BatchControl,
    BatchControlResult,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepTiming,
)
from trencadis.warmup import MemoryPlan, WarmupReport, format_bytes, warm_up

logger = logging.getLogger("trencadis.engine")

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
        self.device = device if device is not None else select_device(config.device)
        self.spec = inspect_model(config.model)
        self.max_model_len = _max_model_len(config, self.spec)
        self.dtype = resolve_dtype(config.dtype, self.spec, self.device)
        self.stalled = False
        self._stats = _Counters(max_running=config.max_num_seqs)
        self._heat = heat if heat is not None else HeatWatch.from_config(config)
        self._build()
        self._heat.start()

    def _build(self) -> None:
        """Load the weights, size and make the cache, and put the libraries together."""
        before = self.device.free_memory()
        model = load_model(self.spec, self.device, self.dtype, self.max_model_len)
        self._log_memory("Loading model weights", before)
        self.num_blocks = self._plan_blocks()
        size = self.config.block_size
        num_host_blocks = plan_host_blocks(
            self.config, self.device, self._block_bytes, self._blocks_per_sequence
        )
        self.blocks = BlockManager(
            CacheConfig(
                num_blocks=self.num_blocks,
                block_size=size,
                num_host_blocks=num_host_blocks,
                enable_prefix_caching=self.config.enable_prefix_caching,
            ),
            governor=swap_governor(self.config, self._block_bytes),
        )
        before = self.device.free_memory()
        self.cache = KVCache(
            num_layers=self.spec.num_layers,
            num_blocks=self.num_blocks,
            kv_heads=self.spec.num_kv_heads,
            block_size=size,
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
            device=self.device.torch_device,
            num_host_blocks=num_host_blocks,
        )
        self._log_memory("Initializing cache engine", before)
        budget = max(self.config.max_num_batched_tokens, self.config.max_num_seqs)
        limits = ShapeLimits(
            max_model_len=self.max_model_len,
            max_num_batched_tokens=budget,
            max_num_seqs=self.config.max_num_seqs,
            block_size=size,
            num_blocks=self.num_blocks,
        )
        self.grids = self._grids(limits)
        self.runner = ModelRunner(model, self.device, self.cache, self.grids)
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=self.config.max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=self.max_model_len,
                # A chunk past the longest bucket would meet a shape that nobody prepared.
                max_chunk_tokens=self.grids.prompt.values("query")[-1] if self.grids else None,
                max_waiting=self.config.max_waiting,
                policy=self.config.scheduling_policy,
            ),
            self.blocks,
            thermal=self._heat.guard,
            defragmenter=Defragmenter(self.blocks, self.config.defrag),
        )
        rng = random.Random(self.config.seed)
        self.requests = Requests(self.scheduler, self.spec.eos_token_ids, rng)

    def _grids(self, limits: ShapeLimits) -> Grids | None:
        if not self.config.use_buckets:
            return None
        try:
            return build_grids(self.config.bucketing, limits)
        except BucketingError as error:
            raise ConfigError(str(error)) from error

    def warm_up(self) -> WarmupReport | None:
        """Run every bucket once; None when warm-up is skipped or there are no buckets."""
        if self.grids is None:
            return None
        if self.config.skip_warmup:
            logger.info("Skipping warmup: the first request of each shape will be slower")
            return None
        return warm_up(self.runner, self.grids.prompt.buckets, self.grids.decode.buckets)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_swapped=self.scheduler.num_swapped,
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
            padded_tokens=self.runner.padded_tokens,
            bucket_misses=self.runner.bucket_misses,
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

        ``stalled`` is true after one that had nothing to do but wait, for blocks on their way or
        for a cap to rise: let `STALLED_SECONDS` pass before the next.
        """
        output = self.scheduler.schedule()
        self.stalled = output.is_empty and not output.moves
        swap_s = carry_out(output.moves, self.cache, self.device)
        began = time.perf_counter()
        computed = self.runner.run(attrs.evolve(output, moves=MovePlan()))
        chosen = self.requests.choose(output, computed)
        compute_s = time.perf_counter() - began
        updates = self.scheduler.update(
            output,
            chosen.token_ids,
            logprobs=chosen.logprobs,
            candidates=chosen.candidates,
            timing=StepTiming(
                # With decodes in the same step, nobody knows what the prompts took of it.
                prompts_s=None if output.decodes else compute_s,
                swap_out_s=swap_s.get(Direction.OUT),
                swap_in_s=swap_s.get(Direction.IN),
            ),
        )
        tokens = self.requests.report(updates, chosen)
        self._stats.count(output, len(tokens))
        return tokens

    def close(self) -> None:
        """Stop reading the sensors."""
        self._heat.stop()

    def _plan_blocks(self) -> int:
        """Blocks of the cache: as configured, or as many as fit and can be used."""
        block_bytes, per_sequence = self._block_bytes, self._blocks_per_sequence
        if self.config.num_blocks is not None:
            num_blocks = self.config.num_blocks
        else:
            plan = MemoryPlan(
                free_after_profile=self.device.free_memory(),
                block_bytes=block_bytes,
                gpu_memory_utilization=self.config.gpu_memory_utilization,
                graph_reserved_mem=0.0,
            )
            limit = self.config.kv_cache_memory or self.device.default_kv_cache_memory
            fits = plan.num_blocks
            if limit is not None:
                fits = min(fits, limit // block_bytes)
            num_blocks = min(fits, per_sequence * self.config.max_num_seqs + 1)
        if num_blocks - 1 < per_sequence:
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks of {self.config.block_size} tokens cannot hold "
                f"one sequence of max_model_len {self.max_model_len}: lower max_model_len to "
                f"{max(0, num_blocks - 1) * self.config.block_size} or raise kv_cache_memory "
                f"(a block takes {format_bytes(block_bytes)})"
            )
        logger.info("# KV blocks: %d of %d tokens", num_blocks, self.config.block_size)
        return num_blocks

    @property
    def _block_bytes(self) -> int:
        return bytes_per_block(
            num_layers=self.spec.num_layers,
            kv_heads=self.spec.num_kv_heads,
            block_size=self.config.block_size,
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
        )

    @property
    def _blocks_per_sequence(self) -> int:
        return -(-self.max_model_len // self.config.block_size)

    def _log_memory(self, what: str, free_before: int) -> None:
        free, total = self.device.free_memory(), self.device.total_memory()
        logger.info(
            "%s took %s of device memory (%s/%s used)",
            what,
            format_bytes(free_before - free),
            format_bytes(total - free),
            format_bytes(total),
        )


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
        self.max_running = output.max_running


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    longest = spec.max_position_embeddings
    if config.max_model_len is None:
        return longest
    if config.max_model_len > longest:
        raise ConfigError(
            f"max_model_len {config.max_model_len} is above what the model was made for, "
            f"{longest}: lower it"
        )
    return config.max_model_len
