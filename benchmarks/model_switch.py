"""Seconds of a switch between two models, by its parts: the first time, and from host memory.

    python benchmarks/model_switch.py                      # SmolLM2 and a small model
    python benchmarks/model_switch.py --compile --rounds 5
    python benchmarks/model_switch.py --models DIR DIR

A first switch loads the checkpoint; a repeated one takes the weights from the stash. Each round is
an engine of its own, so that the first switch of each is a first one. Medians over the rounds, and
for repeats over all of them.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trencadis.engine import (
    EngineConfig,
    LogSettings,
    ModelEntry,
    MultiModelEngine,
    SwitchReport,
    default_model,
)

PARTS = ("prepare_s", "drain_s", "unload_s", "load_s", "warmup_s", "total_s")
Reports = dict[tuple[str, str], list[SwitchReport]]
"""By alias and by ``first`` or ``repeat``."""


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory() as directory:
        paths = options.models or [default_model(), _save_small_model(Path(directory))]
        entries = [
            ModelEntry(
                f"{number}: {Path(path).name.partition('-Instruct')[0]}",
                EngineConfig(
                    model=path,
                    dtype=options.dtype,
                    compile=options.compile,
                    max_model_len=512,
                    max_num_seqs=8,
                    warmup=options.warmup,
                    compile_cache=options.compile_cache,
                ),
            )
            for number, path in enumerate(paths)
        ]
        reports: Reports = defaultdict(list)
        for _ in range(options.rounds):
            asyncio.run(_round(entries, options.repeats, reports))
    _print(reports, options)


async def _round(entries: Sequence[ModelEntry], repeats: int, reports: Reports) -> None:
    """An engine that starts with each model once, so that the other's first switch is timed."""
    for entry in entries:
        engine = await MultiModelEngine.start(
            entries, active=entry.alias, log=LogSettings(level=logging.WARNING)
        )
        try:
            others = [other.alias for other in entries if other is not entry]
            for alias in others:
                reports[alias, "first"].append(await engine.switch_model(alias))
            for _ in range(repeats):
                for alias in (entry.alias, *others):
                    reports[alias, "repeat"].append(await engine.switch_model(alias))
        finally:
            await engine.stop()


def _print(reports: Reports, options: argparse.Namespace) -> None:
    table = Table("model", "switch", *(part.removesuffix("_s") for part in PARTS), "of first", "n")
    for (alias, kind), times in sorted(reports.items()):
        medians = [statistics.median(getattr(each, part) for each in times) for part in PARTS]
        first = statistics.median(each.total_s for each in reports[alias, "first"])
        cells = [f"{seconds:.3f}" for seconds in medians]
        table.add_row(alias, kind, *cells, f"{medians[-1] / first:.2f}", str(len(times)))
    console = Console(width=110)
    console.print(table)
    console.print(
        f"medians in seconds; {options.dtype}, compile {options.compile}, warm-up "
        f"{options.warmup}, {torch.get_num_threads()} threads on {_processor()}, "
        f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    )


def _save_small_model(directory: Path) -> str:
    """A Llama of random weights that differs from SmolLM2 in every dimension."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    target = directory / "small"
    LlamaForCausalLM(config).save_pretrained(target)
    vocabulary = {character: i for i, character in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(target)
    return str(target)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return f"{os.cpu_count()} × {line.partition(': ')[2]}"
    return platform.processor()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs=2, help="directories of two checkpoints")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compile-cache", help="directory for compiled programs")
    parser.add_argument("--warmup", default="full", choices=("full", "none"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="switches back and forth a round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
