"""vLLM's own management of blocks under the random operations of `check_allocator`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
)
from vllm.v1.request import Request

from trencadis.kvcache.testing import (
    DEFAULT_SETTINGS,
    AllocatorFault,
    check_allocator,
)


class Itself:
    """vLLM's ``KVCacheManager`` as a `PagedAllocator`, called as its scheduler calls it.

    ``delays``: blocks enter the prefix cache when their tokens are computed, as where a connector
    fills them, and not when they are given.
    """

    def __init__(self, num_blocks: int, block_size: int, *, delays: bool = True) -> None:
        init_none_hash(sha256)
        layer = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
        )
        # Its block 0 is for padding.
        config = KVCacheConfig(1 + num_blocks, [], [KVCacheGroupSpec(["layer"], layer)])
        self.manager = KVCacheManager(config, 1024, block_size, block_size)
        self.block_size, self.delays = block_size, delays
        self.hasher = get_request_block_hasher(block_size, sha256)
        self.requests: dict[int, Any] = {}

    @property
    def num_free_blocks(self) -> int:
        return int(self.manager.block_pool.get_num_free_blocks())

    def allocate(self, seq_id: int, token_ids: Sequence[int]) -> int | None:
        params = SamplingParams(max_tokens=512)
        request = Request(str(seq_id), [*token_ids], params, None, block_hasher=self.hasher)
        blocks, num_cached, *_ = self.manager.get_computed_blocks(request)
        given = self.manager.allocate_slots(
            request,
            len(token_ids) - num_cached,
            num_cached,
            blocks,
            delay_cache_blocks=self.delays,
        )
        if given is None:
            return None
        request.num_computed_tokens = num_cached
        self.requests[seq_id] = request
        return int(num_cached)

    def append(self, seq_id: int, token_id: int) -> list[tuple[int, int]] | None:
        request = self.requests[seq_id]
        held = len(self.block_table(seq_id))
        if request.num_tokens == held * self.block_size and not self.num_free_blocks:
            return None
        request.append_output_token_ids(token_id)
        num_new = request.num_tokens - request.num_computed_tokens
        given = self.manager.allocate_slots(request, num_new, delay_cache_blocks=self.delays)
        assert given is not None
        return []

    def mark_computed(self, seq_id: int, num_tokens: int) -> None:
        request = self.requests[seq_id]
        request.num_computed_tokens = num_tokens
        if self.delays:
            self.manager.cache_blocks(request, num_tokens)

    def free(self, seq_id: int) -> None:
        self.manager.free(self.requests.pop(seq_id))

    def block_table(self, seq_id: int) -> list[int]:
        return [block - 1 for block in self.manager.get_block_ids(str(seq_id))[0]]


def test_its_blocks_never_mix() -> None:
    check_allocator(Itself)


def test_blocks_that_are_cached_when_they_are_given_are_shared_before_they_are_computed() -> None:
    """Its scheduler computes them in the same step; a host that does not would read nothing."""
    with pytest.raises(AllocatorFault):
        check_allocator(
            lambda *sizes: Itself(*sizes, delays=False),
            type(DEFAULT_SETTINGS)(DEFAULT_SETTINGS, max_examples=1000),
        )
