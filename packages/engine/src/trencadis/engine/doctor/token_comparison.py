"""Tokens of a device beside those of the CPU, position by position.

After a token that differs, the rest of an answer follows another text. So the request starts again
behind the CPU's token, and each position is compared on its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from trencadis.engine.api.requests import GenerateRequest
from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.engine.doctor.finding import Finding, Status
from trencadis.engine.doctor.served_engine import ServedEngine
from trencadis.engine.front.tokenizer import Tokenizer
from trencadis.warmup import format_bytes

_TEXTS = (
    "The capital of France is",
    "Once upon a time, there was a",
    "def fibonacci(n):\n    ",
    "One, two, three, four,",
)
_TOKENS = 16

SETTINGS: Mapping[str, tuple[SamplingParams, ...]] = {
    "greedy": (SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True),) * len(_TEXTS),
    "seeded": (
        SamplingParams(temperature=0.8, seed=1, max_tokens=_TOKENS, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, seed=2, max_tokens=_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=20, seed=3, max_tokens=_TOKENS, ignore_eos=True),
        SamplingParams(
            temperature=0.6, repetition_penalty=1.2, seed=4, max_tokens=_TOKENS, ignore_eos=True
        ),
    ),
}
"""One for each prompt."""

_EQUAL = 0.9
"""The share of equal tokens from which on it is ok: in bf16 a rounding decides between tokens that
are about as probable."""


def reference_tokens(engine: ServedEngine, weight_bytes: int) -> Finding:
    """The prompts and the tokens of this engine, to compare with those of another device."""
    free = psutil.virtual_memory().available
    if weight_bytes > free:
        said = f"the weights take {format_bytes(weight_bytes)}, and {format_bytes(free)} are free"
        return Finding(Status.FAILED, said)
    tokenizer = Tokenizer.load(engine.spec.source)
    try:
        prompts = [tokenizer.encode(text) for text in _TEXTS]
    finally:
        tokenizer.close()
    values: dict[str, Any] = {"prompts": prompts}
    for name, settings in SETTINGS.items():
        pairs = zip(prompts, settings, strict=True)
        requests = [GenerateRequest(tuple(prompt), params) for prompt, params in pairs]
        values[name] = [samples[0] for samples in engine.answers(requests)]
    return Finding(Status.OK, values=values)


def compare_tokens(engine: ServedEngine, name: str, reference: Mapping[str, Any]) -> Finding:
    """The tokens under one of `SETTINGS` beside those of `reference_tokens`."""
    expected = reference[name]
    total = sum(map(len, expected))
    equal = total - _num_unequal(engine, reference["prompts"], SETTINGS[name], expected)
    status = Status.OK if equal >= _EQUAL * total else Status.DIFFERS
    said = f"{equal} of {total} tokens are those of the CPU"
    return Finding(status, said, values={"equal": equal, "total": total})


def _num_unequal(
    engine: ServedEngine,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[SamplingParams],
    expected: Sequence[Sequence[int]],
) -> int:
    unequal = 0
    compared = [0] * len(prompts)
    while left := [i for i, tokens in enumerate(expected) if compared[i] < len(tokens)]:
        requests = []
        for i in left:
            before = tuple(expected[i][: compared[i]])
            prompt = tuple(prompts[i])
            requests.append(GenerateRequest(prompt, settings[i], output_token_ids=before))
        for i, [found] in zip(left, engine.answers(requests), strict=True):
            following = expected[i][compared[i] :]
            pairs = zip(found, following, strict=True)
            same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(following))
            unequal += same < len(following)
            compared[i] += same + 1
    return unequal
