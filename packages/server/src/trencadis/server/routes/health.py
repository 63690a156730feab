"""Probes and monitoring: ``/health``, ``/version``, ``/metrics``. Open even with API keys."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder

from trencadis.engine import EngineDead
from trencadis.server import __version__
from trencadis.server.routes.context import ServingContext


def health_router(context: ServingContext) -> APIRouter:
    """Routes that tell how the server is."""
    router = APIRouter(tags=["monitoring"])

    @router.get("/health")
    async def health() -> Response:
        """200 while requests can be served, 503 once the engine stopped or does not answer."""
        limit = context.settings.health_timeout
        try:
            await asyncio.wait_for(context.engine.check_health(), limit)
        except asyncio.TimeoutError:
            raise EngineDead(f"the engine did not answer within {limit:g} seconds") from None
        return Response()

    @router.get("/version")
    async def version() -> dict[str, str]:
        """The version of this server."""
        return {"version": __version__}

    @router.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Metrics in the text format of Prometheus, or in OpenMetrics where it is asked for."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        content = encode(context.metrics.registry)
        return Response(content, headers={"Content-Type": content_type})

    return router
