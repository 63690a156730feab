"""Tests of a capture of graphs, for its author: graphs of any size, and a budget that must hold.

    from trencadis.warmup.testing import check_capture

    def test_my_capture():
        check_capture(lambda device, buckets, budget: my_capture(device, buckets, budget))

It needs Hypothesis, the extra ``test``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from hypothesis import HealthCheck, given
from hypothesis import settings as Settings
from hypothesis import strategies as st

from trencadis.bucketing import Bucket
from trencadis.warmup.runtime import Phase

DEFAULT_SETTINGS = Settings(
    max_examples=200, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)

Cost: TypeAlias = Callable[[Phase, Bucket], int]
"""The true size of a graph in bytes."""

Capture: TypeAlias = Callable[["GraphDevice", Mapping[Phase, Sequence[Bucket]], int], object]
"""Captures graphs of these buckets on a device, within a budget in bytes."""


class CaptureFault(AssertionError):
    """What a capture did wrong. Hypothesis adds the smallest buckets and budget that show it."""


class GraphDevice:
    """A `GraphRuntime` whose graphs take the memory that ``cost`` says, and each call a second.

    Raises `CaptureFault` where a graph is captured that is held, or has been released before,
    because it would not fit again; and where one is released that is not held.

    ``returned``: the share of a released graph's memory that comes back. ``fail_at``: a shape whose
    execution raises.
    """

    def __init__(self, cost: Cost, free: int = 1 << 50, fail_at: object = None) -> None:
        self.cost, self.free, self.fail_at = cost, free, fail_at
        self.returned = 1.0
        self.now = 0.0
        self.executed: list[tuple[Phase, tuple[int, ...]]] = []
        self.graphs: dict[tuple[Phase, Bucket], int] = {}
        self.ever_captured: set[tuple[Phase, Bucket]] = set()
        self.released: list[tuple[Phase, Bucket]] = []
        self.peak = 0
        self.most_held_before_a_capture = 0
        self.kept_back = 0

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
        _require((phase, bucket) not in self.ever_captured, f"{phase} {bucket} is captured twice")
        self.ever_captured.add((phase, bucket))
        held = self.used + self.kept_back
        self.most_held_before_a_capture = max(self.most_held_before_a_capture, held)
        self.graphs[phase, bucket] = self.cost(phase, bucket)
        self.peak = max(self.peak, self.used + self.kept_back)
        self.now += 1.0

    def release(self, phase: Phase, bucket: Bucket) -> None:
        _require((phase, bucket) in self.graphs, f"{phase} {bucket} is released and not held")
        size = self.graphs.pop((phase, bucket))
        self.kept_back += size - int(size * self.returned)
        self.released.append((phase, bucket))

    @property
    def used(self) -> int:
        return sum(self.graphs.values())


def check_capture(capture: Capture, settings: Settings = DEFAULT_SETTINGS) -> None:
    """Run ``capture(device, buckets, budget)`` for random buckets, graph sizes and budgets.

    No graph may be captured while those before it exceed the budget, nor may they exceed it in the
    end. All must be captured where the budget has three more of the largest to spare, so that a
    capture may predict sizes; and one at least where each fits. Raises `CaptureFault`; an error of
    the capture is passed on.
    """

    @settings
    @given(sizes=graph_sizes(), buckets=buckets_of_phases(), share=st.floats(0, 4))
    def run(sizes: Cost, buckets: dict[Phase, list[Bucket]], share: float) -> None:
        costs = [sizes(phase, bucket) for phase in Phase for bucket in buckets[phase]]
        budget = int(sum(costs) * share)
        device = GraphDevice(sizes)
        capture(device, buckets, budget)
        _require(
            device.most_held_before_a_capture <= budget,
            f"a graph is captured where others take {device.most_held_before_a_capture} bytes of "
            f"a budget of {budget}",
        )
        _require(device.used <= budget, f"graphs take {device.used} bytes of a budget of {budget}")
        unknown = [key for key in device.ever_captured if key[1] not in buckets[key[0]]]
        _require(not unknown, f"graphs are captured of buckets that were not given: {unknown}")
        if sum(costs) + 3 * max(costs) < budget:
            _require(
                len(device.graphs) == len(costs),
                f"{len(device.graphs)} of {len(costs)} graphs are captured, though all of them "
                f"take {sum(costs)} bytes of a budget of {budget}",
            )
        elif 0 < max(costs) <= budget:
            _require(
                bool(device.graphs), f"each graph fits in {budget} bytes, and none is captured"
            )

    run()


@st.composite
def graph_sizes(draw: st.DrawFn) -> Cost:
    """Sizes of graphs: by batch, length and tokens, with noise, or arbitrary."""
    kind = draw(st.sampled_from(("linear", "noisy", "arbitrary")))
    parts = [draw(st.sampled_from((0, 1, 7, 64))) << 20 for _ in range(4)]
    seed = draw(st.integers(0, 1 << 32))

    def size(phase: Phase, bucket: Bucket) -> int:
        batch, length = bucket.shape
        constant, by_batch, by_length, by_token = parts
        linear = constant + by_batch * batch + (by_length + by_token * batch) * length // 64
        rng = random.Random(f"{seed} {phase} {bucket.shape}")
        if kind == "noisy":
            return int(linear * rng.uniform(0.7, 1.3))
        return rng.choice((0, 1, int(10 ** rng.uniform(0, 10)))) if kind == "arbitrary" else linear

    return size


def buckets_of_phases() -> st.SearchStrategy[dict[Phase, list[Bucket]]]:
    """Buckets of both phases, along the axes ``batch`` and ``seq``."""

    def product(batches: int, lengths: int) -> list[Bucket]:
        return [
            Bucket(("batch", "seq"), (1 << i, 128 * j))
            for i in range(batches)
            for j in range(1, lengths + 1)
        ]

    some = st.builds(product, st.integers(1, 4), st.integers(1, 6))
    return st.fixed_dictionaries({Phase.PROMPT: some, Phase.DECODE: some})


def _require(holds: bool, fault: str) -> None:
    if not holds:
        raise CaptureFault(fault)
