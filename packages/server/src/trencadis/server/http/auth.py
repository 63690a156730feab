"""Bearer tokens: API keys for ``/v1``, admin keys for ``/v1/admin``."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from trencadis.server.errors import ApiError

ADMIN_PATH = "/v1/admin"
"""The paths that need an admin key."""


class BearerAuth:
    """ASGI middleware: rejects a request to ``/v1`` that carries no accepted key.

    Without ``api_keys`` every client may use the model. ``/v1/admin`` accepts ``admin_keys`` only,
    and rejects every request if there are none. An admin key is not an API key. ``/health``,
    ``/version`` and ``/metrics`` need no key. The comparison covers the digests of all keys, so
    that its duration reveals no length, prefix or position of a key.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        self.app = app
        self._api_keys = [_digest(key) for key in api_keys]
        self._admin_keys = [_digest(key) for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        app = self.app if error is None else error.response()
        await app(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        if is_under(scope, ADMIN_PATH):
            if not self._admin_keys:
                return ApiError(
                    403,
                    "the admin API is off: start the server with --admin-api-key or "
                    "VLLM_ADMIN_TOKEN",
                    code="admin_api_disabled",
                )
            accepted, kind = self._admin_keys, "admin"
        elif is_under(scope, "/v1") and self._api_keys:
            accepted, kind = self._api_keys, "API"
        else:
            return None
        if _has_key(Headers(scope=scope), accepted):
            return None
        return ApiError(
            401,
            f"this server needs a valid {kind} key: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _has_key(headers: Headers, accepted: Sequence[bytes]) -> bool:
    scheme, key = _bearer_token(headers)
    received = _digest(key)
    matches = [hmac.compare_digest(received, digest) for digest in accepted]
    return scheme == "bearer" and any(matches)


def _bearer_token(headers: Headers) -> tuple[str, str]:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return scheme.lower(), key.strip()


def cache_salt(headers: Headers, salt: str | None) -> str:
    """The salt of a request whose cached prefixes are for its bearer token alone.

    The digest of the token, and the client's own ``salt``: a client that knows that of another key
    still shares nothing with it.
    """
    digest = _digest(_bearer_token(headers)[1])
    return digest.hex() if salt is None else hmac.digest(digest, salt.encode(), "sha256").hex()


def is_under(scope: Scope, prefix: str) -> bool:
    """Whether the path of a request is ``prefix`` or below it."""
    path: str = scope["path"]
    path = path.removeprefix(scope.get("root_path", ""))  # set if the app is mounted under a path
    return path == prefix or path.startswith(f"{prefix}/")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
