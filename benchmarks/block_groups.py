"""Blocks of layers with windows: bytes of a sequence, sequences that fit, time of a decode step.

    PYTHONPATH=$(ls -d packages/*/src | paste -sd:) python benchmarks/block_groups.py

Two models of random weights: every sixth layer sees all tokens and five see 1,024, as in Gemma 3,
or all see 1,024. Steps of two settings are timed in turns, 32 a turn: medians of their times.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.runner import cache_sizing
from trencadis.engine.runner.limits import blocks_of_sequence
from trencadis.kvcache import LayerGroups

LONGEST = 32768
WINDOW = 1024
TURNS = 6
STEPS = 32
SIZES: dict[str, Any] = {
    **{"vocab_size": 1024, "hidden_size": 512, "intermediate_size": 1024, "head_dim": 64},
    **{"num_hidden_layers": 12, "num_attention_heads": 8, "num_key_value_heads": 4},
    **{"max_position_embeddings": LONGEST, "sliding_window": WINDOW, "pad_token_id": None},
}


def save(model_type: str, directory: Path, **changes: Any) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **changes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return str(directory)


def one_group(windows: Sequence[int | None], *_: Any, **__: Any) -> LayerGroups:
    return LayerGroups.single(windows)


def make(model: str, *, grouped: bool = True, num_blocks: int | None = None) -> EngineCore:
    settings: dict[str, Any] = {"block_size": 16, "max_num_seqs": 256, "warmup": "none"}
    settings |= {"max_model_len": LONGEST, "kv_cache_memory": 2 << 30, "num_blocks": num_blocks}
    settings |= {"max_num_batched_tokens": 1024, "enable_prefix_caching": False}
    config = EngineConfig(model=model, **settings)
    if grouped:
        return EngineCore(config)
    with patch.object(cache_sizing, "group_layers", one_group):
        return EngineCore(config)


def begin(core: EngineCore, num_tokens: int) -> None:
    """Compute a prompt, so that the next steps decode."""
    prompt = np.random.default_rng(0).integers(0, 1000, num_tokens).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=LONGEST - num_tokens, ignore_eos=True)
    core.add("a", GenerateRequest(tuple(prompt), params))
    while not core.step():
        pass


def step_seconds(core: EngineCore) -> list[float]:
    taken = []
    for _ in range(STEPS):
        began = time.perf_counter()
        core.step()
        taken.append(time.perf_counter() - began)
    return taken


def in_turns(cores: dict[str, EngineCore]) -> dict[str, float]:
    """The median milliseconds of a step of each."""
    taken: dict[str, list[float]] = {name: [] for name in cores}
    for turn in range(TURNS + 1):
        for name, core in cores.items():
            found = step_seconds(core)
            taken[name] += found if turn else []
    return {name: 1e3 * statistics.median(times) for name, times in taken.items()}


def show_memory(model: str) -> None:
    fitting = {}
    for grouped in (False, True):
        core = make(model, grouped=grouped)
        facts = core.facts
        begin(core, LONGEST - 64)
        used = core.blocks.pool.num_used_blocks * facts.block_bytes
        per_layer = facts.block_bytes * len(facts.windows) / len(facts.spec.layers)
        if not grouped:
            per_token = per_layer / facts.config.block_size
        limits = [layer.window or LONGEST for layer in facts.spec.layers]
        ideal = sum(min(LONGEST - 64, limit) for limit in limits) * per_token
        most = blocks_of_sequence(facts.config, LONGEST, facts.windows)
        fitting[grouped] = (facts.limits.num_blocks - 1) * facts.block_bytes // used
        print(
            f"{len(facts.windows)} groups: a sequence of {LONGEST - 64} tokens has "
            f"{used / 2**20:.1f} MiB, {used / ideal:.3f} of the least; "
            f"{fitting[grouped]} such in 2 GiB (blocks at most: {most})"
        )
        core.close()


def show_steps(title: str, cores: dict[str, EngineCore]) -> None:
    times = in_turns(cores)
    first = next(iter(times.values()))
    rows = (f"{name} {ms:.2f} ms ({ms / first:.2f})" for name, ms in times.items())
    print(f"{title}: {', '.join(rows)}")
    for core in cores.values():
        core.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        mixed = save("gemma3_text", Path(directory, "mixed"), sliding_window_pattern=6)
        narrow = save("mistral", Path(directory, "narrow"))
        show_memory(mixed)
        for context in (1024, 8192):
            cores = {"one group": make(mixed, grouped=False), "groups": make(mixed)}
            for core in cores.values():
                begin(core, context)
            show_steps(f"decode after {context} tokens, mixed layers", cores)
        cores = {f"{context} tokens": make(narrow) for context in (1024, 8192)}
        for name, core in cores.items():
            begin(core, int(name.split()[0]))
        show_steps("decode of windows alone after", cores)


if __name__ == "__main__":
    main()
