"""Which grids a worker serves: from the settings, fitted to a file, or learned.

`grids` and `learned_grids` make them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Sequence
from pathlib import Path

from trencadis.bucketing import Bucket, BucketGrid, BucketingConfig, BucketingError
from trencadis.engine.devices import Device
from trencadis.engine.errors import ConfigError
from trencadis.engine.runner.grids import (
    Grids,
    announce_grids,
    build_grids,
    build_prompts,
    largest_prompts,
    sequence_grids,
)
from trencadis.engine.runner.learned_grids import (
    fitted_config,
    learn_decodes,
    learn_grids,
    served_replays,
    served_traffic,
    traffic_file,
)
from trencadis.engine.runner.limits import ServingLimits, token_budget
from trencadis.engine.runner.model_input import MASK_ROWS
from trencadis.engine.runner.recorded_traffic import TrafficLog
from trencadis.engine.runner.shapes import ChunkSize, PromptShape, RaggedShape
from trencadis.engine.settings.engine_config import FITTED, EngineConfig
from trencadis.kvcache import ceil_div
from trencadis.warmup import Phase

logger = logging.getLogger("trencadis.engine")


class GridChoice:
    """The grids of a model on a device, and the traffic that they are fitted to.

    Raises `ConfigError` for bucket settings and files of traffic that cannot be used.
    """

    def __init__(self, config: EngineConfig, device: Device, max_model_len: int) -> None:
        self._config = config
        self._device = device
        self._max_model_len = max_model_len
        self._traffic_file = traffic_file(config)
        self._served = served_traffic(config)

    def sequence_grids(self) -> Grids | None:
        """The grids of sequence lengths, which depend on no KV cache; None without that setting."""
        if not self._config.use_buckets or self._config.bucket_grid != "seq":
            return None
        with _bucketing_errors():
            return sequence_grids(self._config.bucketing, self._config, self._max_model_len)

    def prompt_grid(self) -> BucketGrid | None:
        """The grid of padded prompts, which depends on no KV cache; None where there is none."""
        config = self._config
        if not config.use_buckets or config.bucket_grid == "seq" or self._is_ragged:
            return None
        per_sequence = ceil_div(self._max_model_len, config.block_size)
        limits = ServingLimits.of(config, self._max_model_len, per_sequence + 1)
        with _bucketing_errors():
            return build_prompts(
                self._bucketing(), limits, exponential=self._device.exponential_grid
            )

    def largest_prompts(
        self, grids: Grids | None, prompts: BucketGrid | None
    ) -> Sequence[PromptShape | RaggedShape]:
        """The shapes of prefill batches that may take the most memory.

        Of the results of `sequence_grids` and `prompt_grid`, or without buckets.
        """
        budget, longest = token_budget(self._config), self._max_model_len
        block_size = self._config.block_size
        if self.has_ragged_prompts:
            # A chunk attends in slices, so one of a slice's size has the largest context and mask.
            query = min(budget, MASK_ROWS, max(1, longest - block_size))
            context = longest - query
            chunk = ChunkSize(query, context, ceil_div(context, block_size))
            return [RaggedShape(budget, (chunk,))]
        if grids is not None:
            shapes = [
                shape
                for bucket in grids.prompt.buckets
                for shape in grids.prompt_shapes(bucket.shape)
                if isinstance(shape, PromptShape)
            ]
        elif prompts is not None:
            shapes = [PromptShape(*bucket.shape) for bucket in prompts.buckets]
        else:
            query = min(budget, longest)
            context = ceil_div(longest - query, block_size)
            shapes = [
                PromptShape(ceil_div(budget, query), query, 0),
                PromptShape(1, query, context),
            ]
        return largest_prompts(shapes, block_size)

    def choose(self, limits: ServingLimits, prompts: BucketGrid | None) -> Grids | None:
        """Both grids within ``limits``; None without buckets. ``prompts``: from `prompt_grid`."""
        if not self._config.use_buckets:
            return None
        with _bucketing_errors():
            learned = self._learned(limits)
            if learned is not None:
                announce_grids(learned, limits, f"learned from {self._traffic_file}")
                return learned
            return build_grids(
                self._bucketing(),
                limits,
                exponential=self._device.exponential_grid,
                ragged=self._is_ragged,
                prompts=prompts,
            )

    def traffic_log(self, grids: Grids | None) -> TrafficLog | None:
        """What records the shapes of batches; None unless the settings ask for it."""
        if self._traffic_file is None:
            return None
        axes = {
            Phase.PROMPT: ("batch", "query", "context_blocks"),
            Phase.DECODE: ("batch", "blocks"),
        }
        if grids is not None:
            axes = {Phase.PROMPT: grids.prompt.axes, Phase.DECODE: grids.decode.axes}
        logger.info("The shapes of batches are recorded in %s", self._traffic_file)
        return TrafficLog(self._traffic_file, axes)

    def replays(self, grids: Grids) -> dict[Phase, dict[Bucket, float]]:
        """How often each bucket ran in what was served, for the order of graphs."""
        with _bucketing_errors():
            return served_replays(grids, self._config.graphs, self._served)

    @property
    def has_ragged_prompts(self) -> bool:
        """Whether all prompts run ragged."""
        return self._is_ragged and self._config.use_buckets

    @property
    def _is_ragged(self) -> bool:
        """Whether prompts are ragged: where the device can, unless the user chooses buckets."""
        config = self._config
        chosen = config.bucketing is not None or config.bucket_grid not in ("paged", "learn")
        return self._device.attention.as_operator and not chosen

    def _bucketing(self) -> BucketingConfig | None:
        """The user's bucket settings, with the fit to a file that ``bucket_grid`` names."""
        config, grid = self._config.bucketing, self._config.bucket_grid
        if not grid.startswith(FITTED):
            return config
        return fitted_config(config or BucketingConfig(), Path(grid.removeprefix(FITTED)))

    def _learned(self, limits: ServingLimits) -> Grids | None:
        """Grids fitted to what was served; None unless that was asked for, and enough."""
        if self._config.bucket_grid != "learn" or self._traffic_file is None:
            return None
        if self._is_ragged:
            device = self._device
            if device.dynamic_shapes and not device.supports_graphs and not device.compiles_forward:
                logger.info(
                    "Nothing is learned: prompts and decodes run in their own sizes on %s, without "
                    "buckets to pad to. What is recorded in %s is for devices that pad",
                    device.name,
                    self._traffic_file,
                )
                return None
            return learn_decodes(self._traffic_file, self._served, limits)
        return learn_grids(
            self._config.bucketing,
            self._traffic_file,
            self._served,
            limits,
            exponential=self._device.exponential_grid,
        )


@contextlib.contextmanager
def _bucketing_errors() -> Generator[None, None, None]:
    """Turn errors of bucket settings into those of the engine."""
    try:
        yield
    except BucketingError as error:
        raise ConfigError(str(error)) from error
