"""What one decode step costs on a Gaudi, in counts, beside those of Intel's plugin for vLLM.

The engine serves a narrow model with the depth and the vocabulary of Llama 3.1 8B on the
stand-in for a Gaudi (``packages/engine/tests/habana_standin``). The counts do not depend on the
machine, and those of bytes alone on the width: launches, copies between host and device, waits of
the host, operations outside of recipes, recipes compiled after warm-up, gathers, bytes that
programs read and write. ``shared`` has prefix caching and a system prompt of 2,560 tokens for all
sequences, ``moe`` has eight experts, ``fp8`` weights of FP8, ``fp8-cache`` a KV cache of it,
``fp8-moe`` experts of FP8. Counts of the plugin are read from its source, vllm-project/vllm-gaudi
091bbad, at the lines that `PLUGIN` gives::

    python benchmarks/hpu_steps.py [--mode eager|lazy] [--batch 1 32 128] [--kind greedy top-p]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STAND_IN = ROOT / "packages" / "engine" / "tests" / "habana_standin"

LAYERS, VOCABULARY = 32, 128256
PROMPT, STEPS = 130, 4
SYSTEM_PROMPT = 2560
BLOCK = 128
KINDS = ("greedy", "top-p", "shared", "moe", "fp8", "fp8-cache", "fp8-moe")

COLUMNS = (
    *("launches", "uploads", "upload_bytes", "downloads", "download_bytes"),
    *("syncs", "fallbacks", "recipes", "gathers", "read_bytes", "written_bytes"),
)

PLUGIN = {
    "launches": (
        LAYERS + 8,
        "a region for each layer, metadata, rotary angles, embedding, norm, logits and sampler "
        "(hpu_model_runner.py 4946-5004), a gather of the rows to sample, a copy of last tokens "
        "(3339-3346)",
    ),
    "uploads": (
        7,
        "positions, block_list, block_usage, block_groups, slot_mapping, token_ids, logits_indices "
        "(hpu_model_runner.py 3236, 3323-3326, 3340, 3372)",
    ),
    "upload_bytes": ("3 x 4 N + 4 x 4 B and more", "N blocks, B rows: the same seven tensors"),
    "downloads": (1, "the sampled ids (hpu_model_runner.py 557)"),
    "download_bytes": ("4 B", "the same"),
    "syncs": (1, "get_output waits for the event of the copy (hpu_model_runner.py 569)"),
    "fallbacks": (0, ""),
    "recipes": (0, "all buckets are warmed up (docs/features/warmup.md)"),
    "gathers": (
        f"2 to {3 * LAYERS + 2}",
        "rotary angles (ops/hpu_rotary_embedding.py 27), the rows to sample; maxima of blocks in "
        "each layer without the fused kernel (extension/ops.py 77, 141-145), keys and values in "
        "each layer where prefix caching turns contiguous reading off (extension/utils.py 86-93, "
        "platform.py 241). Experts: mixture_of_experts, none "
        "(extension/ops.py 707)",
    ),
    "read_bytes": ("not counted", "with prefix caching each block once for each of its owners"),
    "written_bytes": ("not counted", "with prefix caching what was gathered, too"),
}
"""Per decode step of greedy requests in eager mode with asynchronous scheduling, and where."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("eager", "lazy"), default="eager")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=list(KINDS))
    options = parser.parse_args()
    os.environ["PT_HPU_LAZY_MODE"] = {"eager": "0", "lazy": "1"}[options.mode]
    os.environ["PT_HPU_RECIPE_CACHE_CONFIG"] = ",false,1024,false"
    os.environ.setdefault("GAUDI_STANDIN_MEMORY", str(16 << 30))
    sys.path.insert(0, str(STAND_IN))
    print(f"Per decode step, {LAYERS} layers, vocabulary {VOCABULARY}, {options.mode} mode")
    print(f"| kind, batch | {' | '.join(COLUMNS)} |")
    print("|---" * (len(COLUMNS) + 1) + "|")
    for kind in options.kind:
        with tempfile.TemporaryDirectory() as directory:
            save_model(directory, experts=kind.endswith("moe"))
            for batch in options.batch:
                counted = count_step(directory, batch, kind)
                figures = " | ".join(f"{counted[name]:,}" for name in COLUMNS)
                print(f"| {kind}, {batch} | {figures} |", flush=True)
    print(f"| vllm-gaudi | {' | '.join(str(PLUGIN[name][0]) for name in COLUMNS)} |")
    for name in COLUMNS:
        if PLUGIN[name][1]:
            print(f"- {name}: {PLUGIN[name][1]}")


