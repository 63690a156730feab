"""Hypothesis profiles: what runs by default is short; `-m soak` runs the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak: minutes rather than seconds; run with -m soak")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "soak" in config.option.markexpr:
        return
    skip = pytest.mark.skip(reason="runs for minutes: pytest -m soak")
    for item in items:
        if "soak" in item.keywords:
            item.add_marker(skip)
