"""The worker: everything on one device. It loads the model, plans memory, and warms up.

The engine core has one worker. The core schedules; the worker's `ModelRunner` executes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Generator
from pathlib import Path

import platformdirs

from trencadis.bucketing import (
    Bucket,
    BucketingConfig,
    BucketingError,
)
from trencadis.engine.config import FITTED, EngineConfig, resolve_max_model_len
from trencadis.engine.devices import Device
from trencadis.engine.errors import ConfigError
from trencadis.engine.models.loader import inspect_model, load_model, resolve_dtype
from trencadis.engine.runner.background_warmup import BackgroundWarmupLoop
from trencadis.engine.runner.block_moves import warm_up_copies
from trencadis.engine.runner.device_sampler import DeviceSampler
from trencadis.engine.runner.forward_runner import ForwardRunner
from trencadis.engine.runner.grids import (
    Grids,
    build_grids,
    decode_read,
    sequence_grids,
)
from trencadis.engine.runner.host_swap import num_host_blocks
from trencadis.engine.runner.learned_grids import (
    fitted_config,
    learned_config,
    served_replays,
    served_traffic,
    traffic_file,
)
from trencadis.engine.runner.limits import (
    ServingLimits,
    check_memory,
    num_cache_blocks,
    token_budget,
)
from trencadis.engine.runner.model_input import build_prompt
from trencadis.engine.runner.model_runner import ModelRunner
from trencadis.engine.runner.recorded_traffic import TrafficLog
from trencadis.engine.runner.sampler import HostSampler
from trencadis.engine.runner.sampler_warmup import SamplerWarmup
from trencadis.engine.runner.sampling_rows import Sampler
from trencadis.engine.runner.shapes import PromptShape
from trencadis.kvcache import ceil_div
from trencadis.kvcache.tensors import KVCache, bytes_per_block
from trencadis.warmup import (
    GRAPH_RESERVED_MEM,
    GraphCapture,
    MemoryPlan,
    MemoryUse,
    Phase,
    WarmupError,
    WarmupReport,
    capture_order,
    format_bytes,
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
        self._traffic_file = traffic_file(config)
        self._served = served_traffic(config)
        # A grid of sequence lengths is there before the cache whose size the others depend on.
        self.grids = self._sequence_grids()
        self._load_profile_and_allocate()
        if self.grids is None:
            self.grids = self._build_grids()
        compiled = self._enable_compilation()
        forward_runner = ForwardRunner(self._model, device, self.cache, compiled=compiled)
        self._sampler = self._make_sampler(compiled)
        self.read = self.grids.read if self.grids else decode_read(config.bucketing)
        self.runner = ModelRunner(
            forward_runner, self._sampler, device, self.cache, self.grids, self.read
        )
        self._traffic_log = self._make_traffic_log()
        self._set_policy_of_misses(forward_runner)

    def _load_profile_and_allocate(self) -> None:
        """Weights, profiling run, memory plan, KV cache.

        Logs the memory that each step took, in the words and the order of seed 000.
        """
        start = before = self._memory_use()
        self._model = load_model(
            self.spec, self.device.torch_device, self.dtype, self._max_model_len
        )
        before = self._log_memory(f"Pre-loading model weights on {self._place}", before)
        self.device.optimize(self._model)
        kind = self.device.name.upper()
        graphs = self.device.supports_graphs
        self._log_memory(f"Wrapping in {kind} Graph" if graphs else "Optimizing layers", before)
        before = self._log_memory("Loading model weights", start, in_total=True)
        self._profile()
        self._before_cache = self._log_memory("Model profiling run", before)
        self._memory = self._plan_memory()
        self.limits = ServingLimits.of(self.config, self._max_model_len, self._num_blocks())
        num_blocks, num_host_blocks = self.limits.num_blocks, self._num_host_blocks()
        # Where there is one memory, both would be blocks of the CPU.
        on_host = "swap" if self.device.shares_host_memory else "CPU"
        logger.info("# %s blocks: %d, # %s blocks: %d", kind, num_blocks, on_host, num_host_blocks)
        self.cache = self._make_cache(num_blocks, num_host_blocks)
        self._log_memory("Initializing cache engine", self._before_cache)
        self._log_left_over()

    @property
    def _place(self) -> str:
        """The device as seed 000 names it: ``hpu:0``."""
        place = self.device.torch_device
        return place.type if place.type == "cpu" else f"{place.type}:{place.index or 0}"

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
    def captures_graphs(self) -> bool:
        """Whether graphs are captured on this device, under these settings."""
        return self.device.supports_graphs and not self.config.graphs.enforce_eager

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
            if (capture := self._live_capture()) is not None:
                self.runner.capture_in_traffic(capture)
        self._log_memory("init_cache_engine", self._before_cache)
        if self._traffic_log is not None:
            self.runner.record_traffic(self._traffic_log)
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
            replays=self._replays(grids),
            sampler=sampler,
            defragmenter=functools.partial(
                warm_up_copies, self.cache, self.device, self.config.defrag
            ),
            stop=stop,
        )
        left_out = self.config.graphs.enforce_eager and not self.config.graphs.skip
        if left_out and report.complete and not self.device.dynamic_shapes:
            # Warm-up leaves the sampler out with enforce_eager, but this device compiles each
            # operation of a new shape, also without graphs and compiled layers.
            warm_up_sampler(sampler, sampler_batch_sizes(*buckets))
        return report

    def _set_policy_of_misses(self, forward_runner: ForwardRunner) -> None:
        """What becomes of a batch in a shape that was not warmed up."""
        policy = self.config.on_bucket_miss
        if policy == "eager" and not self.device.dynamic_shapes:
            raise ConfigError(
                f"on_bucket_miss eager needs a device that runs a new shape uncompiled, and "
                f"{self.device.name} compiles each: choose compile or refuse",
                "on_bucket_miss",
            )
        without_warmup = self.config.warmup == "none" or self.grids is None
        forward_runner.compile_cold = policy == "compile" or (policy == "auto" and without_warmup)
        forward_runner.refuse_cold = policy == "refuse"

    def close(self) -> None:
        """Write what was recorded."""
        if self._traffic_log is not None:
            self._traffic_log.save()

    def _make_sampler(self, compiled: bool) -> Sampler:
        if self.device.shares_host_memory:
            return HostSampler()
        # Other devices run a new shape without a compiler, which would take longer than it saves.
        compiled = compiled and not self.device.dynamic_shapes
        return DeviceSampler(self.device, self.spec.vocab_size, compiled=compiled)

    def _warm_up_first(self, grids: Grids) -> None:
        """Warm up the first bucket of each phase now, the others in the background."""
        capture = self._live_capture()
        self.background = BackgroundWarmupLoop(
            self.runner,
            grids,
            # No other thread may use the device while a graph is captured.
            in_thread=self.device.dynamic_shapes and capture is None,
            capture=capture,
        )
        self.background.warm_up_first()
        self.runner.prefer_ready_buckets(self.background.record_miss)

    def _live_capture(self) -> GraphCapture | None:
        """What captures graphs while requests are served, within the budget of a full warm-up."""
        if self.grids is None or not self.captures_graphs:
            return None
        settings = self.config.graphs
        budget = self._memory.graph_budget(self.device.free_memory())
        buckets = {Phase.PROMPT: self.grids.prompt.buckets, Phase.DECODE: self.grids.decode.buckets}
        replays = self._replays(self.grids)
        orders = {
            Phase.PROMPT: capture_order(settings.prompt_strategy, replays.get(Phase.PROMPT)),
            Phase.DECODE: capture_order(settings.decode_strategy, replays.get(Phase.DECODE)),
        }
        logger.info("Graphs are captured while requests are served. %s", budget.describe())
        return GraphCapture(self.runner, buckets, orders, budget)

    # Memory.

    def _profile(self) -> None:
        """Run the largest prefill without context once, so that the KV cache leaves its memory.

        The cache of this run has the padding block only. A prefill with context and a decode that
        gathers blocks need more memory than this, out of the margin.
        """
        budget = token_budget(self.config)
        query = min(budget, self._max_model_len)
        shape = PromptShape(ceil_div(budget, query), query, 0)
        if self.grids is not None:
            largest = max(self.grids.prompt.buckets, key=lambda bucket: math.prod(bucket.shape))
            shape = self.grids.prompt_shapes(largest.shape)[0]
        cache = self._make_cache(1, 0)
        batch = build_prompt((), shape, cache, self.device.upload)
        ForwardRunner(self._model, self.device, cache).run(batch)
        self.device.synchronize()

    def _plan_memory(self) -> MemoryPlan:
        settings = self.config.graphs
        captures = self.captures_graphs
        if not captures and settings.graph_reserved_mem != GRAPH_RESERVED_MEM:
            logger.info(
                "VLLM_GRAPH_RESERVED_MEM=%g is not applied: no graphs are captured (%s)",
                settings.graph_reserved_mem,
                "--enforce-eager" if settings.enforce_eager else f"device {self.device.name}",
            )
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
        return num_blocks

    def _log_left_over(self) -> None:
        """Say what of a device's own memory neither the KV cache nor graphs will use."""
        left = self._memory.num_blocks - self.limits.num_blocks
        if self.device.default_kv_cache_memory is not None or left <= 0:
            return
        logger.info(
            "%s planned for the KV cache stay free, for %d more blocks: --max-num-seqs, "
            "--max-model-len or --num-gpu-blocks-override would use them; graphs do not",
            format_bytes(left * self.block_bytes),
            left,
        )

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

    def _log_memory(self, step: str, before: MemoryUse, *, in_total: bool = False) -> MemoryUse:
        now = self._memory_use()
        logger.info(now.since(before, step, in_total=in_total))
        return now

    # Shapes.

    def _sequence_grids(self) -> Grids | None:
        if not self.config.use_buckets or self.config.bucket_grid != "seq":
            return None
        with _bucketing_errors():
            return sequence_grids(self.config.bucketing, self.config, self._max_model_len)

    def _build_grids(self) -> Grids | None:
        if not self.config.use_buckets:
            return None
        with _bucketing_errors():
            return build_grids(
                self._bucketing(), self.limits, exponential=self.device.exponential_grid
            )

    def _bucketing(self) -> BucketingConfig | None:
        """The user's bucket settings, with the fit that ``bucket_grid`` asks for."""
        config, grid = self.config.bucketing, self.config.bucket_grid
        if grid.startswith(FITTED):
            return fitted_config(config or BucketingConfig(), Path(grid.removeprefix(FITTED)))
        if grid != "learn" or self._traffic_file is None:
            return config
        base = config or BucketingConfig()
        learned = learned_config(base, self._traffic_file, self._served, self.limits)
        return learned or config

    def _make_traffic_log(self) -> TrafficLog | None:
        if self._traffic_file is None:
            return None
        axes = {
            Phase.PROMPT: ("batch", "query", "context_blocks"),
            Phase.DECODE: ("batch", "blocks"),
        }
        if self.grids is not None:
            axes = {Phase.PROMPT: self.grids.prompt.axes, Phase.DECODE: self.grids.decode.axes}
        logger.info("The shapes of batches are recorded in %s", self._traffic_file)
        return TrafficLog(self._traffic_file, axes)

    def _replays(self, grids: Grids) -> dict[Phase, dict[Bucket, float]]:
        if not self.captures_graphs:
            return {}
        with _bucketing_errors():
            return served_replays(grids, self.config.graphs, self._served)

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


@contextlib.contextmanager
def _bucketing_errors() -> Generator[None, None, None]:
    """Turn errors of bucket settings into those of the engine."""
    try:
        yield
    except BucketingError as error:
        raise ConfigError(str(error)) from error


def _compile_cache(config: EngineConfig) -> Path:
    if config.compile_cache is not None:
        return Path(config.compile_cache)
    return Path(platformdirs.user_cache_dir("trencadis")) / "compiled"
