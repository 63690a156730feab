"""Temperatures of the devices, as a value that a thermal policy can act on.

A `TemperatureSource` reads sensors; a `TemperatureReader` reads one in the background, judges what
it says and answers `TemperatureState` at once, whatever the sensor does. No import of a vendor's
library happens before a source that needs it is opened.
"""

from trencadis.scheduler.telemetry.config import ReaderConfig
from trencadis.scheduler.telemetry.errors import MissingExtra, SensorError, TelemetryError
from trencadis.scheduler.telemetry.opening import open_source
from trencadis.scheduler.telemetry.reader import TemperatureReader
from trencadis.scheduler.telemetry.source import Reading, Sensor, TemperatureSource
from trencadis.scheduler.telemetry.state import (
    DeviceState,
    Health,
    TemperatureState,
    hottest_of_group,
)

__all__ = [
    "DeviceState",
    "Health",
    "MissingExtra",
    "ReaderConfig",
    "Reading",
    "Sensor",
    "SensorError",
    "TelemetryError",
    "TemperatureReader",
    "TemperatureSource",
    "TemperatureState",
    "hottest_of_group",
    "open_source",
]
