"""A queue of sequence groups, ordered by (priority, arrival).

A step looks at a bounded number of groups, so its cost does not grow with the queue.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

from trencadis.scheduler.group import QueueKey, SequenceGroup


class GroupQueue:
    """Groups in ascending order of `QueueKey`; the oldest group is known as well.

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
        return list(islice(eligible, count))

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
