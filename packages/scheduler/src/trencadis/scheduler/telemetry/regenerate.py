"""Writes the Python code of ``temperature.proto``, or checks that what is checked in is that.

``python -m trencadis.scheduler.telemetry.regenerate [--check]``, with grpcio-tools installed in
the version that the tests use: another version of protoc writes other code.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trencadis.scheduler.telemetry.source import import_extra

SIDECAR = Path(__file__).parent / "sidecar"
GENERATED = SIDECAR / "generated"
PACKAGE_PATH = "trencadis/scheduler/telemetry/sidecar/generated"
FILES = ("temperature_pb2.py", "temperature_pb2.pyi")

HEADER = "# ruff: noqa\n# fmt: off\n# mypy: ignore-errors\n"
"""Generated code answers to protoc's style, not to this project's."""


def generate(directory: Path) -> dict[str, str]:
    """The generated files by name, written below ``directory`` on the way.

    Raises `MissingExtra` without grpcio-tools, `RuntimeError` where protoc fails.
    """
    protoc = import_extra("grpc_tools.protoc", library="grpcio-tools", extra="sidecar-dev")
    status = protoc.main(
        [
            "protoc",
            f"-I{PACKAGE_PATH}={SIDECAR}",
            f"--python_out={directory}",
            f"--pyi_out={directory}",
            f"{PACKAGE_PATH}/temperature.proto",
        ]
    )
    if status != 0:
        raise RuntimeError(f"protoc failed with status {status}")
    written = directory / PACKAGE_PATH
    return {name: HEADER + (written / name).read_text(encoding="utf-8") for name in FILES}


def differing(fresh: dict[str, str]) -> list[str]:
    """The files that are not what ``fresh`` says, missing ones among them."""
    checked_in = {
        name: (GENERATED / name).read_text(encoding="utf-8")
        for name in fresh
        if (GENERATED / name).exists()
    }
    return [name for name, text in fresh.items() if checked_in.get(name) != text]


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when all is as generated (now), 1 when ``--check`` found a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, only compare")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        fresh = generate(Path(directory))
    stale = differing(fresh)
    if options.check:
        for name in stale:
            sys.stderr.write(f"{GENERATED / name} is not what protoc writes: regenerate it\n")
        return 1 if stale else 0
    for name, text in fresh.items():
        (GENERATED / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
