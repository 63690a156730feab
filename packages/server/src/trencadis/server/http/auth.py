"""Bearer tokens on ``/v1``: who may use the model, and who may give the engine orders."""

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

    Without ``api_keys`` the model is open to all. ``/v1/admin`` has keys of its own, which open
    nothing else, and without them it is closed to all. Health, version and metrics stay open, for
    probes. Keys are compared by digest and all of them each time, so that timing tells nothing
    about length, prefix or position.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self.app = app
        self._api_keys = [_digest(key) for key in api_keys]
        self._admin_keys = [_digest(key) for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope) if scope["type"] == "http" else None
        if error is None:
            await self.app(scope, receive, send)
            return
        response = JSONResponse(error.body, status_code=error.status, headers=error.headers)
        await response(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if _is_under(scope, "/v1/admin"):
            if not self._admin_keys:
                return ApiError(
                    403,
                    "the admin API is off: start the server with --admin-api-key or "
                    "VLLM_ADMIN_TOKEN",
                    code="admin_api_disabled",
                )
            accepted, kind = self._admin_keys, "admin"
        elif _is_under(scope, "/v1") and self._api_keys:
            accepted, kind = self._api_keys, "API"
        else:
            return None
        if _bears(Headers(scope=scope), accepted):
            return None
        return ApiError(
            401,
            f"this server needs a valid {kind} key: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _bears(headers: Headers, accepted: Sequence[bytes]) -> bool:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    offered = _digest(key.strip())
    matches = [hmac.compare_digest(offered, one) for one in accepted]
    return scheme.lower() == "bearer" and any(matches)


def _is_under(scope: Scope, folder: str) -> bool:
    path: str = scope["path"]
    path = path.removeprefix(scope.get("root_path", ""))  # set where the app is mounted
    return path == folder or path.startswith(f"{folder}/")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
