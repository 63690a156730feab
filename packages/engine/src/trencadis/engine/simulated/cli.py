"""The command ``trencadis-simulate``: serves a recorded trace on a simulated accelerator."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence

from trencadis.bucketing import BucketingError
from trencadis.engine import __version__
from trencadis.engine.errors import ConfigError, EngineError
from trencadis.engine.settings.command_parser import CommandParser, described
from trencadis.engine.settings.flags import add_flags, environment_help, given_flags
from trencadis.engine.simulated.config import SimulationConfig
from trencadis.engine.simulated.model_shape import read_model_shape
from trencadis.engine.simulated.report import SimulationReport, report_of
from trencadis.engine.simulated.simulation import Simulation
from trencadis.engine.simulated.workload import read_workload
from trencadis.warmup import track

_EXAMPLE = """\
example:
  trencadis-simulate --device gaudi3 --model config.json --trace trace.csv --plot run.png
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 2 for a setting or file that cannot be used."""
    options = flag_parser().parse_args(arguments)
    try:
        plot = _plotter() if options.plot is not None else None
        started = time.perf_counter()
        report = _simulate(options)
        elapsed_s = time.perf_counter() - started
        print(report.table())
        if options.json is not None:
            report.save(options.json)
        if plot is not None:
            plot(report, options.plot)
    except (EngineError, BucketingError, OSError) as error:
        print(f"trencadis-simulate: {described(error)}", file=sys.stderr)
        return 2
    print(f"simulated in {elapsed_s:.1f} s, {report.steps / elapsed_s:,.0f} steps/s")
    return 0


def _plotter() -> Callable[[SimulationReport, str], None]:
    """The function that draws a report. Raises `ConfigError` where matplotlib is missing."""
    try:
        from trencadis.engine.simulated.plot import plot_report  # noqa: PLC0415  an extra
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib ({error}): install trencadis-engine[plot]"
        ) from None
    return plot_report


def _simulate(options: argparse.Namespace) -> SimulationReport:
    workload = read_workload(
        options.trace,
        rate_scale=options.rate_scale,
        num_requests=options.num_requests,
        shared_prefix=options.shared_prefix,
    )
    simulation = Simulation(_config(options), read_model_shape(options.model), workload)
    warmup = simulation.warm_up()
    for _ in track(simulation.serve(), len(workload), "Simulating"):
        pass
    return report_of(simulation, warmup)


def _config(options: argparse.Namespace) -> SimulationConfig:
    return SimulationConfig.from_env(os.environ, **given_flags(options, SimulationConfig))


def flag_parser() -> argparse.ArgumentParser:
    """The flags of `SimulationConfig`, and the files that a run reads and writes."""
    parser = CommandParser(
        prog="trencadis-simulate",
        description="Serve a recorded trace on a simulated accelerator and show how it went.",
        epilog=f"environment:\n{environment_help(SimulationConfig)}\n{_EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument(
        "--model", required=True, metavar="CONFIG.json", help="of the model's checkpoint"
    )
    parser.add_argument(
        "--trace", required=True, metavar="TRACE.csv", help="arrivals, prompt and output lengths"
    )
    parser.add_argument(
        "--rate-scale",
        type=float,
        default=1.0,
        metavar="F",
        help="arrivals F times as fast, 1000 for a trace in milliseconds (default: 1)",
    )
    parser.add_argument(
        "--num-requests", type=int, metavar="N", help="only the first N requests (default: all)"
    )
    parser.add_argument(
        "--shared-prefix",
        type=int,
        default=0,
        metavar="TOKENS",
        help="all prompts begin with the same tokens, as with a system prompt (default: 0)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write every figure to this file (default: no file)"
    )
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw the run over time (default: no drawing)"
    )
    add_flags(parser, SimulationConfig)
    return parser


if __name__ == "__main__":
    sys.exit(main())
