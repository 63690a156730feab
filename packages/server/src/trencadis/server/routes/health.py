"""Monitoring: health, readiness, liveness, version, metrics. They need no API key."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from trencadis.engine import EngineRestarting
from trencadis.server import __version__
from trencadis.server.api.error_responses import error_responses
from trencadis.server.routes.context import ServingContext

_TEXT = {"text/plain": {"schema": {"type": "string"}}}


def health_router(context: ServingContext) -> APIRouter:
    """The routes for monitoring."""
    router = APIRouter(tags=["monitoring"])

    @router.post("/ping", include_in_schema=False)
    @router.get("/ping", response_class=Response, responses=error_responses(503))
    @router.head("/health", include_in_schema=False)
    @router.get(
        "/health",
        response_class=Response,
        responses={200: {"content": _TEXT}, **error_responses(503)},
    )
    async def health() -> Response:
        """200 if requests can be served, 503 if the engine has stopped, restarts or hangs.

        The text of 200 is empty, or says for how long an engine that loads or compiles is silent.
        """
        return Response(await context.check_health(), media_type="text/plain")

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_class=Response, responses=error_responses(503))
    async def ready() -> Response:
        """For a readiness probe: 200 if requests should be sent here, otherwise 503.

        503 also while an administrator drains the server and, without --auto-switch, while the
        model is switched.
        """
        await context.check_serving()
        return Response()

    @router.head("/live", include_in_schema=False)
    @router.get("/live", response_class=Response, responses=error_responses(503))
    async def live() -> Response:
        """For a liveness probe: 503 if only a restart of this process helps, otherwise 200.

        200 also while the engine core is restarted, which needs no help.
        """
        with contextlib.suppress(EngineRestarting):
            await context.check_health()
        return Response()

    @router.get("/load", responses=error_responses())
    async def load() -> dict[str, int]:
        """How many prompts are being served or wait, for balancers of load."""
        return {"server_load": context.metrics.num_active}

    @router.get("/version", responses=error_responses())
    async def version() -> dict[str, str]:
        """The version of this server."""
        return {"version": __version__}

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": _TEXT}, **error_responses()},
    )
    async def metrics() -> Response:
        """Metrics in the Prometheus text format, whatever the client accepts.

        In OpenMetrics, prometheus-client replaces the colon of vLLM's names.
        """
        content = generate_latest(context.metrics.registry)
        return Response(content, headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    return router
