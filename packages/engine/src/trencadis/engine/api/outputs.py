"""What the engine reports: deltas of running requests, and statistics."""

from __future__ import annotations

from operator import add
from typing import Any, Literal, TypeVar

import attrs

StatsT = TypeVar("StatsT", "EngineStats", "ThermalStats", "TierStats")

FinishReason = Literal["stop", "length", "abort"]
"""``stop``: end-of-sequence token, stop token or stop string. ``length``: the token limit.
``abort``: the request was aborted."""

RequestStatus = Literal["normal", "preempted", "swapped"]
"""What happened to a request before a token of it: nothing, or it was preempted and recomputed, or
swapped out and in."""

SensorHealth = Literal["fresh", "stale", "failed"]
"""``fresh``: the last reading is current. ``stale``: it is some seconds old. ``failed``: there is
no usable reading."""


@attrs.frozen
class TokenLogprob:
    """A token with its log-probability (natural log) under the model's unmodified distribution."""

    token_id: int
    logprob: float


@attrs.frozen
class PositionLogprobs:
    """Log-probabilities at one generated position: of the chosen token and of the most probable
    tokens, the most probable first, or of ``logprob_token_ids``, in their order."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()


@attrs.frozen
class PromptLogprobs(PositionLogprobs):
    """As `PositionLogprobs`, of a token of the prompt. ``rank``: 1 for the most probable token."""

    rank: int = 1


@attrs.frozen
class CompletionDelta:
    """New output of one answer of a request since its previous delta.

    ``index``: number of the answer, 0 to ``n - 1``. ``text``: new characters that later tokens
    cannot change; it is empty while a character or a possible stop string is incomplete.
    ``finish_reason``: set in the last delta of each answer only. ``stop_reason``: the stop string
    or stop token that matched, otherwise None. ``num_cached_tokens``: prompt tokens that were
    prefix hits. ``request_status``: whether the request was preempted until then. ``queue_s``: with
    the first token of an answer, the seconds that it waited in the core until it first ran; None
    for a request that was parked, which also waited for its model. ``away_s``: the seconds that it
    was preempted until then, without those that it was parked. ``num_preemptions``: how often it
    was preempted. ``embedding``: of an engine with the runner ``pooling``, the hidden state
    of the prompt's last token as float32 in little endian, or of one that scores the logit alone;
    such a request has one delta, without text and tokens. ``prompt_logprobs``: in the first delta
    of a request that asked for them, one for each token of the prompt; the first, which no token
    precedes, is None.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    request_status: RequestStatus = "normal"
    queue_s: float | None = None
    embedding: bytes | None = None
    away_s: float = 0.0
    prompt_logprobs: tuple[PromptLogprobs | None, ...] | None = None
    num_preemptions: int = 0


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Most tokens of the steps that `EngineStats` counts together. vLLM's, of its iterations."""

HEADROOM_C = 5.0
"""Degrees C below the target temperature from which a device has less headroom."""


def _total(default: Any = 0) -> Any:
    """A field that counts since the start."""
    return attrs.field(default=default, metadata={"is_total": True})


@attrs.frozen
class TierStats:
    """KV blocks in a tier below the device.

    ``num_bytes``: bytes that it holds. The others are totals, whichever model was served:
    ``num_loaded_blocks`` are those that prompts needed; ``num_errors`` are blocks that could not be
    stored or loaded, and files that were rejected.
    """

    num_bytes: int = 0
    num_stored_blocks: int = _total()
    num_stored_bytes: int = _total()
    num_loaded_blocks: int = _total()
    num_loaded_bytes: int = _total()
    num_errors: int = _total()


