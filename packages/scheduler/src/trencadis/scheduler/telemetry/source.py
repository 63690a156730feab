"""The interface of a temperature source, and the readings it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from enum import Enum
from importlib import import_module
from typing import Any

import attrs

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry.errors import MissingExtra


@attrs.frozen
class Reading:
    """A sample of one device's sensor, before any plausibility check: it may be NaN.

    ``temperature_c``: degrees C. ``power_w``: watts; None if not measured. ``age_s``: seconds
    between the measurement and the return of `TemperatureSource.read`. An age, unlike a time, needs
    no common clock between processes or nodes.
    """

    device: int
    temperature_c: float
    power_w: float | None = None
    age_s: float = 0.0


class Sensor(Enum):
    """The sensor of an accelerator whose temperature counts.

    ``CHIP`` is the default, because targets and dashboards refer to it (seed 003 alerts on
    ``DCGM_FI_DEV_GPU_TEMP``). Memory runs hotter than the chip, within its own limits, so
    ``MEMORY`` and ``HOTTEST`` need a higher target.
    """

    CHIP = "chip"
    MEMORY = "memory"
    HOTTEST = "hottest"

    @classmethod
    def from_argument(cls, argument: str) -> Sensor:
        """The sensor of that name; ``CHIP`` for an empty one. Raises `ConfigError`."""
        try:
            return cls(argument or cls.CHIP)
        except ValueError:
            known = ", ".join(sensor.value for sensor in cls)
            raise ConfigError(f"sensor {argument!r} is unknown: use one of {known}") from None

    def select(self, chip_c: float | None, memory_c: float | None) -> float | None:
        """The temperature that counts; None if the device has no such sensor."""
        if self is Sensor.CHIP:
            return chip_c
        if self is Sensor.MEMORY:
            return memory_c
        known = [value for value in (chip_c, memory_c) if value is not None]
        return max(known) if known else None


class TemperatureSource(ABC):
    """Reads the sensors of its devices. Not thread-safe: one thread at a time may call it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """A short name for logs, for example ``nvml``."""

    @abstractmethod
    def read(self) -> list[Reading]:
        """One reading for each device that answers. Raises `SensorError` if none does.

        May block while the sensor is read, for a bounded time.
        """

    def close(self) -> None:  # noqa: B027  most sources hold nothing
        """Release the resources of the source. It is not read afterwards."""


def split_options(argument: str, known: Collection[str]) -> tuple[str, dict[str, str]]:
    """The address and the options of ``address#name=value,name=value``.

    Raises `ConfigError` for an option that is not ``known``, is given twice or has no value.
    """
    address, _, listed = argument.partition("#")
    options: dict[str, str] = {}
    for option in filter(None, listed.split(",")):
        name, _, value = option.partition("=")
        if name not in known or name in options or not value:
            raise ConfigError(
                f"temperature source option {option!r} is not NAME=VALUE of {', '.join(known)}, "
                "each once: write them as in ADDRESS#NAME=VALUE,NAME=VALUE"
            )
        options[name] = value
    return address, options


def import_extra(module: str, *, library: str, extra: str) -> Any:
    """Import an optional library. Raises `MissingExtra`, which names the extra to install."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(library, extra) from error
