"""What an operator reaches on a server process: health, restarts, and where they end.

One server serves all tests, in their order. It has a tiny model with random weights.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from server_process import ServerProcess, core_of, save_tiny_model, session_members, wait_until

START_SECONDS = 120
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8"),
    *("--block-size", "8", "--num-gpu-blocks-override", "400", "--warmup", "none"),
)
RESTARTS = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    model = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    server = ServerProcess(
        str(model), *FLAGS, "--engine-restarts", str(RESTARTS), "--hang-timeout", "3"
    )
    try:
        server.url = server.wait_for(r" at (http://\S+) ", START_SECONDS)[1]
        yield server
    finally:
        server.kill()


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as http:
        yield http


def complete(http: httpx.Client, max_tokens: int = 8) -> httpx.Response:
    body = {"prompt": "a b c", "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    return http.post("/v1/completions", json=body)


def metric(http: httpx.Client, name: str) -> float:
    text = http.get("/metrics").text
    return float(re.search(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.MULTILINE)[1])


def statuses(http: httpx.Client) -> dict[str, int]:
    return {path: http.get(path).status_code for path in ("/health", "/ready", "/live")}


def test_a_hung_core_is_seen_and_heals(server: ServerProcess, http: httpx.Client) -> None:
    before = complete(http).json()["choices"]
    assert statuses(http) == {"/health": 200, "/ready": 200, "/live": 200}
    core = core_of(server)
    os.kill(core, signal.SIGSTOP)
    try:
        wait_until(lambda: http.get("/health").status_code == 503)
        assert statuses(http) == {"/health": 503, "/ready": 503, "/live": 503}
        error = http.get("/health").json()["error"]
        assert error["code"] == "engine_unresponsive"
        assert re.search(r"hangs: no message for \d+ s, more than 3 s", error["message"])
        assert complete(http).json()["error"]["code"] == "engine_unresponsive"
    finally:
        os.kill(core, signal.SIGCONT)
    wait_until(lambda: http.get("/health").status_code == 200)
    assert complete(http).json()["choices"] == before


def test_a_core_that_dies_is_restarted_and_answers_are_right_again(
    server: ServerProcess, http: httpx.Client
) -> None:
    before = complete(http).json()["choices"]
    for number in range(1, RESTARTS + 1):
        with ThreadPoolExecutor(4) as pool:
            lost = [pool.submit(complete, http, 240) for _ in range(4)]
            wait_until(lambda: metric(http, "vllm:num_requests_running") > 0)
            os.kill(core_of(server), signal.SIGKILL)
            answers = [future.result(timeout=5) for future in lost]
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
    server: ServerProcess, http: httpx.Client
) -> None:
    os.kill(core_of(server), signal.SIGKILL)
    assert server.process.wait(30) == 1
    server.wait_for("engine-serve: error: the engine core ended with exit code -9", 5)
    wait_until(lambda: session_members(server.process.pid) == [])
