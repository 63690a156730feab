"""What the body of a request must be: JSON, and within limits of bytes and seconds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager

import anyio
import attrs
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.server.errors import ApiError, ClientDisconnectedError
from trencadis.server.http.error_response import ErrorResponse

DRAIN_FACTOR = 8
"""A body larger than the limit, but not larger than this multiple of it, is read to its end and
discarded: many clients read the error response only after they sent the body. For a larger body
the connection is closed."""


UNREAD_FACTOR = 16
"""The bytes of all bodies that are not complete, as a multiple of the limit of one."""

MAX_ORDER_BYTES = 65_536
"""Most bytes of an order of an administrator. Orders are short."""


@attrs.define(eq=False)
class _Arrival:
    """A body that is not complete. ``time`` is the scope of its reading."""

    time: anyio.CancelScope
    num_bytes: int = 0
    is_refused: bool = False


class BodyLimit:
    """ASGI middleware: reads the complete body of a request, then calls the app.

    Bodies that are not complete have at most `UNREAD_FACTOR` times ``max_bytes`` together: above
    that, the one that has been arriving for longest is answered with 503. ``is_order``: requests
    whose body has at most `MAX_ORDER_BYTES`. ``is_streamed``: those that the app reads itself.

    Answers 413 if the body is larger than ``max_bytes`` bytes, and 408 if it does not arrive within
    ``timeout`` seconds. It counts the bytes that arrive; a ``Content-Length`` header above the
    limit only makes the error response earlier.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        timeout: float,
        retry_after: int = 1,
        is_order: Callable[[Scope], bool] = lambda _: False,
        is_streamed: Callable[[Scope], bool] = lambda _: False,
    ) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout = timeout
        self._retry_after = retry_after
        self._is_order = is_order
        self._is_streamed = is_streamed
        self._arriving: dict[_Arrival, None] = {}
        """The bodies that are not complete, oldest first."""
        self._num_unread = 0
        """Bytes of ``_arriving`` together."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        if self._is_streamed(scope):
            await self.app(scope, receive, send)
            return
        most = self.max_bytes
        if self._is_order(scope):
            most = min(most, MAX_ORDER_BYTES)
        try:
            body = await self._read(Headers(scope=scope), receive, most)
        except ApiError as error:
            error.headers["Connection"] = "close"  # the rest of the body need not be read
            await ErrorResponse(error)(scope, receive, send)
        except ClientDisconnectedError:
            return
        else:
            await self.app(scope, replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive, most: int) -> bytes:
        declared = headers.get("content-length", "0")
        size = int(declared) if declared.isdecimal() and len(declared) < 20 else 0
        waits_for_continue = headers.get("expect", "").lower() == "100-continue"
        if size > most and (waits_for_continue or size > DRAIN_FACTOR * most):
            raise _too_large(most)
        body = bytearray()
        received = 0
        with anyio.move_on_after(self.timeout) as time, self._arrival(time) as arrival:
            async with aclosing(_chunks(receive)) as incoming:
                async for chunk in incoming:
                    received += len(chunk)
                    if received <= most:
                        body += chunk
                        self._count(arrival, len(chunk))
                    elif received > DRAIN_FACTOR * most:
                        break
        if arrival.is_refused:
            raise ApiError(
                503,
                "too many requests are being sent, and this one has been incomplete for longest: "
                "send it again later",
                code="too_many_bodies",
                headers={"Retry-After": str(self._retry_after)},
            )
        if received > most:
            raise _too_large(most)
        if time.cancelled_caught:
            message = f"the body did not arrive within {self.timeout:g} seconds"
            raise ApiError(408, message, code="request_timeout")
        return bytes(body)

    @contextmanager
    def _arrival(self, time: anyio.CancelScope) -> Iterator[_Arrival]:
        arrival = _Arrival(time)
        self._arriving[arrival] = None
        try:
            yield arrival
        finally:
            self._forget(arrival)

    def _count(self, arrival: _Arrival, num_bytes: int) -> None:
        arrival.num_bytes += num_bytes
        self._num_unread += num_bytes
        while self._num_unread > UNREAD_FACTOR * self.max_bytes:
            oldest = next(iter(self._arriving))
            oldest.is_refused = True
            oldest.time.cancel()
            self._forget(oldest)

    def _forget(self, arrival: _Arrival) -> None:
        if arrival in self._arriving:
            del self._arriving[arrival]
            self._num_unread -= arrival.num_bytes


def _too_large(most: int) -> ApiError:
    message = (
        f"the body is larger than {most} bytes: send less, "
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
