"""The answer to requests that the server cancels because they still run when it stops."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.server.errors import server_stopping
from trencadis.server.http.error_response import ErrorResponse


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
