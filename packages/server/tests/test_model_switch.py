"""Several models behind one server: which is served, and who may switch between them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from types import SimpleNamespace

import httpx
import openai
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from stand_in_engine import ByteTokenizer
from switching_engine import SwitchingStandIn

from trencadis.engine import (
    ConfigError,
    EngineRestarting,
    EngineSleeping,
    EngineStats,
    EngineUnresponsive,
    SwitchFailedError,
    SwitchInProgressError,
    ThermalStats,
)
from trencadis.server import ServerSettings, create_app
from trencadis.server.cli import flag_parser, multi_model_config, server_settings
from trencadis.server.generation.served_model import ServedModels
from trencadis.server.switching.switch_control import SwitchControl
from trencadis.server.switching.switch_queue import Failure

pytestmark = pytest.mark.asyncio

SWITCH = "/v1/models/switch"
BOSS = {"Authorization": "Bearer boss"}


@pytest.fixture
def engine():
    return SwitchingStandIn()


def client_of(engine, **settings):
    app = create_app(engine, ServerSettings(**{"server_dev_mode": True, **settings}))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


@pytest_asyncio.fixture
async def client(engine):
    async with client_of(engine) as client:
        yield client


@pytest_asyncio.fixture
async def automatic(engine):
    async with client_of(engine, auto_switch=True, min_model_stay=0.05) as client:
        yield client


async def test_what_follows_from_a_model_is_derived_once_until_there_is_another(engine):
    served = ServedModels(engine, ServerSettings())
    first = served.current
    assert served.current is first
    engine.tokenizers[engine.active] = ByteTokenizer()
    assert served.current is not first


def complete(client, model, prompt="abc", **fields):
    return client.post("/v1/completions", json={"model": model, "prompt": prompt, **fields})


async def until_waiting(client, count):
    """Wait until so many requests wait for a switch."""
    name = "trencadis:num_requests_waiting_for_switch"
    for _ in range(6000):
        text = (await client.get("/metrics")).text
        found = re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)
        if sum(map(float, found)) == count:
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"{count} requests never waited")


async def test_all_models_are_listed_and_one_is_active(client):
    listed = (await client.get("/v1/models")).json()["data"]
    assert [(model["id"], model["active"]) for model in listed] == [
        ("a", True),
        ("b", False),
        ("c", False),
    ]
    assert ["max_model_len" in model for model in listed] == [True, False, False]
    await client.post(SWITCH, json={"model": "b"})
    listed = (await client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in listed if model["active"]] == ["b"]
    assert (await client.get("/v1/models/b")).json()["active"]
    assert not (await client.get("/v1/models/a")).json()["active"]
    assert (await client.get("/v1/models/x")).status_code == 404


async def test_a_request_for_an_inactive_model_is_told_which_is_active(client):
    response = await complete(client, "b")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'b' is not active: this server serves 'a' now" in error["message"]
    assert "POST /v1/models/switch" in error["message"]
    unknown = (await complete(client, "x")).json()["error"]["message"]
    assert "does not exist: this server has 'a', 'b', 'c'" in unknown


async def test_the_official_client_understands_it(engine):
    app = create_app(engine)
    transport = httpx.ASGITransport(app)
    official = openai.AsyncOpenAI(
        base_url="http://server/v1",
        api_key="none",
        http_client=httpx.AsyncClient(transport=transport),
    )
    with pytest.raises(openai.NotFoundError, match="is not active"):
        await official.completions.create(model="b", prompt="abc")


async def test_a_switch_is_reported_and_the_new_model_served(client, engine):
    body = {"model": "b", "running": "abort", "drain_timeout_s": 3}
    report = (await client.post(SWITCH, json=body)).json()
    assert (report["previous"], report["active"], report["total_s"]) == ("a", "b", 1.5)
    assert engine.switches == [("b", "abort", 3.0)]
    answer = (await complete(client, "b")).json()
    assert answer["model"] == "b"
    assert (await complete(client, "a")).status_code == 404
    assert (await complete(client, None)).json()["model"] == "b"


async def test_the_call_of_the_plugin_switches(client, engine):
    response = await client.post(SWITCH, json={"model": "b", "drain_timeout": 60})
    assert response.status_code == 200
    assert engine.switches == [("b", "wait", 60.0)]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "model"),
        ({"model": 5}, "model"),
        ({"model": "b", "running": "kill"}, "running"),
        ({"model": "b", "drain_timeout_s": -1}, "drain_timeout_s"),
        ({"model": "b", "modl": "c"}, "modl"),
    ],
)
async def test_a_bad_order_names_its_field(client, engine, body, param):
    response = await client.post(SWITCH, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not engine.switches


async def test_a_model_that_does_not_exist_is_404(client):
    response = await client.post(SWITCH, json={"model": "x"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("path", [SWITCH, "/sleep", "/wake_up"])
async def test_without_development_mode_the_routes_do_not_exist(engine, path):
    async with client_of(engine, server_dev_mode=False) as client:
        assert (await client.post(path, json={"model": "b"})).status_code == 404
        assert (await client.get("/is_sleeping")).status_code == 404
        paths = (await client.get("/openapi.json")).json()["paths"]
    assert path not in paths
    assert not engine.switches


@pytest.mark.parametrize("path", [SWITCH, "/sleep", "/wake_up"])
async def test_an_admin_key_closes_the_routes_to_all_others(engine, path, caplog):
    caplog.set_level("INFO")
    async with client_of(engine, admin_keys=["boss"], api_keys=["k"]) as client:
        for headers in ({}, {"Authorization": "Bearer k"}):
            response = await client.post(path, json={"model": "b"}, headers=headers)
            assert response.status_code == 401
        assert not engine.switches
        assert not engine.levels
        response = await client.post(path, json={"model": "b"}, headers=BOSS)
        assert response.status_code == 200
    lines = [m for m in caplog.messages if re.search(rf'POST "{path}" .*-> (200|401)', m)]
    assert len(lines) == 3


async def test_without_an_admin_key_the_rule_is_that_of_the_api_keys(engine):
    async with client_of(engine, api_keys=["k"]) as client:
        for path in (SWITCH, "/sleep"):
            assert (await client.post(path, json={"model": "b"})).status_code == 401
        headers = {"Authorization": "Bearer k"}
        assert (await client.post(SWITCH, json={"model": "b"}, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", [SWITCH, "/sleep", "/wake_up"])
async def test_a_web_page_cannot_switch_or_sleep(client, engine, path):
    origin = {"Origin": "http://evil.example"}
    response = await client.post(path, json={"model": "b"}, headers=origin)
    assert (response.status_code, response.json()["error"]["code"]) == (403, "origin_not_allowed")
    plain = await client.post(SWITCH, content='{"model": "b"}')
    assert plain.status_code == 415
    assert not engine.switches
    assert not engine.levels


async def test_switches_count_as_admin_calls(engine):
    async with client_of(engine, admin_rate_limit=0.01) as client:
        first, second = [await client.post(SWITCH, json={"model": "b"}) for _ in range(2)]
    assert (first.status_code, second.status_code) == (200, 429)


async def test_with_an_admin_port_the_routes_are_there_alone(engine):
    async with client_of(engine, admin_port=81, admin_keys=["boss"]) as client:
        for path in (SWITCH, "/sleep", "/wake_up"):
            for port, status in ((80, 404), (81, 200)):
                url = f"http://server:{port}{path}"
                response = await client.post(url, json={"model": "b"}, headers=BOSS)
                assert response.status_code == status, url
        assert (await client.get("http://server:80/v1/models")).status_code == 200


async def test_a_model_may_be_called_switch(engine):
    engine.aliases = ("a", "switch")
    engine.entries["switch"] = engine.entries["a"]
    async with client_of(engine, admin_keys=["boss"]) as client:
        assert (await client.get(SWITCH)).json()["id"] == "switch"


async def test_a_second_switch_waits_or_gets_409(client, engine, soon):
    engine.may_switch.clear()
    first = asyncio.create_task(client.post(SWITCH, json={"model": "b"}))
    await soon(lambda: engine.is_switching)
    refused = await client.post(SWITCH, json={"model": "c", "wait": False})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "switch_in_progress")
    assert refused.headers["retry-after"] == "1"
    waiting = asyncio.create_task(client.post(SWITCH, json={"model": "c"}))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    engine.may_switch.set()
    assert (await first).json()["active"] == "b"
    assert (await waiting).json()["previous"] == "b"
    assert engine.active == "c"


async def test_a_failed_switch_names_the_step_and_the_model_that_serves(client, engine):
    engine.failing.add("b")
    response = await client.post(SWITCH, json={"model": "b"})
    assert response.status_code == 500
    error = response.json()["error"]
    assert error["code"] == "model_switch_failed"
    assert "step load" in error["message"]
    assert "a serves" in error["message"]
    assert (await complete(client, "a")).status_code == 200


async def test_a_request_during_a_switch_is_told_to_come_again(client, engine, soon):
    engine.may_switch.clear()
    switch = asyncio.create_task(client.post(SWITCH, json={"model": "b"}))
    await soon(lambda: engine.is_switching)
    response = await complete(client, "a")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "model_switching")
    assert response.headers["retry-after"] == "1"
    ready = await client.get("/ready")
    assert (ready.status_code, ready.json()["error"]["code"]) == (503, "model_switching")
    for path in ("/live", "/health"):
        assert (await client.get(path)).status_code == 200
    engine.may_switch.set()
    await switch
    assert (await client.get("/ready")).status_code == 200


@pytest.mark.parametrize("auto_switch", [False, True])
async def test_the_active_model_serves_while_the_next_one_is_prepared(engine, soon, auto_switch):
    """A download takes minutes, in which every request was rejected or had to wait."""
    engine.may_prepare.clear()
    engine.prepare_s = 0.25
    async with client_of(engine, auto_switch=auto_switch) as client:
        order = asyncio.create_task(client.post(SWITCH, json={"model": "b"}))
        await soon(lambda: engine.prepared == ["b"])
        for model in ("a", None):
            answer = await asyncio.wait_for(complete(client, model), 60)
            assert answer.json()["model"] == "a"
        assert (await client.get("/ready")).status_code == 200
        refused = await client.post(SWITCH, json={"model": "c", "wait": False})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "switch_in_progress")
        assert not engine.switches
        engine.may_prepare.set()
        report = (await order).json()
        assert (report["active"], report["prepare_s"], report["total_s"]) == ("b", 0.25, 1.75)
        assert (await complete(client, "b")).status_code == 200


async def test_requests_wait_for_a_model_that_is_prepared_and_others_are_served(engine, soon):
    engine.may_prepare.clear()
    async with client_of(engine, auto_switch=True, min_model_stay=0.05) as client:
        waiting = asyncio.create_task(complete(client, "b"))
        await soon(lambda: engine.prepared == ["b"])
        assert (await asyncio.wait_for(complete(client, "a"), 60)).json()["model"] == "a"
        assert not waiting.done()
        engine.may_prepare.set()
        assert (await waiting).json()["model"] == "b"


async def test_a_model_whose_requests_have_left_while_it_was_prepared_is_not_switched_to(
    engine, soon
):
    engine.may_prepare.clear()
    async with client_of(engine, auto_switch=True, min_model_stay=0.05) as client:
        left = asyncio.create_task(complete(client, "b"))
        await soon(lambda: engine.prepared == ["b"])
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        later = asyncio.create_task(complete(client, "c"))
        engine.may_prepare.set()
        assert (await asyncio.wait_for(later, 60)).json()["model"] == "c"
    assert [alias for alias, *_ in engine.switches] == ["c"]


async def test_a_download_for_requests_keeps_nobody_from_another_model(engine, soon):
    """It held every other switch, for hours."""
    engine.downloads["b"] = asyncio.Event()
    async with client_of(engine, auto_switch=True, min_model_stay=0.05) as client:
        waiting = asyncio.create_task(complete(client, "b"))
        await soon(lambda: engine.prepared == ["b"])
        assert (await asyncio.wait_for(complete(client, "c"), 60)).json()["model"] == "c"
        order = client.post(SWITCH, json={"model": "a", "wait": False})
        assert (await asyncio.wait_for(order, 60)).json()["active"] == "a"
        assert not waiting.done()
        engine.downloads["b"].set()
        assert (await asyncio.wait_for(waiting, 60)).json()["model"] == "b"
    assert [alias for alias, *_ in engine.switches] == ["c", "a", "b"]
    assert engine.prepared.count("b") == 1


async def test_a_download_for_an_operator_keeps_no_request_from_another_model(engine, soon):
    engine.downloads["b"] = asyncio.Event()
    async with client_of(engine, auto_switch=True, min_model_stay=0.05) as client:
        order = asyncio.create_task(client.post(SWITCH, json={"model": "b"}))
        await soon(lambda: engine.prepared == ["b"])
        assert (await asyncio.wait_for(complete(client, "c"), 60)).json()["model"] == "c"
        engine.downloads["b"].set()
        report = (await asyncio.wait_for(order, 60)).json()
        assert (report["previous"], report["active"]) == ("c", "b")


async def test_a_download_ends_when_nobody_waits_for_its_model_any_more(engine, soon):
    engine.downloads["b"] = asyncio.Event()
    async with client_of(engine, auto_switch=True, min_model_stay=0.05) as client:
        waiting = [asyncio.create_task(complete(client, "b")) for _ in range(2)]
        await soon(lambda: engine.prepared == ["b"])
        waiting[0].cancel()
        await complete(client, "c")
        assert not engine.ended_downloads
        waiting[1].cancel()
        await soon(lambda: engine.ended_downloads == ["b"])
        assert (await asyncio.wait_for(complete(client, "a"), 60)).json()["model"] == "a"


async def test_a_model_that_cannot_be_prepared_is_refused_and_the_active_one_goes_on(engine, soon):
    fault = SwitchFailedError("a is still active: no space left for b", "prepare", "a")
    engine.prepare_fault = fault
    async with client_of(engine, auto_switch=True, min_model_stay=0.05) as client:
        for _ in range(2):
            refused = await complete(client, "b")
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "model_switch_failed",
            )
            assert "no space left" in refused.json()["error"]["message"]
        assert engine.prepared == ["b"], "it is tried again later"
        assert (await complete(client, "a")).status_code == 200
        engine.prepare_fault = fault
        failed = await client.post(SWITCH, json={"model": "c"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "model_switch_failed")
        metrics = (await client.get("/metrics")).text
    assert not engine.switches
    for model in "bc":
        line = f'trencadis:model_switch_failures_total{{engine="0",model_name="{model}"}} 1.0'
        assert line in metrics


async def test_an_idle_model_wakes_up_while_the_next_one_is_prepared(soon):
    engine = idle_after(a=0.1)
    async with client_of(engine, auto_switch=True, min_model_stay=0.05) as client:
        await complete(client, "a")
        await soon(lambda: engine.is_sleeping)
        engine.may_prepare.clear()
        waiting = asyncio.create_task(complete(client, "b"))
        await soon(lambda: engine.prepared == ["b"])
        assert (await asyncio.wait_for(complete(client, "a"), 60)).json()["model"] == "a"
        engine.may_prepare.set()
        assert (await waiting).json()["model"] == "b"


async def test_defaults_and_parsers_are_those_of_the_active_model():
    engine = SwitchingStandIn(
        a={"default_sampling": {"temperature": 0.5, "max_tokens": 2}},
        b={"frontend": {"reasoning_parser": "qwen3"}},
    )
    engine.tokenizers["a"].chat_template = "<tool_call>"
    chat = {"messages": [{"role": "user", "content": "<think>x</think>y"}]}
    async with client_of(engine) as client:
        answer = (await client.post("/v1/chat/completions", json=chat)).json()
        assert answer["usage"]["completion_tokens"] == 2
        assert engine.requests[-1][1].temperature == 0.5
        answer = await complete(client, "a", temperature=1.5, max_tokens=3)
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert engine.requests[-1][1].temperature == 1.5
        await client.post(SWITCH, json={"model": "b"})
        engine.script = ["<think>", "x", "</think>", "y"]
        message = (await client.post("/v1/chat/completions", json=chat)).json()["choices"][0]
        assert message["message"]["reasoning"] == "x"
        assert message["message"]["content"] == "y"
        assert engine.requests[-1][1].temperature == 1.0
        assert len(engine.tokenizers["b"].rendered) == 1
        assert len(engine.tokenizers["a"].rendered) == 1


async def test_beam_search_has_no_defaults_of_draws():
    engine = SwitchingStandIn(a={"default_sampling": {"temperature": 0.5}})
    async with client_of(engine) as client:
        response = await complete(client, "a", use_beam_search=True, best_of=2)
    assert response.status_code == 200, response.text


async def test_a_default_of_max_tokens_never_exceeds_the_context():
    engine = SwitchingStandIn(a={"default_sampling": {"max_tokens": 10_000}})
    async with client_of(engine) as client:
        assert (await complete(client, "a")).status_code == 200
    assert engine.requests[0][1].max_tokens == engine.max_model_len - 4


async def test_metrics_tell_of_switches_and_name_the_model_of_each_request(client, engine):
    await complete(client, "a")
    await client.post(SWITCH, json={"model": "b"})
    await client.post(SWITCH, json={"model": "b"})
    await complete(client, "b")
    engine.failing.add("c")
    await client.post(SWITCH, json={"model": "c"})
    await client.post(SWITCH, json={"model": "unknown"})
    samples = {
        (sample.name, sample.labels.get("model_name"), sample.labels.get("finished_reason")): (
            sample.value
        )
        for family in text_string_to_metric_families((await client.get("/metrics")).text)
        for sample in family.samples
    }
    switches = {m: samples["trencadis:model_switches_total", m, None] for m in "abc"}
    assert switches == {"a": 0, "b": 1, "c": 0}
    assert samples["trencadis:model_switch_failures_total", "c", None] == 1
    assert ("trencadis:model_switch_failures_total", "unknown", None) not in samples
    assert samples["trencadis:model_switch_seconds_sum", "b", None] == 1.5
    assert {m: samples["trencadis:model_active", m, None] for m in "abc"} == {
        "a": 0,
        "b": 1,
        "c": 0,
    }
    for model in "ab":
        assert samples["vllm:request_success_total", model, "stop"] == 1
    assert samples["vllm:num_requests_running", "b", None] == 0


async def series(client, name):
    """The labels and the value of each series of a metric."""
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families((await client.get("/metrics")).text)
        for sample in family.samples
        if sample.name == name
    ]


async def test_counters_of_a_model_stay_while_another_is_active(client, engine):
    """What was generated between the last scrape and the switch would be lost otherwise."""
    name = "vllm:generation_tokens_total"
    before = {labels["model_name"]: value for labels, value in await series(client, name)}
    assert before == {"a": 13, "b": 0, "c": 0}, "series begin at 0, so that no increase is lost"
    engine.totals["a"] = EngineStats(num_generation_tokens=20)
    await client.post(SWITCH, json={"model": "b"})
    after = {labels["model_name"]: value for labels, value in await series(client, name)}
    assert after == {"a": 20, "b": 13, "c": 0}
    running = await series(client, "vllm:num_requests_running")
    assert [labels["model_name"] for labels, _ in running] == ["b"], "gauges are of the active one"


async def test_series_of_the_device_go_on_when_the_model_changes(client, engine):
    """An alert with ``for`` begins again with each new series."""
    engine.thermal = ThermalStats(hottest_c=95.0, sensor="failed")
    before = [await series(client, f"trencadis:{name}") for name in DEVICE_METRICS]
    await client.post(SWITCH, json={"model": "b"})
    assert [await series(client, f"trencadis:{name}") for name in DEVICE_METRICS] == before
    assert all(labels == {"engine": "0"} for metric in before for labels, _ in metric)


DEVICE_METRICS = ("temperature_celsius", "sensor_health", "core_silence_seconds")


async def test_requests_that_wait_for_a_switch_are_counted_by_their_model(engine, soon):
    engine.may_switch.clear()
    async with client_of(engine, auto_switch=True) as client:
        waiting = [asyncio.create_task(complete(client, model)) for model in ("b", "b", "c")]
        await soon(lambda: engine.is_switching)
        waiting.append(asyncio.create_task(complete(client, "a")))  # sooner, it would be served
        await until_waiting(client, 4)
        name = "trencadis:num_requests_waiting_for_switch"
        found = {labels["model_name"]: value for labels, value in await series(client, name)}
        assert found == {"a": 1, "b": 2, "c": 1}
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        engine.may_switch.set()


async def test_sleep_has_the_levels_of_vllm(client, engine):
    assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
    asleep = (await client.post("/sleep?level=2")).json()
    assert asleep == {"is_sleeping": True, "released_bytes": 4096}
    assert engine.levels == [2]
    refused = await complete(client, "a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_sleeping")
    assert (await client.post("/wake_up")).json() == {"is_sleeping": False}
    assert (await complete(client, "a")).status_code == 200
    assert (await client.post("/sleep?level=3")).status_code == 400


async def test_the_api_describes_the_routes_of_development_mode(client):
    description = (await client.get("/openapi.json")).json()
    responses = description["paths"][SWITCH]["post"]["responses"]
    assert {"200", "400", "401", "403", "404", "409", "429", "500"} <= set(responses)
    assert {"/sleep", "/wake_up", "/is_sleeping"} <= set(description["paths"])


async def test_with_auto_switch_a_request_chooses_its_model(automatic, engine):
    models = "abcab" * 4
    answers = await asyncio.gather(*(complete(automatic, model, "x" + model) for model in models))
    assert [answer.status_code for answer in answers] == [200] * 20
    for answer, model in zip(answers, models, strict=True):
        assert (answer.json()["model"], answer.json()["choices"][0]["text"]) == (model, "x" + model)
    assert {alias for alias, *_ in engine.switches} >= {"b", "c"}
    # About one for each model, not one for each request: a slow machine may need a second turn.
    assert len(engine.switches) <= 8
    assert engine.switches[0][1:] == ("park", 10.0)


async def test_with_auto_switch_a_server_stays_ready_during_a_switch(automatic, engine, soon):
    engine.may_switch.clear()
    request = asyncio.create_task(complete(automatic, "b", stream=True))
    await soon(lambda: engine.is_switching)
    assert (await automatic.get("/ready")).status_code == 200
    waiting = [asyncio.create_task(complete(automatic, name)) for name in (None, "a")]
    await until_waiting(automatic, 3)
    engine.may_switch.set()
    others = await asyncio.gather(*waiting)
    assert (await request).text.endswith("data: [DONE]\n\n")
    assert [other.json()["model"] for other in others] == ["b", "a"]
    assert (await complete(automatic, "x")).status_code == 404


async def test_a_full_queue_is_told_when_to_come_again(engine, soon):
    engine.may_switch.clear()
    async with client_of(
        engine, auto_switch=True, max_switch_waiting=1, min_model_stay=0.1
    ) as client:
        first = asyncio.create_task(complete(client, "b"))
        await soon(lambda: engine.is_switching)
        refused = await complete(client, "c")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_overloaded")
        assert int(refused.headers["retry-after"]) >= 1
        engine.may_switch.set()
        assert (await first).status_code == 200


async def test_a_drain_waits_for_requests_that_wait_for_a_switch(engine, soon):
    engine.may_switch.clear()
    async with client_of(engine, auto_switch=True, admin_keys=["boss"]) as client:
        request = asyncio.create_task(complete(client, "b"))
        await soon(lambda: engine.is_switching)
        order = client.post("/v1/admin/drain", json={"wait_s": 60}, headers=BOSS)
        draining = asyncio.create_task(order)

        async def is_draining():
            return (await client.get("/ready")).status_code == 503

        await soon(is_draining)
        assert not draining.done()
        engine.may_switch.set()
        drained = await draining
        assert drained.json() == {"draining": True, "num_active_requests": 0}
        assert (await request).status_code == 200
        assert engine.active == "b"
        assert (await complete(client, "a")).json()["error"]["code"] == "draining"


async def test_a_client_that_has_gone_causes_no_switch(engine, serving, soon):
    engine.may_switch.clear()
    async with serving(auto_switch=True, min_model_stay=0.05) as url:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            served = asyncio.create_task(complete(client, "b"))
            await soon(lambda: engine.is_switching)
            left = asyncio.create_task(complete(client, "c"))
            await until_waiting(client, 2)
            left.cancel()
            await until_waiting(client, 1)
            engine.may_switch.set()
            assert (await served).status_code == 200
        await asyncio.sleep(0.4)  # eight times the stay of b
    assert [alias for alias, *_ in engine.switches] == ["b"]


async def test_requests_for_a_model_that_cannot_be_loaded_end_and_others_go_on(automatic, engine):
    engine.failing.add("b")
    failed, served = await asyncio.gather(complete(automatic, "b"), complete(automatic, "c"))
    assert (failed.status_code, failed.json()["error"]["code"]) == (503, "model_switch_failed")
    assert served.json()["model"] == "c"


async def test_an_internal_error_of_a_switch_leaves_no_request_waiting(automatic, engine, caplog):
    engine.fault = OSError("the disk is gone")
    failed = await asyncio.wait_for(complete(automatic, "b"), 60)
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
    assert "the disk is gone" in caplog.text
    assert "disk" not in failed.text
    assert (await asyncio.wait_for(complete(automatic, "c"), 60)).json()["model"] == "c"


@pytest.mark.parametrize("value", ["\ud800", "\x00", "b" * 10_000, {"a": [1]}, [], 1e308, None])
@pytest.mark.parametrize("field", ["model", "running", "drain_timeout_s", "wait", "other"])
async def test_odd_values_of_an_order_are_client_errors(client, engine, field, value):
    content = json.dumps({"model": "b", field: value})
    response = await client.post(
        SWITCH, content=content, headers={"Content-Type": "application/json"}
    )
    assert 400 <= response.status_code < 500, response.text
    assert not engine.switches


async def test_parked_requests_bring_their_model_back(automatic, engine, soon):
    engine.parks = 2
    await complete(automatic, "b")
    engine.parks = 0
    await soon(lambda: engine.active == "a")


async def test_a_switch_while_the_prompt_is_encoded_gives_no_answer_of_another_model(
    automatic, engine, soon
):
    """Its tokens are those of a; b would read them as others."""
    tokenizer, started = engine.tokenizers["a"], []
    encode = tokenizer.encode

    def slow(text, add_special_tokens=True):
        if not started:
            started.append(text)
            while engine.active == "a":
                pass
        return encode(text, add_special_tokens)

    tokenizer.encode = slow
    request = asyncio.create_task(complete(automatic, "a"))
    await soon(lambda: bool(started))
    await automatic.post(SWITCH, json={"model": "b"})
    assert (await request).json()["model"] == "a"
    assert engine.served == ["a"]
    assert [alias for alias, *_ in engine.switches] == ["b", "a"]


FILE = """\
models:
  a: {model: m, tool_call_parser: hermes}
  b: {model: n, seed: 3}
