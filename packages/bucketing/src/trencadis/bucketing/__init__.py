"""Shape buckets for compiled LLM serving: ranges, grids, and grids fitted to real traffic."""

from typing import TYPE_CHECKING

from trencadis.bucketing.bucket_file import ListedBuckets, read_bucket_file, write_bucket_file
from trencadis.bucketing.config import AxisConfig, BucketingConfig, describe_variables
from trencadis.bucketing.errors import BucketingError, UnknownAxis
from trencadis.bucketing.grid import Bucket, BucketGrid, CoverageGap, fallback_size
from trencadis.bucketing.serving_grids import decode_grid, prompt_grid, sequence_grid
from trencadis.bucketing.strategies import (
    exponential_range,
    fitted_axes,
    fitted_range,
    linear_range,
    padding_aware_range,
)
from trencadis.bucketing.strategy_comparison import StrategyResult, compare_strategies
from trencadis.bucketing.traffic import Trace, TrafficRecorder, read_trace

__all__ = [
    "AxisConfig",
    "Bucket",
    "BucketGrid",
    "BucketingConfig",
    "BucketingError",
    "CoverageGap",
    "ListedBuckets",
    "StrategyResult",
    "Trace",
    "TrafficRecorder",
    "UnknownAxis",
    "compare_strategies",
    "decode_grid",
    "describe_variables",
    "exponential_range",
    "fallback_size",
    "fitted_axes",
    "fitted_range",
    "linear_range",
    "padding_aware_range",
    "prompt_grid",
    "read_bucket_file",
    "read_trace",
    "sequence_grid",
    "write_bucket_file",
]

if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name: str) -> str:
        """Looks the version up on first use: ``importlib.metadata`` takes 30 ms to import."""
        if name == "__version__":
            from importlib.metadata import version  # noqa: PLC0415

            return version("trencadis-bucketing")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
