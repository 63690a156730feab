"""Serves a trace on a simulated device, with the real scheduler, cache, grids and warm-up.

Only the device and the clock are simulated. The scheduler decides a step; `SimulatedRunner`
advances the clock by the time that the step would take; requests arrive by that clock.
"""

from __future__ import annotations

from collections.abc import Iterator

from trencadis.bucketing import BucketingError
from trencadis.engine.errors import ConfigError
from trencadis.engine.runner.grids import Grids, configured_grids
from trencadis.engine.runner.limits import (
    ServingLimits,
    num_cache_blocks,
    resolve_max_model_len,
    token_budget,
)
from trencadis.engine.runner.shapes import DecodeRead, most_shared_blocks
from trencadis.engine.runner.step import StepInput
from trencadis.engine.simulated.clock import SimulatedClock
from trencadis.engine.simulated.config import SimulationConfig
from trencadis.engine.simulated.cost_model import CostModel
from trencadis.engine.simulated.hardware import Hardware, find_hardware
from trencadis.engine.simulated.heat import SimulatedHeat
from trencadis.engine.simulated.memory_model import MemoryModel
from trencadis.engine.simulated.model_shape import ModelShape
from trencadis.engine.simulated.records import Records, Sample, StepTimes
from trencadis.engine.simulated.runner import SimulatedRunner, SimulatedStep
from trencadis.engine.simulated.runtime import SimulatedRuntime
from trencadis.engine.simulated.workload import Workload
from trencadis.kvcache import (
    BandwidthGovernor,
    BlockManager,
    CacheConfig,
    Defragmenter,
    KVCacheError,
)
from trencadis.scheduler import (
    QueueFull,
    Request,
    Scheduler,
    SchedulerError,
    SchedulerOutput,
    ThermalGuard,
    UnservableRequest,
)
from trencadis.scheduler.telemetry import ReaderConfig, TemperatureReader
from trencadis.scheduler.thermal import load_thermal_policy
from trencadis.warmup import MemoryPlan, WarmupError, WarmupReport, format_bytes, warm_up

_NUM_SAMPLES = 500
"""State samples over the period in which requests arrive, at most."""

_STALLED_S = 1e-3
"""Pause after a step in which no sequence could run."""


