"""Only bodies that are declared as JSON are read.

A page in a browser can send any other kind to a server on its user's machine without being asked;
for JSON the browser asks first, and this server does not agree.
"""

from __future__ import annotations

from fastapi import Request

from trencadis.server.errors import ApiError


def json_only(request: Request) -> None:
    """Raise 415 unless the request says that its body is JSON; for use as a dependency."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        given = f"got {media_type!r}" if media_type else "there is none"
        raise ApiError(415, f"the Content-Type header must be application/json, {given}")