"""


async def test_the_command_line_of_the_seed_is_accepted(tmp_path, caplog):
    caplog.set_level("INFO")
    file = tmp_path / "models.yaml"
    file.write_text(FILE)
    environ = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "VLLM_HPU_MULTI_MODEL_CONFIG": str(file),
    }
    args = flag_parser().parse_args(["--seed", "5", "--enforce-eager"])
    settings = server_settings(args, environ)
    assert settings.server_dev_mode
    config = multi_model_config(args, environ, settings.multi_model_config)
    a, b = config.models
    assert (a.config.seed, b.config.seed) == (5, 3)
    assert a.config.graphs.enforce_eager
    assert a.frontend == {"tool_call_parser": "hermes"}
    assert "VLLM_ALLOW_INSECURE_SERIALIZATION is not needed" in caplog.text


async def test_no_request_wakes_an_engine_that_an_operator_put_to_sleep(automatic, engine):
    await automatic.post("/sleep")
    assert (await automatic.get("/ready")).status_code == 503
    refused = await asyncio.wait_for(complete(automatic, "b"), 60)
    assert refused.status_code == 503, refused.text
    assert not engine.switches
    await automatic.post("/wake_up")
    assert (await automatic.get("/ready")).status_code == 200
    assert (await asyncio.wait_for(complete(automatic, "b"), 60)).json()["model"] == "b"


async def test_requests_that_an_operator_parks_bring_their_model_back(automatic, engine, soon):
    engine.parks = 2
    await automatic.post(SWITCH, json={"model": "b", "running": "park"})
    engine.parks = 0
    await soon(lambda: engine.active == "a")


async def test_a_switch_goes_on_when_its_operator_has_left_and_requests_find_its_model(
    automatic, engine, soon
):
    engine.may_switch.clear()
    order = asyncio.create_task(automatic.post(SWITCH, json={"model": "b"}))
    await soon(lambda: engine.is_switching)
    order.cancel()
    await asyncio.gather(order, return_exceptions=True)
    waiting = asyncio.create_task(complete(automatic, "b"))
    await until_waiting(automatic, 1)
    engine.may_switch.set()
    assert (await asyncio.wait_for(waiting, 60)).json()["model"] == "b"
    assert [alias for alias, *_ in engine.switches] == ["b"]
    assert not engine.is_switching


async def test_a_model_that_failed_to_load_is_refused_until_it_is_tried_again(engine):
    engine.failing.add("b")
    async with client_of(engine, auto_switch=True, min_model_stay=300) as client:
        for _ in range(3):
            refused = await complete(client, "b")
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "model_switch_failed",
            )
            assert "no b" in refused.json()["error"]["message"]
            assert 500 < int(refused.headers["retry-after"]) <= 600
        assert len(engine.switches) == 1
        assert (await complete(client, "a")).status_code == 200
        engine.failing.clear()
        assert (await client.post(SWITCH, json={"model": "b"})).status_code == 200
        assert (await complete(client, "b")).status_code == 200


async def test_a_model_whose_load_ended_the_core_is_not_tried_again_for_an_hour(automatic, engine):
    """Each try costs one of the restarts after which the server ends."""
    engine.fault = SwitchFailedError("the engine core died in the switch to b", "core", "a")
    for _ in range(2):
        refused = await complete(automatic, "b")
        assert refused.status_code == 503
        assert 3500 < int(refused.headers["retry-after"]) <= 3600
    assert len(engine.switches) == 1
    assert (await complete(automatic, "c")).status_code == 200


async def test_a_parked_model_that_is_tried_again_in_an_hour_delays_no_other(
    automatic, engine, soon
):
    engine.parks = 1
    assert (await complete(automatic, "b")).status_code == 200  # requests of a are parked
    engine.parks = 0
    engine.fault = SwitchFailedError("the engine core died in the switch to a", "core", "b")
    await soon(lambda: len(engine.switches) == 2)
    await asyncio.sleep(0.1)  # the next try of a is planned
    assert (await asyncio.wait_for(complete(automatic, "c"), 60)).json()["model"] == "c"


async def test_an_order_that_fails_to_drain_says_nothing_of_the_model(automatic, engine):
    engine.fault = SwitchFailedError("2 requests still run after 0 s", "drain", "a")
    assert (await automatic.post(SWITCH, json={"model": "b"})).status_code == 500
    assert (await complete(automatic, "b")).status_code == 200


@pytest.mark.parametrize(
    ("model", "fault"),
    [
        ("a", None),
        ("c", SwitchFailedError("2 requests still run after 0 s", "drain", "a")),
        ("c", EngineRestarting("the core has died")),
    ],
    ids=["active", "drain", "restarting"],
)
async def test_orders_that_load_nothing_keep_no_request_waiting(engine, model, fault):
    """The minimum stay of the active model goes on, however often they are repeated."""
    async with client_of(
        engine, auto_switch=True, min_model_stay=0.5, admin_rate_limit=100_000
    ) as client:
        assert (await client.post(SWITCH, json={"model": "b"})).status_code == 200
        assert (await client.post(SWITCH, json={"model": "a"})).status_code == 200
        waiting = asyncio.create_task(complete(client, "b"))
        await until_waiting(client, 1)
        engine.faulty = model  # not the switch to b, which may run while an order is sent
        for _ in range(600):
            engine.fault = fault
            await client.post(SWITCH, json={"model": model})
            engine.fault = None
            await asyncio.sleep(0.05)
            if waiting.done():
                break
        assert waiting.done()
        assert (await waiting).json()["model"] == "b"


async def test_a_request_whose_model_is_switched_away_before_it_begins_waits_again(
    automatic, engine, monkeypatch
):
    wait_for, orders = SwitchControl.wait_for, ["a"]

    async def switched_away(self, request):
        await wait_for(self, request)
        if request.alias == "b" and orders:
            assert (await automatic.post(SWITCH, json={"model": orders.pop()})).status_code == 200

    monkeypatch.setattr(SwitchControl, "wait_for", switched_away)
    answer = await complete(automatic, "b")
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "b"
    assert [alias for alias, *_ in engine.switches] == ["b", "a", "b"]


async def test_tokens_are_counted_for_a_model_that_is_not_active(automatic, client, engine):
    """As its tokenizer counts, and without a switch."""
    engine.tokenizers["b"].encode = lambda text, add_special_tokens=True: [0] * 7
    body = {"model": "b", "messages": [{"role": "user", "content": "hello"}]}
    counted = await automatic.post("/v1/messages/count_tokens", json=body)
    assert counted.status_code == 200, counted.text
    assert len(engine.tokenizers["b"].rendered) == 1
    assert not engine.switches
    assert (await client.post("/v1/messages/count_tokens", json=body)).status_code == 404
    unknown = await automatic.post("/v1/messages/count_tokens", json={**body, "model": "x"})
    assert unknown.status_code == 404


async def test_a_request_that_a_switch_aborts_is_told_to_come_again(client, engine):
    engine.aborts = True
    refused = await complete(client, "a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "request_aborted")
    assert refused.headers["retry-after"] == "1"


def idle_after(**seconds):
    return SwitchingStandIn(**{alias: {"ttl": ttl} for alias, ttl in seconds.items()})


async def test_an_idle_model_sleeps_and_the_next_request_wakes_it_up(soon):
    engine = idle_after(a=0.1)
    async with client_of(engine, auto_switch=True, min_model_stay=0.05) as client:
        assert (await complete(client, "a")).status_code == 200
        await soon(lambda: engine.is_sleeping)
        assert engine.levels == [1]
        assert (await client.get("/ready")).status_code == 200
        answers = await asyncio.gather(*(complete(client, model) for model in ("a", None, "a")))
        assert [answer.status_code for answer in answers] == [200] * 3
        assert not engine.switches
        await soon(lambda: engine.is_sleeping)
        assert (await complete(client, "b")).json()["model"] == "b"
        await asyncio.sleep(0.3)
        assert not engine.is_sleeping, "b has no ttl"


def note_sleeps_at_tokens(engine):
    """How often the engine had slept at each token that it generated."""
    generate, noted = engine.generate, []

    async def noting(*args, **fields):
        async for delta in generate(*args, **fields):
            noted.append(len(engine.levels))
            yield delta

    engine.generate = noting
    return noted


async def test_a_model_that_answers_is_not_idle(soon):
    engine = idle_after(a=0.1)
    engine.delay = 0.1
    num_sleeps = note_sleeps_at_tokens(engine)
    async with client_of(engine, auto_switch=True) as client:
        answer = await complete(client, "a", prompt="abcdefgh", max_tokens=8)
        assert answer.status_code == 200
        assert num_sleeps == [0] * 8
        await soon(lambda: engine.is_sleeping)


async def test_a_sleep_that_an_operator_orders_ends_by_an_operator(soon):
    engine = idle_after(a=0.1)
    async with client_of(engine, auto_switch=True) as client:
        await complete(client, "a")
        await soon(lambda: engine.is_sleeping)
        await client.post("/sleep")
        for model in ("a", "b"):
            refused = await complete(client, model)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                503,
                "engine_sleeping",
            )
        assert (await client.get("/ready")).status_code == 503


async def test_a_model_whose_prompt_takes_longer_to_encode_than_its_ttl_is_not_idle(soon):
    """It slept before the first token, and the request woke it up and began anew."""
    engine = idle_after(a=0.1)
    tokenizer = engine.tokenizers["a"]
    encode = tokenizer.encode

    def slow(*args, **kwargs):
        time.sleep(0.5)
        return encode(*args, **kwargs)

    tokenizer.encode = slow
    num_sleeps = note_sleeps_at_tokens(engine)
    async with client_of(engine, auto_switch=True) as client:
        answer = await asyncio.wait_for(complete(client, "a"), 60)
        assert answer.status_code == 200
        assert num_sleeps == [0] * 3


async def test_a_sleep_that_ends_the_core_is_not_tried_again_soon(soon):
    """Each costs one of the restarts after which the server ends."""
    engine = idle_after(a=0.05)
    engine.sleep_fault = EngineRestarting("no memory of the host")
    async with client_of(engine, auto_switch=True) as client:
        await complete(client, "a")
        await soon(lambda: engine.levels == [1])
        await asyncio.sleep(0.3)
        assert engine.levels == [1]


@pytest.mark.parametrize("path", ["/wake_up", SWITCH])
async def test_a_model_that_an_operator_has_chosen_stays_awake_for_its_idle_time(path, soon):
    engine = idle_after(a=0.5, b=0.5)
    async with client_of(engine, auto_switch=True) as client:
        await complete(client, "c")
        await client.post("/sleep")
        await client.post(SWITCH, json={"model": "a"})
        await client.post("/sleep")
        await asyncio.sleep(0.6)
        chosen_s = time.monotonic()
        await client.post(path, json={"model": "b"})
        await soon(lambda: engine.is_sleeping)
        assert time.monotonic() - chosen_s >= 0.5


async def test_a_sleep_order_that_is_refused_leaves_the_engine_to_requests(soon):
    engine = idle_after(a=0.1)
    async with client_of(engine, auto_switch=True) as client:
        await complete(client, "a")
        await soon(lambda: engine.is_sleeping)
        engine.sleep_fault = SwitchInProgressError("a switch is under way")
        assert (await client.post("/sleep")).status_code == 503
        assert (await complete(client, "a")).status_code == 200


async def test_a_second_sleep_order_that_is_refused_leaves_the_engine_to_the_operator():
    engine = idle_after(a=1000.0)
    async with client_of(engine, auto_switch=True) as client:
        assert (await client.post("/sleep")).status_code == 200
        engine.sleep_fault = SwitchInProgressError("a switch is under way")
        assert (await client.post("/sleep?level=2")).status_code == 503
        answer = await complete(client, "a")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_sleeping")
        assert engine.is_sleeping


@pytest.mark.parametrize("kind", [EngineRestarting, EngineSleeping, EngineUnresponsive])
async def test_parked_requests_that_meet_an_engine_in_need_are_resumed_soon(engine, kind):
    settings = ServerSettings(auto_switch=True, min_model_stay=20.0)
    control = SwitchControl(engine, settings, SimpleNamespace(), lambda: 0, lambda: 7.0)
    for _ in range(5):
        control._refuse("b", kind("not now"))
    assert control._queue._failures["b"] == Failure(0, 27.0)


async def test_an_engine_that_could_not_start_its_model_again_is_woken_up_by_requests(
    automatic, engine
):
    """A switch failed, and the device memory of the previous model was taken meanwhile."""
    engine.failing.add("b")
    engine.sleeps_after_failure = True
    assert (await complete(automatic, "b")).status_code == 503
    assert engine.is_sleeping
    engine.wake_fault = SwitchFailedError("no memory", "wake", "a")
    refused = await complete(automatic, "a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_sleeping")
    assert engine.is_sleeping
    assert (await complete(automatic, "a")).status_code == 200


async def test_an_idle_limit_without_automatic_switches_is_refused_at_start():
    with pytest.raises(ConfigError, match="a has a ttl, and without --auto-switch"):
        create_app(idle_after(a=5), ServerSettings())
