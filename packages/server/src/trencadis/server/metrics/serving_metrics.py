"""The registry with the metrics of one app, and the observation of its requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import get_args

import attrs
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from trencadis.engine import CompletionDelta, RequestStatus
from trencadis.server.engine_protocol import ServingEngine
from trencadis.server.metrics.metric_tables import (
    ENGINE_METRICS,
    FINISHED_REASONS,
    REQUEST_METRICS,
    REQUEST_SUCCESS,
    STATUS_LABEL,
    RequestEvent,
)

LABELS = ("model_name", "engine")


class ServingMetrics:
    """All metrics of one app, in a registry of their own. ``clock`` counts seconds.

    ``num_active`` counts engine requests that have not ended.
    """

    def __init__(self, engine: ServingEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.num_active = 0
        self.registry = CollectorRegistry()
        labels = (engine.model_name, "0")
        self.registry.register(_EngineCollector(engine, labels))
        ProcessCollector(registry=self.registry)
        self._histograms = []
        for row in REQUEST_METRICS:
            buckets = row.buckets or _one_two_five(engine.max_model_len)
            names = (*LABELS, STATUS_LABEL) if row.has_status else LABELS
            histogram = Histogram(
                row.name, row.help, names, registry=self.registry, buckets=buckets
            )
            self._histograms.append(
                (
                    row,
                    {
                        status: histogram.labels(*labels, *((status,) if row.has_status else ()))
                        for status in get_args(RequestStatus)
                    },
                )
            )
        name, about, label = REQUEST_SUCCESS
        success = Counter(name, about, (*LABELS, label), registry=self.registry)
        self._finished = {reason: success.labels(*labels, reason) for reason in FINISHED_REASONS}

    def observe(self, event: RequestEvent) -> None:
        """Add an event to the histograms."""
        for row, by_status in self._histograms:
            value = row.read(event)
            if value is not None:
                by_status[event.request_status].observe(value)

    def count_finished(self, reason: str, count: int = 1) -> None:
        """Count choices that ended for ``reason``."""
        self._finished[reason].inc(count)


@attrs.define
class RequestTimeline:
    """Observes the choices of one engine request, from its arrival (now) to its end."""

    metrics: ServingMetrics
    num_choices: int
    num_prompt_tokens: int
    _arrived: float = attrs.field(init=False)
    _last_tokens: dict[int, float] = attrs.field(init=False, factory=dict)
    _num_tokens: dict[int, int] = attrs.field(init=False, factory=dict)
    _num_finished: int = attrs.field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self._arrived = self.metrics.clock()

    def observe(self, delta: CompletionDelta) -> None:
        """Observe a delta that arrives now."""
        now = self.metrics.clock()
        previous = self._last_tokens.get(delta.index)
        has_tokens = bool(delta.token_ids)
        num_tokens = self._num_tokens.get(delta.index, 0) + len(delta.token_ids)
        self.metrics.observe(
            RequestEvent(
                seconds=now - self._arrived,
                token_seconds=now - previous if has_tokens and previous is not None else None,
                is_first=has_tokens and not self._last_tokens,
                is_last=delta.finish_reason is not None,
                num_prompt_tokens=self.num_prompt_tokens,
                num_generation_tokens=num_tokens,
                request_status=delta.request_status,
            )
        )
        if has_tokens:
            self._last_tokens[delta.index] = now
            self._num_tokens[delta.index] = num_tokens
        if delta.finish_reason is not None:
            self._num_finished += 1
            self.metrics.count_finished(delta.finish_reason)

    def end(self, reason: str) -> None:
        """Count the choices that have not finished under ``reason`` (``abort`` or ``error``)."""
        self.metrics.count_finished(reason, self.num_choices - self._num_finished)
        self._num_finished = self.num_choices


class _EngineCollector(Collector):
    """Reads `ENGINE_METRICS` when Prometheus asks for them."""

    def __init__(self, engine: ServingEngine, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterable[Metric]:
        stats = self._engine.stats
        for row in ENGINE_METRICS:
            value = row.read(stats)
            if value is None:
                continue
            family = _FAMILIES[row.kind](row.name, row.help, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family


_FAMILIES: dict[str, type[GaugeMetricFamily] | type[CounterMetricFamily]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
}


def _one_two_five(highest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … up to ``highest``: vLLM's buckets for numbers of tokens."""
    bounds = (float(m * 10**e) for e in range(len(str(highest))) for m in (1, 2, 5))
    return [bound for bound in bounds if bound <= highest]
