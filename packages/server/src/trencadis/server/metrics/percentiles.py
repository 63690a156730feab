"""Percentiles of the latest observations of a histogram."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import attrs

from trencadis.server.metrics.serving_metrics import ServingMetrics

RECENT_OBSERVATIONS = 60
"""How many calls of `RecentPercentiles.observe` are recent: of one a second, those of a minute."""


@attrs.frozen
class Percentiles:
    """p50 and p99 of a histogram, recent and since the start; None without a value."""

    count: int
    p50: float | None
    p99: float | None
    total_count: int
    total_p50: float | None
    total_p99: float | None


class RecentPercentiles:
    """Percentiles of a histogram of the active model. ``histogram``: its name in the registry."""

    def __init__(self, metrics: ServingMetrics, histogram: str) -> None:
        self._metrics = metrics
        self._histogram = histogram
        self._model = ""
        self._counts: deque[dict[float, float]] = deque(maxlen=RECENT_OBSERVATIONS + 1)

    def forget(self) -> None:
        """Recent is what comes from now on."""
        self._counts.clear()

    def observe(self) -> Percentiles:
        """The percentiles now."""
        if self._metrics.model_name != self._model:
            self._model = self._metrics.model_name
            self.forget()
        total = self._metrics.counts_up_to(self._histogram)
        self._counts.append(total)
        oldest = self._counts[0]
        recent = {bound: count - oldest.get(bound, 0.0) for bound, count in total.items()}
        return Percentiles(
            int(recent.get(math.inf, 0)),
            quantile(0.5, recent),
            quantile(0.99, recent),
            int(total.get(math.inf, 0)),
            quantile(0.5, total),
            quantile(0.99, total),
        )


def quantile(share: float, counts_up_to: Mapping[float, float]) -> float | None:
    """The value below which ``share`` of the observations are, as Prometheus estimates it.

    ``counts_up_to``: the number of observations up to each bound, infinity among them. Linear
    between two bounds; the highest finite bound for what is above it
    (https://prometheus.io/docs/prometheus/latest/querying/functions/#histogram_quantile). None
    without observations.
    """
    count = counts_up_to.get(math.inf, 0.0)
    if count <= 0:
        return None
    rank = share * count
    lower, below = 0.0, 0.0
    for bound, up_to in sorted(counts_up_to.items()):
        if up_to >= rank and up_to > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (rank - below) / (up_to - below)
        lower, below = bound, up_to
    return lower
