"""Sends orders to vLLM's core in its own process: ``vllm_orders.py MODEL OUTPUT``.

The class is named as a user names it; without ``trencadis`` in the settings there are orders alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import vllm


def main() -> None:
    model, output = sys.argv[1:]
    llm = vllm.LLM(
        model,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=16,
        enforce_eager=True,
        scheduler_cls="trencadis.scheduler.vllm.ThermalAsyncScheduler",
    )
    core = llm.llm_engine.engine_core
    idle = core.call_utility("batch_control", {"max_num_seqs": 2})
    try:
        refused = core.call_utility("batch_control", {"max_num_seqs": 99})
    except Exception as error:
        refused = str(error)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [{"prompt_token_ids": [100 + number, 200, 300]} for number in range(4)]
    done = llm.generate(prompts, params, use_tqdm=False)
    counts = [len(result.outputs[0].token_ids) for result in done]
    answers = {"idle": idle, "refused": refused, "num_tokens": counts}
    Path(output).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
