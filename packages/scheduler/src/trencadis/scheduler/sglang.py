"""SGLang's scheduler under our limits, a class in the place of its own: see `sglang_plugin`.

It replaces no decision of SGLang's. Before a step, `BatchLimiter` chooses what is above the limit;
where SGLang itself retracts requests because memory is full, these are retracted likewise, and
it admits no more than the limit leaves. Only SGLang imports this module.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import attrs
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.runtime_context import get_disagg, get_parallel, get_schedule

from trencadis.kvcache import ceil_div
from trencadis.scheduler.batch_limiter import BatchLimiter, BatchLimits
from trencadis.scheduler.control import BatchControl, BatchControlResult
from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.runtime_settings import OF_SGLANG, checked_settings, reader_and_guard
from trencadis.scheduler.telemetry import TemperatureReader
from trencadis.scheduler.thermal.guard import ThermalGuard

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class RunningRequest:
    """A running request of SGLang as a `Victim`. ``page_size``: tokens of a block."""

    request: Any
    started_at_s: float
    last_scheduled_step: int
    page_size: int
    first_priority_is_low: bool
    num_seqs: int = 1

    @property
    def request_id(self) -> str:
        return str(self.request.rid)

    @property
    def priority(self) -> int:
        """Of SGLang's priorities the high ones come first, unless it was told otherwise."""
        value = int(self.request.priority or 0)
        return value if self.first_priority_is_low else -value

    @property
    def arrival(self) -> int:
        return int(self.request.time_stats.created_time * 1e6)

    @property
    def num_tokens_left(self) -> int:
        request = self.request
        return int(request.sampling_params.max_new_tokens - len(request.output_ids))

    def get_num_kv_blocks(self) -> int:
        num_tokens = len(self.request.origin_input_ids) + len(self.request.output_ids)
        return ceil_div(num_tokens, self.page_size)


class RunningRequests:
    """The running requests of a scheduler as a `BatchHost`.

    ``leaving``: those that were preempted and are still in SGLang's batch, by id.
    """

    def __init__(self, page_size: int, *, first_priority_is_low: bool) -> None:
        self.known: dict[str, RunningRequest] = {}
        self.leaving: set[str] = set()
        self._page_size, self._first_priority_is_low = page_size, first_priority_is_low

    @property
    def running(self) -> Iterable[RunningRequest]:
        return self.known.values()

    def update(self, requests: Iterable[Any], step: int) -> None:
        """Take over what SGLang has started and ended since the last step."""
        now_s, known = time.monotonic(), self.known
        requests = {str(each.rid): each for each in requests}
        self.leaving &= requests.keys()
        self.known = {
            name: known.get(name)
            or RunningRequest(request, now_s, step, self._page_size, self._first_priority_is_low)
            for name, request in requests.items()
            if name not in self.leaving
        }

    def preempt(self, victim: RunningRequest) -> None:
        del self.known[victim.request_id]
        self.leaving.add(victim.request_id)


