"""Server-sent events: a response that is sent event by event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from typing import Protocol

import anyio
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trencadis.server.errors import (
    ApiError,
    ClientDisconnectedError,
    as_api_error,
    server_stopping,
)
from trencadis.server.http.disconnect import unless_disconnected

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
        async for text in self._events:
            with anyio.fail_after(self._send_timeout):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


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
