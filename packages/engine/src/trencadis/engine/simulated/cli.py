"""The command ``trencadis-simulate``: a trace served on an accelerator that is not there."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from trencadis.bucketing import BucketingError
from trencadis.engine import __version__
from trencadis.engine.errors import ConfigError, EngineError
from trencadis.engine.simulated.config import SimulationConfig
from trencadis.engine.simulated.hardware import HARDWARE
from trencadis.engine.simulated.model_shape import read_model_shape
from trencadis.engine.simulated.report import SimulationReport, report_of
from trencadis.engine.simulated.simulation import Simulation
from trencadis.engine.simulated.workload import read_workload
from trencadis.warmup import track

_GIB = 1 << 30

_EPILOG = """\
environment:
  VLLM_PROMPT_*, VLLM_DECODE_*, VLLM_BUCKETING_*   the buckets, as of Gaudi's vLLM
  VLLM_GRAPH_*, VLLM_SKIP_WARMUP, VLLM_DEFRAG_*    warm-up and defragmentation
  VLLM_THERMAL_POLICY                              as --thermal-policy

example:
  trencadis-simulate --device gaudi3 --model config.json --trace trace.csv --plot run.png
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 2 for a setting or file that cannot be used."""
    options = _parser().parse_args(arguments)
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
        print(f"trencadis-simulate: {error}", file=sys.stderr)
        return 2
    print(f"simulated in {elapsed_s:.1f} s, {report.steps / elapsed_s:,.0f} steps/s")
    return 0


def _plotter() -> Callable[[SimulationReport, str], None]:
    """What draws a report; asked for before the work, which would be in vain without."""
    try:
        from trencadis.engine.simulated.plot import plot_report  # noqa: PLC0415  an extra
    except ImportError as error:
        raise ConfigError(
            f"--plot needs matplotlib ({error}): install trencadis-engine[plot]"
        ) from None
    return plot_report


def _simulate(options: argparse.Namespace) -> SimulationReport:
    workload = read_workload(
        options.trace, rate_scale=options.rate_scale, num_requests=options.num_requests
    )
    simulation = Simulation(_config(options), read_model_shape(options.model), workload)
    warmup = simulation.warm_up()
    for _ in track(simulation.serve(), len(workload), "Simulating"):
        pass
    return report_of(simulation, warmup)


def _config(options: argparse.Namespace) -> SimulationConfig:
    """The settings that were given; those that were not keep their defaults."""
    names = (
        "device",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_waiting",
        "block_size",
        "num_blocks",
        "gpu_memory_utilization",
        "thermal_policy",
        "ambient_c",
        "seed",
    )
    given = {name: getattr(options, name) for name in names}
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if options.swap_space is not None:
        settings["swap_space"] = int(options.swap_space * _GIB)
    settings["thermal_options"] = dict(options.thermal_option)
    return SimulationConfig.from_env(os.environ, **settings)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trencadis-simulate",
        description="Serve a recorded trace on a simulated accelerator and show how it went.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("--device", required=True, metavar="NAME", help=", ".join(HARDWARE))
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
        help="arrivals F times as fast (1000 for a trace in milliseconds)",
    )
    parser.add_argument("--num-requests", type=int, metavar="N", help="only the first N")
    parser.add_argument("--json", metavar="FILE", help="write every figure there")
    parser.add_argument("--plot", metavar="FILE.png", help="draw the run over time")
    _add_engine_flags(parser.add_argument_group("engine"))
    _add_heat_flags(parser.add_argument_group("heat"))
    return parser


def _add_engine_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-model-len", type=int, metavar="TOKENS", help="default: the trace's longest request"
    )
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="default: 128")
    group.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS", help="default: 2048")
    group.add_argument("--max-waiting", type=int, metavar="N", help="default: 2048")
    group.add_argument("--block-size", type=int, metavar="TOKENS", help="default: 128")
    group.add_argument(
        "--num-gpu-blocks-override",
        dest="num_blocks",
        type=int,
        metavar="BLOCKS",
        help="default: as many as fit the memory",
    )
    group.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="default: 0.9")
    group.add_argument("--swap-space", type=float, metavar="GIB", help="default: 4")
    group.add_argument("--seed", type=int, metavar="N", help="default: 0")


def _add_heat_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--thermal-policy", metavar="NAME", help="none, proportional, power or module:Class"
    )
    group.add_argument(
        "--thermal-option",
        action="append",
        default=[],
        type=_option,
        metavar="NAME=VALUE",
        help="a setting of the policy, such as target_temp_c=60; may be repeated",
    )
    group.add_argument(
        "--ambient-temp",
        dest="ambient_c",
        type=float,
        metavar="C",
        help="of the air before the heat sink (default: 30)",
    )


def _option(text: str) -> tuple[str, object]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())
