"""Victim orders: the order in which running groups are evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

from trencadis.scheduler.errors import ConfigError


class Victim(Protocol):
    """What can be evicted: a running request with all its sequences, as a `SequenceGroup`.

    - ``num_seqs``: its running sequences, 1 or more.
    - ``priority``: a request of a lower value is evicted later.
    - ``arrival``: a number that grows from request to request.
    - ``started_at_s``: when it last began to run, in seconds.
    - ``last_scheduled_step``: the last step that computed some of it.
    - ``num_tokens_left``: tokens that it may still generate.
    """

    @property
    def request_id(self) -> str: ...

    @property
    def num_seqs(self) -> int: ...

    @property
    def priority(self) -> int: ...

    @property
    def arrival(self) -> int: ...

    @property
    def started_at_s(self) -> float: ...

    @property
    def last_scheduled_step(self) -> int: ...

    @property
    def num_tokens_left(self) -> int: ...

    def get_num_kv_blocks(self) -> int:
        """Blocks of the KV cache that its eviction frees."""


VictimT = TypeVar("VictimT", bound=Victim)
VictimKey = Callable[[Victim], tuple[float, ...]]


def lru(group: Victim) -> tuple[float, ...]:
    """Least recently scheduled first; within the same step, longest running first.

    Under lasting pressure groups alternate: a group that was resumed is the last to be evicted
    again.
    """
    return (group.last_scheduled_step, group.started_at_s, group.arrival)


def largest_kv(group: Victim) -> tuple[float, ...]:
    """Most blocks first: evicts the fewest groups for the same memory."""
    return (-group.get_num_kv_blocks(), -group.arrival)


def lowest_priority(group: Victim) -> tuple[float, ...]:
    """Lowest priority first, then latest arrival."""
    return (-group.priority, -group.arrival)


def longest_remaining(group: Victim) -> tuple[float, ...]:
    """Most tokens left to generate first, by ``max_tokens`` (seed 003): of those that heat the
    device for longest.

    The end of a sequence that stops before is not known. Then latest arrival.
    """
    return (-group.num_tokens_left, -group.arrival)


def cheapest(group: Victim) -> tuple[float, ...]:
    """Least swap traffic per saved watt first. Every sequence saves the same watts."""
    return (group.get_num_kv_blocks() / group.num_seqs, -group.arrival)


VICTIM_ORDERS: Mapping[str, VictimKey] = {
    "lru": lru,
    "largest_kv": largest_kv,
    "lowest_priority": lowest_priority,
    "longest_remaining": longest_remaining,
    "cheapest": cheapest,
}
"""The victim orders by name: sort keys, the first victim first."""


def victim_order(name: str) -> VictimKey:
    """The victim order of that name. Raises `ConfigError`, which lists the known names."""
    if name not in VICTIM_ORDERS:
        raise ConfigError(
            f"victim order {name!r} is unknown: use one of {', '.join(VICTIM_ORDERS)}"
        )
    return VICTIM_ORDERS[name]


def first_victims(order: VictimKey, running: Iterable[VictimT], num_to_evict: int) -> list[VictimT]:
    """The first groups in ``order`` with ``num_to_evict`` or more sequences in total."""
    victims: list[VictimT] = []
    for group in sorted(running, key=order):
        if num_to_evict <= 0:
            break
        victims.append(group)
        num_to_evict -= group.num_seqs
    return victims
