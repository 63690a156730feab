"""Serves requests with SGLang on the CPU, with its own scheduler or ours; writes JSON.

    python interop/sglang_run.py MODEL OUTPUT plain|thermal|wrong overlap|normal NUM_REQUESTS

The temperature rises and falls between 72 and 86 degrees every 24 seconds, as a recording that
`trencadis.scheduler.telemetry` plays; the target is 80. An order comes while requests run.
``wrong`` takes the settings from the environment.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MAX_NUM_SEQS = 16
ORDER = {"force_evict": 3, "hold_s": 1.0, "policy": "largest_kv"}


def recording(directory: Path) -> Path:
    file = directory / "heat.csv"
    wave = (79.0 + 7.0 * math.sin(2 * math.pi * second / 24.0) for second in range(1200))
    lines = [f"{second},0,{celsius:.2f}," for second, celsius in enumerate(wave)]
    file.write_text("\n".join(["time_s,device,temperature_c,power_w", *lines]), encoding="utf-8")
    return file


def watch(directory: Path) -> None:
    """Let SGLang's processes find the plug-in `sglang_watch`, as if it were installed."""
    installed = directory / "sglang_watch-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-watch\nVersion: 0\n")
    points = "[sglang.srt.plugins]\nsglang_watch = sglang_watch:install\n"
    (installed / "entry_points.txt").write_text(points)
    sys.path.append(str(directory))  # which processes that are spawned take over


async def serve(engine: Any, num_requests: int, *, is_ordered: bool) -> list[dict[str, Any]]:
    rng = random.Random(32)
    requests = []
    for _ in range(num_requests):
        prompt = [rng.randrange(100, 40_000) for _ in range(rng.randrange(8, 96))]
        params = {"temperature": 0.0, "max_new_tokens": rng.randrange(6, 24), "ignore_eos": True}
        requests.append(engine.async_generate(input_ids=prompt, sampling_params=params))
    tasks = [asyncio.ensure_future(each) for each in requests]
    if is_ordered:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        engine.collective_rpc("batch_control", **ORDER)
    return await asyncio.gather(*tasks)


def main() -> None:
    model, output, kind, scheduling, num_requests = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        steps = directory / "steps"
        steps.touch()
        if kind == "thermal":
            watch(directory)
            os.environ["SGLANG_WATCH"] = str(steps)
            os.environ["TRENCADIS_SGLANG"] = json.dumps(
                {
                    "temperature_source": f"recorded:{recording(directory)}",
                    "thermal_policy": "proportional",
                    "thermal_policy_config": {"target_temp_c": 80.0, "dwell_s": 2.0},
                }
            )
        import sglang  # noqa: PLC0415 - its processes get the variables

        engine = sglang.Engine(
            model_path=model,
            device="cpu",
            dtype="float32",  # in bfloat16 the batch around a request changes its tokens
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            disable_overlap_schedule=scheduling == "normal",
            max_running_requests=MAX_NUM_SEQS,
            max_total_tokens=8192,
            mem_fraction_static=0.2,
            log_level="error",
        )
        began = time.perf_counter()
        answers = asyncio.get_event_loop().run_until_complete(
            serve(engine, int(num_requests), is_ordered=kind == "thermal")
        )
        seconds = time.perf_counter() - began
        engine.shutdown()
        lines = [json.loads(line) for line in steps.read_text().splitlines()]
        result = {
            "sglang": sglang.__version__,
            "tokens": [answer["output_ids"] for answer in answers],
            "retractions": sum(answer["meta_info"]["num_retractions"] for answer in answers),
            "seconds": seconds,
            "steps": [line for line in lines if "limit" in line],
            "order": next((line for line in lines if "evicted" in line), None),
        }
    Path(output).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
