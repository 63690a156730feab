"""The engine with the model, and one request for each kind of program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import attrs
import torch

from trencadis.engine.api.requests import GenerateRequest
from trencadis.engine.api.sampling_params import SamplingParams
from trencadis.engine.api.structured_output import StructuredOutput
from trencadis.engine.doctor.finding import Finding, Status, absent
from trencadis.engine.doctor.served_engine import ServedEngine
from trencadis.kvcache import BlockCopy
from trencadis.warmup import format_bytes

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)

_DRAWN = {"temperature": 0.8, "seed": 1}
_PARAMS: Mapping[str, Mapping[str, Any]] = {
    "prompt": {"max_tokens": 1},
    "decode": {"max_tokens": 4},
    "draw random": _DRAWN,
    "draw top-p": {**_DRAWN, "top_p": 0.9},
    "draw top-k": {**_DRAWN, "top_k": 20},
    "log-probabilities": {"logprobs": 3, "logprob_token_ids": (1,)},
    "edits": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "logit_bias": {1: -1.0}},
    "beam search": {"use_beam_search": True, "n": 2, "best_of": 2, "ignore_eos": False},
}
"""The kinds that a request alone needs, by what it differs in from `GREEDY`."""


def start_engine(engine: ServedEngine) -> Finding:
    """Load the model and size the cache."""
    began_s = time.monotonic()
    core, worker = engine.core, engine.worker
    facts = core.facts
    values = {
        "dtype": facts.dtype,
        "max_model_len": core.max_model_len,
        "block_size": core.config.block_size,
        "num_blocks": facts.limits.num_blocks,
        "num_host_blocks": facts.num_host_blocks,
        "num_buckets": facts.num_buckets,
        "compiles": bool(core.config.compile),
        "captures_graphs": worker.captures_graphs,
        "weight_bytes": worker.weight_bytes,
        "start_s": round(time.monotonic() - began_s, 2),
    }
    said = (
        f"{facts.dtype}, {format_bytes(worker.weight_bytes)} of weights, "
        f"{facts.limits.num_blocks} blocks of {core.config.block_size} tokens, "
        f"{facts.num_buckets} buckets"
    )
    return Finding(Status.OK, said, values=values)


def run_program(engine: ServedEngine, name: str) -> Finding:
    """Requests that need a kind of program, which is compiled before its first run."""
    compiled, began_s = engine.device.num_compilations(), time.monotonic()
    found = _OTHERS[name](engine) if name in _OTHERS else _generate(engine, **_PARAMS[name])
    compiled = engine.device.num_compilations() - compiled
    values = {"compiled": compiled, "run_s": round(time.monotonic() - began_s, 3)}
    detail = found.detail or f"{compiled} programs compiled"
    return attrs.evolve(found, detail=detail, values=values)


def _generate(engine: ServedEngine, **params: Any) -> Finding:
    engine.answers([GenerateRequest(engine.prompt(5), attrs.evolve(GREEDY, **params))])
    return Finding(Status.OK)


def _why_unshared(engine: ServedEngine) -> Finding | None:
    if not engine.core.config.enable_prefix_caching:
        return absent("prefix caching is off")
    if not engine.prompts_with_block(1):
        return absent("max_model_len is too small for a block of context")
    return None


def _run_context(engine: ServedEngine) -> Finding:
    """The second prompt finds the block of the first in the cache."""
    if missing := _why_unshared(engine):
        return missing
    before = engine.core.stats.num_prefix_hit_tokens
    for prompt in engine.prompts_with_block(2):
        engine.answers([GenerateRequest(prompt, GREEDY)])
    cached = engine.core.stats.num_prefix_hit_tokens - before
    if cached < engine.core.config.block_size:
        return Finding(Status.DIFFERS, f"{cached} tokens of a block were found in the cache")
    return Finding(Status.OK)


def _run_shared(engine: ServedEngine) -> Finding:
    """Three sequences decode together that share a block."""
    if missing := _why_unshared(engine):
        return missing
    first, *others = engine.prompts_with_block(4)
    engine.answers([GenerateRequest(first, GREEDY)])
    engine.answers([GenerateRequest(prompt, GREEDY) for prompt in others])
    return Finding(Status.OK)


def _run_mask(engine: ServedEngine) -> Finding:
    if find_spec("llguidance") is None:
        return absent("structured output needs pip install 'trencadis-engine[structured]'")
    return _generate(engine, ignore_eos=False, structured_output=StructuredOutput(json_object=True))


def _run_copies(engine: ServedEngine) -> Finding:
    """Two greedy samples of a prompt whose last block both write to: one gets a copy."""
    params = attrs.evolve(GREEDY, n=2, best_of=2)
    [[first, second]] = engine.answers([GenerateRequest(engine.prompt(5), params)])
    if first != second:
        return Finding(Status.DIFFERS, "two samples differ, one of which has a copied block")
    return Finding(Status.OK)


def _run_swap(engine: ServedEngine) -> Finding:
    """A block goes to the host, and comes back as the last block, which nothing uses."""
    cache = engine.worker.cache
    if not cache.num_host_blocks:
        return absent("there are no host blocks")
    last = cache.num_blocks - 1
    cache.swap_out([BlockCopy(1, 0)])
    cache.swap_in([BlockCopy(0, last)])
    cache.wait()
    engine.device.synchronize()
    blocks = cache.key(0).view(cache.num_blocks, -1)
    if not torch.equal(blocks[1].cpu(), blocks[last].cpu()):
        return Finding(Status.FAILED, "a block came back from the host changed")
    return Finding(Status.OK)


_OTHERS: Mapping[str, Callable[[ServedEngine], Finding]] = {
    "prompt with context": _run_context,
    "decode with shared blocks": _run_shared,
    "mask": _run_mask,
    "block copies": _run_copies,
    "swap": _run_swap,
}
