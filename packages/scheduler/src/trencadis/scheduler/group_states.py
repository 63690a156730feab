"""The state of every sequence group: the queues, and the transitions between them."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator

from trencadis.scheduler.beams import BeamSearchState
from trencadis.scheduler.config import SchedulerConfig
from trencadis.scheduler.group import QueueKey, Sequence, SequenceGroup, SequenceStatus
from trencadis.scheduler.request import FinishReason, Request


class GroupQueue:
    """Groups in ascending order of `QueueKey`; the oldest group is known as well.

    A step looks at a bounded number of groups, so its cost does not grow with the queue.
    Groups of more than ``max_num_seqs`` sequences cannot run under the current running limit:
    `first` and `oldest` skip them.
    """

    def __init__(self) -> None:
        self._keys: list[QueueKey] = []
        self._groups: list[SequenceGroup] = []
        self._arrivals: list[int] = []
        self._by_arrival: dict[int, SequenceGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    def first(self, count: int, max_num_seqs: int) -> list[SequenceGroup]:
        """The first groups of the queue, at most ``count``."""
        eligible = (group for group in self._groups if group.num_seqs <= max_num_seqs)
        return list(itertools.islice(eligible, count))

    def last(self) -> SequenceGroup:
        """The last group of the queue, which must not be empty."""
        return self._groups[-1]

    def oldest(self, max_num_seqs: int) -> SequenceGroup | None:
        """The group that arrived first."""
        by_age = (self._by_arrival[arrival] for arrival in self._arrivals)
        return next((group for group in by_age if group.num_seqs <= max_num_seqs), None)

    def add(self, group: SequenceGroup) -> None:
        """Insert a group at the position of its key."""
        index = bisect_left(self._keys, group.queue_key)
        self._keys.insert(index, group.queue_key)
        self._groups.insert(index, group)
        self._arrivals.insert(bisect_left(self._arrivals, group.arrival), group.arrival)
        self._by_arrival[group.arrival] = group

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group that is in the queue."""
        index = bisect_left(self._keys, group.queue_key)
        del self._keys[index], self._groups[index]
        del self._arrivals[bisect_left(self._arrivals, group.arrival)]
        del self._by_arrival[group.arrival]


