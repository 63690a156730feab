"""Who starts next: groups that were evicted before those that never ran, and nobody starves."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.scheduler.batch import StepBuilder
from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.group import SequenceGroup, SequenceStatus
from trencadis.scheduler.ledger import Ledger
from trencadis.scheduler.memory import GroupMemory
from trencadis.scheduler.queues import GroupQueue


class Admission:
    """Starts groups while seats, tokens and blocks last.

    The groups of a queue start in their turn. One that does not fit now may be passed over by a
    later one, but by ``max_bypasses`` of them at most while it is the oldest of its queue; after
    that nothing starts before it. So a group with k older ones in its queue is passed over at most
    ``(k + 1) * max_bypasses`` times, and only the oldest has to be counted. A group that needs
    more seats than the cap allows at all is left out until the cap rises.
    """

    def __init__(self, config: SchedulerConfig, ledger: Ledger, memory: GroupMemory) -> None:
        self._config = config
        self._ledger = ledger
        self._memory = memory
        self._computing: dict[SequenceGroup, frozenset[bytes]] = {}
        self._refused: dict[int, int] = {}

    def land(self, step: StepBuilder) -> None:
        """Groups whose content has arrived on the device run again."""
        for group in tuple(self._ledger.arriving):
            if self._memory.has_arrived(group):
                self._ledger.run(group, step.now)

    def resume(self, step: StepBuilder) -> None:
        """Evicted groups come back, before anybody new of the same priority."""
        ledger = self._ledger
        self._start_in_turn(ledger.swapped, step, self._can_resume, self._resume)

    def admit(self, step: StepBuilder) -> None:
        """New groups start, unless an evicted one of the same priority still has to come back."""
        self._forget_computed()
        self._start_in_turn(self._ledger.waiting, step, self._can_admit, self._admit)

    def _start_in_turn(
        self,
        queue: GroupQueue,
        step: StepBuilder,
        can_start: Callable[[SequenceGroup, StepBuilder], bool],
        start: Callable[[SequenceGroup, StepBuilder], None],
    ) -> None:
        while queue and step.token_budget > 0 and self._free_seats(step) > 0:
            group = self._next(queue, step, can_start)
            if group is None:
                return
            start(group, step)
            self._refused.pop(group.arrival, None)
            for passed in (self._ledger.swapped, self._ledger.waiting):
                oldest = passed.oldest(step.cap)
                if oldest is not None and oldest.arrival < group.arrival:
                    oldest.passed_over += 1

    def _next(
        self,
        queue: GroupQueue,
        step: StepBuilder,
        can_start: Callable[[SequenceGroup, StepBuilder], bool],
    ) -> SequenceGroup | None:
        free = self._free_seats(step)
        for group in self._in_line(queue, step, self._config.lookahead):
            if group.seats <= free and can_start(group, step):
                return group
        return None

    def first_in_line(self, queue: GroupQueue, step: StepBuilder) -> SequenceGroup | None:
        """Who of a queue is to start next: the oldest once it is overdue, else the first turn."""
        return next(iter(self._in_line(queue, step, 1)), None)

    def _in_line(self, queue: GroupQueue, step: StepBuilder, count: int) -> list[SequenceGroup]:
        oldest = queue.oldest(step.cap)
        if oldest is not None and self.is_overdue(oldest):
            return [oldest]
        return queue.first(count, step.cap)

    def is_overdue(self, group: SequenceGroup) -> bool:
        """Whether a group has been passed over as often as may be."""
        return group.passed_over >= self._config.max_bypasses

    def _free_seats(self, step: StepBuilder) -> int:
        return step.cap - self._ledger.running_seats - self._ledger.arriving_seats

    def _can_resume(self, group: SequenceGroup, step: StepBuilder) -> bool:
        urgent = self.first_in_line(self._ledger.waiting, step)
        if urgent is not None and urgent.turn[0] < group.turn[0] and not self.is_overdue(group):
            return False
        return self._memory.can_swap_in(group) if group.on_host else self._has_room(group)

    def _resume(self, group: SequenceGroup, step: StepBuilder) -> None:
        if not group.on_host:
            self._begin(group, step)
            return
        self._memory.swap_in(group, step.now)
        self._ledger.expect(group)
        if self._memory.has_arrived(group):
            self._ledger.run(group, step.now)
            step.place(group)

    def _can_admit(self, group: SequenceGroup, step: StepBuilder) -> bool:
        evicted = self.first_in_line(self._ledger.swapped, step)
        if evicted is not None and (evicted.turn[0] <= group.turn[0] or self.is_overdue(evicted)):
            return False
        if self._is_being_computed(group) and not self.is_overdue(group):
            return False
        return self._has_room(group)

    def _admit(self, group: SequenceGroup, step: StepBuilder) -> None:
        self._begin(group, step)
        if group.keys is not None:
            done = group.active[0].num_computed // group.block_size
            unknown = frozenset(key.digest for key in group.keys.blocks[done:])
            if unknown:
                self._computing[group] = unknown

    def _begin(self, group: SequenceGroup, step: StepBuilder) -> None:
        self._memory.start(group)
        self._ledger.run(group, step.now)
        step.place(group)

    def _has_room(self, group: SequenceGroup) -> bool:
        """Whether there are blocks for a group; asked again only once more of them are free."""
        free = self._memory.num_free
        if free <= self._refused.get(group.arrival, -1):
            return False
        if self._memory.can_start(group):
            return True
        self._refused[group.arrival] = free
        return False

    def _is_being_computed(self, group: SequenceGroup) -> bool:
        """Whether a running prompt is about to publish the next block that this one needs."""
        if not self._computing:
            return False
        digest = self._memory.next_unknown_digest(group)
        return digest is not None and any(digest in ours for ours in self._computing.values())

    def _forget_computed(self) -> None:
        for group in tuple(self._computing):
            done = group.status is not SequenceStatus.RUNNING or (
                group.active[0].num_computed >= len(group.request.prompt_token_ids)
            )
            if done:
                del self._computing[group]

    def forget(self, group: SequenceGroup) -> None:
        """A group has left the scheduler."""
        self._refused.pop(group.arrival, None)
