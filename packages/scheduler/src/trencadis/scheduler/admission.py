"""Admission control: refuses unservable requests, resumes groups and admits waiting ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.errors import DuplicateRequest, QueueFull, UnservableRequest
from trencadis.scheduler.group import SequenceGroup, SequenceStatus
from trencadis.scheduler.group_blocks import GroupBlocks
from trencadis.scheduler.group_states import GroupQueue, GroupStates
from trencadis.scheduler.output import FailedRequest, SchedulingStep
from trencadis.scheduler.request import Request

logger = logging.getLogger(__name__)


class AdmissionControl:
    """Checks requests; starts groups while running limit, token budget and free blocks allow it.

    A queue starts in its order; a group that cannot start now may be bypassed by later groups. The
    oldest group of a queue is bypassed when a later group starts, and any group when it is
    preempted because blocks ran out while a later group keeps its blocks. After ``max_bypasses``
    bypasses a group is overdue: no later group starts before it, and none makes it lose its blocks
    (`QueueKey`).

    So while a group waits that has k unfinished older ones, at most ``(k + 1) * max_bypasses`` of
    the later groups start, whatever their priority, and then it runs to its end. Only a lower
    running limit, or an order to preempt it, stops it.

    A group with more sequences than a thermal limit allows runs alone: it starts, in its order or
    when it is overdue, once nothing else runs. One with more than ``max_num_seqs``, or than a
    forced eviction has left, waits until that limit rises.
    """

    def __init__(
        self, config: SchedulerConfig, states: GroupStates, group_blocks: GroupBlocks
    ) -> None:
        self._config = config
        self._states = states
        self._group_blocks = group_blocks
        self._pending_prefixes = PendingPrefixes(group_blocks)
        self._num_free_at_refusal: dict[int, int] = {}

    def check(self, request: Request) -> None:
        """Raises `DuplicateRequest`, `QueueFull` or `UnservableRequest`."""
        if not isinstance(request, Request):
            raise UnservableRequest(f"add() needs a Request, got {request!r}")
        if request.request_id in self._states.groups:
            raise DuplicateRequest(f"request id {request.request_id!r} is already in the scheduler")
        num_waiting = len(self._states.waiting)
        if num_waiting >= self._config.max_waiting:
            raise QueueFull(
                f"the waiting queue has {num_waiting} requests and max_waiting is "
                f"{self._config.max_waiting}: try again later"
            )
        self._check_size(request)

    def start_swapped_in(self, step: SchedulingStep) -> None:
        """Start the groups whose swap-in has completed."""
        for group in tuple(self._states.swapping_in):
            if self._group_blocks.is_resident(group):
                self._states.start(group, step.now)

    def start_groups(self, step: SchedulingStep) -> None:
        """Resume swapped and preempted groups, then admit waiting ones.

        A waiting group is not admitted while a group of its or a higher priority waits to resume,
        and none is resumed before a waiting group that is older and overdue. A step that carries
        out a control request starts none.
        """
        self._pending_prefixes.discard_computed()
        if step.carries_out_order:
            return
        states = self._states
        if states.resume_queue:
            self._start_groups(states.resume_queue, step, self._can_resume, self._resume)
        if states.waiting:
            self._start_groups(states.waiting, step, self._can_admit, self._admit)

    def next_group(self, queue: GroupQueue, step: SchedulingStep) -> SequenceGroup | None:
        """The group of a queue that starts next."""
        return next(iter(self._next_groups(queue, step, 1)), None)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group in any state and free its blocks."""
        self._group_blocks.free(group)
        self._states.abort(group)
        self._num_free_at_refusal.pop(group.arrival, None)

    def fail(self, group: SequenceGroup, error: Exception, step: SchedulingStep) -> None:
        """Remove a group that an internal error concerns, so that all others are served."""
        logger.error("Request %r is aborted: internal error", group.request_id, exc_info=error)
        step.discard(group)
        self.remove(group)
        step.failed.append(FailedRequest(group.request_id, error))

    def _check_size(self, request: Request) -> None:
        """Raises `UnservableRequest` for one that could not run to its end even alone."""
        length, config = request.num_prompt_tokens, self._config
        if length == 0:
            raise UnservableRequest("the prompt is empty: give at least one token")
        if length >= config.max_model_len:
            raise UnservableRequest(
                f"the prompt has {length} tokens, max_model_len is {config.max_model_len} "
                "and the output needs at least one: shorten the prompt or raise max_model_len"
            )
        if request.num_seqs > config.max_num_seqs:
            raise UnservableRequest(
                f"the request runs {request.num_seqs} sequences at once, max_num_seqs is "
                f"{config.max_num_seqs}: lower n, best_of or the beam width"
            )
        num_needed = self._group_blocks.max_num_blocks(request, config.max_model_len)
        num_total = self._group_blocks.pool.num_usable_blocks
        if num_needed > num_total:
            raise UnservableRequest(
                f"{length} prompt tokens and {request.num_seqs} × {request.max_tokens} more could "
                f"need {num_needed} blocks, which do not fit in the KV cache of {num_total}: "
                "shorten the prompt, lower max_tokens, n or the beam width, or add blocks"
            )

    def _start_groups(
        self,
        queue: GroupQueue,
        step: SchedulingStep,
        can_start: Callable[[SequenceGroup, SchedulingStep], bool],
        start: Callable[[SequenceGroup, SchedulingStep], None],
    ) -> None:
        while queue and step.token_budget > 0 and (num_free := self._num_free_seqs(step)) > 0:
            candidates = self._next_groups(queue, step, self._config.lookahead)
            group = self._start_first(candidates, num_free, step, can_start, start)
            if group is None:
                return
            self._num_free_at_refusal.pop(group.arrival, None)
            step.max_running_seqs = max(step.max_running_seqs, group.num_seqs)
            self._count_bypasses(group, step)

    def _start_first(
        self,
        candidates: Iterable[SequenceGroup],
        num_free_seqs: int,
        step: SchedulingStep,
        can_start: Callable[[SequenceGroup, SchedulingStep], bool],
        start: Callable[[SequenceGroup, SchedulingStep], None],
    ) -> SequenceGroup | None:
        """Start the first candidate that can start; returns it. Fails candidates that raise."""
        for candidate in candidates:
            if candidate.num_seqs > num_free_seqs:
                continue
            try:
                if not can_start(candidate, step):
                    continue
                start(candidate, step)
            except Exception as error:
                self.fail(candidate, error, step)
                continue
            return candidate
        return None

    def _next_groups(
        self, queue: GroupQueue, step: SchedulingStep, count: int
    ) -> list[SequenceGroup]:
        first = queue.first(1, step.max_group_seqs)
        if first and self._states.is_overdue(first[0]):
            return first
        return queue.first(count, self._max_group_seqs(step))

    def _num_free_seqs(self, step: SchedulingStep) -> int:
        return self._max_group_seqs(step) - self._states.num_started_seqs

    def _max_group_seqs(self, step: SchedulingStep) -> int:
        """The most sequences of a group that may start now: above a thermal limit only alone."""
        return step.max_running_seqs if self._states.num_started_seqs else step.max_group_seqs

    def _count_bypasses(self, started: SequenceGroup, step: SchedulingStep) -> None:
        for queue in (self._states.resume_queue, self._states.waiting):
            oldest = queue.oldest(step.max_group_seqs)
            if oldest is not None and oldest.arrival < started.arrival:
                self._states.count_bypass(oldest)

    def _can_resume(self, group: SequenceGroup, step: SchedulingStep) -> bool:
        waiting = self.next_group(self._states.waiting, step)
        if waiting is not None and not self._resumes_first(group, waiting):
            return False
        if not step.prefill_budget and _needs_prefill(group):
            return False
        num_spare = self._num_spare_blocks(group)
        if group.status is SequenceStatus.SWAPPED:
            return self._group_blocks.can_swap_in(group, num_spare)
        return self._can_allocate(group, num_spare)

    def _num_spare_blocks(self, group: SequenceGroup) -> int:
        """Blocks that must be left when a group resumes: for the slots that it lacks, and one for
        each sequence that then runs.

        So blocks cannot run out again before a sequence has filled one, unless other groups start:
        a return that costs copies or recomputation gives more than a token. A group that would run
        alone needs no spare blocks.
        """
        states = self._states
        num_others = states.num_running_seqs + states.num_swapping_in_seqs
        if not num_others:
            return 0
        return num_others + group.num_seqs + self._group_blocks.max_blocks_to_append(group)

    def _resume(self, group: SequenceGroup, step: SchedulingStep) -> None:
        if group.status is SequenceStatus.PREEMPTED:
            self._start(group, step)
            return
        self._group_blocks.swap_in(group, step.now)
        self._states.begin_swap_in(group)
        if self._group_blocks.is_resident(group):
            self._group_blocks.append_slots_if_free(group)
            self._states.start(group, step.now)
            step.schedule([group])

    def _can_admit(self, group: SequenceGroup, step: SchedulingStep) -> bool:
        if not step.prefill_budget and group.request.num_prompt_tokens > 1:
            return False
        resumed = self.next_group(self._states.resume_queue, step)
        if resumed is not None and self._resumes_first(resumed, group):
            return False
        if self._pending_prefixes.has_next_block(group) and not self._states.is_overdue(group):
            return False
        return self._can_allocate(group)

    def _resumes_first(self, resumed: SequenceGroup, waiting: SequenceGroup) -> bool:
        """Whether a preempted group precedes a waiting one."""
        if self._states.is_overdue(waiting):
            return resumed.queue_key < waiting.queue_key
        return resumed.queue_key.priority <= waiting.queue_key.priority

    def _admit(self, group: SequenceGroup, step: SchedulingStep) -> None:
        self._start(group, step)
        self._pending_prefixes.add(group)

    def _start(self, group: SequenceGroup, step: SchedulingStep) -> None:
        self._group_blocks.allocate(group)
        self._states.start(group, step.now)
        step.schedule([group])

    def _can_allocate(self, group: SequenceGroup, num_spare: int = 0) -> bool:
        """Whether there are blocks for a group. A refused group needs more free blocks to retry."""
        num_free = self._group_blocks.pool.num_free_blocks - num_spare
        if num_free <= self._num_free_at_refusal.get(group.arrival, -1):
            return False
        if self._group_blocks.can_allocate(group, num_spare):
            return True
        self._num_free_at_refusal[group.arrival] = num_free
        return False


