"""Grids of buckets: which bucket a shape is padded to, which shapes can come, and the costs."""

from trencadis.bucketing.grid.bucket import Bucket, PromptCost, Shape
from trencadis.bucketing.grid.bucket_grid import BucketGrid
from trencadis.bucketing.grid.fallback_sizes import fallback_size
from trencadis.bucketing.grid.lookup_table import CoverageGap
from trencadis.bucketing.grid.reachable_shapes import (
    ReachableDecodeShapes,
    ReachablePromptShapes,
    every_shape,
)

__all__ = [
    "Bucket",
    "BucketGrid",
    "CoverageGap",
    "PromptCost",
    "ReachableDecodeShapes",
    "ReachablePromptShapes",
    "Shape",
    "every_shape",
    "fallback_size",
]
