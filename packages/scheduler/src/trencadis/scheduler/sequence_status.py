"""The states of a sequence group and the transitions between them."""

from __future__ import annotations

import enum


class SequenceStatus(enum.Enum):
    """The state of a sequence group and of its unfinished sequences.

    - WAITING: not admitted yet.
    - RUNNING: on the device.
    - SWAPPED: preempted; its computed blocks are on the host.
    - PREEMPTED: preempted; its blocks were freed, its tokens are kept, and it is recomputed.
    - FINISHED: all its sequences have finished, or its client aborted it while it was running.
    """

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    PREEMPTED = "preempted"
    FINISHED = "finished"


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING}),
    SequenceStatus.RUNNING: frozenset(
        {SequenceStatus.SWAPPED, SequenceStatus.PREEMPTED, SequenceStatus.FINISHED}
    ),
    SequenceStatus.SWAPPED: frozenset({SequenceStatus.RUNNING, SequenceStatus.WAITING}),
    SequenceStatus.PREEMPTED: frozenset({SequenceStatus.RUNNING, SequenceStatus.WAITING}),
    SequenceStatus.FINISHED: frozenset(),
}
"""The state diagram: that of seed 003, section 5, and vLLM's PREEMPTED, for recomputation.

A group that its client aborts while SWAPPED or PREEMPTED becomes WAITING and leaves the scheduler,
as a group does that is aborted while WAITING.
"""
