"""Counters of the bridge. Source: ``habana_frameworks/torch/hpu/metrics/metrics.py``."""

from __future__ import annotations

from gaudi_standin.bridge import BRIDGE


class GraphCompilationMetric:
    """Recipes compiled: ``stats()`` is a list of ``(name, value)``."""

    def __init__(self) -> None:
        self._start = 0

    def name(self) -> str:
        return "graph_compilation"

    def stats(self) -> list[tuple[str, int]]:
        return [("TotalNumber", BRIDGE.compilations - self._start), ("TotalTime", 0)]

    def reset(self) -> None:
        self._start = BRIDGE.compilations


_metrics = {"graph_compilation": GraphCompilationMetric()}


def metric_global(name: str) -> GraphCompilationMetric | None:
    return _metrics.get(name)
