"""The `fit` strategy: planned axes whose values come from recorded traffic instead of a rule."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import attrs
import numpy as np

from trencadis.bucketing.array_types import IntArray
from trencadis.bucketing.axis_settings import AxisPlan
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.fitted_ranges import fitted_axes, fitted_range
from trencadis.bucketing.traffic_recorder import TrafficRecorder

logger = logging.getLogger(__name__)


def fit_plans(
    plans: Sequence[AxisPlan], traffic: TrafficRecorder | None, variable: str
) -> tuple[AxisPlan, ...]:
    """Fit the first two axes together, any further one alone; an axis not recorded stays as it is.

    Args:
        plans: the axes of the grid; their limits, multiplied, are the budget of graphs.
        traffic: shapes seen, with axes named as in the plans, in any order.
        variable: the setting to name where there is no traffic.

    Raises:
        BucketingError: no traffic, or none that the plans could serve.
    """
    if traffic is None:
        raise BucketingError(
            f"strategy fit has no traffic to fit to: set {variable} to a file that "
            "TrafficRecorder.save wrote, or choose exp, lin or pad"
        )
    shapes, counts = traffic.shapes()
    sizes = {axis: shapes[:, i] for i, axis in enumerate(traffic.axes)}
    recorded = [plan for plan in plans if plan.axis in sizes]
    if not recorded:
        raise BucketingError(
            f"the traffic has axes {', '.join(traffic.axes)}, and the grid "
            f"{', '.join(plan.axis for plan in plans)}: record the axes of the grid"
        )
    within = np.all([sizes[plan.axis] <= plan.max for plan in recorded], axis=0)
    if not within.any():
        raise BucketingError(
            "no recorded shape is within the limits of the grid: raise "
            + ", ".join(f"the max of {plan.axis}, {plan.max}" for plan in recorded)
        )
    if not within.all():
        missed = int(counts[~within].sum())
        logger.warning("%d of %d recorded shapes are past the limits", missed, counts.sum())
    # A size below min pads to min whatever the fit.
    seen = {plan.axis: np.maximum(sizes[plan.axis][within], plan.min) for plan in recorded}
    values = _fitted(plans, seen, counts[within])
    return tuple(attrs.evolve(plan, values=values.get(plan.axis, plan.values)) for plan in plans)


def _fitted(
    plans: Sequence[AxisPlan], seen: dict[str, IntArray], counts: IntArray
) -> dict[str, tuple[int, ...]]:
    values: dict[str, tuple[int, ...]] = {}
    alone = [plan for plan in plans if plan.axis in seen]
    first, second = plans[:2]
    if first.axis in seen and second.axis in seen:
        values[first.axis], values[second.axis] = fitted_axes(
            np.column_stack([seen[first.axis], seen[second.axis]]),
            (first.step, second.step),
            (first.max, second.max),
            first.limit * second.limit,
            counts,
        )
        alone = [plan for plan in alone if plan.axis not in values]
    for plan in alone:
        values[plan.axis] = fitted_range(seen[plan.axis], plan.step, plan.max, plan.limit, counts)
    return values
