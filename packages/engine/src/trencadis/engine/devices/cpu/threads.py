"""How many threads the CPU's operations use: fewer while other processes use the cores.

An operation that is divided between threads ends with the last of them. Where another process
takes a share of one core, the thread of that core ends each operation late, and the others wait:
with one of two cores taken, two threads are slower than one. So the number of threads follows the
cores that are free, by two figures of the kernel (Documentation/scheduler/sched-stats.rst and
proc_stat(5)): how long the threads of this process waited for a core, and how long the cores that
it may use were idle.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import attrs
import torch

logger = logging.getLogger("trencadis.engine")

PERIOD_SECONDS = 0.5
"""Period of the readings: a hundred time slices of the kernel's scheduler."""

_WAITED = 0.3
"""Threads wait for so much of a core's time or more: there is one too many."""

_IDLE = 0.8
"""So much of a core is idle or more: another thread can use it."""

_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


@attrs.frozen
class CoreTimes:
    """Seconds since some start: of the clock, in which threads of this process waited for a core,
    and in which its cores were idle. Waiting and idle times are sums."""

    clock_s: float
    waited_s: float
    idle_s: float


def next_num_threads(num_threads: int, most: int, before: CoreTimes, after: CoreTimes) -> int:
    """The number of threads after a period of work, from 1 to ``most``."""
    seconds = after.clock_s - before.clock_s
    waited = (after.waited_s - before.waited_s) / seconds
    idle = (after.idle_s - before.idle_s) / seconds
    if waited >= _WAITED:
        return max(1, num_threads - max(1, round(waited)))
    if idle >= _IDLE:
        return min(most, num_threads + max(1, math.floor(idle)))
    return num_threads


class AdaptiveThreads:
    """Sets PyTorch's number of threads, for the thread that calls `begin_step`.

    ``most`` is the number on a quiet machine. ``read`` gives None where the kernel has no figures:
    then nothing changes.
    """

    def __init__(self, most: int, read: Callable[[], CoreTimes | None]) -> None:
        self._most = most
        self._read = read
        self._before: CoreTimes | None = None
        self._was_reduced = False

    def begin_step(self) -> None:
        """Adapt the number of threads; reads figures twice a second."""
        before = self._before
        if self._most < 2 or (
            before is not None and time.monotonic() - before.clock_s < PERIOD_SECONDS
        ):
            return
        self._before = after = self._read()
        if before is None or after is None:
            return
        num_threads = torch.get_num_threads()
        adapted = next_num_threads(num_threads, self._most, before, after)
        if adapted == num_threads:
            return
        torch.set_num_threads(adapted)
        level = logging.DEBUG if self._was_reduced else logging.INFO
        logger.log(
            level,
            "%d of %d threads: other processes use the cores (--cpu-threads fixes the number)",
            adapted,
            self._most,
        )
        self._was_reduced = True


def default_num_threads() -> int:
    """PyTorch's own number, or fewer where the control group limits the time on the cores."""
    return max(1, math.floor(min(torch.get_num_threads(), _core_limit())))


def read_core_times() -> CoreTimes | None:
    """The figures of this process and its cores; None where the kernel does not give them."""
    try:
        tasks = [path / "schedstat" for path in Path("/proc/self/task").iterdir()]
        waited_ns = sum(_waited_ns(path) for path in tasks)
        idle = _idle_ticks(os.sched_getaffinity(0))
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return CoreTimes(time.monotonic(), waited_ns * 1e-9, idle / os.sysconf("SC_CLK_TCK"))


def _waited_ns(path: Path) -> int:
    try:
        return int(path.read_text().split()[1])
    except FileNotFoundError:  # the thread has ended
        return 0


def _idle_ticks(cores: set[int]) -> int:
    total = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            total += int(ticks[3]) + int(ticks[4])
    return total


def _core_limit() -> float:
    """Cores that the control group may use on average; infinite without a limit."""
    try:
        quota, period = _CGROUP_LIMIT.read_text().split()
        return math.inf if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return math.inf
