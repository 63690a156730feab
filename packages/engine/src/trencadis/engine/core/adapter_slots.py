"""Which slot of the model's layers holds which adapter: those used last keep theirs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping


class AdapterSlots:
    """Slots from 1 to ``num_slots``, slot 0 being that of requests without an adapter.

    The scheduler lets at most as many adapters be in use (`SchedulerConfig.max_adapters`), where
    other requests wait; so a step always finds slots.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: dict[str, int] = {}
        """The slot of each adapter, the one used longest ago first."""

    @property
    def held(self) -> Mapping[str, int]:
        """The slot of each adapter that has one."""
        return self._slots

    def of_step(self, adapters: Iterable[str], in_use: Collection[str]) -> dict[str, int]:
        """The slots of the adapters of a step. One that is not ``in_use`` may lose its own.

        Raises `RuntimeError` where all slots are those of adapters in use.
        """
        found: dict[str, int] = {}
        for adapter in adapters:
            slot = self._slots.pop(adapter, None)
            if slot is None:
                slot = self._free_slot(in_use)
            found[adapter] = self._slots[adapter] = slot
        return found

    def _free_slot(self, in_use: Collection[str]) -> int:
        if len(self._slots) < self._num_slots:
            taken = set(self._slots.values())
            return next(slot for slot in range(1, self._num_slots + 1) if slot not in taken)
        for adapter in self._slots:
            if adapter not in in_use:
                return self._slots.pop(adapter)
        raise RuntimeError(
            f"all {self._num_slots} adapter slots are in use: the scheduler has admitted "
            f"{len(in_use)} adapters"
        )
