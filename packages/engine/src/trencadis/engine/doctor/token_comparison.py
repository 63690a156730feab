"""Tokens of a device beside those of the CPU, position by position.

After a token that differs, the rest of an answer follows another text. So the request starts again
behind the CPU's token, and each position is compared on its own. Prompts that share a prefix are
compared with a CPU that shares nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import psutil

from trencadis.engine.api.requests import GenerateRequest
from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.engine.doctor.finding import Finding, Status, absent
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

GREEDY, SEEDED, SHARED = "greedy", "seeded", "of a shared prefix"

_MOST_PROBABLE = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True)

SETTINGS: Mapping[str, tuple[SamplingParams, ...]] = {
    GREEDY: (_MOST_PROBABLE,) * len(_TEXTS),
    SEEDED: (
        SamplingParams(temperature=0.8, seed=1, max_tokens=_TOKENS, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, seed=2, max_tokens=_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=20, seed=3, max_tokens=_TOKENS, ignore_eos=True),
        SamplingParams(
            temperature=0.6, repetition_penalty=1.2, seed=4, max_tokens=_TOKENS, ignore_eos=True
        ),
    ),
    SHARED: (_MOST_PROBABLE,) * len(_TEXTS),
}
"""One for each prompt."""

_EQUAL = 0.9
"""The share of equal tokens from which on it is ok: in bf16 a rounding decides between tokens that
are about as probable."""

_EQUAL_IN_FP8 = 0.7
"""The same for a device that rounds inputs of layers, or keys and values, to E4M3: 4 significant
bits of bf16's 8."""


def reference_tokens(engine: ServedEngine, served: Mapping[str, Any]) -> Finding:
    """The prompts and the tokens of this engine, to compare with those of another device.

    ``served`` has the values of that one's start: ``weight_bytes``, ``block_size``.
    """
    free, weight_bytes = psutil.virtual_memory().available, served["weight_bytes"]
    if weight_bytes > free:
        said = f"the weights take {format_bytes(weight_bytes)}, and {format_bytes(free)} are free"
        return Finding(Status.FAILED, said)
    tokenizer = Tokenizer.load(engine.spec.source)
    try:
        texts = [tokenizer.encode(text) for text in _TEXTS]
    finally:
        tokenizer.close()
    values: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        prompts = _with_block(texts, served["block_size"]) if name == SHARED else texts
        if max(map(len, prompts)) + _TOKENS > engine.core.max_model_len:
            continue
        pairs = zip(prompts, settings, strict=True)
        requests = [GenerateRequest(tuple(prompt), params) for prompt, params in pairs]
        tokens = [samples[0] for samples in engine.answers(requests)]
        values[name] = {"prompts": prompts, "tokens": tokens}
    return Finding(Status.OK, values=values)


def _with_block(texts: Sequence[list[int]], block_size: int) -> list[list[int]]:
    """The texts behind a block of their own tokens."""
    block = list(itertools.islice(itertools.cycle(itertools.chain(*texts)), block_size))
    return [[*block, *text] for text in texts]


def compare_tokens(engine: ServedEngine, name: str, reference: Mapping[str, Any]) -> Finding:
    """The tokens under one of `SETTINGS` beside those of `reference_tokens`."""
    if name not in reference:
        return absent("max_model_len is too small for these prompts")
    prompts, expected = reference[name]["prompts"], reference[name]["tokens"]
    if name == SHARED:
        if not engine.core.config.enable_prefix_caching:
            return absent("prefix caching is off")
        # The first prompt leaves its blocks in the cache, where all find them.
        engine.answers(
            [GenerateRequest(tuple(prompts[0]), attrs.evolve(_MOST_PROBABLE, max_tokens=1))]
        )
    total = sum(map(len, expected))
    unequal = num_unequal(engine, prompts, SETTINGS[name], expected)
    needed = _EQUAL_IN_FP8 if engine.rounds_inputs or engine.rounds_cache else _EQUAL
    status = Status.OK if is_near(unequal, total, needed) else Status.DIFFERS
    said = f"{total - unequal} of {total} tokens are those of the CPU"
    return Finding(status, said, values={"equal": total - unequal, "total": total})


def is_near(unequal: int, total: int, needed: float = _EQUAL) -> bool:
    """Whether so many unequal tokens may be due to rounding, by the share that must be equal."""
    return total - unequal >= needed * total


def num_unequal(
    engine: ServedEngine,
    prompts: Sequence[Sequence[int]],
    settings: Sequence[SamplingParams],
    expected: Sequence[Sequence[int]],
) -> int:
    """How many of the ``expected`` tokens the engine does not generate behind those before."""
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
