"""The errors of telemetry. In a running engine they become states, never exceptions in a step."""

from __future__ import annotations

from trencadis.scheduler.errors import SchedulerError


class TelemetryError(SchedulerError):
    """Base of every error that telemetry raises."""


class SensorError(TelemetryError):
    """A source has no readings now: the driver, the endpoint or the device does not answer."""


class MissingExtra(TelemetryError, ImportError):
    """A source needs a library that is not installed."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(
            f"{library} is not installed: pip install 'trencadis-scheduler[{extra}]'",
            name=library,
        )


class BadRecording(TelemetryError, ValueError):
    """A line of a recorded file is not a reading."""
