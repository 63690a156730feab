"""Server-sent events: a response that is sent event by event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Any, Protocol

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trencadis.server.errors import (
    ApiError,
    ClientDisconnectedError,
    as_api_error,
    server_stopping,
)
from trencadis.server.http.cancelled_requests import unless_disconnected

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """A source of events that holds resources until it is closed."""

    async def aclose(self) -> None: ...


class EventStream(Response):
    """A response that sends ``events``, texts in the format of server-sent events.

    An error in ``events``, and the end of the server, is sent as the text that ``failure`` makes of
    it, because the HTTP status was sent before. ``source``, from which ``events`` are made, is
    closed in every case: the response is complete, the client disconnected, or the client did not
    read for ``send_timeout`` seconds.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        failure: Callable[[ApiError], str],
        source: Closable,
        send_timeout: float,
        request_id: str,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(
            {
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would hold events back
                "X-Request-Id": request_id,
            }
        )
        self._events = _until_failure(events, failure)
        self._failure = failure
        self._source = source
        self._send_timeout = send_timeout
        self._has_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            with suppress(ClientDisconnectedError):
                try:
                    await unless_disconnected(receive, self._send_events(send))
                except TimeoutError:  # the incomplete response makes uvicorn close the connection
                    logger.warning(
                        "Closed a stream: its client did not read for %g seconds",
                        self._send_timeout,
                    )
                except asyncio.CancelledError:  # the time of a graceful shutdown is over
                    if not self._has_started:
                        raise
                    end = self._failure(server_stopping())
                    await send({"type": "http.response.body", "body": end.encode()})

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        self._has_started = True
        with _SendLimit(self._send_timeout) as limit:
            async for text in self._events:
                limit.begin()
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
                limit.end()
            limit.begin()
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _SendLimit:
    """Within it, `TimeoutError` ends what takes more than ``seconds`` from a `begin` to its `end`.

    One timer for a whole stream: a time limit for each event (``anyio.fail_after``) would take a
    quarter of the processor time that an event takes.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._scope = anyio.CancelScope()
        self._began: float | None = None

    def begin(self) -> None:
        self._began = self._loop.time()

    def end(self) -> None:
        self._began = None

    def __enter__(self) -> _SendLimit:
        self._scope.__enter__()
        self._timer = self._loop.call_later(self._seconds, self._check)
        return self

    def __exit__(self, *error: Any) -> None:
        self._timer.cancel()
        self._scope.__exit__(*error)
        if self._scope.cancelled_caught:  # else the error, if any, goes on
            raise TimeoutError

    def _check(self) -> None:
        now = self._loop.time()
        since = now if self._began is None else self._began
        if now - since >= self._seconds:
            self._scope.cancel()
        else:
            self._timer = self._loop.call_at(since + self._seconds, self._check)


async def _until_failure(
    events: AsyncGenerator[str, None], failure: Callable[[ApiError], str]
) -> AsyncGenerator[str, None]:
    try:
        async with aclosing(events):
            async for text in events:
                yield text
    except Exception as error:
        api_error = as_api_error(error)
        if api_error.status == 500:
            logger.exception("a streamed response failed")
        yield failure(api_error)
