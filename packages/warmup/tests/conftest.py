"""A simulated device for capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import pytest

from trencadis.bucketing import Bucket
from trencadis.warmup import Phase

Cost: TypeAlias = Callable[[Phase, Bucket], int]


class GraphDevice:
    """A device whose buckets run for a second and whose graphs have true costs, in bytes.

    It fails if a graph is captured twice, or released without being captured. ``fail_at`` is a
    shape whose execution fails.
    """

    def __init__(self, cost: Cost, free: int = 1 << 50, fail_at: object = None) -> None:
        self.cost, self.free, self.fail_at = cost, free, fail_at
        self.now = 0.0
        self.executed: list[tuple[Phase, tuple[int, ...]]] = []
        self.graphs: dict[tuple[Phase, Bucket], int] = {}
        self.ever_captured: set[tuple[Phase, Bucket]] = set()
        self.released: list[tuple[Phase, Bucket]] = []
        self.peak = 0
        self.most_held_before_a_capture = 0
        self.kept_back = 0
        self.returned = 1.0  # share of a released graph's memory that comes back

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        if bucket.shape == self.fail_at:
            raise RuntimeError(f"no graph for {bucket.shape}")
        self.executed.append((phase, bucket.shape))
        self.now += 1.0

    def synchronize(self) -> None:
        pass

    def free_memory(self) -> int:
        return self.free - self.used - self.kept_back

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        assert (phase, bucket) not in self.ever_captured, "a graph is captured twice"
        self.ever_captured.add((phase, bucket))
        held = self.used + self.kept_back
        self.most_held_before_a_capture = max(self.most_held_before_a_capture, held)
        self.graphs[phase, bucket] = self.cost(phase, bucket)
        self.peak = max(self.peak, self.used + self.kept_back)
        self.now += 1.0

    def release(self, phase: Phase, bucket: Bucket) -> None:
        size = self.graphs.pop((phase, bucket))
        self.kept_back += size - int(size * self.returned)
        self.released.append((phase, bucket))

    @property
    def used(self) -> int:
        return sum(self.graphs.values())


@pytest.fixture(scope="session")
def graph_device() -> type[GraphDevice]:
    return GraphDevice
