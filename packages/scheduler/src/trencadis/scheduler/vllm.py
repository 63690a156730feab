"""vLLM's schedulers under our limits: classes for its ``--scheduler-cls``.

They wrap `schedule` and replace nothing of it. Before a step, `BatchLimiter` preempts until the
batch is within the limit; vLLM's own scheduler then admits no more. The settings are those of
`runtime_settings`, under ``trencadis`` in vLLM's ``--additional-config``. Only vLLM imports this
module.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

import attrs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore

from trencadis.scheduler.batch_limiter import BatchLimiter, BatchLimits
from trencadis.scheduler.control import BatchControl, BatchControlResult
from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.runtime_settings import checked_settings, reader_and_guard
from trencadis.scheduler.telemetry import TemperatureReader
from trencadis.scheduler.thermal.guard import ThermalGuard

LIMITS_OF_ADMISSION = ("max_num_running_reqs", "max_num_active_reqs")
"""Attributes of vLLM's scheduler up to which it admits requests. Older versions have the first."""


@attrs.define(eq=False)
class RunningRequest:
    """A running request of vLLM as a `Victim`."""

    request: Any
    kv_cache_manager: Any
    started_at_s: float
    last_scheduled_step: int
    num_seqs: int = 1

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    @property
    def priority(self) -> int:
        return int(self.request.priority)

    @property
    def arrival(self) -> int:
        return int(self.request.arrival_time * 1e6)

    @property
    def num_tokens_left(self) -> int:
        return int(self.request.max_tokens - self.request.num_output_tokens)

    def get_num_kv_blocks(self) -> int:
        groups = self.kv_cache_manager.get_block_ids(self.request_id)
        return sum(map(len, groups))


class RunningRequests:
    """The running requests of a scheduler as a `BatchHost`."""

    def __init__(self, scheduler: ThermalScheduler) -> None:
        self.known: dict[str, RunningRequest] = {}
        self._scheduler = scheduler

    @property
    def running(self) -> Iterable[RunningRequest]:
        return self.known.values()

    def update(self, step: int) -> None:
        """Take over what vLLM has started and ended since the last step."""
        now_s, known, scheduler = time.monotonic(), self.known, self._scheduler
        self.known = {
            request.request_id: known.get(request.request_id)
            or RunningRequest(request, scheduler.kv_cache_manager, now_s, step)
            for request in scheduler.running
        }

    def preempt(self, victim: RunningRequest) -> None:
        """As vLLM preempts where its cache is full."""
        del self.known[victim.request_id]
        self._scheduler.running.remove(victim.request)
        self._scheduler.preempt(victim.request)


class ThermalScheduler(Scheduler):  # type: ignore[misc]  # vLLM is not there where mypy runs
    """vLLM's synchronous scheduler, limited by temperature, power and orders."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        is_async = getattr(self.scheduler_config, "async_scheduling", False)
        if is_async and not isinstance(self, AsyncScheduler):
            raise ConfigError(
                f"{type(self).__name__} schedules no step ahead, and async_scheduling is on: use "
                "ThermalAsyncScheduler, or --no-async-scheduling"
            )
        config = self.vllm_config.additional_config or {}
        settings = checked_settings("additional_config trencadis", config.get("trencadis", {}))
        guard: ThermalGuard | None
        self._reader: TemperatureReader | None
        self._reader, guard = reader_and_guard(settings)
        self._requests = RunningRequests(self)
        self._step = self._num_prefill_tokens = 0
        self._tokens_per_decode = 1 + self.num_spec_tokens
        self._most_tokens: int = self.max_num_scheduled_tokens
        names = (name for name in LIMITS_OF_ADMISSION if hasattr(self, name))
        self._admission = {name: getattr(self, name) for name in names}
        # Without chunked prefill a prompt above the prefill limit would never start.
        self._limits_prefill = bool(self.scheduler_config.enable_chunked_prefill)
        self._limiter = BatchLimiter(
            self._requests,
            max_num_seqs=self.max_num_running_reqs,
            max_num_batched_tokens=max(self._most_tokens, self.max_num_running_reqs),
            thermal=guard,
        )
        # What the clients of vLLM's core call by name, ``call_utility("batch_control", ...)``.
        EngineCore.batch_control = _batch_control
        if self._reader is not None:
            self._reader.start()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self.begin_step()
        output = super().schedule(*args, **kwargs)
        self.end_step(output.num_scheduled_tokens)
        return output

    def has_requests(self) -> bool:
        """Also true for an order, which the next step carries out."""
        return self._limiter.has_orders or bool(super().has_requests())

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.stop()
        super().shutdown()

    def control(self, control: BatchControl) -> Future[BatchControlResult]:
        """Queue an order, from any thread of the core's process; see `BatchLimiter.control`."""
        return self._limiter.control(control)

    def begin_step(self) -> BatchLimits:
        """Preempt what is above the limits of the next step, and set them."""
        self._requests.update(self._step)
        limits = self._limiter.begin_step(
            num_prefill_tokens=self._num_prefill_tokens, longest_wait_s=self._longest_wait_s()
        )
        for name, slots in self._admission.items():
            setattr(self, name, min(slots, limits.max_num_seqs))
        self.max_num_scheduled_tokens: int = self._most_tokens
        if self._limits_prefill and limits.max_prefill_tokens < self._most_tokens:
            decodes = sum(not request.is_prefill_chunk for request in self.running)
            # vLLM gives tokens in this order, and a prompt before them would take those of decodes.
            self.running.sort(key=lambda each: each.is_prefill_chunk)
            most = decodes * self._tokens_per_decode + limits.max_prefill_tokens
            self.max_num_scheduled_tokens = min(self._most_tokens, most)
        return limits

    def end_step(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Note what a step computes, by request id."""
        self._step += 1
        self._num_prefill_tokens = 0
        known = self._requests.known
        for request_id, num_tokens in num_scheduled_tokens.items():
            if num_tokens > self._tokens_per_decode:
                self._num_prefill_tokens += num_tokens
            if request_id in known:
                known[request_id].last_scheduled_step = self._step

    def preempt(self, request: Any) -> None:
        """Preempt a request that has left ``running``, as vLLM does when its cache is full."""
        # A connector that hands over the KV cache needs the blocks of every token it delivers.
        drops = {"drop_stale_output": True} if getattr(self, "requires_kv_delivery", False) else {}
        self._preempt_request(request, time.monotonic(), **drops)

    def _longest_wait_s(self) -> float:
        """Seconds since the oldest request arrived that has no token yet; 0 without such a one.

        Of those that run, and the first one that waits: preempted ones wait before it.
        """
        waiting = next((each for each in self.waiting if not each.num_output_tokens), None)
        groups = [each for each in self.running if not each.num_output_tokens]
        groups += [] if waiting is None else [waiting]
        arrivals = [float(each.arrival_time) for each in groups]
        return max(0.0, time.time() - min(arrivals)) if arrivals else 0.0


class ThermalAsyncScheduler(ThermalScheduler, AsyncScheduler):  # type: ignore[misc]
    """The same for asynchronous scheduling, vLLM's default: the next step is scheduled ahead."""


def _batch_control(core: Any, fields: Mapping[str, Any]) -> Future[dict[str, Any]]:
    """Queue an order with the fields of `BatchControl`; the answer has those of its result."""
    answer: Future[dict[str, Any]] = Future()

    def pass_on(result: Future[BatchControlResult]) -> None:
        error = result.exception()
        if error is None:
            answer.set_result(attrs.asdict(result.result()))
        else:
            answer.set_exception(error)

    core.scheduler.control(BatchControl(**fields)).add_done_callback(pass_on)
    return answer
