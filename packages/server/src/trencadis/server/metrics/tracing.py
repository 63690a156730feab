"""OpenTelemetry traces: one span for each engine request, sent to a collector over OTLP/HTTP.

Needs the extra ``otel``. The names of span and attributes are vLLM's (``vllm/tracing.py``), so that
dashboards for vLLM's traces work. No span has text of a prompt or an answer.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import threading
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import attrs

from trencadis.engine import ConfigError, RequestStatus, SamplingParams

SPAN = "llm_request"
SERVICE = "engine-serve"
"""The name of the service, unless ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES`` has one."""

TRACE_HEADERS = ("traceparent", "tracestate")
"""The headers of W3C Trace Context."""

PROTOCOL = "http/protobuf"
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

FLUSH_SECONDS = 2.0
"""Longest wait at the end of a server for a collector that does not answer."""


@attrs.frozen
class RequestTrace:
    """An engine request that has ended. Times are seconds since its arrival, ``arrived_ns``.

    ``arrived_ns`` counts nanoseconds since the Unix epoch. ``queue_s``, ``first_token_s``,
    ``last_token_s``: until it first ran, to its first and to its last token; None if that did not
    happen. ``trace_headers``: those of the client. ``error``: why it failed.
    """

    request_id: str
    model_name: str
    params: SamplingParams
    arrived_ns: int
    seconds: float
    queue_s: float | None
    first_token_s: float | None
    last_token_s: float | None
    num_prompt_tokens: int
    num_generation_tokens: int
    request_status: RequestStatus
    finish_reasons: tuple[str, ...]
    trace_headers: Mapping[str, str]
    error: Exception | None

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of its span; what is not known is left out."""
        queue_s, first_s, last_s = self.queue_s, self.first_token_s, self.last_token_s
        found = {
            "gen_ai.request.id": self.request_id,
            "gen_ai.response.model": self.model_name,
            "gen_ai.request.n": self.params.n,
            "gen_ai.request.max_tokens": self.params.max_tokens,
            "gen_ai.request.temperature": self.params.temperature,
            "gen_ai.request.top_p": self.params.top_p,
            "gen_ai.usage.prompt_tokens": self.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": self.num_generation_tokens,
            "gen_ai.response.finish_reasons": self.finish_reasons or None,
            "gen_ai.latency.e2e": self.seconds,
            "gen_ai.latency.time_to_first_token": first_s,
            "gen_ai.latency.time_in_queue": queue_s,
            "gen_ai.latency.time_in_model_prefill": _between(queue_s, first_s),
            "gen_ai.latency.time_in_model_decode": _between(first_s, last_s),
            "gen_ai.latency.time_in_model_inference": _between(queue_s, last_s),
            "trencadis.request_status": self.request_status,
        }
        return {name: value for name, value in found.items() if value is not None}


class RequestTracer:
    """Exports the traces of requests from a thread, in batches, out of a bounded queue.

    A span costs the request no wait. While the collector does not answer, the oldest spans of a
    full queue are dropped. Queue, sampler, headers, timeout and certificates are those of the
    standard variables (``OTEL_BSP_*``, ``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_*``).

    Raises the errors of `check_tracing`.
    """

    def __init__(self, endpoint: str) -> None:
        check_tracing(endpoint)
        # imported here, because they are needed only where traces are exported
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
            TraceContextTextMapPropagator,
        )

        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
        self._exporter: SpanExporter = OTLPSpanExporter(endpoint=endpoint)
        # Not at exit: that would wait for a collector that does not answer.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("trencadis.server")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, trace: RequestTrace) -> None:
        """Queue the span of a request that has ended, as a child of the client's span."""
        from opentelemetry.trace import SpanKind, Status, StatusCode  # noqa: PLC0415

        span = self._tracer.start_span(
            SPAN,
            context=self._propagator.extract(dict(trace.trace_headers)),
            kind=SpanKind.SERVER,
            attributes=trace.attributes,
            start_time=trace.arrived_ns,
        )
        if trace.error is not None:
            span.set_attribute("error.type", type(trace.error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(trace.error)))
        span.end(trace.arrived_ns + int(trace.seconds * 1e9))

    async def close(self) -> None:
        """Send what is queued, for at most some seconds, and end the thread."""
        ending = threading.Thread(target=self._provider.shutdown, name="traces-end", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, FLUSH_SECONDS)
        if ending.is_alive():
            self._exporter.shutdown()  # ends the wait before the next attempt


def check_tracing(endpoint: str) -> None:
    """Raise `ConfigError` where traces cannot be sent to this endpoint."""
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(
            f"otlp_traces_endpoint {endpoint!r} is not a URL: give --otlp-traces-endpoint one like "
            "http://collector:4318/v1/traces",
            "otlp_traces_endpoint",
        )
    for variable in _PROTOCOL_VARIABLES:
        protocol = os.environ.get(variable, "").strip()
        if protocol and protocol != PROTOCOL:
            raise ConfigError(
                f"traces are sent with {PROTOCOL} alone, and {variable} is {protocol!r}: unset it, "
                "and give the collector's port for HTTP, which is usually 4318",
                "otlp_traces_endpoint",
            )
        if protocol:
            break
    if not _has_exporter():
        raise ConfigError(
            "otlp_traces_endpoint needs OpenTelemetry: pip install 'trencadis-server[otel]', or "
            "leave out --otlp-traces-endpoint and OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
            "otlp_traces_endpoint",
        )


def _has_exporter() -> bool:
    try:
        found = importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ModuleNotFoundError:
        return False
    return found is not None


def _between(begin_s: float | None, end_s: float | None) -> float | None:
    if begin_s is None or end_s is None:
        return None
    return max(0.0, end_s - begin_s)
