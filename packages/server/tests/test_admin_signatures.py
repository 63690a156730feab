"""Signed admin calls: each is accepted once, soon, and by the server that it was meant for."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from stand_in_engine import StandInEngine

from trencadis.engine import ConfigError
from trencadis.server import ServerSettings, create_app
from trencadis.server.http.admin_signatures import AdminSignatures
from trencadis.server.http.auth import AdminCalls

pytestmark = pytest.mark.asyncio

KEY = "over-temperature"
WINDOW_S = 60.0
PATH = "/v1/admin/batch"
BODY = b'{"force_evict": 1}'


def signed(
    sent: float,
    key: str = KEY,
    method: str = "POST",
    host: str = "server",
    path: str = PATH,
    body: bytes = BODY,
) -> dict[str, str]:
    """The headers of a call, made as the documents say and not by the code under test."""
    text = f"{method}\n{host}\n{path}\n{sent:.6f}\n".encode() + body
    signature = hmac.new(key.encode(), text, hashlib.sha256).hexdigest()
    return {"X-Admin-Time": f"{sent:.6f}", "Authorization": f"Signature {signature}"}


def reach(engine: StandInEngine, **settings: Any) -> httpx.AsyncClient:
    chosen = {
        "admin_keys": ["other", KEY],
        "admin_signature_window": WINDOW_S,
        "allowed_hosts": ["server"],
        **settings,
    }
    app = create_app(engine, ServerSettings(**chosen))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def error_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


async def test_a_signed_order_is_carried_out_once(
    engine: StandInEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trencadis.server.admin")
    client = reach(engine)
    headers = signed(time.time())
    assert (await client.post(PATH, content=BODY, headers=headers)).status_code == 200
    again = await client.post(PATH, content=BODY, headers=headers)
    assert error_of(again) == (401, "replayed_call")
    assert len(engine.orders) == 1
    assert engine.orders[0].force_evict == 1
    later = signed(time.time())
    assert (await client.post(PATH, content=BODY, headers=later)).status_code == 200
    accepted, replayed, _ = caplog.messages
    assert f"key {hashlib.sha256(KEY.encode()).hexdigest()[:8]}: POST" in accepted
    assert "key none: POST" in replayed
    assert "-> 401" in replayed
    assert "accepted before" in replayed


async def test_every_admin_route_needs_a_signature_of_its_own(engine: StandInEngine) -> None:
    client = reach(engine)
    headers = signed(time.time(), method="GET", path="/v1/admin/state", body=b"")
    assert (await client.get("/v1/admin/state", headers=headers)).status_code == 200
    headers = signed(time.time(), path="/v1/admin/drain", body=b"")
    assert (await client.post("/v1/admin/drain", headers=headers)).status_code == 200
    assert (await client.get("/ready")).status_code == 503
    assert (await client.get("/live")).status_code == 200


async def test_a_bearer_token_is_no_signature(engine: StandInEngine) -> None:
    client = reach(engine)
    response = await client.post(PATH, content=BODY, headers={"Authorization": f"Bearer {KEY}"})
    assert error_of(response) == (401, "invalid_signature")
    assert "X-Admin-Time" in response.json()["error"]["message"]
    assert response.headers["www-authenticate"] == "Signature"
    assert error_of(await client.post(PATH, content=BODY))[0] == 401
    assert not engine.orders


CHANGES: dict[str, Callable[[float], dict[str, str]]] = {
    "another key": lambda now: signed(now, key="over-temperaturf"),
    "another host": lambda now: signed(now, host="server-2"),
    "another route": lambda now: signed(now, path="/v1/admin/drain"),
    "a query string": lambda now: signed(now, path=f"{PATH}?dry_run=1"),
    "another method": lambda now: signed(now, method="GET"),
    "another body": lambda now: signed(now, body=b'{"force_evict": 9}'),
    "another time": lambda now: {**signed(now), "X-Admin-Time": f"{now + 1:.6f}"},
    "an old call": lambda now: signed(now - WINDOW_S - 5),
    "a call of the future": lambda now: signed(now + WINDOW_S + 5),
    "a call to the server before": lambda now: signed(now - 30),
    "a time that is none": lambda now: {**signed(now), "X-Admin-Time": "1e99"},
    "a time that is not a number": lambda now: {**signed(now), "X-Admin-Time": "nan"},
    "half a signature": lambda now: {
        **signed(now),
        "Authorization": signed(now)["Authorization"][:-2],
    },
    "no signature": lambda now: {**signed(now), "Authorization": "Signature"},
}


@pytest.mark.parametrize("change", CHANGES)
async def test_what_was_not_signed_for_this_server_now_is_refused(
    engine: StandInEngine, change: str
) -> None:
    client = reach(engine)
    headers = CHANGES[change](time.time())
    response = await client.post(PATH, content=BODY, headers=headers)
    assert error_of(response) == (401, "invalid_signature")
    assert not engine.orders


async def test_a_call_to_another_server_is_refused_though_it_names_that_server(
    engine: StandInEngine,
) -> None:
    headers = {**signed(time.time(), host="server-2"), "Host": "server-2"}
    response = await reach(engine).post(PATH, content=BODY, headers=headers)
    assert error_of(response) == (400, "host_not_allowed")
    assert not engine.orders


async def test_a_query_string_that_was_not_signed_is_refused(engine: StandInEngine) -> None:
    client, path = reach(engine), "/v1/admin/state"
    plain = signed(time.time(), method="GET", path=path, body=b"")
    response = await client.get(f"{path}?verbose=1", headers=plain)
    assert error_of(response) == (401, "invalid_signature")
    with_query = signed(time.time(), method="GET", path=f"{path}?verbose=1", body=b"")
    assert (await client.get(f"{path}?verbose=1", headers=with_query)).status_code == 200


async def test_clocks_that_disagree_are_told(engine: StandInEngine) -> None:
    response = await reach(engine).post(PATH, content=BODY, headers=signed(time.time() - 300))
    assert "300 s from the" in response.json()["error"]["message"]
    assert "check the clocks" in response.json()["error"]["message"]


def guarded(accepted: list[bytes], clock: Callable[[], float]) -> AdminSignatures:
    """An app, started now, that appends the bearer tokens which reach it to ``accepted``."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        accepted.append(dict(scope["headers"])[b"authorization"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return AdminSignatures(
        app,
        admin_keys=[KEY],
        window_s=WINDOW_S,
        began_s=clock(),
        is_admin=AdminCalls(),
        max_bytes=1000,
        timeout=5,
        clock=clock,
    )


async def test_a_recorded_call_whose_body_arrives_late_is_not_accepted_again() -> None:
    now = 1_000_000.0
    accepted: list[bytes] = []
    headers = signed(now)

    async def slow_body() -> AsyncIterator[bytes]:
        nonlocal now
        yield BODY[:5]
        now += WINDOW_S + 1  # the signature is too old, so it need not be remembered
        yield BODY[5:]

    transport = httpx.ASGITransport(guarded(accepted, lambda: now))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        assert (await client.post(PATH, content=BODY, headers=headers)).status_code == 200
        now += WINDOW_S - 1
        response = await client.post(PATH, content=slow_body(), headers=headers)
    assert error_of(response) == (401, "invalid_signature")
    assert len(accepted) == 1


async def test_a_signature_is_forgotten_only_when_it_is_too_old_anyway() -> None:
    now = 1_000_000.0
    accepted: list[bytes] = []
    signatures = guarded(accepted, lambda: now)
    transport = httpx.ASGITransport(signatures)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        of_the_future = signed(now + WINDOW_S - 1)
        for wait_s in (0.0, WINDOW_S, WINDOW_S - 1.5):
            now += wait_s
            await client.post(PATH, content=BODY, headers=signed(now))
            response = await client.post(PATH, content=BODY, headers=of_the_future)
            assert response.status_code == (200 if wait_s == 0 else 401)
        assert accepted == [f"Bearer {KEY}".encode()] * 4
        assert len(signatures._seen) == len(signatures._expiries) == 3
        now += WINDOW_S + 1
        await client.post(PATH, content=BODY, headers=signed(now))
        assert len(signatures._seen) == len(signatures._expiries) == 1


async def test_requests_to_the_model_need_no_signature(engine: StandInEngine) -> None:
    client = reach(engine)
    assert (await client.post("/v1/completions", json={"prompt": "abc"})).status_code == 200
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(("settings", "size"), [({"max_body_size": 100}, 101), ({}, 65_537)])
async def test_a_large_body_is_refused_before_its_signature_is_checked(
    engine: StandInEngine, settings: dict[str, int], size: int
) -> None:
    client = reach(engine, **settings)
    body = b" " * size
    headers = signed(time.time(), body=body)
    response = await client.post(PATH, content=body, headers=headers)
    assert response.status_code == 413


async def test_a_window_without_a_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="admin_signature_window needs an admin key"):
        ServerSettings(admin_signature_window=60.0)


async def test_a_key_that_tools_encode_in_different_ways_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs admin keys of ASCII") as caught:
        ServerSettings(
            admin_keys=[KEY, "clé"], admin_signature_window=60.0, allowed_hosts=["server"]
        )
    assert "clé" not in str(caught.value)


async def test_a_clock_that_was_set_back_is_told() -> None:
    now = 1_000_000.0
    transport = httpx.ASGITransport(guarded([], lambda: now))
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        now -= 600
        response = await client.post(PATH, content=BODY, headers=signed(now))
    assert error_of(response) == (401, "invalid_signature")
    message = response.json()["error"]["message"]
    assert "the start of this server at 1000000, and its clock is at 999400" in message
    assert "restart the server if its clock was set back" in message


async def test_a_window_without_the_names_of_the_server_is_refused() -> None:
    with pytest.raises(ConfigError, match="admin_signature_window needs the names of this server"):
        ServerSettings(admin_keys=[KEY], admin_signature_window=60.0)


@pytest.mark.skipif(
    not (shutil.which("curl") and shutil.which("openssl")), reason="curl or openssl is missing"
)
async def test_the_lines_of_the_page_give_an_order(
    engine: StandInEngine, serving: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "server" / "security.md").read_text()
    section = page.partition("## Signed calls")[2]
    (block,) = re.findall(r"```console\n(.*?)```", section, re.DOTALL)[:1]
    script = re.sub(r"^\$ ", "", block, flags=re.MULTILINE)
    assert script.count("curl ") == 1
    monkeypatch.setenv("VLLM_ADMIN_TOKEN", KEY)
    settings = {"admin_signature_window": WINDOW_S, "allowed_hosts": ["127.0.0.1"]}
    async with serving(admin_keys=[KEY], **settings) as url:
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-ec", script.replace("127.0.0.1:8000", url.removeprefix("http://"))),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        answer, _ = await asyncio.wait_for(process.communicate(), 30)
    assert b'"new_running":7' in answer
    assert [order.force_evict for order in engine.orders] == [4]
