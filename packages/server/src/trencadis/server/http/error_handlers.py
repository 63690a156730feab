"""Exception handlers of the app, and the error objects for invalid request bodies."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import Scope

from trencadis.engine import EngineDead, EngineError, InvalidRequest
from trencadis.server.errors import ApiError, ClientDisconnectedError, as_api_error
from trencadis.server.http.error_response import ErrorResponse

_SCOPE_LOST = "trencadis.lost_with_core"


def was_lost(scope: Scope) -> bool:
    """Whether the engine core ended while it had the request, which may be the cause."""
    return bool(scope.get(_SCOPE_LOST))


def install_error_handlers(
    app: FastAPI, retry_after: int, count_rejected: Callable[[], None] = lambda: None
) -> None:
    """Make ``app`` answer every error with an error object.

    ``retry_after``: see `as_api_error`. ``count_rejected`` is called for each request that a full
    queue has rejected.
    """

    async def respond(request: Request, error: Exception) -> ErrorResponse:
        if isinstance(error, HTTPException):
            api_error = _http_error(request, error)
        elif isinstance(error, RequestValidationError):
            api_error = _invalid_body(error.errors())
        else:
            if isinstance(error, EngineDead) and not error.is_refusal:
                request.scope[_SCOPE_LOST] = True
            api_error = as_api_error(error, retry_after)
            if api_error.code == "engine_overloaded":
                count_rejected()
        return ErrorResponse(api_error)

    async def ignore(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse(None, status_code=499)  # nginx's status for a client that disconnected

    for kind in (ApiError, EngineError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(kind, respond)
    app.add_exception_handler(ClientDisconnectedError, ignore)


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
        where = f" at character {position}" if isinstance(position, int) else ""
        return ApiError(400, f"the body is not valid JSON: {reason}{where}")
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
