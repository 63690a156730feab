"""What bucketing strategies pad of real traffic: fitted on its first half, judged on its second.

Prints the tables of packages/bucketing/README.md as Markdown:

    python benchmarks/bucketing_traffic.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trencadis.bucketing import Trace, compare_strategies

DATA = Path(__file__).parent / "data" / "azure_2023.npz"
STEP = 128
CONTEXT = 131_072
"""Of Llama 3.1, and the setting that this library is judged by."""
SHORTER = 16_384
WINDOW_SECONDS, MAX_NUM_SEQS = 1.0, 16


def main() -> None:
    """Print the table for the whole context, then the same for grids that end sooner."""
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
    print("\nGrids that end sooner, at the longest prompt of the trace or at a common setting:\n")
    print_header()
    for name, rows in batches.items():
        for served in (-(-int(rows[:, 1].max()) // STEP) * STEP, SHORTER):
            print_row(f"{name}, {served:,}", rows, served)


def print_header() -> None:
    """The head of a Markdown table."""
    print("| trace | `lin` | `exp` | fit, as many graphs | `pad` | fit, as many graphs |")
    print("|---|---|---|---|---|---|")


def print_row(label: str, batches: np.ndarray, served: int) -> None:
    """One trace: padding of every strategy on the second half, with its graphs."""
    seen, judged = np.array_split(batches, [len(batches) // 2])
    maxima = (int(batches[:, 0].max()), served)
    rows = compare_strategies(seen, judged, step=STEP, maxima=maxima)
    found = {row.strategy: row for row in rows}
    hindsight = {
        row.strategy: row for row in compare_strategies(judged, judged, step=STEP, maxima=maxima)
    }
    cells = [f"{found['lin'].padding:.1%} ({found['lin'].graphs:,})"]
    for rule in ("exp", "pad"):
        fit = found[f"fit as {rule}"]
        ratio = fit.padding / found[rule].padding
        best = hindsight[f"fit as {rule}"].padding / found[rule].padding
        cells.append(f"{found[rule].padding:.1%} ({found[rule].graphs:,})")
        cells.append(f"**{fit.padding:.1%}**, {ratio:.2f} × ({best:.2f})")
    print(f"| {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
