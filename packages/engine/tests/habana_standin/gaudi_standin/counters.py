"""What a step costs on the device, as counts that do not depend on the machine.

`BRIDGE.counters` is the running total. A benchmark or a test takes a copy before a step and the
difference after it::

    before = BRIDGE.counters.copy()
    step()
    print(BRIDGE.counters.since(before))
"""

from __future__ import annotations

from collections import Counter

import attrs

from gaudi_standin.traffic import Traffic


@attrs.define
class Counters:
    """Totals since the stand-in was loaded, or the difference between two moments.

    ``launches``: recipes that were started: a flush, a replayed program, a partition of a compiled
    region, an operation in eager mode. ``recipes``: recipes that were compiled. ``syncs``: times
    that the host waited for the device. ``uploads`` and ``downloads``: copies from and to the
    host. ``copied_bytes``: tensors that an operation copies whole although it changes few of their
    rows. ``gathers``, ``read_bytes`` and ``written_bytes``: see `gaudi_standin.traffic`.
    ``compile_calls``: calls of ``torch.compile`` for the bridge's backend; ``traces``: graphs that
    PyTorch traced for it. ``partitions``: recipes that compiled regions started. ``replays``: of
    HPU graphs. ``eager_fallbacks``: operations of a compiled region outside of its recipes.
    ``cpu_fallbacks``: operations without a kernel, which run on the host. ``collectives``: calls
    between processes; those of a replayed graph are not counted again.
    """

    launches: int = 0
    recipes: int = 0
    syncs: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    downloads: int = 0
    download_bytes: int = 0
    copied_bytes: int = 0
    gathers: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    compile_calls: int = 0
    traces: int = 0
    partitions: int = 0
    replays: int = 0
    collectives: int = 0
    eager_fallbacks: Counter[str] = attrs.field(factory=Counter)
    cpu_fallbacks: Counter[str] = attrs.field(factory=Counter)

    def copy(self) -> Counters:
        """These counts, independent of later ones."""
        return attrs.evolve(
            self,
            eager_fallbacks=Counter(self.eager_fallbacks),
            cpu_fallbacks=Counter(self.cpu_fallbacks),
        )

    def since(self, before: Counters) -> Counters:
        """What was counted after ``before``, an earlier copy."""
        names = [field.name for field in attrs.fields(Counters)]
        return Counters(**{n: getattr(self, n) - getattr(before, n) for n in names})

    def move(self, traffic: Traffic) -> None:
        """Count what a program reads and writes."""
        self.gathers += traffic.gathers
        self.read_bytes += traffic.read_bytes
        self.written_bytes += traffic.written_bytes

    @property
    def fallbacks(self) -> int:
        """Operations that ran outside of recipes, on the device or on the host."""
        return self.eager_fallbacks.total() + self.cpu_fallbacks.total()
