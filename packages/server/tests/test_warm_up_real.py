"""Buckets, warm-up and graphs of ``engine-serve``, each setting by its flag or variable.

A tiny model with random weights; one of the servers runs on the stand-in for a Gaudi.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, save_tiny_model

from trencadis.bucketing import TrafficRecorder

pytestmark = pytest.mark.slow

STANDIN = Path(__file__).parents[2] / "engine" / "tests" / "habana_standin"
START_SECONDS = 600
FLAGS = (
    *("--dtype", "float32", "--max-model-len", "64", "--max-num-seqs", "2"),
    *("--max-num-batched-tokens", "32", "--block-size", "8"),
)
PROMPT = list(range(40, 80))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("model"), 64))


@contextmanager
def serving(model: str, *flags: str, environ: Mapping[str, str] | None = None) -> Any:
    """A server that is ready, and a client of it; the log is complete when it has ended."""
    server = ServerProcess(model, *FLAGS, *flags, environ=environ)
    try:
        url = server.wait_for(r" at (http://\S+) ", START_SECONDS)[1]
        with httpx.Client(base_url=url, timeout=300) as http:
            yield server, http
        assert server.end() == 0
    finally:
        server.kill()


def complete(http: httpx.Client, prompt: list[Any], **params: object) -> str:
    body = {"model": http.get("/v1/models").json()["data"][0]["id"], "prompt": prompt}
    body |= {"max_tokens": 4, "temperature": 0, **params}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def cached_tokens(http: httpx.Client, prompt: list[int]) -> int:
    """Prefix hits of a prompt that was served before."""
    body = {"model": http.get("/v1/models").json()["data"][0]["id"], "prompt": prompt}
    usage = http.post("/v1/completions", json={**body, "max_tokens": 1}).json()["usage"]
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


def metric(http: httpx.Client, name: str) -> float:
    (line,) = re.findall(
        rf"^{name}(?:_total)?{{.*}} (\S+)$", http.get("/metrics").text, re.MULTILINE
    )
    return float(line)


def in_order(log: str, *patterns: str) -> None:
    """Each pattern is in the log, after the one before it."""
    place = 0
    for pattern in patterns:
        found = re.compile(pattern).search(log, place)
        assert found, f"not in the log, or too early: {pattern}\n{log}"
        place = found.end()


def test_the_prompts_of_one_request_are_prefilled_in_one_batch(model: str, tmp_path: Path) -> None:
    """As the page on bucketing of vllm-gaudi has it: three prompts are one batch of three."""
    traffic = str(tmp_path / "t.json")
    flags = ("--bucketing", "seq", "--record-traffic", traffic, "--warmup", "none")
    sizes = ("--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--device", "cpu")
    with serving(model, *flags, *sizes) as (_, http):
        for first in range(0, 210, 30):
            prompts = [[first + number, *PROMPT] for number in range(3)]
            complete(http, prompts)
    shapes, counts = TrafficRecorder.load(traffic).shapes()
    assert (shapes.tolist(), counts.tolist()) == ([[3, 41]], [7])


def test_a_server_that_pads_nothing_records_and_learns_nothing(model: str, tmp_path: Path) -> None:
    learn = (
        "--device",
        "cpu",
        "--bucketing",
        "learn",
        "--record-traffic",
        str(tmp_path / "t.json"),
    )
    with serving(model, *learn) as (first, http):
        answers = {complete(http, PROMPT[:length]) for length in (20, 40)}
        for _ in range(40):
            complete(http, PROMPT)
        assert cached_tokens(http, PROMPT) > 0
    in_order(
        "".join(first.output),
        r"Model profiling run took \S+ \w+ of device memory",
        r"# CPU blocks: \d+, # swap blocks: \d+",
        "Nothing is learned: prompts and decodes run in their own sizes on cpu",
        r"Prompt bucket config \(min, step, max_warmup\) bs:\[1, 1, 1\]",
        r"Decode bucket config \(min, step, max_warmup\) bs:\[1, 2, 2\]",
    )
    with serving(model, *learn) as (second, http):
        assert {complete(http, PROMPT[:length]) for length in (20, 40)} == answers
        assert metric(http, "trencadis:bucket_misses") == 0
    in_order(
        "".join(second.output),
        "Nothing is learned: prompts and decodes run in their own sizes on cpu",
        r"Prompt bucket config \(min, step, max_warmup\) bs:\[1, 1, 1\]",
    )


def test_variables_of_the_plugin_act_on_a_server(model: str) -> None:
    environ = {
        "VLLM_BUCKETING_STRATEGY": "exp",
        "VLLM_CONTIGUOUS_PA": "false",
        "VLLM_DECODE_SEQ_BUCKET_MAX": "64",
        "VLLM_SKIP_WARMUP": "true",
        "VLLM_DEFRAG_WITH_GRAPHS": "true",
        "VLLM_GRAPH_RESERVED_MEM": "0.4",
    }
    flags = ("--device", "cpu", "--no-enable-prefix-caching")
    with serving(model, *flags, environ=environ) as (server, http):
        assert complete(http, PROMPT) == complete(http, PROMPT)
        assert cached_tokens(http, PROMPT) == 0
    log = "".join(server.output)
    assert "from the VLLM_* bucketing settings" in log
    assert "VLLM_DECODE_SEQ_BUCKET_* are tokens of one sequence and are read as blocks" in log
    assert log.count("VLLM_DECODE_SEQ_BUCKET_*") == 1
    assert "VLLM_DEFRAG_WITH_GRAPHS" in log
    assert "VLLM_GRAPH_RESERVED_MEM=0.4 is not applied: no graphs are captured" in log
    assert "Skipping warmup" in log
    assert "[Warmup][Prompt]" not in log


ONE_BUCKET = {
    **{f"VLLM_PROMPT_BS_BUCKET_{end}": "1" for end in ("MIN", "STEP", "MAX")},
    **{f"VLLM_PROMPT_QUERY_BUCKET_{end}": "32" for end in ("MIN", "STEP", "MAX")},
    **{f"VLLM_PROMPT_CTX_BUCKET_{end}": "4" for end in ("MIN", "STEP", "MAX")},
    **{f"VLLM_DECODE_BS_BUCKET_{end}": "2" for end in ("MIN", "STEP", "MAX")},
    **{f"VLLM_DECODE_BLOCK_BUCKET_{end}": "20" for end in ("MIN", "STEP", "MAX")},
}
"""On the stand-in a program takes a second to compile."""


def test_a_gaudi_in_its_default_mode_draws_by_seed_with_and_without_warm_up(model: str) -> None:
    """Compiled programs, each of which the stand-in checks as the bridge would."""
    environ = {
        "PYTHONPATH": os.pathsep.join([str(STANDIN), os.environ.get("PYTHONPATH", "")]),
        "GAUDI_STANDIN_ENGINE_TESTS": "1",
        "PT_HPU_RECIPE_CACHE_CONFIG": ",false,1024,false",
        **ONE_BUCKET,
    }
    ways = (
        {"temperature": 0},
        {"temperature": 0.8, "seed": 3},
        {"temperature": 0.8, "seed": 4, "top_p": 0.7},
        {"temperature": 0.8, "seed": 4, "top_k": 9},
    )
    found = []
    for skipped in ("false", "true"):
        variables = {**environ, "VLLM_SKIP_WARMUP": skipped}
        flags = ("--device", "hpu", "--num-gpu-blocks-override", "20")
        with serving(model, *flags, environ=variables) as (server, http):
            found.append([complete(http, PROMPT, **way) for _ in range(2) for way in ways])
            if skipped == "false":
                assert metric(http, "trencadis:compilations") == 0
        assert "Gaudi in eager mode" in "".join(server.output)
    assert found[0] == found[1]
    assert found[0][: len(ways)] == found[0][len(ways) :]


def test_a_server_on_a_gaudi_starts_with_the_lines_of_the_seed(model: str) -> None:
    environ = {
        "PYTHONPATH": os.pathsep.join([str(STANDIN), os.environ.get("PYTHONPATH", "")]),
        "GAUDI_STANDIN_ENGINE_TESTS": "1",
        "PT_HPU_LAZY_MODE": "1",
        "PT_HPU_RECIPE_CACHE_CONFIG": ",false,1024,false",
    }
    flags = ("--device", "hpu", "--bucketing", "seq", "--on-bucket-miss", "refuse")
    with serving(model, *flags, environ=environ) as (server, http):
        assert complete(http, PROMPT) == complete(http, PROMPT)
        assert metric(http, "trencadis:compilations") == 0
    in_order(
        "".join(server.output),
        r"Prompt bucket config \(min, step, max_warmup\) bs:\[1, \d+, 2\], seq:\[8, 8, 32\]",
        r"Generated \d+ prompt buckets: \[\(1, 8\)",
        r"Decode bucket config \(min, step, max_warmup\) bs:\[1, \d+, 2\], seq:\[8, 8, 64\]",
        r"Generated \d+ decode buckets: \[\(1, 8\)",
        "Pre-loading model weights on hpu:0 took",
        "Wrapping in HPU Graph took",
        "Loading model weights took in total",
        r"Model profiling run took [1-9]",
        r"Free device memory: .* reserved for HPUGraphs \(VLLM_GRAPH_RESERVED_MEM=0.1\)",
        r"# HPU blocks: \d+, # CPU blocks: \d+",
        "Initializing cache engine took",
        r"\[Warmup\]\[Prompt\]\[1/\d+\] batch_size:2 seq_len:",
        r"\[Warmup\]\[Decode\]\[1/\d+\] batch_size:2 seq_len:64",
        r"Using .* of free device memory for HPUGraphs",
        r"\[Warmup\]\[Graph/Prompt\]\[1/\d+\]",
        r"Graph/Decode captured:\d+ \(100.0%\)",
        "Sampler warmup completed successfully",
        "Defragmenter warmup completed successfully",
        "Warmup finished in",
        "init_cache_engine took",
    )
