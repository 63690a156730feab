"""A picture of a simulation over time; needs matplotlib, the ``plot`` extra."""

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
    times = [moment.at_s for moment in report.moments]
    _draw_load(load, times, report)
    _draw_throughput(throughput, times, report)
    cache.plot(times, [one.highest_block for one in report.moments], color=_GREY, label="highest")
    cache.plot(times, [one.used_blocks for one in report.moments], color=_BLUE, label="used")
    cache.set_ylabel("KV blocks")
    heat.plot(times, [one.temperature_c for one in report.moments], color=_ORANGE, label="chip")
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
    axes.plot(times, [one.running for one in report.moments], color=_BLUE, label="running")
    axes.plot(times, [one.waiting for one in report.moments], color=_ORANGE, label="waiting")
    axes.plot(times, [one.swapped for one in report.moments], color=_GREY, label="swapped")
    axes.set_ylabel("requests")


def _draw_throughput(axes: Axes, times: list[float], report: SimulationReport) -> None:
    """Tokens since the moment before, over the time since then."""
    rates = [
        after.tokens / (after.at_s - before.at_s)
        for before, after in zip(report.moments, report.moments[1:], strict=False)
    ]
    axes.plot(times[1:], rates, color=_BLUE, label="generated")
    axes.set_ylabel("tokens/s")
