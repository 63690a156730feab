"""What an administrator reaches on a server process: health, restarts, and where they end.

One server serves all tests, in their order. It has a tiny model with random weights.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("trustme")

import trustme
from server_process import SlowedServer, core_of, save_tiny_model, session_members, wait_until

# A server in a process of its own, with its core, starts in ten seconds.
pytestmark = pytest.mark.slow

START_SECONDS = 600
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8"),
    *("--block-size", "8", "--num-gpu-blocks-override", "1600", "--warmup", "none"),
)
RESTARTS = 2
LONG = 900
"""Output tokens of requests that run for a second or more, and for minutes in slow steps."""

HANG_SECONDS = 6
"""Silence after which the core counts as hung: more than it has on a busy machine."""


TOKEN = "over-temperature"  # noqa: S105
ADMIN = {"Authorization": f"Bearer {TOKEN}"}
SEED_CURL = """curl -X POST https://vllm-0:8000/v1/admin/batch \\
  -H "Authorization: Bearer $VLLM_ADMIN_TOKEN" \\
  -d '{"target_temp_c": 80.0, "policy": "largest_kv"}'"""
"""The call of seed 003, section 4, as printed."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an authority, and the certificate and key of the server."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "authority.pem")
    issued = authority.issue_cert("vllm-0", "127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(directory / "server.pem")
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, certificates: Path) -> Iterator[SlowedServer]:
    directory = tmp_path_factory.mktemp("server")
    heat = directory / "heat.csv"
    lines = [f"{second},0,{91 + second % 2 / 10},600" for second in range(3600)]
    heat.write_text("\n".join(["time_s,device,temperature_c,power_w", *lines]))
    server = SlowedServer(
        directory,
        *(str(save_tiny_model(directory / "model", 2048)), *FLAGS),
        *("--enable-admin-api", "--enable-chunked-prefill", "--admin-rate-limit", "20"),
        *("--temperature-source", f"recorded:{heat}", "--swap-space", "0.1"),
        *("--ssl-certfile", str(certificates / "server.pem")),
        *("--engine-restarts", str(RESTARTS), "--hang-timeout", str(HANG_SECONDS)),
        environ={"VLLM_ADMIN_TOKEN": TOKEN},
    )
    try:
        server.url = server.wait_for(r" at (https://\S+) ", START_SECONDS)[1]
        yield server
    finally:
        server.kill()


@pytest.fixture
def http(server: SlowedServer, certificates: Path) -> Iterator[httpx.Client]:
    context = ssl.create_default_context(cafile=certificates / "authority.pem")
    with httpx.Client(base_url=server.url, timeout=120, verify=context) as http:
        yield http