class Simulation:
    """One run: call `warm_up`, iterate over `serve`, then read ``records``.

    ``hardware`` replaces the one that ``config`` names. Raises `ConfigError` for settings that do
    not fit the model or the device.
    """

    def __init__(
        self,
        config: SimulationConfig,
        model: ModelShape,
        workload: Workload,
        hardware: Hardware | None = None,
    ) -> None:
        self.config = config
        self.model = model.quantized(
            matrices=config.quantization != "none", kv_cache=config.kv_cache_dtype != "auto"
        )
        self._of_rank = self.model.divided(config.tensor_parallel_size)
        self.workload = workload
        self.hardware = hardware if hardware is not None else find_hardware(config.device)
        self.max_model_len = _max_model_len(config, model, workload)
        self.clock = SimulatedClock()
        self.records = Records()
        self.steps = 0
        self.started_s = self._next_poll_s = self._next_sample_s = 0.0
        self._sample_interval_s = 1.0
        self._in_flight: list[tuple[SchedulerOutput, SimulatedStep]] = []
        try:
            self._build()
        except (BucketingError, WarmupError, KVCacheError, SchedulerError) as error:
            raise ConfigError(str(error)) from error

    def _build(self) -> None:
        """Plan the memory and build the device, the grids, the cache and the scheduler."""
        config = self.config
        costs = CostModel(
            self._of_rank,
            self.hardware,
            config.block_size,
            config.draw,
            config.compile,
            config.tensor_parallel_size,
        )
        memory = MemoryModel(self._of_rank, self.hardware)
        free = memory.free_after_profile(token_budget(config), config.max_num_seqs)
        self.plan = MemoryPlan.from_profile(
            free,
            config.gpu_memory_utilization,
            config.warmup.graph_reserved_mem,
            config.warmup.graph_prompt_ratio,
            block_bytes=costs.block_bytes,
        )
        self.num_blocks = self._num_blocks(costs.block_bytes)
        limits = ServingLimits.of(config, self.max_model_len, self.num_blocks)
        self.grids = configured_grids(config.bucketing, limits)
        self.runtime = SimulatedRuntime(
            costs,
            memory,
            self.clock,
            free,
            samples_on_host=config.sampling == "host",
            num_shared_blocks=self._num_shared_blocks,
        )
        self.runtime.allocate(self.num_blocks * costs.block_bytes)
        self.runner = SimulatedRunner(self.runtime, self.grids, config.seed)
        self.heat = SimulatedHeat(self.hardware.board, self.clock, config.ambient_c, config.seed)
        self.reader = TemperatureReader(self.heat, ReaderConfig(), clock=self.clock)
        self.blocks = BlockManager(
            CacheConfig(
                num_blocks=self.num_blocks,
                block_size=config.block_size,
                num_host_blocks=config.swap_space // costs.block_bytes,
            ),
            governor=BandwidthGovernor(costs.block_bytes),
        )
        self.scheduler = self._scheduler(limits, self.grids)

    def _scheduler(self, limits: ServingLimits, grids: Grids) -> Scheduler:
        config = self.config
        guard = None
        if config.thermal_policy != "none":
            policy = load_thermal_policy(config.thermal_policy, **config.thermal_options)
            guard = ThermalGuard(policy, self.reader.state)
        return Scheduler(
            limits.scheduler_config(
                max_waiting=config.max_waiting, max_chunk_tokens=grids.max_chunk_tokens
            ),
            self.blocks,
            thermal=guard,
            defragmenter=Defragmenter(
                self.blocks, config.defrag, shared_within=self._num_shared_blocks or 0
            )
            if grids.read is DecodeRead.PREFIX
            else None,
            clock=self.clock,
        )

    @property
    def _num_shared_blocks(self) -> int | None:
        """Blocks that decode scores for all sequences of a batch; None where none are shared."""
        if not self.workload.shared_prefix or self.grids.read is not DecodeRead.PREFIX:
            return None
        return most_shared_blocks(self.config.block_size) if self.hardware.scores_shared else 0

    def _num_blocks(self, block_bytes: int) -> int:
        """As configured, or as many as fit the memory of the simulated device."""
        fitting, configured = self.plan.num_blocks, self.config.num_blocks
        if configured is not None and configured > fitting:
            raise ConfigError(
                f"num_blocks {configured} is above the {fitting} blocks of "
                f"{format_bytes(block_bytes)} that fit {self.hardware.name}: lower it"
            )
        return num_cache_blocks(
            self.config,
            self.max_model_len,
            fitting=fitting,
            block_bytes=block_bytes,
            remedy="take a device with more memory",
        )

    def warm_up(self) -> WarmupReport:
        """Warm up every bucket and capture graphs, as a server does before it accepts requests."""
        report = warm_up(
            self.runtime,
            self.grids.prompt.buckets,
            self.grids.decode.buckets,
            config=self.config.warmup,
            memory=None if self.config.compile else self.plan,
            clock=self.clock,
        )
        self._follow_heat()
        self.heat.reset()
        self.runtime.times = StepTimes()
        return report

    def serve(self) -> Iterator[None]:
        """Serve the whole workload; yields once for each request that finishes or is rejected."""
        self.start(period_s=float(self.workload.arrivals_s[-1]))
        for arrival_s, request in self.workload.requests(self.model.vocab_size, self.config.seed):
            arrived_s = self.started_s + arrival_s
            yield from self.serve_until(arrived_s)
            if not self.accept(arrived_s, request):
                yield
        yield from self.serve_until(None)

    def start(self, period_s: float) -> None:
        """Begin to serve: requests arrive within ``period_s`` seconds from now."""
        self.started_s = self._next_poll_s = self._next_sample_s = self.clock()
        self._sample_interval_s = max(1.0, period_s / _NUM_SAMPLES)

    def serve_until(self, then_s: float | None) -> Iterator[None]:
        """Run steps until the clock shows ``then_s`` or later, of None until all requests ended.

        Yields once for each request that finishes. The last step may end after ``then_s``, as a
        request that arrives during a step waits for its end.
        """
        while self._has_work and (then_s is None or self.clock() < then_s):
            now_s = self.clock()
            if now_s >= self._next_poll_s:
                self.reader.poll()
                self._next_poll_s = now_s + ReaderConfig().period_s
            output, ended = self._step()
            if output.is_empty and not output.moves:
                self._idle_until(self.clock() + _STALLED_S)
            if now_s >= self._next_sample_s:
                self.records.samples.append(self._sample(output))
                self._next_sample_s = now_s + self._sample_interval_s
            for _ in range(ended):
                yield
        if then_s is not None:
            self._idle_until(then_s)

    def accept(self, arrived_s: float, request: Request) -> bool:
        """Add a request to the queue; False if a server would reject it."""
        prompt = len(request.prompt_token_ids)
        try:
            if prompt + request.max_tokens > self.max_model_len:
                raise UnservableRequest(f"request {request.request_id} exceeds max_model_len")
            sequence = self.scheduler.add(request)
        except (QueueFull, UnservableRequest):
            self.records.refused += 1
            return False
        self.records.accepted(sequence.seq_id, arrived_s, prompt, request.max_tokens)
        return True

    def _step(self) -> tuple[SchedulerOutput, int]:
        """Start steps and wait for the oldest; returns its decision and how many requests ended."""
        while self.scheduler.has_work and self.scheduler.reason_to_wait is None:
            output = self.scheduler.schedule()
            step = StepInput(output.step, output.prompts, output.decodes, output.moves, {})
            self._in_flight.append((output, self.runner.execute(step)))
        output, pending = self._in_flight.pop(0)
        result = pending.wait()
        updates = self.scheduler.update(output, result.token_ids, timing=result.timing)
        self.steps += 1
        self._follow_heat()
        now_s, records, ended = self.clock(), self.records, 0
        for update in updates:
            records.token(update.seq_id, now_s)
            if update.finish_reason is not None:
                records.ended(update.seq_id, now_s)
                ended += 1
        return output, ended

    @property
    def _has_work(self) -> bool:
        return bool(self.scheduler.has_work or self._in_flight)

    def _idle_until(self, then_s: float) -> None:
        self.clock.advance(max(0.0, then_s - self.clock()))
        self._follow_heat()

    def _follow_heat(self) -> None:
        """Heat the board with the forward passes since the last call."""
        runtime = self.runtime
        self.heat.follow(runtime.busy_s, runtime.joules)
        runtime.busy_s = runtime.joules = 0.0

    def _sample(self, output: SchedulerOutput) -> Sample:
        scheduler, board = self.scheduler, self.heat.model
        return Sample(
            at_s=self.clock() - self.started_s,
            running=scheduler.num_running_seqs,
            waiting=scheduler.num_waiting,
            swapped=scheduler.num_swapped + scheduler.num_preempted,
            used_blocks=self.blocks.pool.num_used_blocks,
            highest_block=self.blocks.pool.highest_used_block,
            tokens=self.records.tokens_since_last_sample(),
            temperature_c=board.chip_c,
            power_w=board.power_w,
            running_limit=output.max_running_seqs,
            prefill_limit=output.max_prefill_tokens,
        )


def _max_model_len(config: SimulationConfig, model: ModelShape, workload: Workload) -> int:
    """As configured, or the longest request of the workload."""
    longest = resolve_max_model_len(config.max_model_len, model.max_position_embeddings)
    return longest if config.max_model_len else min(longest, max(2, workload.longest))
