"""``/v1/admin/batch``: keys, fields of an order, responses."""

from __future__ import annotations

import asyncio
import hashlib
import logging

import attrs
import httpx
import pytest

from trencadis.engine import BatchControl, InvalidRequest, ThermalStats
from trencadis.server import ServerSettings, create_app
from trencadis.server.http.admin_calls import AdminRateLimit

pytestmark = pytest.mark.asyncio

PATH = "/v1/admin/batch"
KEY = {"Authorization": "Bearer boss"}


def reach(engine, **settings):
    app = create_app(engine, ServerSettings(**settings))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


@pytest.fixture
def admin(engine):
    return reach(engine, admin_keys=["boss"])


async def test_an_order_reaches_the_engine_and_the_response_is_that_of_the_seed(admin, engine):
    order = {"max_num_seqs": 12, "force_evict": 2, "target_temp_c": 80, "policy": "largest_kv"}
    response = await admin.post(PATH, json={**order, "dry_run": True}, headers=KEY)
    assert response.status_code == 200
    assert response.json() == {
        "previous_running": 9,
        "new_running": 7,
        "evicted_request_ids": ["cmpl-1-0"],
        "estimated_watts_saved": 6.4,
        "new_max_num_seqs": 12,
        "new_max_prefill_tokens": 512,
    }
    assert engine.orders == [BatchControl(**order, dry_run=True)]


async def test_an_order_limits_the_prefill_of_a_step(admin, engine):
    order = {"max_prefill_tokens": 128, "force_evict": 2, "hold_s": 30}
    response = await admin.post(PATH, json=order, headers=KEY)
    assert response.json()["new_max_prefill_tokens"] == 128
    assert engine.orders == [BatchControl(**order)]
    response = await admin.post(PATH, json={"max_prefill_tokens": 0}, headers=KEY)
    assert response.status_code in {400, 422}
    assert "max_prefill_tokens" in response.text
    assert len(engine.orders) == 1


async def test_the_call_of_the_seed_needs_no_content_type(admin, engine):
    body = b'{"target_temp_c": 80.0, "policy": "largest_kv"}'
    response = await admin.post(PATH, content=body, headers=KEY)
    assert response.status_code == 200
    assert engine.orders == [BatchControl(target_temp_c=80.0, policy="largest_kv")]


