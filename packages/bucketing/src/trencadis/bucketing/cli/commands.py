"""What the subcommands of `trencadis-buckets` do."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import attrs
import numpy as np

from trencadis.bucketing.bucket_file import write_bucket_file
from trencadis.bucketing.config import BucketingConfig, Phase
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.grid import BucketGrid
from trencadis.bucketing.rounding import IntArray, ceil_div, round_up
from trencadis.bucketing.serving_grids import (
    PromptLimits,
    decode_grid,
    prompt_axes,
    prompt_grid,
    prompt_grid_of,
    sequence_grid,
)
from trencadis.bucketing.strategies import STRATEGIES
from trencadis.bucketing.strategy_comparison import StrategyResult, best_fit, compare_strategies
from trencadis.bucketing.traffic import TrafficRecorder, read_trace, split_to_limits


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
    limits = _prompt_limits(options, rows)
    results = _compare(options, limits, *_split(rows, counts, options.holdout))
    print(_table(results))
    if options.output:
        grid = _fitted_grid(options, best_fit(results), limits)
        described = ", ".join(f"{name} {size}" for name, size in attrs.asdict(limits).items())
        write_bucket_file(
            options.output,
            prompt=grid,
            comment="Prompt buckets (batch, query, context blocks) fitted to "
            f"{options.trace}\nfor {described}",
        )
        print(f"{len(grid)} prompt buckets written to {options.output}, for {described}")


def plot_trace(options: argparse.Namespace) -> None:
    """Draw the lengths of a trace with the bucket edges of `exp` and of the best fit."""
    try:
        from trencadis.bucketing.cli.plot import plot_traffic  # noqa: PLC0415 - needs the plot extra
    except ImportError as error:
        raise BucketingError(
            f"plot needs matplotlib ({error}): install trencadis-bucketing[plot]"
        ) from None
    rows, counts = _read_batches(options)
    limits = _prompt_limits(options, rows)
    rows, counts = _within(limits, rows, counts)
    results = _compare(options, limits, (rows, counts), (rows, counts))
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


def _read_batches(options: argparse.Namespace) -> tuple[IntArray, IntArray]:
    """Rows (batch, length), and how often each came."""
    if Path(options.trace).suffix == ".json":
        return _recorded_prompts(options.trace)
    trace = read_trace(options.trace, column=options.column)
    if options.window:
        rows = trace.batches(options.window, options.max_num_seqs)
    else:
        rows = trace.requests()
    return rows, np.ones(len(rows), dtype=np.int64)


def _recorded_prompts(path: str) -> Batches:
    recorder = TrafficRecorder.load(path)
    axes = recorder.axes
    length = next((axis for axis in ("query", "seq") if axis in axes), None)
    if "batch" not in axes or length is None:
        raise BucketingError(
            f"{path} has no prompts, but batches by {', '.join(axes)}: name traffic of prompts, by "
            "batch and query or seq; engine-serve fits decodes to theirs with --bucketing "
            "fitted:FILE"
        )
    shapes, counts = recorder.shapes()
    came = counts > 0
    rows = shapes[came][:, [axes.index("batch"), axes.index(length)]]
    if not came.any() or rows.min() < 1:
        raise BucketingError(f"{path} has no batches, or batches of 0: record batch and length")
    return rows, counts[came]


def _prompt_limits(options: argparse.Namespace, rows: IntArray) -> PromptLimits:
    """The limits of the server to fit for: as given, or wide enough for the trace."""
    longest = int(rows[:, 1].max())
    model_len = options.max_model_len or round_up(longest, _step(options))
    if longest > model_len:
        raise BucketingError(
            f"{options.trace} has a prompt of {longest} tokens, above --max-model-len "
            f"{model_len}: raise it, or remove longer prompts"
        )
    return PromptLimits(
        max_model_len=model_len,
        max_num_batched_tokens=options.max_num_batched_tokens or model_len,
        max_num_seqs=options.max_num_seqs,
        block_size=options.block_size,
    )


def _step(options: argparse.Namespace) -> int:
    """The granularity of the length, in tokens. A server's is its block size."""
    step: int = options.step or options.block_size
    return step


Batches: TypeAlias = tuple[IntArray, IntArray]
"""Rows (batch, length), and how often each came."""


def _split(rows: IntArray, counts: IntArray, holdout: float) -> tuple[Batches, Batches]:
    """The batches to fit to and those to judge on: all for both, or the last ones held out."""
    if not holdout:
        return (rows, counts), (rows, counts)
    if counts.max() > 1:
        raise BucketingError("recorded traffic has no order, so no end to hold out: omit --holdout")
    kept = round(len(rows) * (1 - holdout))
    return (rows[:kept], counts[:kept]), (rows[kept:], counts[kept:])


def _within(limits: PromptLimits, rows: IntArray, counts: IntArray) -> Batches:
    """The batches as the server runs them."""
    rows = np.column_stack([np.minimum(rows[:, 0], limits.max_num_seqs), rows[:, 1]])
    return split_to_limits(
        rows,
        counts,
        max_query=limits.max_query,
        max_num_batched_tokens=limits.max_num_batched_tokens,
    )


def _compare(
    options: argparse.Namespace, limits: PromptLimits, seen: Batches, judged: Batches
) -> tuple[StrategyResult, ...]:
    seen_rows, seen_counts = _within(limits, *seen)
    judged_rows, judged_counts = _within(limits, *judged)
    max_batch = int(np.concatenate([seen_rows, judged_rows])[:, 0].max())
    return compare_strategies(
        seen_rows,
        judged_rows,
        step=_step(options),
        maxima=(max_batch, limits.max_query),
        budget=options.limit,
        counts=seen_counts,
        judged_counts=judged_counts,
        tail=options.tail,
    )


def _fitted_grid(
    options: argparse.Namespace, fit: StrategyResult, limits: PromptLimits
) -> BucketGrid:
    """The prompt grid of a fit. A prompt alone has a bucket at every length and context."""
    contexts = options.context_blocks
    if contexts is None:
        axes = prompt_axes(BucketingConfig(strategy="exp"), limits)
        contexts = STRATEGIES["exp"].values(axes)["context_blocks"]
    values = {
        "batch": tuple(sorted({1, *fit.batch})),
        "query": fit.length,
        "context_blocks": tuple(sorted({*contexts, limits.max_context_blocks})),
    }
    return prompt_grid_of(values, limits)


def _table(results: Sequence[StrategyResult]) -> str:
    lines = [f"{'strategy':<20}{'graphs':>8}{'padding':>10}{'p99':>17}{'worst batch':>17}"]
    for result in results:
        p99, worst = (f"{n:,} tokens" for n in (result.p99_padding, result.worst_padding))
        lines.append(
            f"{result.strategy:<20}{result.graphs:>8}{result.padding:>10.1%}{p99:>17}{worst:>17}"
        )
    return "\n".join(lines)
