"""Every failure as the OpenAI API words it: ``{"error": {message, type, param, code}}``.

Routes raise what the failing layer raised; this module alone knows which status and code that
becomes, for a plain response and for an event in the middle of a stream.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from trencadis.engine import EngineDead, EngineError, EngineOverloaded, InvalidRequest

_MAX_MESSAGE = 600


class ApiError(Exception):
    """A refusal with its HTTP status and its OpenAI error object.

    ``param`` names the field at fault as the client wrote it (``messages[0].content``), ``code``
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


class RequestAbortedError(EngineError):
    """The engine gave a running request up, for instance because it is being stopped."""


class ClientDisconnectedError(Exception):
    """The client went away before its answer was complete; nobody reads what follows."""


def as_api_error(error: Exception, retry_after: int = 1) -> ApiError:
    """What a client is told about an error raised while its request was served."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequest):
        return ApiError(400, str(error), param=error.field, code="invalid_value")
    if isinstance(error, EngineOverloaded):
        headers = {"Retry-After": str(retry_after)}
        message = str(error) or "too many requests are waiting: try again later"
        return ApiError(503, message, code="engine_overloaded", headers=headers)
    if isinstance(error, EngineDead):
        message = str(error) or "the engine stopped: restart the server"
        return ApiError(503, message, code="engine_dead")
    if isinstance(error, RequestAbortedError):
        return ApiError(503, str(error), code="request_aborted")
    return ApiError(500, "internal error: see the server's log", code="internal_error")


def install_error_handlers(app: FastAPI, retry_after: int) -> None:
    """Make every error of ``app`` an OpenAI error object."""

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, HTTPException):
            refusal = _http_error(request, error)
        elif isinstance(error, RequestValidationError):
            refusal = _invalid_body(error.errors())
        else:
            refusal = as_api_error(error, retry_after)
        return JSONResponse(refusal.body, status_code=refusal.status, headers=refusal.headers)

    async def drop(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse(None, status_code=499)  # nginx's status for a client that left

    for kind in (ApiError, EngineError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, refuse)
    app.add_exception_handler(ClientDisconnectedError, drop)


def _http_error(request: Request, error: HTTPException) -> ApiError:
    where = f"{request.method} {request.url.path}"
    messages = {
        400: f"the body of {where} could not be read as JSON",
        404: f"there is no {where}",
        405: f"{where} is not allowed",
    }
    message = messages.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers)


def _invalid_body(errors: Sequence[Any]) -> ApiError:
    first = errors[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, InvalidRequest):
        path = _field_path(first["loc"])
        message = str(cause) if cause.field else f"{path}: {cause}"
        return ApiError(400, message, param=cause.field or path, code="invalid_value")
    return _invalid_field(first)


def _invalid_field(error: Mapping[str, Any]) -> ApiError:
    kind = error["type"]
    if kind == "json_invalid":
        position = error["loc"][-1]
        reason = error.get("ctx", {}).get("error", "invalid JSON")
        return ApiError(400, f"the body is not valid JSON: {reason} at character {position}")
    param = _field_path(error["loc"])
    if param is None:
        return ApiError(400, "the body must be a JSON object", code="invalid_type")
    if kind == "missing":
        code = "missing_required_parameter"
        return ApiError(400, f"{param} is required", param=param, code=code)
    reason = str(error["msg"])
    reason = reason[:1].lower() + reason[1:]
    code = "invalid_type" if kind.endswith(("_type", "_parsing")) else "invalid_value"
    given = reprlib.repr(error.get("input"))
    return ApiError(400, f"{param}: {reason}, got {given}", param=param, code=code)


def _field_path(location: Sequence[str | int]) -> str | None:
    """``("body", "messages", 0, "role")`` as OpenAI writes it: ``messages[0].role``."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path or None


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
