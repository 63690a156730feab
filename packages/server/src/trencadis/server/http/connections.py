"""Limits of connections: how many are open, and how long each may wait for its client.

A connection costs a file descriptor before any key is read. Without limits, clients that send or
read nothing take them all, and no other client is answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import select
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import attrs
import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from trencadis.server.errors import ApiError
from trencadis.server.http.error_response import ErrorResponse
from trencadis.server.http.paths import is_probe

logger = logging.getLogger("trencadis.server")

MAX_CONNECTIONS = 16_384
PROBE_CONNECTIONS = 128
"""Connections above the limit, for probes alone: more than are accepted before they are read."""

_RESERVED_DESCRIPTORS = 48 + PROBE_CONNECTIONS
"""For files, pipes and sockets that the server opens later."""

_LOG_INTERVAL = 10.0
"""Seconds between two log lines about rejected connections."""

_LEAST_SENT_BYTES = 65_536
"""What a client has to receive of a large answer within ``send_timeout``."""

_MOST_SPARED = 256
"""How many are looked at for the one to close."""


def raise_descriptor_limit() -> int:
    """Allow as many open files as the system permits. The limit that is now in force."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def default_connection_limit(max_descriptors: int) -> int:
    """How many connections fit beside the files that are open now."""
    descriptors = Path("/proc/self/fd")
    used = len(list(descriptors.iterdir())) if descriptors.is_dir() else 32
    if max_descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, max_descriptors - used - _RESERVED_DESCRIPTORS))


class OpenConnection(Protocol):
    """A connection that `ConnectionLimits` may close."""

    @property
    def has_new_input(self) -> bool:
        """Whether its client has sent its first bytes, and they were not read yet."""

    def disconnect(self) -> None:
        """Close it at once, with what it has not sent yet."""


