"""Finds a thermal policy by name: built in, of an installed package, or ``module:Class``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from trencadis.scheduler.errors import ConfigError
from trencadis.scheduler.thermal.off import NoThermalPolicy
from trencadis.scheduler.thermal.policy import SchedulerThermalPolicy
from trencadis.scheduler.thermal.power import PowerBudgetPolicy
from trencadis.scheduler.thermal.proportional import ProportionalThermalPolicy

GROUP = "trencadis.thermal_policies"
"""Entry point group in which other packages offer policies."""

VARIABLE = "VLLM_THERMAL_POLICY"

_BUILT_IN: Mapping[str, Callable[..., SchedulerThermalPolicy]] = {
    "none": NoThermalPolicy,
    "proportional": ProportionalThermalPolicy,
    "power": PowerBudgetPolicy,
}


def load_thermal_policy(name: str, **settings: Any) -> SchedulerThermalPolicy:
    """The policy called ``name``, made with ``settings``.

    Raises `ConfigError`, also where the settings do not suit the policy.
    """
    factory = _find(name)
    try:
        policy = factory(**settings)
    except TypeError as error:
        raise ConfigError(f"thermal policy {name!r} does not take {settings!r}: {error}") from error
    if not isinstance(policy, SchedulerThermalPolicy):
        raise ConfigError(
            f"thermal policy {name!r} is a {type(policy).__name__}: "
            "derive it from SchedulerThermalPolicy"
        )
    return policy


def thermal_policy_from_env(
    environ: Mapping[str, str] = os.environ, **settings: Any
) -> SchedulerThermalPolicy | None:
    """The policy that ``VLLM_THERMAL_POLICY`` names, None where it is unset or empty."""
    name = environ.get(VARIABLE, "").strip()
    return load_thermal_policy(name, **settings) if name else None


def _find(name: str) -> Callable[..., Any]:
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    if ":" in name:
        return _import(name)
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        known = ", ".join(sorted({*_BUILT_IN, *offered}))
        raise ConfigError(
            f"thermal policy {name!r} ({VARIABLE}) is not known: use one of {known}, "
            "or module:Class"
        )
    factory: Callable[..., Any] = offered[name].load()
    return factory


def _import(path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    try:
        factory: Callable[..., Any] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"thermal policy {path!r} ({VARIABLE}) cannot be imported: {error}"
        ) from error
    return factory
