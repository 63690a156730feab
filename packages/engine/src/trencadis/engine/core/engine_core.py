"""The engine core: schedules, executes and samples one step at a time.

`EngineCore` is synchronous and does no communication. `core_process` runs it in its own process
for servers; `LLM` runs it in the caller's process for offline batches.
"""

from __future__ import annotations

import functools
import logging
import random
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

from trencadis.engine.api.inspection import MAX_MAP_CELLS, EngineInspection
from trencadis.engine.api.outputs import EngineStats, plus_totals, totals_since, with_totals
from trencadis.engine.api.requests import (
    EngineRequest,
    check_adapter_name,
    check_is_request,
    check_request_id,
)
from trencadis.engine.core.adapter_loads import AGAIN_SECONDS, AdapterLoad, AdapterLoads
from trencadis.engine.core.adapter_slots import AdapterSlots
from trencadis.engine.core.adapter_table import AdapterTable, NamedAdapter
from trencadis.engine.core.kv_events import KVEventPublisher
from trencadis.engine.core.prefix_tiers import PrefixTiers
from trencadis.engine.core.request_table import RequestTable
from trencadis.engine.core.step_sampling import StepSampling
from trencadis.engine.core.thermal_monitor import ThermalMonitor
from trencadis.engine.errors import AdapterError, BucketMiss, ConfigError, InvalidRequest, shown
from trencadis.engine.grammars.compiler import GrammarCompiler
from trencadis.engine.grammars.grammar import saved_tokenizer_json
from trencadis.engine.ipc.messages import (
    BUSY_SECONDS,
    NewToken,
    Rejected,
    RequestError,
    check_order,
)
from trencadis.engine.models.adapter_files import Adapter
from trencadis.engine.runner.executor import Executor, ModelFacts
from trencadis.engine.runner.executor_choice import make_executor, with_rank_per_node
from trencadis.engine.runner.host_swap import swap_governor
from trencadis.engine.runner.limits import preemption_costs
from trencadis.engine.runner.shapes import DecodeRead
from trencadis.engine.runner.step import PendingStep, StepInput
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.engine.settings.kv_events_config import KVEventsConfig
from trencadis.engine.validators import items_of
from trencadis.kvcache import (
    BlockManager,
    CacheConfig,
    CacheRecorder,
    Defragmenter,
    Direction,
    StateSlots,
    StateSnapshots,
    TierTransfers,
)
from trencadis.scheduler import (
    BatchControl,
    BatchControlResult,
    Scheduler,
    SchedulerOutput,
    SequenceStatus,
    StepTiming,
)
from trencadis.warmup import WarmupReport

logger = logging.getLogger("trencadis.engine")

STALLED_SECONDS = 0.01
"""Pause after a step in which no sequence could run."""

_MAX_FAILED_STEPS = 3
"""Steps that may fail as a whole, one after the other, before the core gives up."""


