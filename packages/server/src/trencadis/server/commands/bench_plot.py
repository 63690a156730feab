"""Plots a run of ``engine-serve bench``. Needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trencadis.server.commands.bench_report import BenchReport, BenchResult

_BLUE, _ORANGE = "#2b6cb0", "#d1603d"


def plot_bench(
    report: BenchReport, results: Sequence[BenchResult], path: str | os.PathLike[str]
) -> None:
    """Write a PNG: each request's TTFT and E2E latency over its arrival, and distributions."""
    figure = Figure(figsize=(10, 6), layout="constrained")
    top, bottom = figure.subplots(2, 2)
    answered = [result for result in results if not result.error]
    arrivals = [result.arrival_s for result in answered]
    gaps = [gap * 1e3 for result in answered for gap in result.gaps_s]
    ttft = [result.ttft_s * 1e3 for result in answered]
    e2e = [result.e2e_s * 1e3 for result in answered]
    for axes, values, name in ((top[0], ttft, "TTFT"), (bottom[0], e2e, "E2E latency")):
        axes.scatter(arrivals, values, s=8, color=_BLUE)
        axes.set(xlabel="seconds since the start", ylabel=f"{name}, ms")
    for axes, values, name in ((top[1], ttft, "TTFT"), (bottom[1], gaps, "ITL")):
        _draw_distribution(axes, values, name)
    for axes in (*top, *bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
    figure.suptitle(
        f"{len(answered)} requests, {report.output_tokens / report.seconds:,.0f} output tokens/s, "
        f"TTFT p99 {report.ttft_s.p99 * 1e3:,.0f} ms, ITL p99 {report.itl_s.p99 * 1e3:,.1f} ms"
    )
    figure.savefig(path, dpi=80, format="png")


def _draw_distribution(axes: Axes, values: Sequence[float], name: str) -> None:
    """The share of values that are at most x."""
    ordered = sorted(values)
    shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
    axes.plot(ordered, shares, color=_ORANGE)
    axes.set(xlabel=f"{name}, ms", ylabel="share of values at most x")
