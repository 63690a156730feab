"""Bearer tokens on ``/v1``: who may use the model."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from trencadis.server.errors import ApiError


class BearerAuth:
    """ASGI middleware: refuses a request to ``/v1`` that carries none of the accepted keys.

    Health, version and metrics stay open, for probes. Keys are compared by digest and all of
    them each time, so that timing tells nothing about length, prefix or position.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self.app = app
        self._accepted = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _guarded(scope) or self._admits(Headers(scope=scope)):
            await self.app(scope, receive, send)
            return
        error = ApiError(
            401,
            "this server needs a valid API key: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
        )
        headers = {"WWW-Authenticate": "Bearer"}
        response = JSONResponse(error.body, status_code=error.status, headers=headers)
        await response(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        offered = _digest(key.strip())
        matches = [hmac.compare_digest(offered, accepted) for accepted in self._accepted]
        return scheme.lower() == "bearer" and any(matches)


def _guarded(scope: Scope) -> bool:
    path: str = scope["path"]
    path = path.removeprefix(scope.get("root_path", ""))  # set where the app is mounted
    return path == "/v1" or path.startswith("/v1/")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
