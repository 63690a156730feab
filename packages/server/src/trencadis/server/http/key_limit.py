"""The limit of requests that one API key has in progress."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from trencadis.server.errors import ApiError
from trencadis.server.http.api_keys import key_name
from trencadis.server.http.error_response import ErrorResponse
from trencadis.server.http.paths import is_cancel

logger = logging.getLogger("trencadis.server")

_LOG_SECONDS = 60.0
"""Shortest time between two log lines about the same key."""


class KeyLimit:
    """ASGI middleware: answers 429 where an API key has ``most`` requests in progress.

    A streamed request is in progress until the stream ends, and one in the background, of which
    ``num_background`` returns how many a key has, until its response has ended. Requests without a
    body (GET, DELETE) and those that cancel a response do not count. ``retry_after`` is the delay,
    in seconds, that the client is told. ``count_refused`` is called with the name of the key.
    ``clock`` counts seconds.
    """

    def __init__(
        self,
        app: ASGIApp,
        most: int,
        retry_after: int,
        count_refused: Callable[[str], None],
        num_background: Callable[[str], int] = lambda name: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.app = app
        self._most = most
        self._retry_after = retry_after
        self._count_refused = count_refused
        self._num_background = num_background
        self._clock = clock
        self._num_requests: Counter[str] = Counter()
        self._logged_s: dict[str, float] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        counts = scope["type"] == "http" and scope["method"] == "POST" and not is_cancel(scope)
        name = key_name(scope) if counts else ""
        if not name:
            await self.app(scope, receive, send)
            return
        if self._num_requests[name] + self._num_background(name) >= self._most:
            await self._refuse(name)(scope, receive, send)
            return
        self._num_requests[name] += 1
        try:
            await self.app(scope, receive, send)
        finally:
            self._num_requests[name] -= 1

    def _refuse(self, name: str) -> ErrorResponse:
        self._count_refused(name)
        now_s = self._clock()
        if now_s - self._logged_s.get(name, -_LOG_SECONDS) >= _LOG_SECONDS:
            self._logged_s[name] = now_s
            logger.warning(
                "The API key %s has %d requests in progress: more are rejected with 429",
                name,
                self._most,
            )
        error = ApiError(
            429,
            f"{self._most} requests of this API key are in progress: wait until one has ended",
            code="rate_limit_exceeded",
            headers={"Retry-After": str(self._retry_after)},
        )
        return ErrorResponse(error)
