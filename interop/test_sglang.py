"""SGLang under our limits: the tokens of each request, the limit in each step, the added time.

``nox -s "interop(sglang)"`` runs it in an environment with SGLang.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed", allow_module_level=True)

HERE = Path(__file__).parent
MODEL = os.environ.get("INTEROP_MODEL", "")
NUM_REQUESTS = int(os.environ.get("INTEROP_REQUESTS", "60"))
MOST_ADDED = 0.03
"""Of the time of a step."""

Result = dict[str, Any]


def run(output: Path, kind: str, scheduling: str, settings: str | None = None) -> str:
    program = [sys.executable, str(HERE / "sglang_run.py"), MODEL, str(output)]
    site = os.pathsep.join([str(HERE / "sglang_site"), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": site}
    if settings is not None:
        environ["TRENCADIS_SGLANG"] = settings
    done = subprocess.run(
        [*program, kind, scheduling, str(NUM_REQUESTS)],
        check=False,
        timeout=1500,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 or settings is not None, done.stderr[-3000:]
    return done.stderr


@pytest.fixture(scope="module", params=["overlap", "normal"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same requests, served with SGLang's own scheduler and with ours."""
    results = []
    for kind in ("plain", "thermal"):
        output = tmp_path_factory.mktemp(kind) / "result.json"
        run(output, kind, request.param)
        results.append(json.loads(output.read_text(encoding="utf-8")))
    return results


def test_every_request_has_the_tokens_that_sglang_gives_it(served: tuple[Result, Result]) -> None:
    plain, thermal = served
    assert len(plain["tokens"]) == NUM_REQUESTS
    assert thermal["tokens"] == plain["tokens"]
    assert not plain["steps"], "without settings its own scheduler runs"


def test_no_step_runs_more_than_the_limit(served: tuple[Result, Result]) -> None:
    steps = served[1]["steps"]
    assert all(step["running"] <= step["limit"] for step in steps)
    limits = [step["limit"] for step in steps]
    assert min(limits) < 8 < max(limits), "the heat was meant to change the limit"
    assert served[1]["retractions"] > served[0]["retractions"] == 0


def test_an_order_is_carried_out(served: tuple[Result, Result]) -> None:
    order = served[1]["order"]
    assert order["evicted"] >= min(3, order["of"]) > 0, "more where the limit fell at once"


def test_a_step_takes_little_longer(served: tuple[Result, Result]) -> None:
    """The time of our part, relative to all time between the first step and the last one."""
    steps = served[1]["steps"]
    ours_s = sum(step["ours_s"] for step in steps)
    share = ours_s / (steps[-1]["at_s"] - steps[0]["at_s"])
    print(
        f"\nSGLang {served[1]['sglang']}: {len(steps)} steps, {1e6 * ours_s / len(steps):.0f} us "
        f"each, {100 * share:.2f} % of their time; {served[1]['seconds']:.0f} s under heat, "
        f"{served[0]['seconds']:.0f} s without"
    )
    assert share <= MOST_ADDED


def test_wrong_settings_end_the_start(tmp_path: Path) -> None:
    errors = run(tmp_path / "result.json", "wrong", "normal", '{"temperature": "nvml"}')
    assert "TRENCADIS_SGLANG has {'temperature': 'nvml'}: give an object with" in errors
    assert not (tmp_path / "result.json").exists()
