"""``engine-serve doctor``: a page, JSON and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from server_process import save_tiny_model
from test_cli import ENGINE, SERVER

from trencadis.engine.doctor import Status
from trencadis.server.cli import doctor_parser, main


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("doctor") / "tiny"
    save_tiny_model(directory)
    return directory


def run(*arguments, **environ):
    return subprocess.run(
        [sys.executable, "-m", "trencadis.server", "doctor", *map(str, arguments)],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **environ},
    )


@pytest.mark.slow
def test_a_machine_that_is_well_has_a_page_and_json_and_exit_code_0(model, tmp_path):
    file = tmp_path / "report.json"
    only = ("--only", "python", "--only", "program prompt", "--check-limit", "300")
    done = run(model, "--device", "cpu", "--json", file, *only, VLLM_API_KEY="a-secret")
    assert done.returncode == 0, done.stderr
    assert "\npython: ok (" in f"\n{done.stderr}", "the progress"
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"engine-serve doctor: {model.name} on cpu, ")
    assert [line.split("  ")[0] for line in lines[2:-2]] == ["ok"] * 5
    assert lines[-1] == "5 ok, 0 differs, 0 failed, 0 not on this device"
    report = json.loads(file.read_text())
    checks = {check["name"]: check["status"] for check in report["checks"]}
    names = ("python", "device", "engine start", "program prompt", "program prompt with context")
    assert checks == dict.fromkeys(names, Status.OK.value)
    assert (report["schema"], report["model"], report["good"]) == (1, model.name, True)
    for private in ("a-secret", str(model), str(tmp_path)):
        assert private not in done.stdout + file.read_text()


def test_a_fault_is_exit_code_1_with_its_remedy(model):
    done = run(model, "--device", "hpu", "--only", "bridge")
    assert done.returncode == 1
    line = done.stdout.splitlines()[2]
    assert line.startswith("failed ")
    assert "habana_frameworks is not installed; install habana-torch-plugin" in line


def test_a_file_that_cannot_be_written_is_one_line_before_any_check(model, tmp_path, capsys):
    assert main(["doctor", str(model), "--json", str(tmp_path / "no" / "r.json")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("engine-serve doctor: error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_limit_that_is_none_is_refused(capsys, seconds):
    with pytest.raises(SystemExit) as exit_:
        main(["doctor", "m", "--check-limit", seconds])
    assert exit_.value.code == 2
    assert "--check-limit" in capsys.readouterr().err


def test_the_doctor_has_every_flag_of_the_engine():
    flags = {action.dest for action in doctor_parser()._actions}
    assert {"json", "only", "check_limit"} < flags
    assert set(ENGINE) - {"fp32_softmax"} <= flags, "which is a variable alone"
    assert not set(SERVER) & flags
