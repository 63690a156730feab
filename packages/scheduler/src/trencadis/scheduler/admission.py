"""Admission control: rejects unservable requests, resumes groups and admits waiting ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from trencadis.kvcache import Direction
from trencadis.scheduler.config import SettingsInForce
from trencadis.scheduler.errors import DuplicateRequest, QueueFull, UnservableRequest
from trencadis.scheduler.fair_share import RESERVE, Client
from trencadis.scheduler.group import SequenceGroup, SequenceStatus
from trencadis.scheduler.group_blocks import GroupBlocks
from trencadis.scheduler.group_states import GroupQueue, GroupStates
from trencadis.scheduler.output import FailedRequest, SchedulingStep
from trencadis.scheduler.preemption_costs import PreemptionCosts
from trencadis.scheduler.request import Request

if TYPE_CHECKING:
    from trencadis.kvcache import TierTransfers

logger = logging.getLogger(__name__)

_NO_ADAPTER = ""
"""That of a request that runs with the model's own weights."""


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

    A group that starts because its client got less service bypasses none of another client: these
    clients come first as soon as its own was charged for it. But the first group of a client does
    bypass the oldest group of the queue if the client came after that group, and after the last
    start of its client. So before a group that waits behind k older ones, and whose client starts
    none meanwhile, at most ``(k + 1) * max_bypasses`` of the clients that come after it are served,
    however many names there are. Where the first group of the queue cannot start and that of
    another client does, the first is bypassed, too. While there are several clients, the last
    eighth of the running limit is for those that run less than their part of it, so that their
    requests need not wait for those of others to end. An overdue group may have it, too, and one
    whose priority precedes that of the last running group.

    A group with more sequences than a thermal limit allows runs alone: it starts, in its order or
    when it is overdue, once nothing else runs. One with more than ``max_num_seqs``, or than a
    forced eviction has left, waits until that limit rises.

    Groups whose adapters would be more than ``max_adapters`` wait, however many they are, and count
    as bypassed like any other. Once one is overdue no group is admitted that has an
    adapter, until the groups of one of those in use have ended, so its wait ends, too.
    """

    def __init__(
        self,
        settings: SettingsInForce,
        states: GroupStates,
        group_blocks: GroupBlocks,
        costs: PreemptionCosts,
        tiers: TierTransfers | None = None,
    ) -> None:
        self._settings = settings
        self._first_max_num_seqs = settings.config.max_num_seqs
        self._states = states
        self._group_blocks = group_blocks
        self._pending_prefixes = PendingPrefixes(group_blocks)
        self._costs = costs
        self._tiers = tiers
        self._num_free_at_refusal: dict[int, int] = {}

    def check(self, request: Request, *, is_resumed: bool) -> None:
        """Raises `DuplicateRequest`, `QueueFull` or `UnservableRequest`."""
        if not isinstance(request, Request):
            raise UnservableRequest(f"add() needs a Request, got {request!r}")
        if request.request_id in self._states.groups:
            raise DuplicateRequest(f"request id {request.request_id!r} is already in the scheduler")
        if not is_resumed:
            self.check_queue(request.client)
        self._check_size(request)

    def check_queue(self, client: str, others: Sequence[str] = ()) -> None:
        """Raises `QueueFull` where ``client`` may have no request wait, beside ``others``."""
        num_waiting = len(self._states.waiting) + len(others)
        limit = self._settings.config.max_waiting
        if num_waiting >= limit and not self._states.shares.may_wait(client, limit, others):
            raise QueueFull(
                f"{num_waiting} requests are waiting and max_waiting is {limit}: try again later"
            )

    def start_swapped_in(self, step: SchedulingStep) -> None:
        """Start the groups whose swap-in has completed."""
        for group in tuple(self._states.swapping_in):
            if self._group_blocks.is_resident(group):
                self._states.start(group, step.now)

    def start_groups(self, step: SchedulingStep) -> None:
        """Resume swapped and preempted groups, then admit waiting ones.

        A waiting group is not admitted while a group of a higher priority waits to resume, or one
        of its priority whose client got no more service; and none is resumed before a waiting group
        that is older and overdue. A step that carries out a control request starts none.
        """
        if self._pending_prefixes.digests:
            self._pending_prefixes.discard_computed()
        if step.carries_out_order:
            return
        states = self._states
        if states.resume_queue:
            self._start_groups(states.resume_queue, step, self._can_resume, self._resume)
        if states.waiting:
            self._start_groups(states.waiting, step, self._can_admit, self._admit)

    def clients_at_share(self, step: SchedulingStep) -> set[Client]:
        """The clients that run their part of the running limit or more, while there are several."""
        share, started = self._share_and_started(step)
        return {client for client, num_seqs in started.items() if sum(num_seqs) >= share}

    def clients_above_share(self, step: SchedulingStep) -> set[Client]:
        """The clients that run several groups and more than their part, while there are several.

        A client with a single group is none of them, however many clients share the limit: else
        its prompt would wait for those of all others.
        """
        share, started = self._share_and_started(step)
        return {
            client
            for client, num_seqs in started.items()
            if len(num_seqs) > 1 and sum(num_seqs) > share
        }

    def start_ahead(
        self, step: SchedulingStep, above_share: Collection[Client], priority: float
    ) -> None:
        """Admit the waiting groups that precede prefill chunks of the clients ``above_share``.

        As long as the first group of the queue is of another client and not below ``priority``:
        the order in which groups are admitted does not change.
        """
        states = self._states
        if step.carries_out_order or not states.waiting:
            return
        self._pending_prefixes.discard_computed()
        self._start_groups(
            states.waiting,
            step,
            self._can_admit,
            self._admit,
            lambda group: group.client not in above_share and group.queue_key.priority <= priority,
        )

    def has_urgent_group(self) -> bool:
        """Whether a waiting group of a higher priority could preempt the last running one."""
        states, limit = self._states, self._settings.config.max_num_seqs
        adapters = self._usable_adapters(limit)
        first = states.waiting.first(1, limit, adapters=adapters) if states.running else ()
        return any(group.priority < states.running.last().queue_key.priority for group in first)

    def next_group(self, queue: GroupQueue, step: SchedulingStep) -> SequenceGroup | None:
        """The group of a queue that starts next."""
        return next(iter(self._next_groups(queue, step, 1)), None)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group in any state and free its blocks."""
        self._group_blocks.free(group)
        self._states.abort(group)
        if self._tiers is not None:
            self._tiers.forget(group.request_id)
        self._num_free_at_refusal.pop(group.arrival, None)

    def fail(self, group: SequenceGroup, error: Exception, step: SchedulingStep) -> None:
        """Remove a group that an internal error concerns, so that all others are served."""
        logger.error("Request %r is aborted: internal error", group.request_id, exc_info=error)
        step.discard(group)
        self.remove(group)
        step.failed.append(FailedRequest(group.request_id, error))

    def _check_size(self, request: Request) -> None:
        """Raises `UnservableRequest` for one that could not run to its end even alone."""
        length, config = request.num_prompt_tokens, self._settings.config
        if length == 0:
            raise UnservableRequest("the prompt is empty: give at least one token")
        if length >= config.max_model_len:
            raise UnservableRequest(
                f"the prompt has {length} tokens, max_model_len is {config.max_model_len} "
                "and the output needs at least one: shorten the prompt or raise max_model_len"
            )
        # Above a limit that a control request has lowered it waits: another one may raise it.
        most_seqs = max(config.max_num_seqs, self._first_max_num_seqs)
        if request.num_seqs > most_seqs:
            raise UnservableRequest(
                f"the request runs {request.num_seqs} sequences at once, max_num_seqs is "
                f"{most_seqs}: lower n, best_of or the beam width"
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
        is_ahead: Callable[[SequenceGroup], bool] | None = None,
    ) -> None:
        """Start groups of a queue in its order; with ``is_ahead`` while that holds for the first,
        and only those for which it holds."""
        while queue and step.token_budget > 0 and (num_free := self._num_free_seqs(step)) > 0:
            candidates = self._next_groups(queue, step, self._settings.config.lookahead)
            first = candidates[0] if candidates else None
            if is_ahead is not None:
                if first is None or not is_ahead(first):
                    return
                candidates = [group for group in candidates if is_ahead(group)]
            is_admission = queue is self._states.waiting
            if is_admission and candidates:
                candidates = self._leave_rest(candidates, num_free, step)
            group = self._start_first(candidates, num_free, step, can_start, start)
            if group is None:
                return
            self._num_free_at_refusal.pop(group.arrival, None)
            step.max_running_seqs = max(step.max_running_seqs, group.num_seqs)
            self._count_bypasses(group, candidates[0], step)
            if is_admission:  # a resumed group has been charged for before
                if group is first and not self._states.is_overdue(group):
                    self._states.shares.serve_in_turn(group.client)
                num_cached = group.allocated_seqs[0].num_cached_tokens
                group.client.service += group.request.num_prompt_tokens - num_cached
                group.client.last_start = self._states.num_arrivals

    def _start_first(
        self,
        candidates: Sequence[SequenceGroup],
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
        if first and self._states.is_overdue(first[0]) and self._may_use_adapter(first[0]):
            return first
        adapters = None  # groups that resume have theirs
        if queue is self._states.waiting:
            adapters = self._usable_adapters(step.max_group_seqs)
        return queue.first(count, self._max_group_seqs(step), adapters=adapters)

    def _usable_adapters(self, max_group_seqs: int) -> Collection[str] | None:
        """The adapters that a group may have which is admitted now; None for any."""
        used, limit = self._states.adapters, self._settings.config.max_adapters
        if limit is None or len(used) < limit:
            return None
        first = self._states.waiting.first(1, max_group_seqs)
        if first and self._states.is_overdue(first[0]) and not self._may_use_adapter(first[0]):
            return {_NO_ADAPTER}
        return {_NO_ADAPTER, *used}

    def _may_use_adapter(self, group: SequenceGroup) -> bool:
        """Whether ``max_adapters`` allows a group to start: one that was admitted has its own."""
        used, limit = self._states.adapters, self._settings.config.max_adapters
        if limit is None or len(used) < limit or group.status is not SequenceStatus.WAITING:
            return True
        return group.request.adapter in (_NO_ADAPTER, *used)

    def _leave_rest(
        self, candidates: list[SequenceGroup], num_free_seqs: int, step: SchedulingStep
    ) -> list[SequenceGroup]:
        """The first waiting groups that may have the sequences that may still start.

        The last ones are not for clients that run their part. A client that floods the queue would
        otherwise always run as many as there may be, and the next request of each other client
        would wait until one of them ends. An overdue group, and those that precede the last running
        group by their priority, may have them whatever their client.
        """
        limit, states = step.max_running_seqs, self._states
        if num_free_seqs > limit // RESERVE or states.is_overdue(candidates[0]):
            return candidates
        served = self.clients_at_share(step)
        if not served:
            return candidates
        lowest = states.running.last().queue_key.priority if states.running else -math.inf
        urgent = [group for group in candidates if group.queue_key.priority < lowest]
        others = states.waiting.first(
            len(candidates),
            self._max_group_seqs(step),
            served,
            self._usable_adapters(step.max_group_seqs),
        )
        return [*urgent, *(group for group in others if group not in urgent)]

    def _share_and_started(self, step: SchedulingStep) -> tuple[int, dict[Client, list[int]]]:
        """Each client's part of the running limit, and how many sequences its started groups have.

        Without groups while there is a single client.
        """
        states = self._states
        started: dict[Client, list[int]] = {}
        num_clients = states.shares.num_active(step.now)
        if num_clients > 1:
            for group in (*states.running, *states.swapping_in):
                started.setdefault(group.client, []).append(group.num_seqs)
        share = max(1, step.max_running_seqs // max(1, num_clients))
        return share, started

    def _num_free_seqs(self, step: SchedulingStep) -> int:
        return self._max_group_seqs(step) - self._states.num_started_seqs

    def _max_group_seqs(self, step: SchedulingStep) -> int:
        """The most sequences of a group that may start now: above a thermal limit only alone."""
        return step.max_running_seqs if self._states.num_started_seqs else step.max_group_seqs

    def _count_bypasses(
        self, started: SequenceGroup, first: SequenceGroup, step: SchedulingStep
    ) -> None:
        """Count the bypasses by a group that has started, while ``first`` was first in its queue.

        Called before its client is charged for it.
        """
        bypassed = []
        for queue in (self._states.resume_queue, self._states.waiting):
            oldest = queue.oldest(step.max_group_seqs)
            if oldest is None or oldest.arrival > started.arrival:
                continue
            if _is_newcomer(started, oldest) or not _has_fairer_share(started, oldest):
                bypassed.append(oldest)
        is_unfinished = first.finish_reason is None  # a group that fails to start is aborted
        if first.client is not started.client and is_unfinished and first not in bypassed:
            bypassed.append(first)
        for group in bypassed:
            self._states.count_bypass(group)

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
        """Blocks that must be left when a group resumes: for the slots that it lacks, and one in
        each block group for each sequence that then runs.

        So blocks cannot run out again before a sequence has filled one, unless other groups start:
        a return that costs copies or recomputation gives more than a token. A group that would run
        alone needs no spare blocks.
        """
        states = self._states
        num_others = states.num_running_seqs + states.num_swapping_in_seqs
        if not num_others:
            return 0
        num_spare = (num_others + group.num_seqs) * self._group_blocks.num_groups
        return num_spare + self._group_blocks.max_blocks_to_append(group)

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
        if (
            resumed is not None
            and self._resumes_first(resumed, group)
            and not _has_fairer_share(group, resumed)
        ):
            return False
        if self._pending_prefixes.has_next_block(group) and not self._states.is_overdue(group):
            return False
        if not self._can_allocate(group):
            return False
        return self._tiers is None or self._has_loaded(group, self._tiers, step.now)

    def _has_loaded(self, group: SequenceGroup, tiers: TierTransfers, now: float) -> bool:
        """Whether a group need not wait for tiers to load its prefix. An overdue one never waits.

        ``now`` is in seconds. The step copies what has arrived, whether the group starts or not.
        """
        keys = group.prefix_keys
        if keys is None or not group.request.reads_prefix_cache or self._states.is_overdue(group):
            return True
        # At least one token is left to compute: see `BlockManager.allocate`.
        num_blocks = (group.request.num_prompt_tokens - 1) // group.block_size
        blocks = keys.blocks[:num_blocks]
        cost_s = self._costs.prefill_s_per_token
        starts, copies = tiers.load_prefix(group.request_id, blocks, cost_s, now)
        self._group_blocks.moves.add(Direction.IN, copies)
        return starts

    def _resumes_first(self, resumed: SequenceGroup, waiting: SequenceGroup) -> bool:
        """Whether a preempted group precedes a waiting one."""
        if self._states.is_overdue(waiting):
            return resumed.queue_key < waiting.queue_key
        return resumed.queue_key.priority <= waiting.queue_key.priority

    def _admit(self, group: SequenceGroup, step: SchedulingStep) -> None:
        self._start(group, step)
        self._pending_prefixes.add(group)
        if self._tiers is not None:
            self._tiers.forget(group.request_id)

    def _start(self, group: SequenceGroup, step: SchedulingStep) -> None:
        self._group_blocks.allocate(group)
        if self._group_blocks.snapshots is not None:
            count = 1 + self._settings.config.lookahead
            for waiting in self._states.waiting.first(count, step.max_group_seqs):
                if waiting is not group:
                    self._group_blocks.takes_snapshot(group, waiting)
        self._states.start(group, step.now)
        step.schedule([group])

    def _can_allocate(self, group: SequenceGroup, num_spare: int = 0) -> bool:
        """Whether there are blocks for a group. A rejected one needs more free blocks to retry."""
        num_free = self._group_blocks.pool.num_free_blocks - num_spare
        if num_free <= self._num_free_at_refusal.get(group.arrival, -1):
            return False
        if self._group_blocks.can_allocate(group, num_spare):
            return True
        self._num_free_at_refusal[group.arrival] = num_free
        return False


def _has_fairer_share(group: SequenceGroup, other: SequenceGroup) -> bool:
    """Whether a group starts before another because its client got less service."""
    is_equal = group.queue_key.priority == other.queue_key.priority
    return is_equal and group.client.service < other.client.service


def _is_newcomer(group: SequenceGroup, other: SequenceGroup) -> bool:
    """Whether a group is the first of a client that came while another one was the next of its own.

    Clients that waited when the other's client was last served precede it.
    """
    client, last_start = group.client, other.client.last_start
    came_later = client.first_arrival > other.arrival
    return came_later and client.last_start is None and client.first_arrival >= (last_start or 0)


def _needs_prefill(group: SequenceGroup) -> bool:
    """Whether a preempted group computes a prefill chunk when it resumes."""
    if group.status is SequenceStatus.PREEMPTED:
        return True
    return any(sequence.is_in_prefill for sequence in group.allocated_seqs)


class PendingPrefixes:
    """Remembers which prompt blocks are being computed, by digest.

    A group that waits for such a block gets it from the prefix cache instead of computing it.
    ``digests``: those of each group that computes them.
    """

    def __init__(self, group_blocks: GroupBlocks) -> None:
        self._group_blocks = group_blocks
        self.digests: dict[SequenceGroup, frozenset[bytes]] = {}

    def add(self, group: SequenceGroup) -> None:
        """Add the blocks that a group, which has just been admitted, will compute."""
        if group.prefix_keys is None:
            return
        num_computed = group.allocated_seqs[0].num_computed_tokens // group.block_size
        digests = frozenset(key.digest for key in group.prefix_keys.blocks[num_computed:])
        if digests:
            self.digests[group] = digests

    def has_next_block(self, group: SequenceGroup) -> bool:
        """Whether the first block that ``group`` lacks in the prefix cache is being computed.

        And whether it will then be found there: see `GroupBlocks.takes_snapshot`.
        """
        if not self.digests:
            return False
        digest = self._group_blocks.next_uncached_digest(group)
        return digest is not None and any(
            digest in digests and self._group_blocks.takes_snapshot(running, group)
            for running, digests in self.digests.items()
        )

    def discard_computed(self) -> None:
        """Remove groups that have computed their prompt or do not run any more."""
        for group in tuple(self.digests):
            is_running = group.status is SequenceStatus.RUNNING
            if not is_running or self._group_blocks.is_computed(group):
                del self.digests[group]
