"""Signed calls of the admin API: the key does not travel, and no call is accepted twice.

For admin calls that pass where others can read them: without TLS, or beyond a proxy that ends it.
Inside TLS a bearer token is as good, because it cannot be recorded.
"""

from __future__ import annotations

import hashlib
import heapq
import hmac
import re
import time
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from trencadis.server.errors import ApiError
from trencadis.server.http.auth import AdminCalls
from trencadis.server.http.error_response import ErrorResponse
from trencadis.server.http.request_body import MAX_ORDER_BYTES, BodyLimit, replay

TIME_HEADER = "x-admin-time"
SCHEME = "signature"

_HOW = (
    "send X-Admin-Time, seconds since 1970, and 'Authorization: Signature HEX', the HMAC-SHA256 "
    "under an admin key of the lines METHOD, host, path?query and X-Admin-Time, and of the body"
)


class AdminSignatures:
    """ASGI middleware: admin calls need a signature, which replaces the bearer token.

    `signed_text` is what an admin key signs. A call is rejected if its time is more than
    ``window_s`` seconds from that of this machine, if it was signed before ``began_s``, the start
    of this app, and if its signature was accepted before. A verified call goes on as one with the
    key that signed it. ``clock`` counts seconds since the Unix epoch. The signatures under all keys
    are compared, in a time that does not depend on their content.
    """

    def __init__(
        self,
        app: ASGIApp,
        admin_keys: Sequence[str],
        window_s: float,
        began_s: float,
        is_admin: AdminCalls,
        max_bytes: int,
        timeout: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.app = app
        self._is_admin = is_admin
        self._admin_keys = admin_keys
        self._window_s = window_s
        self._clock = clock
        self._began_s = began_s
        self._verified = BodyLimit(self._verify, min(max_bytes, MAX_ORDER_BYTES), timeout)
        self._seen: set[bytes] = set()
        self._expiries: list[tuple[float, bytes]] = []
        """A heap of the signatures in ``_seen`` by the time at which they are too old anyway."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._is_admin(scope):
            await self.app(scope, receive, send)
            return
        try:
            self._check_time(Headers(scope=scope))
        except ApiError as error:  # before the body is read
            await ErrorResponse(error)(scope, receive, send)
            return
        await self._verified(scope, receive, send)

    async def _verify(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            body = (await receive()).get("body", b"")
            receive = replay(body, receive)
        try:
            # Again: while a slow body arrived, the signature may have expired and been forgotten.
            now_s = self._check_time(Headers(scope=scope))
            key = self._key_of(scope, body, now_s)
        except ApiError as error:
            await ErrorResponse(error)(scope, receive, send)
            return
        others = [pair for pair in scope["headers"] if pair[0].lower() != b"authorization"]
        # In place, so that the audit line outside of this has the fingerprint of the key.
        scope["headers"] = [*others, (b"authorization", b"Bearer " + _bytes(key))]
        await self.app(scope, receive, send)

    def _check_time(self, headers: Headers) -> float:
        """The time of the check. Raises `ApiError`."""
        scheme, _, _ = headers.get("authorization", "").partition(" ")
        sent = headers.get(TIME_HEADER, "")
        if scheme.lower() != SCHEME or not re.fullmatch(r"\d{1,12}(\.\d{1,9})?", sent):
            raise _refused(f"this server accepts only signed admin calls: {_HOW}")
        now_s, sent_s = self._clock(), float(sent)
        if abs(now_s - sent_s) > self._window_s:
            raise _refused(
                f"X-Admin-Time {sent} is {abs(now_s - sent_s):.0f} s from the {now_s:.0f} of this "
                f"server, and {self._window_s:g} s are allowed: sign the call again, and check the "
                "clocks"
            )
        if sent_s < self._began_s:
            raise _refused(
                f"X-Admin-Time {sent} is before the start of this server at {self._began_s:.0f}, "
                f"and its clock is at {now_s:.0f}: sign the call again; restart the server if its "
                "clock was set back"
            )
        return now_s

    def _key_of(self, scope: Scope, body: bytes, now_s: float) -> str:
        """The key that signed a call, which is remembered. Raises `ApiError`.

        ``now_s``: when its time was checked. No signature is forgotten that passes this check.
        """
        headers = Headers(scope=scope)
        sent = headers["authorization"].partition(" ")[2].strip().lower().encode()
        query = scope["query_string"].decode("latin-1")
        target = f"{scope['path']}?{query}" if query else scope["path"]
        host = headers.get("host", "")
        text = signed_text(scope["method"], host, target, headers[TIME_HEADER], body)
        matching = [key for key in self._admin_keys if hmac.compare_digest(sign(key, text), sent)]
        if not matching:
            raise _refused(f"the signature is that of no admin key: {_HOW}")
        while self._expiries and self._expiries[0][0] < now_s:
            self._seen.discard(heapq.heappop(self._expiries)[1])
        if sent in self._seen:
            raise _refused(
                "this call was accepted before: sign it again, with another X-Admin-Time",
                code="replayed_call",
            )
        self._seen.add(sent)
        expiry_s = float(headers[TIME_HEADER]) + self._window_s
        heapq.heappush(self._expiries, (expiry_s, sent))
        return matching[0]


def signed_text(method: str, host: str, target: str, sent: str, body: bytes) -> bytes:
    """What a signature covers: four lines, and the body. ``sent``: the header X-Admin-Time.

    ``target``: the path, and after a question mark the query string, if there is one. ``host``: the
    header Host, because many servers may have the same key. The sender of a recorded call chooses
    this header, so each of them must accept its own names alone (`AllowedHosts`).
    """
    return _bytes(f"{method}\n{host}\n{target}\n{sent}\n") + body


def sign(key: str, text: bytes) -> bytes:
    """The signature of a text in hexadecimal digits."""
    return hmac.new(_bytes(key), text, hashlib.sha256).hexdigest().encode()


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _refused(message: str, code: str = "invalid_signature") -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Signature"})
