"""What fewer bits cost: perplexity of a fixed text, and how often the most probable token stays.

    python benchmarks/weight_quality.py

The text is the first 20,000 tokens of the topics of Python's own documentation
(``pydoc_data.topics``), in windows of 1,000. All variants compute the same tokens, so a token is
compared after the same text. Memory is that of the model's tensors.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pydoc_data import topics

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from trencadis.engine import LLM, SamplingParams, default_model
from trencadis.engine.models.loader import num_weight_bytes

VARIANTS = {
    "bf16": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    **{f"KV {name}": {"kv_cache_dtype": name} for name in ("int8", "fp8_e4m3", "fp8_e5m2")},
}
TOKENS, WINDOW = 20_000, 1_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of fewer bits, in perplexity.")
    parser.add_argument("--model", default=None, help="a directory or hub id")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    model = options.model or default_model()
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    token_ids = AutoTokenizer.from_pretrained(model).encode(text)[: options.tokens]
    windows = [token_ids[at : at + WINDOW] for at in range(0, len(token_ids) - WINDOW + 1, WINDOW)]
    table = Table("variant", "weights, MB", "of bf16", "perplexity", "change", "same tokens")
    first: tuple[int, float, list[int]] | None = None
    for name in options.variants:
        size, loss, tops = _measured(model, windows, VARIANTS[name])
        first = first or (size, loss, tops)
        same = sum(a == b for a, b in zip(tops, first[2], strict=True)) / len(tops)
        table.add_row(
            *(name, f"{size / 1e6:.0f}", f"{size / first[0]:.3f}", f"{math.exp(loss):.3f}"),
            *(f"{math.expm1(loss - first[1]):+.2%}", f"{same:.1%}"),
        )
    Console(width=100).print(table)
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"{len(windows) * (WINDOW - 1)} tokens; Python {version}, torch {torch.__version__}")


def _measured(
    model: str, windows: Sequence[list[int]], settings: dict[str, str]
) -> tuple[int, float, list[int]]:
    """Bytes of the weights, the mean loss of a token, and the most probable token after each."""
    llm = LLM(
        model,
        device="cpu",
        dtype="bfloat16",
        max_model_len=2 * WINDOW,
        max_num_seqs=4,
        warmup="none",
        enable_prefix_caching=False,
        **settings,  # type: ignore[arg-type]
    )
    size = num_weight_bytes(llm.core.executor.worker._model)  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    losses, tops = [], []
    for result in llm.generate(list(windows), params):
        for entry in (result.prompt_logprobs or ())[1:]:
            assert entry is not None
            losses.append(-entry.chosen.logprob)
            tops.append(entry.top[0].token_id)
    return size, sum(losses) / len(losses), tops


if __name__ == "__main__":
    main()
