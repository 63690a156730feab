"""Loads of adapters whose files are read beside the steps of an engine core.

Reading may take long, or forever on a file system that no longer answers. So each is read in a
thread of its own, a few at a time, and given up after a limit. The core's loop adds what was read.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

import attrs

from trencadis.engine.errors import AdapterError, shown

if TYPE_CHECKING:  # the front imports this module and must not wait for PyTorch
    from trencadis.engine.models.adapter_files import Adapter

MAX_READERS = 4
"""Adapters that are read at a time. Each takes host memory beside those of max_cpu_loras."""

READ_SECONDS = 600.0
"""Longest time from the order to load an adapter until it was read."""

STALLED_SECONDS = 60.0
"""Nothing waits for a thread once none of those that read has ended for so long."""

AGAIN_SECONDS = 60.0
"""Longest time to read what an earlier core had, or the model before a switch: nothing is served
meanwhile."""

_POLL_SECONDS = 0.1


@attrs.frozen(eq=False)
class AdapterLoad:
    """An adapter that is read. ``number``: of the order.

    ``due_s``: when it is given up, ``limit_s`` after its order.
    """

    number: int
    name: str
    path: str
    read: Callable[[], Adapter]
    due_s: float
    limit_s: float
    result: Future[Adapter] = attrs.field(factory=Future)

    def take(self) -> Adapter:
        """What was read. Raises `AdapterError`, also where that takes too long."""
        if not self.result.done():
            raise AdapterError(
                f"the adapter in {self.path} was not read within {self.limit_s:.0f} s: see whether "
                "its file system answers, or try again"
            )
        return self.result.result()


class AdapterLoads:
    """Reads adapters in threads. Not thread-safe: for the loop of the core. ``clock``: seconds.

    ``limit_s``: longest time from an order until its adapter was read.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, limit_s: float = READ_SECONDS
    ) -> None:
        self._clock = clock
        self._limit_s = limit_s
        self._changed_s = clock()
        """When a thread began or ended."""
        self._loads: dict[str, AdapterLoad] = {}
        """Those that were not taken or dropped, by name, in the order of their orders."""
        self._reading: list[AdapterLoad] = []
        """Those with a thread, also where nothing waits for it any more."""

    @property
    def names(self) -> Collection[str]:
        """The names of the adapters that are read, or wait for a thread."""
        return self._loads.keys()

    def begin(self, number: int, name: str, path: str, read: Callable[[], Adapter]) -> None:
        """Call ``read`` in a thread. Raises `AdapterError` for a name that is read already, and
        where the threads that there may be read without an end."""
        self._start_threads()
        if self._is_stalled:
            raise self._stall()
        if name in self._loads:
            raise AdapterError(
                f"the adapter {shown(name)} is being loaded already: wait for that", "lora_name"
            )
        due_s = self._clock() + self._limit_s
        self._loads[name] = AdapterLoad(number, name, path, read, due_s, self._limit_s)
        self._start_threads()

    def take_ended(self) -> list[AdapterLoad]:
        """Those that were read, or have waited for too long."""
        self._start_threads()
        if self._is_stalled:
            for load in self._loads.values():
                if load not in self._reading and not load.result.done():
                    load.result.set_exception(self._stall())
        now_s = self._clock()
        ended = [load for load in self._loads.values() if load.result.done() or now_s >= load.due_s]
        for load in ended:
            del self._loads[load.name]
        self._start_threads()
        return ended

    def wait_for_all(self) -> list[AdapterLoad]:
        """All of them, in the order of their orders, once they were read or given up."""
        ended: list[AdapterLoad] = []
        while self._loads:
            wait([load.result for load in self._loads.values()], _POLL_SECONDS, FIRST_COMPLETED)
            ended += self.take_ended()
        return sorted(ended, key=lambda load: load.number)

    def drop_all(self) -> list[AdapterLoad]:
        """Give up all of them: what is read is for a model that goes."""
        dropped = list(self._loads.values())
        self._loads.clear()
        return dropped

    @property
    def _is_stalled(self) -> bool:
        since_s = self._clock() - self._changed_s
        return len(self._reading) >= MAX_READERS and since_s >= STALLED_SECONDS

    def _stall(self) -> AdapterError:
        paths = ", ".join(shown(load.path) for load in self._reading)
        return AdapterError(
            f"{len(self._reading)} adapters are being read, as many as may be, and none was in the "
            f"last {STALLED_SECONDS:.0f} s: {paths}. See whether their file systems answer, or try "
            "again later"
        )

    def _start_threads(self) -> None:
        reading = [load for load in self._reading if not load.result.done()]
        if len(reading) < len(self._reading):
            self._reading, self._changed_s = reading, self._clock()
        for load in self._loads.values():
            if len(self._reading) >= MAX_READERS:
                return
            if load not in self._reading and not load.result.done():
                self._reading.append(load)
                self._changed_s = self._clock()
                # A daemon: the core must end also while a file system does not answer.
                threading.Thread(
                    target=_read, args=(load,), name="read-adapter", daemon=True
                ).start()


def _read(load: AdapterLoad) -> None:
    try:
        load.result.set_result(load.read())
    except BaseException as error:
        load.result.set_exception(error)
