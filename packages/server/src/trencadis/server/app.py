"""The ASGI app that serves an engine over the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from trencadis.server import __version__
from trencadis.server.api.error_responses import DescribedApp
from trencadis.server.batches.batch_runner import BatchRunner
from trencadis.server.batches.file_store import UNFINISHED, BatchStore
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
from trencadis.server.http.paths import is_upload
from trencadis.server.http.request_body import UNREAD_FACTOR, BodyLimit
from trencadis.server.http.request_id_header import RequestIdHeader
from trencadis.server.metrics.serving_metrics import BatchMetrics, ServingMetrics
from trencadis.server.metrics.tracing import RequestTracer
from trencadis.server.routes.adapters import adapters_router
from trencadis.server.routes.admin import admin_router
from trencadis.server.routes.batches import batches_router, files_router
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
from trencadis.server.routes.sglang import sglang_router
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
    model with a ``ttl`` without ``auto_switch``, and for an ``api_key_file`` or a
    ``batch_directory`` that cannot be used.
    """
    settings = settings or ServerSettings()
    keys = ApiKeys.of(settings)
    context = _context(engine, settings, keys)
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
    _add_error_handlers(app, context)
    _add_middleware(app, context, keys)
    return app


def end_streams(app: FastAPI) -> None:
    """End the streams that have no end of their own, because the server stops."""
    dashboard: DashboardFeed = app.state.dashboard
    dashboard.close()


def _context(engine: ServingEngine, settings: ServerSettings, keys: ApiKeys) -> ServingContext:
    models = ServedModels(engine, settings)
    encoder = PromptEncoder(settings.max_pending_prompts)
    endpoint = settings.otlp_traces_endpoint
    tracer = None if endpoint is None else RequestTracer(endpoint)
    metrics = ServingMetrics(
        engine, tracer=tracer, has_keys=len(keys) > 0, num_pending=lambda: encoder.num_pending
    )
    switcher, switching = None, as_switching(engine)
    if switching is not None and metrics.switches is not None:
        switcher = SwitchControl(switching, settings, metrics.switches, lambda: metrics.num_active)
    store = None
    if settings.responses_store:
        store = ResponseStore(settings.responses_store_size, settings.responses_store_ttl)
    batches = None
    if settings.batch_directory is not None:
        batches = _batch_runner(engine, settings, metrics, keys)
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
        batches=batches,
        created=int(time.time()),
        drain=Drain(),
    )


def _batch_runner(
    engine: ServingEngine, settings: ServerSettings, metrics: ServingMetrics, keys: ApiKeys
) -> BatchRunner:
    store = BatchStore(Path(settings.batch_directory or ""))
    statuses = BatchMetrics(
        lambda: (stored.batch.status for stored in store.unfinished), UNFINISHED, metrics.registry
    )
    switching = as_switching(engine)

    def most_lines(num_sent: int) -> int:
        """An eighth of what the engine runs at once; half of it while no one else asks."""
        share = 2 if metrics.num_active <= num_sent else 8
        return max(1, engine.stats.max_num_seqs // share)

    def is_held(body: dict[str, Any]) -> bool:
        """Whether its model could only be served after a switch that it may not ask for."""
        name = body.get("model")
        is_other = switching is not None and name in switching.aliases and name != switching.active
        return is_other and not settings.auto_switch

    return BatchRunner(
        store,
        most_lines=most_lines,
        is_held=is_held,
        name_of=keys.name_of,
        count_line=statuses.count_line,
        max_line=settings.max_body_size,
        retry_after=settings.retry_after,
    )


def _line_app(context: ServingContext) -> FastAPI:
    """The routes that batches may use, without what checks clients, as their batch was checked."""
    app = FastAPI(openapi_url=None)
    for router in (chat_router, completions_router, responses_router, pooling_router):
        app.include_router(router(context))
    _add_error_handlers(app, context)
    return app


def _add_error_handlers(app: FastAPI, context: ServingContext) -> None:
    install_error_handlers(app, context.settings.retry_after, context.metrics.count_rejected)


def _lifespan(
    context: ServingContext, dashboard: DashboardFeed
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """What runs from the start of the server to its end."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        dashboard.start()
        if context.switcher is not None:
            context.switcher.idle.start()
        if context.batches is not None:
            context.batches.start(_line_app(context))
        yield
        dashboard.close()
        if context.batches is not None:
            await context.batches.close()
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
        sglang_router,
        admin_router,
    ):
        app.include_router(router(context))
    if context.batches is not None:
        app.include_router(files_router(context, context.batches.store))
        app.include_router(batches_router(context, context.batches))
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
        is_streamed=lambda scope: context.batches is not None and is_upload(scope),
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
