"""``engine-serve doctor``: a page, and JSON, on a machine, its device and a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trencadis.engine import EngineConfig
from trencadis.engine.doctor import Finding, examine


def run_doctor(
    config: EngineConfig, *, limit_s: float, only: Sequence[str], json_file: Path | None
) -> int:
    """Run the checks, print the page and write the JSON. Returns the exit code.

    Raises `OSError` for a file that cannot be written, before the first check, and the errors of
    `examine`.
    """
    if json_file is not None:
        json_file.write_text("", encoding="utf-8")
    report = examine(config, limit_s=limit_s, only=only, on_finding=_announce)
    print(report.page(), end="")
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    return 0 if report.is_good else 1


def _announce(name: str, finding: Finding) -> None:
    """A line of progress: the whole takes minutes."""
    print(f"{name}: {finding.status.value} ({finding.seconds:.1f} s)", file=sys.stderr)
