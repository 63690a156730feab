"""An application for Ray Serve, whose replicas are servers with an engine each.

``serve run trencadis.server.ray:build_app model=MODEL max-num-seqs=64``, or the file
``deploy/ray/serve.yaml``. Ray listens, sends requests to replicas, restarts those whose engine has
failed, and adds or removes some by load. Needs the extra ``ray``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import AsyncIterator, Container, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any, NoReturn

import attrs
import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingContext, RequestRouterConfig
from starlette.types import Message

from trencadis.engine import (
    AsyncEngine,
    ConfigError,
    EngineConfig,
    EngineRestarting,
    EngineStats,
    EngineUnresponsive,
    MultiModelConfig,
    MultiModelEngine,
)
from trencadis.server.app import create_app, end_streams
from trencadis.server.cli import engine_config, flag_parser, multi_model_config, server_settings
from trencadis.server.launch import start_engine
from trencadis.server.ray_front import ForwardedRequest, Front, answer_messages
from trencadis.server.settings import ServerSettings

TARGET_LOAD = 0.7
"""The mean load of replicas that `replicas_by_load` aims at."""

OF_RAY = (
    "host",
    "port",
    "uds",
    "admin_host",
    "admin_port",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "shutdown_timeout",
    "access_log",
)
"""Settings of what listens, which is Ray here."""

OF_ONE_SERVER = ("batch_directory",)
"""Settings of a server that clients reach again with their next request."""


def build_app(args: Mapping[str, Any]) -> Application:
    """The application for ``serve run`` and for a config file of Ray Serve.

    ``args``: ``model`` and the flags of ``engine-serve`` without dashes before them, as
    ``max-num-seqs``; True is a flag without a value. ``deployment``: options of Ray's deployment,
    as ``num_replicas``, ``ray_actor_options`` or ``autoscaling_config``, whose policy is
    `replicas_by_load` unless it has one. ``front``: options of a `Front` before the replicas, so
    that requests with the same beginning reach the same replica and, with ``auto-switch``, those
    for a model one that has it. Raises `ConfigError`.
    """
    given = dict(args)
    options = _options("deployment", given.pop("deployment", {}))
    front = given.pop("front", None)
    config, settings = _settings({name.replace("_", "-"): each for name, each in given.items()})
    # Ray's own limit of 5 requests would leave most of a batch empty; what is above this one waits
    # where another replica can still take it.
    chosen = {"max_ongoing_requests": 2 * _max_num_seqs(config), **options}
    if isinstance(scaling := chosen.get("autoscaling_config"), Mapping):
        chosen["autoscaling_config"] = {"policy": {"policy_function": POLICY}, **scaling}
    if front is None:
        return serve.deployment(EngineReplica).options(**chosen).bind(config, settings)
    if "request_router_config" not in chosen:
        chosen["request_router_config"] = _by_prefix(_max_num_seqs(config))
    replicas = serve.deployment(RoutedReplica).options(**chosen).bind(config, settings)
    models = []
    if isinstance(config, MultiModelConfig) and settings.auto_switch:
        models = [entry.alias for entry in config.models]
    first = {"max_ongoing_requests": MAX_FORWARDED, "ray_actor_options": {"num_cpus": 0}}
    first |= _options("front", front)
    in_front = serve.deployment(Front).options(**first)
    return in_front.bind(replicas, models, settings.max_body_size)


def _options(name: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{name} must be options of a deployment, as {{'num_replicas': 2}}, got {given!r}"
        )
    return dict(given)


def _by_prefix(max_num_seqs: int) -> RequestRouterConfig:
    """A prefix attracts requests until a replica has half a batch more of them than another.

    Raises `ConfigError` for a Ray without the router.
    """
    try:
        from trencadis.server.ray_router import PrefixRouter  # noqa: PLC0415 - private modules
    except ImportError as error:
        raise ConfigError(
            f"front routes by a prefix as Ray 2.60 does, and Ray {ray.__version__} does not "
            f"({error}): install ray 2.60, or give deployment a request_router_config"
        ) from error
    return RequestRouterConfig(
        request_router_class=PrefixRouter,
        request_router_kwargs={
            "imbalanced_threshold": max(1, max_num_seqs // 2),
            "do_eviction": True,
            "eviction_threshold_chars": MAX_KNOWN_CHARS,
            "eviction_target_chars": MAX_KNOWN_CHARS * 9 // 10,
        },
        request_routing_stats_period_s=1.0,
    )


MAX_FORWARDED = 10_000
"""Requests that a front has open at once."""

MAX_KNOWN_CHARS = 16_000_000
"""Characters of prompts, of all replicas together, that Ray's router keeps."""

POLICY = f"{__name__}:replicas_by_load"


