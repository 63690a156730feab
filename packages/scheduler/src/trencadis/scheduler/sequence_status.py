"""The states of a sequence group and the transitions between them."""

from __future__ import annotations

import enum


class SequenceStatus(enum.Enum):
    """The state of a sequence group, shared by its unfinished sequences.

    The state diagram is that of seed 003, section 5:

    - WAITING to RUNNING: the group was admitted.
    - RUNNING to SWAPPED: the group was preempted, and its blocks are copied to the host.
    - SWAPPED to RUNNING: the group was resumed.
    - RUNNING to FINISHED: all its sequences have finished, or its client aborted it.
    - SWAPPED to WAITING: its client aborted the group, which then leaves the scheduler.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.SWAPPED, SequenceStatus.FINISHED}),
    SequenceStatus.SWAPPED: frozenset({SequenceStatus.RUNNING, SequenceStatus.WAITING}),
    SequenceStatus.FINISHED: frozenset(),
}
