"""Where temperatures come from: the interface of a source, and the value that it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from importlib import import_module
from typing import Any

import attrs

from trencadis.scheduler.telemetry.errors import MissingExtra


@attrs.frozen
class Reading:
    """What one device's sensor said, unjudged: NaN and nonsense pass through.

    ``temperature_c`` in degrees C, ``power_w`` in watts (None: not measured). ``age_s`` is how
    long before `TemperatureSource.read` returned it the value was measured, in seconds: an age
    needs no agreement between clocks, be it another process's or another node's.
    """

    device: int
    temperature_c: float
    power_w: float | None = None
    age_s: float = 0.0


class Sensor(Enum):
    """Which of an accelerator's sensors counts.

    The chip is the default because policies' targets and vendors' dashboards speak of it (seed
    003 alerts on ``DCGM_FI_DEV_GPU_TEMP``). Memory stacks run hotter than the chip and are allowed
    to, so ``MEMORY`` and ``HOTTEST`` want a target of their own.
    """

    CHIP = "chip"
    MEMORY = "memory"
    HOTTEST = "hottest"

    def pick(self, chip_c: float | None, memory_c: float | None) -> float | None:
        """The temperature that counts, None where the device does not have it."""
        if self is Sensor.CHIP:
            return chip_c
        if self is Sensor.MEMORY:
            return memory_c
        known = [value for value in (chip_c, memory_c) if value is not None]
        return max(known) if known else None


class TemperatureSource(ABC):
    """Reads the sensors of the devices it knows. One thread at a time calls it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A short name for logs, for example ``nvml``."""

    @abstractmethod
    def read(self) -> list[Reading]:
        """One reading for each device that answers now; raises `SensorError` where none does.

        It may block for as long as the sensor takes, within a bound of the source's own.
        """

    def close(self) -> None:  # noqa: B027  most sources hold nothing
        """Give back what the source holds. Nothing is read afterwards."""


def import_extra(module: str, *, library: str, extra: str) -> Any:
    """Import an optional library, or raise `MissingExtra`, which says what to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(library, extra) from error
