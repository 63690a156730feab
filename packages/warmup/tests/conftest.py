"""A simulated device for capture."""

from __future__ import annotations

import pytest

from trencadis.warmup.testing import GraphDevice


@pytest.fixture(scope="session")
def graph_device() -> type[GraphDevice]:
    return GraphDevice
