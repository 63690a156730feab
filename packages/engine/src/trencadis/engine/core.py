"""The engine core: one loop around scheduler, model runner and sampler.

`EngineCore` is synchronous and knows no network; `trencadis.engine.core_process` runs it in a
process of its own, `trencadis.engine.llm` in the caller's.
"""

from __future__ import annotations

import logging
import random

import attrs

from trencadis.bucketing import BucketingError
from trencadis.engine.config import EngineConfig
from trencadis.engine.devices import Device, select_device
from trencadis.engine.errors import ConfigError, EngineOverloaded, InvalidRequest
from trencadis.engine.grids import Grids, ShapeLimits, build_grids
from trencadis.engine.messages import NewToken
from trencadis.engine.models.loader import ModelSpec, inspect_model, load_model, resolve_dtype
from trencadis.engine.outputs import EngineStats
from trencadis.engine.runner import ModelRunner
from trencadis.engine.sampler import SampledToken, SamplingRow, sample
from trencadis.engine.sampling_params import SamplingParams
from trencadis.kvcache import BlockManager, CacheConfig, Defragmenter
from trencadis.kvcache.tensors import KVCache, bytes_per_block
from trencadis.scheduler import (
    QueueFull,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    UnservableRequest,
)
from trencadis.warmup import MemoryPlan, WarmupReport, format_bytes, warm_up

logger = logging.getLogger("trencadis.engine")


@attrs.frozen
class _Live:
    """A sequence being served, with what sampling needs to know of it."""

    sequence: Sequence
    params: SamplingParams
    seed: int


class EngineCore:
    """Loads a model and serves requests step by step. Not safe to share between threads.

    Raises `ModelError` or `ConfigError` when the model cannot be served under ``config``.
    """

    def __init__(self, config: EngineConfig, device: Device | None = None) -> None:
        self.config = config
        self.device = device if device is not None else select_device(config.device)
        self.spec = inspect_model(config.model)
        self.max_model_len = _max_model_len(config, self.spec)
        self.dtype = resolve_dtype(config.dtype, self.spec, self.device)
        self._rng = random.Random(config.seed)
        self._live: dict[int, _Live] = {}
        self._keys: dict[str, int] = {}
        self._stats = _Counters()
        self._build()

    def _build(self) -> None:
        """Load the weights, size and make the cache, and put the libraries together."""
        before = self.device.free_memory()
        model = load_model(self.spec, self.device, self.dtype, self.max_model_len)
        self._log_memory("Loading model weights", before)
        self.num_blocks = self._plan_blocks()
        size = self.config.block_size
        self.blocks = BlockManager(
            CacheConfig(
                num_blocks=self.num_blocks,
                block_size=size,
                enable_prefix_caching=self.config.enable_prefix_caching,
            )
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
            ),
            self.blocks,
            defragmenter=Defragmenter(self.blocks, self.config.defrag),
        )

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
            used_blocks=self.blocks.num_used_blocks,
            total_blocks=self.blocks.num_total_blocks,
            highest_block_in_use=self.blocks.highest_in_use,
            steps=self._stats.steps,
            prompt_tokens=self._stats.prompt_tokens,
            generation_tokens=self._stats.generation_tokens,
            padded_tokens=self.runner.padded_tokens,
            bucket_misses=self.runner.bucket_misses,
        )

    def add(self, key: str, prompt_token_ids: tuple[int, ...], params: SamplingParams) -> None:
        """Queue one sample under ``key``.

        Raises `InvalidRequest`, naming the field, or `EngineOverloaded`.
        """
        check_request(prompt_token_ids, params, self.spec.vocab_size, self.max_model_len)
        room = self.max_model_len - len(prompt_token_ids)
        eos = frozenset() if params.ignore_eos else self.spec.eos_token_ids
        request = Request(
            request_id=key,
            prompt_token_ids=prompt_token_ids,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=eos | frozenset(params.stop_token_ids),
        )
        try:
            sequence = self.scheduler.add(request)
        except QueueFull as error:
            raise EngineOverloaded(str(error)) from error
        except UnservableRequest as error:
            raise InvalidRequest(str(error), "prompt") from error
        seed = self._rng.getrandbits(63) if params.seed is None else params.seed
        self._live[sequence.seq_id] = _Live(sequence, params, seed)
        self._keys[key] = sequence.seq_id

    def abort(self, key: str) -> None:
        """Stop serving ``key`` and free its blocks; a key that is not known is ignored."""
        seq_id = self._keys.pop(key, None)
        if seq_id is not None:
            self.scheduler.abort(key)
            del self._live[seq_id]

    def step(self) -> list[NewToken]:
        """Compute one step and return its new tokens."""
        output = self.scheduler.schedule()
        self._stats.steps += 1
        self._stats.prompt_tokens += sum(len(chunk.token_ids) for chunk in output.prompts)
        computed = self.runner.run(output)
        live = [self._live[seq_id] for seq_id in computed.seq_ids]
        tokens = sample(computed.logits, [self._row(one) for one in live]) if live else []
        sampled = dict(zip(computed.seq_ids, tokens, strict=True))
        updates = self.scheduler.update(
            output, {seq_id: token.token_id for seq_id, token in sampled.items()}
        )
        self._stats.generation_tokens += len(updates)
        return [self._report(update.seq_id, sampled[update.seq_id]) for update in updates]

    def _row(self, live: _Live) -> SamplingRow:
        return SamplingRow(
            live.params,
            live.seed,
            live.sequence.request.prompt_token_ids,
            live.sequence.output_token_ids,
            self.spec.eos_token_ids,
        )

    def _report(self, seq_id: int, token: SampledToken) -> NewToken:
        sequence = self._live[seq_id].sequence
        reason = sequence.finish_reason
        if reason is not None:
            del self._live[seq_id], self._keys[sequence.request_id]
        return NewToken(
            sequence.request_id,
            token.token_id,
            None if reason is None else reason.value,
            sequence.num_cached_prompt_tokens,
            token.logprobs,
        )

    def _plan_blocks(self) -> int:
        """Blocks of the cache: as configured, or as many as fit and can be used."""
        block_bytes = bytes_per_block(
            num_layers=self.spec.num_layers,
            kv_heads=self.spec.num_kv_heads,
            block_size=self.config.block_size,
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
        )
        per_sequence = -(-self.max_model_len // self.config.block_size)
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


def check_request(
    prompt_token_ids: tuple[int, ...], params: SamplingParams, vocab_size: int, max_model_len: int
) -> None:
    """Refuse what could not be served, naming the field, before it reaches a queue."""
    length = len(prompt_token_ids)
    if length == 0:
        raise InvalidRequest("the prompt is empty: give at least one token", "prompt")
    if min(prompt_token_ids) < 0 or max(prompt_token_ids) >= vocab_size:
        raise InvalidRequest(
            f"token ids of the prompt must be from 0 to {vocab_size - 1}", "prompt"
        )
    if length >= max_model_len:
        raise InvalidRequest(
            f"the prompt has {length} tokens and the model's context is {max_model_len}, of which "
            "at least one is needed for the output: shorten the prompt",
            "prompt",
        )
    if params.max_tokens is not None and length + params.max_tokens > max_model_len:
        raise InvalidRequest(
            f"max_tokens {params.max_tokens} and a prompt of {length} tokens exceed the model's "
            f"context of {max_model_len}: lower max_tokens to {max_model_len - length}",
            "max_tokens",
        )
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        if any(not 0 <= token < vocab_size for token in ids):
            raise InvalidRequest(f"{name} has token ids past the vocabulary of {vocab_size}", name)


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
