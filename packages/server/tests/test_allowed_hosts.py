"""The Host header: any is accepted, unless the accepted ones are listed."""

from __future__ import annotations

import httpx
import pytest

from trencadis.server import ServerSettings, create_app

pytestmark = pytest.mark.asyncio


def connect(engine, **settings):
    app = create_app(engine, ServerSettings(**settings))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("api.example.com", 200),
        ("API.example.com:8000", 200),
        ("[::1]:8000", 200),
        ("eu.models.example.com", 200),
        ("models.example.com", 400),
        ("models.example.com.evil.org", 400),
        ("evilapi.example.com", 400),
        ("127.0.0.1:8000", 400),
        ("", 400),
    ],
)
async def test_a_request_to_another_name_is_refused(engine, host, status):
    hosts = ["api.example.com", "::1", "*.models.example.com"]
    async with connect(engine, allowed_hosts=hosts) as client:
        for path in ("/v1/models", "/docs", "/openapi.json"):
            response = await client.get(path, headers={"Host": host})
            assert response.status_code == status, path
            if status == 400:
                assert response.json()["error"]["code"] == "host_not_allowed"
        probe = await client.get("/health", headers={"Host": host})
        assert probe.status_code == 200, "a probe addresses the server by its number"


@pytest.mark.parametrize("host", ["anything.org", "", "[::"])
async def test_by_default_any_name_is_accepted(engine, host):
    async with connect(engine) as client:
        response = await client.get("/v1/models", headers={"Host": host})
        assert response.status_code == 200
