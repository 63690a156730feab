"""Policies that keep devices cool by running fewer sequences, and what they are tested on."""

from trencadis.scheduler.thermal.guard import ThermalGuard
from trencadis.scheduler.thermal.heat_model import BOARDS, Board, HeatModel
from trencadis.scheduler.thermal.loader import load_thermal_policy, thermal_policy_from_env
from trencadis.scheduler.thermal.off import NoThermalPolicy
from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy, SchedulerView, ThermalState
from trencadis.scheduler.thermal.power import PowerBudgetPolicy
from trencadis.scheduler.thermal.proportional import ProportionalThermalPolicy
from trencadis.scheduler.thermal.victims import VICTIM_ORDERS, first_victims
from trencadis.scheduler.thermal.watts import WattsModel

__all__ = [
    "BOARDS",
    "VICTIM_ORDERS",
    "Board",
    "HeatModel",
    "NoThermalPolicy",
    "PowerBudgetPolicy",
    "ProportionalThermalPolicy",
    "SchedulerThermalPolicy",
    "SchedulerView",
    "ThermalGuard",
    "ThermalState",
    "WattsModel",
    "first_victims",
    "load_thermal_policy",
    "thermal_policy_from_env",
]
