"""On a Gaudi the PyTorch of Intel's image is kept, or installing is refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gaudi_constraints import NoGaudiSoftwareError, gaudi_constraints

ROOT = Path(__file__).parent.parent
PINS = "# why\nattrs==26.1.0\nnumpy==2.4.6; python_version >= '3.11'\ntorch==2.13.0\nzmq_x==1\n"
IMAGE = {"habana-torch-plugin": "1.24.0.460", "torch": "2.10.0+hpu_1.24.0-460", "numpy": "1.26.4"}


def test_the_torch_that_is_there_is_pinned_and_the_rest_of_the_image_left_alone() -> None:
    lines = gaudi_constraints(PINS, IMAGE).splitlines()
    assert lines == ["torch==2.10.0+hpu_1.24.0-460", "# why", "attrs==26.1.0", "zmq_x==1"]
    assert "zmq_x==1" not in gaudi_constraints(PINS, {**IMAGE, "zmq-x": "2"})


@pytest.mark.parametrize("missing", ["habana-torch-plugin", "torch"])
def test_without_a_torch_for_gaudi_the_reason_is_given(missing: str) -> None:
    installed = {name: version for name, version in IMAGE.items() if name != missing}
    with pytest.raises(NoGaudiSoftwareError, match="Intel's image"):
        gaudi_constraints(PINS, installed)


def test_too_old_a_torch_is_not_replaced() -> None:
    with pytest.raises(NoGaudiSoftwareError, match=r"2\.6\.0 is older than 2\.7.*not replaced"):
        gaudi_constraints(PINS, {**IMAGE, "torch": "2.6.0"})


def test_the_oldest_torch_is_that_of_the_engine() -> None:
    from gaudi_constraints import OLDEST_TORCH

    required = (ROOT / "packages/engine/pyproject.toml").read_text()
    found = re.search(r'"torch>=(\d+)\.(\d+)"', required)
    assert found is not None
    assert tuple(map(int, found.groups())) == OLDEST_TORCH


def test_the_dockerfile_installs_every_package_and_no_torch() -> None:
    dockerfile = (ROOT / "deploy/Dockerfile.gaudi").read_text()
    for package in sorted(path.name for path in (ROOT / "packages").iterdir()):
        assert f"-e packages/{package}" in dockerfile, package
    assert "tools/gaudi_constraints.py" in dockerfile
    assert not re.search(r"install[^\n]* torch\b", dockerfile)
