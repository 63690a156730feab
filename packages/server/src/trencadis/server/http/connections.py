"""Limits of connections: how many are open, and how long a client takes to send the headers.

A connection costs a file descriptor before any key is read. Without a limit, idle ones take them
all, and no other client is answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from trencadis.server.errors import ApiError

logger = logging.getLogger("trencadis.server")

MAX_CONNECTIONS = 16_384
_RESERVED_DESCRIPTORS = 48
"""For files, pipes and sockets that the server opens later."""

_LOG_INTERVAL = 10.0
"""Seconds between two log lines about rejected connections."""

_REJECTION_INTERVAL = 1.0
"""Seconds in which failed handshakes are counted after one that was logged."""


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


@attrs.define(eq=False)
class ConnectionLimits:
    """``header_timeout``: seconds for a client to send the headers of a request.

    ``waiting`` has the connections whose headers are not complete, oldest first. Above
    ``max_connections`` the oldest of them is closed; the newest connection is rejected where there
    is none, so that clients that send nothing keep no other client out.
    """

    max_connections: int
    header_timeout: float
    retry_after: int
    waiting: dict[LimitedProtocol, None] = attrs.field(init=False, factory=dict)
    _logged_at: float = attrs.field(init=False, default=float("-inf"))

    def log_excess(self, now: float) -> None:
        """Log that there are too many connections, at most once in `_LOG_INTERVAL`."""
        if now - self._logged_at >= _LOG_INTERVAL:
            self._logged_at = now
            logger.warning(
                "%d connections are open: those without a request are closed, then new ones are "
                "rejected. Raise --max-connections and the limit of open files (ulimit -n), or "
                "find the client that keeps them",
                self.max_connections,
            )


class LimitedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 with `ConnectionLimits`."""

    def __init__(self, *args: Any, limits: ConnectionLimits, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            self._limits.log_excess(self.loop.time())
            oldest = next(iter(self._limits.waiting), None)
            if oldest is None:
                transport.write(_refusal(self._limits))
                transport.close()
                return
            oldest.disconnect()
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        else:
            self._cancel_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def disconnect(self) -> None:
        """Close the connection at once."""
        self._cancel_timer()
        self.transport.abort()

    def _await_headers(self) -> None:
        """Start the time limit, unless it is running: more bytes do not extend it."""
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self._limits.header_timeout, self.disconnect)
            self._limits.waiting[self] = None

    def _cancel_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
            self._limits.waiting.pop(self, None)


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


def _refusal(limits: ConnectionLimits) -> bytes:
    error = ApiError(503, "too many connections are open: close some, or try again later")
    body = json.dumps(error.body).encode()
    lines = (
        "HTTP/1.1 503 Service Unavailable",
        "content-type: application/json",
        f"content-length: {len(body)}",
        f"retry-after: {limits.retry_after}",
        "connection: close",
    )
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class LoggedHandshake(ssl.SSLObject):
    """The server's side of a TLS connection: logs why a handshake failed.

    Without it, a client that has a right key but no certificate (``--ssl-cert-reqs 2``) leaves no
    line: asyncio drops errors of a handshake. At most two lines a second: one for the first
    failure, and one that counts those of the second after it.
    """

    _num_unlogged = -1
    """Failures within a second of the one that was logged; -1 where none was."""
    _last_error = ""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise  # the handshake goes on
        except ssl.SSLError as error:
            LoggedHandshake._log(str(error))
            raise

    @classmethod
    def _log(cls, error: str) -> None:
        cls._num_unlogged += 1
        cls._last_error = error
        if cls._num_unlogged == 0:
            logger.warning("A TLS client is rejected: %s", error)
            asyncio.get_running_loop().call_later(_REJECTION_INTERVAL, cls.log_unlogged)

    @classmethod
    def log_unlogged(cls) -> None:
        """Log how many failures were not logged, also where the server stops."""
        if cls._num_unlogged > 0:
            logger.warning(
                "%d more TLS clients are rejected, the last one: %s",
                cls._num_unlogged,
                cls._last_error,
            )
        cls._num_unlogged = -1
