"""Control requests of an administrator: queued from any thread, applied at the top of a step.

Their fields and those of the answer are the fields of ``/v1/admin/batch`` in seed 003, section 4.
They count sequences, not requests, as ``max_num_seqs`` does.
"""

from __future__ import annotations

import math
import reprlib
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from itertools import islice
from typing import Generic

import attrs

from trencadis.scheduler.config import SchedulerConfig, SettingsInForce
from trencadis.scheduler.errors import ControlError, InvalidValue
from trencadis.scheduler.running_limit import BatchHost, RunningLimit
from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.thermal.policy import SchedulerView
from trencadis.scheduler.thermal.power_model import PRIOR_W
from trencadis.scheduler.thermal.proportional import MAX_TARGET_C
from trencadis.scheduler.thermal.victims import VICTIM_ORDERS, VictimT
from trencadis.scheduler.validators import boolean, instance_of, integer, number, one_of, setting

_INT64_MAX = 2**63 - 1
"""The largest integer that the engine's messages can carry."""

MAX_REQUEST_IDS = 1 << 20
"""Most ids in a call of ``abort_and_swap``: an iterator without end must not stop its caller."""

MAX_HOLD_S = 86_400.0
"""Longest hold of a control request, seconds: a day. A lower limit for longer is max_num_seqs."""


@attrs.frozen(kw_only=True)
class BatchControl:
    """A control request. All its fields take effect together, at the top of one step.

    The metadata of each field has its ``help`` text. Raises `ConfigError`.
    """

    max_num_seqs: int | None = setting(
        None,
        integer(1, _INT64_MAX, optional=True),
        "New maximum number of sequences that run at once; null: unchanged.",
    )
    max_prefill_tokens: int | None = setting(
        None,
        integer(1, _INT64_MAX, optional=True),
        "New maximum of tokens in the prefill chunks of a step; that of all tokens of "
        "a step, or more, ends the limit; null: unchanged.",
    )
    force_evict: int | None = setting(
        None,
        integer(0, _INT64_MAX, optional=True),
        "Number of running sequences to preempt now. The number that is left stays the "
        "running limit for hold_s seconds, or until a request with max_num_seqs alone.",
    )
    hold_s: float | None = setting(
        None,
        number(0, MAX_HOLD_S, optional=True),
        "Seconds for which force_evict holds the running limit; null: "
        "SchedulerConfig.force_evict_hold_s, 5 seconds.",
    )
    target_temp_c: float | None = setting(
        None,
        number(0, MAX_TARGET_C, exclusive_low=True, optional=True),
        "New target of the thermal policy, degrees C; null: unchanged. Without a policy, or "
        "beside one whose target cannot be set, it starts a control loop, which ends once the "
        "devices stay below the target.",
    )
    policy: str = setting(
        "lru",
        one_of(VICTIM_ORDERS),
        "Order in which running groups are chosen as victims; with target_temp_c also "
        "of those that the thermal policy preempts later.",
    )
    forget_device: int | None = setting(
        None,
        integer(0, _INT64_MAX, optional=True),
        "Index of a device that no longer answers and is no longer to count as hot; it counts "
        "again once it answers.",
    )
    dry_run: bool = setting(
        False, boolean(), "Answer what the request would do, and change nothing."
    )


@attrs.frozen(kw_only=True)
class BatchControlResult:
    """What a control request did, or what it would do under ``dry_run``.

    ``previous_running`` and ``new_running`` count sequences: those that ran before the request, and
    those that run when the step is scheduled. ``estimated_watts_saved`` is in watts.
    ``new_max_prefill_tokens``: the prefill limit in force, without that of a thermal policy.
    """

    previous_running: int
    new_running: int
    evicted_request_ids: tuple[str, ...]
    estimated_watts_saved: float
    new_max_num_seqs: int
    new_max_prefill_tokens: int


@attrs.frozen
class _ChangedView:
    """The scheduler as a policy sees it under the settings of a control request."""

    scheduler_config: SchedulerConfig
    num_running_seqs: int
    num_prefill_tokens: int
    longest_wait_s: float
    now_s: float


