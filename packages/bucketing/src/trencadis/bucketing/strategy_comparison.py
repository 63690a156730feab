"""How much each strategy pads the same traffic."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from trencadis.bucketing.config import BucketingConfig
from trencadis.bucketing.errors import BucketingError, shown
from trencadis.bucketing.rounding import IntArray
from trencadis.bucketing.serving_grids import PromptLimits, prompt_axes
from trencadis.bucketing.shapes import checked_limits, integer_array
from trencadis.bucketing.strategies import (
    STRATEGIES,
    Weights,
    checked_weights,
    fitted_axes,
    padded,
)


@attrs.frozen
class StrategyResult:
    """The padding of one strategy on given traffic.

    Attributes:
        strategy: its name; that of a fit says how many graphs it was allowed.
        batch, length: the values of the two axes, in sequences and in tokens.
        padding: padded tokens over real tokens, less 1.
        p99_padding: 99 of 100 batches have at most this many tokens of padding.
        worst_padding: the most tokens of padding in a single batch.
    """

    strategy: str
    batch: tuple[int, ...]
    length: tuple[int, ...]
    padding: float
    p99_padding: int
    worst_padding: int

    @property
    def graphs(self) -> int:
        """The number of buckets in the product of the axes."""
        return len(self.batch) * len(self.length)


def compare_strategies(
    seen: npt.ArrayLike,
    judged: npt.ArrayLike,
    *,
    step: int,
    maxima: tuple[int, int],
    budget: int | None = None,
    counts: npt.ArrayLike | None = None,
    judged_counts: npt.ArrayLike | None = None,
    tail: float = 0.0,
) -> tuple[StrategyResult, ...]:
    """The padding of every strategy with its defaults, and of fits with as many graphs.

    First come the strategies that need no traffic, in the order of `STRATEGIES`. Then comes a fit
    with as many graphs as each of them, except `lin`: with that many graphs there is no choice to
    make.

    Args:
        seen: the batches that the fits may use, one row (batch, length) each.
        judged: the batches that all are measured on, in the same form; `seen` or later batches.
        step: granularity of the length, in tokens.
        maxima: the largest batch and the largest length that can come.
        budget: graphs of one more fit.
        counts: how often each row of `seen` came; default 1.
        judged_counts: how often each row of `judged` came; default 1, or `counts` where `judged`
            has as many rows as `seen`.
        tail: how much more the fits avoid batches with much padding, as for `fitted_axes`.

    Raises:
        BucketingError: no rows, or rows above `maxima`; an argument of the wrong type.
    """
    maxima = _checked_maxima(maxima)
    (step,) = checked_limits(step=step)
    if budget is not None:
        (budget,) = checked_limits(budget=budget)
    rows, judged_rows = _batch_rows("seen", seen), _batch_rows("judged", judged)
    if not len(judged_rows) or judged_rows.min() < 1 or (judged_rows.max(axis=0) > maxima).any():
        raise BucketingError(
            f"no batches to judge, or some empty or above {maxima}: raise the maxima"
        )
    if judged_counts is None and len(rows) == len(judged_rows):
        judged_counts = counts
    weights = checked_weights(judged_counts, len(judged_rows))
    results = [
        _judge(name, _default_axes(name, step, *maxima), judged_rows, weights)
        for name, strategy in STRATEGIES.items()
        if strategy.fit is None
    ]
    budgets = {f"fit as {row.strategy}": row.graphs for row in results if row.strategy != "lin"}
    if budget is not None:
        budgets[f"fit to {budget}"] = budget
    for name, graphs in budgets.items():
        axes = fitted_axes(rows, (1, step), maxima, graphs, counts, tail=tail)
        results.append(_judge(name, axes, judged_rows, weights))
    return tuple(results)


def best_fit(results: Sequence[StrategyResult]) -> StrategyResult:
    """The fit within the budget asked for, or else the one with as many graphs as `exp`."""
    by_name = {result.strategy: result for result in results}
    asked = (result for result in results if result.strategy.startswith("fit to"))
    return next(asked, by_name["fit as exp"])


def _checked_maxima(maxima: tuple[int, int]) -> tuple[int, int]:
    try:
        max_batch, max_length = maxima
    except (TypeError, ValueError):
        raise BucketingError(
            f"maxima {shown(maxima)} are not a pair: give the largest batch and length"
        ) from None
    max_batch, max_length = checked_limits(max_batch=max_batch, max_length=max_length)
    return max_batch, max_length


def _batch_rows(name: str, batches: npt.ArrayLike) -> IntArray:
    rows = integer_array(f"{name} batches", batches)
    if rows.ndim != 2 or rows.shape[1] != 2:
        raise BucketingError(
            f"{name} batches of shape {rows.shape} are not rows (batch, length): give two columns"
        )
    return rows


def _default_axes(
    name: str, step: int, max_batch: int, max_length: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first two axes of a prompt grid without other settings, in blocks of `step` tokens."""
    limits = PromptLimits(
        max_model_len=max_length,
        max_num_batched_tokens=max_length,
        max_num_seqs=max_batch,
        block_size=step,
    )
    axes = prompt_axes(BucketingConfig(strategy=name), limits)[:2]
    values = STRATEGIES[name].values(axes)
    return values["batch"], values["query"]


def _judge(
    name: str, axes: tuple[tuple[int, ...], tuple[int, ...]], judged: IntArray, weights: Weights
) -> StrategyResult:
    batch, length = axes
    real_tokens = judged[:, 0] * judged[:, 1]
    padded_tokens = padded(batch, judged[:, 0]) * padded(length, judged[:, 1])
    # As floats: counts times tokens may exceed 64 bits.
    share = weights / weights.sum()
    padding = float(share @ padded_tokens) / float(share @ real_tokens) - 1
    tokens = padded_tokens - real_tokens
    return StrategyResult(
        name, batch, length, padding, _percentile(tokens, weights, 0.99), int(tokens.max())
    )


def _percentile(values: IntArray, weights: Weights, share: float) -> int:
    """The smallest value that at least `share` of the weight does not exceed."""
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return int(values[order][np.searchsorted(below, share * below[-1])])
