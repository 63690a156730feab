"""A plug-in of SGLang for `sglang_run.py`: writes what each step of a thermal scheduler did."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

TARGET = "trencadis.scheduler.sglang.ThermalScheduler"


def install() -> None:
    """Watch the scheduler of this process, where ``SGLANG_WATCH`` names a file."""
    name = os.environ.get("SGLANG_WATCH")
    if not name:
        return
    from sglang.srt.plugins.hook_registry import (  # noqa: PLC0415
        HookRegistry,
        HookType,
    )

    steps = Path(name).open("a", encoding="utf-8")  # noqa: SIM115 - as long as the process
    times = {"ours_s": 0.0}

    def timed(original: Any, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = original(*args, **kwargs)
        times["ours_s"] += time.perf_counter() - began
        return result

    def note(plan: Any, scheduler: Any, **_: Any) -> None:
        ours_s, times["ours_s"] = times["ours_s"], 0.0
        batch = plan.batch_to_run
        if batch is None and not scheduler.waiting_queue:
            return
        running = {request.rid for request in plan.running_batch.reqs}
        running |= {request.rid for request in (batch.reqs if batch else ())}
        line = {
            "limit": scheduler._limit,
            "running": len(running),
            "waiting": len(scheduler.waiting_queue),
            "chunk": scheduler.chunked_prefill_size,
            "prefill": bool(batch) and batch.forward_mode.is_extend(),
            "ours_s": ours_s,
            "at_s": time.perf_counter(),
        }
        steps.write(json.dumps(line) + "\n")
        steps.flush()

    def note_answer(_: Any, answer: Any) -> None:
        result = answer.result()
        line = {"evicted": len(result.evicted_request_ids), "of": result.previous_running}
        steps.write(json.dumps(line) + "\n")

    HookRegistry.register("trencadis.scheduler.sglang._log_answer", note_answer, HookType.AFTER)
    for method in ("begin_step", "end_step", "_retract"):
        HookRegistry.register(f"{TARGET}.{method}", timed, HookType.AROUND)
    HookRegistry.register(f"{TARGET}.get_next_batch_to_run", note, HookType.AFTER)
