"""TLS below HTTP: handshakes within the limits of connections, and a log line where one fails.

uvicorn would give each handshake a minute, and count its connection only afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from contextlib import suppress
from typing import Any

from uvicorn.server import ServerState

from trencadis.server.http.connections import ConnectionLimits, LimitedProtocol, is_readable

logger = logging.getLogger("trencadis.server")

_REJECTION_INTERVAL = 1.0
"""Seconds in which failed handshakes are counted after one that was logged."""


class TlsHandshake(asyncio.Protocol):
    """A connection until its TLS handshake has ended; then `LimitedProtocol` has it.

    The handshake has ``header_timeout`` seconds, and the connection counts meanwhile as one that
    waits for its client.
    """

    def __init__(
        self,
        *,
        limits: ConnectionLimits,
        context: ssl.SSLContext,
        server_state: ServerState,
        **kwargs: Any,
    ) -> None:
        self._limits = limits
        self._context = context
        self._connections: set[Any] = server_state.connections
        self._http = LimitedProtocol(limits=limits, server_state=server_state, **kwargs)
        self._early: list[bytes] = []
        """What came with the end of the handshake."""

    @property
    def has_new_input(self) -> bool:
        """Whether its client has sent bytes that were not read yet."""
        return is_readable(self._transport)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)  # noqa: S101  that of a socket
        self._transport = transport
        transport.set_write_buffer_limits(high=1)
        transport.pause_reading()  # the handshake reads from the first byte
        self._connections.add(self)
        self._limits.make_room(self._connections)
        self._limits.waiting[self] = None
        self._task = asyncio.ensure_future(self._shake_hands())

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def disconnect(self) -> None:
        """Close the connection at once."""
        self._forget()
        self._transport.abort()

    shutdown = disconnect
    """What uvicorn calls when the server stops."""

    async def _shake_hands(self) -> None:
        loop = asyncio.get_running_loop()
        limits, raw = self._limits, self._transport
        transport: asyncio.Transport | None = None
        try:
            with suppress(OSError):  # `LoggedHandshake` logs what is not a lost connection
                transport = await loop.start_tls(
                    raw,
                    self,
                    self._context,
                    server_side=True,
                    ssl_handshake_timeout=limits.header_timeout,
                    ssl_shutdown_timeout=limits.header_timeout,
                )
        finally:
            self._forget()
        if transport is None or raw.is_closing():
            return
        transport.set_protocol(self._http)
        self._http.connection_made(transport)
        for data in self._early:
            self._http.data_received(data)

    def _forget(self) -> None:
        self._connections.discard(self)
        self._limits.waiting.pop(self, None)


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
