"""What a structured output costs: time of a mask, and throughput beside free text, in one run.

    python benchmarks/structured_output.py           # SmolLM2-135M, 32 requests of 64 tokens
    python benchmarks/structured_output.py --rounds 5 --requests 8

Each round serves the same number of requests and tokens twice: free text, and an array of records
by a JSON schema, which does not end before ``--tokens``. Their order changes with the round. The
medians of the rounds and the median of their ratios are shown. Masks are timed one by one, for
answers of the schema's random tokens, without a model, on one thread.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import numpy as np

from trencadis.engine import LLM, SamplingParams, StructuredOutput, default_model
from trencadis.engine.grammars.grammar import load_tokenizer, new_matcher
from trencadis.engine.grammars.matcher import allowed_tokens

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email": {"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.(com|org)$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
FORMS = {
    "json_object": StructuredOutput(json_object=True),
    "schema": StructuredOutput(json_schema={"type": "array", "items": RECORD, "minItems": 99}),
    "regex": StructuredOutput(regex=r"([a-z]+ [0-9]{1,6}, ){400}"),
    "choice of 1,000": StructuredOutput(choice=[f"answer number {i}" for i in range(1000)]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=None, help="a directory, GGUF file or hub id")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--masks", type=int, default=1000, help="timed for each form")
    options = parser.parse_args()
    llm = LLM(options.model or default_model(), max_model_len=512, max_num_seqs=options.requests)
    print_masks(llm, options.masks)
    print_throughput(llm, options.requests, options.tokens, options.rounds)


def print_masks(llm: LLM, count: int) -> None:
    spec = llm.core.spec
    tokenizer = load_tokenizer(llm.tokenizer.to_json(), spec.vocab_size, spec.eos_token_ids)
    print(f"a mask of {spec.vocab_size:,} tokens, ms")
    print("| form | p50 | p99 | largest | compiled in |\n|---|---|---|---|---|")
    for name, form in FORMS.items():
        began = time.perf_counter()
        beginning = new_matcher(tokenizer, form)
        compiled_ms = (time.perf_counter() - began) * 1e3
        times = sorted(mask_ms(beginning, tokenizer.vocab_size, count))
        p50, p99 = (times[int(len(times) * share)] for share in (0.5, 0.99))
        print(f"| {name} | {p50:.3f} | {p99:.3f} | {times[-1]:.2f} | {compiled_ms:.0f} ms |")


def mask_ms(beginning: object, vocab_size: int, count: int) -> list[float]:
    """Milliseconds of each mask of answers of random tokens."""
    rng = random.Random(0)
    times: list[float] = []
    mask = np.zeros((vocab_size + 31) // 32, np.int32)
    while len(times) < count:
        matcher = beginning.deep_copy()  # type: ignore[attr-defined]
        for _ in range(200):
            if matcher.is_stopped() or len(times) == count:
                break
            began = time.perf_counter()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            times.append((time.perf_counter() - began) * 1e3)
            matcher.consume_token(int(rng.choice(allowed_tokens(mask, vocab_size).nonzero()[0])))
    return times


def print_throughput(llm: LLM, requests: int, tokens: int, rounds: int) -> None:
    plain = SamplingParams(seed=1, max_tokens=tokens, ignore_eos=True)
    bound = SamplingParams(seed=1, max_tokens=tokens, structured_output=FORMS["schema"])
    ways = {"free text": plain, "schema": bound}
    for params in ways.values():
        serve(llm, params, requests)  # the first run loads, compiles and warms up
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in sorted(ways, reverse=number % 2 == 1):
            found[name].append(serve(llm, ways[name], requests))
    ratio = statistics.median(b / p for p, b in zip(*found.values(), strict=True))
    medians = {name: statistics.median(values) for name, values in found.items()}
    print(f"{requests} requests of {tokens} tokens, tokens/s, medians of {rounds} rounds")
    print(", ".join(f"{name} {value:,.0f}" for name, value in medians.items()), end="")
    print(f", ratio {ratio:.2f}")


def serve(llm: LLM, params: SamplingParams, requests: int) -> float:
    """Tokens per second."""
    prompts = [list(range(10 + i, 30 + i)) for i in range(requests)]
    began = time.perf_counter()
    answers = llm.generate(prompts, params)
    seconds = time.perf_counter() - began
    return sum(len(answer.completions[0].token_ids) for answer in answers) / seconds


if __name__ == "__main__":
    main()
