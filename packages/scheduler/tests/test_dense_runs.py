"""Dense random runs: no law of a step, of tokens, of bypasses or of liveness is broken."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from dense_runs import SOAK_RUNS, DenseRun, Parameters, run_all, run_in_processes

RUNS = 400


def test_dense_random_runs_break_no_law() -> None:
    report = run_all(range(RUNS))
    assert not report.failures, report.failures[0]
    # Runs without shortage would show nothing.
    assert report.counts["runs with preemptions"] > RUNS / 4
    assert min(report.counts[name] for name in ("copies", "aborts", "finishes", "discards")) > 20


@pytest.mark.soak
def test_dense_random_runs_break_no_law_in_a_long_run() -> None:
    report = run_in_processes(0, SOAK_RUNS, os.cpu_count() or 1)
    assert not report.failures, report.failures[0]


def test_a_failure_is_repeated_by_the_command_that_it_prints() -> None:
    assert Parameters.draw(random.Random(7)) == DenseRun(7).parameters
    script = Path(__file__).parent / "dense_runs.py"
    command = [sys.executable, str(script), "--first", "7", "--runs", "1"]
    result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    run = DenseRun(7)
    run.execute()
    assert f"'steps': {run.counts['steps']}" in result.stdout
    assert "0 failed" in result.stdout