class ThermalScheduler(Scheduler):  # type: ignore[misc]  # SGLang is not there where mypy runs
    """SGLang's scheduler, limited by temperature, power and orders.

    While a long prompt is computed in chunks, SGLang retracts nothing: the limit holds after its
    last chunk. Beam searches are not counted. Raises `ConfigError` for several ranks, which would
    read other temperatures and decide otherwise, and for prefill and decode apart.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        parallel = get_parallel()
        sizes = {name: getattr(parallel, name, 1) for name in ("tp_size", "pp_size", "dp_size")}
        if set(sizes.values()) != {1} or get_disagg().disaggregation_mode != "null":
            raise ConfigError(
                f"{OF_SGLANG} is set, and SGLang runs with {sizes} and disaggregation_mode "
                f"{get_disagg().disaggregation_mode!r}: use one rank, or unset it"
            )
        try:
            given = json.loads(os.environ[OF_SGLANG])
        except ValueError as error:
            raise ConfigError(f"{OF_SGLANG} is not JSON: {error}") from error
        guard: ThermalGuard | None
        self._reader: TemperatureReader | None
        self._reader, guard = reader_and_guard(checked_settings(OF_SGLANG, given))
        is_low_first = bool(get_schedule().schedule_low_priority_values_first)
        self._requests = RunningRequests(self.page_size, first_priority_is_low=is_low_first)
        self._num_steps = self._num_prefill_tokens = 0
        self._limit: int = self.max_running_requests
        self._largest_chunk: int | None = self.chunked_prefill_size
        self._limiter = BatchLimiter(
            self._requests,
            max_num_seqs=self.max_running_requests,
            max_num_batched_tokens=max(
                self._largest_chunk or self.max_prefill_tokens, self.max_running_requests
            ),
            thermal=guard,
        )
        if self._reader is not None:
            self._reader.start()

    def get_next_batch_to_run(self, running_batch: Any, last_batch: Any) -> Any:
        limits = self.begin_step(running_batch, last_batch)
        if limits.max_num_seqs > self._limit:
            running_batch.batch_is_full = False  # SGLang tries again only once a request has left
        self._limit = limits.max_num_seqs
        plan = super().get_next_batch_to_run(running_batch=running_batch, last_batch=last_batch)
        self.end_step(plan.batch_to_run)
        return plan

    def get_num_allocatable_reqs(self, running_bs: int, *args: Any, **kwargs: Any) -> int:
        most = int(super().get_num_allocatable_reqs(running_bs, *args, **kwargs))
        return min(most, self._limit - running_bs)

    def update_running_batch(self, batch: Any) -> Any:
        self._retract(batch)
        return super().update_running_batch(batch)

    def handle_shutdown(self, recv_req: Any) -> Any:
        if self._reader is not None:
            self._reader.stop()
        return super().handle_shutdown(recv_req)

    def batch_control(self, **fields: Any) -> None:
        """Queue an order with the fields of `BatchControl`; what comes of it is in the log.

        `Engine.collective_rpc("batch_control", max_num_seqs=8)` calls it. Raises `ConfigError`.
        """
        self._limiter.control(BatchControl(**fields)).add_done_callback(_log_answer)

    def begin_step(self, running_batch: Any, last_batch: Any) -> BatchLimits:
        """Choose what is above the limits of the next step, and set them."""
        requests = _running(running_batch.reqs, self.chunked_req)
        is_merged = last_batch is running_batch  # where data parallel ranks wait for each other
        if last_batch is not None and last_batch.forward_mode.is_extend() and not is_merged:
            requests += _running(last_batch.reqs, self.chunked_req)
        self._requests.update(requests, self._num_steps)
        limits = self._limiter.begin_step(
            num_prefill_tokens=self._num_prefill_tokens, longest_wait_s=self._longest_wait_s()
        )
        if self._largest_chunk is not None:
            size = self.page_size
            most = max(size, limits.max_prefill_tokens // size * size)
            self.chunked_prefill_size: int | None = min(self._largest_chunk, most)
        return limits

    def end_step(self, batch: Any) -> None:
        """Note what a step computes."""
        self._num_steps += 1
        self._num_prefill_tokens = 0
        if batch is None:
            return
        if batch.forward_mode.is_extend():
            num_decodes = len(getattr(batch, "decoding_reqs", None) or ())
            self._num_prefill_tokens = max(0, int(batch.extend_num_tokens or 0) - num_decodes)
        for request in batch.reqs:
            known = self._requests.known.get(str(request.rid))
            if known is not None:
                known.last_scheduled_step = self._num_steps

    def _retract(self, batch: Any) -> None:
        """Retract what leaves, as SGLang does where its memory is full.

        What finishes with the step in flight stays, as there.
        """
        leaving = self._requests.leaving
        if not leaving:
            return
        finishing = self._reqs_finishing_inflight(batch)
        found = [
            (index, request)
            for index, request in enumerate(batch.reqs)
            if str(request.rid) in leaving and not request.finished() and request not in finishing
        ]
        leaving.clear()
        if not found:
            return
        if self.decode_offload_manager is not None:
            self.decode_offload_manager.drain_before_retraction()
        indices = {index for index, _ in found}
        kept = [index for index in range(len(batch.reqs)) if index not in indices]
        for index, _ in found:
            batch.release_req(index, len(kept))
        batch.filter_batch(keep_indices=kept)
        batch.batch_is_full = False
        for _, request in found:
            self._add_request_to_queue(request, is_retracted=True)

    def _longest_wait_s(self) -> float:
        """Seconds since the oldest request arrived that has no token yet; 0 without such a one.

        Of those that run, and the first one that waits.
        """
        waiting = next((each for each in self.waiting_queue if not len(each.output_ids)), None)
        found = [each.request for each in self._requests.running]
        found = [each for each in found if not len(each.output_ids)]
        found += [] if waiting is None else [waiting]
        arrivals = [each.time_stats.created_time for each in found if each.time_stats.created_time]
        return max(0.0, time.perf_counter() - min(arrivals)) if arrivals else 0.0


def _running(requests: Sequence[Any], chunked: Any) -> list[Any]:
    """Those that go on, without the one whose prompt is computed in chunks."""
    return [
        each
        for each in requests
        if each is not chunked and each.beam_group is None and not each.finished()
    ]


def _log_answer(answer: Future[BatchControlResult]) -> None:
    error = answer.exception()
    if error is None:
        logger.info("Order carried out: %s", answer.result())
    else:
        logger.warning("Order rejected: %s", error)
