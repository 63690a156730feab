"""Bucketing strategies: functions that compute the values of axes, and the table of them."""

from trencadis.bucketing.strategies.axis_settings import AxisSettings
from trencadis.bucketing.strategies.fitted_ranges import (
    MAX_TAIL,
    Weights,
    checked_weights,
    fitted_axes,
    fitted_range,
    padded,
)
from trencadis.bucketing.strategies.ranges import (
    exponential_range,
    linear_range,
    padding_aware_range,
)
from trencadis.bucketing.strategies.table import STRATEGIES, Size, Strategy
from trencadis.bucketing.strategies.traffic_fit import DEFAULT_TAIL

__all__ = [
    "DEFAULT_TAIL",
    "MAX_TAIL",
    "STRATEGIES",
    "AxisSettings",
    "Size",
    "Strategy",
    "Weights",
    "checked_weights",
    "exponential_range",
    "fitted_axes",
    "fitted_range",
    "linear_range",
    "padded",
    "padding_aware_range",
]
