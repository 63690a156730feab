"""What a structured output costs, and what jump-forward saves of it, in one run.

    python benchmarks/structured_output.py           # SmolLM2-135M, 32 requests of 64 tokens
    python benchmarks/structured_output.py --rounds 5 --requests 8
    python benchmarks/structured_output.py --only jumps --rounds 3

Each round serves the same number of requests and tokens twice: free text, and an array of records
by a JSON schema, which does not end before ``--tokens``. Their order changes with the round. The
medians of the rounds and the median of their ratios are shown. Masks are timed one by one, for
answers of the schema's random tokens, without a model, on one thread.

The jumps: the fifty schemas of the engine's tests are answered greedily with and without them,
``--requests`` at once, and some of them one after the other. The time of a step of a few tokens is
shown beside that of one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

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
    parser.add_argument("--only", choices=("masks", "throughput", "jumps"))
    options = parser.parse_args()
    llm = LLM(options.model or default_model(), max_model_len=512, max_num_seqs=options.requests)
    if options.only in (None, "masks"):
        print_masks(llm, options.masks)
    if options.only in (None, "throughput"):
        print_throughput(llm, options.requests, options.tokens, options.rounds)
    if options.only in (None, "jumps"):
        print_chunks(llm)
        print_jumps(llm, options.requests, options.rounds)


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


MOST_TOKENS = 128
SCHEMAS = Path(__file__).parents[1] / "packages/engine/tests/data/schemas.json"


def print_chunks(llm: LLM, context: int = 64, rounds: int = 15) -> None:
    """The shortest time of a step of one request, by the tokens that it computes."""
    print(f"a step of one request with {context} tokens of context, shortest of {rounds}")
    print("| tokens | ms |\n|---|---|")
    sizes = (1, 2, 3, 4, 6, 8, 12, 16, 32)
    times = [[step_ms(llm, context, tokens, seed) for tokens in sizes] for seed in range(rounds)]
    for tokens, found in zip(sizes, zip(*times, strict=True), strict=True):
        print(f"| {tokens} | {min(found):.0f} |")


def step_ms(llm: LLM, context: int, tokens: int, seed: int) -> float:
    """Milliseconds of the step that computes the last ``tokens`` of an answer.

    All of the answer but one token is forced.
    """
    core = llm.core
    rng = random.Random(seed)
    prompt = [rng.randrange(100, 1000) for _ in range(context)]
    core.add("chunk", prompt, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    forced = [rng.randrange(100, 1000) for _ in range(tokens - 1)]
    update = core.scheduler.update
    core.scheduler.update = lambda output, sampled, **rest: update(  # type: ignore[method-assign]
        output, sampled, **{**rest, "forced": dict.fromkeys(sampled, forced) if forced else None}
    )
    core.step()
    del core.scheduler.update
    began = time.perf_counter()
    core.step()
    elapsed_ms = (time.perf_counter() - began) * 1e3
    core.abort("chunk")
    return elapsed_ms


def print_jumps(llm: LLM, requests: int, rounds: int) -> None:
    """Steps and seconds of the answers to the fifty schemas, with and without jumps.

    One after the other only the first of them, which take as long as all of them at once.
    """
    schemas = json.loads(SCHEMAS.read_text("utf-8"))
    jobs = [(ask(llm, name), json_params(schema)) for name, schema in schemas.items()]
    answer(llm, jobs[:4], requests)  # the first run loads, compiles and warms up
    print(f"greedy answers of at most {MOST_TOKENS} tokens, medians of {rounds} rounds")
    print("| schemas | at once | | steps | tokens | forced | s | processor s |")
    print("|---|---|---|---|---|---|---|---|")
    for at_once, asked in ((1, jobs[:8]), (requests, jobs)):
        found: dict[str, list[Answered]] = {"one a step": [], "jumps": []}
        for number in range(rounds):
            for way in sorted(found, reverse=number % 2 == 1):
                found[way].append(answer(llm, asked, at_once, jumps=way == "jumps"))
        for way, runs in found.items():
            first = runs[0]
            print(
                f"| {len(asked)} | {at_once} | {way} | {first.steps:,} | {first.tokens:,} | "
                f"{first.forced / first.tokens:.0%} | "
                f"{statistics.median(run.seconds for run in runs):.1f} | "
                f"{statistics.median(run.processor_s for run in runs):.1f} |"
            )


def ask(llm: LLM, name: str) -> list[int]:
    question = f"Give an example of {name} as JSON."
    return llm.tokenizer.render_chat([{"role": "user", "content": question}])


def json_params(schema: object) -> SamplingParams:
    form = StructuredOutput(json_schema=schema)
    return SamplingParams(temperature=0, max_tokens=MOST_TOKENS, structured_output=form)


class Answered(NamedTuple):
    seconds: float
    processor_s: float
    steps: int
    tokens: int
    forced: int


def answer(
    llm: LLM,
    jobs: Sequence[tuple[list[int], SamplingParams]],
    at_once: int,
    *,
    jumps: bool = True,
) -> Answered:
    """What the answers took, ``at_once`` at a time."""
    runner, forced = llm.core.executor.worker.runner, [0]
    pays_to_jump = runner.pays_to_jump

    def counted(start: int, num_forced: int, num_seqs: int) -> bool:
        pays = jumps and pays_to_jump(start, num_forced, num_seqs)
        forced[0] += num_forced if pays else 0
        return pays

    runner.pays_to_jump = counted  # type: ignore[method-assign]
    before, tokens = llm.core.stats.num_steps, 0
    began, began_processor = time.perf_counter(), time.process_time()
    for start in range(0, len(jobs), at_once):
        prompts, params = zip(*jobs[start : start + at_once], strict=True)
        answers = llm.generate(list(prompts), list(params))
        tokens += sum(len(answer.completions[0].token_ids) for answer in answers)
    seconds, processor_s = time.perf_counter() - began, time.process_time() - began_processor
    del runner.pays_to_jump
    steps = llm.core.stats.num_steps - before
    return Answered(seconds, processor_s, steps, tokens, forced[0])


if __name__ == "__main__":
    main()
