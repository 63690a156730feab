"""What runs on the device: weights, KV cache, buckets and the model runner, and their warm-up."""

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
from trencadis.engine.runner.block_moves import plan_host_blocks, warm_up_moves
from trencadis.engine.runner.forward_runner import ForwardRunner
from trencadis.engine.runner.grids import Grids, ShapeLimits, build_grids
from trencadis.engine.runner.model_input import build_prompt
from trencadis.engine.runner.model_runner import ModelRunner
from trencadis.engine.runner.sampler_warmup import SamplerWarmup
from trencadis.engine.runner.shapes import PromptShape
from trencadis.kvcache.tensors import KVCache, bytes_per_block
from trencadis.warmup import (
    MemoryPlan,
    MemoryUse,
    WarmupError,
    WarmupReport,
    format_bytes,
    warm_up,
)

logger = logging.getLogger("trencadis.engine")


class Worker:
    """Loads a model, plans the memory of its device, and prepares the shapes of its forwards.

    Raises `ModelError` or `ConfigError` when the model cannot be served under ``config``.
    """

    def __init__(self, config: EngineConfig, device: Device) -> None:
        self.config = config
        self.device = device
        self.background: BackgroundWarmupLoop | None = None
        self.spec = inspect_model(config.model)
        self.max_model_len = resolve_max_model_len(
            config.max_model_len, self.spec.max_position_embeddings
        )
        self.dtype = resolve_dtype(config.dtype, self.spec, device.preferred_dtype)
        self.max_batched_tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
        before = self._memory_use()
        self._model = load_model(self.spec, device.torch_device, self.dtype, self.max_model_len)
        device.optimize(self._model)
        before = self._log_memory("Loading model weights", before)
        self._profile()
        self._memory = self._plan_memory()
        self.num_blocks = self._num_blocks(self._memory)
        before = self._log_memory("Profiling run", before)
        self.cache = self._make_cache(self.num_blocks, self._num_host_blocks())
        self._log_memory("Initializing cache engine", before)
        self.grids = self._make_grids()
        forwards = ForwardRunner(self._model, device, self.cache, compiled=self._can_compile())
        self.runner = ModelRunner(forwards, device, self.cache, self.grids)

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
    def _blocks_per_sequence(self) -> int:
        return -(-self.max_model_len // self.config.block_size)

    @property
    def num_buckets(self) -> int:
        """Buckets of both phases; 0 without buckets."""
        return len(self.grids.prompt) + len(self.grids.decode) if self.grids else 0

    @property
    def num_ready_buckets(self) -> int:
        """Those of them that were warmed up."""
        if self.background is not None:
            return self.background.progress.done
        return self.num_buckets if self.config.warmup == "full" else 0

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> WarmupReport | None:
        """Make shapes ready as ``config.warmup`` says; None where that is done later or never.

        ``stop`` is asked before each bucket.
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
        captures = self.device.supports_graphs
        return warm_up(
            self.runner,
            grids.prompt.buckets,
            grids.decode.buckets,
            config=self.config.graphs,
            memory=self._memory if captures else None,
            sampler=SamplerWarmup(self.device, self.spec.vocab_size, self.dtype),
            defragmenter=functools.partial(warm_up_moves, self.cache, self.device),
            stop=stop,
        )

    def _warm_up_first(self, grids: Grids) -> None:
        """The first bucket of each phase now, the rest behind traffic."""
        self.background = BackgroundWarmupLoop(
            self.runner, grids, in_thread=self.device.dynamic_shapes
        )
        self.background.prepare_first()
        self.runner.prefer_ready(self.background)

    # Memory.

    def _profile(self) -> None:
        """Run the largest forward once, so that its memory is not given to the cache.

        The cache that it needs is of the padding block alone.
        """
        longest = min(self.max_batched_tokens, self.max_model_len)
        shape = PromptShape(-(-self.max_batched_tokens // longest), longest, 0)
        cache = self._make_cache(1, 0)
        batch = build_prompt((), shape, cache, self.device.torch_device)
        ForwardRunner(self._model, self.device, cache).run(batch)
        self.device.synchronize()

    def _plan_memory(self) -> MemoryPlan:
        settings = self.config.graphs
        graphs = self.device.supports_graphs and not settings.enforce_eager
        try:
            plan = MemoryPlan.from_profile(
                self.device.free_memory(),
                self.config.gpu_memory_utilization,
                settings.graph_reserved_mem if graphs else 0.0,
                settings.graph_prompt_ratio,
                block_bytes=self.block_bytes,
            )
        except WarmupError as error:
            raise ConfigError(str(error)) from error
        logger.info(plan.describe())
        return plan

    def _num_blocks(self, plan: MemoryPlan) -> int:
        """Blocks of the cache: as configured, or as many as fit and can be used."""
        size = self.config.block_size
        per_sequence = self._blocks_per_sequence
        if self.config.num_blocks is not None:
            num_blocks = self.config.num_blocks
        else:
            limit = self.config.kv_cache_memory or self.device.default_kv_cache_memory
            fits = plan.num_blocks
            if limit is not None:
                fits = min(fits, limit // self.block_bytes)
            num_blocks = min(fits, per_sequence * self.config.max_num_seqs + 1)
        if num_blocks - 1 < per_sequence:
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks of {self.config.block_size} tokens cannot hold "
                f"one sequence of max_model_len {self.max_model_len}: lower max_model_len to "
                f"{max(0, num_blocks - 1) * self.config.block_size} or raise kv_cache_memory "
                f"(a block takes {format_bytes(self.block_bytes)})"
            )
        logger.info("# KV blocks: %d of %d tokens", num_blocks, size)
        return num_blocks

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
            separate_layers=not self.device.updates_views,
        )

    def _num_host_blocks(self) -> int:
        return plan_host_blocks(
            self.config, self.device, self.block_bytes, self._blocks_per_sequence
        )

    def _memory_use(self) -> MemoryUse:
        return MemoryUse.read(
            device_free=self.device.free_memory(), device_total=self.device.total_memory()
        )

    def _log_memory(self, what: str, before: MemoryUse) -> MemoryUse:
        now = self._memory_use()
        logger.info(now.since(before, what))
        return now

    # Shapes.

    def _make_grids(self) -> Grids | None:
        if not self.config.use_buckets:
            return None
        limits = ShapeLimits(
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_batched_tokens,
            max_num_seqs=self.config.max_num_seqs,
            block_size=self.config.block_size,
            num_blocks=self.num_blocks,
        )
        try:
            return build_grids(self.config.bucketing, limits)
        except BucketingError as error:
            raise ConfigError(str(error)) from error

    def _can_compile(self) -> bool:
        """Whether to compile: as configured, unless something for it is missing here."""
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
