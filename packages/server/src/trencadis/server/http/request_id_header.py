"""A name for every response, also where no model answers: ``--enable-request-id-headers``."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trencadis.server.request_ids import REQUEST_ID, given_request_id


class RequestIdHeader:
    """ASGI middleware: adds ``X-Request-Id`` to a response without it, as vLLM's does.

    It is the client's name for the request, or 32 random hexadecimal digits.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = given_request_id(Headers(scope=scope))
                headers = MutableHeaders(raw=message["headers"])
                headers.setdefault(REQUEST_ID, given or uuid.uuid4().hex)
            await send(message)

        await self.app(scope, receive, send_named)
