"""Control requests of an operator: queued from any thread, applied at the top of a step.

The fields and the answer are those of ``/v1/admin/batch`` in seed 003, section 4. They count
sequences, not requests, as ``max_num_seqs`` does.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future

import attrs

from trencadis.scheduler.thermal.proportional import MAX_TARGET_C
from trencadis.scheduler.thermal.victims import VICTIM_ORDERS
from trencadis.scheduler.validators import integer, number, one_of


@attrs.frozen(kw_only=True)
class BatchControl:
    """A control request. All its fields take effect together, at the top of one step.

    The metadata of each field has its ``help`` text. Raises `ConfigError`.
    """

    max_num_seqs: int | None = attrs.field(
        default=None,
        validator=integer(1, optional=True),
        metadata={"help": "New maximum number of sequences that run at once; null: unchanged."},
    )
    force_evict: int | None = attrs.field(
        default=None,
        validator=integer(0, optional=True),
        metadata={
            "help": "Number of running sequences to preempt now. Without max_num_seqs, the number "
            "that is left stays the running limit for SchedulerConfig.force_evict_hold_s seconds."
        },
    )
    target_temp_c: float | None = attrs.field(
        default=None,
        validator=number(0, MAX_TARGET_C, exclusive_low=True, optional=True),
        metadata={"help": "New target of the thermal policy, degrees C; null: unchanged."},
    )
    policy: str = attrs.field(
        default="lru",
        validator=one_of(*VICTIM_ORDERS),
        metadata={"help": "Order in which running groups are chosen as victims."},
    )
    dry_run: bool = attrs.field(
        default=False,
        metadata={"help": "Answer what the request would do, and change nothing."},
    )


@attrs.frozen(kw_only=True)
class BatchControlResult:
    """What a control request did, or what it would do under ``dry_run``.

    ``previous_running`` and ``new_running`` count sequences. ``estimated_watts_saved`` is in watts.
    """

    previous_running: int
    new_running: int
    evicted_request_ids: tuple[str, ...]
    estimated_watts_saved: float
    new_max_num_seqs: int


class ControlQueue:
    """Control requests that have not been applied yet. Thread-safe."""

    def __init__(self) -> None:
        self._pending: deque[tuple[BatchControl, Future[BatchControlResult]]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, control: BatchControl) -> Future[BatchControlResult]:
        """Queue a control request. The future resolves in the next ``schedule()``."""
        future: Future[BatchControlResult] = Future()
        self._pending.append((control, future))
        return future

    def pop(self) -> tuple[BatchControl, Future[BatchControlResult]] | None:
        """The next control request that was not cancelled, None if the queue is empty.

        The request can no longer be cancelled; the caller resolves its future.
        """
        while self._pending:
            control, future = self._pending.popleft()
            if future.set_running_or_notify_cancel():
                return control, future
        return None
