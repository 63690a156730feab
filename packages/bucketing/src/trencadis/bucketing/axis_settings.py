"""One axis of a serving grid: a strategy's defaults, the user's settings over them, its values."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs

from trencadis.bucketing.config import AxisConfig
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.ranges import exponential_range, linear_range, padding_aware_range
from trencadis.bucketing.rounding import ceil_div

logger = logging.getLogger(__name__)

# What the log line shows of an axis, under which strategy: the names of AxisPlan's settings.
_SHOWN = {
    "lin": ("min", "step", "max"),
    "exp": ("min", "step", "max", "limit"),
    "fit": ("min", "step", "max", "limit"),
    "pad": ("min", "step", "max", "pad_max", "pad_percent"),
}


@attrs.frozen(kw_only=True)
class AxisPlan:
    """The settings in force for one axis, and the values it takes.

    Attributes:
        axis: the name in the grid.
        label: the name in the log line, as the plugin has it.
        min ... pad_percent: as in `AxisConfig`, with nothing left open.
        values: increasing, the last one `max`.
    """

    axis: str
    label: str
    min: int
    step: int
    max: int
    limit: int
    pad_max: int
    pad_percent: int
    values: tuple[int, ...] = ()


def plan_axis(
    axis: str,
    *,
    strategy: str,
    user: AxisConfig,
    default: AxisConfig,
    ceiling: int,
    label: str = "",
) -> AxisPlan:
    """Plan one axis whose sizes reach `ceiling`, the most that the serving limits allow.

    Whatever the range does, the values end at `ceiling`, or at the `max` of the user where that is
    lower. A `min` above that end is lowered to it, as the plugin does: the number of KV cache
    blocks, for one, is not known to whoever sets the variable.

    Raises:
        BucketingError: a `max` of 0 for an axis of which there is always something.
    """
    high = ceiling if user.max is None else min(user.max, ceiling)
    low = _first(user.min, default.min, 1)
    if high == 0 and default.min:
        raise BucketingError(f"{axis} bucket max 0 leaves nothing to run: give at least 1")
    if low > high:
        if user.min is not None:
            logger.warning("%s bucket min %d is lowered to %d, the most there is", axis, low, high)
        low = high
    doublings = max(high - 1, 0).bit_length()
    # Where there may be none of something, that has a bucket beside the one for some.
    fewest = 2 if default.min == 0 else 1
    plan = AxisPlan(
        axis=axis,
        label=label or axis,
        min=low,
        step=_first(user.step, default.step, 1),
        max=high,
        limit=_first(user.limit, default.limit, max(fewest, doublings + 1)),
        pad_max=_first(user.pad_max, default.pad_max, ceil_div(high, 4)),
        pad_percent=_first(user.pad_percent, default.pad_percent, 25),
    )
    values = _range(strategy, plan)
    if not values or values[-1] < high:
        values = (*values, high)
    return attrs.evolve(plan, values=values)


def origin_line(phase: str, strategy: str, plans: Sequence[AxisPlan]) -> str:
    """The log line of the settings, as Gaudi's plugin prints it."""
    shown = _SHOWN[strategy]
    names = ", ".join("max_warmup" if name == "max" else name for name in shown)
    axes = (f"{plan.label}:{[getattr(plan, name) for name in shown]}" for plan in plans)
    return f"{phase.capitalize()} bucket config ({names}) {', '.join(axes)}"


def _range(strategy: str, plan: AxisPlan) -> tuple[int, ...]:
    if strategy == "lin":
        return linear_range(plan.min, plan.step, plan.max)
    if strategy == "pad":
        return padding_aware_range(plan.min, plan.step, plan.max, plan.pad_max, plan.pad_percent)
    # Also where `fit` has no traffic for an axis.
    return exponential_range(plan.min, plan.step, plan.max, plan.limit)


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)
