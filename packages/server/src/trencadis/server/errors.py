"""Errors of the server, and the HTTP status and error object of every error.

Routes do not catch errors of other layers. `as_api_error` maps each of them, for a plain response
and for an event of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.engine import (
    BucketMiss,
    EngineDead,
    EngineError,
    EngineOverloaded,
    EngineRestarting,
    EngineSleeping,
    EngineUnresponsive,
    InvalidRequest,
    ModelNotActiveError,
    ProcessUnresponsive,
    SwitchFailedError,
    SwitchInProgressError,
    UnknownModelError,
)

_MAX_MESSAGE = 600


class ApiError(Exception):
    """An error response: HTTP status and error object.

    ``param`` names the invalid field as the client wrote it (``messages[0].content``). ``code``
    is for code (``context_length_exceeded``).
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
        """The JSON object that clients of the OpenAI API receive."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The JSON object that clients of the Anthropic API receive.

        The types are those of https://docs.anthropic.com/en/api/errors. ``param`` and ``code`` are
        ours: they say what the type leaves open.
        """
        kind = _ANTHROPIC_TYPES.get(self.status, "api_error")
        if self.code == "engine_overloaded":
            kind = "overloaded_error"
        error = {"type": kind, "message": self.message, "param": self.param, "code": self.code}
        return {"type": "error", "error": error}


_ANTHROPIC_TYPES = {
    **dict.fromkeys((400, 405, 408, 415), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""The type of an error in the Anthropic API by HTTP status; others are ``api_error``."""


def server_stopping(retry_after: int = 1) -> ApiError:
    """The error of a request that the server cancels, because it stops.

    ``retry_after``: see `as_api_error`.
    """
    return ApiError(
        503,
        "the server stops, and this request has not finished in time: send it again",
        code="server_stopping",
        headers={"Retry-After": str(retry_after), "Connection": "close"},
    )


class RequestAbortedError(EngineError):
    """The engine aborted a running request, for example because the engine stops."""


class ClientDisconnectedError(Exception):
    """The client disconnected before its response was complete."""


_UNAVAILABLE: tuple[tuple[type[EngineError], str, bool], ...] = (
    (SwitchInProgressError, "model_switching", True),
    (ModelNotActiveError, "model_switching", True),
    (EngineSleeping, "engine_sleeping", False),
    (EngineOverloaded, "engine_overloaded", True),
    (EngineRestarting, "engine_restarting", True),
    (EngineUnresponsive, "engine_unresponsive", False),
    (EngineDead, "engine_dead", False),
    (ProcessUnresponsive, "process_unresponsive", True),
    (BucketMiss, "bucket_miss", False),
    (RequestAbortedError, "request_aborted", True),
)
"""Errors with status 503: type, code, and whether the client is told to try again later. A type
precedes those that it is derived from."""


def as_api_error(error: Exception, retry_after: int = 1) -> ApiError:
    """The error response for an error that was raised while a request was served.

    ``retry_after`` is the delay, in seconds, that a client is told where a later try may succeed.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    if isinstance(error, UnknownModelError):
        return ApiError(404, str(error), param="model", code="model_not_found")
    if isinstance(error, SwitchFailedError):
        return ApiError(500, str(error), code="model_switch_failed")
    for kind, code, may_retry in _UNAVAILABLE:
        if isinstance(error, kind):
            headers = {"Retry-After": str(retry_after)} if may_retry else None
            return ApiError(503, str(error) or code, code=code, headers=headers)
    return ApiError(500, "internal error: see the server's log", code="internal_error")


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
