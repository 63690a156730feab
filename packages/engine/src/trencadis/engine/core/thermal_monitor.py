"""Reads device temperatures in the background and connects them to the thermal policy."""

from __future__ import annotations

import logging

from trencadis.engine.api.outputs import SensorHealth, ThermalStats
from trencadis.engine.errors import ConfigError, shown
from trencadis.engine.settings.engine_config import EngineConfig
from trencadis.scheduler import SchedulerError, ThermalGuard
from trencadis.scheduler.telemetry import Health, ReaderConfig, TemperatureReader, open_source
from trencadis.scheduler.thermal import SchedulerThermalPolicy, load_thermal_policy

logger = logging.getLogger("trencadis.engine")

NO_POLICY = "none"
"""The name that stands for no policy, as if none were named."""

CONTROL_LOOP = "control loop"
"""Name in `ThermalStats` of the policy that an order with a target temperature has started."""

_HEALTH: dict[Health, SensorHealth] = {
    Health.FRESH: "fresh",
    Health.STALE: "stale",
    Health.FAILED: "failed",
}


class ThermalMonitor:
    """A background reader of temperatures, and a thermal policy that limits the running sequences.

    ``guard`` connects the policy to the scheduler; without a policy it waits for an order with a
    target temperature. It is None without a reader.
    """

    def __init__(
        self,
        reader: TemperatureReader | None = None,
        policy: SchedulerThermalPolicy | None = None,
        name: str = "",
    ) -> None:
        self._reader = reader
        self._name = name or type(policy).__name__ if policy is not None else ""
        self.guard = None
        if reader is not None:
            self.guard = ThermalGuard(policy, reader.state, forget=reader.forget)

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        own_source: str | None = None,
        own_devices: tuple[int, ...] | None = None,
    ) -> ThermalMonitor:
        """The source and the policy that ``config`` names.

        ``own_source`` is the device's temperature source, and ``own_devices`` its devices there
        (None: all). It is used where ``config`` names no source; without a policy only if it can be
        read. Where ``config`` names no devices, those of ``own_devices`` count of that source, in
        any form such as ``hlml:hottest``, and all of another one. Raises `ConfigError` for an
        unknown source or policy, for a policy without a source, and for settings of a policy or
        devices that nothing uses.
        """
        name = None if config.thermal_policy == NO_POLICY else config.thermal_policy
        source = config.temperature_source or own_source
        if name and source is None:
            raise ConfigError(
                f"thermal_policy {name!r} needs temperature_source: name one, such as nvml, hlml "
                "or exporter:URL",
                "temperature_source",
            )
        if config.thermal_policy_config and not name:
            raise ConfigError(
                f"thermal_policy_config {shown(dict(config.thermal_policy_config))} has no policy: "
                "name one with --thermal-policy, or leave it out",
                "thermal_policy_config",
            )
        if config.thermal_devices is not None and source is None:
            raise ConfigError(
                f"thermal_devices {config.thermal_devices} have no temperature_source: name one, "
                "such as nvml, hlml or exporter:URL",
                "thermal_devices",
            )
        is_optional = not (name or config.temperature_source or config.thermal_devices)
        devices = config.thermal_devices
        if devices is None and _kind(source) == _kind(own_source):
            devices = own_devices
        try:
            policy = load_thermal_policy(name, **config.thermal_policy_config) if name else None
            if source is None or (is_optional and not _can_read(source)):
                return cls()
            reader = TemperatureReader(open_source(source), ReaderConfig(devices=devices))
        except SchedulerError as error:
            raise ConfigError(str(error)) from error
        _announce(source, devices)
        return cls(reader, policy, name or "")

    def start(self) -> None:
        """Start the background reader."""
        if self._reader is not None:
            self._reader.start()

    def stop(self) -> None:
        """Stop the background reader."""
        if self._reader is not None:
            self._reader.stop()

    @property
    def stats(self) -> ThermalStats | None:
        """The latest readings and the state of the policy; None without a temperature source."""
        if self._reader is None:
            return None
        state = self._reader.state()
        guard = self.guard
        policy_fault = guard.fault if guard is not None else ""
        runs_control_loop = guard is not None and guard.runs_control_loop
        has_policy = runs_control_loop or (guard is not None and guard.policy is not None)
        names = (self._name, CONTROL_LOOP if runs_control_loop else "")
        return ThermalStats(
            hottest_c=state.hottest_c,
            power_w=state.power_w,
            sensor=_HEALTH[state.health],
            fault=policy_fault or state.fault,
            policy=", ".join(filter(None, names)),
            policy_active=has_policy and not policy_fault,
            target_temp_c=guard.target_temp_c if guard is not None else None,
            power_budget_w=guard.power_budget_w if guard is not None else None,
            num_policy_faults=guard.num_faults if guard is not None else 0,
            num_rejected_readings=guard.num_rejected_readings if guard is not None else 0,
        )


def _kind(source: str | None) -> str | None:
    return None if source is None else source.partition(":")[0]


def _announce(source: str, devices: tuple[int, ...] | None) -> None:
    if devices is not None:
        logger.info("Temperatures of %s: of device %s", source, ", ".join(map(str, devices)))
        return
    logger.info(
        "Temperatures of %s: of every device that it shows, also where another engine uses it. "
        "--thermal-devices names this engine's",
        source,
    )


def _can_read(source: str) -> bool:
    """Whether a source that was not asked for can be read on this machine."""
    try:
        opened = open_source(source)
        try:
            return bool(opened.read())
        finally:
            opened.close()
    except SchedulerError as error:
        logger.info("No temperatures are read: %s", error)
        return False
