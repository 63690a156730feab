"""Time of a look-up in a bucket grid, next to a scan of the sorted buckets, as the grid grows.

    python benchmarks/bucketing_find.py

The scan is what runtimes commonly do: a bisection into the sorted buckets, then a linear search for
the first bucket that is large enough on every axis.

Ten thousand random shapes meet nearly as many different buckets of a large grid, more than the
processor's cache holds. Two more measurements separate the look-up from these cache misses. *bare*
gets the positions along both axes and only reads the table and the bucket, which every look-up has
to do. *few* looks up the same hundred shapes, as many as a server uses at a time.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from trencadis.bucketing import Bucket, BucketGrid, linear_range

SHAPES, FEW, ROUNDS = 10_000, 100, 15
Shape: TypeAlias = tuple[int, ...]
Run: TypeAlias = tuple[Callable[[Shape], object], list[Shape]]
GRIDS = {
    "batch 1..256 step 32 × blocks 1..8192 step 128": (256, 32, 8192, 128),
    "batch 1..512 step 16 × blocks 1..32768 step 128": (512, 16, 32_768, 128),
    "batch 1..1024 step 8 × blocks 1..98304 step 128": (1024, 8, 98_304, 128),
}


def main() -> None:
    """Print one line per grid: nanoseconds per look-up, the median of interleaved rounds."""
    timed = [runs(*sizes) for sizes in GRIDS.values()]
    rounds = [[[nanoseconds(*run) for run in grid] for grid in timed] for _ in range(ROUNDS)]
    medians = np.median(np.array(rounds), axis=0)
    print(f"{'grid':<49}{'buckets':>8}{'find':>8}{'scan':>8}{'ratio':>7}{'few':>8}{'bare':>8}")
    for name, (find, scan, few, bare) in zip(GRIDS, medians, strict=True):
        buckets = len(grid_of(*GRIDS[name]))
        print(
            f"{name:<49}{buckets:>8,}{find:>5.0f} ns{scan:>5.0f} ns{find / scan:>7.2f}"
            f"{few:>5.0f} ns{bare:>5.0f} ns"
        )
    (find, _, few, bare), growth = medians[0], medians[-1] - medians[0]
    print(
        f"\nfrom the first to the last: find {1 + growth[0] / find:.2f} times "
        f"({growth[0]:+.0f} ns), few {1 + growth[2] / few:.2f} times ({growth[2]:+.0f} ns), "
        f"bare {1 + growth[3] / bare:.2f} times ({growth[3]:+.0f} ns)"
    )


def grid_of(most: int, batch_step: int, longest: int, block_step: int) -> BucketGrid:
    """The full product of two linear axes."""
    batch, blocks = (linear_range(1, batch_step, most), linear_range(1, block_step, longest))
    return BucketGrid({"batch": batch, "blocks": blocks})


def runs(most: int, batch_step: int, longest: int, block_step: int) -> list[Run]:
    """The measurements on one grid: a look-up function and the shapes (or positions) to look up."""
    grid = grid_of(most, batch_step, longest, block_step)
    random = np.random.default_rng(0)
    columns = (random.integers(1, size + 1, SHAPES).tolist() for size in (most, longest))
    shapes = list(zip(*columns, strict=True))
    axes = [grid.values(axis) for axis in grid.axes]
    places = [tuple(map(bisect_left, axes, shape)) for shape in shapes]
    return [
        (grid.find, shapes),
        (scanner([bucket.shape for bucket in grid]), shapes),
        (grid.find, shapes[:FEW] * (SHAPES // FEW)),
        (reader(grid), places),
    ]


def scanner(buckets: list[Shape]) -> Callable[[Shape], Shape | None]:
    """A look-up by bisection and scan of sorted buckets."""

    def scan(shape: Shape) -> Shape | None:
        for at in range(bisect_left(buckets, shape), len(buckets)):
            candidate = buckets[at]
            if candidate[0] >= shape[0] and candidate[1] >= shape[1]:
                return candidate
        return None

    return scan


def reader(grid: BucketGrid) -> Callable[[Shape], Bucket]:
    """The bucket at known positions on both axes, without a search."""
    width = len(grid.values("blocks"))
    starts = range(0, len(grid), width)
    rows = tuple(grid.buckets[start : start + width] for start in starts)

    def read(places: Shape) -> Bucket:
        row, column = places
        return rows[row][column]

    return read


def nanoseconds(look_up: Callable[[Shape], object], shapes: list[Shape]) -> float:
    """The time of one look-up, in the second of two passes; the first pass warms the cache."""
    for _ in range(2):
        start = time.perf_counter()
        for shape in shapes:
            look_up(shape)
    return (time.perf_counter() - start) / len(shapes) * 1e9


if __name__ == "__main__":
    main()
