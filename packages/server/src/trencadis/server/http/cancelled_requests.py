"""Requests that end early: their client disconnects, or the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.server.errors import ClientDisconnectedError, server_stopping
from trencadis.server.http.error_response import ErrorResponse

T = TypeVar("T")


class CancelledRequests:
    """ASGI middleware: answers a cancelled request with 503.

    ASGI servers cancel what still runs when the time of a graceful shutdown is over, and answer
    with a plain text. `EventStream` ends itself. ``retry_after``: see `as_api_error`.
    """

    def __init__(self, app: ASGIApp, retry_after: int) -> None:
        self.app = app
        self._retry_after = retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def recorded_send(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self.app(scope, receive, recorded_send)
        except asyncio.CancelledError:
            if scope["type"] != "http" or has_started:
                raise
            await ErrorResponse(server_stopping(self._retry_after))(scope, receive, send)


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of ``work``; cancel it if the client disconnects first.

    The request's body must have been read before. Raises `ClientDisconnectedError`.
    """
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait((task, listener), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        task.cancel()
        listener.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
