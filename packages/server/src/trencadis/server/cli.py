"""``engine-serve``: a model behind the OpenAI API, from one command.

What a flag leaves open, the settings decide. Nothing heavy is imported before the flags are read,
so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.server.flags import DEFAULT_NAME, flag_parser

if TYPE_CHECKING:
    from trencadis.engine import EngineConfig
    from trencadis.server.settings import ServerSettings

LOG_FORMAT = "%(levelname)s %(asctime)s %(name)s] %(message)s"
LOG_TIME = "%m-%d %H:%M:%S"

_ENGINE_FLAGS = (
    *("served_model_name", "dtype", "device", "max_model_len", "max_num_seqs"),
    *("max_num_batched_tokens", "max_waiting", "block_size", "num_blocks"),
    *("gpu_memory_utilization", "kv_cache_memory", "seed"),
    *("warmup", "compile", "compile_cache"),
    *("scheduling_policy", "swap_space", "swap_bandwidth"),
    *("temperature_source", "thermal_policy", "thermal_policy_config"),
)
_SERVER_FLAGS = ("host", "port", "max_body_size", "shutdown_timeout")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. What its user got wrong is one line on stderr."""
    args = flag_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format=LOG_FORMAT, datefmt=LOG_TIME)
    # imported here, because --help must not wait for a web framework
    from trencadis.engine import EngineError, LogSettings  # noqa: PLC0415
    from trencadis.server.launch import LaunchError, check_address, serve  # noqa: PLC0415

    log = LogSettings(level=logging.getLogger().level, format=LOG_FORMAT, datefmt=LOG_TIME)
    try:
        settings = server_settings(args, os.environ)
        check_address(settings)
        config = engine_config(args, os.environ)
        asyncio.run(serve(config, settings, log=log))
    except (EngineError, LaunchError) as error:
        print(f"engine-serve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before `serve` took the signal over
        return 130
    return 0


def server_settings(args: argparse.Namespace, environ: Mapping[str, str]) -> ServerSettings:
    """The server's settings. Raises `ConfigError`, which names the setting."""
    from trencadis.server.settings import ServerSettings  # noqa: PLC0415

    def keys(given: list[str], variable: str) -> tuple[str, ...]:
        return (*given, *filter(None, [environ.get(variable)]))

    return ServerSettings(
        api_keys=keys(args.api_key, "VLLM_API_KEY"),
        admin_keys=keys(args.admin_api_key, "VLLM_ADMIN_TOKEN"),
        access_log=not args.disable_access_log,
        **_given(args, _SERVER_FLAGS),
    )


def engine_config(args: argparse.Namespace, environ: Mapping[str, str]) -> EngineConfig:
    """The engine's settings. Raises `ConfigError`, and `ModelError` where no model was named and
    there is no default one."""
    from trencadis.engine import EngineConfig, default_model  # noqa: PLC0415

    settings = _given(args, _ENGINE_FLAGS)
    config = EngineConfig.from_env(
        environ, model=args.model or "", use_buckets=not args.disable_bucketing, **settings
    )
    if args.enforce_eager:
        config = attrs.evolve(config, graphs=attrs.evolve(config.graphs, enforce_eager=True))
    if config.model:
        return config
    # asked for last, with every flag found good: the first time, it is converted
    path = default_model()
    name = config.served_model_name or DEFAULT_NAME
    return attrs.evolve(config, model=path, served_model_name=name)


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The flags that were given; the rest keep the defaults of the settings they are for."""
    return {name: value for name in names if (value := getattr(args, name)) is not None}
