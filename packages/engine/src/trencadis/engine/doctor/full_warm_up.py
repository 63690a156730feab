"""The default start: buckets are compiled and not started, then requests compile nothing.

The other checks have an engine without warm-up. This one has an engine of its own, for sequences of
one block, so that it has few buckets. Whatever the bridge does wrong in its compile-only mode would
otherwise first be seen by users: recipes that it does not keep, or results that it leaves garbage.
"""

from __future__ import annotations

from typing import Any

import attrs

from trencadis.bucketing import AxisConfig, BucketingConfig
from trencadis.engine.api.requests import GenerateRequest
from trencadis.engine.doctor.finding import Finding, Status, absent
from trencadis.engine.doctor.program_runs import GREEDY
from trencadis.engine.doctor.served_engine import ServedEngine
from trencadis.engine.doctor.token_comparison import is_near, num_unequal
from trencadis.engine.settings.engine_config import EngineConfig

_ROWS = 2
_PROMPT_TOKENS = 8
_TOKENS = 8
"""Of each answer, at most."""


def check_full_warm_up(engine: ServedEngine) -> Finding:
    """Whether requests compile nothing after a full warm-up, and get the tokens of before."""
    if not engine.worker.captures_graphs and not engine.core.config.compile:
        return absent("nothing is captured or compiled here")
    longest = min(engine.core.config.block_size, engine.core.max_model_len)
    if longest < 2:
        return absent("a block holds a single token")
    length = min(_PROMPT_TOKENS, longest // 2)
    prompts = [engine.prompt(length, number=i) for i in range(_ROWS)]
    params = [attrs.evolve(GREEDY, max_tokens=min(_TOKENS, longest - length))] * _ROWS
    pairs = zip(prompts, params, strict=True)
    expected = [
        samples[0] for samples in engine.answers([GenerateRequest(*each) for each in pairs])
    ]
    device = engine.device
    try:
        engine.start_again(**_few_buckets(engine.core.config, longest))
        before = device.num_compilations()
        num_buckets = engine.core.facts.num_buckets
        warmed_up = device.num_compilations()
        unequal = num_unequal(engine, prompts, params, expected)
        served = device.num_compilations() - warmed_up
    finally:
        engine.start_again()
    total = sum(map(len, expected))
    said = (
        f"{num_buckets} buckets, {warmed_up - before} compilations; then {served} while serving, "
        f"{total - unequal} of {total} tokens are those without warm-up"
    )
    values = {"buckets": num_buckets, "warm_up_compiled": warmed_up - before, "compiled": served}
    values |= {"equal": total - unequal, "total": total}
    if served:
        return Finding(Status.FAILED, said, values=values)
    return Finding(Status.OK if is_near(unequal, total) else Status.DIFFERS, said, values=values)


def _few_buckets(config: EngineConfig, longest: int) -> dict[str, Any]:
    """Settings of a start with few buckets, warmed up as by default."""
    blocks = _ROWS + 1  # and the padding block
    return {
        "warmup": "full",
        "graphs": attrs.evolve(config.graphs, skip=False),
        "on_bucket_miss": "auto",
        "max_model_len": longest,
        "max_num_seqs": _ROWS,
        "max_num_batched_tokens": longest,
        "num_blocks": blocks,
        "use_buckets": True,
        "bucket_grid": "paged",
        "record_traffic": None,
        "bucketing": BucketingConfig(
            strategy="lin",
            contiguous_pa=config.bucketing is None or config.bucketing.contiguous_pa,
            prompt_batch=_only(1),
            prompt_query=_only(longest),
            decode_batch=_only(_ROWS),
            decode_blocks=_only(blocks),
        ),
    }


def _only(size: int) -> AxisConfig:
    return AxisConfig(min=size, step=size, max=size)
