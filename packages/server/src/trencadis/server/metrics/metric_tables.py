"""All metrics: name, kind, help text, and how the value is read.

Metrics that vLLM also has carry its names, labels, meanings and histogram buckets
(``vllm/v1/metrics/loggers.py``), so that dashboards and alerts for vLLM work. The other names begin
with ``trencadis:``. Prometheus appends ``_total`` to the name of a counter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Literal

import attrs

from trencadis.engine import STEP_TOKENS, EngineStats, RequestStatus, ThermalStats, TierStats

SENSOR_HEALTH = ("fresh", "stale", "failed")

ReadStats = Callable[[EngineStats], float | None]


@attrs.frozen
class EngineMetric:
    """A metric that is read from the engine's latest statistics when Prometheus asks for it.

    Rows that follow each other with one name, and other labels, are series of one metric.
    ``read`` returns None if there is no value now; the metric is left out then. ``labels``: further
    labels, with their values. ``is_of_device``: of the device or the engine, whichever model is
    active; it has no label ``model_name``, so that its series goes on when the model changes.
    """

    kind: Literal["gauge", "counter"]
    name: str
    help: str
    read: ReadStats
    labels: Callable[[EngineStats], Mapping[str, object]] = lambda stats: {}
    is_of_device: bool = False


def _of_device(
    kind: Literal["gauge", "counter"], name: str, about: str, read: ReadStats
) -> EngineMetric:
    return EngineMetric(kind, name, about, read, is_of_device=True)


def _of_tiers(
    kind: Literal["gauge", "counter"], name: str, about: str, read: Callable[[TierStats], float]
) -> Iterator[EngineMetric]:
    """A series for each tier that there is."""
    for tier, find in _TIERS.items():

        def value(stats: EngineStats, find: _FindTier = find) -> float | None:
            found = find(stats)
            return None if found is None else read(found)

        def labels(_: EngineStats, tier: str = tier) -> Mapping[str, object]:
            return {"tier": tier}

        yield EngineMetric(kind, f"trencadis:tier_{name}", about, value, labels, is_of_device=True)


_FindTier = Callable[[EngineStats], TierStats | None]

_TIERS: Mapping[str, _FindTier] = {
    name.removesuffix("_tier"): attrgetter(name)
    for name in attrs.fields_dict(EngineStats)
    if name.endswith("_tier")
}


def _gauge(name: str, about: str, read: ReadStats) -> EngineMetric:
    return EngineMetric("gauge", name, about, read)


def _counter(name: str, about: str, read: ReadStats) -> EngineMetric:
    return EngineMetric("counter", name, about, read)


def _cache_config(stats: EngineStats) -> Mapping[str, object]:
    tokens = stats.block_size * stats.num_total_blocks
    return {
        "block_size": stats.block_size,
        "num_gpu_blocks": stats.num_total_blocks,
        "kv_cache_size_tokens": tokens,
        "kv_cache_max_concurrency": round(tokens / max(1, stats.max_model_len), 2),
    }


def _thermal(read: Callable[[ThermalStats], float | None]) -> ReadStats:
    return lambda stats: None if stats.thermal is None else read(stats.thermal)


_WAITING = (
    "vllm:num_requests_waiting_by_reason",
    "Waiting requests, by reason: capacity; deferred (their grammar is compiled).",
)

ENGINE_METRICS: tuple[EngineMetric, ...] = (
    EngineMetric(
        "gauge",
        "vllm:lora_requests_info",
        "Always 1. Labels: slots for adapters, and the names of those that are used or waited for.",
        lambda s: 1 if s.max_adapters else None,
        lambda s: {
            "max_lora": s.max_adapters,
            "running_lora_adapters": ",".join(s.running_adapters),
            "waiting_lora_adapters": ",".join(s.waiting_adapters),
        },
    ),
    _gauge("vllm:num_requests_running", "Requests that run.", lambda s: s.num_running_reqs),
    _gauge(
        "vllm:num_requests_waiting",
        "Requests that have not started.",
        lambda s: s.num_waiting_reqs,
    ),
    *(
        EngineMetric("gauge", *_WAITING, read, labels)
        for read, labels in (
            (
                lambda s: max(0, s.num_waiting_reqs - s.num_compiling_reqs),
                lambda s: {"reason": "capacity"},
            ),
            (lambda s: s.num_compiling_reqs, lambda s: {"reason": "deferred"}),
        )
    ),
    _gauge(
        "vllm:num_requests_swapped",
        "Preempted requests whose KV cache is on the host.",
        lambda s: s.num_swapped_reqs,
    ),
    _gauge(
        "trencadis:num_requests_preempted",
        "Preempted requests without KV cache, which wait to be recomputed.",
        lambda s: s.num_preempted_reqs,
    ),
    _gauge(
        "trencadis:running_seqs",
        "Sequences that run. A request with n choices has n of them or more.",
        lambda s: s.num_running_seqs,
    ),
    _gauge(
        "trencadis:max_running_seqs",
        "Maximum number of sequences that may run now.",
        lambda s: s.max_running_seqs,
    ),
    _gauge(
        "trencadis:prefill_token_limit",
        "Maximum number of prompt tokens that a step may compute now.",
        lambda s: s.max_prefill_tokens,
    ),
    _gauge(
        "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda s: s.cache_usage
    ),
    _gauge(
        "vllm:gpu_cache_usage_perc",
        "Former name of vllm:kv_cache_usage_perc.",
        lambda s: s.cache_usage,
    ),
    _gauge("trencadis:kv_blocks_used", "KV blocks in use.", lambda s: s.num_used_blocks),
    _gauge(
        "trencadis:kv_blocks_capacity", "KV blocks of the device.", lambda s: s.num_total_blocks
    ),
    EngineMetric(
        "gauge",
        "vllm:cache_config_info",
        "Always 1. Labels: tokens of a KV block, KV blocks, their tokens, longest sequences that "
        "fit.",
        lambda s: 1 if s.block_size else None,
        _cache_config,
    ),
    _gauge(
        "trencadis:highest_block_in_use",
        "Highest id of a KV block in use. The cost of a decode step depends on it.",
        lambda s: s.highest_block_in_use,
    ),
    _gauge(
        "trencadis:swap_queue_blocks",
        "KV blocks that wait to be swapped, because of the bandwidth limit.",
        lambda s: s.num_queued_swaps,
    ),
    _gauge("trencadis:buckets", "Buckets.", lambda s: s.num_buckets),
    _gauge(
        "trencadis:ready_buckets",
        "Buckets that warm-up has run or traffic has compiled.",
        lambda s: s.num_ready_buckets,
    ),
    _gauge(
        "trencadis:warming_up",
        "1 while a warm-up in the background has buckets left.",
        lambda s: float(s.is_warming_up),
    ),
    _gauge("trencadis:graphs", "Captured graphs.", lambda s: s.num_graphs),
    _of_device(
        "gauge",
        "trencadis:headroom",
        "How much more work the engine can start, 0 to 1: the smallest share that is left of its "
        "sequences, prompt tokens of a step, 5 degrees C below the target, and power budget.",
        lambda s: s.headroom,
    ),
    _of_device(
        "gauge",
        "trencadis:temperature_celsius",
        "Temperature of the hottest device, degrees C.",
        _thermal(lambda t: t.hottest_c),
    ),
    _of_device(
        "gauge",
        "trencadis:thermal_target_celsius",
        "Target temperature of the thermal policy or of an order, the lower one, degrees C.",
        _thermal(lambda t: t.target_temp_c),
    ),
    _of_device(
        "gauge",
        "trencadis:power_watts",
        "Power of all devices together, watts.",
        _thermal(lambda t: t.power_w),
    ),
    _of_device(
        "gauge",
        "trencadis:sensor_health",
        "State of the temperature readings. 0: current, 1: stale, 2: failed.",
        _thermal(lambda t: SENSOR_HEALTH.index(t.sensor)),
    ),
    _of_device(
        "gauge",
        "trencadis:thermal_policy_active",
        "1 if a thermal policy limits the running sequences. 0 without one, and while it fails.",
        _thermal(lambda t: t.policy_active),
    ),
    _of_device(
        "counter",
        "trencadis:thermal_policy_faults",
        "Failures of the thermal policy. Its last limit stays.",
        _thermal(lambda t: t.num_policy_faults),
    ),
    _of_device(
        "counter",
        "trencadis:thermal_readings_rejected",
        "Readings that were neither temperature nor power.",
        _thermal(lambda t: t.num_rejected_readings),
    ),
    _counter(
        "vllm:prompt_tokens",
        "Tokens of prompts. Each prompt counts once, in full.",
        lambda s: s.num_prompt_tokens,
    ),
    _counter(
        "vllm:prefix_cache_queries",
        "Tokens of prompts that were looked up in the prefix cache.",
        lambda s: s.num_prefix_query_tokens,
    ),
    _counter(
        "vllm:prefix_cache_hits",
        "Tokens of prompts that were found in the prefix cache.",
        lambda s: s.num_prefix_hit_tokens,
    ),
    _counter(
        "trencadis:prefill_tokens",
        "Tokens of prefill chunks of two or more tokens. Prefix hits do not count, recomputed "
        "tokens count again.",
        lambda s: s.num_prefill_tokens,
    ),
    _counter("vllm:generation_tokens", "Tokens generated.", lambda s: s.num_generation_tokens),
    _counter("vllm:num_preemptions", "Preemptions.", lambda s: s.num_preemptions),
    _counter(
        "trencadis:swaps",
        "Preemptions that swapped the KV cache out to the host.",
        lambda s: s.num_swaps,
    ),
    _counter(
        "trencadis:swap_out_bytes",
        "Bytes that were swapped out to the host.",
        lambda s: s.num_swap_out_bytes,
    ),
    _counter(
        "trencadis:swap_in_bytes",
        "Bytes that were swapped in from the host.",
        lambda s: s.num_swap_in_bytes,
    ),
    _counter(
        "trencadis:swap_seconds",
        "Time that swaps took.",
        lambda s: s.swap_seconds,
    ),
    _counter(
        "trencadis:recomputes", "Preemptions that freed the KV cache.", lambda s: s.num_recomputes
    ),
    _counter(
        "trencadis:defragmented_blocks",
        "KV blocks that defragmentation has moved.",
        lambda s: s.num_defragmented_blocks,
    ),
    _counter("trencadis:engine_steps", "Steps of the engine core.", lambda s: s.num_steps),
    _counter(
        "trencadis:padded_tokens", "Tokens computed as padding.", lambda s: s.num_padded_tokens
    ),
    _counter(
        "trencadis:bucket_misses",
        "Forward passes whose shape no bucket holds.",
        lambda s: s.num_bucket_misses,
    ),
    _counter(
        "trencadis:cold_forwards",
        "Forward passes in a shape that neither warm-up nor traffic had compiled.",
        lambda s: s.num_cold_forwards,
    ),
    *_of_tiers("gauge", "bytes", "Bytes of KV blocks in a tier.", lambda t: t.num_bytes),
    *_of_tiers(
        "counter", "stored_blocks", "KV blocks stored in a tier.", lambda t: t.num_stored_blocks
    ),
    *_of_tiers("counter", "stored_bytes", "Bytes stored in a tier.", lambda t: t.num_stored_bytes),
    *_of_tiers(
        "counter",
        "loaded_blocks",
        "KV blocks that prompts got from a tier.",
        lambda t: t.num_loaded_blocks,
    ),
    *_of_tiers(
        "counter", "loaded_bytes", "Bytes loaded from a tier.", lambda t: t.num_loaded_bytes
    ),
    *_of_tiers(
        "counter",
        "errors",
        "Blocks that a tier could not store or load.",
        lambda t: t.num_errors,
    ),
    _of_device(
        "gauge",
        "trencadis:core_silence_seconds",
        "Time since the last message of the engine core. An idle one sends one each second.",
        lambda s: s.core_silence_s,
    ),
    _of_device(
        "gauge",
        "trencadis:core_silence_limit_seconds",
        "Silence after which the engine core counts as hung. Longer while it loads or compiles.",
        lambda s: s.core_silence_limit_s,
    ),
    _of_device(
        "counter",
        "trencadis:core_restarts",
        "Restarts of the engine core.",
        lambda s: s.num_core_restarts,
    ),
    _counter("trencadis:compilations", "Compilations while serving.", lambda s: s.num_compilations),
)


@attrs.frozen
class EngineHistogram:
    """A histogram that the engine keeps.

    ``read`` returns how many values are up to each of ``bounds``, and above the last, and the sum
    of all values.
    """

    name: str
    help: str
    bounds: tuple[float, ...]
    read: Callable[[EngineStats], tuple[Sequence[int], float]]


ENGINE_HISTOGRAMS = (
    EngineHistogram(
        "vllm:iteration_tokens_total",
        "Tokens of a step: generated, and of prompts that it ends.",
        STEP_TOKENS,
        lambda s: (
            s.num_steps_by_tokens,
            s.num_prompt_tokens - s.num_prefix_hit_tokens + s.num_generation_tokens,
        ),
    ),
)


@attrs.frozen
class RequestEvent:
    """A delta of one choice of a request, as metrics see it.

    ``seconds`` is the time since the request arrived. ``token_seconds`` is the time since the
    choice's previous tokens, None if there are no new or no previous ones. ``is_first`` marks the
    first tokens of the request, ``is_last`` the last delta of the choice. ``num_choices`` and
    ``max_tokens`` are what the request asked for; None: it generates nothing. ``request_status``:
    whether the request was preempted until then. ``queue_seconds`` and ``first_seconds``: the time
    until the request first ran, and until its first token; None while they are not known.
    ``away_seconds`` and ``num_preemptions``: for how long and how often it was preempted.
    """

    seconds: float
    token_seconds: float | None
    is_first: bool
    is_last: bool
    num_prompt_tokens: int
    num_generation_tokens: int
    num_choices: int = 1
    max_tokens: int | None = None
    request_status: RequestStatus = "normal"
    queue_seconds: float | None = None
    first_seconds: float | None = None
    away_seconds: float = 0.0
    num_preemptions: int = 0


@attrs.frozen
class RequestMetric:
    """A histogram of values that are read from request events.

    ``read`` returns None for an event without a value. ``buckets`` are upper bounds; None means
    1, 2, 5, 10, … up to the model's context, for numbers of tokens. ``has_status``: with the label
    `STATUS_LABEL`.
    """

    name: str
    help: str
    buckets: tuple[float, ...] | None
    read: Callable[[RequestEvent], float | None]
    has_status: bool = False


def _between(
    begin: Callable[[RequestEvent], float | None], end: Callable[[RequestEvent], float | None]
) -> Callable[[RequestEvent], float | None]:
    """The seconds from one time to another, of the last event of a choice."""

    def read(event: RequestEvent) -> float | None:
        began, ended = begin(event), end(event)
        if not event.is_last or began is None or ended is None:
            return None
        return max(0.0, ended - began)

    return read


_LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""vLLM's, for the latency of a request and its phases."""

