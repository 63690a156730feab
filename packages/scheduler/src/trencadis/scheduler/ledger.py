"""Every group that is in the scheduler, in exactly one place, and the seats that are taken."""

from __future__ import annotations

import itertools

from trencadis.scheduler.beams import BeamTracker
from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.group import Sequence, SequenceGroup, SequenceStatus
from trencadis.scheduler.queues import GroupQueue
from trencadis.scheduler.request import FinishReason, Request


class Ledger:
    """Owns the queues and moves groups between them; a seat is one running sequence.

    ``arriving`` are swapped groups on their way back to the device: they have blocks already, and
    ``arriving_seats`` are kept for them, but they do not run yet.
    """

    def __init__(self, config: SchedulerConfig, block_size: int) -> None:
        self.waiting = GroupQueue()
        self.running = GroupQueue()
        self.swapped = GroupQueue()
        self.arriving: list[SequenceGroup] = []
        self.groups: dict[str, SequenceGroup] = {}
        self.sequences: dict[int, Sequence] = {}
        self.running_seats = 0
        self.arriving_seats = 0
        self._config = config
        self._block_size = block_size
        self._arrivals = itertools.count()
        self._seq_ids = itertools.count()

    def open(self, request: Request) -> SequenceGroup:
        """A new group, waiting."""
        arrival = next(self._arrivals)
        priority = request.priority if self._config.policy == "priority" else 0
        group = SequenceGroup(request, arrival, self._block_size, (priority, arrival))
        beams = request.beam_search
        if beams is not None:
            room = self._config.max_model_len - len(request.prompt_token_ids)
            group.beams = BeamTracker(request, beams, min(request.max_tokens, room))
        for _ in range(1 if beams is not None else request.num_seqs):
            group.live.append(self.new_sequence(group, list(request.prompt_token_ids)))
        self.groups[request.request_id] = group
        self.waiting.add(group)
        return group

    def new_sequence(self, group: SequenceGroup, token_ids: list[int]) -> Sequence:
        """One more sequence of a group, under an id of its own."""
        sequence = Sequence(next(self._seq_ids), group.request, token_ids, group)
        self.sequences[sequence.seq_id] = sequence
        return sequence

    def new_result(self, group: SequenceGroup, token_ids: list[int]) -> Sequence:
        """A finished sequence, which nobody will schedule."""
        return Sequence(next(self._seq_ids), group.request, token_ids, group)

    def run(self, group: SequenceGroup, now: float) -> None:
        """WAITING or SWAPPED to RUNNING. Raises `IllegalTransition`."""
        queue = self._queue_of(group)
        group.become(SequenceStatus.RUNNING)
        if queue is not None:
            queue.remove(group)
        else:
            self._end_arrival(group)
        self.running.add(group)
        self.running_seats += group.seats
        group.started_at_s = now

    def suspend(self, group: SequenceGroup) -> None:
        """RUNNING to SWAPPED. Raises `IllegalTransition`."""
        group.become(SequenceStatus.SWAPPED)
        self.running.remove(group)
        self.running_seats -= group.seats
        self.swapped.add(group)

    def expect(self, group: SequenceGroup) -> None:
        """A swapped group has been given blocks and will run once its content is there."""
        self.swapped.remove(group)
        self.arriving.append(group)
        self.arriving_seats += group.seats

    def cancel(self, group: SequenceGroup) -> None:
        """End a group for its client, in any state; see the state diagram for the arrows."""
        if group.status is SequenceStatus.RUNNING:
            self.finish(group)
        else:
            queue = self._queue_of(group)
            if queue is not None:
                queue.remove(group)
            else:
                self._end_arrival(group)
            if group.status is SequenceStatus.SWAPPED:
                group.become(SequenceStatus.WAITING)
            self._forget(group)
        group.finish_reason = FinishReason.ABORT
        for sequence in group.live:
            sequence.finish_reason = FinishReason.ABORT

    def finish(self, group: SequenceGroup) -> None:
        """RUNNING to FINISHED. Raises `IllegalTransition`."""
        group.become(SequenceStatus.FINISHED)
        self.running.remove(group)
        self.running_seats -= group.seats
        self._forget(group)

    def end_sample(self, sequence: Sequence, reason: FinishReason) -> None:
        """One of the samples of a running group has ended; the last one ends the group."""
        group = sequence.group
        sequence.finish_reason = reason
        group.active.remove(sequence)
        if len(group.live) == 1:
            self.finish(group)
            group.finish_reason = reason
        else:
            self.running_seats -= 1
            del self.sequences[sequence.seq_id]
        group.live.remove(sequence)
        group.finished.append(sequence)

    def drop_sequence(self, sequence: Sequence) -> None:
        """A beam did not survive."""
        sequence.group.live.remove(sequence)
        sequence.group.active.remove(sequence)
        del self.sequences[sequence.seq_id]

    def _queue_of(self, group: SequenceGroup) -> GroupQueue | None:
        if group.status is SequenceStatus.WAITING:
            return self.waiting
        return None if group in self.arriving else self.swapped

    def _end_arrival(self, group: SequenceGroup) -> None:
        self.arriving.remove(group)
        self.arriving_seats -= group.seats

    def _forget(self, group: SequenceGroup) -> None:
        del self.groups[group.request_id]
        for sequence in group.live:
            del self.sequences[sequence.seq_id]
