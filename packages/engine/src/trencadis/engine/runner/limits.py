"""The limits that an engine serves within, and what is sized by them.

The engine and the simulator share this module, so that both size the KV cache, the bucket grids
and the scheduler by the same rules.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

import attrs

from trencadis.engine.errors import ConfigError
from trencadis.engine.settings.engine_config import SchedulingPolicy
from trencadis.kvcache import CacheConfig, ceil_div
from trencadis.scheduler import PreemptionCosts, SchedulerConfig
from trencadis.warmup import format_bytes

_SEED_BLOCK_BYTES = 2 << 20
"""A block of 16 tokens of a model of 8 billion parameters, for which seed 003 gives seconds."""


class BatchSettings(Protocol):
    """The settings that limit a batch; `EngineConfig` and `SimulationConfig` have them."""

    @property
    def max_num_seqs(self) -> int: ...
    @property
    def max_num_batched_tokens(self) -> int: ...
    @property
    def max_mixed_prefill_tokens(self) -> int | None: ...
    @property
    def max_waiting(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def num_blocks(self) -> int | None: ...
    @property
    def async_scheduling(self) -> bool | None: ...


@attrs.frozen(kw_only=True)
class ServingLimits:
    """Upper bounds of everything that one step can contain.

    ``max_model_len`` and ``max_num_batched_tokens`` are in tokens, ``max_num_seqs`` in sequences,
    ``block_size`` in tokens per KV block, ``num_blocks`` in device blocks, the padding block
    included. ``max_mixed_prefill_tokens``: the most of prefill chunks in a step that also decodes;
    None for no such limit. ``max_steps_in_flight``: steps that are scheduled before the results of
    the first.
    """

    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_blocks: int
    max_mixed_prefill_tokens: int | None = None
    max_steps_in_flight: int = 1

    @property
    def tokens_ahead(self) -> int:
        """Most tokens of a sequence that steps without results compute: see `CacheConfig`."""
        return self.max_num_batched_tokens * self.max_steps_in_flight

    @classmethod
    def of(cls, settings: BatchSettings, max_model_len: int, num_blocks: int) -> ServingLimits:
        """The limits under ``settings``, for a model and a cache of this size."""
        return cls(
            max_model_len=max_model_len,
            max_num_batched_tokens=token_budget(settings),
            max_num_seqs=settings.max_num_seqs,
            block_size=settings.block_size,
            num_blocks=num_blocks,
            max_mixed_prefill_tokens=settings.max_mixed_prefill_tokens,
            max_steps_in_flight=2 if settings.async_scheduling else 1,
        )

    def scheduler_config(
        self,
        *,
        max_waiting: int,
        max_chunk_tokens: int | None,
        policy: SchedulingPolicy = "fcfs",
        num_output_tokens: int = 1,
        max_adapters: int | None = None,
    ) -> SchedulerConfig:
        """The scheduler's settings.

        ``max_chunk_tokens`` is the largest query bucket: a longer prefill chunk would be a bucket
        miss. None without buckets. ``num_output_tokens``: how many tokens of the context a prompt
        has to leave; 0 where its embedding is computed. The scheduler always counts one, which is
        never computed then.
        """
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len + 1 - num_output_tokens,
            max_chunk_tokens=max_chunk_tokens,
            max_mixed_prefill_tokens=self.max_mixed_prefill_tokens,
            max_waiting=max_waiting,
            max_steps_in_flight=self.max_steps_in_flight,
            policy=policy,
            max_adapters=max_adapters,
        )


def preemption_costs(block_bytes: int, state_bytes: int, num_groups: int = 1) -> PreemptionCosts:
    """What swaps are taken to cost before the first is measured.

    A block of one of ``num_groups`` block groups has a part of the layers.
    A model of states alone has blocks of few bytes, which only count tokens, and states of many
    thousand such blocks. At the seconds of a whole block it would never swap, and never measure.
    """
    costs = PreemptionCosts()
    if not state_bytes:
        return PreemptionCosts(
            swap_out_s_per_block=costs.swap_out_s_per_block / num_groups,
            swap_in_s_per_block=costs.swap_in_s_per_block / num_groups,
        )
    share = min(1.0, block_bytes / _SEED_BLOCK_BYTES)
    return PreemptionCosts(
        swap_out_s_per_block=costs.swap_out_s_per_block * share,
        swap_in_s_per_block=costs.swap_in_s_per_block * share,
        blocks_per_state=state_bytes / block_bytes,
    )


def token_budget(settings: BatchSettings) -> int:
    """Most tokens of one step: never less than one token for each sequence."""
    return max(settings.max_num_batched_tokens, settings.max_num_seqs)


def blocks_of_sequence(
    settings: BatchSettings, num_tokens: int, windows: Sequence[int | None] = (None,)
) -> int:
    """The most blocks that a sequence of ``num_tokens`` has, in block groups of these ``windows``.

    With one group those of all tokens, which is enough where a window gives some of them back.
    """
    if len(windows) == 1:
        return ceil_div(num_tokens, settings.block_size)
    ahead = ServingLimits.of(settings, num_tokens, 2).tokens_ahead
    cache = CacheConfig(
        num_blocks=2, block_size=settings.block_size, windows=windows, tokens_ahead=ahead
    )
    return cache.num_blocks_for(num_tokens)


def num_cache_blocks(
    settings: BatchSettings,
    max_model_len: int,
    *,
    fitting: int,
    block_bytes: int,
    remedy: str,
    windows: Sequence[int | None] = (None,),
) -> int:
    """Device blocks of the KV cache, the padding block included.

    As configured, or ``fitting``, the number that the memory holds, but not more than
    ``max_num_seqs`` sequences of ``max_model_len`` tokens can fill. ``windows``: those of its block
    groups. Raises `ConfigError` where one such sequence does not fit; ``remedy`` ends its message.
    """
    per_sequence = blocks_of_sequence(settings, max_model_len, windows)
    num_blocks = settings.num_blocks
    if num_blocks is None:
        num_blocks = min(fitting, per_sequence * settings.max_num_seqs + 1)
    if num_blocks - 1 < per_sequence:
        tokens = _most_tokens(settings, num_blocks - 1, windows)
        lower = f"lower max_model_len to {tokens}" if tokens else "lower max_model_len"
        groups = ""
        if len(windows) > 1:
            groups = f" for {len(windows)} block groups"
            # A window has the blocks of the tokens that a step computes, too.
            lower += f", lower max_num_batched_tokens {token_budget(settings)},"
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks of {settings.block_size} tokens{groups} cannot "
            f"hold one sequence of max_model_len {max_model_len}: {lower} or "
            f"{remedy} (a block takes {format_bytes(block_bytes)})"
        )
    return num_blocks


def _most_tokens(settings: BatchSettings, num_blocks: int, windows: Sequence[int | None]) -> int:
    """The most tokens, in whole blocks, of a sequence that has no more than ``num_blocks``."""
    size = settings.block_size
    lengths = range(size, max(0, num_blocks) * size + 1, size)
    return size * bisect_right(
        lengths, num_blocks, key=lambda length: blocks_of_sequence(settings, length, windows)
    )


def check_memory(setting: str, num_blocks: int, block_bytes: int, total: int) -> None:
    """Raise `ConfigError` where the blocks that ``setting`` asks for exceed ``total`` bytes.

    Allocating them would fail with an error of the operating system, or end the process.
    """
    if num_blocks * block_bytes > total:
        raise ConfigError(
            f"{setting} asks for {num_blocks} blocks of {format_bytes(block_bytes)}, together "
            f"{format_bytes(num_blocks * block_bytes)}, and the memory has {format_bytes(total)}: "
            f"lower {setting}",
            setting,
        )


def resolve_max_model_len(configured: int | None, model_max: int) -> int:
    """The longest sequence in tokens: ``configured``, by default ``model_max``.

    Raises `ConfigError` where ``configured`` is above ``model_max``, the model's context length.
    """
    if configured is not None and configured > model_max:
        raise ConfigError(
            f"max_model_len {configured} is above the model's context length {model_max}: lower it",
            "max_model_len",
        )
    return model_max if configured is None else configured
