"""Warming up the sampler: every batch size with every kind of sampling settings (seed 000).

The first request with a new combination would otherwise compile its graph, and so would the first
batch after one has grown or shrunk.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

import attrs

from trencadis.bucketing import Bucket

logger = logging.getLogger("trencadis.warmup")


@attrs.frozen
class SamplerConfig:
    """One kind of sampling. ``top_k`` of 0 means no limit."""

    temperature: float
    top_p: float
    top_k: int
    batch_changed: bool
    """Whether the sampler is told that the batch differs from the step before."""

    @property
    def greedy(self) -> bool:
        """Whether requests are to be marked as greedy; else as random."""
        return self.temperature == 0.0

    def describe(self) -> str:
        """The log line of the seeds."""
        return (
            f"temp={self.temperature}, top_p={self.top_p}, top_k={self.top_k}, "
            f"batch_changed={self.batch_changed}"
        )


@attrs.frozen
class DummyRequest:
    """A request that exists for the sampler's warm-up alone; it owns one KV block, the padding one.

    ``output_token_ids`` are placeholders, as a request has them that is decoding.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = (0,)
    output_token_ids: tuple[int, ...] = (0,)
    block_ids: tuple[int, ...] = (0,)


class SamplerRuntime(Protocol):
    """A host whose sampler is warmed up."""

    def open_batch(self, batch_size: int, requests: tuple[DummyRequest, ...]) -> None:
        """Register the requests; compute logits of ``batch_size`` rows from dummy hidden states.

        There is always one request, also for a batch of 0 rows.
        """

    def sample(self, config: SamplerConfig) -> None:
        """Give all requests these settings, mark them greedy or random, and sample once."""

    def reset(self) -> None:
        """Forget what sampling has noted of this iteration."""

    def close_batch(self) -> None:
        """Forget the requests."""

    def synchronize(self) -> None:
        """Wait until the device has done everything it was given."""


_KINDS = ((0.0, 1.0, 0), (1.0, 1.0, 0), (0.7, 0.9, 50), (0.3, 0.95, 20), (1.2, 0.8, 100))
_TOP_P_ONLY = (0.8, 0.85, 0)

SAMPLER_CONFIGS = tuple(
    SamplerConfig(*kind, batch_changed)
    for batch_changed in (True, False)
    for kind in (*_KINDS, _TOP_P_ONLY)
)
"""The twelve of seed 000: greedy, plain random, creative, conservative, hot, top-p only; each with
a changed and an unchanged batch. A sampler with further branches adds them to this list."""


def sampler_batch_sizes(decode_buckets: Iterable[Bucket]) -> tuple[int, ...]:
    """0 and 1, which always occur, and the batch sizes of the decode buckets."""
    return tuple(sorted({0, 1, *(bucket["batch"] for bucket in decode_buckets)}))


def warm_up_sampler(
    runtime: SamplerRuntime,
    batch_sizes: Iterable[int],
    configs: Iterable[SamplerConfig] = SAMPLER_CONFIGS,
) -> None:
    """Sample once with each of ``configs`` for each batch size. Order and lines: seed 000.

    An error that the runtime raises is passed on, the batch being closed.
    """
    sizes, kinds = list(batch_sizes), tuple(configs)
    logger.info("Warming up sampler with batch sizes: %s and following configs:", sizes)
    for config in kinds:
        logger.info(config.describe())
    logger.info("Starting sampler warmup...")
    for size in sizes:
        requests = tuple(DummyRequest(f"warmup-{size}-{i}") for i in range(max(1, size)))
        runtime.open_batch(size, requests)
        try:
            for config in kinds:
                runtime.sample(config)
                runtime.reset()
        finally:
            runtime.close_batch()
    runtime.synchronize()
    logger.info("Sampler warmup completed successfully")
