"""What adapters cost: 32 requests of which none, or each of 1, 8 or 32 adapters, is used.

    nox -s peers                          # vLLM's environment, once
    python benchmarks/adapter_cost.py     # and vLLM beside it, on one thread each

The small default model in bf16, random adapters of rank 16 on all linear layers, 64 tokens in and
32 out. Each engine runs twice, without and with adapters enabled, in processes of their own that
take turns. Prints the throughput of the engine without adapters, and the others relative to it:
medians of the rounds, of which the first is not counted.
"""

# ruff: noqa: PLC0415 - no environment has all engines

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import environ_of, found, python_of

REQUESTS, PROMPT, OUTPUT, RANK = 32, 64, 32, 16
COUNTS = (0, 1, 8, 32)
SETTLE_SECONDS = 2.0
"""Pause after vLLM, whose processes look for work for a second after the last."""

Run = Callable[[int, int], int]
"""Serves the requests with so many adapters and a seed; returns the tokens."""


def main() -> None:
    """Measure, or be the process of one engine."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", nargs="+", default=["eager", "compile", "vllm"])
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(*options.serve)
        return
    from trencadis.engine import default_model

    model = default_model()
    with tempfile.TemporaryDirectory() as folder:
        save_adapters(model, Path(folder))
        for engine in found(options.engines):
            show(engine, measure(engine, model, folder, options.rounds))


def measure(engine: str, model: str, folder: str, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each round, by what is measured."""
    plain, adapted = (start(engine, model, folder, enabled) for enabled in ("", "enabled"))
    cases = {"without": (plain, 0), **{f"{count} adapters": (adapted, count) for count in COUNTS}}
    rates: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, (process, count) in cases.items():
            rate = REQUESTS * OUTPUT / ask(process, [count, number])
            if number:
                rates[name].append(rate)
            if engine.startswith("vllm"):
                time.sleep(SETTLE_SECONDS)
    for process in (plain, adapted):
        process.communicate()
    return rates


def show(engine: str, rates: dict[str, list[float]]) -> None:
    base = rates.pop("without")
    print(f"{engine}: {statistics.median(base):.0f} tok/s without adapters")
    for name, of_rounds in rates.items():
        ratios = [rate / plain for rate, plain in zip(of_rounds, base, strict=True)]
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(f"  {name}: {middle:.2f} ({low:.2f} to {high:.2f})", flush=True)


def save_adapters(model: str, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        layers = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).model.layers
    shapes = {
        f"base_model.model.model.layers.{name}": module.weight.shape
        for name, module in layers.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    targets = sorted({name.rpartition(".")[2] for name in shapes})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    for number in range(max(COUNTS)):
        (folder / f"{number}").mkdir()
        matrices = {}
        for name, (outputs, inputs) in shapes.items():
            matrices[f"{name}.lora_A.weight"] = 0.02 * torch.randn(RANK, inputs).bfloat16()
            matrices[f"{name}.lora_B.weight"] = 0.02 * torch.randn(outputs, RANK).bfloat16()
        save_file(matrices, folder / f"{number}" / "adapter_model.safetensors")
        (folder / f"{number}" / "adapter_config.json").write_text(json.dumps(settings))


def start(engine: str, model: str, folder: str, enabled: str) -> subprocess.Popen[str]:
    environ = {**environ_of(engine), "OMP_NUM_THREADS": "1"}
    if engine == "vllm":
        del environ["OMP_NUM_THREADS"]  # it keeps one of two cores for its scheduler
    process = subprocess.Popen(
        [str(python_of(engine)), __file__, "--serve", engine, model, folder, enabled],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    answer(process)  # "ready"
    return process


def ask(process: subprocess.Popen[str], what: list[int]) -> float:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()
    return float(answer(process))


def answer(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("cost: "):
            return json.loads(line.removeprefix("cost: "))
    raise RuntimeError(f"an engine ended with status {process.wait()}")


def serve(engine: str, model: str, folder: str, enabled: str) -> None:
    if engine == "vllm":
        run = _vllm(model, folder, bool(enabled))
    else:
        run = _ours(model, folder, bool(enabled), is_compiled=engine == "compile")
    print('cost: "ready"', flush=True)
    for line in sys.stdin:
        count, seed = json.loads(line)
        began = time.perf_counter()
        assert run(count, seed) == REQUESTS * OUTPUT
        print(f"cost: {time.perf_counter() - began}", flush=True)


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(100, 40_000) for _ in range(PROMPT)] for _ in range(REQUESTS)]


def _ours(model: str, folder: str, enabled: bool, *, is_compiled: bool) -> Run:
    from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams

    adapters = {"enable_lora": True, "max_loras": max(COUNTS), "max_lora_rank": RANK}
    core = EngineCore(
        EngineConfig(
            model=model,
            device="cpu",
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=REQUESTS,
            enable_prefix_caching=False,
            compile=is_compiled,
            warmup="full",
            **(adapters if enabled else {}),
        )
    )
    core.warm_up()
    if enabled:
        for number in range(max(COUNTS)):
            core.load_adapter(f"{number}", f"{folder}/{number}")
    greedy = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)

    def run(count: int, seed: int) -> int:
        for number, prompt in enumerate(prompts(seed)):
            lora = f"{number % count}" if count else None
            core.add(f"{number}", GenerateRequest(prompt, greedy, lora=lora))
        num_tokens = 0
        while core.has_work:
            num_tokens += len(core.step())
        return num_tokens

    return run


def _vllm(model: str, folder: str, enabled: bool) -> Run:
    import vllm
    from vllm.lora.request import LoRARequest

    adapters = {"enable_lora": True, "max_loras": max(COUNTS), "max_lora_rank": RANK}
    llm = vllm.LLM(
        model,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=REQUESTS,
        enable_prefix_caching=False,
        disable_log_stats=True,
        gpu_memory_utilization=0.15,
        **(adapters if enabled else {}),
    )
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)

    def run(count: int, seed: int) -> int:
        inputs = [{"prompt_token_ids": ids} for ids in prompts(seed)]
        numbers = [number % count for number in range(REQUESTS)] if count else []
        loras = [LoRARequest(f"{i}", 1 + i, f"{folder}/{i}") for i in numbers]
        results = llm.generate(inputs, greedy, use_tqdm=False, lora_request=loras or None)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return run


if __name__ == "__main__":
    main()
