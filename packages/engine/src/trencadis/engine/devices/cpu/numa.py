"""The NUMA nodes of a machine, and the cores of each rank where there are several.

A core reads the memory of its own node faster than that of another, over a link that all cores
share. Linux gives a new page the node of the core that first writes it, so a process that is bound
to the cores of a node before it reads its weights has its memory there, too
(Documentation/admin-guide/mm/numa_memory_policy.rst).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence, Set
from pathlib import Path

NODES = Path("/sys/devices/system/node")
"""Where the kernel lists them (Documentation/ABI/stable/sysfs-devices-node)."""

CORES = Path("/sys/devices/system/cpu")
"""Where it says which of them are threads of one core
(Documentation/ABI/stable/sysfs-devices-system-cpu)."""


def node_cores(
    directory: Path | None = None, usable: Set[int] | None = None
) -> list[tuple[int, ...]]:
    """The cores of each node that has any, in the order of the nodes.

    ``directory``: as `NODES`. ``usable``: cores that count, by default those that this process may
    use. Nothing where the kernel does not tell.
    """
    if usable is None:
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset()
    found: list[tuple[int, tuple[int, ...]]] = []
    for path in (directory or NODES).glob("node[0-9]*/cpulist"):
        try:
            listed = _parse_list(path.read_text(encoding="ascii"))
            number = int(path.parent.name.removeprefix("node"))
        except (OSError, ValueError):  # one that was taken away, or is none
            continue
        if cores := tuple(sorted(listed & usable)):
            found.append((number, cores))
    return [cores for _, cores in sorted(found)]


def siblings(number: int, directory: Path | None = None) -> tuple[int, ...]:
    """The threads of one core, of which ``number`` is one; itself where the kernel does not tell.

    Linux gives each thread a number, as if it were a core. ``directory``: as `CORES`.
    """
    path = (directory or CORES) / f"cpu{number}" / "topology" / "thread_siblings_list"
    try:
        found = _parse_list(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        found = set()
    return tuple(sorted(found | {number}))


def rank_cores(
    nodes: Sequence[Sequence[int]],
    num_ranks: int,
    siblings: Callable[[int], Sequence[int]] = siblings,
) -> list[tuple[int, ...]]:
    """The cores of each rank: of one node, which ranks that share it divide.

    Two ranks get threads of one core (``siblings``) only where there are more ranks than cores.
    Nothing where there are not several nodes, or a rank would have no core: then no rank is bound.
    """
    if len(nodes) < 2:
        return []
    of_node = [rank * len(nodes) // num_ranks for rank in range(num_ranks)]
    if num_ranks < len(nodes):
        of_node = list(range(num_ranks))
    shares: list[tuple[int, ...]] = []
    for rank, node in enumerate(of_node):
        sharing, place = of_node.count(node), rank - of_node.index(node)
        units = _units(nodes[node], sharing, siblings)
        first, end = (len(units) * each // sharing for each in (place, place + 1))
        shares.append(tuple(sorted(number for unit in units[first:end] for number in unit)))
    return shares if all(shares) else []


def _units(
    numbers: Sequence[int], num_ranks: int, siblings: Callable[[int], Sequence[int]]
) -> list[tuple[int, ...]]:
    """What ``num_ranks`` ranks divide: the threads of each core, or single threads of too few."""
    threads: dict[Sequence[int], list[int]] = {}
    for number in numbers:
        threads.setdefault(siblings(number), []).append(number)
    if len(threads) < num_ranks:
        return [(number,) for number in numbers]
    return [tuple(each) for each in threads.values()]


def _parse_list(text: str) -> set[int]:
    """The numbers of a list as ``0-3,8``. Raises `ValueError`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores
