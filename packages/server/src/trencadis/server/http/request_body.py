"""What the body of a request must be: JSON, and within limits of bytes and seconds."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import anyio
from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.server.errors import ApiError, ClientDisconnectedError
from trencadis.server.http.error_response import ErrorResponse

DRAIN_FACTOR = 8
"""A body larger than the limit, but not larger than this multiple of it, is read to its end and
discarded: many clients read the error response only after they sent the body. For a larger body
the connection is closed."""


class BodyLimit:
    """ASGI middleware: reads the complete body of a request, then calls the app.

    Answers 413 if the body is larger than ``max_bytes`` bytes, and 408 if it does not arrive within
    ``timeout`` seconds. It counts the bytes that arrive; a ``Content-Length`` header above the
    limit only makes the error response earlier.
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
            error.headers["Connection"] = "close"  # the rest of the body need not be read
            await ErrorResponse(error)(scope, receive, send)
        except ClientDisconnectedError:
            return
        else:
            await self.app(scope, replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        declared = headers.get("content-length", "0")
        size = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
        waits_for_continue = headers.get("expect", "").lower() == "100-continue"
        if size > self.max_bytes and (waits_for_continue or size > DRAIN_FACTOR * self.max_bytes):
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


def replay(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that returns the body that was read, then the messages that follow it."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


def require_json(request: Request) -> None:
    """Raise 415 unless the request declares its body as JSON. A FastAPI dependency.

    A web page can make a browser send other media types to a server on the user's machine without
    asking that server. For JSON the browser asks first (a CORS preflight), and this server rejects.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        given = f"got {media_type!r}" if media_type else "there is none"
        raise ApiError(415, f"the Content-Type header must be application/json, {given}")
