"""Prints constraints for pip that keep the PyTorch of an Intel Gaudi image.

``habana-torch-plugin`` works with the one build of PyTorch that it was made for, and PyPI has other
builds. So PyTorch is pinned to what is installed, and what else the image brings is not pinned at
all: pip keeps it where it is recent enough. The other versions are those of constraints.txt::

    python tools/gaudi_constraints.py > gaudi.txt
    python -m pip install -c gaudi.txt -e packages/bucketing ... -e packages/server

Exits with the reason where there is no PyTorch for Gaudi, or too old a one.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path

OLDEST_TORCH = (2, 7)
"""What ``packages/engine/pyproject.toml`` requires."""

PLUGIN = "habana-torch-plugin"
IMAGES = "https://docs.habana.ai/en/latest/Installation_Guide/Additional_Installation/Docker_Installation.html"


class NoGaudiSoftwareError(Exception):
    """There is no PyTorch for Gaudi that the packages can be installed beside."""


def gaudi_constraints(pins: str, installed: Mapping[str, str]) -> str:
    """The lines of ``pins``, a constraints file, that fit what is ``installed``.

    ``installed`` maps normalised names of distributions to versions. Raises `NoGaudiSoftwareError`,
    which says what to install.
    """
    torch = installed.get("torch")
    if PLUGIN not in installed or torch is None:
        raise NoGaudiSoftwareError(
            f"this Python has no {PLUGIN} with its PyTorch: run in Intel's image ({IMAGES}), with "
            "the Python that the image's PyTorch is installed for, not in a virtual environment"
        )
    release = tuple(int(part) for part in re.findall(r"\d+", torch)[:2])
    if release < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise NoGaudiSoftwareError(
            f"the image's PyTorch {torch} is older than {oldest}, which the engine needs. It is "
            f"not replaced, because {PLUGIN} {installed[PLUGIN]} works with no other build: take "
            "a newer image"
        )
    kept = [line for line in pins.splitlines() if _name(line) not in installed]
    return "\n".join([f"torch=={torch}", *kept, ""])


def normalised(name: str) -> str:
    """A distribution's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _name(line: str) -> str:
    found = re.match(r"[\w.-]+", line)
    return normalised(found.group()) if found else ""


def main() -> None:
    """Print the constraints for this Python."""
    installed = {normalised(found.name): found.version for found in distributions()}
    pins = (Path(__file__).parent.parent / "constraints.txt").read_text()
    try:
        sys.stdout.write(gaudi_constraints(pins, installed))
    except NoGaudiSoftwareError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
