"""Pictures of traffic and a grid. Needs matplotlib, the `plot` extra."""

from __future__ import annotations

import os

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from trencadis.bucketing.rounding import IntArray, ceil_div
from trencadis.bucketing.strategy_comparison import StrategyResult

_GREY, _ORANGE, _BLUE = "#9aa0a6", "#d1603d", "#2b6cb0"


def plot_traffic(
    rows: IntArray,
    counts: IntArray,
    rule: StrategyResult,
    fit: StrategyResult,
    path: str | os.PathLike[str],
) -> None:
    """Write a PNG: lengths with the bucket edges of two strategies, and hits per bucket of the fit.

    Args:
        rows: the batches, (batch, length) each.
        counts: how often each row came.
        rule: a strategy that is not a fit.
        fit: the fit.
        path: the file to write.
    """
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    lengths, hits = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_lengths(lengths, rows[:, 1], counts * rows[:, 0], rule, fit)
    _draw_hits(hits, rows, counts, fit)
    figure.savefig(path, dpi=130, format="png")


def _draw_lengths(
    axes: Axes, lengths: IntArray, weights: IntArray, rule: StrategyResult, fit: StrategyResult
) -> None:
    longest = fit.length[-1]
    axes.hist(lengths, bins=120, range=(0, longest), weights=weights, color=_GREY)
    top = axes.get_ylim()[1]
    axes.set_ylim(0, top * 1.22)
    for row, colour, height in ((rule, _ORANGE, 1.15), (fit, _BLUE, 1.05)):
        axes.vlines(row.length, 0, top * height, color=colour, linewidth=0.7, alpha=0.45)
        label = f"{row.strategy}: {row.graphs} graphs, {row.padding:.1%} padding"
        at = [top * height] * len(row.length)
        axes.plot(row.length, at, "v", color=colour, markersize=5, label=label)
    axes.set(title="Lengths seen, and bucket edges", xlabel="tokens", ylabel="sequences")
    axes.set_xlim(left=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_hits(axes: Axes, rows: IntArray, weights: IntArray, fit: StrategyResult) -> None:
    hits = np.zeros((len(fit.batch), len(fit.length)))
    cell = (np.searchsorted(fit.batch, rows[:, 0]), np.searchsorted(fit.length, rows[:, 1]))
    np.add.at(hits, cell, weights)
    picture = axes.imshow(
        np.where(hits > 0, hits, np.nan),
        origin="lower",
        aspect="auto",
        cmap="Blues",
        norm=LogNorm(vmin=0.5, vmax=max(1.0, hits.max())),
    )
    axes.set(
        title=f"Hits per bucket of {fit.strategy}", xlabel="length bucket", ylabel="batch bucket"
    )
    every = ceil_div(len(fit.length), 16)
    axes.set_xticks(
        range(0, len(fit.length), every), map(str, fit.length[::every]), rotation=60, ha="right"
    )
    axes.set_yticks(range(len(fit.batch)), map(str, fit.batch))
    axes.figure.colorbar(picture, ax=axes, label="batches")
