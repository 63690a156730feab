"""How long a look-up in a bucket grid takes, beside the scan of a sorted list, as the grid grows.

    python benchmarks/bucketing_find.py

The scan is what runtimes commonly do: bisect into the sorted buckets, then walk to the first that
is large enough in every axis.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left
from collections.abc import Callable

import numpy as np

from trencadis.bucketing import BucketGrid, linear_range

SHAPES, ROUNDS = 10_000, 7
Shape = tuple[int, ...]


def main() -> None:
    """Print one line per grid: microseconds a look-up, the median of the rounds."""
    grids = {
        "batch 1..256 step 32 × blocks 1..8192 step 128": (256, 32, 8192, 128),
        "batch 1..512 step 16 × blocks 1..32768 step 128": (512, 16, 32_768, 128),
        "batch 1..1024 step 8 × blocks 1..98304 step 128": (1024, 8, 98_304, 128),
    }
    print(f"{'grid':<50}{'buckets':>9}{'find':>10}{'scan':>10}{'ratio':>8}")
    for name, (most, batch_step, longest, block_step) in grids.items():
        grid = BucketGrid(
            {
                "batch": linear_range(1, batch_step, most),
                "blocks": linear_range(1, block_step, longest),
            }
        )
        random = np.random.default_rng(0)
        columns = (random.integers(1, size + 1, SHAPES).tolist() for size in (most, longest))
        shapes = list(zip(*columns, strict=True))
        scan = scanner([bucket.shape for bucket in grid])
        found, scanned = microseconds(grid.find, shapes), microseconds(scan, shapes)
        ratio = f"{found / scanned:.2f}"
        print(f"{name:<50}{len(grid):>9,}{found:>7.2f} µs{scanned:>7.2f} µs{ratio:>8}")


def scanner(buckets: list[Shape]) -> Callable[[Shape], Shape | None]:
    """A look-up by bisection and scan over sorted buckets."""

    def scan(shape: Shape) -> Shape | None:
        for at in range(bisect_left(buckets, shape), len(buckets)):
            candidate = buckets[at]
            if candidate[0] >= shape[0] and candidate[1] >= shape[1]:
                return candidate
        return None

    return scan


def microseconds(look_up: Callable[[Shape], object], shapes: list[Shape]) -> float:
    """The time of one look-up, the median of several rounds over all shapes."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for shape in shapes:
            look_up(shape)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / len(shapes) * 1e6


if __name__ == "__main__":
    main()
