"""The ASGI app that serves an engine over the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from trencadis.server import __version__
from trencadis.server.engine_protocol import ServingEngine
from trencadis.server.generation.answer_plan import AnswerPlanner
from trencadis.server.generation.prompts import PromptEncoder
from trencadis.server.http.admin_calls import AdminAudit, AdminListener, AdminRateLimit
from trencadis.server.http.allowed_hosts import AllowedHosts
from trencadis.server.http.auth import BearerAuth
from trencadis.server.http.body_limit import BodyLimit
from trencadis.server.http.cancelled_requests import CancelledRequests
from trencadis.server.http.error_handlers import install_error_handlers
from trencadis.server.metrics.serving_metrics import ServingMetrics
from trencadis.server.parsers.selection import select_parsers
from trencadis.server.routes.admin import admin_router
from trencadis.server.routes.chat import chat_router
from trencadis.server.routes.completions import completions_router
from trencadis.server.routes.context import Drain, ServingContext
from trencadis.server.routes.docs import docs_router
from trencadis.server.routes.health import health_router
from trencadis.server.routes.models import models_router
from trencadis.server.settings import ServerSettings


def create_app(engine: ServingEngine, settings: ServerSettings | None = None) -> FastAPI:
    """Make an app that serves ``engine``. The caller starts and stops the engine.

    Any ASGI server runs the app; `serve` uses uvicorn. The app ignores the ``settings`` of that
    server: ``host``, ``port``, ``admin_host``, ``ssl_*``, ``shutdown_timeout``, ``access_log``.
    Raises `ConfigError` for a parser that does not exist.
    """
    settings = settings or ServerSettings()
    parsers = select_parsers(
        settings.tool_call_parser,
        settings.reasoning_parser,
        engine.tokenizer.chat_template,
        needs_tools=settings.enable_auto_tool_choice,
    )
    encoder = PromptEncoder(engine, settings.max_pending_prompts, parsers.traits)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        encoder.close()

    app = FastAPI(
        title="Trencadís",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # its page loads scripts from another host
        redoc_url=None,
    )
    context = ServingContext(
        engine=engine,
        settings=settings,
        metrics=ServingMetrics(engine),
        encoder=encoder,
        answers=AnswerPlanner(parsers, engine.tokenizer),
        created=int(time.time()),
        drain=Drain(),
    )
    for router in (
        chat_router,
        completions_router,
        models_router,
        health_router,
        admin_router,
    ):
        app.include_router(router(context))
    app.include_router(docs_router())
    install_error_handlers(app, settings.retry_after)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_size, timeout=settings.body_timeout)
    # the middleware added last runs first: keys are checked before a body is read
    app.add_middleware(AdminRateLimit, per_second=settings.admin_rate_limit)
    app.add_middleware(BearerAuth, api_keys=settings.api_keys, admin_keys=settings.admin_keys)
    app.add_middleware(CancelledRequests, retry_after=settings.retry_after)
    app.add_middleware(AdminAudit)
    if settings.allowed_hosts:
        app.add_middleware(AllowedHosts, hosts=settings.allowed_hosts)
    if settings.admin_port is not None:
        app.add_middleware(AdminListener, port=settings.admin_port)
    return app