async def test_without_admin_keys_every_request_is_refused(engine):
    for settings in ({}, {"api_keys": ["boss"]}):
        client = reach(engine, **settings)
        response = await client.post(PATH, json={}, headers=KEY)
        assert response.status_code == 403
        error = response.json()["error"]
        assert error["code"] == "admin_api_disabled"
        assert "--admin-api-key" in error["message"]
    assert not engine.orders


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer user"}, {"Authorization": "x"}])
async def test_only_an_admin_key_is_accepted_and_only_here(engine, headers):
    client = reach(engine, api_keys=["user"], admin_keys=["boss"])
    response = await client.post(PATH, json={}, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["error"]["code"] == "invalid_api_key"
    assert (await client.get("/v1/models", headers=KEY)).status_code == 401
    assert not engine.orders


@pytest.mark.parametrize(
    ("order", "param"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": "8"}, "max_num_seqs"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"force_evict": -1}, "force_evict"),
        ({"force_evict": 1.5}, "force_evict"),
        ({"target_temp_c": 95.5}, "target_temp_c"),
        ({"target_temp_c": 0}, "target_temp_c"),
        ({"target_temp_c": "cool"}, "target_temp_c"),
        ({"policy": "random"}, "policy"),
        ({"dry_run": 1}, "dry_run"),
        ({"max_num_sequences": 8}, "max_num_sequences"),
    ],
    ids=str,
)
async def test_a_bad_order_names_its_field(admin, engine, order, param):
    response = await admin.post(PATH, json=order, headers=KEY)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not engine.orders


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff", b'{"target_temp_c": NaN}'])
async def test_a_body_that_is_no_order_is_refused(admin, engine, body):
    response = await admin.post(PATH, content=body, headers=KEY)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert not engine.orders


async def test_an_order_that_the_engine_refuses_is_an_error(admin, engine):
    engine.fails_with = InvalidRequest("target_temp_c needs a thermal policy", "target_temp_c")
    response = await admin.post(PATH, json={"target_temp_c": 80}, headers=KEY)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "target_temp_c"
    engine.is_alive = False
    response = await admin.post(PATH, json={}, headers=KEY)
    assert response.status_code == 503


async def test_the_api_describes_the_order(admin):
    paths = (await admin.get("/openapi.json")).json()["paths"]
    body = paths[PATH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(body["properties"]) == set(attrs.fields_dict(BatchControl))
    for name, attribute in attrs.fields_dict(BatchControl).items():
        assert body["properties"][name]["description"] == attribute.metadata["help"]
    assert body["properties"]["policy"]["enum"] == [
        *("lru", "largest_kv", "lowest_priority", "longest_remaining", "cheapest")
    ]


@pytest.mark.parametrize("name", ["max_num_seqs", "force_evict", "target_temp_c"])
async def test_the_ranges_are_those_of_the_engine(admin, engine, name):
    check = attrs.fields_dict(BatchControl)[name].validator
    outside = [check.low if getattr(check, "exclusive_low", False) else check.low - 1]
    if check.high is not None:
        outside.append(check.high + 1)
    for value in outside:
        response = await admin.post(PATH, json={name: value}, headers=KEY)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
    response = await admin.post(PATH, json={name: outside[0] + 1}, headers=KEY)
    assert response.status_code == 200
    assert engine.orders == [BatchControl(**{name: outside[0] + 1})]


async def test_an_order_beyond_64_bits_is_refused(admin, engine):
    response = await admin.post(PATH, json={"force_evict": 10**30}, headers=KEY)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "force_evict"
    assert not engine.orders


async def test_each_call_leaves_one_line_of_who_what_and_result(admin, engine, caplog):
    caplog.set_level(logging.INFO, "trencadis.server.admin")
    order = b'{"force_evict":\n 2}'
    await admin.post(PATH, content=order, headers=KEY)
    await admin.post(PATH, content=b'{"force_evict": -1}', headers=KEY)
    await admin.post(PATH, content=b"{}", headers={"Authorization": "Bearer boss\tx"})
    await admin.get("/v1/admin/none")
    await admin.get("/health")
    lines = [record.getMessage() for record in caplog.records]
    lines = [line for line in lines if line.startswith("client ")]
    assert len(lines) == 4
    assert not any("\n" in line or "boss" in line for line in lines)
    key = hashlib.sha256(b"boss").hexdigest()[:8]
    assert lines[0].startswith(
        f'client 127.0.0.1:123, key {key}: POST "/v1/admin/batch" "{{\\"force_evict\\":\\n 2}}" '
        '-> 200 "{\\"previous_running\\":9'
    ), lines[0]
    assert "-> 400 " in lines[1]
    assert "key " in lines[2]
    assert "-> 401 " in lines[2]
    assert ', key none: GET "/v1/admin/none" "" -> 401' in lines[3]


async def test_a_long_order_is_cut_in_the_log_and_complete_for_the_engine(admin, engine, caplog):
    caplog.set_level(logging.INFO, "trencadis.server.admin")
    order = b'{"force_evict": 2' + b" " * 5000 + b"}"
    assert (await admin.post(PATH, content=order, headers=KEY)).status_code == 200
    assert engine.orders == [BatchControl(force_evict=2)]
    assert len(caplog.records[0].getMessage()) < 1000


async def test_a_burst_of_calls_is_refused_and_told_when_to_come_again(engine):
    client = reach(engine, admin_keys=["boss"], admin_rate_limit=1)
    wrong = {"Authorization": "Bearer x"}
    responses = [await client.post(PATH, json={}, headers=wrong) for _ in range(20)]
    assert {response.status_code for response in responses} == {401}, (
        "these cost no administrator a call"
    )
    responses = [await client.post(PATH, json={}, headers=KEY) for _ in range(20)]
    refused = [response for response in responses if response.status_code == 429]
    assert len(engine.orders) == 20 - len(refused) < 10
    assert refused[0].headers["retry-after"] == "1"
    assert refused[0].json()["error"]["code"] == "rate_limit_exceeded"
    assert (await client.get("/health")).status_code == 200


async def test_the_rate_limit_admits_so_many_calls_a_second():
    now, admitted = 0.0, 0

    async def app(scope, receive, send):
        nonlocal admitted
        admitted += 1

    async def send(message):
        if message["type"] == "http.response.start":
            headers.append(dict(message["headers"])[b"retry-after"])

    headers = []
    limit = AdminRateLimit(app, 0.1, clock=lambda: now)
    scope = {"type": "http", "path": PATH, "headers": []}
    for _ in range(3):
        await limit(scope, None, send)
    assert (admitted, headers) == (1, [b"10", b"10"])
    now = 95.0
    for _ in range(3):
        await limit(scope, None, send)
    assert admitted == 2, "calls that did not come are not saved up"


async def test_the_state_shows_limit_heat_and_drain(admin, engine):
    engine.thermal = ThermalStats(policy="control loop", policy_active=True, target_temp_c=80.0)
    state = (await admin.get("/v1/admin/state", headers=KEY)).json()
    assert state["draining"] is False
    assert state["num_active_requests"] == 0
    assert state["stats"]["max_running_seqs"] == 32
    assert state["stats"]["thermal"]["policy"] == "control loop"
    assert state["stats"]["thermal"]["target_temp_c"] == 80.0


async def test_a_drain_lets_requests_finish_and_refuses_new_ones(admin, engine, soon):
    engine.delay = 0.1
    text = "abcde" * 20
    body = {"prompt": text, "max_tokens": 100}
    running = asyncio.create_task(admin.post("/v1/completions", json=body))
    await soon(lambda: engine.running)
    response = await admin.post("/v1/admin/drain", headers=KEY)
    assert response.json() == {"draining": True, "num_active_requests": 1}
    refused = await admin.post("/v1/completions", json={"prompt": "a"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
    codes = [(await admin.get(path)).status_code for path in ("/ready", "/health", "/live")]
    assert codes == [503, 200, 200]
    engine.delay = 0.0  # its answer would take ten seconds
    response = await admin.post("/v1/admin/drain", json={"wait_s": 60}, headers=KEY)
    assert response.json() == {"draining": True, "num_active_requests": 0}
    assert (await running).json()["choices"][0]["text"] == text
    response = await admin.post("/v1/admin/drain", json={"drain": False}, headers=KEY)
    assert response.json()["draining"] is False
    assert (await admin.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert (await admin.get("/ready")).status_code == 200


@pytest.mark.parametrize("body", [{"drain": 1}, {"wait_s": -1}, {"wait": 1}])
async def test_a_bad_drain_names_its_field(admin, body):
    response = await admin.post("/v1/admin/drain", json=body, headers=KEY)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == next(iter(body))
