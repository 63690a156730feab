"""The NUMA nodes of a machine, and the cores of each rank where there are several.

A core reads the memory of its own node faster than that of another, over a link that all cores
share. Linux gives a new page the node of the core that first writes it, so a process that is bound
to the cores of a node before it reads its weights has its memory there, too
(Documentation/admin-guide/mm/numa_memory_policy.rst).
"""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from pathlib import Path

NODES = Path("/sys/devices/system/node")
"""Where the kernel lists them (Documentation/ABI/stable/sysfs-devices-node)."""


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


def rank_cores(nodes: Sequence[Sequence[int]], num_ranks: int) -> list[tuple[int, ...]]:
    """The cores of each rank: of one node, which ranks that share it divide.

    Nothing where there are not several nodes, or a rank would have no core: then no rank is bound.
    """
    if len(nodes) < 2:
        return []
    of_node = [rank * len(nodes) // num_ranks for rank in range(num_ranks)]
    if num_ranks < len(nodes):
        of_node = list(range(num_ranks))
    shares: list[tuple[int, ...]] = []
    for rank, node in enumerate(of_node):
        cores, sharing = nodes[node], of_node.count(node)
        place = rank - of_node.index(node)
        first, end = (len(cores) * each // sharing for each in (place, place + 1))
        shares.append(tuple(cores[first:end]))
    return shares if all(shares) else []


def _parse_list(text: str) -> set[int]:
    """The numbers of a list as ``0-3,8``. Raises `ValueError`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores
