"""Bodies that are too large or too slow are rejected before they are complete."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx
import pytest

from trencadis.server import create_app
from trencadis.server.http.request_body import BodyLimit

pytestmark = pytest.mark.asyncio

JSON = {"Content-Type": "application/json"}


def assert_too_large(response, limit):
    assert response.status_code == 413
    error = response.json()["error"]
    assert str(limit) in error["message"]
    assert "--max-body-size" in error["message"]
    assert error["code"] == "request_too_large"
    assert error["type"] == "invalid_request_error"


async def test_a_message_that_does_not_say_that_more_follow_is_the_last_one(engine):
    """As ASGI has it: a server may leave ``more_body`` out."""
    sent = []
    messages = iter([{"type": "http.request", "body": b'{"prompt": "a"}'}])

    async def receive():
        if (message := next(messages, None)) is None:
            await asyncio.sleep(3600)
        return message

    async def send(message):
        sent.append(message)

    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"},
        **{"scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions"},
        **{"query_string": b"", "root_path": "", "client": ("c", 1), "server": ("s", 80)},
        "headers": [(b"content-type", b"application/json"), (b"host", b"s")],
    }
    await asyncio.wait_for(create_app(engine)(scope, receive, send), 60)
    assert sent[0]["status"] == 200


async def test_five_megabytes_are_refused_by_default(url):
    body = b'{"prompt": "' + b"x" * 5_000_000 + b'"}'
    async with httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/completions", content=body, headers=JSON)
        assert_too_large(response, 4 * 1024 * 1024)
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


async def test_a_body_of_the_limit_is_read_and_one_byte_more_is_not(serving):
    async with serving(max_body_size=100) as url, httpx.AsyncClient(base_url=url) as client:
        body = b'{"prompt": "a"}'.ljust(100)
        response = await client.post("/v1/completions", content=body, headers=JSON)
        assert response.status_code == 200
        response = await client.post("/v1/completions", content=body + b" ", headers=JSON)
        assert_too_large(response, 100)


@pytest.mark.parametrize(("length", "is_read"), [(800, True), (801, False)])
async def test_up_to_eight_times_the_limit_is_read_before_the_answer(serving, length, is_read):
    async with serving(max_body_size=100) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n"
        writer.write(head.encode() + b" " * (length - 1))
        with suppress(asyncio.TimeoutError):
            answer = await asyncio.wait_for(reader.read(), 0.2 if is_read else 60)
            assert not is_read
        writer.write(b" ")
        if is_read:
            answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize("declared", ["9" * 19, "9" * 20, "9" * 5000, "+5", "-5", "x", ""])
async def test_a_declared_length_that_is_no_size_does_not_count(engine, declared):
    """Servers reject most of these themselves: an app may be behind another one."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b'{"prompt": "a"}'}

    async def send(message):
        sent.append(message)

    scope = {
        **{"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST"},
        **{"scheme": "http", "path": "/v1/completions", "raw_path": b"/v1/completions"},
        **{"query_string": b"", "root_path": "", "client": ("c", 1), "server": ("s", 80)},
        "headers": [
            (b"content-type", b"application/json"),
            (b"host", b"s"),
            (b"content-length", declared.encode()),
        ],
    }
    app = BodyLimit(echo, max_bytes=100, timeout=60)
    await app(scope, receive, send)
    assert sent[0]["status"] == (413 if len(declared) == 19 else 200)


async def echo(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": (await receive())["body"]})


async def test_a_body_without_a_length_is_counted_as_it_arrives(serving):
    async def chunks():
        for _ in range(5):
            yield b" " * 50

    async with serving(max_body_size=100) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.post("/v1/completions", content=chunks(), headers=JSON)
        assert_too_large(response, 100)


async def test_an_endless_body_is_cut_off(serving):
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 10_000
            yield b" " * 10_000

    async with (
        serving(max_body_size=1000) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        try:
            response = await client.post("/v1/completions", content=endless(), headers=JSON)
        except httpx.HTTPError:
            pass  # the connection was closed while the client still wrote
        else:
            assert_too_large(response, 1000)
    assert sent < 50_000_000


async def test_a_huge_declared_length_is_refused_unread(serving):
    async with serving(max_body_size=1000) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9999999\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answer.lower()


async def test_a_client_that_asks_first_is_told_before_it_sends(serving):
    async with serving(max_body_size=1000) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2000\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413")


async def test_a_body_that_never_ends_arriving_is_refused(serving):
    async with serving(body_timeout=0.2) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"request_timeout" in answer


async def test_a_client_that_disconnects_while_sending_starts_no_request(serving, engine):
    async with serving() as url:
        _, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 20\r\n\r\n{")
        await asyncio.sleep(0.05)
        writer.close()
        await asyncio.sleep(0.05)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200
    assert not engine.requests


async def test_bodies_that_are_not_complete_have_a_bound_together(serving):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    async with serving(max_body_size=1000) as url:
        address = url.removeprefix("http://").split(":")
        slow = [await asyncio.open_connection(*address) for _ in range(20)]
        for _, writer in slow:
            writer.write(head + b"Content-Length: 1000\r\n\r\n" + b" " * 900)
            await asyncio.sleep(0.02)
        for reader, writer in slow[:3]:  # 16 times the limit of one body are left
            answer = await asyncio.wait_for(reader.read(), 60)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after: 1" in answer.lower()
            writer.close()
        async with httpx.AsyncClient(base_url=url) as client:
            body = b'{"prompt": "a"}'.ljust(1000)
            response = await client.post("/v1/completions", content=body, headers=JSON)
            assert response.status_code == 200
        reader, writer = slow[-1]
        writer.write(b'{"prompt": "a"}'.rjust(100))
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)
        for _, writer in slow[3:]:
            writer.close()


async def test_an_order_of_an_administrator_is_short(serving):
    key = {"Authorization": "Bearer boss"}
    async with (
        serving(admin_keys=["boss"]) as url,
        httpx.AsyncClient(base_url=url, headers=key) as client,
    ):
        for padding, status in ((65_536, 200), (65_537, 413)):
            body = b'{"max_num_seqs": 3}'.ljust(padding)
            response = await client.post("/v1/admin/batch", content=body)
            assert response.status_code == status