def replicas_by_load(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """As many replicas as bring the mean of `load_of` to `TARGET_LOAD`.

    A policy of Ray's ``autoscaling_config``, which applies its bounds and delays to the answer.
    """
    loads = (context.aggregated_metrics or {}).get("load", {})
    if not loads:  # none has been measured yet
        return context.target_num_replicas, {}
    missing = max(0, context.current_num_replicas - len(loads))
    return math.ceil(sum(loads.values()) / TARGET_LOAD) + missing, {}


def load_of(stats: EngineStats) -> float:
    """How busy an engine is: 1 where it is full, more where requests wait.

    The larger one of the KV blocks in use and the sequences that run or wait, as shares.
    """
    sequences = (stats.num_running_seqs + stats.num_pending_reqs) / max(1, stats.max_num_seqs)
    return max(stats.cache_usage, sequences)


class _Replica:
    """A server with an engine, without the part that listens."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: EngineConfig | MultiModelConfig, settings: ServerSettings
    ) -> None:
        self._settings = settings
        self._app: FastAPI | None = None
        self._engine: AsyncEngine | MultiModelEngine | None = None
        self._engine = await start_engine(config, settings)

    def _make_app(self) -> FastAPI:
        self._app = create_app(self._started, self._settings)
        return self._app

    @property
    def _started(self) -> AsyncEngine | MultiModelEngine:
        if self._engine is None:
            raise RuntimeError("this replica has no engine")
        return self._engine

    async def check_health(self) -> None:
        """Raise where the engine cannot serve any more, so that Ray starts another replica.

        An engine that restarts its core by itself is left alone.
        """
        try:
            await self._started.check_health()
        except (EngineRestarting, EngineUnresponsive):
            return

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `replicas_by_load` reads."""
        return {"load": load_of(self._started.stats)}

    async def __del__(self) -> None:
        """Called by Ray, once the requests have ended or their time is over."""
        if self._app is not None:
            end_streams(self._app)
        if self._engine is not None:
            await self._engine.stop()


@serve.ingress()
class EngineReplica(_Replica):
    """A replica to which Ray's proxies send requests."""

    def __serve_build_asgi_app__(self) -> FastAPI:
        return self._make_app()


class RoutedReplica(_Replica):
    """A replica to which a `Front` sends requests."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, config: EngineConfig | MultiModelConfig, settings: ServerSettings
    ) -> None:
        self._running = AsyncExitStack()
        await super().__init__(config, settings)
        self._served = self._make_app()
        await self._running.enter_async_context(self._served.router.lifespan_context(self._served))

    async def answer(self, request: ForwardedRequest) -> AsyncIterator[list[Message]]:
        """The messages of the answer to a request."""
        if model := serve.get_multiplexed_model_id():
            await self._claim(model)
        async with aclosing(answer_messages(self._served, request)) as answer:
            async for messages in answer:
                yield messages

    @serve.multiplexed(max_num_models_per_replica=1)  # type: ignore[untyped-decorator]
    async def _claim(self, model: str) -> str:
        """Tell Ray's routers that this replica has the model. The request itself switches to it."""
        return model

    def record_routing_stats(self) -> dict[str, float]:
        """What `PrefixRouter` reads."""
        return {"load": load_of(self._started.stats)}

    async def __del__(self) -> None:
        """Called by Ray, once the requests have ended or their time is over."""
        await self._running.aclose()
        await super().__del__()


def _settings(given: Mapping[str, Any]) -> tuple[EngineConfig | MultiModelConfig, ServerSettings]:
    parser = flag_parser()
    parser.error = _raise  # type: ignore[method-assign]  # instead of the end of the process
    args = parser.parse_args(_arguments(given, parser._option_string_actions))
    settings = server_settings(args, os.environ)
    for field in attrs.fields(ServerSettings):
        flag = field.name.replace("_", "-")
        if field.name in OF_RAY and flag in given:
            raise ConfigError(
                f"{flag} is a setting of what listens, which is Ray: leave it out", field.name
            )
        if field.name in OF_ONE_SERVER and flag in given:
            raise ConfigError(
                f"{flag} is a setting of a single server, and a request reaches any replica: leave "
                "it out",
                field.name,
            )
    if settings.multi_model_config is None:
        return engine_config(args, os.environ), settings
    return multi_model_config(args, os.environ, settings.multi_model_config), settings


def _raise(message: str) -> NoReturn:
    raise ConfigError(message)


def _arguments(given: Mapping[str, Any], flags: Container[str]) -> list[str]:
    """The command line of ``engine-serve``, which has these flags, for these settings."""
    values = dict(given)
    arguments = [str(model)] if (model := values.pop("model", None)) is not None else []
    for name, value in values.items():
        flag = f"--{name}"
        if value is None:
            continue
        if isinstance(value, bool):
            chosen = flag if value else f"--no-{flag.removeprefix('--')}"
            if value or chosen in flags:  # without such a flag, false is the default
                arguments.append(chosen)
        elif isinstance(value, list | tuple):
            arguments += [flag, *map(str, value)]
        elif isinstance(value, Mapping):
            arguments.append(f"{flag}={json.dumps(value)}")
        else:
            arguments.append(f"{flag}={value}")
    return arguments


def _max_num_seqs(config: EngineConfig | MultiModelConfig) -> int:
    if isinstance(config, EngineConfig):
        return config.max_num_seqs
    return max(entry.config.max_num_seqs for entry in config.models)
