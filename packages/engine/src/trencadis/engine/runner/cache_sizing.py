"""Sizes the KV cache: the memory that the largest forward passes leave, divided into blocks.

The profiling run measures them. `MemoryPlan` divides the rest between the cache and graphs.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Sequence

import attrs
import torch
from torch import nn

from trencadis.engine.devices import Device
from trencadis.engine.errors import ConfigError
from trencadis.engine.models.adapter_layers import AdapterLayers
from trencadis.engine.models.decoder_layers import one_layer_of_each_kind
from trencadis.engine.models.layer_spec import LayerSpec, seen_tokens
from trencadis.engine.models.layer_states import kept_states
from trencadis.engine.models.quantized_cache import CACHE_DTYPES, with_scales
from trencadis.engine.runner.forward_runner import ForwardRunner
from trencadis.engine.runner.host_swap import num_host_blocks, num_staging_blocks
from trencadis.engine.runner.limits import blocks_of_sequence, check_memory, num_cache_blocks
from trencadis.engine.runner.model_input import (
    ModelInput,
    build_decode,
    build_prompt,
    lay_out_decodes,
    with_dummy_slots,
)
from trencadis.engine.runner.prompt_scorer import PromptScorer
from trencadis.engine.runner.shapes import (
    DecodeRead,
    DecodeShape,
    PromptShape,
    RaggedShape,
    in_groups,
    most_group_pairs,
    most_prefix_pairs,
    most_shared_blocks,
)
from trencadis.engine.runner.shared_blocks import SharedBlocks
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.kvcache import LayerGroups, ceil_div, group_layers
from trencadis.kvcache.state_cache import StateCache
from trencadis.kvcache.tensors import KVCache, LayerShape, bytes_per_block
from trencadis.warmup import GRAPH_RESERVED_MEM, MemoryPlan, WarmupError, format_bytes

logger = logging.getLogger("trencadis.engine")


_COUNTED = LayerShape(1, 1, 1)

_SNAPSHOTS_PER_SEQUENCE = 2
"""One after its own prompt, and one where this begins as others do."""
_SNAPSHOT_PART = 4
"""Snapshots have at most one such part of the cache: without blocks they are of no use."""


class CacheSizing:
    """The size of the KV cache of a model on a device, and caches of this layout.

    ``dtype``: that of the model. ``captures_graphs``: whether a share of the memory is left for
    graphs. ``groups``: whether layers of different windows may have block groups of their own;
    the result is in ``groups``.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        layers: Sequence[LayerSpec],
        dtype: torch.dtype,
        max_model_len: int,
        *,
        captures_graphs: bool,
        may_have_groups: bool = False,
    ) -> None:
        self._config = config
        self._device = device
        self._states = {
            i: kept_states(layer.states, config.mamba_ssm_cache_dtype)
            for i, layer in enumerate(layers)
            if layer.states
        }
        self._state_dtype = dtype
        # Where none attends, blocks have a number for each token: so all of them are counted.
        attends = any(layer.kv_heads for layer in layers)
        shapes: Sequence[LayerShape] = layers if attends else [_COUNTED, *layers[1:]]
        codes = CACHE_DTYPES.get(config.kv_cache_dtype)
        has_scales = codes is not None and not device.attention.token_rows
        self._layers = with_scales(shapes) if has_scales else shapes
        windows = seen_tokens(layers, max_model_len)
        self.groups = LayerGroups.single(windows)
        if may_have_groups and not self._states:
            kept = [(each.kv_heads, each.key_width, each.value_width) for each in self._layers]
            self.groups = group_layers(
                windows, kept, num_tokens=max_model_len, block_size=config.block_size
            )
        self._dtype = dtype if codes is None else codes
        self._max_model_len = max_model_len
        self._captures_graphs = captures_graphs
        self.shared_blocks = SharedBlocks(0)
        """The host blocks of the last cache, of a rank with tiers."""
        self.may_keep_snapshots = True
        """Whether a prompt may begin after a cached prefix: not where layers with a state would
        compute it token by token."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block in all layers of a group."""
        layers = self.groups.one_of_each_tensor(self._layers)
        return bytes_per_block(layers, block_size=self._config.block_size, dtype=self._dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of one sequence in all layers; 0 where none keeps one."""
        parts = (part for states in self._states.values() for part in states)
        return sum(part.num_bytes(self._state_dtype) for part in parts)

    @property
    def num_state_slots(self) -> int:
        """Slots of states: one for each sequence, and that of padding; 0 without states."""
        return 1 + self._config.max_num_seqs if self._states else 0

    def num_snapshots(self, plan: MemoryPlan) -> int:
        """Slots for the states after cached prefixes; 0 without states or prefix caching.

        Two for each of ``max_num_seqs`` sequences, in at most a quarter of the memory that the
        cache may take, and beside ``num_blocks``, or one sequence of ``max_model_len``. 0 where
        states have static places.
        """
        config, state_bytes = self._config, self.state_bytes
        keeps = self.may_keep_snapshots and not self._device.static_states
        if not (state_bytes and config.enable_prefix_caching and keeps):
            return 0
        limit = self._cache_memory
        memory = int(plan.kv_cache) if limit is None else min(limit, int(plan.kv_cache))
        of_sequence = blocks_of_sequence(config, self._max_model_len, self.groups.windows)
        least = config.num_blocks or 1 + of_sequence
        memory = min(memory // _SNAPSHOT_PART, memory - least * self.block_bytes)
        return max(0, min(_SNAPSHOTS_PER_SEQUENCE * config.max_num_seqs, memory // state_bytes))

    @property
    def _cache_memory(self) -> int | None:
        """Bytes that the cache has by the settings or the device; None where the rest decides."""
        return self._config.kv_cache_memory or self._device.default_kv_cache_memory

    def num_host_state_slots(self, num_host_blocks: int) -> int:
        """Slots of states for swapped sequences, which have so many host blocks."""
        return self._config.max_num_seqs if self._states and num_host_blocks else 0

    def check_settings(self) -> None:
        """Raise `ConfigError` where one sequence would not fit if all memory were free."""
        self.num_blocks(self._plan_memory(self._device.total_memory()))

    def profile(
        self,
        model: nn.Module,
        prompts: Sequence[PromptShape | RaggedShape],
        read: DecodeRead,
        scorer: PromptScorer | None = None,
        adapters: AdapterLayers | None = None,
    ) -> MemoryPlan:
        """Run the largest forward passes once, and divide what the largest peak leaves.

        All but blocks that are scored in place are the padding block, which a pass may gather as
        often as it likes. A decode gathers at most as many blocks as fit beside the prefill's peak;
        the plan only gets fewer of them by its own. A cache that would be too small without any
        peak is rejected first, with `ConfigError`. ``prompts``: shapes of prefill batches that may
        take the most memory. ``scorer``: what may score the tokens of each.
        ``adapters``: those of the model, which each pass computes up to the highest rank.
        """
        self.num_blocks(self._plan_memory(self._device.free_memory()))
        lowest = self._lowest_memory(model, prompts, scorer, adapters)
        num_blocks = self.num_blocks(self._plan_after_run(lowest), after_run=True)
        decodes = self._largest_decodes(num_blocks, read)
        of_decodes = self._lowest_memory(model, decodes, scorer, adapters)
        return self._plan_after_run(min(lowest, of_decodes))

    def num_blocks(self, plan: MemoryPlan, *, after_run: bool = False) -> int:
        """Blocks of the KV cache under a plan and the settings. Raises `ConfigError`."""
        of_snapshots = self.num_snapshots(plan) * self.state_bytes
        fitting = int((plan.kv_cache - of_snapshots) // self.block_bytes)
        remedy = "raise gpu_memory_utilization, or free memory"
        if after_run:
            remedy = (
                "lower max_num_batched_tokens: the largest batch leaves "
                f"{format_bytes(plan.free_after_profile)} free"
            )
        limit = self._cache_memory
        if limit is not None and (limit - of_snapshots) // self.block_bytes <= fitting:
            fitting, remedy = (limit - of_snapshots) // self.block_bytes, "raise kv_cache_memory"
        if self._config.num_blocks is not None:
            remedy = "raise num_blocks"
        num_blocks = num_cache_blocks(
            self._config,
            self._max_model_len,
            fitting=fitting,
            block_bytes=self.block_bytes,
            remedy=remedy,
            windows=self.groups.windows,
        )
        check_memory("num_blocks", num_blocks, self.block_bytes, self._device.total_memory())
        return num_blocks

    def num_host_blocks(self) -> int:
        """Host blocks for swapped sequences; see `host_swap`."""
        windows = self.groups.windows
        per_sequence = blocks_of_sequence(self._config, self._max_model_len, windows)
        return num_host_blocks(
            self._config, self._device, self.block_bytes, per_sequence, self.state_bytes
        )

    def num_staging_blocks(self) -> int:
        """Host blocks for tiers; see `host_swap`."""
        # Tiers keep blocks, and no states.
        return 0 if self._states else num_staging_blocks(self._config, self.block_bytes)

    def make_cache(
        self,
        num_blocks: int,
        num_host_blocks: int,
        place: torch.device | None = None,
        *,
        num_snapshots: int = 0,
    ) -> KVCache:
        """A cache on the device; at another ``place`` one that no request uses."""
        states = None
        if self._states:
            states = StateCache(
                layers=self._states,
                num_slots=1 if place else self.num_state_slots,
                dtype=self._state_dtype,
                device=place or self._device.torch_device,
                num_host_slots=self.num_host_state_slots(num_host_blocks),
                num_snapshots=num_snapshots,
            )
        shared = None
        if self._config.kv_tiers and self._config.tensor_parallel_size > 1 and num_host_blocks:
            self.shared_blocks = shared = SharedBlocks(num_host_blocks)
        return KVCache(
            layers=self._layers,
            num_blocks=num_blocks,
            block_size=self._config.block_size,
            dtype=self._dtype,
            device=place or self._device.torch_device,
            num_host_blocks=num_host_blocks,
            token_rows=self._device.attention.token_rows,
            states=states,
            host_memory=None if shared is None else shared.allocate,
            groups=self.groups,
        )

    def log_plan(self, plan: MemoryPlan) -> None:
        """Log how the memory is divided, and which settings are not applied."""
        if self._states:
            logger.info(
                "Layers that keep a state: %s for each of %d sequences, and as much for the new "
                "states of a step; of cached prefixes %d states are kept",
                format_bytes(self.state_bytes),
                self._config.max_num_seqs,
                self.num_snapshots(plan),
            )
        settings = self._config.graphs
        if not self._captures_graphs and settings.graph_reserved_mem != GRAPH_RESERVED_MEM:
            logger.info(
                "VLLM_GRAPH_RESERVED_MEM=%g is not applied: no graphs are captured (%s)",
                settings.graph_reserved_mem,
                "--enforce-eager" if settings.enforce_eager else f"device {self._device.name}",
            )
        logger.info(plan.describe())

    def log_left_over(self, plan: MemoryPlan, num_blocks: int) -> None:
        """Log the part of a device's own memory that neither the KV cache nor graphs will use."""
        left = plan.num_blocks - num_blocks
        if self._device.default_kv_cache_memory is not None or left <= 0:
            return
        logger.info(
            "%s planned for the KV cache stay free, for %d more blocks: --max-num-seqs, "
            "--max-model-len or --num-gpu-blocks-override would use them; graphs do not",
            format_bytes(left * self.block_bytes),
            left,
        )

    def _lowest_memory(
        self,
        model: nn.Module,
        shapes: Sequence[PromptShape | RaggedShape | DecodeShape],
        scorer: PromptScorer | None,
        adapters: AdapterLayers | None,
    ) -> int:
        """The least memory that is free while dummy batches of these shapes run, one by one.

        As if the cache had one block: it has as many as the shapes read in place.
        """
        decodes = (shape for shape in shapes if isinstance(shape, DecodeShape))
        cache = self.make_cache(max((1, *(shape.blocks for shape in decodes))), 0)
        self._device.synchronize()  # a lazy device takes its memory now
        beyond_one = (cache.num_blocks - 1) * self.block_bytes
        forward_runner = ForwardRunner(model, self._device, cache, adapters=adapters)
        upload, free = self._device.upload, []

        def run(batch: ModelInput) -> object:
            output = forward_runner.run(batch)
            if scorer is None or output.hidden is None:
                return output
            return output, scorer.warm_up(output.hidden)

        highest = 0 if adapters is None else adapters.max_rank
        for exact in shapes:
            shape = attrs.evolve(exact, adapter_rank=highest)
            if isinstance(shape, DecodeShape):
                layout = lay_out_decodes((), shape.blocks, cache.block_size, shape.shared)
                batch = build_decode((), layout, shape, cache, upload)
            else:
                batch = build_prompt((), shape, cache, upload)
            batch = with_dummy_slots(forward_runner.with_states(batch), upload)
            self._device.begin_step()
            before = self._device.free_memory()
            with self._shortened(model):
                taken = self._device.peak_memory(functools.partial(run, batch))
            free.append(before - taken + beyond_one)
        return min(free)

    def _shortened(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Where a chunk of a long context takes minutes, the profiling run omits equal layers.

        They take the memory that the layer before has freed.
        """
        is_slow = self._device.shares_host_memory
        return one_layer_of_each_kind(model) if is_slow else contextlib.nullcontext()

    def _largest_decodes(self, num_blocks: int, read: DecodeRead) -> list[DecodeShape]:
        """The decodes that may take the most memory in a cache of so many blocks.

        Where the first blocks are scored for every sequence, many sequences have larger scores of
        few blocks than these blocks are.
        """
        batch, pairs = self._config.max_num_seqs, self._most_pairs(num_blocks, read)
        if self.groups.num_groups > 1:
            return [in_groups(DecodeShape(batch, 0, pairs), self.groups.num_groups)]
        gathered = DecodeShape(batch, 0, pairs)
        if read is not DecodeRead.PREFIX or not self._device.attention.scores_shared:
            return [gathered]
        shared = min(num_blocks, most_shared_blocks(self._config.block_size))
        return [gathered, DecodeShape(batch, shared, pairs - shared, shared)]

    def _most_pairs(self, num_blocks: int, read: DecodeRead) -> int:
        """The most (block, sequence) pairs that a decode scores in a cache of so many blocks."""
        longest = ceil_div(self._max_model_len, self._config.block_size)
        of_all, num_groups = self._config.max_num_seqs * longest, self.groups.num_groups
        if num_groups > 1:
            return min(of_all, most_group_pairs(num_blocks, num_groups, longest))
        if read is DecodeRead.PREFIX:
            # A bucket gathers as many shared blocks as its prefix has. The prefix is scored in
            # place, which takes somewhat less than here.
            return most_prefix_pairs(num_blocks)
        return of_all if read is DecodeRead.SEQUENCES else min(of_all, 3 * num_blocks)

    def _plan_memory(self, free_memory: int) -> MemoryPlan:
        settings = self._config.graphs
        # Each slot has two places. In static shapes a layer has copies of all states besides.
        num_states = 2 * self.num_state_slots
        if self._device.static_states:
            num_states += self._config.max_num_seqs
        of_states = num_states * self.state_bytes
        if of_states and of_states >= free_memory:
            raise ConfigError(
                f"the states of max_num_seqs {self._config.max_num_seqs} sequences take "
                f"{format_bytes(of_states)}, and {format_bytes(max(0, free_memory))} are free: "
                "lower max_num_seqs",
                "max_num_seqs",
            )
        try:
            return MemoryPlan.from_profile(
                max(1, free_memory - of_states),
                self._config.gpu_memory_utilization,
                settings.graph_reserved_mem if self._captures_graphs else 0.0,
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
