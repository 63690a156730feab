"""``engine-serve --kv-tiers`` with a real engine: over the end of a core, and of the server."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, save_tiny_model

pytestmark = pytest.mark.slow

SYSTEM = list(range(3, 123))
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny_model(path)
    return path


def started(model: Path, tier: Path) -> ServerProcess:
    flags = ("--warmup", "none", "--block-size", "8", "--max-model-len", "192")
    server = ServerProcess(str(model), *flags, "--kv-tiers", f"disk:{tier}:1")
    server.url = server.wait_for(r"Serving .* at (http://\S+)", 120)[1]
    return server


def ask(url: str, last: int) -> list[int]:
    body = {"prompt": [*SYSTEM, last], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
    return answer["choices"][0]["token_ids"]


def metric(url: str, name: str) -> float:
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    (value,) = (s.value for family in families for s in family.samples if s.name == name)
    return value


def wait_for_metric(url: str, name: str, least: float) -> None:
    ends = time.monotonic() + LIMIT_S
    while metric(url, name) < least:
        assert time.monotonic() < ends, name
        time.sleep(0.1)


def test_a_server_that_was_killed_finds_its_system_prompt(model: Path, tmp_path: Path) -> None:
    stored, loaded = "trencadis:tier_stored_blocks_total", "trencadis:tier_loaded_blocks_total"
    server = started(model, tmp_path)
    try:
        expected = ask(server.url, 9)
        ask(server.url, 10)  # what a step has computed is stored after the next
        wait_for_metric(server.url, stored, 15)
        # A new core goes on with the totals, and finds on disk what the one before had.
        before = metric(server.url, stored)
        (core,) = (
            child
            for child in psutil.Process(server.process.pid).children()
            if "spawn_main" in " ".join(child.cmdline())
        )
        core.send_signal(signal.SIGKILL)
        wait_for_metric(server.url, "trencadis:core_restarts_total", 1)
        ends = time.monotonic() + LIMIT_S
        while httpx.get(f"{server.url}/health").status_code != 200:
            assert time.monotonic() < ends
            time.sleep(0.1)
        assert ask(server.url, 9) == expected
        wait_for_metric(server.url, loaded, 15)
        assert metric(server.url, stored) >= before
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(LIMIT_S)
    finally:
        server.kill()
    server = started(model, tmp_path)
    try:
        assert ask(server.url, 9) == expected
        wait_for_metric(server.url, loaded, 15)
        assert metric(server.url, "vllm:prefix_cache_hits_total") == len(SYSTEM)
        assert metric(server.url, "trencadis:tier_errors_total") == 0
    finally:
        server.kill()
