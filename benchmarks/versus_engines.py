"""The processes of ``benchmarks/versus.py``: each loads one engine, then answers loads.

The imports of each engine are in its function, because no environment has all of them.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence

MAX_NUM_SEQS = 32
VLLM_MEMORY = 0.3
"""Share of the host's memory: the other engines need theirs."""

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], int]
"""Generates so many tokens for each prompt; returns how many in all."""


def main() -> None:
    """Load an engine, then answer the loads on standard input with their seconds."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("engine")
    parser.add_argument("model", help="a checkpoint; for llama.cpp and OpenVINO a GGUF file")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--state-dtype", default="auto")
    options = parser.parse_args()
    engine = options.engine.partition("-")[0]
    others = {"transformers": _transformers, "llama": _llama, "openvino": _openvino}
    length, states = options.max_model_len, options.state_dtype
    if engine == "vllm":
        run = _vllm(options.model, length, states)
    elif engine in others:
        run = others[engine](options.model, length)
    else:
        run = _ours(options.model, length, engine, states)
    print('versus: "ready"', flush=True)
    for line in sys.stdin:
        requests, prompt, output, seed = json.loads(line)
        rng = random.Random(seed)
        prompts = [[rng.randrange(100, 40_000) for _ in range(prompt)] for _ in range(requests)]
        began = time.perf_counter()
        num_tokens = run(prompts, output)
        taken_s = time.perf_counter() - began
        assert num_tokens == requests * output, f"{options.engine}: {num_tokens} tokens"
        print(f"versus: {taken_s}", flush=True)


def _ours(model: str, max_model_len: int, name: str, state_dtype: str) -> Generate:
    from trencadis.engine import LLM, SamplingParams

    llm = LLM(
        model,
        device="cpu",
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        compile=name != "eager",
        quantization=name if name.startswith("int") else "none",
        mamba_ssm_cache_dtype=state_dtype,
        enable_prefix_caching=False,
    )

    def generate(prompts: Prompts, output: int) -> int:
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        results = llm.generate(prompts, params)
        return sum(len(result.completions[0].token_ids) for result in results)

    return generate


def _transformers(model: str, max_model_len: int) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def generate(prompts: Prompts, output: int) -> int:
        ids = torch.tensor(prompts)
        out = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            min_new_tokens=output,
            do_sample=False,
        )
        return (out.shape[1] - ids.shape[1]) * len(prompts)

    return generate


def _vllm(model: str, max_model_len: int, state_dtype: str) -> Generate:
    import vllm

    llm = vllm.LLM(
        model,
        dtype="bfloat16",
        max_model_len=max_model_len,
        max_num_seqs=MAX_NUM_SEQS,
        enable_prefix_caching=False,
        disable_log_stats=True,
        gpu_memory_utilization=VLLM_MEMORY,
        mamba_ssm_cache_dtype=state_dtype,
    )

    def generate(prompts: Prompts, output: int) -> int:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        results = llm.generate(inputs, params, use_tqdm=False)
        return sum(len(result.outputs[0].token_ids) for result in results)

    return generate


def _openvino(model: str, max_model_len: int) -> Generate:
    import numpy as np
    import openvino
    import openvino_genai

    pipeline = openvino_genai.LLMPipeline(model, "CPU")

    def generate(prompts: Prompts, output: int) -> int:
        ids = np.array(prompts, np.int64)
        inputs = map(openvino.Tensor, (ids, np.ones_like(ids)))
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output, True, False
        results = pipeline.generate(openvino_genai.TokenizedInputs(*inputs), config)
        return sum(map(len, results.tokens))

    return generate


def _llama(model: str, max_model_len: int) -> Generate:
    """llama.cpp through its C API: the Python class ``Llama`` computes one sequence at a time."""
    import llama_cpp

    params = llama_cpp.llama_context_default_params()
    params.n_ctx = MAX_NUM_SEQS * max_model_len
    params.n_seq_max = MAX_NUM_SEQS
    params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
    weights = llama_cpp.llama_model_load_from_file(
        model.encode(), llama_cpp.llama_model_default_params()
    )
    context = llama_cpp.llama_init_from_model(weights, params)
    batch = llama_cpp.llama_batch_init(params.n_batch, 0, 1)

    def forward(tokens: Sequence[tuple[int, int, int, bool]]) -> list[int]:
        """The next token after each of (token, position, sequence, whether it is asked for)."""
        following = []
        for start in range(0, len(tokens), params.n_batch):
            part = tokens[start : start + params.n_batch]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, asked) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, asked
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            if status := llama_cpp.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            following += [_largest(context, i) for i, (*_, asked) in enumerate(part) if asked]
        return following

    def generate(prompts: Prompts, output: int) -> int:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        last = len(prompts[0]) - 1
        tokens = forward(
            [
                (token, position, sequence, position == last)
                for sequence, ids in enumerate(prompts)
                for position, token in enumerate(ids)
            ]
        )
        for position in range(last + 1, last + output):
            tokens = forward([(t, position, sequence, True) for sequence, t in enumerate(tokens)])
        return len(tokens) * output

    return generate


def _largest(context: object, i: int) -> int:
    """The token with the highest score of a position of the last batch."""
    import llama_cpp
    import numpy as np

    vocabulary = llama_cpp.llama_model_get_vocab(llama_cpp.llama_get_model(context))
    size = llama_cpp.llama_vocab_n_tokens(vocabulary)
    scores = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, i), (size,))
    return int(scores.argmax())


if __name__ == "__main__":
    main()