def complete(http: httpx.Client, max_tokens: int = 8) -> httpx.Response:
    body = {"prompt": "a b c", "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return http.post("/v1/completions", json=body)


def complete_eight(http: httpx.Client) -> list[str]:
    """The answers to eight requests, which run at once for a second or more."""
    body = {"prompt": ["a b c"] * 8, "temperature": 0, "max_tokens": LONG, "ignore_eos": True}
    response = http.post("/v1/completions", json=body, timeout=600)
    return [choice["text"] for choice in response.json()["choices"]]


def metric(http: httpx.Client, name: str) -> float:
    """The value of a metric; NaN before there is one."""
    text = http.get("/metrics").text
    found = re.search(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.MULTILINE)
    return math.nan if found is None else float(found[1])


def statuses(http: httpx.Client) -> dict[str, int]:
    return {path: http.get(path).status_code for path in ("/health", "/ready", "/live")}


def order(http: httpx.Client, **fields: object) -> dict[str, Any]:
    response = http.post("/v1/admin/batch", json=fields, headers=ADMIN)
    assert response.status_code == 200, response.text
    return response.json()


def state(http: httpx.Client) -> dict[str, Any]:
    """What the server tells operators: as old as the metrics."""
    return http.get("/v1/admin/state", headers=ADMIN).json()


def wait_until_running(http: httpx.Client, num_seqs: int) -> None:
    """Ask the engine itself: the metrics are a tenth of a second old."""
    for _ in range(600):
        if order(http, dry_run=True)["previous_running"] == num_seqs:
            return
        time.sleep(0.1)
    pytest.fail(f"{num_seqs} sequences never ran at once")


def test_evicted_requests_stay_away_although_max_num_seqs_has_a_place_for_them(
    server: SlowedServer, http: httpx.Client
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with server.slow_steps():
            running = pool.submit(complete_eight, http)
            wait_until_running(http, 8)
            dry = order(http, force_evict=4, max_num_seqs=8, dry_run=True)
            answer = order(http, force_evict=4, max_num_seqs=8)
            assert answer["new_running"] == dry["new_running"] == 4
            assert order(http, dry_run=True)["previous_running"] == 4
        assert len(set(running.result())) == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_call_of_the_seed_cools_a_server_without_a_policy(
    server: SlowedServer, http: httpx.Client, certificates: Path
) -> None:
    """Byte for byte; a file of curl's settings says where vllm-0 is and who signs for it."""
    (certificates / ".curlrc").write_text(
        f'connect-to = "vllm-0:8000:127.0.0.1:{server.url.rpartition(":")[2]}"\n'
        f'cacert = "{certificates / "authority.pem"}"\nsilent\nmax-time = 120\n'
    )
    environ = {**os.environ, "CURL_HOME": str(certificates), "VLLM_ADMIN_TOKEN": TOKEN}
    expected = complete(http, LONG).json()["choices"][0]["text"]
    wait_until(lambda: metric(http, "trencadis:temperature_celsius") > 90)
    with ThreadPoolExecutor(1) as pool:
        with server.slow_steps():
            running = pool.submit(complete_eight, http)
            wait_until_running(http, 8)
            dry = order(http, target_temp_c=80.0, policy="largest_kv", dry_run=True)
            done = subprocess.run(
                ["/bin/sh", "-c", SEED_CURL],
                env=environ,
                capture_output=True,
                text=True,
                check=True,
            )
            answer = json.loads(done.stdout)
            assert (answer["previous_running"], answer["new_running"]) == (8, 1)
            assert (dry["new_running"], len(dry["evicted_request_ids"])) == (1, 7)
            assert len(answer["evicted_request_ids"]) == 7
            assert answer["estimated_watts_saved"] > 0
            assert answer["new_max_num_seqs"] == 8
            assert order(http, dry_run=True)["previous_running"] == 1
            wait_until(lambda: state(http)["stats"]["thermal"]["policy"] == "control loop")
            assert state(http)["stats"]["thermal"]["target_temp_c"] == 80.0
            assert state(http)["num_active_requests"] == 8
            assert metric(http, "trencadis:thermal_policy_active") == 1
            order(http, target_temp_c=94.0)
        assert running.result() == [expected] * 8
    key = hashlib.sha256(TOKEN.encode()).hexdigest()[:8]

    def audited() -> list[str]:
        lines = [line for line in server.output if "POST" in line and "largest_kv" in line]
        return [line for line in lines if "dry" not in line]

    wait_until(audited)  # a line is written after the answer
    (line,) = audited()
    assert re.search(
        rf"trencadis.server.admin\] client 127.0.0.1:\d+, key {key}: "
        r'POST "/v1/admin/batch" ".*80.0.*largest_kv.*" -> 200 ".*new_running.*"',
        line,
    )
    assert TOKEN not in "".join(server.output)


def test_only_the_token_is_accepted_and_a_burst_is_refused(http: httpx.Client) -> None:
    for headers in ({}, {"Authorization": "Bearer over-temperaturf"}):
        assert http.post("/v1/admin/batch", json={}, headers=headers).status_code == 401
    refused: list[httpx.Response] = []
    with ThreadPoolExecutor(10) as pool:
        for _ in range(50):  # bursts, until one is faster than the limit
            calls = [
                pool.submit(http.post, "/v1/admin/batch", json={"dry_run": True}, headers=ADMIN)
                for _ in range(100)
            ]
            responses = [call.result() for call in calls]
            assert {response.status_code for response in responses} <= {200, 429}
            refused = [response for response in responses if response.status_code == 429]
            if refused:
                break
    assert 0 < len(refused) < 100
    assert refused[0].headers["retry-after"] == "1"
    assert http.get("/health").status_code == 200


def test_a_hung_core_is_seen_and_heals(server: SlowedServer, http: httpx.Client) -> None:
    before = complete(http).json()["choices"]
    assert statuses(http) == {"/health": 200, "/ready": 200, "/live": 200}
    core = core_of(server)
    os.kill(core, signal.SIGSTOP)
    try:
        wait_until(lambda: http.get("/health").status_code == 503)
        assert statuses(http) == {"/health": 503, "/ready": 503, "/live": 503}
        error = http.get("/health").json()["error"]
        assert error["code"] == "engine_unresponsive"
        # The second as soon as it has been stopped for as long.
        pattern = rf"hangs: no message for \d+ s, more than {HANG_SECONDS} s|stopped for \d+ s"
        assert re.search(pattern, error["message"])
        assert complete(http).json()["error"]["code"] == "engine_unresponsive"
    finally:
        os.kill(core, signal.SIGCONT)
    wait_until(lambda: http.get("/health").status_code == 200)
    assert complete(http).json()["choices"] == before


def test_a_core_that_dies_is_restarted_and_answers_are_right_again(
    server: SlowedServer, http: httpx.Client
) -> None:
    before = complete(http).json()["choices"]
    for number in range(1, RESTARTS + 1):
        with ThreadPoolExecutor(4) as pool, server.slow_steps():
            lost = [pool.submit(complete, http, 240) for _ in range(4)]
            wait_until_running(http, 4)
            os.kill(core_of(server), signal.SIGKILL)
            answers = [future.result(timeout=60) for future in lost]
        for answer in answers:
            assert answer.status_code == 503
            error = answer.json()["error"]
            assert error["code"] == "engine_restarting"
            assert "exit code -9: this request is lost" in error["message"]
            assert answer.headers["retry-after"] == "1"
        assert statuses(http) == {"/health": 503, "/ready": 503, "/live": 200}
        wait_until(lambda: http.get("/health").status_code == 200, START_SECONDS)
        assert complete(http).json()["choices"] == before
        assert metric(http, "trencadis:core_restarts_total") == number


def test_after_the_last_restart_the_process_ends_with_an_error(
    server: SlowedServer, http: httpx.Client
) -> None:
    # Other tests of this module may have run in another process, with a server of their own.
    def has_restarted(number: int) -> bool:
        num_restarts = metric(http, "trencadis:core_restarts_total")
        return num_restarts == number and http.get("/health").status_code == 200

    for number in range(int(metric(http, "trencadis:core_restarts_total")), RESTARTS):
        os.kill(core_of(server), signal.SIGKILL)
        wait_until(partial(has_restarted, number + 1), START_SECONDS)
    os.kill(core_of(server), signal.SIGKILL)
    assert server.process.wait(120) == 1
    server.wait_for("engine-serve: error: the engine core ended with exit code -9", 60)
    wait_until(lambda: session_members(server.process.pid) == [])
