"""Priority beyond the queue: a waiting group may take the seats of running ones below it."""

from __future__ import annotations

from trencadis.scheduler.admission import Admission
from trencadis.scheduler.batch import StepBuilder
from trencadis.scheduler.group import SequenceGroup
from trencadis.scheduler.ledger import Ledger
from trencadis.scheduler.memory import GroupMemory
from trencadis.scheduler.preemption import Preemptor


class Urgency:
    """Makes way for the first waiting group, where swapping beats waiting.

    A victim that has been passed over as often as may be keeps its seat, so that a stream of
    urgent requests cannot keep another one from ever finishing.
    """

    def __init__(
        self, ledger: Ledger, memory: GroupMemory, preemptor: Preemptor, admission: Admission
    ) -> None:
        self._ledger = ledger
        self._memory = memory
        self._preemptor = preemptor
        self._admission = admission

    def make_way(self, step: StepBuilder) -> None:
        """Evict what the first waiting group needs, if all of it may go and is worth it."""
        group = self._admission.first_in_line(self._ledger.waiting, step)
        if group is None or not self._ledger.running:
            return
        missing = group.seats - (step.cap - self._ledger.running_seats)
        if self._ledger.running.last().turn[0] <= group.turn[0]:
            return
        if missing <= 0 and self._memory.can_start(group):
            return
        victims = self._below(group, missing)
        if all(self._preemptor.is_worth_it(victim, step.now) for victim in victims):
            for victim in victims:
                self._preemptor.evict(victim, step)

    def _below(self, group: SequenceGroup, seats: int) -> list[SequenceGroup]:
        """Running groups of lower priority with that many seats, the last turn first, or none."""
        victims: list[SequenceGroup] = []
        for victim in reversed(list(self._ledger.running)):
            if victim.turn[0] <= group.turn[0]:
                return []
            if not self._admission.is_overdue(victim):
                victims.append(victim)
                seats -= victim.seats
                if seats <= 0:
                    return victims
        return []
