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
# Beside the longest prompt of a trace: a common setting, and the whole context of Llama 3.1.
SERVED = (16_384, 131_072)
WINDOW_SECONDS, MAX_NUM_SEQS = 1.0, 16


def main() -> None:
    """Print both tables."""
    arrays = np.load(DATA)
    traces = {
        f"azure_{name}": Trace(
            arrays[f"{name}_lengths"].astype(np.int64), arrays[f"{name}_arrivals_ms"] / 1000
        )
        for name in ("code", "conv")
    }
    print("Prompts one by one:\n")
    print_table(traces, {name: trace.requests() for name, trace in traces.items()})
    print(f"\nPrompts that arrive within {WINDOW_SECONDS:g} s batched, {MAX_NUM_SEQS} at most:\n")
    gathered = {name: t.batches(WINDOW_SECONDS, MAX_NUM_SEQS) for name, t in traces.items()}
    print_table(traces, gathered)


def print_table(traces: dict[str, Trace], batches: dict[str, np.ndarray]) -> None:
    """A Markdown table with a row per trace and longest length served."""
    print("| trace, served | `lin` | `exp` | fit, as many graphs | `pad` | fit, as many graphs |")
    print("|---|---|---|---|---|---|")
    for name, trace in traces.items():
        longest = -(-int(trace.lengths.max()) // STEP) * STEP
        for served in (longest, *SERVED):
            print_row(f"{name}, {served:,}", batches[name], served)


def print_row(label: str, batches: np.ndarray, served: int) -> None:
    """One trace: padding of every strategy on the second half, with its graphs."""
    half = len(batches) // 2
    rows = compare_strategies(
        batches[:half],
        batches[half:],
        step=STEP,
        maxima=(int(batches[:, 0].max()), served),
    )
    found = {row.strategy: row for row in rows}
    cells = [f"{found['lin'].padding:.1%} ({found['lin'].graphs:,})"]
    for rule in ("exp", "pad"):
        fit = found[f"fit as {rule}"]
        ratio = fit.padding / found[rule].padding
        cells.append(f"{found[rule].padding:.1%} ({found[rule].graphs:,})")
        cells.append(f"**{fit.padding:.1%}**, {ratio:.2f} ×")
    print(f"| {label} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
