"""What is inherited of the plugin's manager, as far as our class relies on it."""

from __future__ import annotations

from typing import Any

Listed = tuple[int, int, int]


class HPUBucketingManager:
    """The plugin's."""

    def __init__(self) -> None:
        self.prompt_buckets: list[Listed] = []
        self.decode_buckets: list[Listed] = []
        self.seed_decode_buckets: list[Listed] | None = None
        self.initialized = False
        self.logged: list[bool] = []
        self.asked: list[tuple[Listed, bool]] = []

    def initialize(self, **limits: Any) -> None:
        self.num_speculative_tokens = self.mamba_chunk_size = 0
        self.mamba_chunk_size_is_explicit = self.use_sliding_window = False
        self.skip_decode_block_clamp = False
        self.num_hpu_blocks: int | None = None
        self._fallback_max_ctx = 0
        self.__dict__.update(limits)
        self.initialized = True

    def generate_prompt_buckets(self) -> None:
        self.prompt_buckets = [(1, 7, 0)]

    def generate_decode_buckets(self) -> None:
        self.decode_buckets = []

    def generate_spec_decode_buckets(self, seeds: list[Listed]) -> list[Listed]:
        more = {(batch * 2, query, blocks * 2) for batch, query, blocks in seeds}
        return sorted({*seeds, *more})

    def generate_fallback_bucket(
        self, batch: int, query: int, blocks: int, is_prompt: bool = False
    ) -> Listed:
        self.asked.append(((batch, query, blocks), is_prompt))
        return batch + 1, query + 10 if is_prompt else 1, blocks + 3

    def log_generate_info(self, is_prompt: bool = False) -> None:
        self.logged.append(is_prompt)
