"""Finds a thermal policy by its name: built in, from another package, or ``module:Class``."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy
from trencadis.scheduler.validators import instance_of

POLICIES: Mapping[str, str] = {
    "none": "trencadis.scheduler.thermal.no_policy:NoThermalPolicy",
    "proportional": "trencadis.scheduler.thermal.proportional:ProportionalThermalPolicy",
    "power": "trencadis.scheduler.thermal.power_budget:PowerBudgetPolicy",
    "two_phase": "trencadis.scheduler.thermal.two_phase:TwoPhaseThermalPolicy",
}
"""The built-in policies, by name: ``module:Class``.

A policy of another package is registered there, in the entry point group `ENTRY_POINT_GROUP`.
"""

ENTRY_POINT_GROUP = "trencadis.thermal_policies"
"""The entry point group in which other packages register their policies."""


def load_thermal_policy(name: str, /, **settings: Any) -> SchedulerThermalPolicy:
    """Construct the policy ``name`` with ``settings``, which are the fields of its class.

    ``name`` is a key of `POLICIES`, the name of an entry point, or ``module:Class``. Raises
    `ConfigError`.
    """
    instance_of(str).checked("thermal policy", name)
    policy_class = _find(name)
    try:
        policy = policy_class(**settings)
    except TypeError as error:
        raise ConfigError(f"thermal policy {name!r} does not take {settings!r}: {error}") from error
    if not isinstance(policy, SchedulerThermalPolicy):
        raise ConfigError(
            f"thermal policy {name!r} is a {type(policy).__name__}: "
            "derive it from SchedulerThermalPolicy"
        )
    return policy


def _find(name: str) -> Callable[..., Any]:
    path = POLICIES.get(name, name)
    if ":" in path:
        return _import(name, lambda: pkgutil.resolve_name(path))
    from importlib.metadata import entry_points  # noqa: PLC0415  takes tens of milliseconds

    registered = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in registered:
        known = ", ".join(sorted({*POLICIES, *registered}))
        raise ConfigError(
            f"thermal policy {name!r} is unknown: use one of {known}, or module:Class"
        )
    return _import(name, registered[name].load)


def _import(name: str, load: Callable[[], Any]) -> Callable[..., Any]:
    try:
        policy_class: Callable[..., Any] = load()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"thermal policy {name!r} cannot be imported: {error}") from error
    return policy_class
