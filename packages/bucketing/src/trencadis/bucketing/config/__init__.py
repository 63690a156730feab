"""The settings of bucketing: their environment variables, and the files that they name."""

from trencadis.bucketing.config.axis_config import AxisConfig
from trencadis.bucketing.config.bucketing_config import (
    BucketingConfig,
    Phase,
    describe_axis_settings,
    describe_variables,
)
from trencadis.bucketing.config.environment import variable_of
from trencadis.bucketing.config.files import listed_buckets, recorded_traffic

__all__ = [
    "AxisConfig",
    "BucketingConfig",
    "Phase",
    "describe_axis_settings",
    "describe_variables",
    "listed_buckets",
    "recorded_traffic",
    "variable_of",
]
