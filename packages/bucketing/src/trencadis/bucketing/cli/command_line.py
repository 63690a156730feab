"""The command `trencadis-buckets`: show grids, fit one to a trace, plot it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from trencadis.bucketing import __version__
from trencadis.bucketing.cli.commands import fit_trace, plot_trace, show_grids
from trencadis.bucketing.config import describe_axis_settings, describe_variables
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.strategies import DEFAULT_TAIL, MAX_TAIL, STRATEGIES
from trencadis.bucketing.traffic import LENGTH_COLUMNS


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. The exit status is 0, or 2 for a setting or file that cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (BucketingError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            reason = f"{error.filename} cannot be used: {error.strerror}"
        print(f"trencadis-buckets: {reason}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trencadis-buckets", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True)
    _add_show(commands)
    _add_fit(commands)
    _add_plot(commands)
    return parser


def _add_show(commands: Any) -> None:
    show = commands.add_parser(
        "show",
        allow_abbrev=False,
        help="print the grids and log lines of the VLLM_* settings",
        epilog=_variables_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    show.set_defaults(run=show_grids)
    show.add_argument(
        "--phase",
        choices=("prompt", "decode", "both"),
        default="both",
        help="phase to show; default: both",
    )
    show.add_argument(
        "--axes",
        choices=("paged", "sequence"),
        default="paged",
        help="grids with a paged KV cache, or with axes batch and seq; default: paged",
    )
    show.add_argument(
        "--strategy",
        choices=tuple(STRATEGIES),
        help="strategy in place of those in the settings; default: those in the settings",
    )
    show.add_argument(
        "--max-model-len", type=int, default=4096, help="tokens of one sequence; default: 4096"
    )
    show.add_argument(
        "--max-num-batched-tokens",
        type=int,
        help="new tokens of one prompt batch; default: the value of --max-model-len",
    )
    show.add_argument(
        "--max-num-seqs", type=int, default=64, help="sequences of one batch; default: 64"
    )
    show.add_argument("--block-size", type=int, default=128, help="tokens per block; default: 128")
    show.add_argument(
        "--num-blocks", type=int, help="KV cache blocks; default: all sequences at full length"
    )


def _add_fit(commands: Any) -> None:
    fit = commands.add_parser(
        "fit", allow_abbrev=False, help="compare strategies on a trace, write a bucket file"
    )
    fit.set_defaults(run=fit_trace)
    _add_trace_options(fit)
    fit.add_argument(
        "--holdout",
        type=_share,
        default=0.0,
        help="share of the batches, from the end, to judge on and not fit to; default: 0",
    )
    fit.add_argument(
        "--context-blocks",
        type=_size,
        nargs="+",
        help="context sizes to write, in blocks, to which the largest one is added; default: "
        "those of exp",
    )
    fit.add_argument(
        "--output", help="bucket file to write, for VLLM_BUCKETING_FROM_FILE; default: none"
    )


def _add_plot(commands: Any) -> None:
    plot = commands.add_parser(
        "plot", allow_abbrev=False, help="draw lengths, bucket edges and hits as a PNG"
    )
    plot.set_defaults(run=plot_trace)
    _add_trace_options(plot)
    plot.add_argument("--output", required=True, help="PNG to write")


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", help="CSV, JSON lines, or .json of a TrafficRecorder of prompts")
    parser.add_argument(
        "--column",
        help="column of the prompt length; default: the first one with a known name, such as "
        f"{LENGTH_COLUMNS[0]}",
    )
    parser.add_argument(
        "--step",
        type=_count,
        help="granularity of the length, in tokens; default: the value of --block-size",
    )
    parser.add_argument(
        "--limit",
        type=_count,
        help="graphs of the fit, for each context size; default: as many as exp has",
    )
    parser.add_argument(
        "--tail",
        type=_tail,
        default=DEFAULT_TAIL,
        help="how much more the fit avoids batches with much padding: 0 for the least mean "
        f"padding; default: {DEFAULT_TAIL:g}",
    )
    parser.add_argument(
        "--window",
        type=float,
        help="collect batches from this many seconds; default: every prompt alone",
    )
    limits = parser.add_argument_group("limits of the server")
    limits.add_argument(
        "--max-model-len",
        type=_count,
        help="tokens of one sequence; default: the longest prompt in the trace",
    )
    limits.add_argument(
        "--max-num-batched-tokens",
        type=_count,
        help="new tokens of one prompt batch; default: the value of --max-model-len",
    )
    limits.add_argument(
        "--max-num-seqs", type=_count, default=16, help="sequences of one batch; default: 16"
    )
    limits.add_argument(
        "--block-size", type=_count, default=128, help="tokens per block; default: 128"
    )


def _variables_help() -> str:
    """The environment variables with their meaning, one per line."""
    lines = ["environment variables:"]
    lines += [f"  {name:<34}{meaning}" for name, meaning in describe_variables().items()]
    lines += ["", "in place of * stands one of:"]
    lines += [f"  {name:<34}{meaning}" for name, meaning in describe_axis_settings().items()]
    return "\n".join(lines)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


def _size(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 0")
    return int(text)


def _tail(text: str) -> float:
    try:
        tail = float(text)
    except ValueError:
        tail = -1.0
    if not 0 <= tail <= MAX_TAIL:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to {MAX_TAIL}")
    return tail


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to less than 1")
    return share
