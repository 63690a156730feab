"""The buckets of this library in vLLM's plugin for Gaudi, under the plugin's own names.

`BucketingManager` takes the place of the plugin's ``HPUBucketingManager``, whose interface is that
of vllm-project/vllm-gaudi 091bbad (``extension/bucketing/common.py``). `install` in
`vllm_plugin` puts it there; only the plugin's processes import this module.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable

import attrs
from vllm_gaudi.extension.bucketing.common import HPUBucketingManager
from vllm_gaudi.extension.logger import logger
from vllm_gaudi.extension.runtime import get_config

from trencadis.bucketing.config import BucketingConfig
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.grid import BucketGrid, PromptCost
from trencadis.bucketing.grid.bucket import Cost, element_count
from trencadis.bucketing.serving_grids import decode_grid, prompt_grid

Listed = tuple[int, int, int]
"""A bucket as the plugin lists it: batch, query, context blocks; the query of a decode is 1."""

_AXES = ("batch", "query", "context_blocks")


class FoundBuckets:
    """The buckets of a phase: a list, which the plugin reads and changes, and its grid.

    The grid is made when a bucket is looked for, and again when the length of the list has changed.
    """

    def __init__(self, listed: list[Listed], cost: Cost = element_count) -> None:
        self.listed = listed
        self._cost = cost
        self._grid: BucketGrid | None = None

    def find(self, shape: Listed) -> Listed | None:
        """The bucket with the least padding that holds a shape; None for a bucket miss."""
        if not self.listed:
            return None
        if self._grid is None or len(self._grid) != len(self.listed):
            self._grid = BucketGrid.from_shapes(_AXES, self.listed, cost=self._cost)
        # The plugin asks with 0 sequences or tokens for a rank without requests.
        batch, query, context = shape
        bucket = self._grid.find((max(1, batch), max(1, query), context))
        return None if bucket is None else _listed(bucket.shape)

    def add(self, shape: Listed) -> None:
        """One more bucket, for a miss."""
        if shape not in self.listed:
            self.listed.append(shape)
            self.listed.sort()
            self._grid = self._grid and self._grid.with_bucket(shape)


class BucketingManager(HPUBucketingManager):  # type: ignore[misc]  # not there where mypy runs
    """The plugin's manager with the grids of `prompt_grid` and `decode_grid`.

    Their variables are read (``VLLM_PROMPT_BUCKETING_STRATEGY=fit``, those of every axis with
    ``exp``, bucket files). Every shape within the limits has a bucket, of the least padding. What
    the plugin does beside that is unchanged: fallbacks of misses, buckets of speculative decoding,
    merged prefill, which has the plugin's own buckets.
    """

    @property
    def prompt_buckets(self) -> list[Listed]:
        """Those of prefill. The plugin changes the list, and replaces it."""
        return self._found("prompt").listed

    @prompt_buckets.setter
    def prompt_buckets(self, listed: list[Listed]) -> None:
        cost: Cost = element_count
        if getattr(self, "initialized", False):
            cost = PromptCost(self.max_model_len, self.block_size)
        self.__dict__["prompt"] = FoundBuckets(listed, cost)

    @property
    def decode_buckets(self) -> list[Listed]:
        """Those of decode, with those of speculative decoding."""
        return self._found("decode").listed

    @decode_buckets.setter
    def decode_buckets(self, listed: list[Listed]) -> None:
        self.__dict__["decode"] = FoundBuckets(listed)

    @property
    def seed_decode_buckets(self) -> list[Listed] | None:
        """Those of decode without those of speculative decoding, where there are any."""
        return self._found("seed").listed or None

    @seed_decode_buckets.setter
    def seed_decode_buckets(self, listed: list[Listed] | None) -> None:
        self.__dict__["seed"] = FoundBuckets(listed or [])

    def _found(self, phase: str) -> FoundBuckets:
        found: FoundBuckets = self.__dict__.setdefault(phase, FoundBuckets([]))
        return found

    def generate_prompt_buckets(self) -> None:
        """Set ``prompt_buckets``. Raises `BucketingError` for settings that cannot be used."""
        if not self.initialized or get_config().merged_prefill:
            super().generate_prompt_buckets()
            return
        config = self._config()
        self._check_slices(config)
        grid = prompt_grid(
            config,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_prefill_seqs,
            block_size=self.block_size,
        )
        listed = {self._as_kernels_take(*bucket.shape) for bucket in grid}
        # A longer query cannot be warmed up; what pads to it gets the plugin's fallback.
        self.prompt_buckets = sorted(each for each in listed if each[1] <= self.max_model_len)
        self.log_generate_info(True)

    def generate_decode_buckets(self) -> None:
        """Set ``decode_buckets``. Raises `BucketingError` for settings that cannot be used."""
        if not self.initialized:
            super().generate_decode_buckets()
            return
        config = self._config()
        grid = decode_grid(
            config,
            max_num_seqs=self.max_num_seqs,
            num_blocks=self.num_hpu_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            clamp=not self.skip_decode_block_clamp,
        )
        shapes = [bucket.shape for bucket in grid]
        if not config.contiguous_pa:
            # Each sequence has a block: the plugin's warm-up takes no fewer.
            shapes = [(batch, max(batch, blocks)) for batch, blocks in shapes]
        listed = sorted({(batch, 1, blocks) for batch, blocks in shapes})
        if self.num_speculative_tokens:
            self.seed_decode_buckets = listed
            listed = self.generate_spec_decode_buckets(listed)
        self.decode_buckets = listed
        self._fallback_max_ctx = max(blocks for _, _, blocks in listed)
        self.log_generate_info(False)

    def find_prompt_bucket(self, batch_size: int, seq_len: int, ctx: int = 0) -> Listed:
        """The bucket of a prompt batch; that of a miss is added to ``prompt_buckets``."""
        shape = (batch_size, seq_len, ctx)
        if not self.initialized:
            return shape
        buckets = self._found("prompt")
        return buckets.find(shape) or self._added(
            buckets, "Prompt", shape, self.generate_fallback_bucket(*shape, is_prompt=True)
        )

    def find_decode_bucket(
        self, batch_size: int, num_blocks: int, seed_buckets: bool = False
    ) -> Listed:
        """The bucket of a decode batch; that of a miss is added to ``decode_buckets``."""
        if not self.initialized:
            return (batch_size, 1, num_blocks)
        most = getattr(self, "_fallback_max_ctx", 0)
        shape = (batch_size, 1, min(num_blocks, most) if most > 0 else num_blocks)
        found = self._found("seed").find(shape) if seed_buckets else None
        buckets = self._found("decode")
        return (
            found
            or buckets.find(shape)
            or self._added(buckets, "Decode", shape, self.generate_fallback_bucket(*shape))
        )

    def _added(self, buckets: FoundBuckets, phase: str, shape: Listed, fallback: Listed) -> Listed:
        if fallback not in buckets.listed:
            logger().warning(
                "%s bucket for %s was not prepared. Adding new bucket: %s", phase, shape, fallback
            )
            buckets.add(fallback)
        return fallback

    def _config(self) -> BucketingConfig:
        config = BucketingConfig.from_env(os.environ)
        return attrs.evolve(config, contiguous_pa=bool(get_config().use_contiguous_pa))

    def _check_slices(self, config: BucketingConfig) -> None:
        """Raise `BucketingError` for buckets that FusedSDPA's slices would compute wrongly.

        The plugin masks as many of the last slices as the padding of ``pad`` can reach, and no
        others (``extension/utils.py``).
        """
        if not getattr(get_config(), "enable_fsdpa_slicing", False):
            return
        file = config.bucket_file
        found = f"the file {file}" if file else config.strategy_of("prompt")
        if found != "pad":
            raise BucketingError(
                "slices of FusedSDPA (VLLM_HPU_FSDPA_SLICE_ENABLED) mask the padding of the "
                f"strategy pad alone, and the buckets of prompts are those of {found}: unset "
                "VLLM_PROMPT_BUCKETING_STRATEGY and VLLM_BUCKETING_FROM_FILE, or switch slices off"
            )

    def _as_kernels_take(self, batch: int, query: int, context: int) -> Listed:
        """A prompt bucket whose query is one that kernels of this model compute."""
        if self.mamba_chunk_size > 0 and self.mamba_chunk_size_is_explicit:
            query = math.ceil(query / self.mamba_chunk_size) * self.mamba_chunk_size
        if self.use_sliding_window and context == 0 and query >= self.slice_thld:
            query = math.ceil(query / self.slice_size) * self.slice_size
        return batch, query, context


def _listed(shape: Iterable[int]) -> Listed:
    batch, query, context = shape
    return batch, query, context
