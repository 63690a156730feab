"""The Content-Type that requests must declare.

A web page can make a browser send other media types to a server on the user's machine without
asking that server. For JSON the browser asks first (a CORS preflight), and this server rejects.
"""

from __future__ import annotations

from fastapi import Request

from trencadis.server.errors import ApiError


def require_json(request: Request) -> None:
    """Raise 415 unless the request declares its body as JSON. A FastAPI dependency."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        given = f"got {media_type!r}" if media_type else "there is none"
        raise ApiError(415, f"the Content-Type header must be application/json, {given}")
