"""``/dashboard``: the page, its style and script, and the events that it shows.

Nothing is loaded from another host. The page itself has no content of the server, so it needs no
key; its events need an admin key if there are any (`AdminCalls`).
"""

from __future__ import annotations

import uuid
from importlib.resources import files

from fastapi import APIRouter, Response

from trencadis.server.dashboard.feed import SLOW_S, DashboardFeed, event
from trencadis.server.errors import ApiError
from trencadis.server.http.event_stream import EventStream
from trencadis.server.http.paths import DASHBOARD_EVENTS_PATH, DASHBOARD_PATH
from trencadis.server.settings import ServerSettings

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_LOGIN = 'data-login="none"'
"""The attribute of the page that says which proof its events need."""


def dashboard_router(feed: DashboardFeed, settings: ServerSettings) -> APIRouter:
    """The routes of the page."""
    router = APIRouter()
    login = "none"
    if settings.admin_keys:
        login = "bearer" if settings.admin_signature_window is None else "signature"
    page = _read("page.html").replace(_LOGIN, f'data-login="{login}"')
    style, script = _read("page.css"), _read("page.js")

    @router.head(DASHBOARD_PATH, include_in_schema=False)
    @router.get(DASHBOARD_PATH, include_in_schema=False)
    async def dashboard() -> Response:
        return Response(page, media_type="text/html", headers=_HEADERS)

    @router.get(f"{DASHBOARD_PATH}/page.css", include_in_schema=False)
    async def page_style() -> Response:
        return Response(style, media_type="text/css", headers=_HEADERS)

    @router.get(f"{DASHBOARD_PATH}/page.js", include_in_schema=False)
    async def page_script() -> Response:
        return Response(script, media_type="text/javascript", headers=_HEADERS)

    @router.get(DASHBOARD_EVENTS_PATH, include_in_schema=False)
    async def events() -> Response:
        viewer = feed.admit()
        request_id = f"dashboard-{uuid.uuid4().hex}"
        return EventStream(viewer.events, _failure, viewer, SLOW_S, request_id)

    return router


def _failure(error: ApiError) -> str:
    return event("end", {"reason": error.message})


def _read(name: str) -> str:
    return (files("trencadis.server.dashboard") / name).read_text(encoding="utf-8")
