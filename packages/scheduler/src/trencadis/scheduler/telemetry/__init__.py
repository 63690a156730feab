"""Device temperatures as a value that a thermal policy can use.

A `TemperatureSource` reads sensors. A `TemperatureReader` reads a source in the background, checks
its readings, and returns a `TemperatureState` at once, whatever the sensor does. A vendor's library
is imported only when a source that needs it is opened.
"""

from trencadis.scheduler.telemetry.config import ReaderConfig
from trencadis.scheduler.telemetry.errors import MissingExtra, SensorError, TelemetryError
from trencadis.scheduler.telemetry.hlml import HlmlSource
from trencadis.scheduler.telemetry.reader import TemperatureReader
from trencadis.scheduler.telemetry.registry import SOURCES, open_source
from trencadis.scheduler.telemetry.source import Reading, Sensor, TemperatureSource
from trencadis.scheduler.telemetry.temperature_state import (
    DeviceState,
    Health,
    TemperatureState,
)

__all__ = [
    "SOURCES",
    "DeviceState",
    "Health",
    "HlmlSource",
    "MissingExtra",
    "ReaderConfig",
    "Reading",
    "Sensor",
    "SensorError",
    "TelemetryError",
    "TemperatureReader",
    "TemperatureSource",
    "TemperatureState",
    "open_source",
]
