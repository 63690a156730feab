"""The state of every sequence group: the queues, and the transitions between them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from heapq import merge
from itertools import count, islice
from operator import attrgetter, itemgetter
from typing import Any

from trencadis.kvcache import CacheConfig
from trencadis.scheduler.beams import BeamSearchState
from trencadis.scheduler.config import SettingsInForce
from trencadis.scheduler.fair_share import Client, ClientShares
from trencadis.scheduler.group import QueueKey, Sequence, SequenceGroup, SequenceStatus
from trencadis.scheduler.request import FinishReason, Request

_queue_key = attrgetter("queue_key")
_order = attrgetter("order")
_arrival = attrgetter("arrival")
_group_of = itemgetter(1)

_REMOVED: Any = None
"""What replaces a removed entry. It is never read."""


class SortedGroups:
    """Groups in ascending order of a key that no two of them share.

    Adding a group behind all others, and removing one near either end, costs the same in a queue
    of any length: entries before ``_head`` are removed ones, and are deleted many at a time.
    """

    def __init__(self, key: Callable[[SequenceGroup], Any]) -> None:
        self._key = key
        self._entries: list[tuple[Any, SequenceGroup]] = []
        self._head = 0

    def __len__(self) -> int:
        return len(self._entries) - self._head

    def __iter__(self) -> Iterator[SequenceGroup]:
        return map(_group_of, islice(self._entries, self._head, None))

    def first(self) -> SequenceGroup:
        """The first group; there must be one."""
        return self._entries[self._head][1]

    def last(self) -> SequenceGroup:
        """The last group; there must be one."""
        return self._entries[-1][1]

    def add(self, group: SequenceGroup) -> None:
        """Insert a group at the position of its key."""
        insort(self._entries, (self._key(group), group), self._head)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group, which must be present and have the key with which it was added."""
        entries, head = self._entries, self._head
        index = bisect_left(entries, (self._key(group),), head)
        if index - head > len(entries) - index:
            del entries[index]
            return
        entries[head + 1 : index + 1] = entries[head:index]
        entries[head] = _REMOVED
        self._head += 1
        if 2 * self._head >= len(entries):
            del entries[: self._head]
            self._head = 0


