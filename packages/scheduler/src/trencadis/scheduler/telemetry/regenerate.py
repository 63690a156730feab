"""Generates the Python code of ``temperature.proto``, or checks that the stored code is current.

``python -m trencadis.scheduler.telemetry.regenerate [--check]``. It needs the version of
grpcio-tools that the tests use, because other versions of protoc generate other code.
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
"""Generated code does not follow this project's style."""


def generate(directory: Path) -> dict[str, str]:
    """The generated files by name. protoc writes them below ``directory``.

    Raises `MissingExtra` without grpcio-tools, `RuntimeError` if protoc fails.
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


def differing(generated: dict[str, str]) -> list[str]:
    """The stored files that differ from ``generated`` or are missing."""
    stored = {
        name: (GENERATED / name).read_text(encoding="utf-8")
        for name in generated
        if (GENERATED / name).exists()
    }
    return [name for name, text in generated.items() if stored.get(name) != text]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 1 if ``--check`` found a difference, otherwise 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, write nothing")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        generated = generate(Path(directory))
    stale = differing(generated)
    if options.check:
        for name in stale:
            sys.stderr.write(f"{GENERATED / name} differs from protoc's output: regenerate it\n")
        return 1 if stale else 0
    for name, text in generated.items():
        (GENERATED / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
