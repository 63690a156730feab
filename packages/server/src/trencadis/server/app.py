"""The ASGI app that serves an engine over the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI

from trencadis.server import __version__
from trencadis.server.api.error_responses import DescribedApp
from trencadis.server.dashboard.feed import DashboardFeed
from trencadis.server.engine_protocol import ServingEngine, as_switching
from trencadis.server.generation.prompts import PromptEncoder
from trencadis.server.generation.response_store import ResponseStore
from trencadis.server.generation.served_model import ServedModels
from trencadis.server.http.admin_calls import AdminAudit, AdminListener, AdminRateLimit
from trencadis.server.http.admin_signatures import AdminSignatures
from trencadis.server.http.allowed_hosts import AllowedHosts
from trencadis.server.http.api_keys import ApiKeys
from trencadis.server.http.auth import AdminCalls, BearerAuth
from trencadis.server.http.cancelled_requests import CancelledRequests
from trencadis.server.http.error_handlers import install_error_handlers
from trencadis.server.http.json_body import JsonBodies
from trencadis.server.http.key_limit import KeyLimit
from trencadis.server.http.request_body import UNREAD_FACTOR, BodyLimit
from trencadis.server.http.request_id_header import RequestIdHeader
from trencadis.server.metrics.serving_metrics import ServingMetrics
from trencadis.server.metrics.tracing import RequestTracer
from trencadis.server.routes.adapters import adapters_router
from trencadis.server.routes.admin import admin_router
from trencadis.server.routes.chat import chat_router
from trencadis.server.routes.completions import completions_router
from trencadis.server.routes.context import Drain, ServingContext
from trencadis.server.routes.dashboard import dashboard_router
from trencadis.server.routes.docs import docs_router
from trencadis.server.routes.health import health_router
from trencadis.server.routes.invocations import invocations_router
from trencadis.server.routes.messages import messages_router
from trencadis.server.routes.models import models_router
from trencadis.server.routes.pooling import pooling_router
from trencadis.server.routes.responses import responses_router
from trencadis.server.routes.stored_responses import end_background, stored_responses_router
from trencadis.server.routes.switch import switch_router
from trencadis.server.routes.tokens import tokenizer_info_router, tokens_router
from trencadis.server.settings import ServerSettings
from trencadis.server.switching.switch_control import SwitchControl


def create_app(engine: ServingEngine, settings: ServerSettings | None = None) -> FastAPI:
    """Make an app that serves ``engine``. The caller starts and stops the engine.

    Any ASGI server runs the app; `serve` uses uvicorn. The app ignores the ``settings`` of that
    server: ``host``, ``port``, ``admin_host``, ``ssl_*``, ``shutdown_timeout``, ``access_log``,
    and, since an engine of several models is a `SwitchingEngine`, ``multi_model_config`` and
    ``model_stash_gib``. `end_streams` ends what would keep a server from stopping.
    Raises `ConfigError` for a parser that does not exist, where traces cannot be exported, for a
    model with a ``ttl`` without ``auto_switch``, and for an ``api_key_file`` that cannot be used.
    """
    settings = settings or ServerSettings()
    keys = ApiKeys.of(settings)
    context = _context(engine, settings, has_keys=len(keys) > 0)
    dashboard = DashboardFeed(engine, context.metrics, context.check_serving)
    app = DescribedApp(
        title="Trencadis",  # in ASCII, since generators of clients name a package after it
        version=__version__,
        root_path=settings.root_path,
        lifespan=_lifespan(context, dashboard),
        docs_url=None,  # its page loads scripts from another host
        redoc_url=None,
    )
    app.state.dashboard = dashboard
    _add_routes(app, context, dashboard)
    install_error_handlers(app, settings.retry_after, context.metrics.count_rejected)
    _add_middleware(app, context, keys)
    return app


def end_streams(app: FastAPI) -> None:
    """End the streams that have no end of their own, because the server stops."""
    dashboard: DashboardFeed = app.state.dashboard
    dashboard.close()


def _context(engine: ServingEngine, settings: ServerSettings, *, has_keys: bool) -> ServingContext:
    models = ServedModels(engine, settings)
    encoder = PromptEncoder(settings.max_pending_prompts)
    endpoint = settings.otlp_traces_endpoint
    tracer = None if endpoint is None else RequestTracer(endpoint)
    metrics = ServingMetrics(engine, tracer=tracer, has_keys=has_keys)
    switcher, switching = None, as_switching(engine)
    if switching is not None and metrics.switches is not None:
        switcher = SwitchControl(switching, settings, metrics.switches, lambda: metrics.num_active)
    store = None
    if settings.responses_store:
        store = ResponseStore(settings.responses_store_size, settings.responses_store_ttl)
    return ServingContext(
        engine=engine,
        switching=switching,
        settings=settings,
        metrics=metrics,
        bodies=JsonBodies(UNREAD_FACTOR * settings.max_body_size),
        encoder=encoder,
        models=models,
        switcher=switcher,
        responses=store,
        created=int(time.time()),
        drain=Drain(),
    )


def _lifespan(
    context: ServingContext, dashboard: DashboardFeed
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """What runs from the start of the server to its end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        dashboard.start()
        if context.switcher is not None:
            context.switcher.idle.start()
        yield
        dashboard.close()
        if context.responses is not None:
            await end_background(context.responses)
        context.bodies.close()
        context.encoder.close()
        if context.switcher is not None:
            await context.switcher.close()
        if context.metrics.tracer is not None:
            await context.metrics.tracer.close()

    return lifespan


