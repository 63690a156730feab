"""Warm-up of the sampler: every batch size with every kind of sampling parameters (seed 000).

Otherwise the first request with a new combination would compile, and so would the first batch of a
new size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

import attrs

from trencadis.bucketing import Bucket
from trencadis.warmup.errors import ConfigError
from trencadis.warmup.validators import as_buckets, as_tuple, instance_of, integer, require_methods

logger = logging.getLogger("trencadis.warmup")


@attrs.frozen
class SamplerConfig:
    """One kind of sampling parameters. ``top_k`` of 0 means no limit.

    ``batch_changed``: whether the sampler is told that the batch differs from the previous step.
    """

    temperature: float
    top_p: float
    top_k: int
    batch_changed: bool

    @property
    def greedy(self) -> bool:
        """Whether requests are marked as greedy; otherwise as random."""
        return self.temperature == 0.0

    def describe(self) -> str:
        """The log line of seed 000."""
        return (
            f"temp={self.temperature}, top_p={self.top_p}, top_k={self.top_k}, "
            f"batch_changed={self.batch_changed}"
        )


@attrs.frozen
class DummyRequest:
    """A request for the warm-up of the sampler only. Its only KV block is the padding block.

    ``output_token_ids`` are placeholders: the request looks as if it were decoding.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...] = (0,)
    output_token_ids: tuple[int, ...] = (0,)
    block_ids: tuple[int, ...] = (0,)


class SamplerRuntime(Protocol):
    """A host with a sampler."""

    def open_batch(self, batch_size: int, requests: tuple[DummyRequest, ...]) -> None:
        """Add the requests, and compute logits [batch_size, vocabulary] from dummy hidden states.

        There is at least one request, even if ``batch_size`` is 0.
        """

    def sample(self, config: SamplerConfig) -> None:
        """Set the parameters of all requests, mark them greedy or random, and sample once."""

    def reset(self) -> None:
        """Reset the sampler's state of this iteration."""

    def close_batch(self) -> None:
        """Remove the requests."""

    def synchronize(self) -> None:
        """Wait until the device has finished all submitted work."""


_PARAMETERS = (
    (0.0, 1.0, 0),  # greedy
    (1.0, 1.0, 0),  # random, no limits
    (0.7, 0.9, 50),
    (0.3, 0.95, 20),
    (1.2, 0.8, 100),
    (0.8, 0.85, 0),  # top-p only
)
"""Temperature, top-p and top-k."""

SAMPLER_CONFIGS = tuple(
    SamplerConfig(*parameters, batch_changed)
    for batch_changed in (True, False)
    for parameters in _PARAMETERS
)
"""The twelve configurations of seed 000. A sampler with more branches needs more of them."""


SAMPLER_METHODS = ("open_batch", "sample", "reset", "close_batch", "synchronize")
"""The methods of a `SamplerRuntime`."""

MAX_BATCH_SIZE = 1 << 20
"""Most sequences of a batch that is warmed up."""


def sampler_batch_sizes(*grids: Iterable[Bucket]) -> tuple[int, ...]:
    """0 and 1, which every server needs, and the batch sizes of the buckets of each grid.

    Seed 000 takes those of the decode grid; prompts that end together are sampled together, too.
    Raises `ConfigError` for buckets without an axis ``batch``.
    """
    sizes = {0, 1}
    for grid in grids:
        buckets = as_buckets("buckets", grid)
        if buckets and "batch" not in buckets[0].axes:
            raise ConfigError(f"buckets have the axes {buckets[0].axes}: name one of them batch")
        sizes.update(bucket["batch"] for bucket in buckets)
    return tuple(sorted(sizes))


def warm_up_sampler(
    runtime: SamplerRuntime,
    batch_sizes: Iterable[int],
    configs: Iterable[SamplerConfig] = SAMPLER_CONFIGS,
) -> None:
    """Sample once with each of ``configs`` for each batch size. Order and log lines: seed 000.

    An error of the runtime is passed on, after the batch is closed. Raises `ConfigError` for wrong
    arguments.
    """
    require_methods("sampler", runtime, SAMPLER_METHODS)
    all_configs = as_tuple("configs", configs, instance_of(SamplerConfig))
    sizes = list(as_tuple("batch_sizes", batch_sizes, integer(0, MAX_BATCH_SIZE)))
    logger.info("Warming up sampler with batch sizes: %s and following configs:", sizes)
    for config in all_configs:
        logger.info(config.describe())
    logger.info("Starting sampler warmup...")
    for size in sizes:
        requests = tuple(DummyRequest(f"warmup-{size}-{i}") for i in range(max(1, size)))
        runtime.open_batch(size, requests)
        try:
            for config in all_configs:
                runtime.sample(config)
                runtime.reset()
        finally:
            runtime.close_batch()
    runtime.synchronize()
    logger.info("Sampler warmup completed successfully")
