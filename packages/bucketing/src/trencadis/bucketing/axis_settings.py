"""The settings of one axis of a grid, complete: the user's over the defaults, within the limits."""

from __future__ import annotations

import logging

import attrs

from trencadis.bucketing.axis_config import AxisConfig
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.rounding import ceil_div

logger = logging.getLogger(__name__)


@attrs.frozen(kw_only=True)
class AxisSettings:
    """The settings that a strategy computes the values of one axis from.

    Attributes:
        name: the name of the axis in the grid.
        label: its name in the log line, as in Gaudi's plugin.
        min ... pad_percent: as in `AxisConfig`, none of them None.
    """

    name: str
    label: str
    min: int
    step: int
    max: int
    limit: int
    pad_max: int
    pad_percent: int


def resolve_axis(
    name: str, *, label: str, user: AxisConfig, default: AxisConfig, ceiling: int
) -> AxisSettings:
    """The settings of an axis whose sizes can reach `ceiling`, the serving limit.

    `max` is the user's, or `ceiling` where that is lower. A `min` above `max` is lowered to it, as
    in Gaudi's plugin: a user who sets the minimum number of KV cache blocks does not know yet how
    many blocks there will be.

    Args:
        name: the name of the axis.
        label: its name in the log line.
        user: the user's settings.
        default: the settings for what the user leaves open. A `min` of 0 says that a batch may
            have nothing on this axis, such as no context.
        ceiling: the largest size that the serving limits allow.

    Raises:
        BucketingError: a `max` of 0 on an axis whose sizes start at 1.
    """
    max_size = ceiling if user.max is None else min(user.max, ceiling)
    if max_size == 0 and default.min:
        raise BucketingError(f"{name} bucket max 0 leaves nothing to run: give at least 1")
    min_size = _first_set(user.min, default.min, 1)
    if min_size > max_size:
        if user.min is not None:
            logger.warning(
                "%s bucket min %d is lowered to %d, the largest size that can come",
                name,
                min_size,
                max_size,
            )
        min_size = max_size
    doublings = max(max_size - 1, 0).bit_length()
    # An axis that starts at 0 needs two buckets at least: one for 0, one for the rest.
    fewest = 2 if default.min == 0 else 1
    return AxisSettings(
        name=name,
        label=label,
        min=min_size,
        step=_first_set(user.step, default.step, 1),
        max=max_size,
        limit=_first_set(user.limit, default.limit, max(fewest, doublings + 1)),
        pad_max=_first_set(user.pad_max, default.pad_max, ceil_div(max_size, 4)),
        pad_percent=_first_set(user.pad_percent, default.pad_percent, 25),
    )


def _first_set(*values: int | None) -> int:
    return next(value for value in values if value is not None)