@attrs.frozen
class ThermalStats:
    """Temperatures, power and the thermal policy.

    ``hottest_c``: temperature of the hottest device, degrees C; None before the first reading.
    ``power_w``: power of all devices together, watts; None if it is not measured.
    ``sensor``: how current the readings are. ``fault``: the error of the sensors or of the policy,
    "" for none. ``policy``: name of the policy, "" for none; with "control loop" while one runs for
    an order. ``policy_active``: whether the policy limits the
    running sequences; False while it fails, and its last limit stays. ``target_temp_c``: the lower
    target of policy and control loop, degrees C; None without one. ``power_budget_w``: the power
    budget of the policy, watts; None without one.
    ``num_policy_faults``, ``num_rejected_readings``: steps in which the policy failed, and readings
    that were neither a temperature nor a power, since the start.
    """

    hottest_c: float | None = None
    power_w: float | None = None
    sensor: SensorHealth = "fresh"
    fault: str = ""
    policy: str = ""
    policy_active: bool = False
    target_temp_c: float | None = None
    power_budget_w: float | None = None
    num_policy_faults: int = _total()
    num_rejected_readings: int = _total()

    @property
    def headroom(self) -> float:
        """How far the devices are from their limits, 0 to 1; 1 without limits or readings.

        The smaller share of: degrees C below the target, of `HEADROOM_C`; watts below the power
        budget, of the budget. A sensor that has failed counts as hot, see ``hottest_c``.
        """
        shares = [1.0]
        if self.target_temp_c is not None and self.hottest_c is not None:
            shares.append((self.target_temp_c - self.hottest_c) / HEADROOM_C)
        if self.power_budget_w is not None and self.power_w is not None:
            shares.append((self.power_budget_w - self.power_w) / self.power_budget_w)
        return max(0.0, min(shares))


@attrs.frozen
class EngineStats:
    """Snapshot of the engine core after a step, for metrics and health checks.

    Now: requests (``_reqs``), sequences (``_seqs``) and KV blocks

    - ``num_running_reqs``: requests with a sequence that runs. With ``n`` = 4 it is one request.
    - ``num_running_seqs``: sequences that run.
    - ``max_running_seqs``: the running limit. Administrators and thermal policies lower it from
      ``max_num_seqs``.
    - ``max_prefill_tokens``: the prefill limit, in tokens of a step. The same lower it from
      ``max_num_batched_tokens``.
    - ``num_waiting_reqs``: requests that have not started; ``num_compiling_reqs`` of them wait for
      their grammar.
    - ``num_swapped_reqs``: preempted requests whose KV cache is on the host.
    - ``num_preempted_reqs``: preempted requests without KV cache, which wait to be recomputed.
    - ``num_used_blocks``, ``num_total_blocks``: KV blocks on the device.
    - ``block_size``: tokens of a KV block. ``max_model_len``: tokens of the longest sequence.
    - ``highest_block_in_use``: highest id of a used KV block.
    - ``num_queued_swaps``: KV blocks that wait to be swapped, because of the bandwidth limit.
    - ``num_buckets``, ``num_ready_buckets``: buckets, and those that warm-up has run or traffic has
      compiled. ``is_warming_up``: whether a warm-up in the background has some left.
    - ``num_graphs``: captured graphs.
    - ``max_adapters``: slots for adapters; 0 for an engine that serves none.
    - ``running_adapters``, ``waiting_adapters``: names of adapters of requests that were admitted,
      and of those that have not started.
    - ``thermal``: None if no temperature is measured.
    - ``host_tier``, ``disk_tier``: None without one (``kv_tiers``). Totals and metrics find the
      tiers by the end of these names.
    - ``core_silence_s``: seconds since the last message of a core in another process. An idle one
      sends one each second; all other values are as old. ``core_silence_limit_s``: the silence
      after which it counts as hung, longer while it loads or compiles.

    Totals of the active model since the start

    - ``num_preemptions``: preemptions. ``num_swaps`` of them swapped the KV cache out,
      ``num_recomputes`` freed it.
    - ``num_swap_out_bytes``, ``num_swap_in_bytes``: bytes that were swapped, and ``swap_seconds``,
      the time that their copies took.
    - ``num_steps``: steps.
    - ``num_prompt_tokens``: tokens of prompts; each prompt counts once, in full.
    - ``num_prefix_query_tokens``: tokens of prompts that were looked up in the prefix cache;
      ``num_prefix_hit_tokens`` of them were prefix hits. Counted like ``num_prompt_tokens``.
    - ``num_defragmented_blocks``: KV blocks that defragmentation has moved.
    - ``num_prefill_tokens``: tokens of prefill chunks of two or more tokens; a single token runs in
      the decode batch. Prefix hits do not count; recomputed tokens count again.
    - ``num_generation_tokens``: tokens generated, of all sequences.
    - ``num_steps_by_tokens``: steps, by the tokens of the prompts whose computation they ended, and
      those that they generated: up to each of `STEP_TOKENS`, then above the last.
    - ``num_padded_tokens``: tokens computed as padding.
    - ``num_bucket_misses``: forward passes whose shape no bucket holds.
    - ``num_cold_forwards``: forward passes in a shape that neither warm-up nor traffic had
      compiled.
    - ``num_compilations``: compilations while serving.
    - ``num_core_restarts``: restarts of the core, whichever model it served.
    """

    num_running_reqs: int = 0
    num_running_seqs: int = 0
    max_running_seqs: int = 0
    max_num_seqs: int = 0
    max_prefill_tokens: int = 0
    max_num_batched_tokens: int = 0
    num_waiting_reqs: int = 0
    num_compiling_reqs: int = 0
    num_swapped_reqs: int = 0
    num_preempted_reqs: int = 0
    num_used_blocks: int = 0
    num_total_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    highest_block_in_use: int = 0
    num_queued_swaps: int = 0
    num_buckets: int = 0
    num_ready_buckets: int = 0
    is_warming_up: bool = False
    num_graphs: int = 0
    max_adapters: int = 0
    running_adapters: tuple[str, ...] = ()
    waiting_adapters: tuple[str, ...] = ()
    thermal: ThermalStats | None = None
    host_tier: TierStats | None = None
    disk_tier: TierStats | None = None
    core_silence_s: float = 0.0
    core_silence_limit_s: float = 0.0
    num_preemptions: int = _total()
    num_swaps: int = _total()
    num_recomputes: int = _total()
    num_swap_out_bytes: int = _total()
    num_swap_in_bytes: int = _total()
    swap_seconds: float = _total(0.0)
    num_steps: int = _total()
    num_prompt_tokens: int = _total()
    num_prefix_query_tokens: int = _total()
    num_prefix_hit_tokens: int = _total()
    num_defragmented_blocks: int = _total()
    num_prefill_tokens: int = _total()
    num_generation_tokens: int = _total()
    num_steps_by_tokens: tuple[int, ...] = _total((0,) * (len(STEP_TOKENS) + 1))
    num_padded_tokens: int = _total()
    num_bucket_misses: int = _total()
    num_cold_forwards: int = _total()
    num_compilations: int = _total()
    num_core_restarts: int = 0

    @property
    def cache_usage(self) -> float:
        """Share of KV blocks in use, 0 to 1."""
        return self.num_used_blocks / self.num_total_blocks if self.num_total_blocks else 0.0

    @property
    def num_pending_reqs(self) -> int:
        """Requests that have not started, or are preempted."""
        return self.num_waiting_reqs + self.num_swapped_reqs + self.num_preempted_reqs

    @property
    def headroom(self) -> float:
        """How much more work the engine can start, 0 to 1. A router sends requests where it is
        highest.

        The smallest of `ThermalStats.headroom`, the sequences that the running limit leaves free,
        less `num_pending_reqs`, of ``max_num_seqs``, and the prefill limit, of
        ``max_num_batched_tokens``. KV blocks are `cache_usage`, for themselves: routers have a rule
        for them, which would hide the heat here.
        """
        free = max(0, self.max_running_seqs - self.num_running_seqs - self.num_pending_reqs)
        return min(
            free / max(1, self.max_num_seqs),
            self.max_prefill_tokens / max(1, self.max_num_batched_tokens),
            self.thermal.headroom if self.thermal is not None else 1.0,
        )


