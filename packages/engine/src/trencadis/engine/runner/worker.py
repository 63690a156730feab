"""The worker: everything of one model on one device: weights, KV cache, warm-up, sleep.

The engine core serves one worker. The core schedules; the worker's `ModelRunner` executes. While
another model is served, a worker may sleep with its weights in host memory.
"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import platformdirs
import torch
from torch import nn

from trencadis.bucketing import Bucket
from trencadis.engine.devices import Device
from trencadis.engine.errors import ConfigError
from trencadis.engine.models.adapter_layers import AdapterLayers
from trencadis.engine.models.cache_scales import use_cache_scales
from trencadis.engine.models.calibration_files import read_measured_scales
from trencadis.engine.models.declared_modules import read_pooling
from trencadis.engine.models.layer_inputs import products_of_inputs, text_tokens
from trencadis.engine.models.layer_reading import check_layers
from trencadis.engine.models.loader import (
    ModelSpec,
    check_weight_files,
    inspect_model,
    load_model,
    move_weights,
    num_weight_bytes,
    resolve_dtype,
)
from trencadis.engine.models.logit_head import LogitHead, keep_last_hidden
from trencadis.engine.models.measured_scales import MeasuredScales, round_by_measured
from trencadis.engine.models.packed_experts import expand_experts
from trencadis.engine.models.packed_weight import WeightUse
from trencadis.engine.models.paged_context import Attention
from trencadis.engine.models.pooling import embedding_size
from trencadis.engine.models.quantized_cache import CACHE_DTYPES
from trencadis.engine.models.rank_loading import DividedModel, divide
from trencadis.engine.models.rank_modules import least_over_ranks, most_over_ranks
from trencadis.engine.models.rank_part import RankPart
from trencadis.engine.models.rounded_weights import round_weights
from trencadis.engine.models.state_layers import state_layers_of
from trencadis.engine.runner.adapter_store import AdapterStore
from trencadis.engine.runner.background_warmup import BackgroundWarmupLoop
from trencadis.engine.runner.block_moves import warm_up_copies
from trencadis.engine.runner.cache_sizing import CacheSizing
from trencadis.engine.runner.device_sampler import DeviceSampler
from trencadis.engine.runner.forward_runner import ForwardRunner
from trencadis.engine.runner.grid_choice import GridChoice
from trencadis.engine.runner.grids import Grids, decode_read
from trencadis.engine.runner.kept_programs import KeptPrograms, ProgramStore
from trencadis.engine.runner.limits import ServingLimits, resolve_max_model_len
from trencadis.engine.runner.model_runner import ModelRunner
from trencadis.engine.runner.pooler import Pooler
from trencadis.engine.runner.prompt_scorer import PromptScorer
from trencadis.engine.runner.sampler import HostSampler
from trencadis.engine.runner.sampler_warmup import SamplerWarmup
from trencadis.engine.runner.sampling_rows import Sampler
from trencadis.engine.runner.shapes import (
    DecodeRead,
    PromptShape,
    RaggedShape,
    most_shared_blocks,
)
from trencadis.engine.runner.shared_blocks import StagingFiles
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.kvcache.tensors import KVCache
from trencadis.warmup import (
    GraphCapture,
    MemoryPlan,
    MemoryUse,
    Phase,
    WarmupReport,
    capture_order,
    warm_up,
)

logger = logging.getLogger("trencadis.engine")


class Worker:
    """A model on a device. Call `load`, `initialise_cache` and `warm_up`, in this order.

    ``weight_bytes``: bytes of the weights, 0 without; of several ranks the most that one has, so
    that all of them decide alike.
    ``embedding_size``: numbers of an embedding, once it is loaded; 0 for a model without.
    ``is_asleep``: the device memory was released by `sleep`. ``is_discarded``: the weights, too, by
    `discard`. ``is_warm``: the warm-up has run for the programs and graphs that there are.
    ``on_cold``: as `ForwardRunner`. ``programs``: those of models that were served before.
    ``records``: whether it serves traffic, which is recorded where the settings say so; a warm-up
    alone writes no file of traffic. ``part``: that of a rank of several, which do all of this
    together. ``adapters``: those that an earlier worker of this model has read.
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
    _num_snapshots: int
    _programs: KeptPrograms
    _divided: DividedModel | None

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        on_cold: Callable[[object], None] = lambda shape: None,
        *,
        programs: ProgramStore | None = None,
        records: bool = True,
        part: RankPart | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        self.config = config
        self.adapters = AdapterStore(config.max_cpu_loras, adapters)
        self.device = device
        self._program_store = ProgramStore() if programs is None else programs
        self._on_cold = on_cold
        self._records = records
        self.background: BackgroundWarmupLoop | None = None
        self.is_asleep = self.is_warm = self.is_discarded = False
        self.embedding_size = self.weight_bytes = 0
        self.spec = self._packed_or_expanded(inspected(config), part)
        self._max_model_len = self._resolve_max_model_len()
        spec, self._divided = self.spec, None
        self._check_states()
        if part is not None:
            self._divided = divide(spec.config, spec.layers, spec.source, part)
        computed = spec.layers if self._divided is None else self._divided.layers
        layers = [layer.within(self._max_model_len) for layer in computed]
        check_layers(layers, device.supports, self.spec.source)
        check_weight_files(self.spec)
        self._measured = self._read_measured(part)
        self._check_weights()
        self._check_cache_dtype()
        self._check_policy_of_misses()
        self.dtype = resolve_dtype(config.dtype, self.spec, device.preferred_dtype, device.dtypes)
        self._choice = GridChoice(config, device, self._max_model_len)
        self._sizing = CacheSizing(
            config,
            device,
            layers,
            self.dtype,
            self._max_model_len,
            captures_graphs=self.captures_graphs,
            may_have_groups=self._may_have_groups,
        )
        self._sizing.check_settings()
        # A grid of sequence lengths is there before the cache whose size the others depend on.
        self.grids = self._choice.sequence_grids()

    def load(self) -> None:
        """Load the weights onto the device.

        Logs the memory that each step took, in the words and the order of seed 000.
        """
        if self.computes_embeddings:
            self._announce_pooling()
        start = before = self._memory_use()
        self._model = load_model(
            *(self.spec, self.device.torch_device, self.dtype, self._max_model_len, self._divided),
            round_weights=self._round_weights if self.config.rounding != "none" else None,
        )
        form = self.spec.weight_format(self.config.rounding)
        if form is not None and self.device.weight_use(form) is WeightUse.EXPANDED:
            expand_experts(self._model, self.dtype)
        if self.computes_embeddings:
            self.embedding_size = embedding_size(self._model)
        before = self._log_memory(f"Pre-loading model weights on {self._place}", before)
        codes = self.device.kv_cache_dtype = CACHE_DTYPES.get(self.config.kv_cache_dtype)
        if codes is not None and codes in self.device.largest_cached:
            largest = self.device.largest_cached[codes]
            scales = self._measured
            measured = None if scales is None else scales.cache_scales()
            scaled = use_cache_scales(self._model, self.spec.source, largest, measured or None)
            whose = "calibration" if measured else "checkpoint"
            logger.info("KV cache in %s, with scales of the %s: %d layers", codes, whose, scaled)
        self.device.optimize(self._model)
        if self.config.enable_lora:
            self.adapters.layers = self._make_slots()
        self.device.mark_step()  # a lazy device compiles apart what follows, as after a sleep
        self._attention = self.device.attention
        if not self.spec.is_pooling:
            keep_last_hidden(self._model)
        kind = self.device.name.upper()
        graphs = self.device.supports_graphs
        self._log_memory(f"Wrapping in {kind} Graph" if graphs else "Optimizing layers", before)
        self._log_memory("Loading model weights", start, in_total=True)
        own = num_weight_bytes(self._model)
        self.weight_bytes = own if self._divided is None else most_over_ranks(own)
        self._programs = KeptPrograms()
        if self._programs_outlive:
            self._programs = self._program_store.of(self._model, self.config)

    def _round_weights(self, model: nn.Module) -> None:
        if self._measured is not None:
            count = round_by_measured(model, self._measured)
            logger.info("inc: %d layers in FP8, by scales of %s", count, self.config.quant_config)
            return
        quantization = self.config.quantization
        products = None
        has_states = any(layer.states for layer in self.spec.layers)
        if quantization == "int4" and self._divided is None and not has_states:
            products = products_of_inputs(model, text_tokens(self.spec.source))
        form = self.spec.weight_format(quantization)
        use = None if form is None else self.device.weight_use(form)
        multiplies = use is WeightUse.MULTIPLIED
        round_weights(model, quantization, products, multiplies_experts=multiplies)

    def _make_slots(self) -> AdapterLayers:
        """Slots for adapters in the model's layers. Raises `ConfigError` for a model without."""
        config, device = self.config, self.device
        layers = AdapterLayers(
            self._model,
            config.max_loras,
            config.max_lora_rank,
            device.upload,
            device.mark_step,
            device.adapter_kernel(self.dtype),
            self._divided,
            as_operator=device.attention.as_operator,
        )
        if not layers.shapes:
            raise ConfigError(
                f"{self.spec.source} has no linear layers in decoder layers, which adapters could "
                "change: leave enable_lora out",
                "enable_lora",
            )
        return layers

    def _announce_pooling(self) -> None:
        logger.info("Embeddings are pooled from %s, and normalised", read_pooling(self.spec.source))
        prompts = self.spec.text_prompts
        if prompts.texts:
            logger.info(
                "Prompts of texts: %s; without prompt_name %s",
                ", ".join(prompts.texts),
                prompts.default or "none",
            )

    def initialise_cache(self) -> None:
        """Profile the model, size and allocate the KV cache, build the grids and the runner."""
        self.is_warm = False  # at once: an error leaves sizes without a runner for them
        config, device = self.config, self.device
        self.read = self.grids.read if self.grids else decode_read(config.bucketing)
        prompts = self._choice.prompt_grid()
        self._profile_and_allocate(self._choice.largest_prompts(self.grids, prompts))
        self._compiled = compiled = self._enable_compilation()
        if self.grids is None:
            self.grids = self._programs.grids or self._choice.choose(self.limits, prompts)
        self._programs.grids = self.grids
        forward_runner = ForwardRunner(
            self._model,
            device,
            self.cache,
            self._programs,
            compiled=compiled,
            adapters=self.adapters.layers,
        )
        forward_runner.on_cold = self._on_cold
        self._sampler = self._make_sampler(compiled)
        self.runner = ModelRunner(
            forward_runner,
            self._sampler,
            device,
            self.cache,
            self.grids,
            self.read,
            self._make_scorer(compiled),
            # Another rank would wait for the collective calls of the whole batch.
            divides_failed_batches=self._divided is None,
            adapters=self.adapters,
        )
        self._traffic_log = self._choice.traffic_log(self.grids) if self._records else None
        self._set_policy_of_misses(forward_runner)

    def _profile_and_allocate(self, prompts: Sequence[PromptShape | RaggedShape]) -> None:
        """Profiling run with the largest ``prompts``, memory plan, KV cache."""
        sizing = self._sizing
        kind, before = self.device.name.upper(), self._memory_use()
        free = self.device.free_memory()
        scorer = self._make_scorer(compiled=False)
        adapters = self.adapters.layers
        states = state_layers_of(self._model)
        sizing.may_keep_snapshots = states is None or not states.computes_by_tokens
        self._memory = sizing.profile(self._model, prompts, self.read, scorer, adapters)
        self._peak_bytes = max(0, free - self._memory.free_after_profile)
        # With the peak of the run, whose memory stays free: it is none of the plan's.
        logger.info(
            self._memory_use(self._memory.free_after_profile).since(before, "Model profiling run")
        )
        self._before_cache = self._memory_use()
        sizing.log_plan(self._memory)
        planned = sizing.num_blocks(self._memory, after_run=True)
        if self._divided is not None:
            planned = least_over_ranks(planned)
        if self._fits(self._programs.num_blocks):
            planned = self._programs.num_blocks  # a cache of another size needs other programs
        elif self._programs.num_blocks:
            self._programs = self._program_store.renewed(self._programs)
        self._programs.num_blocks = planned
        self.limits = ServingLimits.of(self.config, self._max_model_len, planned)
        num_blocks, num_host_blocks = self.limits.num_blocks, sizing.num_host_blocks()
        # Where there is one memory, both would be blocks of the CPU.
        on_host = "swap" if self.device.shares_host_memory else "CPU"
        logger.info("# %s blocks: %d, # %s blocks: %d", kind, num_blocks, on_host, num_host_blocks)
        self._num_snapshots = sizing.num_snapshots(self._memory)
        self._make_cache(num_blocks, num_host_blocks)
        self._log_memory("Initializing cache engine", self._before_cache)
        sizing.log_left_over(self._memory, num_blocks)

    def _make_cache(self, num_blocks: int, num_host_blocks: int) -> None:
        self.cache = self._sizing.make_cache(
            num_blocks,
            num_host_blocks + self.num_staging_blocks,
            num_snapshots=self._num_snapshots,
        )
        self.device.mark_step()  # a lazy device compiles its zeros apart from the first batch

    def _fits(self, num_blocks: int) -> bool:
        """Whether a cache of so many blocks fits beside the largest batch now, if it is any.

        In all ranks: another cache in one of them would be that of another model.
        """
        free = self.device.free_memory() - self._peak_bytes
        fits = num_blocks > 0 and num_blocks * self.block_bytes <= free
        return fits if self._divided is None else bool(least_over_ranks(int(fits)))

    @property
    def num_staging_blocks(self) -> int:
        """How many of the cache's host blocks, the last ones, are for tiers."""
        return self._sizing.num_staging_blocks()

    @property
    def staging_files(self) -> StagingFiles:
        """The same for another process, of a rank with tiers."""
        num_blocks = self.num_staging_blocks
        first = self.cache.num_host_blocks - num_blocks
        return StagingFiles(first, num_blocks, tuple(self._sizing.shared_blocks.files))

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
                "max_model_len %d is above max_seq_length %d, to which %s declares texts to be cut "
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
    def windows(self) -> tuple[int | None, ...]:
        """Of each block group: see `CacheConfig.windows`."""
        return self._sizing.groups.windows

    @property
    def _may_have_groups(self) -> bool:
        """Whether layers of different windows may have blocks of their own.

        Where attention reads the context of a layer's group, and batches are ragged: a bucket has
        blocks of one group. A tier keeps blocks that hold all layers.
        """
        reads = self.device.attention.reads_groups and self._choice.has_ragged_prompts
        return reads and not self.config.kv_tiers

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block in all layers of a group."""
        return self._sizing.block_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence in all layers; 0 where none keeps one."""
        return self._sizing.state_bytes

    @property
    def num_shared_blocks(self) -> int:
        """How many of the first blocks decode scores once for all sequences; 0 for none."""
        if self.read is not DecodeRead.PREFIX or not self.device.attention.scores_shared:
            return 0
        return most_shared_blocks(self.config.block_size)

    @property
    def captures_graphs(self) -> bool:
        """Whether graphs are captured on this device, under these settings."""
        return self.device.supports_graphs and not self.config.graphs.enforce_eager

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> WarmupReport | None:
        """Warm up before serving, as ``config.warmup`` says.

        Returns None where the rest is warmed up in the background, or nothing is. ``stop`` is
        polled before each bucket; True ends the warm-up. Raises `ModelError` for weights that
        compute NaN.
        """
        report = None
        if self.adapters.layers is not None:
            self.adapters.layers.warm_up()
        if self._programs.is_complete:
            logger.info("Skipping warmup: the programs were compiled for an earlier model")
        elif self.grids is not None and self.config.warmup == "full":
            before = self.device.num_compilations()
            with self.device.compile_only():
                report = self._warm_up_all(self.grids, stop)
            if self._compiled:
                compiled = self.device.num_compilations() - before
                logger.info("Warm-up compiled %d programs; a cache had the others", compiled)
        elif self.grids is not None and self.config.warmup == "background":
            self._warm_up_first(self.grids)
        else:
            logger.info("Skipping warmup: the first request of each shape will be slower")
            if (capture := self._live_capture()) is not None:
                self.runner.buckets.capture_in_traffic(capture)
        self._log_memory("init_cache_engine", self._before_cache)
        self.runner.batches.traffic = self._traffic_log
        if self._compiled:
            # Compilers leave cycles that refer to the KV cache: it would outlive its release.
            gc.collect()
        self.runner.check_values()
        if report is not None and report.complete and not self.captures_graphs:
            self._programs.is_complete = True
        if self.background is None:
            self.device.end_warm_up()
        self.runner.forward_runner.start_serving()
        self.is_warm = True
        return report

    def _warm_up_all(self, grids: Grids, stop: Callable[[], bool]) -> WarmupReport:
        buckets = grids.prompt.buckets, grids.decode.buckets
        return warm_up(
            self.runner,
            *buckets,
            config=self.config.graphs,
            memory=self._memory if self.device.supports_graphs else None,
            replays=self._replays(grids),
            sampler=SamplerWarmup(self._sampler, self.device, self._model),
            defragmenter=functools.partial(
                warm_up_copies, self.cache, self.device, self.config.defrag
            ),
            stop=stop,
        )

    def _check_weights(self) -> None:
        """Raise `ConfigError` for weights that are packed twice, or that the device rejects."""
        packing, quantization = self.spec.packing, self.config.rounding
        form = self.spec.weight_format(quantization)
        if form is None:
            return
        if packing is not None and quantization != "none":
            raise ConfigError(
                f"quantization {quantization} rounds weights of bf16, and those of "
                f"{self.spec.source} are {form}: leave it out",
                "quantization",
            )
        use = self.device.weight_use(form)
        rounds_for_nothing = packing is None and form.is_float and use is WeightUse.EXPANDED
        if use is WeightUse.REJECTED or rounds_for_nothing:
            reason = "expands" if rounds_for_nothing else "does not compute"
            raise ConfigError(
                f"{self.device.name} {reason} weights of {form}: serve bf16, or on another device",
                "quantization",
            )

    def _read_measured(self, part: RankPart | None) -> MeasuredScales | None:
        """Scales that the settings name. Raises `ConfigError` where they cannot be used."""
        file, of = self.config.quant_config, self.device.calibrated_as()
        if file is None:
            return None
        if of is None:
            raise ConfigError(
                f"quant_config {file} has scales of a Gaudi, and the device is "
                f"{self.device.name}: leave it out (QUANT_CONFIG), or serve on hpu",
                "quant_config",
            )
        own = (0, 1) if part is None else (part.rank, part.size)
        return read_measured_scales(file, of, *own)

    def _packed_or_expanded(self, spec: ModelSpec, part: RankPart | None) -> ModelSpec:
        """A GGUF file stays packed where that is computed, and is bf16 for all others."""
        packing, config = spec.packing, self.config
        if packing is None or packing.file is None:
            return spec
        stays = (
            config.dtype in ("auto", "bfloat16")
            and config.rounding == "none"
            and config.runner == "generate"
            and part is None
            and self.device.weight_use(packing.form) is WeightUse.MULTIPLIED
        )
        if not stays:
            logger.info("Weights of %s are expanded", packing.form)
            return attrs.evolve(spec, packing=None)
        rest = f", but those of {packing.expanded}, which are bf16" if packing.expanded else ""
        logger.info("Weights stay packed as %s%s", packing.form, rest)
        return spec

    def _check_cache_dtype(self) -> None:
        name, computed = self.config.kv_cache_dtype, self.device.kv_cache_dtypes
        if name != "auto" and name not in computed:
            others = f"use {', '.join(sorted(map(str, computed)))}" if computed else "serve on cpu"
            raise ConfigError(
                f"kv_cache_dtype {name} is not computed on {self.device.name}: leave it out, or "
                f"{others}",
                "kv_cache_dtype",
            )

    def _check_states(self) -> None:
        """Raise `ConfigError` for settings that layers with a state are not computed under yet."""
        if not any(layer.states for layer in self.spec.layers):
            return
        if self.config.enable_lora:
            raise ConfigError(
                "enable_lora True does not work with layers that keep a state on "
                f"{self.device.name}, which {self.spec.source} has, yet: leave it out",
                "enable_lora",
            )

    def _check_policy_of_misses(self) -> None:
        if self.config.on_bucket_miss == "eager" and not self.device.dynamic_shapes:
            raise ConfigError(
                f"on_bucket_miss eager needs a device that runs a new shape uncompiled, and "
                f"{self.device.name} compiles each: choose compile or refuse",
                "on_bucket_miss",
            )

    def _set_policy_of_misses(self, forward_runner: ForwardRunner) -> None:
        """What becomes of a batch in a shape that was not warmed up."""
        policy = self.config.on_bucket_miss
        without_warmup = self.config.warmup == "none" or self.grids is None
        forward_runner.compile_cold = policy == "compile" or (policy == "auto" and without_warmup)
        forward_runner.refuse_cold = policy == "refuse"

    @property
    def _programs_outlive(self) -> bool:
        """Whether programs stay when the model leaves the device.

        A graph has addresses, and so has a program that shares the host's memory.
        """
        return self.device.compiles_forward and not self.device.supports_graphs

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

        Where the programs were kept, and a cache of the size that it had still fits, ``is_warm`` is
        still True. Otherwise everything is sized again, and `warm_up` is to be called.
        """
        self.device.attention = self._attention
        in_place = self.device.shares_host_memory
        if not in_place:
            move_weights(self._model, self.device.torch_device)
            self.device.mark_step()  # as after a load
        programs = self._programs
        if self._programs_outlive:
            programs = self._program_store.of(self._model, self.config, programs)
        num_blocks = self.limits.num_blocks
        is_kept = self.is_warm and self.runner.forward_runner.keeps_programs
        if is_kept and programs is self._programs and (in_place or self._fits(num_blocks)):
            self._sampler.acquire()
            self._make_cache(num_blocks, self._sizing.num_host_blocks())
            self.runner.use_cache(self.cache)
        else:
            self.runner.forward_runner.release_graphs()
            self._programs = programs
            self.grids = self._choice.sequence_grids()
            self.background = None
            self.initialise_cache()
        self.is_asleep = False

    def discard(self) -> None:
        """Release device memory and weights permanently. Only the counters can be read then."""
        self.is_discarded = True
        self._release_cache()
        self.runner.forward_runner.discard_model()
        self.runner.scorer = self.adapters.layers = None
        self._model, self.weight_bytes = nn.Module(), 0
        gc.collect()  # layers with a state, and some models, hold themselves
        self.device.synchronize()

    def _release_cache(self) -> None:
        self.is_asleep = True  # at once: `wake` repairs what an error leaves half done
        if self.background is not None:
            self.background.wait()
        self.close()
        self.device.synchronize()
        keeps_programs = self.runner.forward_runner.keeps_programs
        if not (keeps_programs and self.device.shares_host_memory):
            self.runner.forward_runner.release_all()
            self._sampler.release()
        in_traffic = self.background is not None or self.runner.forward_runner.compilations
        if self._compiled and (in_traffic or not keeps_programs):
            gc.collect()  # see `warm_up`: also of what was compiled in traffic
        # The padding block, in host memory: a device that is full has no space for it.
        self.cache = self._sizing.make_cache(1, 0, torch.device("cpu"))
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

    def _make_scorer(self, compiled: bool) -> PromptScorer | None:
        if self.spec.is_pooling:
            return None
        compiled = compiled and not self.device.dynamic_shapes  # as the sampler
        head = LogitHead(self._model)
        return PromptScorer(head, self.device, self._programs.sampler, compiled=compiled)

    def _make_sampler(self, compiled: bool) -> Sampler:
        if self.spec.is_pooling:
            return Pooler(self.device, is_embedding=self.computes_embeddings)
        num_slots = 0
        if self.limits.max_steps_in_flight > 1:
            num_slots = 1 + self.limits.max_num_seqs  # slot 0 is that of padding
        if self.device.shares_host_memory:
            return HostSampler(num_slots)
        # Other devices run a new shape without a compiler, which would take longer than it saves.
        compiled = compiled and not self.device.dynamic_shapes
        return DeviceSampler(
            self.device,
            self.spec.vocab_size,
            self._programs.sampler,
            num_slots=num_slots,
            compiled=compiled,
        )

    def _warm_up_first(self, grids: Grids) -> None:
        """Warm up the first bucket of each phase now, the others in the background."""
        capture = self._live_capture()
        # No other thread may use the device while a graph is captured, and `StateLayers` have the
        # sequences of one forward pass.
        is_free = capture is None and self.runner.forward_runner.states is None
        self.background = BackgroundWarmupLoop(
            self.runner,
            grids,
            in_thread=self.device.dynamic_shapes and is_free,
            capture=capture,
            is_ready=self.runner.buckets.is_ready,
            on_end=self.device.end_warm_up,
        )
        self.background.warm_up_first()
        self.runner.buckets.prefer_ready(self.background.record_miss)

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

    def _replays(self, grids: Grids) -> dict[Phase, dict[Bucket, float]]:
        return self._choice.replays(grids) if self.captures_graphs else {}

    def _memory_use(self, device_free: int | None = None) -> MemoryUse:
        """Memory in use now, or with so much of the device's free."""
        if device_free is None:
            device_free = self.device.free_memory()
        return MemoryUse.read(device_free=device_free, device_total=self.device.total_memory())

    def _log_memory(self, step: str, before: MemoryUse, *, in_total: bool = False) -> MemoryUse:
        now = self._memory_use()
        logger.info(now.since(before, step, in_total=in_total))
        return now

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


def inspected(config: EngineConfig) -> ModelSpec:
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


def _compile_cache(config: EngineConfig) -> Path:
    if config.compile_cache is not None:
        return Path(config.compile_cache)
    return Path(platformdirs.user_cache_dir("trencadis")) / "compiled"