def _add_routes(app: FastAPI, context: ServingContext, dashboard: DashboardFeed) -> None:
    for router in (
        chat_router,
        completions_router,
        responses_router,
        stored_responses_router,
        messages_router,
        pooling_router,
        tokens_router,
        invocations_router,
        models_router,
        switch_router,
        adapters_router,
        health_router,
        admin_router,
    ):
        app.include_router(router(context))
    if context.settings.enable_tokenizer_info_endpoint:
        app.include_router(tokenizer_info_router(context))
    app.include_router(dashboard_router(dashboard, context.settings))
    app.include_router(docs_router())


def _add_middleware(app: FastAPI, context: ServingContext, keys: ApiKeys) -> None:
    """What requests pass. The middleware added last runs first: keys are checked before a body is
    read."""
    settings = context.settings
    is_admin = AdminCalls(settings.server_dev_mode, has_admin_keys=bool(settings.admin_keys))
    app.add_middleware(
        BodyLimit,
        max_bytes=settings.max_body_size,
        timeout=settings.body_timeout,
        retry_after=settings.retry_after,
        is_order=is_admin,
    )
    if settings.max_requests_per_key is not None:
        app.add_middleware(
            KeyLimit,
            most=settings.max_requests_per_key,
            retry_after=settings.retry_after,
            count_refused=context.metrics.count_refused,
            num_background=lambda name: _num_background(context.responses, name),
        )
    app.add_middleware(AdminRateLimit, per_second=settings.admin_rate_limit, is_admin=is_admin)
    app.add_middleware(
        BearerAuth,
        api_keys=keys,
        admin_keys=settings.admin_keys,
        is_admin=is_admin,
    )
    if settings.admin_signature_window is not None:
        app.add_middleware(
            AdminSignatures,
            admin_keys=settings.admin_keys,
            window_s=settings.admin_signature_window,
            began_s=time.time(),
            is_admin=is_admin,
            max_bytes=settings.max_body_size,
            timeout=settings.body_timeout,
        )
    app.add_middleware(CancelledRequests, retry_after=settings.retry_after)
    app.add_middleware(AdminAudit, is_admin=is_admin)
    if settings.allowed_hosts:
        app.add_middleware(AllowedHosts, hosts=settings.allowed_hosts)
    if settings.admin_port is not None:
        app.add_middleware(AdminListener, port=settings.admin_port, is_admin=is_admin)
    if settings.enable_request_id_headers:
        app.add_middleware(RequestIdHeader)


def _num_background(store: ResponseStore | None, owner: str) -> int:
    """How many responses of an API key are made in the background."""
    return 0 if store is None else store.num_unfinished(owner)
