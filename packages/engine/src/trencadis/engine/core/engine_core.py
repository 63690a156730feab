"""The engine core: schedules, executes and samples one step at a time.

`EngineCore` is synchronous and does no communication. `core_process` runs it in its own process
for servers; `LLM` runs it in the caller's process for offline batches.
"""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path

from trencadis.engine.api.inspection import MAX_MAP_CELLS, EngineInspection
from trencadis.engine.api.outputs import EngineStats
from trencadis.engine.api.requests import EngineRequest, check_is_request, check_request_id
from trencadis.engine.core.request_table import RequestTable
from trencadis.engine.core.step_sampling import StepSampling
from trencadis.engine.core.thermal_monitor import ThermalMonitor
from trencadis.engine.devices import Device, select_device
from trencadis.engine.errors import BucketMiss, InvalidRequest
from trencadis.engine.grammars.compiler import GrammarCompiler
from trencadis.engine.grammars.grammar import saved_tokenizer_json
from trencadis.engine.ipc.messages import (
    BUSY_SECONDS,
    NewToken,
    Rejected,
    RequestError,
    check_order,
)
from trencadis.engine.runner.host_swap import swap_governor
from trencadis.engine.runner.shapes import DecodeRead
from trencadis.engine.runner.worker import Worker
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.engine.validators import items_of, shown
from trencadis.kvcache import BlockManager, CacheConfig, CopyPlan, Defragmenter, Direction
from trencadis.scheduler import (
    BatchControl,
    BatchControlResult,
    Scheduler,
    SequenceStatus,
    StepOrderError,
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

    ``device`` and ``thermal`` replace those that ``config`` names. Without ``records`` no traffic
    is recorded: for a core that only warms up. Raises `ModelError` or `ConfigError` when the model
    cannot be served under ``config``.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: Device | None = None,
        thermal: ThermalMonitor | None = None,
        *,
        records: bool = True,
    ) -> None:
        self.device = select_device(
            config.device if device is None else device,
            Path(config.compile_cache) if config.compile_cache else None,
            trust_compile_cache=config.trust_compile_cache,
            fp32_softmax=config.fp32_softmax,
            cpu_threads=config.cpu_threads,
        )
        self.config = config = config.for_device(self.device.defaults)
        # Before the weights are loaded, so that a wrong policy name is reported within a second.
        self._thermal = thermal or ThermalMonitor.from_config(
            config, self.device.temperature_source, self.device.sensor_indices
        )
        self.on_busy: Callable[[str, float], None] = lambda reason, limit_s: None
        """Called before what may take minutes, with what it is and how many seconds at most; 0:
        no more than a step."""
        worker = Worker(config, self.device, records=records)
        worker.load()
        worker.initialise_cache()
        self._serve(worker)
        self._thermal.start()

    def _serve(self, worker: Worker) -> None:
        """Build everything that depends on the model or its cache; nothing of it exists yet."""
        self.worker = worker
        self.config = config = worker.config
        self.spec = worker.spec
        self.max_model_len = worker.limits.max_model_len
        self.pause_s = 0.0
        worker.runner.forward_runner.on_cold = lambda shape: self.on_busy(
            f"the engine core compiles {shape}", BUSY_SECONDS
        )
        self._num_buckets = worker.num_buckets
        self._num_steps = 0
        self._num_failed_steps = 0
        self._num_prefill_tokens = 0
        self._swapped_bytes = {Direction.OUT: 0, Direction.IN: 0}
        self._swap_seconds = 0.0
        self._running_limit = config.max_num_seqs
        self._prefill_limit = worker.limits.max_num_batched_tokens
        self.blocks = BlockManager(
            CacheConfig(
                num_blocks=self.worker.limits.num_blocks,
                block_size=config.block_size,
                num_host_blocks=self.worker.cache.num_host_blocks,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
            governor=swap_governor(config, self.worker.block_bytes),
        )
        # Only a prefix gets shorter when blocks move down.
        self._defragmenter = (
            Defragmenter(self.blocks, config.defrag)
            if self.worker.read is DecodeRead.PREFIX
            else None
        )
        grids = self.worker.grids
        self.scheduler = Scheduler(
            self.worker.limits.scheduler_config(
                max_waiting=config.max_waiting,
                max_chunk_tokens=grids.max_chunk_tokens if grids else None,
                policy=config.scheduling_policy,
                num_output_tokens=0 if self.spec.is_pooling else 1,
            ),
            self.blocks,
            thermal=self._thermal.guard,
            defragmenter=self._defragmenter,
        )
        rng = random.Random(config.seed)
        eos_token_ids = self.spec.eos_token_ids
        tokenizer = functools.partial(saved_tokenizer_json, self.spec.source)
        self._grammars = GrammarCompiler(tokenizer, self.spec.vocab_size, eos_token_ids)
        self.requests = RequestTable(self.scheduler, eos_token_ids, rng, self._grammars)
        self._sampling = StepSampling(self.requests, self.scheduler, eos_token_ids, self._grammars)

    def rebuild(self, worker: Worker) -> None:
        """Serve ``worker``'s model instead of the present one.

        Scheduler, block pool, prefix cache, request table, grammars and totals are new; requests
        that are still in the old ones end without a message. The thermal policy stays, because the
        device is as hot as before.
        """
        self._grammars.close()
        self._serve(worker)

    def abort_all(self) -> int:
        """End every request without a message; returns how many there were."""
        return self.requests.abort_all()

    @property
    def is_asleep(self) -> bool:
        """Whether the device memory is released, so that no request can be served."""
        return self.worker.is_asleep

    def warm_up(self, stop: Callable[[], bool] = lambda: False) -> WarmupReport | None:
        """Warm up before serving, as ``config.warmup`` says.

        Returns None where the rest is warmed up in the background, or nothing is. ``stop`` is
        polled before each bucket; True ends the warm-up.
        """
        return self.worker.warm_up(stop)

    @property
    def is_warming_up(self) -> bool:
        """Whether buckets are left for the background warm-up."""
        background = self.worker.background
        return background is not None and background.is_running and not self.is_asleep

    def advance_warm_up(self) -> None:
        """Warm up the next bucket in the background, if any is left and the core has time."""
        if self.worker.background is not None and not self.is_asleep:
            self.worker.background.advance(idle=not self.has_work)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return self.scheduler.has_work or self.requests.is_compiling

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counters and of the state after the last step."""
        runner = self.worker.runner
        requests = self.requests.count_by_state()
        return EngineStats(
            num_running_reqs=requests[SequenceStatus.RUNNING],
            num_running_seqs=self.scheduler.num_running_seqs,
            max_running_seqs=self._running_limit,
            max_prefill_tokens=self._prefill_limit,
            num_waiting_reqs=requests[SequenceStatus.WAITING],
            num_swapped_reqs=requests[SequenceStatus.SWAPPED],
            num_preempted_reqs=requests[SequenceStatus.PREEMPTED],
            num_used_blocks=self.blocks.pool.num_used_blocks,
            num_total_blocks=self.blocks.pool.num_usable_blocks,
            block_size=self.blocks.config.block_size,
            highest_block_in_use=self.blocks.pool.highest_used_block,
            num_queued_swaps=self.blocks.num_queued_swaps,
            num_buckets=self._num_buckets,
            num_ready_buckets=runner.num_ready_buckets,
            is_warming_up=self.is_warming_up,
            num_graphs=runner.num_graphs,
            thermal=self._thermal.stats,
            num_preemptions=self.scheduler.num_preemptions,
            num_swaps=self.scheduler.num_preemptions - self.scheduler.num_recomputes,
            num_recomputes=self.scheduler.num_recomputes,
            num_swap_out_bytes=self._swapped_bytes[Direction.OUT],
            num_swap_in_bytes=self._swapped_bytes[Direction.IN],
            swap_seconds=self._swap_seconds,
            num_steps=self._num_steps,
            num_prompt_tokens=self._sampling.num_prompt_tokens,
            num_prefix_query_tokens=self._sampling.num_prompt_tokens
            if self.config.enable_prefix_caching
            else 0,
            num_prefix_hit_tokens=self._sampling.num_cached_tokens,
            num_defragmented_blocks=self._defragmenter.num_moved if self._defragmenter else 0,
            num_prefill_tokens=self._num_prefill_tokens,
            num_generation_tokens=self._sampling.num_generation_tokens,
            num_padded_tokens=runner.padded_tokens,
            num_bucket_misses=runner.bucket_misses,
            num_cold_forwards=runner.forward_runner.cold_forwards,
            num_compilations=runner.forward_runner.compilations,
        )

    def inspect(self) -> EngineInspection:
        """Which KV blocks are used, and the state and the hits of the buckets. Call it between two
        steps."""
        return EngineInspection(
            self.blocks.pool.block_map(MAX_MAP_CELLS), self.worker.runner.grid_usage
        )

    def add(self, key: str, request: EngineRequest) -> None:
        """Add a request to the waiting queue, under a key that no other one has meanwhile.

        Raises `InvalidRequest`, naming the field, or `EngineOverloaded`. A structured output is
        compiled beside the steps; if that fails, `take_failures` has the refusal.
        """
        check_request_id(key)
        check_is_request(request)
        if self.is_asleep:
            raise InvalidRequest("the engine sleeps: wake it up before requests are sent")
        spec = self.spec
        request.check(spec.vocab_size, self.max_model_len, is_pooling=spec.is_pooling)
        limit = min(self.scheduler.scheduler_config.max_num_seqs, self._running_limit)
        self.requests.add(key, request, limit)

    def abort(self, key: str) -> None:
        """End a request and free its blocks. An unknown key is ignored: the request has ended."""
        self.requests.abort(key)

    def finish(self, key: str, index: int) -> None:
        """End sample ``index`` of a request, because the front found a stop string."""
        self.requests.finish(key, index)

    def abort_and_swap(self, keys: Iterable[str]) -> tuple[str, ...]:
        """Preempt these requests at the start of the next step; they keep their tokens.

        Returns the keys of those that run; the others are ignored. See `Scheduler.abort_and_swap`.
        Raises `InvalidRequest` for what is no list of keys.
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
            return []
        self._num_failed_steps = 0
        return tokens

    def take_failures(self) -> list[RequestError | Rejected]:
        """The requests that errors have ended since the last call, or that were refused late."""
        return self.requests.take_failures()

    def _run_step(self) -> list[NewToken]:
        self.worker.runner.capture_used_buckets()
        if self.requests.is_compiling:
            if not self.scheduler.has_work:
                self.requests.await_compiled(STALLED_SECONDS)
            self.requests.add_compiled()
        if not self.scheduler.has_work:
            self.pause_s = 0.0  # it has waited for a grammar
            return []
        output = self.scheduler.schedule()
        for failed in output.failed:
            self.requests.fail(failed.request_id, failed.error)
        self.requests.note_preempted(output.preempted_seq_ids)
        stalled = not (output.decodes or output.prompts or output.moves)
        self.pause_s = STALLED_SECONDS if stalled else 0.0
        began = time.perf_counter()
        computed = self.worker.runner.run(output, self._sampling.row_requests(output))
        sampled = self._sampling.sampled(output, computed.wait(), self._pays_to_jump)
        if computed.failed:
            self._end_failed(computed.failed)
        compute_s = time.perf_counter() - began - sum(computed.swap_s.values())
        swap_s = computed.swap_s
        self._count_swaps(output.moves, swap_s)
        timing = None
        if swap_s or not output.decodes:
            timing = StepTiming(
                # A step with decodes does not tell how long its prefill chunks took.
                prompts_s=compute_s if computed.is_timed and not output.decodes else None,
                swap_out_s=swap_s.get(Direction.OUT),
                swap_in_s=swap_s.get(Direction.IN),
            )
        updates = self.scheduler.update(
            output,
            sampled.token_ids,
            logprobs=sampled.logprobs,
            candidates=sampled.candidates,
            forced=sampled.forced,
            timing=timing,
        )
        self._num_steps += 1
        for chunk in output.prompts:
            self._num_prefill_tokens += len(chunk.token_ids)
        self._running_limit = output.max_running_seqs
        self._prefill_limit = output.max_prefill_tokens
        return self._sampling.report(updates, sampled)

    def _pays_to_jump(self, start: int, num_forced: int) -> bool:
        """Whether to compute forced tokens as one chunk; see `ModelRunner.pays_to_jump`."""
        num_seqs = self.scheduler.num_running_seqs
        return self.worker.runner.pays_to_jump(start, num_forced, num_seqs)

    def _count_swaps(self, moves: CopyPlan, swap_s: Mapping[Direction, float]) -> None:
        for direction, copies in moves:
            if direction in self._swapped_bytes:
                self._swapped_bytes[direction] += len(copies) * self.worker.block_bytes
        self._swap_seconds += sum(swap_s.values())

    def discard_step(self) -> None:
        """Drop a step that was interrupted before it was complete, as by Ctrl-C, if there is one.

        What it wrote to the KV cache is unknown, so every admitted request ends, as after an error.
        """
        try:
            self.scheduler.discard_step()
        except StepOrderError:
            return  # the last step is complete
        interruption = InterruptedError("the step was interrupted")
        for request_id in self.scheduler.abort_admitted():
            self.requests.fail(request_id, interruption)

    def _end_failed(self, errors: Mapping[int, Exception]) -> None:
        """End the requests of sequences whose forward pass or sampling failed."""
        # Raises if the device computes nothing any more: then it was no fault of these requests.
        if not all(isinstance(error, BucketMiss) for error in errors.values()):
            self.worker.runner.probe()
        for seq_id, error in errors.items():
            self.requests.fail_sequence(seq_id, error)

    def _recover(self, error: Exception) -> None:
        """Go on after a step that failed as a whole.

        The content of the KV cache is unknown, so every admitted request ends; waiting ones stay.
        Raises ``error`` where serving cannot go on.
        """
        logger.error("A step failed: the requests that it may concern end", exc_info=error)
        self._num_failed_steps += 1
        for request_id in self.scheduler.abort_admitted():
            self.requests.fail(request_id, error)
        if self._num_failed_steps >= _MAX_FAILED_STEPS or self.blocks.pool.num_used_blocks:
            raise error
        self.worker.runner.probe()

    def close(self) -> None:
        """Stop the threads of temperatures and grammars, and write what was recorded."""
        self._grammars.close()
        self._thermal.stop()
        self.worker.close()
