"""Plots a simulation over time. Needs matplotlib, the ``plot`` extra."""

from __future__ import annotations

import os

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trencadis.engine.simulated.report import SimulationReport

_GREY, _ORANGE, _BLUE, _RED = "#9aa0a6", "#d1603d", "#2b6cb0", "#b3261e"


def plot_report(report: SimulationReport, path: str | os.PathLike[str]) -> None:
    """Write a PNG: load, throughput, cache and temperature over the simulated time."""
    figure = Figure(figsize=(10, 8), layout="constrained")
    load, throughput, cache, heat = figure.subplots(4, 1, sharex=True)
    samples = report.samples
    times = [sample.at_s for sample in samples]
    _draw_load(load, times, report)
    _draw_throughput(throughput, times, report)
    cache.plot(times, [sample.highest_block for sample in samples], color=_GREY, label="highest")
    cache.plot(times, [sample.used_blocks for sample in samples], color=_BLUE, label="used")
    cache.set_ylabel("KV blocks")
    heat.plot(times, [sample.temperature_c for sample in samples], color=_ORANGE, label="chip")
    heat.axhline(report.limit_c, color=_RED, linewidth=0.8, label="limit")
    heat.set(ylabel="°C", xlabel="seconds since the first arrival")
    for axes in (load, throughput, cache, heat):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.suptitle(
        f"{report.device}: {report.requests:,} requests, {report.tokens_per_s:,.0f} tokens/s, "
        f"TTFT p99 {report.first_token_s.p99 * 1e3:,.0f} ms, "
        f"ITL p99 {report.between_tokens_s.p99 * 1e3:,.1f} ms"
    )
    figure.savefig(path, dpi=80, format="png")


def _draw_load(axes: Axes, times: list[float], report: SimulationReport) -> None:
    axes.plot(times, [sample.running for sample in report.samples], color=_BLUE, label="running")
    axes.plot(times, [sample.waiting for sample in report.samples], color=_ORANGE, label="waiting")
    axes.plot(times, [sample.swapped for sample in report.samples], color=_GREY, label="swapped")
    axes.set_ylabel("requests")


def _draw_throughput(axes: Axes, times: list[float], report: SimulationReport) -> None:
    """Tokens per second between consecutive samples."""
    rates = [
        after.tokens / (after.at_s - before.at_s)
        for before, after in zip(report.samples, report.samples[1:], strict=False)
    ]
    axes.plot(times[1:], rates, color=_BLUE, label="generated")
    axes.set_ylabel("tokens/s")
