"""Which tests run a line of a package, and how long they take.

    python tools/tests_by_line.py kvcache /tmp/kvcache.json

Runs the default tests of the package once, under coverage.py, which no session installs. Tests
that fail are left out of the file. A line that only a started process runs (a server, an engine
core, a rank) has all tests of the file that started it, since tests of a file share a server.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest
from mutants import ROOT

TEST = "TRENCADIS_RECORDED_TEST"
"""The variable by which a started process knows in whose time it was started."""

IN_EACH_PROCESS = """
import atexit, coverage, os
recorded = coverage.Coverage(
    data_file={file!r}, data_suffix=True, config_file=False, source=[{source!r}],
    context=os.environ.get({test!r}, ""),
)
recorded._warn_no_data = False
recorded.start()
def save():
    recorded.stop()
    recorded.save()
atexit.register(save)
"""
"""A module ``sitecustomize`` of the processes that tests start."""


class Recorder:
    """A plugin of pytest that names the test in whose time a line runs."""

    def __init__(self, source: Path, started: Path) -> None:
        self._coverage = coverage.Coverage(data_file=None, config_file=False, source=[str(source)])
        self._source, self._started = source, started
        self.seconds: dict[str, float] = defaultdict(float)
        self.failed: set[str] = set()
        of_process = {"file": str(started / "data"), "source": str(source), "test": TEST}
        (started / "sitecustomize.py").write_text(IN_EACH_PROCESS.format(**of_process))
        path = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join((str(started), path))
        self._coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._coverage.switch_context(nodeid)
        os.environ[TEST] = nodeid

    def pytest_runtest_logfinish(self) -> None:
        self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def tests_of(self) -> dict[str, dict[int, list[str]]]:
        """The tests of each line of each module that passed and are not the import alone."""
        self._coverage.stop()
        tests: dict[str, dict[int, set[str]]] = defaultdict(dict)
        for module, line, named in self._lines(self._coverage.get_data()):
            tests[module][line] = named
        in_process = {module: set(lines) for module, lines in tests.items()}
        of_file: dict[str, set[str]] = defaultdict(set)
        for test in self.seconds:
            of_file[test.partition("::")[0]].add(test)
        for file in sorted(self._started.glob("data.*")):
            data = coverage.CoverageData(str(file))
            try:
                data.read()
            except coverage.CoverageException as error:  # a process that was killed as it wrote
                print(f"{file.name}: {error}", file=sys.stderr)
                continue
            for module, line, named in self._lines(data):
                if line not in in_process.get(module, ()):
                    files = {test.partition("::")[0] for test in named}
                    of_line = tests[module].setdefault(line, set())
                    of_line.update(*(of_file[name] for name in files))
        return {
            module: {line: sorted(named - self.failed) for line, named in lines.items()}
            for module, lines in tests.items()
        }

    def _lines(self, data: coverage.CoverageData) -> Iterator[tuple[str, int, set[str]]]:
        """Module, line, and the tests in whose time it ran."""
        for file in data.measured_files():
            module = str(Path(file).relative_to(self._source))
            for line, contexts in data.contexts_by_lineno(file).items():
                if named := set(contexts) - {""}:
                    yield module, line, named


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package")
    parser.add_argument("output", type=Path)
    args = parser.parse_args()
    directory = ROOT / "packages" / args.package
    source = directory / "src" / "trencadis" / args.package
    with tempfile.TemporaryDirectory(prefix="lines-") as started:
        recorder = Recorder(source, Path(started))
        options = ["-q", "-p", "no:cacheprovider", "--no-header", f"--rootdir={ROOT}"]
        pytest.main([*options, str(directory / "tests")], plugins=[recorder])
        passed = {t: s for t, s in recorder.seconds.items() if t not in recorder.failed}
        args.output.write_text(json.dumps({"seconds": passed, "tests": recorder.tests_of()}))


if __name__ == "__main__":
    main()
