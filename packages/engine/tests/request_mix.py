"""Requests of every kind for an engine core, and what it reports of them."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from trencadis.engine import EngineCore, GenerateRequest, SamplingParams
from trencadis.engine.ipc.messages import NewToken

GREEDY = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
DRAWN = {"max_tokens": 12, "ignore_eos": True}
WAYS: dict[str, list[dict[str, Any]]] = {
    "greedy": [GREEDY],
    "seeds": [{**DRAWN, "seed": seed} for seed in range(3)],
    "without a seed": [DRAWN, {**DRAWN, "top_k": 4, "top_p": 0.8, "min_p": 0.01}],
    "penalties": [
        {**DRAWN, "seed": 3, "repetition_penalty": 1.3},
        {**GREEDY, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    ],
    "logit bias and a minimum": [{**GREEDY, "logit_bias": {7: 9.0, 9: -100.0}, "min_tokens": 5}],
    "log-probabilities": [{**DRAWN, "seed": 2, "logprobs": 3}],
    "samples": [{**DRAWN, "seed": 5, "n": 3}, {**DRAWN, "seed": 1, "n": 2, "best_of": 4}],
    "beams": [{"max_tokens": 9, "ignore_eos": True, "use_beam_search": True, "best_of": 3}],
}
SMALL = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 32,
    "block_size": 8,
    "num_blocks": 80,
    "warmup": "none",
}


def prompts(count: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(4)
    return [tuple(rng.integers(0, 250, rng.integers(20, 60)).tolist()) for _ in range(count)]


def serve(core: EngineCore, ways: list[dict[str, Any]], count: int = 6) -> dict[str, list[Any]]:
    """What is reported of each request, as in `finish`."""
    for number, prompt in enumerate(prompts(count)):
        params = ways[number % len(ways)]
        core.add(f"{number}", GenerateRequest(prompt, SamplingParams(**params)))
    return finish(core)


TIMES = {
    field.name: field.default
    for field in msgspec.structs.fields(NewToken)
    if field.type in (int, float, float | None) and field.default is not msgspec.NODEFAULT
} | {"request_status": "normal"}
"""What tokens tell that depends on measured times, as if nothing was measured."""


def finish(core: EngineCore) -> dict[str, list[Any]]:
    """What is reported of the requests that a core has, until all of them have ended.

    Without what depends on measured times: how long a request waited, and whether it was swapped.
    """
    reported: dict[str, list[Any]] = {}
    for _ in range(2000):
        if not core.has_work:
            break
        for token in core.step():
            timeless = msgspec.structs.replace(token, **TIMES)
            reported.setdefault(token.key, []).append(timeless)
    assert not core.has_work
    assert not core.take_failures()
    return reported
