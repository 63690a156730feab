"""Opens a temperature source from a line of text, as in a setting or on a command line."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry.source import TemperatureSource
from trencadis.scheduler.validators import instance_of

SOURCES: Mapping[str, str] = {
    "nvml": "trencadis.scheduler.telemetry.nvml:NvmlSource.from_argument",
    "hlml": "trencadis.scheduler.telemetry.hlml:HlmlSource.from_argument",
    "sensors": "trencadis.scheduler.telemetry.sensors:HostSensorSource.from_argument",
    "exporter": "trencadis.scheduler.telemetry.exporter:ExporterSource.from_argument",
    "recorded": "trencadis.scheduler.telemetry.recorded:RecordedSource",
    "sidecar": "trencadis.scheduler.telemetry.sidecar.client:SidecarSource.from_argument",
}
"""The built-in sources, by kind: ``module:callable``.

The callable takes the text after the colon of a setting (empty without a colon) and returns the
source. To add a source, write a module with a subclass of `TemperatureSource` and add a line here,
with a test, a row in the table of `docs/scheduler/telemetry.md` and a line in the changelog. A
source of another package needs no registration: pass it to `TemperatureReader`.
"""


def open_source(spec: str) -> TemperatureSource:
    """Open the source ``kind`` or ``kind:argument``. The kinds are the keys of `SOURCES`.

    Examples: ``nvml``, ``hlml:hottest``, ``sensors:coretemp,k10temp``,
    ``exporter:http://localhost:9400/metrics``, ``recorded:day.csv``, ``sidecar:node7:50061``. An
    exporter and a sidecar have options, as in ``sidecar:node7:50061#authority=ca.pem``: see their
    ``from_argument``.

    Raises `ConfigError` for an unknown kind or a bad argument, `MissingExtra` for a missing
    library.
    """
    instance_of(str).checked("temperature source", spec)
    kind, _, argument = spec.partition(":")
    if kind not in SOURCES:
        raise ConfigError(
            f"temperature source {spec!r} is unknown: use one of {', '.join(SOURCES)}"
        )
    source: TemperatureSource = pkgutil.resolve_name(SOURCES[kind])(argument)
    return source
