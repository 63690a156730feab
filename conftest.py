"""Leaves out the tests that are marked slow, soak or gaudi, unless ``-m`` names the marker.

Hypothesis has no deadline for an example, and no limit of the time in which it draws them: a busy
machine would fail tests that are right.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

LEFT_OUT = {"slow", "soak", "gaudi"}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = LEFT_OUT.difference(re.findall(r"\w+", config.option.markexpr))
    deselected = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if deselected:
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=deselected)
