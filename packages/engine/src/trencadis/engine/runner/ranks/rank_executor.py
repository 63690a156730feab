"""The executor of several ranks: each method is called in every rank, and rank 0 answers.

A step is sent once to each rank, which runs it like an executor of its own; the collective calls of
the forward pass are between the ranks alone (`rank_modules`). The core has no tensors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from trencadis.bucketing import Bucket
from trencadis.engine.api.inspection import GridUsage
from trencadis.engine.errors import RankError
from trencadis.engine.ipc.messages import BUSY_SECONDS
from trencadis.engine.models.adapter_files import Adapter
from trencadis.engine.runner.adapter_store import AdapterReader, LoadedAdapter
from trencadis.engine.runner.executor import DeviceFacts, ExecutorCounters, ModelFacts
from trencadis.engine.runner.ranks.packed_steps import StepPacker
from trencadis.engine.runner.ranks.rank_messages import unpacked_result
from trencadis.engine.runner.ranks.rank_processes import RankProcesses, SentStep
from trencadis.engine.runner.ranks.unsupported import check_config, checked_device
from trencadis.engine.runner.shared_blocks import joined_contents
from trencadis.engine.runner.step import PendingStep, StepInput, StepResult
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.kvcache import Content
from trencadis.warmup import Phase, WarmupReport

logger = logging.getLogger("trencadis.engine")

_START_SECONDS = 3600.0
"""Longest reading of a checkpoint and longest warm-up, as long as the start of a core."""

_QUERY_SECONDS = 60.0
"""Longest answer to what computes nothing, once the steps before it are computed."""

_MOVE_SECONDS = 540.0
"""Longest release of the device memory. The front gives up a core after 600 s of it."""

_CLOSE_SECONDS = 5.0
"""Time for the ranks to write what was recorded: half of that of the core for its own end."""

_BEFORE_FRONT = 0.9
"""The ranks are given up after this share of the time after which the front gives up the core, so
that the core can say which of them it was."""


@attrs.frozen(eq=False)
class _RankStep:
    """A `PendingStep` of all ranks."""

    executor: RankExecutor
    sent: SentStep

    def wait(self) -> StepResult:
        """See `PendingStep`. Raises `RankError`."""
        return self.executor.result_of(self.sent)


class RankExecutor:
    """An `Executor` with ``config.tensor_parallel_size`` processes on this machine.

    Its methods raise `RankError` once a rank has ended, hangs or computes something else than the
    others: then none of them is left, and the core cannot go on. Raises as `check_config`.
    """

    on_cold: Callable[[object], None]
    """As that of `Executor`, called with the words for a shape while a step is waited for."""

    def __init__(self, config: EngineConfig, *, records: bool = True) -> None:
        device = checked_device(config)
        check_config(config)  # before the processes, which take seconds to start
        size = config.tensor_parallel_size
        environments = [device.rank_environment(rank, size) for rank in range(size)]
        cores = device.rank_cores(size) if config.cpu_numa == "auto" else ()
        for rank, own in enumerate(cores):
            logger.info("Rank %d is bound to cores %s", rank, ",".join(map(str, own)))
        self.on_cold = lambda shape: None
        self.is_asleep = False
        self.is_warming_up = False
        self._config = self._previous = config
        self._in_memory: tuple[EngineConfig, ...] = ()
        """The settings of the models whose weights the ranks hold, each with its share."""
        self._is_serving = False
        self._packer = StepPacker()
        self._limit_s = _step_limit(config)
        self._counters = ExecutorCounters(
            num_ready_buckets=0,
            num_graphs=0,
            num_padded_tokens=0,
            num_bucket_misses=0,
            num_cold_forwards=0,
            num_compilations=0,
        )
        self.processes = RankProcesses(
            _share_of(config),
            environments,
            self._limit_s,
            lambda shape: self.on_cold(shape),  # noqa: PLW0108  (the core sets it later)
            records=records,
            cores=cores,
        )
        self.device_facts = _facts_of_all(self._started("device_facts", limit_s=_START_SECONDS))

    # A model, from its checkpoint to its first step.

    def check(self, config: EngineConfig) -> None:
        """As that of `Executor`. What a device cannot do is found by `load`."""
        if not self.has_weights(config):
            check_config(config)

    def load(self, config: EngineConfig) -> bool:
        self._config, self._limit_s = config, _step_limit(config)
        were_in_memory = self._started("load", _share_of(config), limit_s=_START_SECONDS)
        if len(set(were_in_memory)) > 1:
            raise self.processes.fail(f"some ranks alone had kept the weights of {config.name}")
        self.is_asleep = False
        return bool(were_in_memory[0])

    def plan_memory(self) -> ModelFacts:
        facts = self._facts(self._started("plan_memory", limit_s=BUSY_SECONDS))
        self._note_weights()
        self._is_serving = True
        return facts

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> WarmupReport | None:
        reports = self._call("warm_up", limit_s=_START_SECONDS, stop=stop)
        self._counters = self._ask_first("counters")
        report: WarmupReport | None = reports[0]
        return report

    def advance_warm_up(self, *, idle: bool) -> None:
        del idle  # there is none in the background

    # Steps.

    def execute(self, step: StepInput) -> PendingStep:
        try:
            sent = self.processes.send_step(step.number, self._packer.packed(step))
        except BaseException:
            self._packer = StepPacker()  # the ranks may lack what it has packed
            raise
        return _RankStep(self, sent)

    def result_of(self, sent: SentStep) -> StepResult:
        """The result of a step; see `RankProcesses.step_answer`."""
        answer = self.processes.step_answer(sent, self._limit_s)
        result, counters = unpacked_result(answer)
        if counters is not None:
            self._counters = counters
        return result

    # Adapters of the model: the core reads them, and each rank keeps its part.

    def adapter_reader(self) -> AdapterReader:
        reader: AdapterReader = self._ask_first("adapter_reader")
        return reader

    def hold_adapter(self, adapter: Adapter) -> LoadedAdapter:
        limit_s = _QUERY_SECONDS + self._limit_s
        held: list[LoadedAdapter] = self._call("hold_adapter", adapter, limit_s=limit_s)
        return held[0]

    def holds_adapter(self, digest: str) -> bool:
        holds: bool = self._ask_first("holds_adapter", digest)
        return holds

    def drop_adapter(self, digest: str) -> None:
        self._call("drop_adapter", digest, limit_s=_QUERY_SECONDS + self._limit_s)

    def staging_blocks(self) -> Sequence[Content]:
        if not self._config.kv_tiers:
            return ()
        limit_s = _QUERY_SECONDS + self._limit_s
        return joined_contents(self._call("staging_files", limit_s=limit_s))

    def pays_to_jump(self, start: int, num_forced: int, num_seqs: int) -> bool:
        pays: bool = self._ask_first("pays_to_jump", start, num_forced, num_seqs)
        return pays

    def probe(self) -> None:
        self._call("probe", limit_s=self._limit_s)

    def counters(self) -> ExecutorCounters:
        """Those after the last step. Raises `RankError` where a rank has ended meanwhile."""
        self.processes.check_alive()
        return self._counters

    def grid_usage(self) -> tuple[GridUsage, ...]:
        usage: tuple[GridUsage, ...] = self._ask_first("grid_usage")
        return usage

    def missing_buckets(self) -> Sequence[tuple[Phase, Bucket]]:
        return ()  # of the background warm-up, which ranks do not have

    # Another model, and sleep.

    def memory_in_use(self) -> int:
        return sum(self._call("memory_in_use", limit_s=_QUERY_SECONDS + self._limit_s))

    def has_weights(self, config: EngineConfig) -> bool:
        return _share_of(config) in self._in_memory

    def put_aside(self, following: EngineConfig, stash_bytes: int) -> None:
        self._previous, self.is_asleep = self._config, True
        share = stash_bytes // self._config.tensor_parallel_size
        self._call("put_aside", _share_of(following), share, limit_s=_MOVE_SECONDS)

    def unload(self) -> None:
        self._call("unload", limit_s=_MOVE_SECONDS)
        self._note_weights()

    def put_back(self) -> None:
        self._config, self._limit_s = self._previous, _step_limit(self._previous)
        self.is_asleep = True
        self._call("put_back", limit_s=_MOVE_SECONDS)
        self._note_weights()

    def sleep(self, level: int) -> None:
        self.is_asleep = True
        self._call("sleep", level, limit_s=_MOVE_SECONDS)
        self._note_weights()

    def wake(self, stop: Callable[[], bool] = lambda: False) -> ModelFacts:
        facts = self._facts(self._call("wake", limit_s=_START_SECONDS, stop=stop))
        self._counters = self._ask_first("counters")  # a new runner's may begin again
        self._note_weights()
        self.is_asleep = False
        return facts

    def close(self) -> None:
        try:
            self.processes.call("close", limit_s=_CLOSE_SECONDS)
        except RankError as error:  # who closes it has no use for them
            logger.warning("The ranks cannot write what was recorded: %s", error)
        finally:
            self.processes.end()

    def _call(
        self,
        method: str,
        *arguments: Any,
        limit_s: float,
        stop: Callable[[], bool] = lambda: False,
    ) -> list[Any]:
        """What a method returns in each rank. The ranks are ended once ``stop`` returns True."""

        def poll() -> None:
            if stop():
                raise self.processes.fail(f"{method} was ended")

        return self.processes.call(method, *arguments, limit_s=limit_s, while_waiting=poll)

    def _started(self, method: str, *arguments: Any, limit_s: float) -> list[Any]:
        """As `_call`. Where no model was served yet, no core would end the ranks after an error."""
        try:
            return self._call(method, *arguments, limit_s=limit_s)
        except BaseException:
            if not self._is_serving:
                self.processes.end()
            raise

    def _note_weights(self) -> None:
        """Remember which models `has_weights`: `check` asks for them while steps run."""
        self._in_memory = self._ask_first("models_in_memory")

    def _ask_first(self, method: str, *arguments: Any) -> Any:
        """What a method returns that computes nothing, in rank 0."""
        limit_s = _QUERY_SECONDS + self._limit_s
        return self.processes.call(method, *arguments, limit_s=limit_s, ranks=(0,))[0]

    def _facts(self, of_ranks: list[ModelFacts]) -> ModelFacts:
        """Those of rank 0, with the blocks of all ranks. Raises `RankError` where others differ."""
        first = of_ranks[0]
        for rank, facts in enumerate(of_ranks):
            if attrs.evolve(facts, spec=first.spec) != first:
                raise self.processes.fail(f"rank {rank} has planned another cache than rank 0")
        return attrs.evolve(
            first, config=self._config, block_bytes=first.block_bytes * len(of_ranks)
        )


def _facts_of_all(of_ranks: list[DeviceFacts]) -> DeviceFacts:
    """Those of rank 0, with the sensors of all ranks; None where one does not know its own."""
    indices: set[int] = set()
    for facts in of_ranks:
        if facts.sensor_indices is None:
            return attrs.evolve(of_ranks[0], sensor_indices=None)
        indices.update(facts.sensor_indices)
    return attrs.evolve(of_ranks[0], sensor_indices=tuple(sorted(indices)))


def _share_of(config: EngineConfig) -> EngineConfig:
    """The settings of a rank: its share of the memory that the user gives to all of them."""
    size = config.tensor_parallel_size
    memory, swap = config.kv_cache_memory, config.swap_space
    return attrs.evolve(
        config,
        kv_cache_memory=None if memory is None else max(1, memory // size),
        swap_space=None if swap is None else swap / size,
    )


def _step_limit(config: EngineConfig) -> float:
    """Seconds after which a step, or a collective call, is given up."""
    if not config.hang_restart_timeout:
        return _START_SECONDS
    return _BEFORE_FRONT * max(config.hang_restart_timeout, config.hang_timeout)
