"""Snapshots of states: time to the first token of prompts that begin alike, with and without.

    PYTHONPATH=$(ls -d packages/*/src | paste -sd:) python benchmarks/state_snapshots.py

A hybrid of random weights with 163M parameters, two of whose twelve layers attend. Each prompt is
new, then comes again; then two prompts have three quarters in common, and the second is timed. The
two settings are timed in turns: medians.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time

import torch
from transformers import AutoModelForCausalLM, GraniteMoeHybridConfig

from trencadis.engine import EngineConfig, EngineCore, GenerateRequest, SamplingParams

LENGTHS = (60, 200, 500, 1000)
TURNS = 7
VOCABULARY = 8192
NUM_LAYERS = 12


def save(directory: str) -> None:
    torch.manual_seed(0)
    config = GraniteMoeHybridConfig(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        shared_intermediate_size=2048,
        num_hidden_layers=NUM_LAYERS,
        layer_types=["attention" if i % 6 == 5 else "mamba" for i in range(NUM_LAYERS)],
        num_attention_heads=16,
        num_key_value_heads=4,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=32,
        mamba_d_head=64,
        mamba_d_state=128,
        max_position_embeddings=4096,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)


class Timed:
    """A core, and the milliseconds of each kind of prompt until the first token."""

    def __init__(self, model: str, *, keeps_snapshots: bool) -> None:
        settings = {"max_model_len": 2048, "max_num_seqs": 8}
        config = EngineConfig(model=model, enable_prefix_caching=keeps_snapshots, **settings)
        self.core = EngineCore(config)
        self.core.warm_up()
        self.times: dict[str, list[float]] = {}

    def serve(self, kind: str, prompt: tuple[int, ...]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        began = time.perf_counter()
        self.core.add(kind, GenerateRequest(prompt, params))
        while not self.core.step():
            pass
        self.times.setdefault(kind, []).append(1e3 * (time.perf_counter() - began))
        while self.core.has_work:
            self.core.step()


def main() -> None:
    rng = random.Random(0)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(VOCABULARY) for _ in range(length))

    with tempfile.TemporaryDirectory() as directory:
        save(directory)
        without, kept = (Timed(directory, keeps_snapshots=keeps) for keeps in (False, True))
        for timed in (without, kept):
            timed.serve("warm", tokens(300))
        for length in LENGTHS:
            for turn in range(TURNS):
                prompt, common = tokens(length), tokens(length * 3 // 4)
                first, second = (common + tokens(length // 4) for _ in range(2))
                for timed in (without, kept) if turn % 2 else (kept, without):
                    timed.serve(f"{length} new", prompt)
                    timed.serve(f"{length} again", prompt)
                    timed.serve(f"{length} beside", first)
                    timed.serve(f"{length} in common", second)
            for kind in ("new", "again", "in common"):
                one, other = (
                    statistics.median(timed.times[f"{length} {kind}"]) for timed in (without, kept)
                )
                print(f"{length} tokens {kind}: {one:.0f} ms, {other:.0f} ms, {other / one:.2f}")
        stats = kept.core.stats
        rate = stats.num_prefix_hit_tokens / stats.num_prefix_query_tokens
        print(f"{rate:.0%} of the tokens of prompts were hits")


if __name__ == "__main__":
    main()
