"""The engine core: one loop around scheduler, model runner and sampler.

`EngineCore` is synchronous and knows no network; `trencadis.engine.core_process` runs it in a
process of its own, `trencadis.engine.llm` in the caller's.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import attrs

from trencadis.engine.config import EngineConfig
from trencadis.engine.devices import Device, select_device
from trencadis.engine.errors import EngineOverloaded, InvalidRequest
from trencadis.engine.executor import Executor
from trencadis.engine.messages import NewToken
from trencadis.engine.outputs import EngineStats
from trencadis.engine.sampler import SampledToken, SamplingRow, sample
from trencadis.engine.sampling_params import SamplingParams
from trencadis.kvcache import BlockManager, CacheConfig, Defragmenter
from trencadis.scheduler import (
    QueueFull,
    Request,
    Scheduler,
    SchedulerConfig,
    Sequence,
    UnservableRequest,
)
from trencadis.warmup import WarmupReport


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
        self.device = device if device is not None else _device(config)
        self.executor = Executor(config, self.device)
        self.spec = self.executor.spec
        self.max_model_len = self.executor.max_model_len
        self._rng = random.Random(config.seed)
        self._live: dict[int, _Live] = {}
        self._keys: dict[str, int] = {}
        self._stats = _Counters()
        self.blocks = BlockManager(
            CacheConfig(
                num_blocks=self.executor.num_blocks,
                block_size=config.block_size,
                enable_prefix_caching=config.enable_prefix_caching,
            )
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
            ),
            self.blocks,
            defragmenter=Defragmenter(self.blocks, config.defrag),
        )

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
            padded_tokens=runner.padded_tokens,
            bucket_misses=runner.bucket_misses,
            buckets=self.executor.num_buckets,
            ready_buckets=self.executor.num_ready_buckets,
            cold_forwards=runner.forwards.cold,
            compilations=runner.forwards.compilations,
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
        computed = self.executor.runner.run(output)
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


@attrs.define
class _Counters:
    """Totals since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


def _device(config: EngineConfig) -> Device:
    return select_device(
        config.device, Path(config.compile_cache) if config.compile_cache else None
    )


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
