"""Prometheus metrics, under the names that vLLM's dashboards and alerts already read.

What the engine counts is read from its latest snapshot when Prometheus asks; what only the front
sees (latencies, how requests ended) is observed as answers pass by. Names, labels and histogram
bounds are those of vLLM's metrics page (docs.vllm.ai, "Production Metrics"); what is this
engine's own starts with ``trencadis:``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

import attrs
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from trencadis.engine import CompletionDelta, EngineStats, ThermalStats
from trencadis.server.backend import ServingEngine

LABELS = ("model_name", "engine")
FINISHED_REASONS = ("stop", "length", "abort", "error")

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


class ServingMetrics:
    """All metrics of one app, in a registry of its own. ``clock`` counts seconds."""

    def __init__(self, engine: ServingEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.registry = CollectorRegistry()
        labels = (engine.model_name, "0")
        self.registry.register(_EngineCollector(engine, labels))
        ProcessCollector(registry=self.registry)

        def histogram(name: str, about: str, bounds: Iterable[float]) -> Histogram:
            metric = Histogram(name, about, LABELS, registry=self.registry, buckets=tuple(bounds))
            return metric.labels(*labels)

        self.first_token = histogram(
            "vllm:time_to_first_token_seconds", "Time to the first token.", _FIRST_TOKEN
        )
        self.inter_token = histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens.", _INTER_TOKEN
        )
        self.request = histogram(
            "vllm:e2e_request_latency_seconds", "Time from arrival to the last token.", _REQUEST
        )
        token_bounds = _one_two_five(engine.max_model_len)
        self.prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished request.", token_bounds
        )
        self.generation_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens of a finished answer.", token_bounds
        )
        success = Counter(
            "vllm:request_success",
            "Finished answers, by reason.",
            (*LABELS, "finished_reason"),
            registry=self.registry,
        )
        self.finished = {reason: success.labels(*labels, reason) for reason in FINISHED_REASONS}


@attrs.define
class RequestTimeline:
    """The times of one prompt's samples, from arrival on; ends in `ServingMetrics`."""

    metrics: ServingMetrics
    num_samples: int
    num_prompt_tokens: int
    arrived: float = attrs.field(init=False)
    last_token: dict[int, float] = attrs.field(factory=dict)
    tokens: dict[int, int] = attrs.field(factory=dict)
    num_finished: int = 0

    def __attrs_post_init__(self) -> None:
        self.arrived = self.metrics.clock()

    def observe(self, delta: CompletionDelta) -> None:
        """Take note of what a sample gained."""
        now = self.metrics.clock()
        if delta.token_ids:
            previous = self.last_token.get(delta.index)
            if previous is not None:
                self.metrics.inter_token.observe(now - previous)
            elif not self.last_token:
                self.metrics.first_token.observe(now - self.arrived)
            self.last_token[delta.index] = now
            known = self.tokens.get(delta.index, 0)
            self.tokens[delta.index] = known + len(delta.token_ids)
        if delta.finish_reason is not None:
            self.num_finished += 1
            self.metrics.finished[delta.finish_reason].inc()
            self.metrics.request.observe(now - self.arrived)
            self.metrics.prompt_tokens.observe(self.num_prompt_tokens)
            self.metrics.generation_tokens.observe(self.tokens.get(delta.index, 0))

    def end(self, reason: str) -> None:
        """Count the samples that never finished under ``reason`` (``abort`` or ``error``)."""
        unfinished = self.num_samples - self.num_finished
        if unfinished > 0:
            self.metrics.finished[reason].inc(unfinished)
            self.num_finished = self.num_samples


class _EngineCollector(Collector):
    """The engine's snapshot, read at the moment of a scrape."""

    def __init__(self, engine: ServingEngine, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        for name, about, value in (*_gauges(stats), *_heat(stats.thermal)):
            gauge = GaugeMetricFamily(name, about, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, about, count in _counters(stats):
            counter = CounterMetricFamily(name, about, labels=LABELS)
            counter.add_metric(self._labels, count)
            yield counter


def _gauges(stats: EngineStats) -> tuple[tuple[str, str, float], ...]:
    usage = stats.cache_usage
    return (
        ("vllm:num_requests_running", "Requests being executed.", stats.num_running),
        ("vllm:num_requests_waiting", "Requests that have not started.", stats.num_waiting),
        ("vllm:num_requests_swapped", "Requests swapped out to the host.", stats.num_swapped),
        ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", usage),
        ("vllm:gpu_cache_usage_perc", "The former name of vllm:kv_cache_usage_perc.", usage),
        ("trencadis:kv_blocks_used", "KV blocks in use.", stats.used_blocks),
        ("trencadis:kv_blocks_capacity", "KV blocks there are.", stats.total_blocks),
        (
            "trencadis:highest_block_in_use",
            "Highest id of a KV block in use: sets the cost of a decode step.",
            stats.highest_block_in_use,
        ),
        ("trencadis:buckets", "Shapes that batches are padded to.", stats.buckets),
        ("trencadis:ready_buckets", "Of those, warmed up so far.", stats.ready_buckets),
        ("trencadis:max_running_seqs", "Most sequences that may run now.", stats.max_running),
    )


def _heat(thermal: ThermalStats | None) -> Iterator[tuple[str, str, float]]:
    """What is measured alone: a missing series says so, where a zero would be a temperature."""
    if thermal is None:
        return
    if thermal.hottest_c is not None:
        about = "Temperature of the hottest device, degrees C."
        yield "trencadis:temperature_celsius", about, thermal.hottest_c
    if thermal.power_w is not None:
        yield "trencadis:power_watts", "What all devices draw together.", thermal.power_w
    about = "0: sensors were read a moment ago, 1: stale, 2: failed."
    yield "trencadis:sensor_health", about, ("fresh", "stale", "failed").index(thermal.sensor)
    about = "1 while a thermal policy caps the running sequences; 0: none, or it failed."
    yield "trencadis:thermal_policy_active", about, thermal.policy_active


def _counters(stats: EngineStats) -> tuple[tuple[str, str, float], ...]:
    return (
        ("vllm:prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
        ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
        ("vllm:num_preemptions", "Preemptions.", stats.num_preemptions),
        ("trencadis:swaps", "Preemptions that kept the cache on the host.", stats.num_swaps),
        ("trencadis:recomputes", "Preemptions that gave the cache up.", stats.num_recomputes),
        ("trencadis:engine_steps", "Steps of the engine core.", stats.steps),
        ("trencadis:padded_tokens", "Tokens computed as padding.", stats.padded_tokens),
        ("trencadis:bucket_misses", "Batches that no bucket covered.", stats.bucket_misses),
        (
            "trencadis:cold_forwards",
            "Forward passes in shapes that were not warmed up.",
            stats.cold_forwards,
        ),
        ("trencadis:compilations", "Compilations in live traffic.", stats.compilations),
    )


def _one_two_five(highest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … up to ``highest``: vLLM's bounds for counts of tokens."""
    bounds = (float(m * 10**e) for e in range(len(str(highest))) for m in (1, 2, 5))
    return [bound for bound in bounds if bound <= highest]