def save_model(directory: str, *, experts: bool) -> None:
    """A checkpoint with the depth and vocabulary of Llama 3.1 8B, in bf16."""
    import torch  # noqa: PLC0415 - after the environment is set
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415

    config = AutoConfig.for_model(
        "mixtral" if experts else "llama",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=4096,
        eos_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(directory)


def count_step(directory: str, batch: int, kind: str) -> dict[str, int]:
    """The largest counts of the last steps that decode ``batch`` sequences, after warm-up.

    No block moves in them, since no sequence has ended.
    """
    import attrs  # noqa: PLC0415 - with the others

    from gaudi_standin import BRIDGE  # noqa: PLC0415 - made by the stand-in
    from trencadis.bucketing import AxisConfig, BucketingConfig  # noqa: PLC0415
    from trencadis.engine import (  # noqa: PLC0415
        EngineConfig,
        EngineCore,
        GenerateRequest,
        SamplingParams,
    )

    def only(size: int) -> AxisConfig:
        return AxisConfig(min=size, step=size, max=size)

    shared = tuple(range(SYSTEM_PROMPT)) if kind == "shared" else ()
    max_len = len(shared) + (PROMPT // BLOCK + 1) * BLOCK
    # The scheduler admits nobody into the last 1 % of the cache.
    blocks = (batch * 2 + max_len // BLOCK) * 51 // 50 + 1
    query, context = (PROMPT // BLOCK + 1) * BLOCK, max_len // BLOCK * bool(shared)
    core = EngineCore(
        EngineConfig(
            model=directory,
            device="hpu",
            max_model_len=max_len,
            max_num_seqs=batch,
            num_blocks=blocks,
            num_host_blocks=0,
            enable_prefix_caching=bool(shared),
            quantization="fp8" if kind in ("fp8", "fp8-moe") else "none",
            kv_cache_dtype="fp8" if kind == "fp8-cache" else "auto",
            bucketing=BucketingConfig(
                prompt_batch=only(1),
                prompt_query=only(query),
                prompt_context=AxisConfig(min=0, step=context or 1, max=context),
                decode_batch=only(batch),
                decode_blocks=only(blocks),
            ),
        )
    )
    core.warm_up()
    # The first prompts decode while the last are computed.
    lead = batch * PROMPT // core.config.max_num_batched_tokens + 1
    drawn: dict[str, Any] = {"temperature": 0}
    if kind == "top-p":
        drawn = {"temperature": 0.8, "top_p": 0.9, "seed": 1}
    params = SamplingParams(**drawn, max_tokens=lead + STEPS, ignore_eos=True)
    if shared:
        longer = attrs.evolve(params, max_tokens=lead + STEPS + 8)
        core.add("first", GenerateRequest((*shared, VOCABULARY - 1), longer))
        while not core.step():
            pass
    for key in range(bool(shared), batch):
        prompt = (*shared, *range(key, key + PROMPT))
        core.add(str(key), GenerateRequest(prompt, params))
    counted: list[Any] = []
    while core.has_work:
        before, stats = BRIDGE.counters.copy(), core.stats
        num_tokens = len(core.step())
        decoded_only = core.stats.num_prefill_tokens == stats.num_prefill_tokens
        if num_tokens == batch and decoded_only:
            counted.append(BRIDGE.counters.since(before))
    return {name: max(getattr(step, name) for step in counted[-STEPS:]) for name in COLUMNS}


if __name__ == "__main__":
    main()
