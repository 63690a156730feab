"""The settings of a thermal policy inside another runtime, as plain values of its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.telemetry import ReaderConfig, TemperatureReader, open_source
from trencadis.scheduler.thermal import load_thermal_policy
from trencadis.scheduler.thermal.guard import ThermalGuard

SETTINGS = ("temperature_source", "thermal_policy", "thermal_policy_config", "thermal_devices")
"""The names of ``engine-serve``'s flags, with the same meaning. Without a source there are orders
alone."""

OF_SGLANG = "TRENCADIS_SGLANG"
"""Environment: the settings inside SGLang as a JSON object, ``{}`` for orders alone. Without the
variable nothing is replaced."""


def checked_settings(where: str, settings: Any) -> Mapping[str, Any]:
    """Settings as they came. Raises `ConfigError`, naming ``where`` they are, for others."""
    if not isinstance(settings, Mapping) or set(settings) - set(SETTINGS):
        raise ConfigError(f"{where} has {settings!r}: give an object with {SETTINGS}")
    return settings


def reader_and_guard(
    settings: Mapping[str, Any],
) -> tuple[TemperatureReader, ThermalGuard] | tuple[None, None]:
    """A reader that is not started and the guard that it serves; nothing without a source.

    Raises `ConfigError`.
    """
    source, name = settings.get("temperature_source"), settings.get("thermal_policy")
    options = settings.get("thermal_policy_config")
    options = {} if options is None else options
    if not isinstance(options, Mapping):
        raise ConfigError(f"thermal_policy_config is {options!r}: give an object")
    if options and name is None:
        raise ConfigError(f"thermal_policy_config {options!r} needs thermal_policy: name one")
    if source is None:
        if settings:
            raise ConfigError(f"{settings!r} needs temperature_source: name one, such as nvml")
        return None, None
    policy = load_thermal_policy(name, **options) if name is not None else None
    devices = ReaderConfig(devices=settings.get("thermal_devices"))
    reader = TemperatureReader(open_source(source), devices)
    return reader, ThermalGuard(policy, reader.state, forget=reader.forget)
