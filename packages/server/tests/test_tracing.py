"""OpenTelemetry traces, as a collector receives them."""

from __future__ import annotations

import asyncio
import importlib.util
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from stand_in_engine import StandInEngine

from trencadis.engine import ConfigError
from trencadis.server import ServerSettings, create_app
from trencadis.server.metrics.tracing import check_tracing


def has_opentelemetry() -> bool:
    try:
        return importlib.util.find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False


needs_opentelemetry = pytest.mark.skipif(
    not has_opentelemetry(), reason="the extra otel is not installed"
)

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


Call = tuple[str, dict[str, Any], dict[str, str]]
"""Path, body and headers of a POST."""


class Collector:
    """An OTLP/HTTP collector on a free port, and the spans that it received."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        self.spans: list[Any] = []
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for batch in ExportTraceServiceRequest.FromString(body).resource_spans:
                    names = attributes_of(batch.resource)
                    collector.services.add(names["service.name"])
                    for scope in batch.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join(60)
        self._server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setattr("trencadis.server.metrics.tracing.FLUSH_SECONDS", 60.0)  # a slow machine
    collector = Collector()
    yield collector
    collector.close()


def attributes_of(item: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    found: dict[str, Any] = {}
    for pair in item.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


async def serve(endpoint: str, engine: StandInEngine, *calls: Call) -> list[httpx.Response]:
    """Responses to the calls, one after the other, of a server that then ends."""
    app = create_app(engine, ServerSettings(otlp_traces_endpoint=endpoint))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://server") as client,
    ):
        return [await client.post(path, json=body, headers=sent) for path, body, sent in calls]


@needs_opentelemetry
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_request_is_a_span_of_its_clients_trace(collector: Collector, stream: bool) -> None:
    engine = StandInEngine()
    engine.delay, engine.queue_s = 0.01, 0.001
    body = {"prompt": "abc secret", "max_tokens": 5, "temperature": 0.5, "stream": stream}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    (response,) = asyncio.run(serve(collector.endpoint, engine, ("/v1/completions", body, headers)))
    assert response.status_code == 200
    (span,) = collector.spans
    assert collector.services == {"engine-serve"}
    assert (span.name, span.kind) == ("llm_request", span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    found = attributes_of(span)
    assert found.pop("gen_ai.request.id").startswith(response.headers["x-request-id"])
    times = {name: found.pop(name) for name in tuple(found) if ".latency." in name}
    assert found == {
        "gen_ai.response.model": "stand-in",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.prompt_tokens": 11,
        "gen_ai.usage.completion_tokens": 5,
        "gen_ai.response.finish_reasons": ["length"],
        "trencadis.request_status": "normal",
    }
    of = {name.rpartition(".")[2]: value for name, value in times.items()}
    assert of["time_in_queue"] == 0.001
    assert of["time_to_first_token"] == pytest.approx(
        of["time_in_queue"] + of["time_in_model_prefill"]
    )
    assert of["time_in_model_inference"] == pytest.approx(
        of["time_in_model_prefill"] + of["time_in_model_decode"]
    )
    assert of["time_in_queue"] + of["time_in_model_inference"] <= of["e2e"]
    assert of["time_in_model_decode"] >= 4 * 0.01
    duration_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert duration_s == pytest.approx(of["e2e"], abs=1e-5)
    assert "secret" not in str(span)


@needs_opentelemetry
def test_each_prompt_has_a_span_and_without_a_parent_a_trace_of_its_own(
    collector: Collector,
) -> None:
    body = {"prompt": ["abc", "defg"], "n": 2}
    headers = {"traceparent": "not a trace"}
    asyncio.run(serve(collector.endpoint, StandInEngine(), ("/v1/completions", body, headers)))
    assert len({span.trace_id for span in collector.spans}) == 2
    assert {span.parent_span_id for span in collector.spans} == {b""}
    found = [attributes_of(span) for span in collector.spans]
    assert sorted(each["gen_ai.usage.completion_tokens"] for each in found) == [6, 8]
    assert {tuple(each["gen_ai.response.finish_reasons"]) for each in found} == {("stop", "stop")}
    # The stand-in does not tell how long a request waited: a time that is not known is left out.
    assert not any("gen_ai.latency.time_in_queue" in each for each in found)


@needs_opentelemetry
def test_requests_that_fail_are_spans_that_say_why(collector: Collector) -> None:
    engine = StandInEngine()
    engine.dies_after = 2
    call = ("/v1/completions", {"prompt": "abcdef"}, {})
    asyncio.run(serve(collector.endpoint, engine, call))
    engine = StandInEngine()
    engine.overloaded = True
    asyncio.run(serve(collector.endpoint, engine, call))
    died, refused = collector.spans
    assert (died.status.code, died.status.message[:14]) == (2, "the core ended")
    assert attributes_of(died)["error.type"] == "EngineDead"
    assert attributes_of(died)["gen_ai.usage.completion_tokens"] == 2
    assert attributes_of(died)["gen_ai.response.finish_reasons"] == ["error"]
    assert attributes_of(refused)["error.type"] == "EngineOverloaded"
    assert "gen_ai.response.finish_reasons" not in attributes_of(refused)


@needs_opentelemetry
@pytest.mark.asyncio
async def test_the_span_of_a_client_that_leaves_says_so(
    collector: Collector, engine: StandInEngine, serving: Any
) -> None:
    engine.delay = 0.02
    body = {"prompt": "a" * 200, "stream": True}
    async with (
        serving(otlp_traces_endpoint=collector.endpoint) as url,
        httpx.AsyncClient(base_url=url) as client,
        client.stream("POST", "/v1/completions", json=body) as response,
    ):
        await anext(response.aiter_lines())
    (span,) = collector.spans
    assert attributes_of(span)["gen_ai.response.finish_reasons"] == ["abort"]
    assert attributes_of(span)["gen_ai.usage.completion_tokens"] < 200


@needs_opentelemetry
def test_a_collector_that_is_gone_keeps_no_request_and_no_end_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "16")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    with socket.socket() as silent:  # accepts connections, and answers nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        calls = [("/v1/completions", {"prompt": "abc"}, {})] * 50
        work = serve(endpoint, StandInEngine(), *calls)
        # The exporter alone would wait 10 s for each of the four batches in the queue.
        responses = asyncio.run(asyncio.wait_for(work, 30))
    assert {response.status_code for response in responses} == {200}


@needs_opentelemetry
def test_the_standard_variables_name_service_and_sampler(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "llm-7")
    call = ("/v1/completions", {"prompt": "abc"}, {})
    asyncio.run(serve(collector.endpoint, StandInEngine(), call))
    assert collector.services == {"llm-7"}
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    asyncio.run(serve(collector.endpoint, StandInEngine(), call))
    assert len(collector.spans) == 1


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector:4317", "http://", ""])
def test_an_endpoint_that_is_no_url_is_refused_before_a_model_is_loaded(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL: give --otlp-traces-endpoint one like"):
        check_tracing(endpoint)


def test_another_protocol_is_refused_with_the_port_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc': unset it"):
        check_tracing("http://collector:4317")


@pytest.mark.skipif(has_opentelemetry(), reason="the extra otel is installed")
def test_without_the_extra_the_error_says_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'trencadis-server\[otel\]'"):
        check_tracing("http://collector:4318/v1/traces")
