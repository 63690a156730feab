"""Who is evicted: orders of the running groups, the first victim first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.group import SequenceGroup

VictimKey = Callable[[SequenceGroup], tuple[float, ...]]


def lru(group: SequenceGroup) -> tuple[float, ...]:
    """Least recently scheduled; of those in the same step, the one that runs the longest.

    Under lasting pressure groups so take turns: one that comes back is the last to go again.
    """
    return (group.last_scheduled_step, group.started_at_s, group.arrival)


def largest_kv(group: SequenceGroup) -> tuple[float, ...]:
    """Most blocks first: the fewest groups for the memory."""
    return (-group.get_num_kv_blocks(), -group.arrival)


def lowest_priority(group: SequenceGroup) -> tuple[float, ...]:
    """The last turn first: the lowest priority, then the latest arrival."""
    return (-group.priority, -group.arrival)


def cheapest(group: SequenceGroup) -> tuple[float, ...]:
    """Least swap traffic per watt saved; each sequence saves the same, whatever its length."""
    return (group.get_num_kv_blocks() / group.num_seqs, -group.arrival)


VICTIM_ORDERS: Mapping[str, VictimKey] = {
    "lru": lru,
    "largest_kv": largest_kv,
    "lowest_priority": lowest_priority,
    "cheapest": cheapest,
}


def victim_order(name: str) -> VictimKey:
    """The order of that name. Raises `ConfigError`, which lists those that exist."""
    if name not in VICTIM_ORDERS:
        raise ConfigError(f"victim order {name!r} is not one of {', '.join(VICTIM_ORDERS)}")
    return VICTIM_ORDERS[name]


def first_victims(
    order: VictimKey, running: Sequence[SequenceGroup], num_to_evict: int
) -> list[SequenceGroup]:
    """The first groups in ``order`` that have ``num_to_evict`` sequences between them."""
    victims: list[SequenceGroup] = []
    for group in sorted(running, key=order):
        if num_to_evict <= 0:
            break
        victims.append(group)
        num_to_evict -= group.num_seqs
    return victims
