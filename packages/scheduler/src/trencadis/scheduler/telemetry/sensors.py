"""The host's own sensors, through psutil (``pip install 'trencadis-scheduler[sensors]'``).

For engines that run on the CPU, and for racks with a relevant inlet sensor. psutil reads
``/sys/class/hwmon`` and, failing that, ``/sys/class/thermal``:
https://psutil.readthedocs.io/en/latest/#psutil.sensors_temperatures.
"""

from __future__ import annotations

import math

from trencadis.scheduler.telemetry.errors import SensorError
from trencadis.scheduler.telemetry.source import Reading, TemperatureSource, import_extra

CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal")
"""The names of CPU sensors on Linux: Intel, AMD (two), Arm boards."""


class HostSensorSource(TemperatureSource):
    """The host as device 0, with the hottest sensor of ``chips``.

    Without ``chips``: the sensors of the CPU, or all sensors if no name is known. Raises
    `MissingExtra`.
    """

    def __init__(self, chips: tuple[str, ...] = ()) -> None:
        self._chips = chips
        self._psutil = import_extra("psutil", library="psutil", extra="sensors")

    @classmethod
    def from_argument(cls, argument: str) -> HostSensorSource:
        """The source ``sensors:argument``; the argument has the chips, separated by commas."""
        return cls(tuple(chip for chip in argument.split(",") if chip))

    @property
    def name(self) -> str:
        return "sensors"

    def read(self) -> list[Reading]:
        """One reading, for device 0. Raises `SensorError` if the host has no such sensor."""
        try:
            by_chip = self._psutil.sensors_temperatures()
        except AttributeError:
            raise SensorError("psutil reads no temperatures on this operating system") from None
        except OSError as error:
            raise SensorError(f"psutil cannot read the sensors: {error}") from error
        wanted = self._chips or CPU_CHIPS
        chosen = {chip: entries for chip, entries in by_chip.items() if chip in wanted}
        if not chosen and not self._chips:
            chosen = by_chip
        celsius = [entry.current for entries in chosen.values() for entry in entries]
        known = [value for value in celsius if value is not None and not math.isnan(value)]
        if not known:
            raise SensorError(
                f"the host has no temperature for {', '.join(wanted)}: "
                f"its sensors are {', '.join(sorted(by_chip)) or 'none'}"
            )
        return [Reading(0, float(max(known)))]