def _needs_prefill(group: SequenceGroup) -> bool:
    """Whether a preempted group computes a prefill chunk when it resumes."""
    if group.status is SequenceStatus.PREEMPTED:
        return True
    return any(
        sequence.num_slots - sequence.num_computed_tokens > 1 for sequence in group.allocated_seqs
    )


class PendingPrefixes:
    """Remembers which prompt blocks are being computed, by digest.

    A group that waits for such a block gets it from the prefix cache instead of computing it.
    """

    def __init__(self, group_blocks: GroupBlocks) -> None:
        self._group_blocks = group_blocks
        self._digests: dict[SequenceGroup, frozenset[bytes]] = {}

    def add(self, group: SequenceGroup) -> None:
        """Add the blocks that a group, which has just been admitted, will compute."""
        if group.prefix_keys is None:
            return
        num_computed = group.allocated_seqs[0].num_computed_tokens // group.block_size
        digests = frozenset(key.digest for key in group.prefix_keys.blocks[num_computed:])
        if digests:
            self._digests[group] = digests

    def has_next_block(self, group: SequenceGroup) -> bool:
        """Whether the first block that ``group`` lacks in the prefix cache is being computed."""
        if not self._digests:
            return False
        digest = self._group_blocks.next_uncached_digest(group)
        return digest is not None and any(digest in pending for pending in self._digests.values())

    def discard_computed(self) -> None:
        """Remove groups that have computed their prompt or do not run any more."""
        for group in tuple(self._digests):
            if group.status is not SequenceStatus.RUNNING or (
                group.allocated_seqs[0].num_computed_tokens >= group.request.num_prompt_tokens
            ):
                del self._digests[group]
