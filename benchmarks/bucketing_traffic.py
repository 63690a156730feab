"""Padding of the bucketing strategies on real traffic: fitted to one half, judged on the other.

Prints the tables of docs/bucketing/measurements.md, and more rows of them, as Markdown:

    python benchmarks/bucketing_traffic.py
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from trencadis.bucketing import Trace, compare_strategies

DATA = Path(__file__).parent / "data" / "azure_2023.npz"
STEP = 128
CONTEXT = 131_072
"""The context of Llama 3.1, in tokens."""
SHORTER = 16_384
WINDOW_SECONDS, MAX_NUM_SEQS = 1.0, 16
TAILS = (0.0, 1.0, 3.0, 10.0)


def main() -> None:
    """Print the table for the full context, the table for grids that end sooner, and the tails."""
    arrays = np.load(DATA)
    traces = {
        f"azure_{name}": Trace(
            arrays[f"{name}_lengths"].astype(np.int64), arrays[f"{name}_arrivals_ms"] / 1000
        )
        for name in ("code", "conv")
    }
    batches = {f"{name}, one by one": trace.requests() for name, trace in traces.items()}
    batches |= {
        f"{name}, batched": trace.batches(WINDOW_SECONDS, MAX_NUM_SEQS)
        for name, trace in traces.items()
    }
    print_header()
    for name, rows in batches.items():
        print_row(name, rows, CONTEXT)
    print("\nGrids that end at the longest prompt of the trace, or at a common setting:\n")
    print_header()
    for name, rows in batches.items():
        for served in (math.ceil(rows[:, 1].max() / STEP) * STEP, SHORTER):
            print_row(f"{name}, {served:,}", rows, served)
    print("\nTails: mean, p99 and worst batch, with as many graphs as exp:\n")
    columns = ("`exp`", *(f"fit, tail {tail:g}" for tail in TAILS))
    print(f"| trace | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
    for name, rows in batches.items():
        for served in (CONTEXT, SHORTER):
            print_tails(f"{name}, {served:,}", rows, served)


def print_header() -> None:
    """The head of a Markdown table."""
    print("| trace | `lin` | `exp` | fit, as many graphs | `pad` | fit, as many graphs |")
    print("|---|---|---|---|---|---|")


def print_row(label: str, batches: np.ndarray, served: int) -> None:
    """Print one row: the padding and the graphs of every strategy on the second half of a trace."""
    seen, judged = np.array_split(batches, [len(batches) // 2])
    maxima = (int(batches[:, 0].max()), served)
    rows = compare_strategies(seen, judged, step=STEP, maxima=maxima)
    results = {row.strategy: row for row in rows}
    hindsight = {
        row.strategy: row for row in compare_strategies(judged, judged, step=STEP, maxima=maxima)
    }
    cells = [f"{results['lin'].padding:.1%} ({results['lin'].graphs:,})"]
    for rule in ("exp", "pad"):
        fit = results[f"fit as {rule}"]
        ratio = fit.padding / results[rule].padding
        best = hindsight[f"fit as {rule}"].padding / results[rule].padding
        cells.append(f"{results[rule].padding:.1%} ({results[rule].graphs:,})")
        cells.append(f"**{fit.padding:.1%}**, {ratio:.2f} × ({best:.2f})")
    print(f"| {label} | {' | '.join(cells)} |")


def print_tails(label: str, batches: np.ndarray, served: int) -> None:
    """Print one row: mean padding, and the tokens of padding of the p99 and the worst batch."""
    seen, judged = np.array_split(batches, [len(batches) // 2])
    maxima = (int(batches[:, 0].max()), served)
    cells = []
    for tail in TAILS:
        rows = compare_strategies(seen, judged, step=STEP, maxima=maxima, tail=tail)
        results = {row.strategy: row for row in rows}
        shown = [results["fit as exp"]] if cells else [results["exp"], results["fit as exp"]]
        cells += [f"{row.padding:.1%}, {row.p99_padding:,}, {row.worst_padding:,}" for row in shown]
    print(f"| {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