def plus_totals(stats: StatsT, earlier: StatsT) -> StatsT:
    """Statistics with their totals and those of ``earlier``, a process or a scheduler before."""
    changes = {
        name: _sum(getattr(stats, name), getattr(earlier, name)) for name in _totals_of(stats)
    }
    return attrs.evolve(stats, **changes)


def with_totals(stats: StatsT, totals: StatsT) -> StatsT:
    """Statistics with the totals of ``totals`` in place of their own."""
    return attrs.evolve(stats, **{name: getattr(totals, name) for name in _totals_of(totals)})


def totals_since(stats: StatsT, base: StatsT) -> StatsT:
    """The totals alone, less those of ``base``; 0 where these are higher."""
    changes = {
        name: _difference(getattr(stats, name), getattr(base, name)) for name in _totals_of(stats)
    }
    return attrs.evolve(type(stats)(), **changes)


# A total is a number, or a tuple of numbers.


def _sum(total: Any, other: Any) -> Any:
    return tuple(map(add, total, other)) if isinstance(total, tuple) else total + other


def _difference(total: Any, base: Any) -> Any:
    """0 where ``base`` is higher."""
    if isinstance(total, tuple):
        return tuple(map(_difference, total, base))
    return max(type(total)(0), total - base)


def _totals_of(stats: EngineStats | ThermalStats | TierStats) -> list[str]:
    return [field.name for field in attrs.fields(type(stats)) if field.metadata.get("is_total")]
