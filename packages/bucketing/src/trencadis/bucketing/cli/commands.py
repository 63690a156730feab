"""What the subcommands of `trencadis-buckets` do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np

from trencadis.bucketing.bucket_file import write_bucket_file
from trencadis.bucketing.config import BucketingConfig, Phase
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.grid import BucketGrid
from trencadis.bucketing.rounding import IntArray, ceil_div, round_up
from trencadis.bucketing.serving_grids import decode_grid, prompt_grid, sequence_grid
from trencadis.bucketing.strategy_comparison import StrategyResult, best_fit, compare_strategies
from trencadis.bucketing.traffic import TrafficRecorder, read_trace


def show_grids(options: argparse.Namespace) -> None:
    """Print the log lines of the grids that the environment describes."""
    config = BucketingConfig.from_env(os.environ)
    if options.strategy:
        config = attrs.evolve(
            config, strategy=options.strategy, prompt_strategy=None, decode_strategy=None
        )
    phases: tuple[Phase, ...] = ("prompt", "decode")
    for phase in phases if options.phase == "both" else (options.phase,):
        for line in _serving_grid(phase, config, options).describe():
            print(line)


def fit_trace(options: argparse.Namespace) -> None:
    """Print a comparison of the strategies on a trace; write the best fit to a bucket file."""
    rows, counts = _read_batches(options)
    seen, judged = _split(rows, counts, options.holdout)
    results = _compare(options, seen, judged, counts)
    print(_table(results))
    if options.output:
        best = best_fit(results)
        write_bucket_file(
            options.output,
            [(best.batch, best.length, options.context_blocks)],
            comment=f"Prompt buckets (batch, query, context blocks) fitted to {options.trace}:\n"
            f"{best.padding:.1%} padding, {best.graphs} graphs",
        )


def plot_trace(options: argparse.Namespace) -> None:
    """Draw the lengths of a trace with the bucket edges of `exp` and of the best fit."""
    try:
        from trencadis.bucketing.cli.plot import plot_traffic  # noqa: PLC0415 - needs the plot extra
    except ImportError as error:
        raise BucketingError(
            f"plot needs matplotlib ({error}): install trencadis-bucketing[plot]"
        ) from None
    rows, counts = _read_batches(options)
    results = _compare(options, rows, rows, counts)
    exponential = next(result for result in results if result.strategy == "exp")
    plot_traffic(rows, counts, exponential, best_fit(results), options.output)


def _serving_grid(phase: Phase, config: BucketingConfig, options: argparse.Namespace) -> BucketGrid:
    model_len, seqs, block_size = options.max_model_len, options.max_num_seqs, options.block_size
    if options.axes == "sequence":
        return sequence_grid(
            phase, config, max_num_seqs=seqs, max_model_len=model_len, block_size=block_size
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
        num_blocks=options.num_blocks or seqs * ceil_div(model_len, block_size),
        block_size=block_size,
        max_model_len=model_len,
    )


def _read_batches(options: argparse.Namespace) -> tuple[IntArray, IntArray | None]:
    """Rows (batch, length) and, for recorded traffic, how often each came."""
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


def _split(rows: IntArray, counts: IntArray | None, holdout: float) -> tuple[IntArray, IntArray]:
    """The rows to fit to and the rows to judge on: all for both, or the last ones held out."""
    if not holdout:
        return rows, rows
    if counts is not None:
        raise BucketingError("recorded traffic has no order, so no end to hold out: omit --holdout")
    kept = round(len(rows) * (1 - holdout))
    return rows[:kept], rows[kept:]


def _compare(
    options: argparse.Namespace, seen: IntArray, judged: IntArray, counts: IntArray | None
) -> tuple[StrategyResult, ...]:
    max_batch, max_length = np.concatenate([seen, judged]).max(axis=0).tolist()
    return compare_strategies(
        seen,
        judged,
        step=options.step,
        maxima=(max_batch, options.max or round_up(max_length, options.step)),
        budget=options.limit,
        counts=counts,
    )


def _table(results: Sequence[StrategyResult]) -> str:
    lines = [f"{'strategy':<20}{'graphs':>8}{'padding':>10}{'worst case':>18}"]
    for result in results:
        worst = f"{result.worst_padding:,} tokens"
        lines.append(f"{result.strategy:<20}{result.graphs:>8}{result.padding:>10.1%}{worst:>18}")
    return "\n".join(lines)
