"""A server on a simulated device: real scheduler, cache, grids, warm-up and thermal policy.

Only the device and the clock are made up. A step is decided by the scheduler, carried out by
`SimulatedRunner`, which passes the time that it would take, and reported back; requests arrive
when the clock says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from trencadis.bucketing import BucketingError
from trencadis.engine.config import resolve_max_model_len
from trencadis.engine.errors import ConfigError
from trencadis.engine.runner.grids import Grids, ShapeLimits, configured_grids
from trencadis.engine.simulated.clock import SimulatedClock
from trencadis.engine.simulated.config import SimulationConfig
from trencadis.engine.simulated.cost_model import CostModel
from trencadis.engine.simulated.hardware import find_hardware
from trencadis.engine.simulated.heat import SimulatedHeat
from trencadis.engine.simulated.memory_model import MemoryModel
from trencadis.engine.simulated.model_shape import ModelShape
from trencadis.engine.simulated.records import Moment, Records
from trencadis.engine.simulated.runner import SimulatedRunner
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
    SchedulerConfig,
    SchedulerError,
    SchedulerOutput,
    ThermalGuard,
    UnservableRequest,
)
from trencadis.scheduler.telemetry import ReaderConfig, TemperatureReader
from trencadis.scheduler.thermal import load_thermal_policy
from trencadis.warmup import MemoryPlan, WarmupError, WarmupReport, format_bytes, warm_up

_MOMENTS = 500
"""At most so many over the time in which requests arrive."""

_NAP_S = 1e-3
"""How long a server waits that has requests and may not compute, before it asks again."""


class Simulation:
    """One run: `warm_up`, then iterate over `serve`, then look at ``records`` and the parts.

    Raises `ConfigError` for settings, a model and a device that do not go together.
    """

    def __init__(self, config: SimulationConfig, model: ModelShape, workload: Workload) -> None:
        self.config = config
        self.model = model
        self.workload = workload
        self.hardware = find_hardware(config.device)
        self.max_model_len = _max_model_len(config, model, workload)
        self.clock = SimulatedClock()
        self.records = Records()
        self.steps = 0
        self.started_s = 0.0
        try:
            self._build()
        except (BucketingError, WarmupError, KVCacheError, SchedulerError) as error:
            raise ConfigError(str(error)) from error

    def _build(self) -> None:
        """Divide the memory, and put the libraries together."""
        config = self.config
        costs = CostModel(self.model, self.hardware, config.block_size)
        memory = MemoryModel(self.model, self.hardware)
        budget = max(config.max_num_batched_tokens, config.max_num_seqs)
        free = memory.free_after_profile(budget, config.max_num_seqs)
        self.plan = MemoryPlan.from_profile(
            free,
            config.gpu_memory_utilization,
            config.warmup.graph_reserved_mem,
            config.warmup.graph_prompt_ratio,
            block_bytes=costs.block_bytes,
        )
        self.num_blocks = self._num_blocks(costs.block_bytes)
        self.runtime = SimulatedRuntime(costs, memory, self.clock, free)
        self.runtime.allocate(self.num_blocks * costs.block_bytes)
        self.grids = configured_grids(
            config.bucketing,
            ShapeLimits(
                max_model_len=self.max_model_len,
                max_num_batched_tokens=budget,
                max_num_seqs=config.max_num_seqs,
                block_size=config.block_size,
                num_blocks=self.num_blocks,
            ),
        )
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
        self.scheduler = self._scheduler(budget, self.grids)

    def _scheduler(self, budget: int, grids: Grids) -> Scheduler:
        config = self.config
        guard = None
        if config.thermal_policy != "none":
            policy = load_thermal_policy(config.thermal_policy, **config.thermal_options)
            guard = ThermalGuard(policy, self.reader.state)
        return Scheduler(
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=budget,
                max_model_len=self.max_model_len,
                max_chunk_tokens=grids.prompt.values("query")[-1],
                max_waiting=config.max_waiting,
            ),
            self.blocks,
            thermal=guard,
            defragmenter=Defragmenter(self.blocks, config.defrag),
            clock=self.clock,
        )

    def _num_blocks(self, block_bytes: int) -> int:
        """As configured, or as many as fit and can be used."""
        per_sequence = -(-self.max_model_len // self.config.block_size)
        num_blocks = self.config.num_blocks
        if num_blocks is None:
            num_blocks = min(self.plan.num_blocks, per_sequence * self.config.max_num_seqs + 1)
        elif num_blocks > self.plan.num_blocks:
            raise ConfigError(
                f"num_blocks {num_blocks} is above the {self.plan.num_blocks} blocks of "
                f"{format_bytes(block_bytes)} that {self.hardware.name} has room for: lower it"
            )
        if num_blocks - 1 < per_sequence:
            raise ConfigError(
                f"a KV cache of {num_blocks} blocks of {self.config.block_size} tokens cannot hold "
                f"one sequence of max_model_len {self.max_model_len}: lower max_model_len, or take "
                f"a device with more memory (a block takes {format_bytes(block_bytes)})"
            )
        return num_blocks

    def warm_up(self) -> WarmupReport:
        """Run every bucket and capture graphs, as a server does before it listens."""
        report = warm_up(
            self.runtime,
            self.grids.prompt.buckets,
            self.grids.decode.buckets,
            config=self.config.warmup,
            memory=self.plan,
            clock=self.clock,
        )
        self.heat.follow(0)
        self.heat.reset()
        return report

    def serve(self) -> Iterator[None]:
        """Serve the whole workload; yields each time that a request is done, or refused."""
        arrivals = _Arrivals(self.workload, self.model.vocab_size, self.config.seed, self.clock())
        interval_s = max(1.0, float(self.workload.arrivals_s[-1]) / _MOMENTS)
        self.started_s = next_moment_s = next_poll_s = self.clock()
        while arrivals.next_s is not None or self.scheduler.has_work:
            now_s = self.clock()
            if now_s >= next_poll_s:
                self.reader.poll()
                next_poll_s = now_s + ReaderConfig().period_s
            for arrived_s, request in arrivals.due(now_s):
                if not self._accept(arrived_s, request):
                    yield
            if not self.scheduler.has_work:
                self._idle_until(arrivals.next_s)
                continue
            output, ended = self._step()
            if output.is_empty and not output.moves:
                self._idle_until(self.clock() + _NAP_S)
            if now_s >= next_moment_s:
                self.records.moments.append(self._moment(output))
                next_moment_s = now_s + interval_s
            for _ in range(ended):
                yield

    def _accept(self, arrived_s: float, request: Request) -> bool:
        """Queue a request; False where a server would refuse it."""
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
        """One step of the engine: its decision, and how many requests it has ended."""
        output = self.scheduler.schedule()
        tokens = self.runner.run(output)
        running = self.scheduler.num_running
        updates = self.scheduler.update(output, tokens, timing=self.runner.timing)
        self.steps += 1
        self.heat.follow(running)
        now_s, records, ended = self.clock(), self.records, 0
        for update in updates:
            records.token(update.seq_id, now_s)
            if update.finish_reason is not None:
                records.ended(update.seq_id, now_s)
                ended += 1
        return output, ended

    def _idle_until(self, then_s: float | None) -> None:
        if then_s is not None:
            self.clock.advance(max(0.0, then_s - self.clock()))
            self.heat.follow(0)

    def _moment(self, output: SchedulerOutput) -> Moment:
        scheduler, board = self.scheduler, self.heat.model
        return Moment(
            at_s=self.clock() - self.started_s,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            swapped=scheduler.num_swapped,
            used_blocks=self.blocks.num_used_blocks,
            highest_block=self.blocks.highest_in_use,
            tokens=self.records.tokens_since_last_moment(),
            temperature_c=board.chip_c,
            power_w=board.power_w,
            cap=output.max_running,
        )


class _Arrivals:
    """The workload's requests in turn, on the simulation's clock."""

    def __init__(self, workload: Workload, vocab_size: int, seed: int, started_s: float) -> None:
        self._started_s = started_s
        self._requests = workload.requests(vocab_size, seed)
        self._pending = next(self._requests, None)

    @property
    def next_s(self) -> float | None:
        """When the next request arrives; None after the last."""
        return None if self._pending is None else self._started_s + self._pending[0]

    def due(self, now_s: float) -> Iterator[tuple[float, Request]]:
        """The requests that have arrived by now and were not given out before."""
        while self._pending is not None and self._started_s + self._pending[0] <= now_s:
            arrived_s, request = self._pending
            self._pending = next(self._requests, None)
            yield self._started_s + arrived_s, request


def _max_model_len(config: SimulationConfig, model: ModelShape, workload: Workload) -> int:
    """As configured, or as long as the workload needs."""
    longest = resolve_max_model_len(config.max_model_len, model.max_position_embeddings)
    return longest if config.max_model_len else min(longest, max(2, workload.longest))
