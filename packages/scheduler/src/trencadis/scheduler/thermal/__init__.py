"""Thermal policies, which cool devices by running fewer sequences, and a model to test them."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.thermal.policy import (
    GROUP_DEVICE,
    SchedulerThermalPolicy,
    SchedulerView,
    ThermalState,
)
from trencadis.scheduler.thermal.power_model import PowerModel
from trencadis.scheduler.thermal.proportional import ProportionalThermalPolicy
from trencadis.scheduler.thermal.registry import POLICIES, load_thermal_policy
from trencadis.scheduler.thermal.victims import VICTIM_ORDERS, Victim, first_victims

__all__ = [
    "BOARDS",
    "GROUP_DEVICE",
    "POLICIES",
    "VICTIM_ORDERS",
    "Board",
    "HeatModel",
    "NoThermalPolicy",
    "PhasePowerModel",
    "PowerBudgetPolicy",
    "PowerModel",
    "ProportionalThermalPolicy",
    "SchedulerThermalPolicy",
    "SchedulerView",
    "ThermalGuard",
    "ThermalState",
    "TwoPhaseThermalPolicy",
    "Victim",
    "first_victims",
    "load_thermal_policy",
]

if TYPE_CHECKING:
    from trencadis.scheduler.thermal.heat_model import BOARDS, Board, HeatModel
    from trencadis.scheduler.thermal.no_policy import NoThermalPolicy
    from trencadis.scheduler.thermal.phase_power import PhasePowerModel
    from trencadis.scheduler.thermal.power_budget import PowerBudgetPolicy
    from trencadis.scheduler.thermal.two_phase import TwoPhaseThermalPolicy
else:
    _LOADED_ON_USE = {
        "BOARDS": "heat_model",
        "Board": "heat_model",
        "HeatModel": "heat_model",
        "NoThermalPolicy": "no_policy",
        "PhasePowerModel": "phase_power",
        "PowerBudgetPolicy": "power_budget",
        "TwoPhaseThermalPolicy": "two_phase",
    }

    def __getattr__(name: str) -> Any:
        """Imports a policy on its first use: a scheduler has one at most."""
        if name not in _LOADED_ON_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_LOADED_ON_USE[name]}"), name)
