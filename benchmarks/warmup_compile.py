"""Compiling every bucket: the first start next to the second, and the TTFT of live traffic after.

Both starts are separate processes with the same cache directory. After each start, the same mixed
load of requests runs twice: a run that compiled anything would be slower than the next run.

    python benchmarks/warmup_compile.py [--requests 200] [--model DIRECTORY]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np

from trencadis.engine import (
    AsyncEngine,
    EngineConfig,
    GenerateRequest,
    SamplingParams,
    default_model,
)

CLIENTS = 12
COMMON = tuple(range(100, 228))
"""The common prefix of some prompts, so that sequences share blocks while they decode."""

KINDS = (
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=50, seed=2, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.7, presence_penalty=0.5, seed=3, max_tokens=12, logprobs=3),
)


def main() -> None:
    arguments = _arguments()
    if arguments.start is not None:
        print(json.dumps(asyncio.run(_start(arguments))))
        return
    model = arguments.model or default_model()
    with tempfile.TemporaryDirectory() as cache:
        starts = [_child(model, cache, arguments.requests) for _ in range(2)]
    first, second = starts
    print(f"{'':24}{'first start':>14}{'second start':>14}")
    for name in first:
        print(f"{name:24}{first[name]:>14.4g}{second[name]:>14.4g}")
    ratio = second["warm-up s"] / first["warm-up s"]
    print(f"warm-up of the second start: {ratio:.3f} of the first")
    for which, start in zip(("first", "second"), starts, strict=True):
        ratio = start["p99 TTFT run 1, s"] / start["p99 TTFT run 2, s"]
        print(f"p99 TTFT of run 1 after the {which} start: {ratio:.2f} of run 2")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--start", metavar="CACHE", help=argparse.SUPPRESS)
    return parser.parse_args()


def _child(model: str, cache: str, requests: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--model", model, "--requests", str(requests)]
    output = subprocess.run(
        [*command, "--start", cache], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    result: dict[str, float] = json.loads(output.splitlines()[-1])
    return result


async def _start(arguments: argparse.Namespace) -> dict[str, float]:
    config = EngineConfig(
        model=arguments.model,
        max_model_len=1024,
        max_num_seqs=8,
        compile=True,
        compile_cache=arguments.start,
    )
    began = time.perf_counter()
    engine = await AsyncEngine.start(config)
    ready = time.perf_counter() - began
    try:
        runs = [await _run(engine, arguments.requests) for _ in range(2)]
        stats = engine.stats
        return {
            "ready after s": ready,
            "warm-up s": engine.info["warmup_seconds"],
            "buckets": stats.num_buckets,
            "compiled in traffic": stats.num_compilations,
            "cold forwards": stats.num_cold_forwards,
            **{
                f"{name} TTFT run {number}, s": value
                for number, first_tokens in enumerate(runs, 1)
                for name, value in (
                    ("p50", statistics.median(first_tokens)),
                    ("p99", float(np.percentile(first_tokens, 99))),
                )
            },
        }
    finally:
        await engine.stop()


async def _run(engine: AsyncEngine, requests: int) -> list[float]:
    """TTFT of every request, in seconds, with `CLIENTS` concurrent clients."""
    rng = np.random.default_rng(0)
    waiting = [_request(rng, number) for number in range(requests)]
    waiting.reverse()
    first_tokens: list[float] = []

    async def client() -> None:
        while waiting:
            prompt, params = waiting.pop()
            began = time.perf_counter()
            first = None
            async for _ in engine.generate(GenerateRequest(prompt, params)):
                first = first or time.perf_counter() - began
            first_tokens.append(first or time.perf_counter() - began)

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return first_tokens


def _request(rng: Any, number: int) -> tuple[tuple[int, ...], SamplingParams]:
    length = int(rng.choice((3, 20, 60, 130, 300, 700)) * rng.uniform(0.7, 1.3)) + 1
    prompt = tuple(rng.integers(100, 40_000, min(length, 900)).tolist())
    if number % 5 == 0:
        prompt = (*COMMON, *prompt[:40])
    return prompt, KINDS[number % len(KINDS)]


if __name__ == "__main__":
    main()
