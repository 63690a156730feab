"""Victim orders: the order in which running groups are evicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.group import SequenceGroup

VictimKey = Callable[[SequenceGroup], tuple[float, ...]]


def lru(group: SequenceGroup) -> tuple[float, ...]:
    """Least recently scheduled first; within the same step, longest running first.

    Under lasting pressure groups alternate: a group that was resumed is the last to be evicted
    again.
    """
    return (group.last_scheduled_step, group.started_at_s, group.arrival)


def largest_kv(group: SequenceGroup) -> tuple[float, ...]:
    """Most blocks first: evicts the fewest groups for the same memory."""
    return (-group.get_num_kv_blocks(), -group.arrival)


def lowest_priority(group: SequenceGroup) -> tuple[float, ...]:
    """Lowest priority first, then latest arrival."""
    return (-group.priority, -group.arrival)


def longest_remaining(group: SequenceGroup) -> tuple[float, ...]:
    """Most tokens left to generate first, by ``max_tokens`` (seed 003): of those that heat the
    device for longest.

    The end of a sequence that stops before is not known. Then latest arrival.
    """
    num_left = sum(
        group.request.max_tokens - sequence.num_output_tokens for sequence in group.unfinished_seqs
    )
    return (-num_left, -group.arrival)


def cheapest(group: SequenceGroup) -> tuple[float, ...]:
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


def first_victims(
    order: VictimKey, running: Sequence[SequenceGroup], num_to_evict: int
) -> list[SequenceGroup]:
    """The first groups in ``order`` with ``num_to_evict`` or more sequences in total."""
    victims: list[SequenceGroup] = []
    for group in sorted(running, key=order):
        if num_to_evict <= 0:
            break
        victims.append(group)
        num_to_evict -= group.num_seqs
    return victims