class GroupQueue:
    """Groups that wait to run, in the order of `SequenceGroup.order` and in the order of arrival.

    Groups of more than ``max_num_seqs`` sequences cannot run under the current running limit:
    `first` and `oldest` skip them. Groups of one number of sequences are kept together, so a step
    skips all groups of that number at once, and so all of an adapter: its cost does not grow with
    the queue, but with the number of clients in it, and of their adapters.
    """

    def __init__(self) -> None:
        self._by_key: dict[tuple[int, Client, str], SortedGroups] = {}
        self._by_arrival: dict[int, SortedGroups] = {}
        self._num_groups = 0

    def __len__(self) -> int:
        return self._num_groups

    def first(
        self,
        count: int,
        max_num_seqs: int,
        without: Collection[Client] = (),
        adapters: Collection[str] | None = None,
    ) -> list[SequenceGroup]:
        """The first groups of the queue, at most ``count``, of clients other than ``without``.

        ``adapters``: only groups with one of them; None for any.
        """
        eligible = [
            groups
            for (size, client, adapter), groups in self._by_key.items()
            if size <= max_num_seqs
            and client not in without
            and (adapters is None or adapter in adapters)
        ]
        return list(islice(merge(*eligible, key=_order), count))

    def oldest(self, max_num_seqs: int) -> SequenceGroup | None:
        """The group that arrived first."""
        eligible = (
            groups.first() for size, groups in self._by_arrival.items() if size <= max_num_seqs
        )
        return min(eligible, key=_arrival, default=None)

    def add(self, group: SequenceGroup) -> None:
        """Insert a group. Its number of sequences must not change while it is in the queue."""
        size, key = group.num_seqs, _kind(group)
        self._by_key.setdefault(key, SortedGroups(_queue_key)).add(group)
        self._by_arrival.setdefault(size, SortedGroups(_arrival)).add(group)
        self._num_groups += 1

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group that is in the queue."""
        size, key = group.num_seqs, _kind(group)
        self._by_key[key].remove(group)
        if not self._by_key[key]:
            del self._by_key[key]
        self._by_arrival[size].remove(group)
        if not self._by_arrival[size]:
            del self._by_arrival[size]
        self._num_groups -= 1


def _kind(group: SequenceGroup) -> tuple[int, Client, str]:
    """What groups have in common that a step skips together."""
    return group.num_seqs, group.client, group.request.adapter


class GroupStates:
    """Owns the queues and moves groups between them. Every group is in exactly one of them.

    - ``resume_queue``: groups that wait to run again, SWAPPED and PREEMPTED ones.
    - ``swapping_in``: SWAPPED groups that have device blocks again and wait for their content.
    - ``shares``: the clients of all groups, with the service that they got.
    - ``groups``, ``sequences``: all that have not finished, by request id and sequence id.
    - ``num_running_seqs``, ``num_swapping_in_seqs``: sequences of the running groups and of those
      in ``swapping_in``; both count against the running limit.
    - ``num_preempted``: PREEMPTED groups.
    - ``num_scored``: groups whose results need more than a token: log-probabilities to rank
      samples, or candidates of beams.
    - ``adapters``: how many groups use each adapter: those that were admitted and have not ended.
      A preempted group keeps its own, so that it can resume.
    - ``num_arrivals``: groups since the start.
    - ``num_finished_seqs``: sequences that finished since the start, without aborted ones.
    """

    def __init__(self, settings: SettingsInForce, cache: CacheConfig) -> None:
        self.waiting = GroupQueue()
        self.running = SortedGroups(_queue_key)
        self.resume_queue = GroupQueue()
        self.swapping_in: list[SequenceGroup] = []
        self.shares = ClientShares()
        self.groups: dict[str, SequenceGroup] = {}
        self.sequences: dict[int, Sequence] = {}
        self.adapters: Counter[str] = Counter()
        self.num_running_seqs = 0
        self.num_swapping_in_seqs = 0
        self.num_preempted = 0
        self.num_scored = 0
        self.num_finished_seqs = 0
        self._settings = settings
        self._cache = cache
        self.num_arrivals = 0
        self._seq_ids = count()

    @property
    def num_started_seqs(self) -> int:
        """Sequences that count against the running limit: they run or are being swapped in."""
        return self.num_running_seqs + self.num_swapping_in_seqs

    def add(self, request: Request, now_s: float) -> SequenceGroup:
        """Create the group of a request that comes now, and put it into the waiting queue."""
        arrival = self.num_arrivals
        self.num_arrivals += 1
        key = self._key(request, arrival, 0)
        client = self.shares.enter_queue(request.client, now_s, arrival)
        group = SequenceGroup(request, arrival, self._cache.block_size, key, client)
        group.cache, group.added_at_s = self._cache, now_s
        search = request.beam_search
        if search is not None:
            max_output = self._settings.config.max_model_len - request.num_prompt_tokens
            max_output = min(request.max_tokens, max_output)
            group.beam_state = BeamSearchState(request, search, max_output)
        for _ in range(1 if search is not None else request.num_seqs):
            sequence = self.add_sequence(group, list(request.prompt_token_ids))
            group.unfinished_seqs.append(sequence)
        self.groups[request.request_id] = group
        self.num_scored += request.is_scored
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
        if status is SequenceStatus.WAITING and group.request.adapter:
            self.adapters[group.request.adapter] += 1
        if status is not SequenceStatus.WAITING:
            group.away_s += max(0.0, now - group.preempted_at_s)
        if group.queue_s is None:
            group.queue_s = max(0.0, now - group.added_at_s)

    def preempt(self, group: SequenceGroup, now: float, *, swapped: bool) -> None:
        """Change the status from RUNNING to SWAPPED, or to PREEMPTED for recomputation.

        Raises `IllegalTransition`.
        """
        group.transition_to(SequenceStatus.SWAPPED if swapped else SequenceStatus.PREEMPTED)
        self.running.remove(group)
        self.num_running_seqs -= group.num_seqs
        group.preempted_at_s = now
        group.num_preemptions += 1
        self.resume_queue.add(group)
        self.num_preempted += not swapped

    def begin_swap_in(self, group: SequenceGroup) -> None:
        """A swapped group has device blocks again; `start` it once their content has arrived."""
        self.resume_queue.remove(group)
        self.swapping_in.append(group)
        self.num_swapping_in_seqs += group.num_seqs

    def is_overdue(self, group: SequenceGroup) -> bool:
        """Whether a group has been bypassed ``max_bypasses`` times."""
        return group.num_bypasses >= self._settings.config.max_bypasses

    def count_bypass(self, group: SequenceGroup) -> None:
        """Count a bypass of a group in a queue other than ``running``; it may become overdue."""
        group.num_bypasses += 1
        key = self._key(group.request, group.arrival, group.num_bypasses)
        if key != group.queue_key:
            is_waiting = group.status is SequenceStatus.WAITING
            queue = self.waiting if is_waiting else self.resume_queue
            queue.remove(group)
            group.queue_key = key
            queue.add(group)

    def abort(self, group: SequenceGroup) -> None:
        """Remove a group in any state."""
        if group.status is SequenceStatus.RUNNING:
            self._finish(group)
        else:
            self._leave_queue(group, group.status)
            if group.status is not SequenceStatus.WAITING:
                group.transition_to(SequenceStatus.WAITING)
                self._leave_adapter(group)
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

    def _key(self, request: Request, arrival: int, num_bypasses: int) -> QueueKey:
        is_overdue = num_bypasses >= self._settings.config.max_bypasses
        return QueueKey.of(request, arrival, self._settings.config.policy, is_overdue=is_overdue)

    def _finish(self, group: SequenceGroup) -> None:
        group.transition_to(SequenceStatus.FINISHED)
        self.running.remove(group)
        self.num_running_seqs -= group.num_seqs
        self._leave_adapter(group)
        self._remove(group)

    def _leave_adapter(self, group: SequenceGroup) -> None:
        """A group that was admitted has ended."""
        adapter = group.request.adapter
        if adapter:
            self.adapters[adapter] -= 1
            if not self.adapters[adapter]:
                del self.adapters[adapter]

    def _leave_queue(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """Remove a group that has, or had until now, a ``status`` other than RUNNING."""
        if status is SequenceStatus.WAITING:
            self.waiting.remove(group)
            self.shares.leave_queue(group.client)
        elif group in self.swapping_in:
            self.swapping_in.remove(group)
            self.num_swapping_in_seqs -= group.num_seqs
        else:
            self.resume_queue.remove(group)
            self.num_preempted -= status is SequenceStatus.PREEMPTED

    def _remove(self, group: SequenceGroup) -> None:
        del self.groups[group.request_id]
        self.shares.remove(group.client)
        self.num_scored -= group.request.is_scored
        for sequence in group.unfinished_seqs:
            del self.sequences[sequence.seq_id]
