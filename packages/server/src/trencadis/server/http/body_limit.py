"""The bound on request bodies, in bytes and in seconds, kept before anything is parsed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.server.errors import ApiError, ClientDisconnectedError

DRAIN_FACTOR = 8
"""A body of up to this many limits is read to its end and dropped, so that its sender is still
listening when the refusal comes; a longer one has its connection closed instead."""


class BodyLimit:
    """ASGI middleware: reads the body of a request, whole, within a size and a time.

    Refuses a longer body with 413 and a slower one with 408. The size is counted as it arrives;
    a ``Content-Length`` only makes the refusal earlier.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout = timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope), receive)
        except ApiError as error:
            # closing the connection spares us whatever of the body was not read
            headers = {"Connection": "close"}
            response = JSONResponse(error.body, status_code=error.status, headers=headers)
            await response(scope, receive, send)
        except ClientDisconnectedError:
            return
        else:
            await self.app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        declared = headers.get("content-length", "0")
        size = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
        waits_for_leave = headers.get("expect", "").lower() == "100-continue"
        if size > self.max_bytes and (waits_for_leave or size > DRAIN_FACTOR * self.max_bytes):
            raise self._too_large()
        chunks: list[bytes] = []
        received = 0
        with anyio.move_on_after(self.timeout) as time:
            async with aclosing(_chunks(receive)) as incoming:
                async for chunk in incoming:
                    received += len(chunk)
                    if received <= self.max_bytes:
                        chunks.append(chunk)
                    elif received > DRAIN_FACTOR * self.max_bytes:
                        break
        if received > self.max_bytes:
            raise self._too_large()
        if time.cancelled_caught:
            message = f"the body did not arrive within {self.timeout:g} seconds"
            raise ApiError(408, message, code="request_timeout")
        return b"".join(chunks)

    def _too_large(self) -> ApiError:
        message = (
            f"the body is larger than {self.max_bytes} bytes: send less, "
            "or start the server with a larger --max-body-size"
        )
        return ApiError(413, message, code="request_too_large")


async def _chunks(receive: Receive) -> AsyncGenerator[bytes, None]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnectedError
        yield message.get("body", b"")
        more = message.get("more_body", False)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that hands out a body already read, then whatever comes after it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
