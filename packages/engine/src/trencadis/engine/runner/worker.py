"""The worker: everything on one device. It loads the model, plans memory, and warms up.

The engine core has one worker. The core schedules; the worker's `ModelRunner` executes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path

import platformdirs

from trencadis.bucketing import BucketingError
from trencadis.engine.config import EngineConfig, resolve_max_model_len
from trencadis.engine.devices import Device
from trencadis.engine.errors import ConfigError
from trencadis.engine.models.loader import inspect_model, load_model, resolve_dtype
from trencadis.engine.runner.background_warmup import BackgroundWarmupLoop
from trencadis.engine.runner.block_moves import warm_up_copies
from trencadis.engine.runner.device_sampler import DeviceSampler
from trencadis.engine.runner.forward_runner import ForwardRunner
from trencadis.engine.runner.grids import Grids, build_grids
from trencadis.engine.runner.host_swap import num_host_blocks
from trencadis.engine.runner.limits import (
    ServingLimits,
    check_memory,
    num_cache_blocks,
    token_budget,
)
from trencadis.engine.runner.model_input import build_prompt
from trencadis.engine.runner.model_runner import ModelRunner
from trencadis.engine.runner.sampler import HostSampler
from trencadis.engine.runner.sampler_warmup import SamplerWarmup
from trencadis.engine.runner.sampling_rows import Sampler
from trencadis.engine.runner.shapes import PromptShape
from trencadis.kvcache import ceil_div
from trencadis.kvcache.tensors import KVCache, bytes_per_block
from trencadis.warmup import (
    MemoryPlan,
    MemoryUse,
    WarmupError,
    WarmupReport,
    sampler_batch_sizes,
    warm_up,
    warm_up_sampler,
)

logger = logging.getLogger("trencadis.engine")


class Worker:
    """Loads the model, profiles it, allocates the KV cache, builds the grids and the model runner.

    Raises `ModelError` or `ConfigError` when the model cannot be served under ``config``.
    """

    def __init__(self, config: EngineConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.background: BackgroundWarmupLoop | None = None
        self.spec = inspect_model(config.model)
        self._max_model_len = resolve_max_model_len(
            config.max_model_len, self.spec.max_position_embeddings
        )
        self.dtype = resolve_dtype(config.dtype, self.spec, device.preferred_dtype, device.dtypes)
        self._load_profile_and_allocate()
        self.grids = self._build_grids()
        compiled = self._enable_compilation()
        forward_runner = ForwardRunner(self._model, device, self.cache, compiled=compiled)
        self._sampler = self._make_sampler(compiled)
        self.runner = ModelRunner(forward_runner, self._sampler, device, self.cache, self.grids)

    def _load_profile_and_allocate(self) -> None:
        """Weights, profiling run, memory plan, KV cache; logs the memory that each step took."""
        before = self._memory_use()
        self._model = load_model(
            self.spec, self.device.torch_device, self.dtype, self._max_model_len
        )
        self.device.optimize(self._model)
        before = self._log_memory("Loading model weights", before)
        self._profile()
        self._memory = self._plan_memory()
        self.limits = ServingLimits.of(self.config, self._max_model_len, self._num_blocks())
        before = self._log_memory("Profiling run", before)
        self.cache = self._make_cache(self.limits.num_blocks, self._num_host_blocks())
        self._log_memory("Initializing cache engine", before)

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block in all layers."""
        return bytes_per_block(
            num_layers=self.spec.num_layers,
            kv_heads=self.spec.num_kv_heads,
            block_size=self.config.block_size,
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
        )

    @property
    def num_buckets(self) -> int:
        """Buckets of both phases; 0 without buckets."""
        return self.grids.num_buckets if self.grids else 0

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> WarmupReport | None:
        """Warm up before serving, as ``config.warmup`` says.

        Returns None where the rest is warmed up in the background, or nothing is. ``stop`` is
        polled before each bucket; True ends the warm-up.
        """
        report = None
        if self.grids is not None and self.config.warmup == "full":
            report = self._warm_up_all(self.grids, stop)
        elif self.grids is not None and self.config.warmup == "background":
            self._warm_up_first(self.grids)
        else:
            logger.info("Skipping warmup: the first request of each shape will be slower")
            self.runner.forward_runner.compile_cold = True
        self.runner.forward_runner.start_serving()
        return report

    def _warm_up_all(self, grids: Grids, stop: Callable[[], bool]) -> WarmupReport:
        sampler = SamplerWarmup(self._sampler, self.device, self._model)
        buckets = grids.prompt.buckets, grids.decode.buckets
        report = warm_up(
            self.runner,
            *buckets,
            config=self.config.graphs,
            memory=self._memory if self.device.supports_graphs else None,
            sampler=sampler,
            defragmenter=functools.partial(warm_up_copies, self.cache, self.device),
            stop=stop,
        )
        left_out = self.config.graphs.enforce_eager and not self.config.graphs.skip
        if left_out and report.complete and not self.device.dynamic_shapes:
            # Warm-up leaves the sampler out with enforce_eager, but this device compiles each
            # operation of a new shape, also without graphs and compiled layers.
            warm_up_sampler(sampler, sampler_batch_sizes(*buckets))
        return report

    def _make_sampler(self, compiled: bool) -> Sampler:
        if self.device.shares_host_memory:
            return HostSampler()
        # Other devices run a new shape without a compiler, which would take longer than it saves.
        compiled = compiled and not self.device.dynamic_shapes
        return DeviceSampler(self.device, self.spec.vocab_size, compiled=compiled)

    def _warm_up_first(self, grids: Grids) -> None:
        """Warm up the first bucket of each phase now, the others in the background."""
        self.background = BackgroundWarmupLoop(
            self.runner, grids, in_thread=self.device.dynamic_shapes
        )
        self.background.warm_up_first()
        self.runner.prefer_ready_buckets(self.background.record_miss)

    # Memory.

    def _profile(self) -> None:
        """Run the largest prefill once, so that its peak memory is not given to the KV cache.

        The cache of this run has the padding block only.
        """
        budget = token_budget(self.config)
        query = min(budget, self._max_model_len)
        shape = PromptShape(ceil_div(budget, query), query, 0)
        cache = self._make_cache(1, 0)
        batch = build_prompt((), shape, cache, self.device.upload)
        ForwardRunner(self._model, self.device, cache).run(batch)
        self.device.synchronize()

    def _plan_memory(self) -> MemoryPlan:
        settings = self.config.graphs
        captures = self.device.supports_graphs and not settings.enforce_eager
        try:
            plan = MemoryPlan.from_profile(
                self.device.free_memory(),
                self.config.gpu_memory_utilization,
                settings.graph_reserved_mem if captures else 0.0,
                settings.graph_prompt_ratio,
                block_bytes=self.block_bytes,
            )
        except WarmupError as error:
            raise ConfigError(str(error)) from error
        logger.info(plan.describe())
        return plan

    def _num_blocks(self) -> int:
        fitting = self._memory.num_blocks
        limit = self.config.kv_cache_memory or self.device.default_kv_cache_memory
        if limit is not None:
            fitting = min(fitting, limit // self.block_bytes)
        num_blocks = num_cache_blocks(
            self.config,
            self._max_model_len,
            fitting=fitting,
            block_bytes=self.block_bytes,
            remedy="raise kv_cache_memory",
        )
        check_memory("num_blocks", num_blocks, self.block_bytes, self.device.total_memory())
        logger.info("# KV blocks: %d of %d tokens", num_blocks, self.config.block_size)
        return num_blocks

    def _num_host_blocks(self) -> int:
        per_sequence = ceil_div(self._max_model_len, self.config.block_size)
        return num_host_blocks(self.config, self.device, self.block_bytes, per_sequence)

    def _make_cache(self, num_blocks: int, num_host_blocks: int) -> KVCache:
        return KVCache(
            num_layers=self.spec.num_layers,
            num_blocks=num_blocks,
            kv_heads=self.spec.num_kv_heads,
            block_size=self.config.block_size,
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
            device=self.device.torch_device,
            num_host_blocks=num_host_blocks,
            token_rows=self.device.attention.token_rows,
        )

    def _memory_use(self) -> MemoryUse:
        return MemoryUse.read(
            device_free=self.device.free_memory(), device_total=self.device.total_memory()
        )

    def _log_memory(self, step: str, before: MemoryUse) -> MemoryUse:
        now = self._memory_use()
        logger.info(now.since(before, step))
        return now

    # Shapes.

    def _build_grids(self) -> Grids | None:
        if not self.config.use_buckets:
            return None
        try:
            return build_grids(
                self.config.bucketing, self.limits, exponential=self.device.exponential_grid
            )
        except BucketingError as error:
            raise ConfigError(str(error)) from error

    def _enable_compilation(self) -> bool:
        """Whether decoder layers are compiled: as configured, if this machine has the compiler."""
        if not self.config.compile:
            return False
        missing = self.device.compiler_missing()
        if missing is not None:
            logger.warning("Serving without --compile, which needs %s", missing)
            return False
        directory = _compile_cache(self.config)
        try:
            self.device.keep_compiled(directory)
        except OSError as error:
            raise ConfigError(
                f"compile_cache {directory} cannot be used ({error.strerror}): name a directory "
                "that can be written"
            ) from error
        return True


def _compile_cache(config: EngineConfig) -> Path:
    if config.compile_cache is not None:
        return Path(config.compile_cache)
    return Path(platformdirs.user_cache_dir("trencadis")) / "compiled"
