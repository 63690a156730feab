"""Errors of the server, and the HTTP status and OpenAI error object of every error.

Routes do not catch errors of other layers. `as_api_error` maps each of them, for a plain response
and for an event of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from trencadis.engine import (
    BucketMiss,
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineRestarting,
    EngineUnresponsive,
    InvalidRequest,
)

_MAX_MESSAGE = 600


class ApiError(Exception):
    """An error response: HTTP status and OpenAI error object.

    ``param`` names the invalid field as the client wrote it (``messages[0].content``). ``code``
    is for programs (``context_length_exceeded``).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = _shortened(message, _MAX_MESSAGE)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON object that clients receive."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JSONResponse:
        """The complete HTTP response."""
        return JSONResponse(self.body, status_code=self.status, headers=self.headers)


class RequestAbortedError(EngineError):
    """The engine aborted a running request, for example because the engine stops."""


class ClientDisconnectedError(Exception):
    """The client disconnected before its response was complete."""


_UNAVAILABLE: tuple[tuple[type[EngineError], str, bool], ...] = (
    (EngineOverloaded, "engine_overloaded", True),
    (EngineRestarting, "engine_restarting", True),
    (EngineUnresponsive, "engine_unresponsive", False),
    (EngineDead, "engine_dead", False),
    (BucketMiss, "bucket_miss", False),
    (RequestAbortedError, "request_aborted", False),
)
"""Errors with status 503: type, code, and whether the client is told to try again later."""


def as_api_error(error: Exception, retry_after: int = 1) -> ApiError:
    """The error response for an error that was raised while a request was served.

    ``retry_after`` is the delay, in seconds, that a client is told where a later try may succeed.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    for kind, code, may_retry in _UNAVAILABLE:
        if isinstance(error, kind):
            headers = {"Retry-After": str(retry_after)} if may_retry else None
            return ApiError(503, str(error) or code, code=code, headers=headers)
    return ApiError(500, "internal error: see the server's log", code="internal_error")


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