class EngineCore:
    """Loads a model and serves requests step by step. Not thread-safe.

    With ``compile``, cores in several threads of one process must not compile at the same time:
    PyTorch's tracing changes ``torch.nn.Module`` for all threads. `AsyncEngine` gives each core a
    process.

    ``executor`` and ``thermal`` replace those that ``config`` names. ``clock`` returns seconds for
    the scheduler. ``adapters``: the directories of the adapters that models had in an earlier core,
    by the names of both; a model has these instead of those of its settings. Raises `ModelError` or
    `ConfigError` when the model cannot be served under ``config``.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor | None = None,
        thermal: ThermalMonitor | None = None,
        clock: Callable[[], float] = time.monotonic,
        adapters: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self._clock = clock
        self._earlier_adapters = adapters or {}
        if executor is None:
            config = with_rank_per_node(config)
            executor = make_executor(config)
        self.executor = executor
        device = self.executor.device_facts
        config = config.for_device(device.defaults)
        # Before the weights are loaded, so that a wrong policy name is reported within a second.
        self._thermal = thermal or ThermalMonitor.from_config(
            config, device.temperature_source, device.sensor_indices
        )
        self.on_busy: Callable[[str, float], None] = lambda reason, limit_s: None
        """Called before what may take minutes, with what it is and how many seconds at most; 0:
        no more than a step."""
        self.executor.on_cold = lambda shape: self.on_busy(
            f"the engine core compiles {shape}", BUSY_SECONDS
        )
        self._tables: dict[str, AdapterTable] = {}
        """The adapters of each model that was served, by its name."""
        self._close_events: Callable[[], object] = lambda: None
        self._totals: dict[str, EngineStats] = {}
        """The totals of each model, up to when what counts them last began again at 0."""
        self._counted_before = EngineStats()
        """What the present counters said then: those of a model in the stash are not 0."""
        events = KVEventsConfig.of(config.kv_events_config)
        self._kv_events = KVEventPublisher(events) if events.publishes else None
        if self._kv_events is not None:
            # Also of an engine that is dropped without an end: the address stays in use otherwise.
            self._close_events = weakref.finalize(self, self._kv_events.close)
        self._close_tiers: Callable[[], object] = lambda: None
        try:
            self._tiers = PrefixTiers(config.kv_tiers)
            # Also of an engine that is dropped without an end, whose directory stays in use.
            self._close_tiers = weakref.finalize(self, self._tiers.close)
            self.executor.load(config)
            self._serve(self.executor.plan_memory())
            self._thermal.start()
        except BaseException:
            self._close_events()
            self._close_tiers()
            raise

    def _serve(self, facts: ModelFacts) -> None:
        """Build everything that depends on the model or its cache; nothing of it exists yet."""
        self.facts = facts
        self.config = config = facts.config
        self.spec = facts.spec
        self.max_model_len = facts.limits.max_model_len
        self.pause_s = 0.0
        self._in_flight: list[tuple[SchedulerOutput, PendingStep]] = []
        """The steps that the executor works on, the oldest first."""
        self._num_steps = 0
        self._num_failed_steps = 0
        self._num_prefill_tokens = 0
        self._swapped_bytes = {Direction.OUT: 0, Direction.IN: 0}
        self._swap_seconds = 0.0
        self._running_limit = config.max_num_seqs
        self._prefill_limit = facts.limits.max_num_batched_tokens
        tiers = self._make_blocks(facts)
        slots = None
        if facts.num_state_slots:
            slots = StateSlots(facts.num_state_slots, facts.num_host_state_slots)
        self._defragmenter = None
        # Only a prefix gets shorter when blocks move down. Of several groups, pairs are read.
        if facts.read is DecodeRead.PREFIX and len(facts.windows) == 1:
            shared = facts.num_shared_blocks
            self._defragmenter = Defragmenter(self.blocks, config.defrag, shared_within=shared)
        self.scheduler = Scheduler(
            facts.limits.scheduler_config(
                max_waiting=config.max_waiting,
                max_chunk_tokens=facts.max_chunk_tokens,
                policy=config.scheduling_policy,
                num_output_tokens=0 if self.spec.is_pooling else 1,
                max_adapters=config.max_loras if config.enable_lora else None,
            ),
            self.blocks,
            thermal=self._thermal.guard,
            defragmenter=self._defragmenter,
            state_slots=slots,
            costs=preemption_costs(facts.block_bytes, facts.state_bytes, len(facts.windows)),
            tiers=tiers,
            clock=self._clock,
        )
        rng = random.Random(config.seed)
        eos_token_ids = self.spec.eos_token_ids
        tokenizer = functools.partial(saved_tokenizer_json, self.spec.source)
        self._grammars = GrammarCompiler(tokenizer, self.spec.vocab_size, eos_token_ids)
        self.requests = RequestTable(
            *(self.scheduler, eos_token_ids, rng, self._grammars, config.kv_cache_dtype),
            scored_token_cost=facts.scored_token_cost,
        )
        self._sampling = StepSampling(self.requests, self.scheduler, eos_token_ids, self._grammars)
        self._slots = AdapterSlots(config.max_loras)
        self._serve_adapters()

    def _make_blocks(self, facts: ModelFacts) -> TierTransfers | None:
        """Make the block manager; returns what moves blocks to tiers and back, if they are used."""
        config = facts.config
        windows = facts.windows
        limits = ", ".join(str(window) for window in dict.fromkeys(windows) if window is not None)
        if limits:
            logger.info(
                "A sequence gives its blocks back that have left a window of %s tokens, in %d of "
                "%d block groups",
                *(limits, sum(window is not None for window in windows), len(windows)),
            )
        keeps_states = facts.num_state_slots > 0
        snapshots = None
        if facts.num_state_snapshots:
            snapshots = StateSnapshots(facts.num_state_slots, facts.num_state_snapshots)
        elif keeps_states and config.enable_prefix_caching:
            logger.info(
                "Prefixes are not cached: the layers of %s keep states, and not those of prefixes",
                facts.spec.source,
            )
        if keeps_states and config.kv_tiers:
            logger.warning("kv_tiers %s keep nothing of this model", config.kv_tiers)
        recorder = CacheRecorder() if config.kv_tiers and not keeps_states else None
        self.blocks = BlockManager(
            CacheConfig(
                num_blocks=facts.limits.num_blocks,
                block_size=config.block_size,
                num_host_blocks=facts.num_host_blocks,
                enable_prefix_caching=config.enable_prefix_caching
                and (snapshots is not None or not keeps_states),
                windows=windows,
                tokens_ahead=facts.limits.tokens_ahead if limits else None,
                record_events=self._kv_events is not None,
            ),
            governor=swap_governor(config, facts.block_bytes),
            recorder=recorder,
            snapshots=snapshots,
        )
        tiers = None
        if recorder is not None:
            tiers = self._tiers.serve(self.executor, facts, self.blocks, recorder)
        if self._kv_events is not None:
            # That what another cache had is gone. It is told with the first step: by then a
            # subscriber of an earlier core has connected again.
            self.blocks.reset_prefix_cache()
        return tiers

    def _serve_adapters(self) -> None:
        """Load the adapters that the settings name, or those that the model had before."""
        config, executor = self.config, self.executor
        if config.name in self._tables:
            self._load_again(self._adapters.remove_lost(executor.holds_adapter))
            self._drop_unused_adapters()
            return
        self._tables[config.name] = AdapterTable()
        earlier = self._earlier_adapters.get(config.name)
        if earlier is not None:
            self._load_again(earlier)
            return
        try:
            for name, path in config.lora_modules.items():
                self.load_adapter(name, path)
        except InvalidRequest as error:
            del self._tables[config.name]
            raise ConfigError(f"lora_modules: {error}", "lora_modules") from error

    def _load_again(self, paths: Mapping[str, str]) -> None:
        """Load what the model had before. What cannot be read any more is lost, and no more."""
        loads = AdapterLoads(limit_s=AGAIN_SECONDS)
        for number, (name, path) in enumerate(paths.items()):
            loads.begin(number, name, path, self.adapter_reader(name, path))
        for load in loads.wait_for_all():
            self._add_again(load)

    def _add_again(self, load: AdapterLoad) -> None:
        try:
            self.add_adapter(load.name, load.path, load.take())
        except InvalidRequest as error:
            logger.warning("The adapter %s is lost: %s", shown(load.name), error)

    def rebuild(self, facts: ModelFacts) -> None:
        """Serve another model, which the executor has made ready, instead of the present one.

        Scheduler, block pool, prefix cache, request table and grammars are new; requests that are
        still in the old ones end without a message. The thermal policy stays, because the device is
        as hot as before. Call `abort_all` while the executor still has the previous model.
        """
        self._grammars.close()
        self._serve(facts)
        self._counted_before = self._counted()

    def abort_all(self) -> None:
        """End every request without a message, so that nothing refers to KV blocks.

        The totals of the model are kept: what counts them may be replaced next.
        """
        self.requests.abort_all()
        self.scheduler.abort_admitted()
        if self._kv_events is not None:
            self._publish_events(self._kv_events)
        self._in_flight.clear()
        counted = self._counted()
        self._totals[self.config.name], self._counted_before = self._since_start(counted), counted

    def release_tiers(self) -> None:
        """Let go of the memory through which content passes to tiers, until `rebuild`."""
        self._tiers.pause()

    @property
    def is_asleep(self) -> bool:
        """Whether the device memory is released, so that no request can be served."""
        return self.executor.is_asleep

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> WarmupReport | None:
        """Warm up before serving: see `Executor.warm_up`."""
        return self.executor.warm_up(stop)

    def advance_warm_up(self) -> None:
        """Warm up the next bucket in the background, if any is left and the core has time."""
        self.executor.advance_warm_up(idle=not self.has_work)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self.scheduler.has_work or self.requests.compiling or self._in_flight)

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counters and of the state after the last step."""
        counted = self._counted()
        return with_totals(counted, self._since_start(counted))

    def _since_start(self, counted: EngineStats) -> EngineStats:
        """The totals of the model, with what is counted now."""
        earlier = self._totals.get(self.config.name, EngineStats())
        return plus_totals(totals_since(counted, self._counted_before), earlier)

    def _counted(self) -> EngineStats:
        """The state after the last step, and what its counters say."""
        executor = self.executor.counters()
        requests = self.requests.count_by_state()
        adapters = self.requests.adapter_names() if self.config.enable_lora else ((), ())
        return EngineStats(
            num_running_reqs=requests[SequenceStatus.RUNNING],
            num_running_seqs=self.scheduler.num_running_seqs,
            max_running_seqs=self._running_limit,
            max_num_seqs=self.config.max_num_seqs,
            max_prefill_tokens=self._prefill_limit,
            max_num_batched_tokens=self.facts.limits.max_num_batched_tokens,
            num_waiting_reqs=requests[SequenceStatus.WAITING],
            num_compiling_reqs=len(self.requests.compiling),
            num_swapped_reqs=requests[SequenceStatus.SWAPPED],
            num_preempted_reqs=requests[SequenceStatus.PREEMPTED],
            num_used_blocks=self.blocks.pool.num_used_blocks,
            num_total_blocks=self.blocks.pool.num_usable_blocks,
            block_size=self.blocks.config.block_size,
            max_model_len=self.max_model_len,
            highest_block_in_use=self.blocks.pool.highest_used_block,
            num_queued_swaps=self.blocks.num_queued_swaps,
            num_buckets=self.facts.num_buckets,
            num_ready_buckets=executor.num_ready_buckets,
            is_warming_up=self.executor.is_warming_up,
            num_graphs=executor.num_graphs,
            max_adapters=self.config.max_loras if self.config.enable_lora else 0,
            running_adapters=adapters[0],
            waiting_adapters=adapters[1],
            thermal=self._thermal.stats,
            host_tier=self._tiers.stats("host"),
            disk_tier=self._tiers.stats("disk"),
            num_preemptions=self.scheduler.num_preemptions,
            num_swaps=self.scheduler.num_preemptions - self.scheduler.num_recomputes,
            num_recomputes=self.scheduler.num_recomputes,
            num_swap_out_bytes=self._swapped_bytes[Direction.OUT],
            num_swap_in_bytes=self._swapped_bytes[Direction.IN],
            swap_seconds=self._swap_seconds,
            num_steps=self._num_steps,
            num_prompt_tokens=self._sampling.num_prompt_tokens,
            num_prefix_query_tokens=self._sampling.num_prompt_tokens
            if self.blocks.config.enable_prefix_caching
            else 0,
            num_prefix_hit_tokens=self._sampling.num_cached_tokens,
            num_defragmented_blocks=self._defragmenter.num_moved if self._defragmenter else 0,
            num_prefill_tokens=self._num_prefill_tokens,
            num_generation_tokens=self._sampling.num_generation_tokens,
            num_steps_by_tokens=tuple(self._sampling.num_steps_by_tokens),
            num_padded_tokens=executor.num_padded_tokens,
            num_bucket_misses=executor.num_bucket_misses,
            num_cold_forwards=executor.num_cold_forwards,
            num_compilations=executor.num_compilations,
        )

    def inspect(self) -> EngineInspection:
        """Which KV blocks are used, and the state and the hits of the buckets. Call it between two
        steps."""
        return EngineInspection(
            self.blocks.pool.block_map(MAX_MAP_CELLS), self.executor.grid_usage()
        )

    def add(self, key: str, request: EngineRequest) -> None:
        """Add a request to the waiting queue, under a key that no other one has meanwhile.

        Raises `InvalidRequest`, naming the field, or `EngineOverloaded`. A structured output is
        compiled beside the steps; if that fails, `take_failures` has the rejection.
        """
        check_request_id(key)
        check_is_request(request)
        if self.is_asleep:
            raise InvalidRequest("the engine sleeps: wake it up before requests are sent")
        spec = self.spec
        request.check(spec.vocab_size, self.max_model_len, is_pooling=spec.is_pooling)
        limit = min(self.scheduler.scheduler_config.max_num_seqs, self._running_limit)
        name = request.lora
        digest = self._adapters.digest_of(name)
        if name is not None and request.lora_digest not in ("", digest):
            raise InvalidRequest(
                f"the adapter {shown(name)} has other weights than when the request began: send it "
                "again",
                "lora",
            )
        self.requests.add(key, request, limit, digest)

    @property
    def _adapters(self) -> AdapterTable:
        return self._tables[self.config.name]

    @property
    def adapters(self) -> tuple[NamedAdapter, ...]:
        """The adapters that requests may name."""
        return tuple(self._adapters)

    def load_adapter(self, name: str, path: str) -> NamedAdapter:
        """Load the adapter in the directory ``path``, under a name that none has.

        Raises `AdapterError` for one that cannot be served, and `InvalidRequest`, naming the field,
        for values of other types. Nothing has changed then.
        """
        return self.add_adapter(name, path, self.adapter_reader(name, path)())

    def adapter_reader(
        self, name: str, path: str, within: Sequence[str] = ()
    ) -> Callable[[], Adapter]:
        """The first part of `load_adapter`: what reads the adapter, to be called in any thread.

        What it returns is for `add_adapter`, as long as neither the model is switched nor the core
        sleeps meanwhile. ``within``: see `AsyncEngine.load_adapter`. Raises as `load_adapter`, and
        so does what it returns.
        """
        check_adapter_name(name, "lora_name")
        if not isinstance(path, str) or not path:
            raise InvalidRequest(
                f"lora_path must be the directory of an adapter, got {shown(path)}", "lora_path"
            )
        if not self.config.enable_lora:
            raise AdapterError("this engine serves no adapters: start it with enable_lora")
        if name == self.config.name:
            raise AdapterError(
                f"{shown(name)} is the name of the model: give the adapter another", "lora_name"
            )
        if self.is_asleep:
            raise AdapterError("the engine sleeps: wake it up before adapters are loaded")
        self._adapters.check_free(name)
        return functools.partial(self.executor.adapter_reader(), Path(path), within=within)

    def add_adapter(self, name: str, path: str, adapter: Adapter) -> NamedAdapter:
        """The second part of `load_adapter`: requests may name what was read from ``path``."""
        self._drop_unused_adapters()
        self._adapters.check_free(name)
        added = self._adapters.add(name, path, self.executor.hold_adapter(adapter))
        logger.info("Adapter %s: %s, rank %d", name, path, added.loaded.rank)
        return added

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter: new requests may not name it, those that were added go on with it.

        Its memory is freed when they have ended. Raises `AdapterError` for one that is not loaded.
        """
        check_adapter_name(name, "lora_name")
        self._adapters.remove(name)
        self._drop_unused_adapters()
        logger.info("Adapter %s was unloaded", name)

    def _drop_unused_adapters(self) -> None:
        if self._adapters.has_retired:
            for digest in self._adapters.unused(self.requests.adapters()):
                self.executor.drop_adapter(digest)

    def abort(self, key: str) -> None:
        """End a request and free its blocks. An unknown key is ignored: the request has ended."""
        self.requests.abort(key)
        self._drop_unused_adapters()

    def finish(self, key: str, index: int) -> None:
        """End sample ``index`` of a request, because the front found a stop string."""
        self.requests.finish(key, index)
        self._drop_unused_adapters()

    def abort_and_swap(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Preempt these requests at the start of the next step; they keep their tokens.

        Returns the keys of those that run; the others are ignored. See `Scheduler.abort_and_swap`.
        Raises `InvalidRequest` for what is not a list of keys.
        """
        listed = items_of(keys)
        if listed is None or not all(isinstance(key, str) for key in listed):
            raise InvalidRequest(
                f"abort_and_swap needs a list of request ids, got {shown(keys)}", "request_ids"
            )
        return self.requests.preempt(listed)

    def control(self, order: BatchControl) -> Future[BatchControlResult]:
        """Queue an order, which is carried out at the start of the next step.

        See `Scheduler.control`. Raises `InvalidRequest` for a ``max_num_seqs`` above the one that
        the engine was started with, since its buckets end there.
        """
        check_order(order)
        limit = self.config.max_num_seqs
        if order.max_num_seqs is not None and order.max_num_seqs > limit:
            raise InvalidRequest(
                f"max_num_seqs {order.max_num_seqs} is above {limit}, for which this engine was "
                "prepared: start it with more",
                "max_num_seqs",
            )
        return self.scheduler.control(order)

    def step(self) -> list[NewToken]:
        """Run one step; returns the new tokens.

        Afterwards ``pause_s`` is how many seconds to wait before the next step: above 0 only when
        no sequence could run, because of swap transfers or a lowered running limit.

        An error ends the requests that it concerns; `take_failures` returns them. Where that cannot
        be told, these are all admitted requests. Raises the error where serving cannot go on: the
        device has failed, the blocks of the KV cache are in disorder, or step after step fails.
        """
        try:
            tokens = self._run_step()
        except Exception as error:
            self._recover(error)
            tokens = []
        else:
            self._num_failed_steps = 0
        if self._kv_events is not None:
            self._publish_events(self._kv_events)
        if self.config.enable_lora:  # after the events, which have their names
            self._drop_unused_adapters()
        return tokens

    def take_failures(self) -> list[RequestError | Rejected]:
        """The requests that errors have ended since the last call, or that were rejected late."""
        failures, self.requests.failures = self.requests.failures, []
        return failures

    def _run_step(self) -> list[NewToken]:
        if self.requests.compiling:
            if not self.scheduler.has_work:
                self.requests.await_compiled(STALLED_SECONDS)
            self.requests.add_compiled()
        while self._can_launch():
            self._launch()
        if not self._in_flight:
            self.pause_s = 0.0  # it has waited for a grammar
            return []
        return self._finish_oldest()

    def _can_launch(self) -> bool:
        """Whether the next step can be started, also before the results of the last one."""
        if self._in_flight and self._sampling.needs_results:
            return False
        return self.scheduler.has_work and self.scheduler.reason_to_wait is None

    def _launch(self) -> None:
        """Schedule the next step and start it."""
        output = self.scheduler.schedule()
        for failed in output.failed:
            self.requests.fail(failed.request_id, failed.error)
        if output.preempted_seq_ids:
            self.requests.note_preempted(output.preempted_seq_ids)
        is_stalled = not (self._in_flight or output.decodes or output.prompts or output.moves)
        self.pause_s = STALLED_SECONDS if is_stalled else 0.0
        rows = self._sampling.row_requests(output)
        targets = self._sampling.prompt_targets(output) if self.requests.scored else {}
        step = StepInput(
            *(output.step, output.prompts, output.decodes, output.moves, rows, targets),
            self._adapter_slots(output) if self.config.enable_lora else {},
            output.state_moves,
        )
        self._in_flight.append((output, self.executor.execute(step)))

    def _adapter_slots(self, output: SchedulerOutput) -> Mapping[str, int]:
        """The slots of the adapters of a step."""
        scheduled = (*output.prompts, *output.decodes)
        adapters = dict.fromkeys(item.adapter for item in scheduled if item.adapter)
        return self._slots.of_step(adapters, self.scheduler.adapters) if adapters else {}

    def _finish_oldest(self) -> list[NewToken]:
        """Wait for the oldest step in flight; returns its tokens."""
        output, pending = self._in_flight[0]
        result = pending.wait()
        if result.prompt_logprobs:
            self._sampling.keep_prompt_logprobs(result.prompt_logprobs)
        sampled = self._sampling.sampled(result, self._pays_to_jump)
        if result.failed:
            self._end_failed(result.failed)
        if output.moves or output.state_moves:
            self._count_swaps(output, result.timing)
        del self._in_flight[0]
        updates = self.scheduler.update(
            output,
            sampled.token_ids,
            logprobs=sampled.logprobs,
            candidates=result.candidates,
            forced=sampled.forced,
            timing=result.timing,
        )
        self._num_steps += 1
        for chunk in output.prompts:
            self._num_prefill_tokens += len(chunk.token_ids)
        self._running_limit = output.max_running_seqs
        self._prefill_limit = output.max_prefill_tokens
        return self._sampling.report(updates, result, sampled)

    def _pays_to_jump(self, start: int, num_forced: int) -> bool:
        """Whether to compute forced tokens as one chunk; see `Executor.pays_to_jump`."""
        return self.executor.pays_to_jump(start, num_forced, self.scheduler.num_running_seqs)

    def _count_swaps(self, output: SchedulerOutput, timing: StepTiming | None) -> None:
        facts = self.facts
        for direction, copies in output.state_moves or ():
            if direction in self._swapped_bytes:
                self._swapped_bytes[direction] += len(copies) * facts.state_bytes
        for direction, copies in output.moves:
            if direction in self._swapped_bytes:
                # Those after them are for tiers.
                hosts = [dst if direction is Direction.OUT else src for src, dst in copies]
                num_swapped = sum(host < facts.num_host_blocks for host in hosts)
                self._swapped_bytes[direction] += num_swapped * facts.block_bytes
        if timing is not None:
            self._swap_seconds += (timing.swap_out_s or 0.0) + (timing.swap_in_s or 0.0)

    def finish_steps(self) -> list[NewToken]:
        """Wait for the steps in flight, without starting others; returns their tokens.

        Errors are those of `step`.
        """
        tokens: list[NewToken] = []
        try:
            while self._in_flight:
                tokens += self._finish_oldest()
        except Exception as error:
            self._recover(error)
        return tokens

    def discard_step(self) -> None:
        """Drop the steps that were interrupted before they were complete, as by Ctrl-C, if any.

        What they wrote to the KV cache is unknown, so every admitted request ends, as after an
        error.
        """
        self._in_flight.clear()
        if not self.scheduler.num_steps_in_flight:
            return  # the last step is complete
        interruption = InterruptedError("the step was interrupted")
        for request_id in self.scheduler.abort_admitted():
            self.requests.fail(request_id, interruption)

    def _end_failed(self, errors: Mapping[int, Exception]) -> None:
        """End the requests of sequences whose forward pass or sampling failed."""
        # Raises if the device computes nothing any more: then these requests were not at fault.
        if not all(isinstance(error, BucketMiss) for error in errors.values()):
            self.executor.probe()
        for seq_id, error in errors.items():
            self.requests.fail_sequence(seq_id, error)

    def _recover(self, error: Exception) -> None:
        """Go on after a step that failed as a whole.

        The content of the KV cache is unknown, so every admitted request ends; waiting ones stay.
        Raises ``error`` where serving cannot go on.
        """
        logger.error("A step failed: the requests that it may concern end", exc_info=error)
        self._num_failed_steps += 1
        self._in_flight.clear()
        for request_id in self.scheduler.abort_admitted():
            self.requests.fail(request_id, error)
        if self._num_failed_steps >= _MAX_FAILED_STEPS or self.blocks.pool.num_used_blocks:
            raise error
        self.executor.probe()

    def close(self) -> None:
        """Stop the threads of temperatures and grammars, and write what was recorded."""
        self._grammars.close()
        self._thermal.stop()
        self.executor.close()
        self._close_events()
        self._close_tiers()

    def _publish_events(self, publisher: KVEventPublisher) -> None:
        """Tell what the prefix cache got and lost; later, where too much waits to be told."""
        if publisher.has_space and (events := self.blocks.take_events()):
            publisher.publish(events, self.blocks.config.block_size, self._adapters.names)
