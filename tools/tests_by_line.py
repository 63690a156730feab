"""Which tests run a line of a package, and how long they take.

    python tools/tests_by_line.py kvcache /tmp/kvcache.json

Runs the default tests of the package once, under coverage.py, which no session installs. Tests
that fail are left out of the file, and lines that only a started process runs have no tests in it.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path

import coverage
import pytest
from mutants import ROOT


class Recorder:
    """A plugin of pytest that names the test in whose time a line runs."""

    def __init__(self, source: Path) -> None:
        self._coverage = coverage.Coverage(data_file=None, config_file=False, source=[str(source)])
        self._source = source
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid)

    def pytest_runtest_logfinish(self) -> None:
        self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def tests_of(self) -> dict[str, dict[int, list[str]]]:
        """The tests of each line of each module that passed and are not the import alone."""
        self._coverage.stop()
        data = self._coverage.get_data()
        return {
            str(Path(file).relative_to(self._source)): {
                line: tests
                for line, contexts in data.contexts_by_lineno(file).items()
                if (tests := sorted(set(contexts) - self.failed - {""}))
            }
            for file in data.measured_files()
        }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    directory = ROOT / "packages" / args.package
    recorder = Recorder(directory / "src" / "trencadis" / args.package)
    options = ["-q", "-p", "no:cacheprovider", "--no-header", f"--rootdir={ROOT}"]
    pytest.main([*options, str(directory / "tests")], plugins=[recorder])
    passed = {t: s for t, s in recorder.seconds.items() if t not in recorder.failed}
    args.output.write_text(json.dumps({"seconds": passed, "tests": recorder.tests_of()}))


if __name__ == "__main__":
    main()
