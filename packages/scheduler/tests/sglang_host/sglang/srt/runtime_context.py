"""How SGLang runs. A test sets it."""

from __future__ import annotations

from types import SimpleNamespace

PARALLEL = SimpleNamespace()
DISAGG = SimpleNamespace(disaggregation_mode="null")
SCHEDULE = SimpleNamespace(schedule_low_priority_values_first=False)


def get_parallel() -> SimpleNamespace:
    return PARALLEL


def get_disagg() -> SimpleNamespace:
    return DISAGG


def get_schedule() -> SimpleNamespace:
    return SCHEDULE
