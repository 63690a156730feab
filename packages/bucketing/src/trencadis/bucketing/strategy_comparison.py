"""How much each strategy pads the same traffic."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from trencadis.bucketing.config import BucketingConfig
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.rounding import IntArray
from trencadis.bucketing.serving_grids import prompt_axes
from trencadis.bucketing.strategies import STRATEGIES, fitted_axes, padded


@attrs.frozen
class StrategyResult:
    """The padding of one strategy on given traffic.

    Attributes:
        strategy: its name; that of a fit says how many graphs it was allowed.
        batch, length: the values of the two axes, in sequences and in tokens.
        padding: padded tokens over real tokens, less 1.
        worst_padding: the most tokens of padding in a single batch.
    """

    strategy: str
    batch: tuple[int, ...]
    length: tuple[int, ...]
    padding: float
    worst_padding: int

    @property
    def graphs(self) -> int:
        """The number of buckets in the product of the axes."""
        return len(self.batch) * len(self.length)


def compare_strategies(
    seen: IntArray,
    judged: IntArray,
    *,
    step: int,
    maxima: tuple[int, int],
    budget: int | None = None,
    counts: IntArray | None = None,
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
        counts: how often each row of `seen` came, where `judged` has the same rows.

    Raises:
        BucketingError: no rows, or rows above `maxima`.
    """
    if not len(judged) or judged.min() < 1 or (judged.max(axis=0) > maxima).any():
        raise BucketingError(
            f"no batches to judge, or some empty or above {maxima}: raise the maxima"
        )
    results = [
        _judge(name, _default_axes(name, step, maxima), judged, counts)
        for name, strategy in STRATEGIES.items()
        if strategy.fit is None
    ]
    budgets = {f"fit as {row.strategy}": row.graphs for row in results if row.strategy != "lin"}
    if budget is not None:
        budgets[f"fit to {budget}"] = budget
    for name, graphs in budgets.items():
        axes = fitted_axes(seen, (1, step), maxima, graphs, counts)
        results.append(_judge(name, axes, judged, counts))
    return tuple(results)


def best_fit(results: Sequence[StrategyResult]) -> StrategyResult:
    """The fit within the budget asked for, or else the one with as many graphs as `exp`."""
    by_name = {result.strategy: result for result in results}
    asked = (result for result in results if result.strategy.startswith("fit to"))
    return next(asked, by_name["fit as exp"])


def _default_axes(
    name: str, step: int, maxima: tuple[int, int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The first two axes of a prompt grid without other settings, in blocks of `step` tokens."""
    max_batch, max_length = maxima
    axes = prompt_axes(
        BucketingConfig(strategy=name),
        (max_batch, max_length, 0),
        max_num_batched_tokens=max_length,
        block_size=step,
    )[:2]
    values = STRATEGIES[name].values(axes)
    return values["batch"], values["query"]


def _judge(
    name: str,
    axes: tuple[tuple[int, ...], tuple[int, ...]],
    judged: IntArray,
    counts: IntArray | None,
) -> StrategyResult:
    batch, length = axes
    real_tokens = judged[:, 0] * judged[:, 1]
    padded_tokens = padded(batch, judged[:, 0]) * padded(length, judged[:, 1])
    weights = np.ones_like(real_tokens) if counts is None else counts
    padding = float((padded_tokens * weights).sum() / (real_tokens * weights).sum() - 1)
    return StrategyResult(name, batch, length, padding, int((padded_tokens - real_tokens).max()))
