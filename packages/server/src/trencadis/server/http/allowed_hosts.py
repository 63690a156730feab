"""The names under which clients may address this server."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from trencadis.server.errors import ApiError
from trencadis.server.http.error_response import ErrorResponse
from trencadis.server.http.paths import is_probe


class AllowedHosts:
    """ASGI middleware: rejects requests whose Host header names none of ``hosts``.

    ``*.example.com`` accepts the names below ``example.com``. A web page that makes its own name
    resolve to this machine (DNS rebinding) is kept out, because browsers send its name. Signed
    admin calls need it, so that a call to another server with the same key is rejected. Monitoring
    addresses a server by its IP address, so probes are accepted under any name.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self.app = app
        self._hosts = frozenset(host.lower() for host in hosts if not host.startswith("*."))
        self._suffixes = tuple(host[1:].lower() for host in hosts if host.startswith("*."))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.app
        if scope["type"] == "http" and not is_probe(scope):
            host = _without_port(Headers(scope=scope).get("host", "")).lower()
            if host not in self._hosts and not host.endswith(self._suffixes):
                error = ApiError(
                    400,
                    f"the Host header names {host!r}, which this server does not accept: start it "
                    "with another --allowed-hosts",
                    code="host_not_allowed",
                )
                app = ErrorResponse(error)
        await app(scope, receive, send)


def _without_port(host: str) -> str:
    """``[::1]:80`` becomes ``::1``."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
