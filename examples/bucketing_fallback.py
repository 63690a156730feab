"""A runtime that compiles a shape after a bucket miss, and finds it from then on."""

from __future__ import annotations

from trencadis.bucketing import Bucket, BucketGrid, exponential_range


class Runtime:
    """Pads every batch to a compiled shape."""

    def __init__(self, grid: BucketGrid) -> None:
        self.grid = grid
        self.compiled = set(grid.buckets)

    def run(self, batch: int, length: int) -> Bucket:
        bucket = self.grid.find((batch, length))
        if bucket is None:
            bucket = self.grid.fallback((batch, length))
            self.compiled.add(bucket)  # here your compiler runs, for seconds
            self.grid = self.grid.with_bucket(bucket.shape)
        return bucket


def main() -> None:
    axes = {"batch": (1, 2, 4, 8), "length": exponential_range(128, 128, 1024, 5)}
    runtime = Runtime(BucketGrid(axes))
    for batch, length in [(3, 200), (3, 1500), (4, 1400), (1, 90)]:
        print((batch, length), "runs as", runtime.run(batch, length).shape)
    print(len(runtime.compiled), "shapes are compiled")


if __name__ == "__main__":
    main()
