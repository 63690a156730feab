"""The worker: everything of one model on one device: weights, memory plan, KV cache, warm-up.

The engine core serves one worker. The core schedules; the worker's `ModelRunner` executes. While
another model is served, a worker may sleep with its weights in host memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

import platformdirs
import torch
from torch import nn

from trencadis.bucketing import (
    Bucket,
    BucketGrid,
    BucketingConfig,
    BucketingError,
)
from trencadis.engine.config import FITTED, EngineConfig
from trencadis.engine.devices import Device
from trencadis.engine.errors import ConfigError
from trencadis.engine.models.declared_modules import read_pooling
from trencadis.engine.models.decoder_layers import one_layer_of_each_kind
from trencadis.engine.models.loader import (
    ModelSpec,
    inspect_model,
    load_model,
    move_weights,
    num_weight_bytes,
    resolve_dtype,
)
from trencadis.engine.models.paged_context import Attention
from trencadis.engine.models.pooling import embedding_size
from trencadis.engine.runner.background_warmup import BackgroundWarmupLoop
from trencadis.engine.runner.block_moves import warm_up_copies
from trencadis.engine.runner.device_sampler import DeviceSampler
from trencadis.engine.runner.forward_runner import ForwardRunner
from trencadis.engine.runner.grids import (
    Grids,
    announce_grids,
    build_grids,
    build_prompts,
    decode_read,
    largest_prompts,
    sequence_grids,
)
from trencadis.engine.runner.host_swap import num_host_blocks
from trencadis.engine.runner.learned_grids import (
    fitted_config,
    learn_decodes,
    learn_grids,
    served_replays,
    served_traffic,
    traffic_file,
)
from trencadis.engine.runner.limits import (
    ServingLimits,
    check_memory,
    num_cache_blocks,
    resolve_max_model_len,
    token_budget,
)
from trencadis.engine.runner.model_input import (
    MASK_ROWS,
    build_decode,
    build_prompt,
    lay_out_decodes,
)
from trencadis.engine.runner.model_runner import ModelRunner
from trencadis.engine.runner.pooler import Pooler
from trencadis.engine.runner.recorded_traffic import TrafficLog
from trencadis.engine.runner.sampler import HostSampler
from trencadis.engine.runner.sampler_warmup import SamplerWarmup
from trencadis.engine.runner.sampling_rows import Sampler
from trencadis.engine.runner.shapes import (
    ChunkSize,
    DecodeRead,
    DecodeShape,
    PromptShape,
    RaggedShape,
    most_prefix_pairs,
)
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
    """A model on a device. Call `load`, `initialise_cache` and `warm_up`, in this order.

    ``embedding_size``: numbers of an embedding, once it is loaded; 0 for a model without.
    ``is_asleep``: the device memory was released by `sleep`. ``is_discarded``: the weights, too, by
    `discard`. ``is_warm``: the warm-up has run for
    the programs and graphs that there are. ``records``: whether it serves traffic, which is
    recorded where the settings say so; a warm-up alone writes no file of traffic.
    Each of the methods raises `ModelError` or `ConfigError` when the model cannot be served under
    ``config``.
    """

    cache: KVCache
    limits: ServingLimits
    runner: ModelRunner
    read: DecodeRead
    _model: nn.Module
    _attention: Attention
    _memory: MemoryPlan
    _prompts: BucketGrid | None

    def __init__(self, config: EngineConfig, device: Device, *, records: bool = True) -> None:
        self.config = config
        self.device = device
        self._records = records
        self.background: BackgroundWarmupLoop | None = None
        self.is_asleep = self.is_warm = self.is_discarded = False
        self.embedding_size = 0
        self.spec = _inspect(config)
        self._max_model_len = self._resolve_max_model_len()
        self.dtype = resolve_dtype(config.dtype, self.spec, device.preferred_dtype, device.dtypes)
        self._traffic_file = traffic_file(config)
        self._served = served_traffic(config)
        # A grid of sequence lengths is there before the cache whose size the others depend on.
        self.grids = self._sequence_grids()

    def load(self) -> None:
        """Load the weights onto the device.

        Logs the memory that each step took, in the words and the order of seed 000.
        """
        if self.computes_embeddings:
            logger.info(
                "Embeddings are pooled from %s, and normalised", read_pooling(self.spec.source)
            )
            prompts = self.spec.text_prompts
            if prompts.texts:
                logger.info(
                    "Prompts of texts: %s; without prompt_name %s",
                    ", ".join(prompts.texts),
                    prompts.default or "none",
                )
        start = before = self._memory_use()
        self._model = load_model(
            self.spec, self.device.torch_device, self.dtype, self._max_model_len
        )
        if self.computes_embeddings:
            self.embedding_size = embedding_size(self._model)
        before = self._log_memory(f"Pre-loading model weights on {self._place}", before)
        if self.config.quantization == "int8":
            self.device.quantize(self._model)
        self.device.optimize(self._model)
        self._attention = self.device.attention
        kind = self.device.name.upper()
        graphs = self.device.supports_graphs
        self._log_memory(f"Wrapping in {kind} Graph" if graphs else "Optimizing layers", before)
        self._log_memory("Loading model weights", start, in_total=True)

    def initialise_cache(self) -> None:
        """Profile the model, size and allocate the KV cache, build the grids and the runner."""
        config, device = self.config, self.device
        self.read = self.grids.read if self.grids else decode_read(config.bucketing)
        self._prompts = self._build_prompts()
        self._profile_and_allocate()
        self._compiled = compiled = self._enable_compilation()
        if self.grids is None:
            self.grids = self._build_grids()
        forward_runner = ForwardRunner(self._model, device, self.cache, compiled=compiled)
        self._sampler = self._make_sampler(compiled)
        self.read = self.grids.read if self.grids else self.read
        self.runner = ModelRunner(
            forward_runner, self._sampler, device, self.cache, self.grids, self.read
        )
        self._traffic_log = self._make_traffic_log()
        self._set_policy_of_misses(forward_runner)
        self.is_warm = False

    def _profile_and_allocate(self) -> None:
        """Profiling run, memory plan, KV cache."""
        kind, before = self.device.name.upper(), self._memory_use()
        self._memory = self._profile()
        # With the peak of the run, whose memory stays free: it is none of the plan's.
        logger.info(
            self._memory_use(self._memory.free_after_profile).since(before, "Model profiling run")
        )
        self._before_cache = self._memory_use()
        self._log_plan()
        self.limits = ServingLimits.of(
            self.config, self._max_model_len, self._num_blocks(self._memory, after_run=True)
        )
        num_blocks, num_host_blocks = self.limits.num_blocks, self._num_host_blocks()
        # Where there is one memory, both would be blocks of the CPU.
        on_host = "swap" if self.device.shares_host_memory else "CPU"
        logger.info("# %s blocks: %d, # %s blocks: %d", kind, num_blocks, on_host, num_host_blocks)
        self.cache = self._make_cache(num_blocks, num_host_blocks)
        self._log_memory("Initializing cache engine", self._before_cache)
        self._log_left_over()

    @property
    def computes_embeddings(self) -> bool:
        """Whether requests get embeddings: not where they get scores or are generated."""
        return self.spec.is_pooling and self.spec.scoring is None

    def _resolve_max_model_len(self) -> int:
        """The longest sequence: the user's, or the model's, which may have been trained for less
        than its context."""
        configured, trained = self.config.max_model_len, self.spec.max_seq_length
        context = self.spec.max_position_embeddings
        if configured is None and trained is not None:
            return min(trained, context)
        longest = resolve_max_model_len(configured, context)
        if trained is not None and longest > trained:
            logger.warning(
                "max_model_len %d is above %d, the tokens after which %s wants texts cut "
                "(sentence_bert_config.json)",
                longest,
                trained,
                self.spec.source,
            )
        return longest

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
            before = self.device.num_compilations()
            report = self._warm_up_all(self.grids, stop)
            if self._compiled:
                compiled = self.device.num_compilations() - before
                logger.info("Warm-up compiled %d programs; a cache had the others", compiled)
        elif self.grids is not None and self.config.warmup == "background":
            self._warm_up_first(self.grids)
        else:
            logger.info("Skipping warmup: the first request of each shape will be slower")
            if (capture := self._live_capture()) is not None:
                self.runner.capture_in_traffic(capture)
        self._log_memory("init_cache_engine", self._before_cache)
        if self._traffic_log is not None:
            self.runner.record_traffic(self._traffic_log)
        if self._compiled:
            # Compilers leave cycles that refer to the KV cache: it would outlive its release.
            gc.collect()
        if self.background is None:
            self.device.end_warm_up()
        self.runner.forward_runner.start_serving()
        self.is_warm = True
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

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return num_weight_bytes(self._model)

    def sleep(self) -> None:
        """Release the device memory: the KV cache, graphs, and the weights to host memory.

        Where device memory is host memory, the weights stay, with the programs that use them. A
        sleeping worker may sleep again.
        """
        self._release_cache()
        if not self.device.shares_host_memory:
            move_weights(self._model, torch.device("cpu"))
        self.device.synchronize()

    def wake(self) -> None:
        """Take the device memory again, with an empty KV cache.

        Where the programs were kept, the cache has the size that it had, and ``is_warm`` is still
        True. Otherwise everything is sized again, and `warm_up` is to be called.
        """
        self.device.attention = self._attention
        if not self.device.shares_host_memory:
            move_weights(self._model, self.device.torch_device)
        if self.runner.forward_runner.keeps_programs:
            self.cache = self._make_cache(self.limits.num_blocks, self._num_host_blocks())
            self.runner.use_cache(self.cache)
        else:
            self.grids = self._sequence_grids()
            self.background = None
            self.initialise_cache()
        self.is_asleep = False

    def discard(self) -> None:
        """Release device memory and weights for good. Only the counters can be read afterwards."""
        self.is_discarded = True
        self._release_cache()
        self.runner.forward_runner.discard_model()
        self._model = nn.Module()
        self.device.synchronize()

    def _release_cache(self) -> None:
        self.is_asleep = True  # at once: `wake` repairs what an error leaves half done
        if self.background is not None:
            self.background.wait()
        self.close()
        self.device.synchronize()
        keeps_programs = self.runner.forward_runner.keeps_programs
        if not keeps_programs:
            self.runner.forward_runner.release_all()
            self._sampler.release()
        if self._compiled and (self.background is not None or not keeps_programs):
            gc.collect()  # see `warm_up`: also of what was compiled in traffic
        # The padding block, in host memory: a device that is full has no space for it.
        self.cache = self._make_cache(1, 0, torch.device("cpu"))
        self.runner.use_cache(self.cache)

    def missing_buckets(self) -> list[tuple[Phase, Bucket]]:
        """The buckets with a program that the compile cache lacks.

        Only with compilation, on a device that lists its programs, or one that counts what is
        missing: it runs each bucket.
        """
        if self.grids is None:
            return []
        buckets = {Phase.PROMPT: self.grids.prompt.buckets, Phase.DECODE: self.grids.decode.buckets}
        return [
            (phase, bucket)
            for phase in Phase
            for bucket in buckets[phase]
            if self._is_missing(phase, bucket)
        ]

    def _is_missing(self, phase: Phase, bucket: Bucket) -> bool:
        if self.device.lists_programs:
            return not self.runner.is_kept(phase, bucket)
        before = self.device.num_compilations()
        self.runner.execute(phase, bucket)
        self.device.synchronize()
        return self.device.num_compilations() > before

    def close(self) -> None:
        """Write what was recorded."""
        if self._traffic_log is not None:
            self._traffic_log.save()

    def _make_sampler(self, compiled: bool) -> Sampler:
        if self.spec.is_pooling:
            return Pooler(self.device, normalises=self.computes_embeddings)
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
            on_end=self.device.end_warm_up,
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

    def _profile(self) -> MemoryPlan:
        """Run the largest forward passes once, and divide what the largest peak leaves.

        Both run on the padding block alone, which a pass may gather as often as it likes. A decode
        gathers at most as many blocks as fit beside the prefill's peak; the plan only gets fewer
        of them by its own. A cache that would be too small without any peak is refused first.
        """
        self._num_blocks(self._plan_memory(self.device.free_memory()))
        lowest = self._lowest_memory(self._largest_prompts())
        num_blocks = self._num_blocks(self._plan_after_run(lowest), after_run=True)
        decode = DecodeShape(self.config.max_num_seqs, 0, self._most_pairs(num_blocks))
        return self._plan_after_run(min(lowest, self._lowest_memory([decode])))

    def _lowest_memory(self, shapes: Sequence[PromptShape | RaggedShape | DecodeShape]) -> int:
        """The least memory that is free while dummy batches of these shapes run, one by one."""
        cache = self._make_cache(1, 0)
        forward_runner = ForwardRunner(self._model, self.device, cache)
        upload, free = self.device.upload, []
        for shape in shapes:
            if isinstance(shape, DecodeShape):
                layout = lay_out_decodes((), shape.blocks, cache.block_size)
                batch = build_decode((), layout, shape, cache, upload)
            else:
                batch = build_prompt((), shape, cache, upload)
            self.device.begin_step()
            before = self.device.free_memory()
            with self._shortened():
                taken = self.device.peak_memory(functools.partial(forward_runner.run, batch))
            free.append(before - taken)
        return min(free)

    def _shortened(self) -> contextlib.AbstractContextManager[None]:
        """Where a chunk of a long context takes minutes, the profiling run omits equal layers.

        They take the memory that the layer before has freed.
        """
        is_slow = self.device.shares_host_memory
        return one_layer_of_each_kind(self._model) if is_slow else contextlib.nullcontext()

    def _largest_prompts(self) -> Sequence[PromptShape | RaggedShape]:
        """The shapes of prefill batches that may take the most memory."""
        budget, longest = token_budget(self.config), self._max_model_len
        block_size = self.config.block_size
        if self._is_ragged and self.config.use_buckets:
            # A chunk attends in slices, so one of a slice's size has the largest context and mask.
            query = min(budget, MASK_ROWS, max(1, longest - block_size))
            context = longest - query
            chunk = ChunkSize(query, context, ceil_div(context, block_size))
            return [RaggedShape(budget, (chunk,))]
        if self.grids is not None:
            shapes = [
                shape
                for bucket in self.grids.prompt.buckets
                for shape in self.grids.prompt_shapes(bucket.shape)
                if isinstance(shape, PromptShape)
            ]
        elif self._prompts is not None:
            shapes = [PromptShape(*bucket.shape) for bucket in self._prompts.buckets]
        else:
            query = min(budget, longest)
            context = ceil_div(longest - query, block_size)
            shapes = [
                PromptShape(ceil_div(budget, query), query, 0),
                PromptShape(1, query, context),
            ]
        return largest_prompts(shapes, block_size)

    def _most_pairs(self, num_blocks: int) -> int:
        """The most (block, sequence) pairs that a decode scores in a cache of so many blocks."""
        of_all = self.config.max_num_seqs * ceil_div(self._max_model_len, self.config.block_size)
        if self.read is DecodeRead.PREFIX:
            # A bucket gathers as many shared blocks as its prefix has. The prefix is scored in
            # place, which takes somewhat less than here.
            return most_prefix_pairs(num_blocks)
        return of_all if self.read is DecodeRead.SEQUENCES else min(of_all, 3 * num_blocks)

    def _plan_memory(self, free_memory: int) -> MemoryPlan:
        settings = self.config.graphs
        try:
            return MemoryPlan.from_profile(
                max(1, free_memory),
                self.config.gpu_memory_utilization,
                settings.graph_reserved_mem if self.captures_graphs else 0.0,
                settings.graph_prompt_ratio,
                block_bytes=self.block_bytes,
            )
        except WarmupError as error:
            raise ConfigError(str(error)) from error

    def _plan_after_run(self, free_memory: int) -> MemoryPlan:
        try:
            return self._plan_memory(free_memory)
        except ConfigError as error:
            # The same plan fitted without the run's peak.
            raise ConfigError(
                f"{error}; the largest batch leaves {format_bytes(max(0, free_memory))} free: "
                "lower max_num_batched_tokens or max_model_len"
            ) from error

    def _log_plan(self) -> None:
        settings = self.config.graphs
        if not self.captures_graphs and settings.graph_reserved_mem != GRAPH_RESERVED_MEM:
            logger.info(
                "VLLM_GRAPH_RESERVED_MEM=%g is not applied: no graphs are captured (%s)",
                settings.graph_reserved_mem,
                "--enforce-eager" if settings.enforce_eager else f"device {self.device.name}",
            )
        logger.info(self._memory.describe())

    def _num_blocks(self, plan: MemoryPlan, *, after_run: bool = False) -> int:
        """Blocks of the KV cache under a plan and the settings. Raises `ConfigError`."""
        fitting, remedy = plan.num_blocks, "raise gpu_memory_utilization, or free memory"
        if after_run:
            remedy = (
                "lower max_num_batched_tokens: the largest batch leaves "
                f"{format_bytes(plan.free_after_profile)} free"
            )
        limit = self.config.kv_cache_memory or self.device.default_kv_cache_memory
        if limit is not None and limit // self.block_bytes <= fitting:
            fitting, remedy = limit // self.block_bytes, "raise kv_cache_memory"
        if self.config.num_blocks is not None:
            remedy = "raise num_blocks"
        num_blocks = num_cache_blocks(
            self.config,
            self._max_model_len,
            fitting=fitting,
            block_bytes=self.block_bytes,
            remedy=remedy,
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

    def _make_cache(
        self, num_blocks: int, num_host_blocks: int, place: torch.device | None = None
    ) -> KVCache:
        """A cache on the device, or at another ``place``."""
        return KVCache(
            num_layers=self.spec.num_layers,
            num_blocks=num_blocks,
            kv_heads=self.spec.num_kv_heads,
            block_size=self.config.block_size,
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
            device=place or self.device.torch_device,
            num_host_blocks=num_host_blocks,
            token_rows=self.device.attention.token_rows,
        )

    def _memory_use(self, device_free: int | None = None) -> MemoryUse:
        """Memory in use now, or with so much of the device's free."""
        if device_free is None:
            device_free = self.device.free_memory()
        return MemoryUse.read(device_free=device_free, device_total=self.device.total_memory())

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

    @property
    def _is_ragged(self) -> bool:
        """Whether prompts are ragged: where the device can, unless the user chooses buckets."""
        config = self.config
        chosen = config.bucketing is not None or config.bucket_grid not in ("paged", "learn")
        return self.device.attention.as_operator and not chosen

    def _build_prompts(self) -> BucketGrid | None:
        """The grid of padded prompts, which depends on nothing that the KV cache does."""
        config = self.config
        if not config.use_buckets or self.grids is not None or self._is_ragged:
            return None
        per_sequence = ceil_div(self._max_model_len, config.block_size)
        limits = ServingLimits.of(config, self._max_model_len, per_sequence + 1)
        with _bucketing_errors():
            return build_prompts(
                self._bucketing(), limits, exponential=self.device.exponential_grid
            )

    def _build_grids(self) -> Grids | None:
        if not self.config.use_buckets:
            return None
        with _bucketing_errors():
            learned = self._learned()
            if learned is not None:
                announce_grids(learned, self.limits, f"learned from {self._traffic_file}")
                return learned
            return build_grids(
                self._bucketing(),
                self.limits,
                exponential=self.device.exponential_grid,
                ragged=self._is_ragged,
                prompts=self._prompts,
            )

    def _bucketing(self) -> BucketingConfig | None:
        """The user's bucket settings, with the fit to a file that ``bucket_grid`` names."""
        config, grid = self.config.bucketing, self.config.bucket_grid
        if not grid.startswith(FITTED):
            return config
        return fitted_config(config or BucketingConfig(), Path(grid.removeprefix(FITTED)))

    def _learned(self) -> Grids | None:
        """Grids fitted to what was served; None unless that was asked for, and enough."""
        if self.config.bucket_grid != "learn" or self._traffic_file is None:
            return None
        if self._is_ragged:
            device = self.device
            if device.dynamic_shapes and not device.supports_graphs and not device.compiles_forward:
                logger.info(
                    "Nothing is learned: prompts and decodes run in their own sizes on %s, without "
                    "buckets to pad to. What is recorded in %s is for devices that pad",
                    device.name,
                    self._traffic_file,
                )
                return None
            return learn_decodes(self._traffic_file, self._served, self.limits)
        return learn_grids(
            self.config.bucketing,
            self._traffic_file,
            self._served,
            self.limits,
            exponential=self.device.exponential_grid,
        )

    def _make_traffic_log(self) -> TrafficLog | None:
        if self._traffic_file is None or not self._records:
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
            self.device.keep_compiled(directory, trusted=self.config.trust_compile_cache)
        except OSError as error:
            raise ConfigError(
                f"compile_cache {directory} cannot be used ({error.strerror}): name a directory "
                "that can be written"
            ) from error
        return True


def _inspect(config: EngineConfig) -> ModelSpec:
    """The facts about the model. Raises `ConfigError` for a score prompt without scores."""
    if config.score_prompt != "auto" and config.runner != "pooling":
        raise ConfigError(
            f"score_prompt {config.score_prompt} is for models that score, and the runner "
            f"{config.runner} computes no scores: choose the runner pooling",
            "score_prompt",
        )
    return inspect_model(
        config.model,
        is_pooling=config.runner == "pooling",
        score_prompt=None if config.score_prompt == "auto" else config.score_prompt,
        chat_template=config.chat_template,
    )


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
