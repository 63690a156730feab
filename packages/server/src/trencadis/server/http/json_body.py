"""Request bodies as checked models, which are made beside the event loop.

FastAPI would parse and check a body in the event loop, where all streams wait for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Annotated, Any, TypeAlias, TypeVar, get_type_hints

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, SkipValidation, ValidationError
from starlette.exceptions import HTTPException

from trencadis.engine import EngineError, EngineOverloaded, FairThread
from trencadis.server.errors import ApiError
from trencadis.server.http.api_keys import key_name
from trencadis.server.http.cancelled_requests import unless_disconnected
from trencadis.server.http.json_decoder import decoded

T = TypeVar("T")
ModelT = TypeVar("ModelT", bound=BaseModel)

Checked: TypeAlias = Annotated[ModelT, SkipValidation]
"""The type of a route's parameter ``body``: FastAPI describes it, and `JsonBodies` checks it."""

_SHORT_BYTES = 16_384
"""A body that is checked at once: a millisecond, or few where it is hostile."""

_LONG_BYTES = 262_144
"""A longer body has a thread that other bodies do not wait for."""

_PAUSE_SECONDS = 0.001
"""After each millisecond of decoding."""


class JsonBodies:
    """Checks long bodies in threads, those of API keys in rotation.

    At most ``max_bytes`` of bodies wait for it, and half of them are of one key; a further body
    raises `EngineOverloaded`.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._thread = FairThread("bodies")
        self._long = FairThread("bodies-long")
        self._waiting: Counter[str] = Counter()
        """Bytes that wait, by the name of the API key."""

    def close(self) -> None:
        """End the threads. Requests that wait for them are cancelled."""
        self._thread.close()
        self._long.close()

    @property
    def route_class(self) -> type[APIRoute]:
        """The routes whose handler has a parameter ``body: Checked[...]``.

        They answer 415 unless a request declares its body as JSON: a web page can make a browser
        send other media types to a server on the user's machine without asking that server. For
        JSON the browser asks first (a CORS preflight), and this server rejects.
        """
        bodies = self

        class CheckedRoute(APIRoute):
            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                handler = super().get_route_handler()
                model = get_type_hints(self.endpoint)["body"]

                async def checked(request: Request) -> Response:
                    require_json(request)
                    # Not request.body(), which would keep the bytes as long as the answer lasts.
                    content = b"".join([chunk async for chunk in request.stream()])
                    is_long = len(content) > _SHORT_BYTES
                    work = bodies.checked(content, model, key_name(request.scope))
                    if is_long:  # it may wait for others, and its client may leave
                        body = await unless_disconnected(request.receive, work)
                    else:
                        body = await work
                    return await handler(_CheckedRequest(request, body, is_long))

                return checked

        return CheckedRoute

    async def checked(self, content: bytes, model: type[ModelT], client: str) -> ModelT:
        """A body as ``model``. Raises what the handlers of errors answer with 400 or 503."""
        if len(content) <= _SHORT_BYTES:
            return _checked(content, model, json.loads)
        most = self._max_bytes // 2 if client else self._max_bytes
        left = min(self._max_bytes - self._waiting.total(), most - self._waiting[client])
        if len(content) > left:
            raise EngineOverloaded("too many long requests are being read: try again later")
        self._waiting[client] += len(content)
        try:
            work = partial(_checked, content, model, _decoded_with_pauses)
            thread = self._long if len(content) > _LONG_BYTES else self._thread
            return await asyncio.wrap_future(thread.submit(client, work))
        finally:
            self._waiting[client] -= len(content)
            if not self._waiting[client]:
                del self._waiting[client]

    async def translated(
        self, request: Request, translate: Callable[[], T], num_bytes: int = 0
    ) -> T:
        """What ``translate`` makes of the body of ``request``, in the thread if that is long.

        ``num_bytes``: of what it reads besides.
        """
        is_short = isinstance(request, _CheckedRequest) and not request.is_long
        if is_short and num_bytes <= _SHORT_BYTES:
            return translate()
        work = self._thread.submit(key_name(request.scope), translate)
        return await asyncio.wrap_future(work)


class _CheckedRequest(Request):
    """A request whose body is a checked model already."""

    def __init__(self, request: Request, checked: BaseModel, is_long: bool) -> None:
        super().__init__(request.scope, request.receive)
        self._checked = checked
        self.is_long = is_long

    async def body(self) -> bytes:
        return b"{}"  # FastAPI asks whether there is any

    async def json(self) -> BaseModel:
        return self._checked


def _decoded_with_pauses(content: bytes) -> Any:
    return decoded(content, partial(time.sleep, _PAUSE_SECONDS))


def _checked(content: bytes, model: type[ModelT], decode: Callable[[bytes], Any]) -> ModelT:
    if not content:
        missing = {"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}
        raise RequestValidationError([missing])
    try:
        value = decode(content)
    except json.JSONDecodeError as error:
        invalid = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([invalid]) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, EngineError):
            raise
        raise HTTPException(400) from error
    try:
        return model.model_validate(value)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        located = [{**each, "loc": ("body", *each["loc"])} for each in errors]
        raise RequestValidationError(located) from None


def require_json(request: Request) -> None:
    """Raise 415 unless the request declares its body as JSON."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        given = f"got {media_type!r}" if media_type else "there is none"
        raise ApiError(415, f"the Content-Type header must be application/json, {given}")