@attrs.define(eq=False)
class ConnectionLimits:
    """How many connections are open, and the seconds that each waits for its client.

    ``header_timeout``: for the TLS handshake, and for the headers of a request. ``body_timeout``:
    for the rest of a body after the answer. ``send_timeout``: for `_LEAST_SENT_BYTES` of an answer,
    or all that is left of it.

    ``waiting`` has the connections that wait for their client, the longest wait first. Above
    ``max_connections`` that one is closed, so that clients that do nothing keep no other client
    out. Where none does, `PROBE_CONNECTIONS` more are answered if they ask for a probe.
    """

    max_connections: int
    header_timeout: float
    body_timeout: float
    send_timeout: float
    retry_after: int
    waiting: dict[OpenConnection, None] = attrs.field(init=False, factory=dict)
    _logged_at: float = attrs.field(init=False, default=float("-inf"))

    def make_room(self, connections: set[Any]) -> None:
        """Close a connection that waits for its client, if there are more than the limit.

        The newest one is not in ``waiting`` yet.
        """
        if len(connections) > self.max_connections:
            self._log_excess(asyncio.get_running_loop().time())
            if (idle := self._longest_waiting()) is not None:
                connections.discard(idle)
                idle.disconnect()

    def _longest_waiting(self) -> OpenConnection | None:
        """The connection to close: none whose first request is about to be read, because many are
        accepted before the first of them is read."""
        oldest = islice(self.waiting, _MOST_SPARED)
        return next((each for each in oldest if not each.has_new_input), None)

    def _log_excess(self, now: float) -> None:
        """Log that there are too many connections, at most once in `_LOG_INTERVAL`."""
        if now - self._logged_at >= _LOG_INTERVAL:
            self._logged_at = now
            logger.warning(
                "%d connections are open: those that wait for their client are closed, then new "
                "ones are rejected. Raise --max-connections and the limit of open files "
                "(ulimit -n), or find the client that keeps them",
                self.max_connections,
            )


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with `ConnectionLimits`."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._has_received = False
        self._read_timer: asyncio.TimerHandle | None = None
        self._timed_state: object = None
        """What the client has not finished sending: ``_read_timer`` is the limit of this."""
        self._send_timer: asyncio.TimerHandle | None = None
        self._num_unsent = 0
        """Bytes that waited for the client when ``_send_timer`` was started."""

    @property
    def has_new_input(self) -> bool:
        """Whether its client has sent its first bytes, and they were not read yet."""
        return not self._has_received and is_readable(self.transport)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Any byte that the client does not take pauses the answers and starts their time limit.
        transport.set_write_buffer_limits(high=1)
        self._limits.make_room(self.connections)
        num_over = len(self.connections) - self._limits.max_connections
        if num_over > PROBE_CONNECTIONS:
            transport.write(_refusal(self._limits))
            transport.close()
            return
        if num_over > 0:
            self.app = _ProbesAlone(self.app, self._limits)
        self._watch_client()

    def data_received(self, data: bytes) -> None:
        self._has_received = True
        if self.transport.is_closing():
            return
        super().data_received(data)
        self._watch_client()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing():
            self._watch_client(is_idle=True)

    def pause_writing(self) -> None:
        """The client has not received all that was sent."""
        super().pause_writing()
        self._limit_sending()
        self._watch_client()

    def resume_writing(self) -> None:
        """The client has received all that was sent."""
        super().resume_writing()
        _cancel(self._send_timer)
        self._send_timer = None
        self._watch_client()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or close the connection where the answer has begun already."""
        if self.cycle is not None:
            self.cycle.disconnected = True
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def disconnect(self) -> None:
        """Close the connection at once, with what it has not sent yet."""
        self._forget()
        self.transport.abort()

    def _watch_client(self, *, is_idle: bool = False) -> None:
        """Note whether the connection waits for its client, and limit for how long.

        ``is_idle``: an answer has just ended. Until the first byte of a next request uvicorn limits
        the time.
        """
        is_served = self.cycle is not None and not self.cycle.response_complete
        state = self.conn.their_state
        is_sending = state in (h11.IDLE, h11.SEND_BODY)
        if is_sending or self.flow.write_paused:
            self._limits.waiting.setdefault(self)
        else:
            self._limits.waiting.pop(self, None)
        # The body of a request that is served is limited by `BodyLimit`.
        timed = state if is_sending and not is_served and not is_idle else None
        if is_idle and state is h11.SEND_BODY:
            timed = state
        if timed is self._timed_state:  # more bytes do not extend the time
            return
        _cancel(self._read_timer)
        self._read_timer, self._timed_state = None, timed
        if timed is not None:
            limits = self._limits
            seconds = limits.header_timeout if timed is h11.IDLE else limits.body_timeout
            self._read_timer = self.loop.call_later(seconds, self.disconnect)

    def _limit_sending(self) -> None:
        _cancel(self._send_timer)
        self._num_unsent = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self._limits.send_timeout, self._check_sending)

    def _check_sending(self) -> None:
        num_sent = self._num_unsent - self.transport.get_write_buffer_size()
        if num_sent < min(self._num_unsent, _LEAST_SENT_BYTES):
            self.disconnect()
        else:
            self._limit_sending()

    def _forget(self) -> None:
        _cancel(self._read_timer)
        _cancel(self._send_timer)
        self._limits.waiting.pop(self, None)


class _ProbesAlone:
    """ASGI app of a connection above the limit: a probe is answered, all else is rejected."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"connection", b"close")]
                message = {**message, "headers": headers}
            await send(message)

        app = self._app if is_probe(scope) else ErrorResponse(_too_many(self._limits))
        await app(scope, receive, send_last)


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def is_readable(transport: asyncio.BaseTransport) -> bool:
    """Whether a client has sent bytes that were not read yet."""
    socket = transport.get_extra_info("socket")
    if socket is None or socket.fileno() < 0:  # it was closed meanwhile
        return False
    poll = select.poll()  # not select(), which takes no descriptor above 1023
    poll.register(socket.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def quiet_accept_errors(
    log: Callable[[str], None],
) -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An exception handler of the event loop that writes no traceback when descriptors run out.

    asyncio reports the error once for each connection of the backlog, each second.
    """
    logged_at = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal logged_at
        if "out of system resource" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif loop.time() - logged_at >= _LOG_INTERVAL:
            logged_at = loop.time()
            log(f"No connection is accepted for a second: {context.get('exception')}")

    return handle


def _too_many(limits: ConnectionLimits) -> ApiError:
    return ApiError(
        503,
        "too many connections are open: close some, or try again later",
        headers={"Retry-After": str(limits.retry_after)},
    )


def _refusal(limits: ConnectionLimits) -> bytes:
    body = json.dumps(_too_many(limits).body).encode()
    lines = (
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"retry-after: {limits.retry_after}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body