class ControlHandler(Generic[VictimT]):
    """Queues requests until the next step, then changes the running limit and preempts victims.

    It also queues requests to preempt, of `Scheduler.abort_and_swap`. ``num_slots``: the most
    sequences that the host can run; None where it has no such limit.
    """

    def __init__(
        self,
        settings: SettingsInForce,
        host: BatchHost[VictimT],
        limit: RunningLimit[VictimT],
        thermal: ThermalGuard | None,
        num_slots: int | None = None,
    ) -> None:
        self._settings = settings
        self._host = host
        self._limit = limit
        self._thermal = thermal
        self._num_slots = num_slots
        self._pending: deque[tuple[BatchControl, Future[BatchControlResult]]] = deque()
        self._to_preempt: list[str] = []
        self._was_carried_out = False
        """Whether the last step carried out a control request."""

    @property
    def has_control_requests(self) -> bool:
        return bool(self._pending)

    @property
    def has_orders(self) -> bool:
        """Whether the next step preempts requests or carries out a control request."""
        return bool(self._pending or self._to_preempt)

    def put(self, control: BatchControl) -> Future[BatchControlResult]:
        """Queue a control request. Thread-safe; see `Scheduler.control`."""
        instance_of(BatchControl, error=ControlError).checked("control", control)
        future: Future[BatchControlResult] = Future()
        self._pending.append((control, future))
        return future

    def request_preemption(self, request_ids: Iterable[str]) -> tuple[str, ...]:
        """Preempt those of the requests that run in the next step; returns their ids."""
        unique_ids = _unique_ids(request_ids)
        if unique_ids is None:
            raise ControlError(
                f"abort_and_swap() needs request ids, got {reprlib.repr(request_ids)}: pass a list "
                f"of them, of at most {MAX_REQUEST_IDS}"
            )
        known = self._running()
        running = [request_id for request_id in unique_ids if request_id in known]
        self._to_preempt.extend(running)
        return tuple(running)

    def apply(self, now: float, view: SchedulerView) -> bool:
        """Preempt the requested ones, then apply each control request and answer it.

        Returns whether it has carried out a control request. Such a step starts nothing, so the
        next one carries out none: requests start however many orders arrive. Skips control requests
        that were cancelled. The others can no longer be cancelled.
        """
        if self._to_preempt:
            known, requested = self._running(), dict.fromkeys(self._to_preempt)
            self._to_preempt.clear()
            self._force_evict([known[name] for name in requested if name in known], now)
        must_wait, self._was_carried_out = self._was_carried_out, False
        while self._pending and not must_wait:
            control, future = self._pending.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = self._apply(control, now, view)
            except Exception as error:
                future.set_exception(error)
                if not isinstance(error, InvalidValue):
                    raise  # a fault of the host; the caller of the order must not wait for it
            else:
                future.set_result(result)
        return self._was_carried_out

    def _apply(self, control: BatchControl, now: float, view: SchedulerView) -> BatchControlResult:
        """Decide, then change the limits and preempt. Raises `ControlError` before any change."""
        config = self._config_under(control)
        max_num_seqs = config.max_num_seqs
        self._forget(control, dry_run=True)
        policy_limit = self._policy_limit(control, config, view)
        num_to_evict = control.force_evict or 0
        ends_hold = control.max_num_seqs is not None and not num_to_evict
        victims = self._limit.victims(
            control.policy,
            num_to_evict,
            max_num_seqs,
            policy_limit,
            math.inf if ends_hold else now,
        )
        previous_running = self._limit.num_running_seqs
        num_preempted = sum(group.num_seqs for group in victims)
        if not control.dry_run:
            self._was_carried_out = True
            self._forget(control)
            self._settings.config = config
            self._limit.policy_limit = policy_limit
            if ends_hold:
                self._limit.end_hold()
            if num_to_evict:
                self._force_evict(victims, now, control.hold_s)
            else:
                self._preempt(victims)
        thermal = self._thermal
        sequence_w = PRIOR_W if thermal is None else thermal.power_model.per_sequence_w
        return BatchControlResult(
            previous_running=previous_running,
            new_running=previous_running - num_preempted,
            evicted_request_ids=tuple(group.request_id for group in victims),
            estimated_watts_saved=num_preempted * sequence_w,
            new_max_num_seqs=max_num_seqs,
            new_max_prefill_tokens=config.max_prefill_tokens or config.max_num_batched_tokens,
        )

    def _config_under(self, control: BatchControl) -> SchedulerConfig:
        """The settings in force after a control request. Raises `ControlError`."""
        if control.hold_s is not None and not control.force_evict:
            raise ControlError(
                f"hold_s {control.hold_s:g} is for how long force_evict holds, and this order has "
                "none: give force_evict, or leave hold_s out",
                "hold_s",
            )
        config = self._settings.config
        max_prefill_tokens = control.max_prefill_tokens or config.max_prefill_tokens
        if max_prefill_tokens is not None and max_prefill_tokens >= config.max_num_batched_tokens:
            max_prefill_tokens = None
        max_num_seqs = config.max_num_seqs if control.max_num_seqs is None else control.max_num_seqs
        if max_num_seqs > config.max_num_batched_tokens:
            raise ControlError(
                f"max_num_seqs {max_num_seqs} is above max_num_batched_tokens "
                f"{config.max_num_batched_tokens}, so a full decode batch does not fit in a step: "
                "lower the first",
                "max_num_seqs",
            )
        if self._num_slots is not None and max_num_seqs > self._num_slots:
            raise ControlError(
                f"max_num_seqs {max_num_seqs} is above the {self._num_slots} sequences that the "
                "host can run: lower it",
                "max_num_seqs",
            )
        return attrs.evolve(
            config, max_num_seqs=max_num_seqs, max_prefill_tokens=max_prefill_tokens
        )

    def _policy_limit(
        self, control: BatchControl, config: SchedulerConfig, view: SchedulerView
    ) -> int | None:
        """Set the target temperature, unless in a dry run; the policy's limit under it."""
        if control.target_temp_c is None:
            return self._limit.policy_limit
        if self._thermal is None:
            raise ControlError(
                f"target_temp_c {control.target_temp_c} needs temperatures and none are read: "
                "start with a temperature source, or set max_num_seqs",
                "target_temp_c",
            )
        changed = _ChangedView(
            config,
            view.num_running_seqs,
            view.num_prefill_tokens,
            view.longest_wait_s,
            view.now_s,
        )
        return self._thermal.retarget(
            control.target_temp_c, control.policy, changed, dry_run=control.dry_run
        )

    def _forget(self, control: BatchControl, *, dry_run: bool = False) -> None:
        if control.forget_device is None:
            return
        if self._thermal is None:
            raise ControlError(
                f"forget_device {control.forget_device} needs temperatures and none are read: "
                "leave it out",
                "forget_device",
            )
        self._thermal.forget(control.forget_device, dry_run=dry_run)

    def _running(self) -> dict[str, VictimT]:
        return {victim.request_id: victim for victim in self._host.running}

    def _preempt(self, victims: list[VictimT]) -> None:
        for victim in victims:
            self._host.preempt(victim)

    def _force_evict(self, victims: list[VictimT], now: float, hold_s: float | None = None) -> None:
        """Preempt, and hold the running limit at the number of sequences that are left."""
        self._preempt(victims)
        if victims:
            self._limit.hold(now, hold_s)


def _unique_ids(request_ids: Iterable[str]) -> dict[str, None] | None:
    """The ids in order, each once; None for a text, for too many, for what cannot be iterated."""
    if isinstance(request_ids, str):  # whose characters are not ids
        return None
    try:
        ids = tuple(islice(request_ids, MAX_REQUEST_IDS + 1))
        return dict.fromkeys(ids) if len(ids) <= MAX_REQUEST_IDS else None
    except TypeError:
        return None
