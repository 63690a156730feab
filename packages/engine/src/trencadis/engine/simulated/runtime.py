"""A simulated device: it takes time and memory, and computes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trencadis.bucketing import Bucket
from trencadis.engine.simulated.clock import SimulatedClock
from trencadis.engine.simulated.cost_model import NOT_SHARED, CostModel, ForwardTimes, Sharing
from trencadis.engine.simulated.memory_model import MemoryModel
from trencadis.engine.simulated.records import StepTimes
from trencadis.kvcache import Direction
from trencadis.warmup import Phase


@attrs.define
class _Prepared:
    """State of a bucket, and the times and power of its forward pass.

    ``launch_s`` is without a graph. ``graph_bytes`` is None without a captured graph.
    """

    times: ForwardTimes
    device_s: float
    upload_s: float
    launch_s: float
    watts: float
    compiled: bool = False
    graph_bytes: int | None = None


class SimulatedRuntime:
    """Implements warm-up's ``GraphRuntime``. ``clock`` is that of the host.

    The device works on one operation after another; the host waits for it in `synchronize`,
    `copy_blocks` and `wait` alone.
    A bucket is compiled at its first forward pass, and replayed once a graph was captured.
    ``compilations``, ``replays`` and ``launches`` (forward passes without a graph) count since the
    start; ``times`` are the seconds of all operations by part. ``busy_s`` and ``joules`` are the
    seconds of forward passes on the device and their energy, until a reader sets them to 0.
    ``free_at_s`` is when the device will have done all that it was given.
    ``free_bytes`` is the initial free memory. With ``samples_on_host``, logits are copied to the
    host, which samples. ``num_shared_blocks``: how many blocks, from 0 on, decode scores for every
    sequence of a batch that shares blocks; None where requests share none. Buckets of decode are
    then warmed up with sharing, too.
    """

    def __init__(
        self,
        costs: CostModel,
        memory: MemoryModel,
        clock: SimulatedClock,
        free_bytes: int,
        *,
        samples_on_host: bool = False,
        num_shared_blocks: int | None = None,
    ) -> None:
        self.costs = costs
        self.num_shared_blocks = num_shared_blocks
        self.times = StepTimes()
        self.compilations = 0
        self.replays = 0
        self.launches = 0
        self.busy_s = 0.0
        self.joules = 0.0
        self._memory = memory
        self._clock = clock
        self._free = free_bytes
        self._buckets: dict[Phase, dict[tuple[Bucket, Sharing], _Prepared]] = {
            phase: {} for phase in Phase
        }
        self._samples_on_host = samples_on_host
        self._replay_s = costs.hardware.replay_s
        self.free_at_s = 0.0

    # Warm-up's GraphRuntime.

    def execute(self, phase: Phase, bucket: Bucket) -> None:
        """Run a forward pass on dummy data."""
        for sharing in self._sharings(phase, bucket):
            self.forward(phase, bucket, sharing)
        self.synchronize()

    def capture(self, phase: Phase, bucket: Bucket) -> None:
        """Capture the graphs of a bucket. Later forward passes replay them."""
        for sharing in self._sharings(phase, bucket):
            prepared = self._prepared(phase, bucket, sharing)
            self._compile(prepared)
            self._clock.advance(self.costs.hardware.capture_s)
            self.times.compile_s += self.costs.hardware.capture_s
            if prepared.graph_bytes is None:
                prepared.graph_bytes = self._memory.graph_bytes(phase, bucket)
                self._free -= prepared.graph_bytes

    def release(self, phase: Phase, bucket: Bucket) -> None:
        """Release the graphs of a bucket and their memory."""
        for sharing in self._sharings(phase, bucket):
            prepared = self._prepared(phase, bucket, sharing)
            self._free += prepared.graph_bytes or 0
            prepared.graph_bytes = None

    def _sharings(self, phase: Phase, bucket: Bucket) -> Sequence[Sharing]:
        """Those that batches of a bucket have, as `BucketChoice.shapes` of the engine."""
        if phase is Phase.PROMPT or self.num_shared_blocks is None or bucket.shape[0] == 1:
            return (NOT_SHARED,)
        blocks = bucket.shape[1]
        scored = min(blocks, self.num_shared_blocks)
        kinds = {NOT_SHARED: None, Sharing(scored): None}
        if scored < blocks:
            kinds[Sharing(scored, blocks)] = None
        return tuple(kinds)

    def synchronize(self) -> None:
        """Wait until the device has computed everything."""
        self.wait(self.free_at_s)

    def free_memory(self) -> int:
        """Free device memory, bytes."""
        return self._free

    # For `SimulatedRunner`.

    def allocate(self, size: int) -> None:
        """Reserve memory for the KV cache, bytes."""
        self._free -= size

    def forward(self, phase: Phase, bucket: Bucket, sharing: Sharing = NOT_SHARED) -> float:
        """Run a forward pass; returns its seconds."""
        prepared = self._prepared(phase, bucket, sharing)
        self._compile(prepared)
        if prepared.graph_bytes is None:
            self.launches += 1
            launch_s = prepared.launch_s
        else:
            self.replays += 1
            launch_s = self._replay_s
        times, parts = self.times, prepared.times
        times.matrices_s += parts.matrices_s
        times.attention_s += parts.attention_s
        times.head_s += parts.head_s
        times.collectives_s += parts.collectives_s
        times.launch_s += launch_s
        times.upload_s += prepared.upload_s
        self.busy_s += prepared.device_s
        self.joules += prepared.watts * prepared.device_s
        return self._occupy(prepared.device_s + prepared.upload_s + launch_s)

    def device_s(self, phase: Phase, bucket: Bucket) -> float:
        """Seconds of a forward pass on the device."""
        return self._prepared(phase, bucket).device_s

    def copy_blocks(self, direction: Direction, num_blocks: int) -> float:
        """Copy KV blocks; returns the seconds it took."""
        if direction is Direction.WITHIN:
            seconds = self.costs.move_s(num_blocks)
        else:
            seconds = self.costs.swap_s(num_blocks)
        self._occupy(seconds)
        self.synchronize()
        self.times.block_copy_s += seconds
        return seconds

    def sample(self, rows: int) -> None:
        """Sample ``rows`` tokens, and copy them to the host."""
        costs = self.costs
        if self._samples_on_host:
            sample_s, fetch_s = costs.host_sample_s(rows), costs.fetch_logits_s(rows)
        else:
            sample_s, fetch_s = costs.sample_s(rows), costs.fetch_s(rows)
        self.times.sample_s += sample_s
        self.times.fetch_s += fetch_s
        self._occupy(sample_s + fetch_s)

    def wait(self, until_s: float) -> None:
        """Let the host wait until this time, unless it has passed."""
        self._clock.advance(max(0.0, until_s - self._clock()))

    def schedule(self, num_seqs: int) -> None:
        """Pass the time that the host needs for a step of ``num_seqs`` sequences.

        What passes while the device computes does not count in ``times``.
        """
        seconds = self.costs.host_s(num_seqs)
        hidden_s = min(seconds, max(0.0, self.free_at_s - self._clock()))
        self.times.host_s += seconds - hidden_s
        self._clock.advance(seconds)

    def _occupy(self, seconds: float) -> float:
        """Let the device work after what it has to do, and not before now; returns ``seconds``."""
        self.free_at_s = max(self.free_at_s, self._clock()) + seconds
        return seconds

    def _prepared(self, phase: Phase, bucket: Bucket, sharing: Sharing = NOT_SHARED) -> _Prepared:
        known = self._buckets[phase]
        prepared = known.get((bucket, sharing))
        if prepared is None:
            costs = self.costs
            times = costs.forward_times(phase, bucket, sharing)
            device_s = times.total_s
            prepared = known[bucket, sharing] = _Prepared(
                times,
                device_s,
                costs.upload_s(phase, bucket),
                costs.launch_s(device_s, captured=False),
                self._watts(phase, bucket),
            )
        return prepared

    def _watts(self, phase: Phase, bucket: Bucket) -> float:
        """The power of the board during a forward pass."""
        board = self.costs.hardware.board
        if phase is Phase.DECODE:
            return board.decode_pass_w(bucket.shape[0])
        return board.prefill_pass_w(self.costs.compute_share(phase, bucket))

    def _compile(self, prepared: _Prepared) -> None:
        if not prepared.compiled:
            prepared.compiled = True
            self.compilations += 1
            self._occupy(self.costs.hardware.compile_s)
            self.synchronize()
            self.times.compile_s += self.costs.hardware.compile_s
