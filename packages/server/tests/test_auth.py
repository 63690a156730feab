"""API keys protect /v1 only."""

from __future__ import annotations

import httpx
import pytest
from fastapi import FastAPI

from trencadis.engine import ConfigError
from trencadis.server import ServerSettings, create_app

pytestmark = pytest.mark.asyncio

KEYS = ("first-key", "second-key")


def connect(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


@pytest.fixture
def app(engine):
    return create_app(engine, ServerSettings(api_keys=KEYS))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_any_of_the_keys_opens_the_api(app, scheme, key):
    async with connect(app) as client:
        headers = {"Authorization": f"{scheme} {key}"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer first-ke"},
        {"Authorization": "Bearer first-key-and-more"},
        {"Authorization": "Basic first-key"},
        {"Authorization": "first-key"},
        {"Authorization": "Bearer f\xfcrst-key"},
    ],
)
async def test_without_a_key_the_api_is_closed(app, engine, headers):
    async with connect(app) as client:
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/v1")):
            response = await client.request(method, path, headers=encoded)
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == "Bearer"
            error = response.json()["error"]
            assert error["code"] == "invalid_api_key"
            assert error["type"] == "invalid_request_error"
            assert "first-key" not in response.text
    assert not engine.requests


async def test_probes_need_no_key(app):
    async with connect(app) as client:
        for path in ("/health", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200


async def test_a_mounted_app_is_guarded_too(app):
    outer = FastAPI()
    outer.mount("/llm", app)
    async with connect(outer) as client:
        assert (await client.get("/llm/v1/models")).status_code == 401
        headers = {"Authorization": "Bearer first-key"}
        assert (await client.get("/llm/v1/models", headers=headers)).status_code == 200


async def test_a_key_is_not_shown_with_the_settings():
    assert "first-key" not in repr(ServerSettings(api_keys=KEYS))


async def test_a_blank_key_is_refused():
    with pytest.raises(ConfigError, match="blank"):
        ServerSettings(api_keys=[" "])
