"""A source from one line of text, as a flag or a setting gives it."""

from __future__ import annotations

from collections.abc import Callable

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry.source import Sensor, TemperatureSource


def open_source(spec: str) -> TemperatureSource:
    """The source that ``spec`` names: its kind, and after a colon what it needs.

    ``nvml``, ``nvml:memory``, ``hlml``, ``hlml:hottest``, ``sensors``,
    ``sensors:coretemp,k10temp``, ``exporter:http://localhost:9400/metrics``, ``recorded:day.csv``,
    ``sidecar:node7:50061``.
    A sidecar behind TLS and an exporter with odd labels take more than a line: make a
    `SidecarSource` or an `ExporterSource`.
    Raises `ConfigError` for a spec that names nothing, `MissingExtra` for a missing library.
    """
    kind, _, argument = spec.partition(":")
    opener = _OPENERS.get(kind)
    if opener is None:
        raise ConfigError(f"temperature source {spec!r} is unknown: use one of {_KINDS}")
    return opener(argument)


def _nvml(argument: str) -> TemperatureSource:
    from trencadis.scheduler.telemetry.nvml import NvmlSource  # noqa: PLC0415  only if asked for

    return NvmlSource(_sensor("nvml", argument))


def _hlml(argument: str) -> TemperatureSource:
    from trencadis.scheduler.telemetry.hlml import HlmlSource  # noqa: PLC0415

    return HlmlSource(_sensor("hlml", argument))


def _sensors(argument: str) -> TemperatureSource:
    from trencadis.scheduler.telemetry.sensors import HostSensorSource  # noqa: PLC0415

    return HostSensorSource(tuple(chip for chip in argument.split(",") if chip))


def _exporter(argument: str) -> TemperatureSource:
    from trencadis.scheduler.telemetry.exporter import ExporterSource  # noqa: PLC0415

    return ExporterSource(argument)


def _recorded(argument: str) -> TemperatureSource:
    from trencadis.scheduler.telemetry.recorded import RecordedSource  # noqa: PLC0415

    return RecordedSource(argument)


def _sidecar(argument: str) -> TemperatureSource:
    from trencadis.scheduler.telemetry.sidecar.client import SidecarSource  # noqa: PLC0415

    return SidecarSource(argument)


def _sensor(kind: str, argument: str) -> Sensor:
    try:
        return Sensor(argument or "chip")
    except ValueError:
        names = ", ".join(sensor.value for sensor in Sensor)
        raise ConfigError(
            f"temperature source {kind}:{argument} names no sensor: use one of {names}"
        ) from None


_OPENERS: dict[str, Callable[[str], TemperatureSource]] = {
    "nvml": _nvml,
    "hlml": _hlml,
    "sensors": _sensors,
    "exporter": _exporter,
    "recorded": _recorded,
    "sidecar": _sidecar,
}
_KINDS = ", ".join(_OPENERS)