STATUS_LABEL = "request_status"
"""Whether a request was preempted until then; its values are those of
`RequestStatus`. Sum over it for the metric without it."""

REQUEST_METRICS = (
    RequestMetric(
        "vllm:time_to_first_token_seconds",
        "Time from arrival to the first token, by request_status: normal, preempted, swapped.",
        (
            *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
            *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
        ),
        lambda event: event.seconds if event.is_first else None,
        has_status=True,
    ),
    RequestMetric(
        "vllm:inter_token_latency_seconds",
        "Time between two tokens.",
        (
            *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
            *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
        ),
        lambda event: event.token_seconds,
    ),
    RequestMetric(
        "vllm:e2e_request_latency_seconds",
        "Time from arrival to the last token.",
        _LATENCY_BUCKETS,
        lambda event: event.seconds if event.is_last else None,
    ),
    RequestMetric(
        "vllm:request_queue_time_seconds",
        "Time of a finished choice from the request's arrival until it first ran.",
        _LATENCY_BUCKETS,
        _between(lambda event: 0.0, lambda event: event.queue_seconds),
    ),
    RequestMetric(
        "vllm:request_prefill_time_seconds",
        "Time of a finished choice from there to the request's first token.",
        _LATENCY_BUCKETS,
        _between(lambda event: event.queue_seconds, lambda event: event.first_seconds),
    ),
    RequestMetric(
        "vllm:request_decode_time_seconds",
        "Time of a finished choice from there to its last token.",
        _LATENCY_BUCKETS,
        _between(lambda event: event.first_seconds, lambda event: event.seconds),
    ),
    RequestMetric(
        "vllm:request_inference_time_seconds",
        "Time of prefill and decode of a finished choice.",
        _LATENCY_BUCKETS,
        _between(lambda event: event.queue_seconds, lambda event: event.seconds),
    ),
    RequestMetric(
        "trencadis:request_preempted_time_seconds",
        "Time that a finished choice was preempted, by request_status: preempted, swapped.",
        _LATENCY_BUCKETS,
        lambda event: event.away_seconds if event.is_last and event.away_seconds else None,
        has_status=True,
    ),
    RequestMetric(
        "vllm:request_num_preemptions",
        "Preemptions of a finished choice.",
        (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
        lambda event: event.num_preemptions if event.is_last else None,
    ),
    RequestMetric(
        "vllm:request_prompt_tokens",
        "Prompt tokens of a finished choice.",
        None,
        lambda event: event.num_prompt_tokens if event.is_last else None,
    ),
    RequestMetric(
        "vllm:request_generation_tokens",
        "Tokens of a finished choice.",
        None,
        lambda event: event.num_generation_tokens if event.is_last else None,
    ),
    RequestMetric(
        "vllm:request_params_n",
        "n of a request that has its first token.",
        (1.0, 2.0, 5.0, 10.0, 20.0),
        lambda event: event.num_choices if event.is_first else None,
    ),
    RequestMetric(
        "vllm:request_params_max_tokens",
        "max_tokens of a request that has its first token, at most what its prompt left.",
        None,
        lambda event: event.max_tokens if event.is_first else None,
    ),
)


@attrs.frozen
class SwitchMetric:
    """A metric of an engine that switches between several models.

    Its label ``model_name`` is the alias that the switch leads to.
    """

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    help: str


MODEL_SWITCHES = SwitchMetric(
    "counter", "trencadis:model_switches", "Switches to a model that succeeded."
)
FAILED_SWITCHES = SwitchMetric(
    "counter", "trencadis:model_switch_failures", "Switches to a model that failed."
)
SWITCH_SECONDS = SwitchMetric(
    "histogram",
    "trencadis:model_switch_seconds",
    "Time of a switch: drain, unload, load and warm-up.",
)
MODEL_ACTIVE = SwitchMetric(
    "gauge", "trencadis:model_active", "1 for the model that is served, 0 for the others."
)
SWITCH_WAITING = SwitchMetric(
    "gauge",
    "trencadis:num_requests_waiting_for_switch",
    "Requests that wait until their model is active, by that model (--auto-switch).",
)
SWITCH_METRICS = (MODEL_SWITCHES, FAILED_SWITCHES, SWITCH_SECONDS, MODEL_ACTIVE, SWITCH_WAITING)
SWITCH_SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 1000.0)


