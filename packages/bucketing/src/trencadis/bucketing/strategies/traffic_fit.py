"""The axes of a grid fitted to recorded traffic."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np

from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.rounding import IntArray
from trencadis.bucketing.strategies.axis_settings import AxisSettings
from trencadis.bucketing.strategies.fitted_ranges import fitted_axes, fitted_range
from trencadis.bucketing.traffic import TrafficRecorder

logger = logging.getLogger(__name__)

DEFAULT_TAIL = 3.0
"""The tail weight of the fit strategy and of the command. On the traces of
`docs/bucketing/measurements.md` it lowers the worst batch to a fraction and often the mean padding
of later traffic too."""


def fit_to_traffic(
    axes: Sequence[AxisSettings], traffic: TrafficRecorder
) -> dict[str, tuple[int, ...]]:
    """The values of every axis that was recorded, by name.

    The first two axes are fitted together, within the product of their limits; any other axis is
    fitted alone. Shapes above the `max` of an axis are left out, with a warning.

    Args:
        axes: the axes of the grid.
        traffic: recorded shapes, with the grid's names of the axes, in any order.

    Raises:
        BucketingError: the traffic has no axis of the grid, or no shape within its limits.
    """
    recorded = _recorded_axes(axes, traffic)
    sizes, counts = _shapes_within_limits(recorded, traffic)
    if len(axes) > 1 and axes[0].name in sizes and axes[1].name in sizes:
        together, alone = axes[:2], [axis for axis in axes[2:] if axis.name in sizes]
    else:
        together, alone = [], recorded
    values = _fit_together(together, sizes, counts) if together else {}
    for axis in alone:
        values[axis.name] = fitted_range(
            sizes[axis.name], axis.step, axis.max, axis.limit, counts, tail=DEFAULT_TAIL
        )
    return values


def _recorded_axes(axes: Sequence[AxisSettings], traffic: TrafficRecorder) -> list[AxisSettings]:
    recorded = [axis for axis in axes if axis.name in traffic.axes]
    if not recorded:
        raise BucketingError(
            f"the traffic has axes {', '.join(traffic.axes)}, and the grid "
            f"{', '.join(axis.name for axis in axes)}: record the axes of the grid"
        )
    return recorded


def _shapes_within_limits(
    recorded: Sequence[AxisSettings], traffic: TrafficRecorder
) -> tuple[dict[str, IntArray], IntArray]:
    """Sizes by axis, raised to the axis's `min`, and how often each shape was recorded."""
    shapes, counts = traffic.shapes()
    columns = {axis.name: shapes[:, traffic.axes.index(axis.name)] for axis in recorded}
    within = np.all([columns[axis.name] <= axis.max for axis in recorded], axis=0)
    if not within.any():
        raise BucketingError(
            "no recorded shape is within the limits of the grid: raise "
            + ", ".join(f"the max of {axis.name}, {axis.max}" for axis in recorded)
        )
    if not within.all():
        left_out = int(counts[~within].sum())
        logger.warning(
            "%d of %d recorded shapes are above the limits and ignored", left_out, counts.sum()
        )
    # Every fit pads a size below min to min.
    sizes = {axis.name: np.maximum(columns[axis.name][within], axis.min) for axis in recorded}
    return sizes, counts[within]


def _fit_together(
    pair: Sequence[AxisSettings], sizes: Mapping[str, IntArray], counts: IntArray
) -> dict[str, tuple[int, ...]]:
    first, second = pair
    fitted = fitted_axes(
        np.column_stack([sizes[first.name], sizes[second.name]]),
        (first.step, second.step),
        (first.max, second.max),
        first.limit * second.limit,
        counts,
        tail=DEFAULT_TAIL,
    )
    return dict(zip((first.name, second.name), fitted, strict=True))
