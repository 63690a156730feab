"""The registry with the metrics of one app, and the observation of its requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import get_args

import attrs
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from trencadis.engine import CompletionDelta, EngineStats, RequestStatus, SwitchReport
from trencadis.server.engine_protocol import (
    ServingEngine,
    SwitchingEngine,
    as_switching,
    totals_by_model,
)
from trencadis.server.metrics.metric_tables import (
    ADMISSION_REJECTIONS,
    BATCH_LINES,
    BATCHES,
    ENGINE_HISTOGRAMS,
    ENGINE_METRICS,
    FAILED_SWITCHES,
    FINISHED_REASONS,
    KEY_GENERATION_TOKENS,
    KEY_LABEL,
    KEY_METRICS,
    KEY_PROMPT_TOKENS,
    KEY_REFUSED,
    KEY_REQUESTS,
    MODEL_ACTIVE,
    MODEL_SWITCHES,
    REJECTED_REASON,
    REQUEST_METRICS,
    REQUEST_SUCCESS,
    STATUS_LABEL,
    SWITCH_SECONDS,
    SWITCH_SECONDS_BUCKETS,
    SWITCH_WAITING,
    EngineHistogram,
    EngineMetric,
    KeyMetric,
    RequestEvent,
    RequestMetric,
)
from trencadis.server.metrics.tracing import RequestTracer

LABELS = ("model_name", "engine")
DEVICE_LABELS = ("engine",)
_NUMBERS = {row.name: number for number, row in enumerate(REQUEST_METRICS)}
ENGINE_NUMBER = "0"
_LONGEST_CONTEXT = 131_072


class ServingMetrics:
    """All metrics of one app, in a registry of their own. ``clock`` counts seconds.

    ``num_open`` counts engine requests that have not ended, and requests that wait for a switch;
    ``num_pending`` returns how many prompts wait or are being tokenised. ``tracer`` exports a trace
    of each request; None: there are no traces. The label ``model_name`` is the model that is active
    when a request begins. ``has_keys``: there are API keys, each of which has counters of its own
    from its first request on.
    """

    def __init__(
        self,
        engine: ServingEngine,
        clock: Callable[[], float] = time.monotonic,
        tracer: RequestTracer | None = None,
        has_keys: bool = False,
        num_pending: Callable[[], int] = int,
    ) -> None:
        self.clock = clock
        self.tracer = tracer
        self.num_open = 0
        self._num_pending = num_pending
        self.registry = CollectorRegistry()
        self._engine = engine
        self.registry.register(_EngineCollector(engine))
        ProcessCollector(registry=self.registry)
        switching = as_switching(engine)
        longest = engine.max_model_len
        if switching is not None:
            longest = max(longest, _LONGEST_CONTEXT)  # another model may have a longer context
        self._histograms = [
            Histogram(
                row.name,
                row.help,
                (*LABELS, STATUS_LABEL) if row.has_status else LABELS,
                registry=self.registry,
                buckets=row.buckets or _one_two_five(longest),
            )
            for row in REQUEST_METRICS
        ]
        name, about, label = REQUEST_SUCCESS
        self._success = Counter(name, about, (*LABELS, label), registry=self.registry)
        name, about, label = ADMISSION_REJECTIONS
        self._rejections = Counter(name, about, (*LABELS, label), registry=self.registry)
        self.switches = None if switching is None else SwitchMetrics(switching, self.registry)
        self._key_counters = {
            row: Counter(row.name, row.help, (*LABELS, KEY_LABEL), registry=self.registry)
            for row in (KEY_METRICS if has_keys else ())
        }
        self._series: dict[str, ModelSeries] = {}
        for model in (engine.model_name,) if switching is None else switching.aliases:
            self._series[model] = self._new_series(model)

    @property
    def num_active(self) -> int:
        """Requests that were accepted and have not ended, also while a prompt is tokenised."""
        return self.num_open + self._num_pending()

    @property
    def model_name(self) -> str:
        """The model that is active now."""
        return self._engine.model_name

    @property
    def series(self) -> ModelSeries:
        """The metrics of requests to the model that is active now."""
        model = self._engine.model_name
        if model not in self._series:
            self._series[model] = self._new_series(model)
        return self._series[model]

    def counts_up_to(self, histogram: str) -> dict[float, float]:
        """The observations of the active model up to each bound of a histogram, of all statuses."""
        counts: dict[float, float] = {}
        (observed,) = self._histograms[_NUMBERS[histogram]].collect()
        for sample in observed.samples:
            if sample.name.endswith("_bucket") and sample.labels["model_name"] == self.model_name:
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
        return counts

    def count_rejected(self) -> None:
        """Count a request that the active model got while its queue was full."""
        self._rejections.labels(self.model_name, ENGINE_NUMBER, REJECTED_REASON).inc()

    def count_refused(self, key: str) -> None:
        """Count a request that the API key with this name has sent beyond its limit."""
        self._count(KEY_REFUSED, self._engine.model_name, key, 1)

    def count_tokens(
        self, model: str, key: str, num_prompt_tokens: int, num_generation_tokens: int
    ) -> None:
        """Count a prompt of an API key that has ended. Without a key ("") nothing is counted."""
        if key:
            self._count(KEY_REQUESTS, model, key, 1)
            self._count(KEY_PROMPT_TOKENS, model, key, num_prompt_tokens)
            self._count(KEY_GENERATION_TOKENS, model, key, num_generation_tokens)
            self._count(KEY_REFUSED, model, key, 0)

    def _count(self, row: KeyMetric, model: str, key: str, count: int) -> None:
        self._key_counters[row].labels(model, ENGINE_NUMBER, key).inc(count)

    def _new_series(self, model: str) -> ModelSeries:
        labels = (model, ENGINE_NUMBER)
        statuses = get_args(RequestStatus)
        histograms = [
            (
                row,
                {
                    status: histogram.labels(*labels, *((status,) if row.has_status else ()))
                    for status in statuses
                },
            )
            for row, histogram in zip(REQUEST_METRICS, self._histograms, strict=True)
        ]
        self._rejections.labels(*labels, REJECTED_REASON)
        finished = {reason: self._success.labels(*labels, reason) for reason in FINISHED_REASONS}
        return ModelSeries(histograms, finished)


@attrs.frozen
class ModelSeries:
    """The series of one model: its histograms by the status of a request, its finished choices."""

    _histograms: list[tuple[RequestMetric, dict[RequestStatus, Histogram]]]
    _finished: dict[str, Counter]

    def observe(self, event: RequestEvent) -> None:
        """Add an event to the histograms."""
        for row, by_status in self._histograms:
            value = row.read(event)
            if value is not None:
                by_status[event.request_status].observe(value)

    def count_finished(self, reason: str, count: int = 1) -> None:
        """Count choices that ended for ``reason``."""
        self._finished[reason].inc(count)


class BatchMetrics(Collector):
    """The metrics of batches. ``statuses`` returns those of the batches that have not ended."""

    def __init__(
        self,
        statuses: Callable[[], Iterable[str]],
        all_statuses: Sequence[str],
        registry: CollectorRegistry,
    ) -> None:
        self._statuses = statuses
        self._all = all_statuses
        name, about, label = BATCH_LINES
        self._lines = Counter(name, about, (*DEVICE_LABELS, label), registry=registry)
        for status in ("completed", "failed"):
            self._lines.labels(ENGINE_NUMBER, status)
        registry.register(self)

    def count_line(self, status: str) -> None:
        """Count a line that was answered."""
        self._lines.labels(ENGINE_NUMBER, status).inc()

    def collect(self) -> Iterable[Metric]:
        """The gauge, for Prometheus."""
        name, about, label = BATCHES
        found = list(self._statuses())
        batches = GaugeMetricFamily(name, about, labels=(*DEVICE_LABELS, label))
        for status in self._all:
            batches.add_metric((ENGINE_NUMBER, status), found.count(status))
        yield batches


class SwitchMetrics(Collector):
    """The metrics of switches between models."""

    def __init__(self, engine: SwitchingEngine, registry: CollectorRegistry) -> None:
        self._engine = engine
        self.num_waiting: Callable[[], Mapping[str, int]] = dict
        """How many requests wait for a switch to each model."""
        counters = [
            Counter(row.name, row.help, LABELS, registry=registry)
            for row in (MODEL_SWITCHES, FAILED_SWITCHES)
        ]
        self._switches, self._failures = counters
        self._seconds = Histogram(
            SWITCH_SECONDS.name,
            SWITCH_SECONDS.help,
            LABELS,
            registry=registry,
            buckets=SWITCH_SECONDS_BUCKETS,
        )
        for alias in engine.aliases:
            for metric in (*counters, self._seconds):
                metric.labels(alias, ENGINE_NUMBER)
        registry.register(self)

    def observe(self, report: SwitchReport) -> None:
        """Count a switch. One to the active model changes nothing and does not count."""
        if report.previous != report.active:
            self._switches.labels(report.active, ENGINE_NUMBER).inc()
            self._seconds.labels(report.active, ENGINE_NUMBER).observe(
                report.total_s - report.prepare_s
            )

    def count_failure(self, alias: str) -> None:
        """Count a switch to ``alias`` that failed."""
        if alias in self._engine.aliases:  # names of clients must not become series
            self._failures.labels(alias, ENGINE_NUMBER).inc()

    def collect(self) -> Iterable[Metric]:
        """The gauges, for Prometheus."""
        active = GaugeMetricFamily(MODEL_ACTIVE.name, MODEL_ACTIVE.help, labels=LABELS)
        for alias in self._engine.aliases:
            active.add_metric((alias, ENGINE_NUMBER), alias == self._engine.active)
        yield active
        waiting = GaugeMetricFamily(SWITCH_WAITING.name, SWITCH_WAITING.help, labels=LABELS)
        num_waiting = self.num_waiting()
        for alias in self._engine.aliases:
            waiting.add_metric((alias, ENGINE_NUMBER), num_waiting.get(alias, 0))
        yield waiting


@attrs.define
class RequestTimeline:
    """Observes the choices of one engine request, from its arrival (now) to its end.

    ``api_key``: the name of the key that it was sent with, if any.
    """

    metrics: ServingMetrics
    num_choices: int
    num_prompt_tokens: int
    api_key: str = ""
    max_tokens: int | None = None
    arrived_ns: int = attrs.field(init=False, factory=time.time_ns)
    """When the request came, in nanoseconds since the Unix epoch."""
    queue_s: float | None = attrs.field(init=False, default=None)
    first_token_s: float | None = attrs.field(init=False, default=None)
    last_token_s: float | None = attrs.field(init=False, default=None)
    """Seconds from the arrival until the request first ran, to its first token and to its last
    one; None while they are not known."""
    request_status: RequestStatus = attrs.field(init=False, default="normal")
    finish_reasons: dict[int, str] = attrs.field(init=False, factory=dict)
    """Why choices have ended, by their index."""
    _model: str = attrs.field(init=False)
    _series: ModelSeries = attrs.field(init=False)
    _arrived: float = attrs.field(init=False)
    _last_tokens: dict[int, float] = attrs.field(init=False, factory=dict)
    _num_tokens: dict[int, int] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._arrived = self.metrics.clock()
        self._series = self.metrics.series
        self._model = self.metrics.model_name

    @property
    def seconds(self) -> float:
        """Seconds since the arrival."""
        return self.metrics.clock() - self._arrived

    @property
    def num_generation_tokens(self) -> int:
        """Tokens of all choices until now."""
        return sum(self._num_tokens.values())

    def observe(self, delta: CompletionDelta) -> None:
        """Observe a delta that arrives now."""
        now = self.metrics.clock()
        previous = self._last_tokens.get(delta.index)
        has_tokens = bool(delta.token_ids)
        is_first = has_tokens and not self._last_tokens
        if is_first:
            self.first_token_s = now - self._arrived
        if is_first or delta.embedding is not None:
            self.queue_s, self.request_status = delta.queue_s, delta.request_status
        num_tokens = self._num_tokens.get(delta.index, 0) + len(delta.token_ids)
        self._series.observe(
            RequestEvent(
                seconds=now - self._arrived,
                token_seconds=now - previous if has_tokens and previous is not None else None,
                is_first=is_first,
                is_last=delta.finish_reason is not None,
                num_prompt_tokens=self.num_prompt_tokens,
                num_generation_tokens=num_tokens,
                num_choices=self.num_choices,
                max_tokens=self.max_tokens,
                request_status=delta.request_status,
                queue_seconds=self.queue_s,
                first_seconds=self.first_token_s,
                away_seconds=delta.away_s,
                num_preemptions=delta.num_preemptions,
            )
        )
        if has_tokens:
            self.last_token_s = now - self._arrived
            self._last_tokens[delta.index] = now
            self._num_tokens[delta.index] = num_tokens
        if delta.finish_reason is not None:
            self.finish_reasons[delta.index] = delta.finish_reason
            self._series.count_finished(delta.finish_reason)

    def end(self, reason: str) -> None:
        """Count the choices that have not finished under ``reason`` (``abort`` or ``error``)."""
        self.metrics.count_tokens(
            self._model, self.api_key, self.num_prompt_tokens, self.num_generation_tokens
        )
        unfinished = [i for i in range(self.num_choices) if i not in self.finish_reasons]
        self._series.count_finished(reason, len(unfinished))
        self.finish_reasons.update(dict.fromkeys(unfinished, reason))


class _EngineCollector(Collector):
    """Reads `ENGINE_METRICS` when Prometheus asks for them.

    Gauges are those of the active model. Counters have a series of each model: one that went away
    with its model would lose what it has counted since Prometheus last asked.
    """

    def __init__(self, engine: ServingEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        totals = totals_by_model(self._engine)
        for _, rows in itertools.groupby(ENGINE_METRICS, lambda row: row.name):
            yield from self._family(list(rows), totals)
        for histogram in ENGINE_HISTOGRAMS:
            yield _histogram(histogram, totals)

    def _family(
        self, rows: Sequence[EngineMetric], totals: Mapping[str, EngineStats]
    ) -> Iterable[Metric]:
        """The metric of rows with one name; none without a value."""
        stats, first = self._engine.stats, rows[0]
        found = [(row, value) for row in rows if (value := row.read(stats)) is not None]
        if not found:
            return
        names = (DEVICE_LABELS if first.is_of_device else LABELS) + tuple(first.labels(stats))
        family = _FAMILIES[first.kind](first.name, first.help, labels=names)
        for row, value in found:
            own = (ENGINE_NUMBER, *map(str, row.labels(stats).values()))
            if row.is_of_device:
                family.add_metric(own, value)
            elif row.kind == "counter":
                for model, of_model in totals.items():
                    family.add_metric((model, *own), row.read(of_model) or 0)
            else:
                family.add_metric((self._engine.model_name, *own), value)
        yield family


def _histogram(row: EngineHistogram, totals: Mapping[str, EngineStats]) -> HistogramMetricFamily:
    """A histogram of the engine, with a series of each model."""
    family = HistogramMetricFamily(row.name, row.help, labels=LABELS)
    bounds = [*map(floatToGoString, row.bounds), "+Inf"]
    for model, stats in totals.items():
        counts, total = row.read(stats)
        reached = list(zip(bounds, itertools.accumulate(counts), strict=True))
        family.add_metric((model, ENGINE_NUMBER), reached, total)
    return family


_FAMILIES: dict[str, type[GaugeMetricFamily] | type[CounterMetricFamily]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
}


def _one_two_five(highest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50, … up to ``highest``: vLLM's buckets for numbers of tokens."""
    bounds = (float(m * 10**e) for e in range(len(str(highest))) for m in (1, 2, 5))
    return [bound for bound in bounds if bound <= highest]
