"""Leaves out the tests that are marked slow, soak or gaudi, unless ``-m`` names the marker.

Slow ones that tests/long_tests.txt lists by the beginnings of their ids are marked long.

Hypothesis has no deadline for an example, and no limit of the time in which it draws them: a busy
machine would fail tests that are right.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

LEFT_OUT = {"slow", "soak", "gaudi"}
LONG = tuple((Path(__file__).parent / "tests/long_tests.txt").read_text("utf-8").splitlines())


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("slow") is not None and item.nodeid.startswith(LONG):
        item.add_marker("long")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = LEFT_OUT.difference(re.findall(r"\w+", config.option.markexpr))
    deselected = [item for item in items if any(map(item.get_closest_marker, left_out))]
    if deselected:
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=deselected)
