"""Serves requests with vLLM and one scheduler class; prints what each step did, as JSON.

    python interop/vllm_run.py MODEL OUTPUT plain|thermal async|sync NUM_REQUESTS

The temperature rises and falls between 72 and 86 degrees every 24 seconds, as a recording that
`trencadis.scheduler.telemetry` plays; the target is 80. vLLM's core runs in this process, where its
scheduler can be watched.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import vllm
from vllm.platforms.cpu import CpuPlatform

from trencadis.scheduler.vllm import ThermalAsyncScheduler, ThermalScheduler

MAX_NUM_SEQS = 16
ORDER_FROM_STEP = 20
ORDER = {"force_evict": 3, "hold_s": 1.0, "policy": "largest_kv"}

steps: list[dict[str, Any]] = []
"""Of each step: the limit, what ran, preemptions so far, and the seconds that ours took."""


class Watched:
    """Beside a thermal scheduler: records its limits and its time."""

    def begin_step(self) -> Any:
        began = time.perf_counter()
        limits = super().begin_step()  # type: ignore[misc]
        ours_s = time.perf_counter() - began
        steps.append({"limit": limits.max_num_seqs, "ours_s": ours_s, "began": began})
        return limits

    def end_step(self, num_scheduled_tokens: Any) -> None:
        began = time.perf_counter()
        super().end_step(num_scheduled_tokens)  # type: ignore[misc]
        steps[-1]["ours_s"] += time.perf_counter() - began
        steps[-1]["running"] = len(self.running)  # type: ignore[attr-defined]

    def preempt(self, request: Any) -> None:
        super().preempt(request)  # type: ignore[misc]
        steps.append({"preempted": request.request_id})


def schedule_ahead() -> None:
    """Let vLLM schedule ahead on a CPU, for which its platform turns that off."""
    check = CpuPlatform.check_and_update_config.__func__

    def check_and_schedule_ahead(cls: Any, config: Any) -> None:
        check(cls, config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(check_and_schedule_ahead)


class WatchedAsync(Watched, ThermalAsyncScheduler):
    pass


class WatchedSync(Watched, ThermalScheduler):
    pass


def recording(directory: str) -> Path:
    file = Path(directory) / "heat.csv"
    wave = (79.0 + 7.0 * math.sin(2 * math.pi * second / 24.0) for second in range(1200))
    lines = [f"{second},0,{celsius:.2f}," for second, celsius in enumerate(wave)]
    file.write_text("\n".join(["time_s,device,temperature_c,power_w", *lines]), encoding="utf-8")
    return file


def main() -> None:
    model, output, kind, scheduling, num_requests = sys.argv[1:]
    is_async = scheduling == "async"
    if is_async:
        schedule_ahead()
    with tempfile.TemporaryDirectory() as directory:
        thermal = {
            "scheduler_cls": WatchedAsync if is_async else WatchedSync,
            "additional_config": {
                "trencadis": {
                    "temperature_source": f"recorded:{recording(directory)}",
                    "thermal_policy": "proportional",
                    "thermal_policy_config": {"target_temp_c": 80.0, "dwell_s": 2.0},
                }
            },
        }
        llm = vllm.LLM(
            model,
            dtype="float32",  # in bfloat16 the batch around a request changes its tokens
            max_model_len=512,
            max_num_seqs=MAX_NUM_SEQS,
            enforce_eager=True,
            async_scheduling=is_async,
            seed=0,
            **(thermal if kind == "thermal" else {}),
        )
        result = serve(llm, int(num_requests), is_ordered=kind == "thermal")
    Path(output).write_text(json.dumps(result), encoding="utf-8")


def serve(llm: Any, num_requests: int, *, is_ordered: bool) -> dict[str, Any]:
    rng = random.Random(32)
    engine, core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
    for number in range(num_requests):
        prompt = [rng.randrange(100, 40_000) for _ in range(rng.randrange(8, 96))]
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=rng.randrange(6, 24), ignore_eos=True
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    tokens: dict[str, list[int]] = {}
    answer, num_steps, began = None, 0, time.perf_counter()
    while engine.has_unfinished_requests():
        for done in engine.step():
            if done.finished:
                tokens[done.request_id] = list(done.outputs[0].token_ids)
        num_steps += 1
        is_due = num_steps >= ORDER_FROM_STEP and len(core.scheduler.running) >= 5
        if is_ordered and is_due and answer is None:
            answer = core.batch_control(ORDER)
    return {
        "scheduler": [base.__name__ for base in type(core.scheduler).__mro__],
        "vllm": vllm.__version__,
        "steps_in_flight": core.batch_queue_size,
        "tokens": tokens,
        "seconds": time.perf_counter() - began,
        "steps": steps,
        "order": None if answer is None else answer.result(timeout=60),
    }


if __name__ == "__main__":
    main()
