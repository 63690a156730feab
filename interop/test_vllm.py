"""vLLM under our limits: the tokens of each request, the limit in each step, the added time.

``nox -s interop`` runs it in an environment with vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

HERE = Path(__file__).parent
MODEL = os.environ.get("INTEROP_MODEL", "")
NUM_REQUESTS = int(os.environ.get("INTEROP_REQUESTS", "200"))
MOST_ADDED = 0.03
"""Of the time of a step."""

Result = dict[str, Any]


def run(program: str, *arguments: str) -> None:
    environ = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(HERE / program), MODEL, *arguments]
    subprocess.run(command, check=True, timeout=1500, env={**os.environ, **environ})


@pytest.fixture(scope="module", params=["async", "sync"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same requests, served with vLLM's own scheduler and with ours."""
    results = []
    for kind in ("plain", "thermal"):
        output = tmp_path_factory.mktemp(kind) / "result.json"
        run("vllm_run.py", str(output), kind, request.param, str(NUM_REQUESTS))
        results.append(json.loads(output.read_text(encoding="utf-8")))
    assert {result["steps_in_flight"] for result in results} == {
        2 if request.param == "async" else 1
    }
    return results


def test_every_request_has_the_tokens_that_vllm_gives_it(served: tuple[Result, Result]) -> None:
    plain, thermal = served
    assert len(plain["tokens"]) == NUM_REQUESTS
    assert thermal["tokens"] == plain["tokens"]


def test_no_step_runs_more_than_the_limit(served: tuple[Result, Result]) -> None:
    steps = [step for step in served[1]["steps"] if "limit" in step]
    assert all(step["running"] <= step["limit"] for step in steps)
    limits = [step["limit"] for step in steps]
    assert min(limits) < 8 < max(limits), "the heat was meant to change the limit"
    assert any("preempted" in step for step in served[1]["steps"])


def test_an_order_is_carried_out_and_answered(served: tuple[Result, Result]) -> None:
    order = served[1]["order"]
    assert order["previous_running"] - order["new_running"] == len(order["evicted_request_ids"])
    assert len(order["evicted_request_ids"]) >= 3, "more where the limit fell in the same step"


def test_a_step_takes_little_longer(served: tuple[Result, Result]) -> None:
    """The time of our part, relative to all time between the first step and the last one."""
    steps = [step for step in served[1]["steps"] if "limit" in step]
    ours_s = sum(step["ours_s"] for step in steps)
    share = ours_s / (steps[-1]["began"] - steps[0]["began"])
    print(
        f"\nvLLM {served[1]['vllm']}, {served[1]['scheduler'][2]}: {len(steps)} steps, "
        f"{1e6 * ours_s / len(steps):.0f} us each, {100 * share:.2f} % of their time; "
        f"{served[1]['seconds']:.0f} s under heat, {served[0]['seconds']:.0f} s without"
    )
    assert share <= MOST_ADDED


def test_a_client_of_vllms_core_sends_orders_though_nothing_runs(tmp_path: Path) -> None:
    output = tmp_path / "answers.json"
    run("vllm_orders.py", str(output))
    answers = json.loads(output.read_text(encoding="utf-8"))
    assert answers["idle"]["new_max_num_seqs"] == 2
    assert answers["idle"]["previous_running"] == 0
    assert "max_num_seqs 99 is above the 16 sequences" in answers["refused"]
    assert answers["num_tokens"] == [8] * 4