class GroupStates:
    """Owns the queues and moves groups between them. Every group is in exactly one of them.

    - ``resume_queue``: groups that wait to run again, SWAPPED and PREEMPTED ones.
    - ``swapping_in``: SWAPPED groups that have device blocks again and wait for their content.
    - ``groups``, ``sequences``: all that have not finished, by request id and sequence id.
    - ``num_running_seqs``, ``num_swapping_in_seqs``: sequences of the running groups and of those
      in ``swapping_in``; both count against the running limit.
    - ``num_preempted``: PREEMPTED groups.
    - ``num_ranked``: groups whose samples are ranked by their log-probabilities.
    - ``num_finished_seqs``: sequences that finished since the start, without aborted ones.
    """

    def __init__(self, config: SchedulerConfig, block_size: int) -> None:
        self.waiting = GroupQueue()
        self.running = GroupQueue()
        self.resume_queue = GroupQueue()
        self.swapping_in: list[SequenceGroup] = []
        self.groups: dict[str, SequenceGroup] = {}
        self.sequences: dict[int, Sequence] = {}
        self.num_running_seqs = 0
        self.num_swapping_in_seqs = 0
        self.num_preempted = 0
        self.num_ranked = 0
        self.num_finished_seqs = 0
        self._config = config
        self._block_size = block_size
        self._arrivals = itertools.count()
        self._seq_ids = itertools.count()

    def add(self, request: Request) -> SequenceGroup:
        """Create the group of a request and put it into the waiting queue."""
        arrival = next(self._arrivals)
        key = QueueKey.of(request, arrival, self._config.policy)
        group = SequenceGroup(request, arrival, self._block_size, key)
        search = request.beam_search
        if search is not None:
            max_output = self._config.max_model_len - request.num_prompt_tokens
            max_output = min(request.max_tokens, max_output)
            group.beam_state = BeamSearchState(request, search, max_output)
        for _ in range(1 if search is not None else request.num_seqs):
            sequence = self.add_sequence(group, list(request.prompt_token_ids))
            group.unfinished_seqs.append(sequence)
        self.groups[request.request_id] = group
        self.num_ranked += request.is_ranked
        self.waiting.add(group)
        return group

    def add_sequence(self, group: SequenceGroup, token_ids: list[int]) -> Sequence:
        """Create a sequence that can be scheduled."""
        sequence = self.create_sequence(group, token_ids)
        self.sequences[sequence.seq_id] = sequence
        return sequence

    def create_sequence(self, group: SequenceGroup, token_ids: list[int]) -> Sequence:
        """Create a sequence with a new id that is not in ``sequences``."""
        return Sequence(next(self._seq_ids), group.request, token_ids, group)

    def start(self, group: SequenceGroup, now: float) -> None:
        """Change the status to RUNNING: the group is admitted or resumed.

        Raises `IllegalTransition`.
        """
        status = group.status
        group.transition_to(SequenceStatus.RUNNING)
        self._leave_queue(group, status)
        self.running.add(group)
        self.num_running_seqs += group.num_seqs
        group.started_at_s = now

    def preempt(self, group: SequenceGroup, *, swapped: bool) -> None:
        """Change the status from RUNNING to SWAPPED, or to PREEMPTED for recomputation.

        Raises `IllegalTransition`.
        """
        group.transition_to(SequenceStatus.SWAPPED if swapped else SequenceStatus.PREEMPTED)
        self.running.remove(group)
        self.num_running_seqs -= group.num_seqs
        self.resume_queue.add(group)
        self.num_preempted += not swapped

    def begin_swap_in(self, group: SequenceGroup) -> None:
        """A swapped group has device blocks again; `start` it once their content has arrived."""
        self.resume_queue.remove(group)
        self.swapping_in.append(group)
        self.num_swapping_in_seqs += group.num_seqs

    def abort(self, group: SequenceGroup) -> None:
        """Remove a group in any state."""
        if group.status is SequenceStatus.RUNNING:
            self._finish(group)
        else:
            self._leave_queue(group, group.status)
            if group.status is not SequenceStatus.WAITING:
                group.transition_to(SequenceStatus.WAITING)
            self._remove(group)
        group.finish_reason = FinishReason.ABORT
        for sequence in group.unfinished_seqs:
            sequence.finish_reason = FinishReason.ABORT

    def finish_sample(self, sequence: Sequence, reason: FinishReason) -> None:
        """Finish a sample of a running group; with its last sample the group finishes."""
        group = sequence.group
        sequence.finish_reason = reason
        group.allocated_seqs.remove(sequence)
        if len(group.unfinished_seqs) == 1:
            self._finish(group)
            group.finish_reason = reason
        else:
            self.num_running_seqs -= 1
            del self.sequences[sequence.seq_id]
        group.unfinished_seqs.remove(sequence)
        group.finished_seqs.append(sequence)
        self.num_finished_seqs += 1

    def drop_beam(self, beam: Sequence) -> None:
        """Remove a beam that has no continuation."""
        beam.group.unfinished_seqs.remove(beam)
        beam.group.allocated_seqs.remove(beam)
        del self.sequences[beam.seq_id]

    def finish_beam_search(self, group: SequenceGroup, results: list[Sequence]) -> None:
        """Finish a running beam search with its hypotheses, best first."""
        self.num_finished_seqs += group.num_seqs
        self._finish(group)
        group.unfinished_seqs, group.allocated_seqs = [], []
        group.finished_seqs = results
        group.finish_reason = results[0].finish_reason

    def _finish(self, group: SequenceGroup) -> None:
        group.transition_to(SequenceStatus.FINISHED)
        self.running.remove(group)
        self.num_running_seqs -= group.num_seqs
        self._remove(group)

    def _leave_queue(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """Remove a group that has, or had until now, a ``status`` other than RUNNING."""
        if status is SequenceStatus.WAITING:
            self.waiting.remove(group)
        elif group in self.swapping_in:
            self.swapping_in.remove(group)
            self.num_swapping_in_seqs -= group.num_seqs
        else:
            self.resume_queue.remove(group)
            self.num_preempted -= status is SequenceStatus.PREEMPTED

    def _remove(self, group: SequenceGroup) -> None:
        del self.groups[group.request_id]
        self.num_ranked -= group.request.is_ranked
        for sequence in group.unfinished_seqs:
            del self.sequences[sequence.seq_id]
