"""Every benchmark still finds what it takes from the packages and from the others."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*.py")), ids=lambda file: file.stem)
def test_a_benchmark_is_imported(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its directory first on the path, as ``python benchmarks/NAME.py`` has it."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(str(file), run_name="imported")
