"""Keys of clients: API keys for ``/v1``, admin keys for ``/v1/admin`` and development mode."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

import attrs
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from trencadis.server.errors import ApiError
from trencadis.server.http.api_keys import ApiKeys, digest
from trencadis.server.http.error_response import ErrorResponse
from trencadis.server.http.paths import (
    ADMIN_PATH,
    DASHBOARD_EVENTS_PATH,
    LOAD_ADAPTER_PATH,
    UNLOAD_ADAPTER_PATH,
    is_of_clients,
    is_under,
    path_of,
)

SWITCH_PATH = "/v1/models/switch"
SLEEP_PATHS = ("/sleep", "/wake_up", "/is_sleeping")
"""The paths of development mode."""


@attrs.frozen
class AdminCalls:
    """Which requests are calls of administrators. ``has_dev_mode``: also those of development mode.

    ``has_admin_keys``: also those for what the dashboard shows. Without admin keys everyone may
    see that, as ``/metrics``.
    """

    has_dev_mode: bool = False
    has_admin_keys: bool = False

    def __call__(self, scope: Scope) -> bool:
        return self.needs_admin_key(scope) or self.is_development(scope)

    def needs_admin_key(self, scope: Scope) -> bool:
        """Whether a request is rejected without an admin key, also where there are none."""
        is_watching = self.has_admin_keys and is_under(scope, DASHBOARD_EVENTS_PATH)
        is_of_adapters = path_of(scope) in (LOAD_ADAPTER_PATH, UNLOAD_ADAPTER_PATH)
        return is_watching or is_of_adapters or is_under(scope, ADMIN_PATH)

    def is_development(self, scope: Scope) -> bool:
        """Whether a request is for a path of development mode, and the server has it."""
        if not self.has_dev_mode:
            return False
        path = path_of(scope)
        # A model may have the alias "switch", which GET describes.
        return path in SLEEP_PATHS or (path == SWITCH_PATH and scope["method"] == "POST")


class BearerAuth:
    """ASGI middleware: rejects a request to a path of clients that carries no accepted key.

    A key is a bearer token. An API key may be in the header ``x-api-key``, as in the Anthropic API.
    Without ``api_keys`` every client may use the model. ``/v1/admin``, and the paths that load and
    unload adapters, accept ``admin_keys`` only, and reject every request if there are none; if
    there are, ``/dashboard/events`` needs one, too.
    An admin key is not an API key. ``/health``, ``/version`` and ``/metrics`` need no key.
    `key_name` returns the name of the API key of a request. Keys are compared as in
    `ApiKeys.accept`.

    The paths of development mode need an admin key too, if there are any. Otherwise they are open
    like ``/v1``, as in vLLM, but not to web pages: a browser would send their requests unasked.
    ``/dashboard/events`` is for this server's own page, not for those of other origins: they could
    not read it, but hold its streams open until no administrator gets another.
    """

    def __init__(
        self,
        app: ASGIApp,
        api_keys: ApiKeys,
        admin_keys: Sequence[str],
        is_admin: AdminCalls,
    ) -> None:
        self.app = app
        self._is_admin = is_admin
        self._api_keys = api_keys
        self._admin_keys = [digest(key) for key in admin_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(scope) if scope["type"] == "http" else None
        app = self.app if error is None else ErrorResponse(error)
        await app(scope, receive, send)

    def _check(self, scope: Scope) -> ApiError | None:
        if is_under(scope, DASHBOARD_EVENTS_PATH) and _is_of_another_origin(Headers(scope=scope)):
            return ApiError(
                403,
                "the events of the dashboard are for its own page: open /dashboard",
                code="origin_not_allowed",
            )
        is_development = self._is_admin.is_development(scope)
        if self._is_admin.needs_admin_key(scope) or (is_development and self._admin_keys):
            if not self._admin_keys:
                return ApiError(
                    403,
                    "the admin API is off: start the server with --admin-api-key or "
                    "VLLM_ADMIN_TOKEN",
                    code="admin_api_disabled",
                )
            kind = "admin"
        elif is_development and "origin" in Headers(scope=scope):
            return ApiError(
                403,
                "web pages may not use development mode: leave out the Origin header",
                code="origin_not_allowed",
            )
        elif (is_development or is_of_clients(scope)) and self._api_keys:
            kind = "API"
        else:
            return None
        headers = Headers(scope=scope)
        scheme, key = _bearer_token(headers) if kind == "admin" else _api_key(headers)
        if kind == "admin":
            is_accepted = _is_accepted(key, self._admin_keys)
        else:
            is_accepted = self._api_keys.accept(key, scope)
        if scheme == "bearer" and is_accepted:
            return None
        return ApiError(
            401,
            f"this server needs a valid {kind} key: send it as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


def _is_of_another_origin(headers: Headers) -> bool:
    """Whether a browser says that a page of another origin makes the request.

    A proxy may change the host, so ``Sec-Fetch-Site``, where browsers send it, decides.
    """
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("cross-site", "same-site")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def _is_accepted(key: str, accepted: Sequence[bytes]) -> bool:
    received = digest(key)
    matches = [hmac.compare_digest(received, each) for each in accepted]
    return any(matches)


def _bearer_token(headers: Headers) -> tuple[str, str]:
    """The scheme of the header Authorization in lower case, and its key."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return scheme.lower(), key.strip()


def _api_key(headers: Headers) -> tuple[str, str]:
    """The bearer token; without Authorization, the key in ``x-api-key``."""
    if "authorization" not in headers and "x-api-key" in headers:
        return "bearer", headers["x-api-key"].strip()
    return _bearer_token(headers)


_OF_THIS_PROCESS = secrets.token_bytes(32)


def key_salt(headers: Headers, salt: str | None) -> str:
    """The salt of a request whose cached prefixes are for its API key alone.

    A digest of the key, and the client's own ``salt``: a client that knows that of another key
    still shares nothing with it. KV events carry it, so it tells nothing of the key.
    """
    secret = hmac.digest(_OF_THIS_PROCESS, digest(_api_key(headers)[1]), "sha256")
    return secret.hex() if salt is None else hmac.digest(secret, salt.encode(), "sha256").hex()
