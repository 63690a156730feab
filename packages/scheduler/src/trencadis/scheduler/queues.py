"""Groups in the order of their turn. What waits costs nothing: no step looks at all of it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

from trencadis.scheduler.group import SequenceGroup


class GroupQueue:
    """Groups sorted by turn (priority, then arrival), with the oldest arrival known as well."""

    def __init__(self) -> None:
        self._turns: list[tuple[int, int]] = []
        self._groups: list[SequenceGroup] = []
        self._arrivals: list[int] = []
        self._by_arrival: dict[int, SequenceGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(self._groups)

    def first(self, count: int, max_seats: int) -> list[SequenceGroup]:
        """The groups whose turn it is next, at most ``count``, none that needs more seats."""
        return list(islice((one for one in self._groups if one.seats <= max_seats), count))

    def last(self) -> SequenceGroup:
        """The group whose turn comes last."""
        return self._groups[-1]

    def oldest(self, max_seats: int) -> SequenceGroup | None:
        """The group that arrived first, of those that need no more seats."""
        groups = (self._by_arrival[arrival] for arrival in self._arrivals)
        return next((one for one in groups if one.seats <= max_seats), None)

    def add(self, group: SequenceGroup) -> None:
        """Put a group where its turn is."""
        index = bisect_left(self._turns, group.turn)
        self._turns.insert(index, group.turn)
        self._groups.insert(index, group)
        self._arrivals.insert(bisect_left(self._arrivals, group.arrival), group.arrival)
        self._by_arrival[group.arrival] = group

    def remove(self, group: SequenceGroup) -> None:
        """Take out a group that is in the queue."""
        index = bisect_left(self._turns, group.turn)
        del self._turns[index], self._groups[index]
        del self._arrivals[bisect_left(self._arrivals, group.arrival)]
        del self._by_arrival[group.arrival]
