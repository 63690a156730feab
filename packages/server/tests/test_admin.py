"""``/v1/admin/batch``: keys, fields of an order, responses."""

from __future__ import annotations

import attrs
import httpx
import pytest

from trencadis.engine import BatchControl, InvalidRequest
from trencadis.server import ServerSettings, create_app

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
    }
    assert engine.orders == [BatchControl(**order, dry_run=True)]


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
        *("lru", "largest_kv", "lowest_priority", "cheapest")
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