@attrs.frozen
class KeyMetric:
    """A counter with the name of an API key as the label `KEY_LABEL`."""

    name: str
    help: str


KEY_LABEL = "api_key"
KEY_REQUESTS = KeyMetric("trencadis:key_requests", "Prompts that an API key has sent.")
KEY_PROMPT_TOKENS = KeyMetric(
    "trencadis:key_prompt_tokens", "Prompt tokens that an API key has sent."
)
KEY_GENERATION_TOKENS = KeyMetric(
    "trencadis:key_generation_tokens", "Tokens generated for an API key."
)
KEY_REFUSED = KeyMetric(
    "trencadis:key_requests_refused",
    "Requests of an API key beyond --max-requests-per-key.",
)
KEY_METRICS = (KEY_REQUESTS, KEY_PROMPT_TOKENS, KEY_GENERATION_TOKENS, KEY_REFUSED)

BATCHES = ("trencadis:batches", "Batches that have not ended, by status.", "status")
BATCH_LINES = (
    "trencadis:batch_lines",
    "Lines of batches that were answered, by status: completed, failed.",
    "status",
)
"""Name, help text and label."""

FINISHED_REASONS = ("stop", "length", "abort", "error")
REQUEST_SUCCESS = ("vllm:request_success", "Finished choices, by reason.", "finished_reason")
"""Name, help text and label of the counter of finished choices."""

REJECTED_REASON = "max_num_queued_reqs"
ADMISSION_REJECTIONS = (
    "vllm:admission_rejections",
    "Requests that a full queue has rejected.",
    "reason",
)
"""Name, help text and label of the counter of rejected requests; vLLM's value of it is
`REJECTED_REASON`."""
