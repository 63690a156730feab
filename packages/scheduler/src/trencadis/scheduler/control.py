"""Orders from an operator: put in from any thread, carried out at the top of a step, answered.

The fields and the answer are those of seed 003's ``/v1/admin/batch``, section 4. Sequences are
counted, not requests, as everywhere in the scheduler's budget.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Any

import attrs

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.thermal.proportional import MAX_TARGET_C
from trencadis.scheduler.thermal.victims import VICTIM_ORDERS


@attrs.frozen(kw_only=True)
class BatchControl:
    """One order; all its parts take effect together, at the top of one step.

    ``max_num_seqs``: new bound on running sequences, from now on. ``force_evict``: take this many
    running sequences out now; without a lower ``max_num_seqs`` the batch keeps the size that this
    leaves for ``SchedulerConfig.evict_hold_s`` seconds, so that they do not bounce straight back.
    ``target_temp_c``: target of the thermal policy, at most 95 degrees C. ``policy``: who goes
    first, one of ``lru``, ``largest_kv``, ``lowest_priority``, ``cheapest``. ``dry_run``: answer
    what would happen, and change nothing. Raises `ConfigError`.
    """

    max_num_seqs: int | None = attrs.field(default=None)
    force_evict: int | None = attrs.field(default=None)
    target_temp_c: float | None = attrs.field(default=None)
    policy: str = attrs.field(default="lru")
    dry_run: bool = False

    @max_num_seqs.validator
    def _positive(self, _: object, value: Any) -> None:
        if value is not None and (not _is_int(value) or value < 1):
            raise ConfigError(f"max_num_seqs must be a positive integer, got {value!r}")

    @force_evict.validator
    def _not_negative(self, _: object, value: Any) -> None:
        if value is not None and (not _is_int(value) or value < 0):
            raise ConfigError(f"force_evict must be an integer of 0 or more, got {value!r}")

    @target_temp_c.validator
    def _within_limits(self, _: object, value: Any) -> None:
        if value is not None and not 0 < value <= MAX_TARGET_C:
            raise ConfigError(
                f"target_temp_c must be above 0 and at most {MAX_TARGET_C} degrees C, got {value!r}"
            )

    @policy.validator
    def _known(self, _: object, value: Any) -> None:
        if value not in VICTIM_ORDERS:
            raise ConfigError(f"policy must be one of {', '.join(VICTIM_ORDERS)}, got {value!r}")


@attrs.frozen(kw_only=True)
class BatchControlResult:
    """What an order did, or under ``dry_run`` would have done. ``new_max_num_seqs`` is in force."""

    previous_running: int
    new_running: int
    evicted_request_ids: tuple[str, ...]
    estimated_watts_saved: float
    new_max_num_seqs: int


class ControlQueue:
    """Orders that have not been carried out yet. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._orders: deque[tuple[BatchControl, Future[BatchControlResult]]] = deque()

    def __len__(self) -> int:
        return len(self._orders)

    def put(self, order: BatchControl) -> Future[BatchControlResult]:
        """Queue an order; the future has its answer after the next step was scheduled."""
        future: Future[BatchControlResult] = Future()
        self._orders.append((order, future))
        return future

    def take(self) -> tuple[BatchControl, Future[BatchControlResult]] | None:
        """The next order that nobody has cancelled, now past cancelling; None when there is none.

        Whoever takes it resolves its future.
        """
        while self._orders:
            order, future = self._orders.popleft()
            if future.set_running_or_notify_cancel():
                return order, future
        return None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
