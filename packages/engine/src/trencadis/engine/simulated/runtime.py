"""A device that takes time and memory and computes nothing."""

from __future__ import annotations

import attrs

from trencadis.bucketing import Bucket
from trencadis.engine.simulated.clock import SimulatedClock
from trencadis.engine.simulated.cost_model import CostModel
from trencadis.engine.simulated.memory_model import MemoryModel
from trencadis.kvcache import Direction
from trencadis.warmup import Phase


@attrs.define
class _Prepared:
    """What is known of a bucket; ``graph_bytes`` is None while it has no graph."""

    device_s: float
    compiled: bool = False
    graph_bytes: int | None = None


class SimulatedRuntime:
    """Implements warm-up's ``GraphRuntime``: what it is asked for passes time on ``clock``.

    A bucket is compiled when its forward runs for the first time, and replayed once it has been
    captured. ``compilations``, ``replays`` and ``launches`` (forwards without a graph) count since
    the start. ``free_bytes`` is what the device has when this is made.
    """

    def __init__(
        self, costs: CostModel, memory: MemoryModel, clock: SimulatedClock, free_bytes: int
    ) -> None:
        self.costs = costs
        self.compilations = 0
        self.replays = 0
        self.launches = 0
        self._memory = memory
        self._clock = clock
        self._free = free_bytes
        self._buckets: dict[Phase, dict[Bucket, _Prepared]] = {phase: {} for phase in Phase}
        self._launch_s = costs.launch_s(captured=False)
        self._replay_s = costs.launch_s(captured=True)

    # Warm-up's GraphRuntime.

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        """Run a forward on dummy data."""
        self.forward(phase, bucket)

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        """Record the forward of a bucket; from now on it is replayed."""
        prepared = self._prepared(phase, bucket)
        self._compile(prepared)
        self._clock.advance(self.costs.hardware.capture_s)
        if prepared.graph_bytes is None:
            prepared.graph_bytes = self._memory.graph_bytes(phase, bucket)
            self._free -= prepared.graph_bytes

    def release(self, phase: Phase, bucket: Bucket) -> None:
        """Forget a graph and get its memory back."""
        prepared = self._prepared(phase, bucket)
        self._free += prepared.graph_bytes or 0
        prepared.graph_bytes = None

    def synchronize(self) -> None:
        """Nothing is ever under way: time passes when work is given."""

    def free_memory(self) -> int:
        """Free device memory, bytes."""
        return self._free

    # What a runner asks for besides.

    def allocate(self, size: int) -> None:
        """Take memory for good, bytes: the KV cache."""
        self._free -= size

    def forward(self, phase: Phase, bucket: Bucket) -> float:
        """Run a forward; returns how many seconds it took."""
        started = self._clock()
        prepared = self._prepared(phase, bucket)
        self._compile(prepared)
        if prepared.graph_bytes is None:
            self.launches += 1
            self._clock.advance(prepared.device_s + self._launch_s)
        else:
            self.replays += 1
            self._clock.advance(prepared.device_s + self._replay_s)
        return self._clock() - started

    def device_s(self, phase: Phase, bucket: Bucket) -> float:
        """Seconds on the device of a forward."""
        return self._prepared(phase, bucket).device_s

    def copy_blocks(self, direction: Direction, num_blocks: int) -> float:
        """Copy KV blocks; returns how many seconds it took."""
        if direction is Direction.WITHIN:
            seconds = self.costs.move_s(num_blocks)
        else:
            seconds = self.costs.swap_s(num_blocks)
        self._clock.advance(seconds)
        return seconds

    def sample(self, rows: int) -> None:
        """Turn rows of logits into tokens."""
        self._clock.advance(self.costs.sample_s(rows))

    def _prepared(self, phase: Phase, bucket: Bucket) -> _Prepared:
        known = self._buckets[phase]
        prepared = known.get(bucket)
        if prepared is None:
            prepared = known[bucket] = _Prepared(self.costs.device_s(phase, bucket))
        return prepared

    def _compile(self, prepared: _Prepared) -> None:
        if not prepared.compiled:
            prepared.compiled = True
            self.compilations += 1
            self._clock.advance(self.costs.hardware.compile_s)
