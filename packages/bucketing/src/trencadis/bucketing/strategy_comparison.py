"""What each strategy pads of the same traffic: the table that says whether a fit is worth it."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from trencadis.bucketing.array_types import IntArray
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.fitted_ranges import fitted_axes, padded
from trencadis.bucketing.ranges import exponential_range, linear_range, padding_aware_range
from trencadis.bucketing.rounding import ceil_div


@attrs.frozen
class Comparison:
    """One strategy on one piece of traffic.

    Attributes:
        strategy: its name; a fit says to how many graphs it was held.
        batch, length: the values of the two axes.
        padding: padded over real tokens, less 1.
        worst: the most tokens of padding in a single batch.
    """

    strategy: str
    batch: tuple[int, ...]
    length: tuple[int, ...]
    padding: float
    worst: int

    @property
    def graphs(self) -> int:
        """How many buckets the product of the axes has."""
        return len(self.batch) * len(self.length)


def compare_strategies(
    seen: IntArray,
    judged: IntArray,
    *,
    step: int,
    maxima: tuple[int, int],
    budget: int | None = None,
    counts: IntArray | None = None,
) -> tuple[Comparison, ...]:
    """Judge `lin`, `exp` and `pad` as Gaudi's plugin sets them, and fits with as many graphs.

    Args:
        seen: what the fits may look at, one row (batch, length) per batch.
        judged: what all are judged on, in the same form; `seen` itself, or what came later.
        step: granularity of the length, in tokens.
        maxima: the largest batch and the largest length that may come.
        budget: graphs of one more fit, beside those held to the graphs of `exp` and `pad`.
        counts: how often each row of `seen` came, where that is also the traffic judged.

    Raises:
        BucketingError: no rows, or rows past `maxima`.
    """
    if not len(judged) or judged.min() < 1 or (judged.max(axis=0) > maxima).any():
        raise BucketingError(
            f"no batches to judge, or some empty or past {maxima}: raise the maxima"
        )
    rules = _rules(step, *maxima)
    rows = [_judge(name, *values, judged, counts) for name, values in rules.items()]
    held = {f"fit as {row.strategy}": row.graphs for row in rows if row.strategy != "lin"}
    if budget is not None:
        held[f"fit to {budget}"] = budget
    for name, graphs in held.items():
        values = fitted_axes(seen, (1, step), maxima, graphs, counts)
        rows.append(_judge(name, *values, judged, counts))
    return tuple(rows)


def best_fit(rows: Sequence[Comparison]) -> Comparison:
    """The fit with the budget asked for, or else the one with as many graphs as `exp`."""
    fits = {row.strategy: row for row in rows}
    return next((row for row in rows if row.strategy.startswith("fit to")), fits["fit as exp"])


def _rules(
    step: int, most: int, longest: int
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """The axes of the plugin's strategies for at most this batch and length."""
    first, quarter, doublings = min(step, longest), ceil_div(longest, 4), (longest - 1).bit_length()
    linear = linear_range(first, step, longest)
    return {
        "lin": (
            linear_range(1, 1, most),
            linear if linear and linear[-1] == longest else (*linear, longest),
        ),
        "exp": (
            exponential_range(1, 2, most, (most - 1).bit_length() + 1),
            exponential_range(first, step, longest, max(2, doublings)),
        ),
        "pad": (
            padding_aware_range(1, 1, most, ceil_div(most, 4), 25),
            padding_aware_range(first, step, longest, quarter, 25),
        ),
    }


def _judge(
    name: str,
    batch: Sequence[int],
    length: Sequence[int],
    judged: IntArray,
    counts: IntArray | None,
) -> Comparison:
    real = judged[:, 0] * judged[:, 1]
    full = padded(batch, judged[:, 0]) * padded(length, judged[:, 1])
    weights = np.ones_like(real) if counts is None else counts
    share = float((full * weights).sum() / (real * weights).sum() - 1)
    return Comparison(name, tuple(batch), tuple(length), share, int((full - real).max()))
