"""The command `trencadis-buckets`: show a grid, fit one to a trace, draw both."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from trencadis.bucketing import __version__
from trencadis.bucketing.bucket_file import write_bucket_file
from trencadis.bucketing.comparison import Comparison, best_fit, compare_strategies
from trencadis.bucketing.config import STRATEGIES, BucketingConfig
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.fitted import Ints
from trencadis.bucketing.grid import BucketGrid
from trencadis.bucketing.serving_grids import decode_grid, prompt_grid, sequence_grid
from trencadis.bucketing.trace import read_trace
from trencadis.bucketing.traffic import TrafficRecorder


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, or 2 for a setting or file that cannot be used."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (BucketingError, OSError) as error:
        print(f"trencadis-buckets: {error}", file=sys.stderr)
        return 2
    return 0


def _show(options: argparse.Namespace) -> None:
    config = BucketingConfig.from_env(os.environ)
    if options.strategy:
        config = attrs.evolve(
            config, strategy=options.strategy, prompt_strategy=None, decode_strategy=None
        )
    for phase in ("prompt", "decode") if options.phase == "both" else (options.phase,):
        for line in _serving_grid(phase, config, options).describe():
            print(line)


def _serving_grid(phase: str, config: BucketingConfig, options: argparse.Namespace) -> BucketGrid:
    model_len, seqs, block_size = options.max_model_len, options.max_num_seqs, options.block_size
    if options.axes == "sequence":
        return sequence_grid(
            "prompt" if phase == "prompt" else "decode",
            config,
            max_num_seqs=seqs,
            max_model_len=model_len,
            block_size=block_size,
        )
    if phase == "prompt":
        return prompt_grid(
            config,
            max_model_len=model_len,
            max_num_batched_tokens=options.max_num_batched_tokens or model_len,
            max_num_seqs=seqs,
            block_size=block_size,
        )
    return decode_grid(
        config,
        max_num_seqs=seqs,
        num_blocks=options.num_blocks or seqs * -(-model_len // block_size),
        block_size=block_size,
        max_model_len=model_len,
    )


def _fit(options: argparse.Namespace) -> None:
    rows, counts = _batches(options)
    seen = judged = rows
    if options.holdout:
        if counts is not None:
            raise BucketingError("recorded traffic has no order to hold out the end of: drop it")
        kept = round(len(rows) * (1 - options.holdout))
        seen, judged = rows[:kept], rows[kept:]
    compared = _compare(options, seen, judged, counts)
    print(_table(compared))
    if options.output:
        best = best_fit(compared)
        context = options.context_blocks
        write_bucket_file(
            options.output,
            [(best.batch, best.length, context)],
            comment=f"Prompt buckets (batch, query, context blocks) fitted to {options.trace}:\n"
            f"{best.padding:.1%} padding, {best.graphs} graphs",
        )


def _plot(options: argparse.Namespace) -> None:
    try:
        from trencadis.bucketing.plot import plot_traffic  # noqa: PLC0415 - needs the plot extra
    except ImportError as error:
        raise BucketingError(
            f"plot needs matplotlib ({error}): install trencadis-bucketing[plot]"
        ) from None
    rows, counts = _batches(options)
    compared = _compare(options, rows, rows, counts)
    plot_traffic(rows, counts, compared[1], best_fit(compared), options.output)


def _compare(
    options: argparse.Namespace, seen: Ints, judged: Ints, counts: Ints | None
) -> tuple[Comparison, ...]:
    everything = np.concatenate([seen, judged])
    longest = options.max or -(-int(everything[:, 1].max()) // options.step) * options.step
    most = int(everything[:, 0].max())
    return compare_strategies(
        seen,
        judged,
        step=options.step,
        maxima=(most, longest),
        budget=options.limit,
        counts=counts,
    )


def _batches(options: argparse.Namespace) -> tuple[Ints, Ints | None]:
    """Rows (batch, length) and, from recorded traffic, how often each came."""
    if Path(options.trace).suffix == ".json":
        recorder = TrafficRecorder.load(options.trace)
        if len(recorder.axes) < 2 or not recorder.total:
            raise BucketingError(f"{options.trace} has no batches: record batch and length")
        shapes, counts = recorder.shapes()
        return shapes[:, :2], counts
    trace = read_trace(options.trace, column=options.column)
    if options.window:
        return trace.batches(options.window, options.max_num_seqs), None
    return trace.requests(), None


def _table(rows: Sequence[Comparison]) -> str:
    lines = [f"{'strategy':<20}{'graphs':>8}{'padding':>10}{'worst case':>18}"]
    lines.extend(
        f"{row.strategy:<20}{row.graphs:>8}{row.padding:>10.1%}{f'{row.worst:,} tokens':>18}"
        for row in rows
    )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trencadis-buckets", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True)
    show = commands.add_parser("show", help="the grids and log lines of the VLLM_* settings")
    show.set_defaults(run=_show)
    show.add_argument("--phase", choices=("prompt", "decode", "both"), default="both")
    show.add_argument("--axes", choices=("paged", "sequence"), default="paged")
    show.add_argument("--strategy", choices=STRATEGIES, help="instead of the one in the settings")
    show.add_argument("--max-model-len", type=int, default=4096)
    show.add_argument("--max-num-batched-tokens", type=int, help="default: max-model-len")
    show.add_argument("--max-num-seqs", type=int, default=64)
    show.add_argument("--block-size", type=int, default=128)
    show.add_argument("--num-blocks", type=int, help="default: all sequences at full length")
    fit = commands.add_parser("fit", help="compare strategies on a trace, write a bucket file")
    fit.set_defaults(run=_fit)
    _add_trace_options(fit)
    fit.add_argument("--holdout", type=_share, default=0.0, help="share to judge on and not fit to")
    fit.add_argument("--context-blocks", type=int, nargs="+", default=[0])
    fit.add_argument("--output", help="bucket file to write, for VLLM_BUCKETING_FROM_FILE")
    plot = commands.add_parser("plot", help="draw lengths, bucket edges and hits as a PNG")
    plot.set_defaults(run=_plot)
    _add_trace_options(plot)
    plot.add_argument("--output", required=True, help="PNG to write")
    return parser


def _add_trace_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", help="CSV, JSON lines, or .json of a TrafficRecorder")
    parser.add_argument("--column", help="of the prompt length, where its name is unusual")
    parser.add_argument("--step", type=_count, default=128, help="granularity of the length")
    parser.add_argument(
        "--max", type=_count, help="longest length to serve; default: the longest seen"
    )
    parser.add_argument(
        "--limit", type=_count, help="graphs of the fit; default: as many as exp has"
    )
    parser.add_argument("--window", type=float, help="gather batches from this many seconds")
    parser.add_argument("--max-num-seqs", type=_count, default=16, help="most sequences of a batch")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no share from 0 to less than 1")
    return share


if __name__ == "__main__":
    sys.exit(main())
