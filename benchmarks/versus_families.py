"""Models with windows, experts and states beside other engines on the CPU, with random weights.

    nox -s peers                                   # environments of the others, once
    python benchmarks/versus_families.py           # all three models
    python benchmarks/versus_families.py --models experts --engines compile vllm-all-cores
    python benchmarks/versus_families.py --models states --state-dtype bfloat16

As ``versus.py``, with models of about 300 million parameters. An engine that does not serve a model
is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from typing import Any, NamedTuple

import torch
from peers import found
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from versus import Load, Worker, measure, show

from trencadis.engine import default_model

ENGINES = ("eager", "compile", "transformers", "vllm-all-cores")
COMMON = {"vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True}
COMMON |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


class Family(NamedTuple):
    """A model and what it is asked; ``context``: the longest prompt with its output, in tokens."""

    model_type: str
    fields: dict[str, Any]
    loads: tuple[Load, ...]
    context: int = 1024


SHORT = (Load(32, 128, 64), Load(1, 32, 64, 3))

FAMILIES = {
    "windows": Family(
        "mistral",
        {
            **{"hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 17},
            **{"num_attention_heads": 16, "num_key_value_heads": 4, "sliding_window": 1024},
        },
        (Load(8, 4000, 64), Load(1, 4000, 64)),
        4096,
    ),
    "experts": Family(
        "qwen3_moe",
        {
            **{"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 20},
            **{"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64},
            **{"num_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 1024},
        },
        SHORT,
    ),
    "states": Family(
        "granitemoehybrid",
        {
            **{"hidden_size": 768, "shared_intermediate_size": 2048, "num_local_experts": 0},
            **{"num_hidden_layers": 32, "num_attention_heads": 12, "num_key_value_heads": 4},
            **{"layer_types": (["mamba"] * 7 + ["attention"]) * 4, "mamba_n_heads": 24},
            **{"mamba_d_state": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_expand": 2},
            **{"intermediate_size": 2048},
        },
        SHORT,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--state-dtype",
        default="auto",
        help="of the sums of layers with a state: by default fp32 here, bf16 in vLLM",
    )
    options = parser.parse_args()
    for name in options.models:
        family = FAMILIES[name]
        with contextlib.ExitStack() as stack:
            directory = stack.enter_context(tempfile.TemporaryDirectory())
            print(f"{name}: {save(family, directory) / 1e6:.0f} million parameters")
            workers = {}
            for engine in found(options.engines):
                try:
                    worker = Worker(engine, directory, family.context, options.state_dtype)
                except RuntimeError as error:
                    print(f"{name}: {error}")
                    continue
                workers[engine] = stack.enter_context(contextlib.closing(worker))
            seconds = measure(workers, options.rounds, family.loads)
            show(seconds, {engine: worker.start_s for engine, worker in workers.items()})


def save(family: Family, directory: str) -> int:
    """Save a model with random weights; returns how many parameters it has."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **COMMON, **family.fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(default_model()).save_pretrained(directory)
    return model.num_parameters()


if __name__ == "__main__":
    main()
