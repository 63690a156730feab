"""Answers to a client that may leave at any moment: one event at a time, or all at once.

A client that leaves is noticed while its answer is being made, not when it is sent; the work for
it is cancelled, which aborts its request in the engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import anyio
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trencadis.server.errors import ClientDisconnectedError, as_api_error
from trencadis.server.generation.choice_stream import ChoiceDelta, Deltas

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = "data: [DONE]\n\n"


async def answer_events(
    deltas: Deltas,
    write: Callable[[ChoiceDelta], Iterable[BaseModel]],
    end: Callable[[], Iterable[BaseModel]],
) -> AsyncGenerator[str, None]:
    """The events of an answer: ``write`` words each delta, ``end`` what follows the last one.

    An error that comes now, when the HTTP status is long sent, is an event of its own.
    """
    try:
        async for item in deltas:
            for chunk in write(item):
                yield _event(chunk)
        for chunk in end():
            yield _event(chunk)
    except Exception as error:
        refusal = as_api_error(error)
        if refusal.status == 500:
            logger.exception("a streamed answer failed")
        yield f"data: {json.dumps(refusal.body)}\n\n"
    yield DONE


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled if the client leaves first.

    Needs a request whose body was read. Raises `ClientDisconnectedError`.
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


class EventStream(Response):
    """A response of server-sent events.

    ``source``, which ``events`` are made of, is closed however the response ends: complete,
    abandoned by the client, or given up because the client took nothing for ``send_timeout``
    seconds.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        source: Deltas,
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
        self._events = events
        self._source = source
        self._send_timeout = send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            with suppress(ClientDisconnectedError):
                try:
                    await unless_disconnected(receive, self._deliver(send))
                except TimeoutError:  # left unfinished, which has the connection closed
                    logger.warning(
                        "A client took nothing for %g seconds: gave it up", self._send_timeout
                    )

    async def _deliver(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for text in self._events:
            with anyio.fail_after(self._send_timeout):
                await send({"type": "http.response.body", "body": text.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(chunk: BaseModel) -> str:
    # without warnings: a text completion's chunk has no finish_reason yet, against its type
    return f"data: {chunk.model_dump_json(exclude_unset=True, warnings=False)}\n\n"
