"""Health, version, metrics, and the list of models."""

from __future__ import annotations

import re
from typing import get_args

import attrs
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from trencadis.engine import (
    CompletionDelta,
    EngineStats,
    GenerateRequest,
    RequestStatus,
    SamplingParams,
    ThermalStats,
)
from trencadis.engine.api.outputs import plus_totals
from trencadis.server import ServerSettings, __version__, create_app
from trencadis.server.metrics import serving_metrics
from trencadis.server.metrics.metric_tables import (
    ENGINE_HISTOGRAMS,
    ENGINE_METRICS,
    EngineMetric,
    RequestEvent,
)
from trencadis.server.metrics.serving_metrics import ModelSeries, RequestTimeline, ServingMetrics

pytestmark = pytest.mark.asyncio

LABELS = ("le", "finished_reason", "request_status")


async def samples(client):
    text = (await client.get("/metrics")).text
    return {
        (sample.name, next(filter(None, map(sample.labels.get, LABELS)), None)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_health_follows_the_engine(client, engine):
    assert (await client.get("/health")).status_code == 200
    engine.is_alive = False
    response = await client.get("/health")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "engine_dead"


async def test_an_engine_that_does_not_answer_is_unhealthy(engine):
    engine.hangs = True
    app = create_app(engine, ServerSettings(health_timeout=0.05))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        response = await client.get("/health")
    assert response.status_code == 503
    assert "0.05 seconds" in response.json()["error"]["message"]


async def test_health_says_what_keeps_the_engine_silent(client, engine):
    assert (await client.get("/health")).text == ""
    engine.activity = "the engine core compiles: no message for 40 s"
    response = await client.get("/health")
    assert response.status_code == 200
    assert response.text == engine.activity
    assert response.headers["content-type"].startswith("text/plain")


async def test_version(client):
    assert (await client.get("/version")).json() == {"version": __version__}


async def test_models(client, engine):
    engine.model_name = "org/model"
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == "org/model"
    assert model["object"] == "model"
    assert model["owned_by"] == "trencadis"
    assert model["max_model_len"] == 256
    for path in ("/v1/models/org/model", "/v1/models/org%2Fmodel"):
        assert (await client.get(path)).json() == model
    missing = await client.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


ENGINE_VALUES = {
    "vllm:num_requests_running": 0,
    "vllm:num_requests_waiting": 2,
    "vllm:num_requests_swapped": 6,
    "trencadis:num_requests_preempted": 9,
    "trencadis:running_seqs": 8,
    "trencadis:max_running_seqs": 32,
    "trencadis:prefill_token_limit": 512,
    "trencadis:headroom": 7 / 32,
    "vllm:kv_cache_usage_perc": 0.25,
    "vllm:gpu_cache_usage_perc": 0.25,
    "trencadis:kv_blocks_used": 5,
    "trencadis:kv_blocks_capacity": 20,
    "trencadis:highest_block_in_use": 7,
    "trencadis:swap_queue_blocks": 23,
    "trencadis:buckets": 31,
    "trencadis:ready_buckets": 30,
    "trencadis:warming_up": 1,
    "trencadis:graphs": 25,
    "vllm:cache_config_info": 1,
    "vllm:lora_requests_info": 1,
    "vllm:prefix_cache_queries_total": 10,
    "vllm:prefix_cache_hits_total": 8,
    "trencadis:defragmented_blocks_total": 14,
    "vllm:num_preemptions_total": 3,
    "trencadis:swaps_total": 1,
    "trencadis:recomputes_total": 2,
    "trencadis:engine_steps_total": 41,
    "trencadis:swap_out_bytes_total": 4096,
    "trencadis:swap_in_bytes_total": 2048,
    "trencadis:swap_seconds_total": 0.5,
    "vllm:prompt_tokens_total": 11,
    "trencadis:prefill_tokens_total": 12,
    "vllm:generation_tokens_total": 13,
    "trencadis:padded_tokens_total": 17,
    "trencadis:bucket_misses_total": 19,
    "trencadis:cold_forwards_total": 21,
    "trencadis:compilations_total": 22,
    "trencadis:core_restarts_total": 4,
    "trencadis:tier_bytes": 61,
    "trencadis:tier_stored_blocks_total": 62,
    "trencadis:tier_stored_bytes_total": 63,
    "trencadis:tier_loaded_blocks_total": 64,
    "trencadis:tier_loaded_bytes_total": 65,
    "trencadis:tier_errors_total": 66,
    "trencadis:core_silence_seconds": 0.75,
    "trencadis:core_silence_limit_seconds": 60,
}


async def test_engine_metrics_are_read_from_the_latest_statistics(client):
    text = (await client.get("/metrics")).text
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if family.type in ("gauge", "counter")
        and family.name.startswith(("vllm:", "trencadis:"))
        and not sample.name.endswith("_created")
        and "finished_reason" not in sample.labels
        and "reason" not in sample.labels
    }
    assert found == ENGINE_VALUES


async def test_a_tier_is_a_label_and_one_that_is_not_there_has_no_series(client):
    text = (await client.get("/metrics")).text
    assert re.findall(r"^trencadis:tier_bytes{(.*)} (.*)$", text, re.MULTILINE) == [
        ('engine="0",tier="disk"', "61.0")
    ]


async def test_endpoint_pickers_read_the_size_of_the_cache_as_from_vllm(client):
    text = (await client.get("/metrics")).text
    (line,) = re.findall(r"^vllm:cache_config_info{(.*)} 1.0$", text, re.MULTILINE)
    assert {'block_size="16"', 'num_gpu_blocks="20"'} <= set(line.split(","))
    tokens = {'kv_cache_size_tokens="320"', 'kv_cache_max_concurrency="1.25"'}
    assert tokens <= set(line.split(","))


async def test_waiting_requests_are_counted_by_reason(client):
    text = (await client.get("/metrics")).text
    (waiting,) = (
        family
        for family in text_string_to_metric_families(text)
        if family.name == "vllm:num_requests_waiting_by_reason"
    )
    counts = {sample.labels["reason"]: sample.value for sample in waiting.samples}
    assert counts == {"capacity": 1, "deferred": 1}


async def test_steps_are_counted_by_their_tokens(client):
    """3 of one token, 2 of up to eight, and one above the last bound; 11 - 8 + 13 in all."""
    text = (await client.get("/metrics")).text
    (steps,) = (
        family
        for family in text_string_to_metric_families(text)
        if family.name == "vllm:iteration_tokens_total"
    )
    assert steps.type == "histogram"
    found = {
        (one.name.rpartition("_")[2], one.labels.get("le")): one.value for one in steps.samples
    }
    assert (found["count", None], found["sum", None]) == (6, 16)
    assert [found["bucket", bound] for bound in ("1.0", "8.0", "16384.0", "+Inf")] == [3, 5, 5, 6]


async def test_every_statistic_has_a_metric(engine):
    """A field of EngineStats that no metric reads is dead, or its metric was forgotten."""

    class Recorder:
        def __init__(self, target):
            self.target = target

        def __getattr__(self, name):
            read.add(name)
            return getattr(self.target, name)

    read = set()
    stats = attrs.evolve(engine.stats, thermal=ThermalStats())
    for histogram in ENGINE_HISTOGRAMS:
        histogram.read(Recorder(stats))
    for metric in ENGINE_METRICS:
        metric.read(Recorder(stats))
        metric.labels(Recorder(stats))
    read |= {"num_used_blocks", "num_total_blocks"} if "cache_usage" in read else set()
    read |= {"max_num_seqs", "max_num_batched_tokens"} if "headroom" in read else set()
    assert read - {"cache_usage", "headroom"} == set(attrs.fields_dict(EngineStats))


async def test_a_series_without_a_value_leaves_out_itself_alone(client, monkeypatch):
    rows = [
        EngineMetric("gauge", "test:seconds", "About.", read, labels)
        for read, labels in (
            (lambda s: None, lambda s: {"finished_reason": "none"}),
            (lambda s: 7, lambda s: {"finished_reason": "seven"}),
        )
    ]
    monkeypatch.setattr(serving_metrics, "ENGINE_METRICS", rows)
    found = await samples(client)
    assert {key: found[key] for key in found if key[0] == "test:seconds"} == {
        ("test:seconds", "seven"): 7
    }


async def test_every_counter_is_a_total_and_every_total_a_counter(client, engine):
    """Totals alone outlive a switch and a core: a counter of another field would fall to 0.

    The statistics are doubled as those of a core are added to those of the core before it.
    """
    engine.thermal = ThermalStats(
        hottest_c=81.5, power_w=640.0, num_policy_faults=3, num_rejected_readings=5
    )
    stats = engine.stats
    doubled = attrs.evolve(
        plus_totals(stats, stats),
        thermal=plus_totals(stats.thermal, stats.thermal),
        disk_tier=plus_totals(stats.disk_tier, stats.disk_tier),
    )
    counters = {metric for metric in ENGINE_METRICS if metric.kind == "counter"}
    doubles = {metric for metric in ENGINE_METRICS if metric.read(doubled) != metric.read(stats)}
    # It counts the cores themselves, so the front counts it.
    (restarts,) = (m for m in ENGINE_METRICS if m.name == "trencadis:core_restarts")
    assert {m.name for m in counters} == {m.name for m in doubles | {restarts}}

    families = text_string_to_metric_families((await client.get("/metrics")).text)
    exported = {family.name for family in families if family.type == "counter"}
    assert {metric.name for metric in counters} <= exported

    documented = set(re.findall(r"``(\w+)``", EngineStats.__doc__.split("Totals of")[1]))
    changed = {name for name in documented if getattr(doubled, name) != getattr(stats, name)}
    assert changed == documented - {"num_core_restarts"}
    undocumented = set(attrs.fields_dict(EngineStats)) - documented - {"thermal", "disk_tier"}
    assert not {name for name in undocumented if getattr(doubled, name) != getattr(stats, name)}


async def test_temperatures_are_metrics_if_they_are_measured(client, engine):
    assert not [name for name, _ in await samples(client) if "temperature" in name]
    engine.thermal = ThermalStats()
    assert ("trencadis:temperature_celsius", None) not in await samples(client)
    engine.thermal = ThermalStats(
        hottest_c=81.5,
        power_w=640.0,
        sensor="stale",
        policy="proportional",
        policy_active=True,
        num_policy_faults=3,
        num_rejected_readings=5,
    )
    after = await samples(client)
    assert after["trencadis:temperature_celsius", None] == 81.5
    assert after["trencadis:power_watts", None] == 640.0
    assert after["trencadis:sensor_health", None] == 1
    assert after["trencadis:thermal_policy_active", None] == 1
    assert after["trencadis:thermal_policy_faults_total", None] == 3
    assert after["trencadis:thermal_readings_rejected_total", None] == 5


async def test_requests_are_counted_by_how_they_ended(client, engine):
    before = await samples(client)
    assert before["vllm:request_success_total", "stop"] == 0
    await client.post("/v1/completions", json={"prompt": "abc"})
    await client.post("/v1/completions", json={"prompt": ["abc", "abcd"], "max_tokens": 2, "n": 2})
    engine.dies_after = 1
    await client.post("/v1/completions", json={"prompt": "abc"})
    await client.post("/v1/completions", json={"prompt": "abc", "top_p": 9})
    after = await samples(client)
    counts = {
        reason: after["vllm:request_success_total", reason]
        for reason in ("stop", "length", "abort", "error")
    }
    # the last one found the engine dead: its prompt was fine, its top_p was not asked for
    assert counts == {"stop": 1, "length": 4, "abort": 0, "error": 1}
    assert after["vllm:e2e_request_latency_seconds_count", None] == 5
    counts = [after["vllm:time_to_first_token_seconds_count", s] for s in get_args(RequestStatus)]
    assert counts == [4, 0, 0]
    assert after["vllm:inter_token_latency_seconds_count", None] == 2 + 4
    assert after["vllm:request_generation_tokens_sum", None] == 3 + 4 * 2
    assert after["vllm:request_params_n_sum", None] == 1 + 2 + 2 + 1, "of each prompt"
    assert after["vllm:request_params_max_tokens_sum", None] == 16 + 2 + 2 + 16


async def test_the_time_to_first_token_of_swapped_requests_is_known(client, engine):
    await client.post("/v1/completions", json={"prompt": "abc"})
    engine.request_status, engine.away_s, engine.num_preemptions = "swapped", 2.5, 3
    await client.post("/v1/completions", json={"prompt": "abc"})
    after = await samples(client)
    for status in ("swapped", "normal"):
        assert after["vllm:time_to_first_token_seconds_count", status] == 1
    away = "trencadis:request_preempted_time_seconds"
    assert (after[f"{away}_count", "swapped"], after[f"{away}_sum", "swapped"]) == (1, 2.5)
    assert after[f"{away}_count", "normal"] == 0
    times = "vllm:request_num_preemptions"
    assert (after[f"{times}_count", None], after[f"{times}_sum", None]) == (2, 3)


async def test_rejected_requests_are_not_counted_as_finished(client, engine):
    engine.overloaded = True
    response = await client.post("/v1/completions", json={"prompt": "abc"})
    assert response.status_code == 503
    after = await samples(client)
    assert all(after["vllm:request_success_total", r] == 0 for r in ("stop", "abort", "error"))
    assert 'reason="max_num_queued_reqs"} 1.0' in (await client.get("/metrics")).text


async def test_an_event_has_every_value_of_its_request(engine, monkeypatch):
    """`RequestTimeline.observe` fills `RequestEvent`, in ``metrics/serving_metrics.py``."""
    numbers = {
        field.name: 3 + place
        for place, field in enumerate(attrs.fields(CompletionDelta))
        if field.default in (0, None) and field.type in ("int", "float", "float | None")
    }
    assert numbers.keys() >= {"queue_s", "away_s", "num_preemptions"}
    now, events = 100.0, []
    metrics = ServingMetrics(engine, clock=lambda: now)
    monkeypatch.setattr(ModelSeries, "observe", lambda _, event: events.append(event))
    timeline = RequestTimeline(metrics, num_choices=2, num_prompt_tokens=4, max_tokens=9)
    for reason in (None, "stop"):
        now += 2.0
        delta = CompletionDelta("a", 0, "b", (66,), finish_reason=reason, **numbers)
        timeline.observe(attrs.evolve(delta, request_status="swapped"))
    for field in attrs.fields(RequestEvent):
        values = [getattr(event, field.name) for event in events]
        assert set(values) - {None, False, field.default}, f"serving_metrics.py: {field.name}"


async def test_latencies_are_measured_by_the_clock(engine):
    now = 100.0
    metrics = ServingMetrics(engine, clock=lambda: now)
    timeline = RequestTimeline(metrics, num_choices=1, num_prompt_tokens=4)
    stream = engine.generate(GenerateRequest([1, 65, 66], SamplingParams(max_tokens=2)))
    async for delta in stream:
        now += 2.0
        timeline.observe(delta)
    value = metrics.registry.get_sample_value
    labels = {"model_name": "stand-in", "engine": "0"}
    normal = {**labels, "request_status": "normal"}
    assert value("vllm:time_to_first_token_seconds_sum", normal) == 2.0
    assert value("vllm:inter_token_latency_seconds_sum", labels) == 2.0
    assert value("vllm:e2e_request_latency_seconds_sum", labels) == 4.0


OF_THE_DEVICE = {
    "trencadis:headroom",
    "trencadis:temperature_celsius",
    "trencadis:thermal_target_celsius",
    "trencadis:power_watts",
    "trencadis:sensor_health",
    "trencadis:thermal_policy_active",
    "trencadis:thermal_policy_faults",
    "trencadis:thermal_readings_rejected",
    "trencadis:tier_bytes",
    "trencadis:tier_stored_blocks",
    "trencadis:tier_stored_bytes",
    "trencadis:tier_loaded_blocks",
    "trencadis:tier_loaded_bytes",
    "trencadis:tier_errors",
    "trencadis:core_silence_seconds",
    "trencadis:core_silence_limit_seconds",
    "trencadis:core_restarts",
}
"""Metrics without the label ``model_name``: an alert about them must not begin again when the model
is switched."""


async def test_every_series_names_the_model_as_vllm_does_unless_it_is_of_the_device(client, engine):
    engine.thermal = ThermalStats(hottest_c=70.0, power_w=400.0, target_temp_c=80.0)
    text = (await client.get("/metrics")).text
    own = [
        family
        for family in text_string_to_metric_families(text)
        if family.name.startswith(("vllm:", "trencadis:"))
    ]
    assert {family.name for family in own} >= OF_THE_DEVICE
    for family in own:
        assert family.samples, family.name
        expected = None if family.name in OF_THE_DEVICE else "stand-in"
        for sample in family.samples:
            assert sample.labels.get("model_name") == expected, family.name
            assert sample.labels["engine"] == "0"


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        "text/plain;version=0.0.4",
        # Prometheus 2.x and 3.x by default.
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;"
        "q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.1",
    ],
)
async def test_names_are_the_same_whatever_the_client_accepts(client, accept):
    response = await client.get("/metrics", headers={"Accept": accept})
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    typed = set(re.findall(r"^# TYPE (\S+)", response.text, re.MULTILINE))
    samples = set(re.findall(r"^([a-z_:]+)[{ ]", response.text, re.MULTILINE))
    assert "vllm:num_requests_running" in typed & samples
    assert not any(name.startswith("vllm_") for name in samples)


async def test_two_apps_in_one_process_do_not_share_metrics(client, engine):
    transport = httpx.ASGITransport(create_app(engine))
    async with httpx.AsyncClient(transport=transport, base_url="http://other") as other:
        await other.post("/v1/completions", json={"prompt": "abc"})
        counted = "vllm:request_success_total", "stop"
        assert (await samples(other))[counted] == 1
        assert (await samples(client))[counted] == 0


async def test_the_api_describes_itself(client):
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert "/v1/chat/completions" in paths
    assert "/v1/completions" in paths


@pytest.mark.parametrize("path", ["/health", "/ready", "/live"])
async def test_probes_may_ask_without_a_body(client, engine, path):
    response = await client.head(path)
    assert (response.status_code, response.content) == (200, b"")
    engine.is_alive = False
    assert (await client.head(path)).status_code == 503


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_the_health_for_hosts_that_ask_so(client, engine, method):
    assert (await client.request(method, "/ping")).status_code == 200
    engine.is_alive = False
    assert (await client.request(method, "/ping")).status_code == 503
