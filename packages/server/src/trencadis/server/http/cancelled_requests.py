"""The end of requests that the server cancels, because they have not finished in time to stop."""

from __future__ import annotations

import asyncio
import json

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.server.errors import ApiError
from trencadis.server.http.event_stream import DONE, EventStream


class CancelledRequests:
    """ASGI middleware: answers a cancelled request with 503, and ends its stream with an error.

    ASGI servers cancel what still runs when the time of a graceful shutdown is over. Their own
    answer is a plain text, or a stream that breaks off. ``retry_after``: see `as_api_error`.
    """

    def __init__(self, app: ASGIApp, retry_after: int) -> None:
        self.app = app
        self._retry_after = retry_after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started: Message | None = None
        is_complete = False

        async def recorded_send(message: Message) -> None:
            nonlocal started, is_complete
            if message["type"] == "http.response.start":
                started = message
            elif message["type"] == "http.response.body":
                is_complete = not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, recorded_send)
        except asyncio.CancelledError:
            if scope["type"] != "http" or is_complete:
                raise
            error = self._error()
            if started is None:
                await error.response()(scope, receive, send)
            elif _is_event_stream(started):
                events = f"data: {json.dumps(error.body)}\n\n{DONE}"
                await send({"type": "http.response.body", "body": events.encode()})
            else:
                raise

    def _error(self) -> ApiError:
        return ApiError(
            503,
            "the server stops, and this request has not finished in time: send it again",
            code="server_stopping",
            headers={"Retry-After": str(self._retry_after), "Connection": "close"},
        )


def _is_event_stream(start: Message) -> bool:
    media_type = Headers(raw=start["headers"]).get("content-type", "")
    return media_type.startswith(EventStream.media_type)
