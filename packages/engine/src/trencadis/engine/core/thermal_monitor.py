"""Reads device temperatures in the background and connects them to the thermal policy."""

from __future__ import annotations

from trencadis.engine.config import EngineConfig
from trencadis.engine.errors import ConfigError
from trencadis.engine.outputs import SensorHealth, ThermalStats
from trencadis.scheduler import SchedulerError, ThermalGuard
from trencadis.scheduler.telemetry import Health, TemperatureReader, open_source
from trencadis.scheduler.thermal import SchedulerThermalPolicy, load_thermal_policy

_HEALTH: dict[Health, SensorHealth] = {
    Health.FRESH: "fresh",
    Health.STALE: "stale",
    Health.FAILED: "failed",
}


class ThermalMonitor:
    """A background reader of temperatures, and a thermal policy that limits the running sequences.

    ``guard`` connects the policy to the scheduler and keeps its last limit when it fails; None
    without a policy.
    """

    def __init__(
        self,
        reader: TemperatureReader | None = None,
        policy: SchedulerThermalPolicy | None = None,
        name: str = "",
    ) -> None:
        self._reader = reader
        self._name = name or type(policy).__name__ if policy is not None else ""
        self.guard: ThermalGuard | None = None
        if reader is not None and policy is not None:
            self.guard = ThermalGuard(policy, reader.state)

    @classmethod
    def from_config(cls, config: EngineConfig, own_source: str | None = None) -> ThermalMonitor:
        """The source and the policy that ``config`` names.

        ``own_source`` is the device's temperature source; it is used for a policy where ``config``
        names no source. Raises `ConfigError` for an unknown source or policy, and for a policy
        without a source.
        """
        name = config.thermal_policy
        source = config.temperature_source or (own_source if name else None)
        if name and source is None:
            raise ConfigError(
                f"thermal_policy {name!r} needs temperature_source: name one, such as nvml, hlml "
                "or exporter:URL"
            )
        try:
            policy = load_thermal_policy(name, **config.thermal_policy_config) if name else None
            if source is None:
                return cls()
            reader = TemperatureReader(open_source(source))
        except SchedulerError as error:
            raise ConfigError(str(error)) from error
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
        return ThermalStats(
            hottest_c=state.hottest_c,
            power_w=state.power_w,
            sensor=_HEALTH[state.health],
            fault=policy_fault or state.fault,
            policy=self._name,
            policy_active=guard is not None and not policy_fault,
            num_policy_faults=guard.num_faults if guard is not None else 0,
            num_rejected_readings=guard.num_rejected_readings if guard is not None else 0,
        )
