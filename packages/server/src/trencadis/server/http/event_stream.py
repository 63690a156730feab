"""Server-sent events: a response that sends one JSON object per event."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Protocol

import anyio
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trencadis.server.errors import ClientDisconnectedError, as_api_error
from trencadis.server.http.disconnect import unless_disconnected

logger = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"
"""The last event of every stream, as the OpenAI API defines it."""


class Closable(Protocol):
    """A source of events that holds resources until it is closed."""

    async def aclose(self) -> None: ...


class EventStream(Response):
    """A response that sends each of ``chunks`` as one event, and then ``[DONE]``.

    An error in ``chunks`` is sent as an event, because the HTTP status was sent before.
    ``source``, from which ``chunks`` are made, is closed in every case: the response is complete,
    the client disconnected, or the client did not read for ``send_timeout`` seconds.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        chunks: AsyncGenerator[BaseModel, None],
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
        self._events = _events(chunks)
        self._source = source
        self._send_timeout = send_timeout

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

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for text in self._events:
            with anyio.fail_after(self._send_timeout):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(chunks: AsyncGenerator[BaseModel, None]) -> AsyncGenerator[str, None]:
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                # no warnings: the type of a text completion's chunk requires a finish_reason
                text = chunk.model_dump_json(exclude_unset=True, warnings=False)
                yield f"data: {text}\n\n"
    except Exception as error:
        api_error = as_api_error(error)
        if api_error.status == 500:
            logger.exception("a streamed response failed")
        yield f"data: {json.dumps(api_error.body)}\n\n"
    yield DONE
