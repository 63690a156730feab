"""Thermal policies, which cool devices by running fewer sequences, and a model to test them."""

from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.thermal.heat_model import BOARDS, Board, HeatModel
from trencadis.scheduler.thermal.no_policy import NoThermalPolicy
from trencadis.scheduler.thermal.phase_power import PhasePowerModel
from trencadis.scheduler.thermal.policy import (
    GROUP_DEVICE,
    SchedulerThermalPolicy,
    SchedulerView,
    ThermalState,
)
from trencadis.scheduler.thermal.power_budget import PowerBudgetPolicy
from trencadis.scheduler.thermal.power_model import PowerModel
from trencadis.scheduler.thermal.proportional import ProportionalThermalPolicy
from trencadis.scheduler.thermal.registry import POLICIES, load_thermal_policy
from trencadis.scheduler.thermal.two_phase import TwoPhaseThermalPolicy
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
