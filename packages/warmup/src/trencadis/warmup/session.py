"""The warm-up session: every bucket of both grids runs once before the server listens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from trencadis.bucketing import Bucket
from trencadis.warmup.memory import format_bytes
from trencadis.warmup.progress import track
from trencadis.warmup.report import BucketTime, WarmupReport
from trencadis.warmup.runtime import Phase, Runtime

logger = logging.getLogger("trencadis.warmup")

_LOGGED_AXES = {
    "batch": "batch_size",
    "seq": "seq_len",
    "query": "query_len",
    "context_blocks": "num_blocks",
    "blocks": "num_blocks",
}
"""Names of the axes in the seeds' and the Gaudi plugin's warm-up lines."""


def warm_up(
    runtime: Runtime,
    prompt_buckets: Iterable[Bucket],
    decode_buckets: Iterable[Bucket],
    *,
    clock: Callable[[], float] = time.monotonic,
) -> WarmupReport:
    """Run every bucket once, largest first, prompts before decodes (order and lines: seed 000).

    Largest first makes the allocator take its largest pieces while memory is whole. ``clock``
    gives seconds. An error that the runtime raises is passed on.
    """
    started, free_at_start = clock(), runtime.free_memory()
    queue = [*_queue(Phase.PROMPT, prompt_buckets), *_queue(Phase.DECODE, decode_buckets)]
    executed = []
    for phase, bucket, position in track(queue, len(queue), "Warm-up"):
        logger.info("[Warmup][%s][%s] %s", phase.value, position, _describe(runtime, bucket))
        before = clock()
        runtime.execute(phase, bucket)
        runtime.synchronize()
        executed.append(BucketTime(phase, bucket, clock() - before))
    report = WarmupReport(tuple(executed), clock() - started, free_at_start - runtime.free_memory())
    logger.info(report.describe())
    return report


def _queue(phase: Phase, buckets: Iterable[Bucket]) -> list[tuple[Phase, Bucket, str]]:
    ordered = sorted(buckets, key=lambda bucket: bucket.shape, reverse=True)
    return [(phase, bucket, f"{i}/{len(ordered)}") for i, bucket in enumerate(ordered, 1)]


def _describe(runtime: Runtime, bucket: Bucket) -> str:
    shape = " ".join(
        f"{_LOGGED_AXES.get(axis, axis)}:{size}"
        for axis, size in zip(bucket.axes, bucket.shape, strict=True)
    )
    return f"{shape} free_mem:{format_bytes(runtime.free_memory())}"
