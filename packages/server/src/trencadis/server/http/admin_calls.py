"""What every call of the admin API passes: an audit line, a rate limit, a listener of its own."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.server.errors import ApiError
from trencadis.server.http.auth import AdminCalls
from trencadis.server.http.error_response import ErrorResponse
from trencadis.server.http.paths import DASHBOARD_PATH, is_of_clients, is_under

logger = logging.getLogger("trencadis.server.admin")

_MAX_LOGGED_BYTES = 512
"""Most bytes of an order, and of its answer, in an audit line."""


class AdminAudit:
    """ASGI middleware: logs one line for each admin call, rejected ones too.

    A line has the client's address, the first 8 digits of the SHA-256 of its key, the order, the
    status and the answer. Order and answer are JSON strings, so that no line can be forged.
    """

    def __init__(self, app: ASGIApp, is_admin: AdminCalls) -> None:
        self.app = app
        self._is_admin = is_admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._is_admin(scope):
            await self.app(scope, receive, send)
            return
        order, answer = bytearray(), bytearray()
        status = "no answer"

        async def recorded_receive() -> Message:
            message = await receive()
            _append(order, message.get("body", b""))
            return message

        async def recorded_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            _append(answer, message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, recorded_receive, recorded_send)
        finally:
            host, port = scope.get("client") or ("unknown", 0)
            logger.info(
                "client %s:%d, key %s: %s %s %s -> %s %s",
                host,
                port,
                _fingerprint(Headers(scope=scope)),
                scope["method"],
                json.dumps(scope["path"]),
                _shown(order),
                status,
                _shown(answer),
            )


class AdminRateLimit:
    """ASGI middleware: answers 429 to more than ``per_second`` admin calls a second.

    As many may come at once. ``clock`` counts seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        per_second: float,
        clock: Callable[[], float] = time.monotonic,
        is_admin: AdminCalls | None = None,
    ) -> None:
        self.app = app
        self._is_admin = is_admin or AdminCalls()
        self._per_second = per_second
        self._most = max(1.0, per_second)
        self._clock = clock
        self._saved = self._most
        self._updated_s = clock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wait_s = 0.0
        if scope["type"] == "http" and self._is_admin(scope):
            wait_s = self._take()
        if wait_s > 0:
            error = ApiError(
                429,
                f"more than {self._per_second:g} admin calls a second: try again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(math.ceil(wait_s))},
            )
            await ErrorResponse(error)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _take(self) -> float:
        """Count a call; returns the seconds until it may come, 0 if it may now."""
        now_s = self._clock()
        self._saved = min(self._most, self._saved + (now_s - self._updated_s) * self._per_second)
        self._updated_s = now_s
        if self._saved < 1:
            return (1 - self._saved) / self._per_second
        self._saved -= 1
        return 0.0


class AdminListener:
    """ASGI middleware: the admin API and the dashboard are on ``port`` alone.

    No path of clients is there.
    """

    def __init__(self, app: ASGIApp, port: int, is_admin: AdminCalls) -> None:
        self.app = app
        self._is_admin = is_admin
        self._port = port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_admin = scope["type"] == "http" and (
            self._is_admin(scope) or is_under(scope, DASHBOARD_PATH)
        )
        if is_admin or (scope["type"] == "http" and is_of_clients(scope)):
            _, port = scope.get("server") or ("", None)
            if (port == self._port) != is_admin:
                path = scope["path"]
                error = ApiError(404, f"there is no {scope['method']} {path} on port {port}")
                await ErrorResponse(error)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _append(recorded: bytearray, body: bytes) -> None:
    recorded += body[: _MAX_LOGGED_BYTES + 1 - len(recorded)]


def _shown(recorded: bytearray) -> str:
    cut = len(recorded) > _MAX_LOGGED_BYTES
    text = recorded[:_MAX_LOGGED_BYTES].decode(errors="replace")
    return json.dumps(text) + ("…" if cut else "")


def _fingerprint(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    key = key.strip()
    if not key or scheme.lower() != "bearer":  # a signature that was not accepted
        return "none"
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:8]
