"""Serves the same shapes, or the same traffic, with the plugin's class and with ours."""

from __future__ import annotations

import logging
import math
import os
import random
import sys
from typing import Any

import torch
from plugin_traffic import SIZE, Traffic, caches
from vllm_gaudi.extension import defragmentation as defragmentation_module
from vllm_gaudi.extension.bucketing import common
from vllm_gaudi.extension.runtime import get_config

logging.disable(logging.CRITICAL)
THEIRS = common.HPUBucketingManager, defragmentation_module.OnlineDefragmenter
os.environ["TRENCADIS_VLLM_GAUDI"] = "buckets, defragmentation"

import vllm_gaudi_install  # noqa: E402, F401 - after the plugin's classes were read

OURS = common.HPUBucketingManager, defragmentation_module.OnlineDefragmenter


def buckets() -> None:
    """Two lines, the plugin's and ours: buckets, misses, and the padding of the prompts."""
    get_config(prefix_caching=False, model_type="llama", bridge_mode="eager")
    for made in (THEIRS[0], OURS[0]):
        manager = made()
        limits = {"max_num_seqs": 128, "max_num_prefill_seqs": 4, "block_size": 128}
        manager.initialize(**limits, max_num_batched_tokens=2048, max_model_len=8192)
        manager.num_hpu_blocks = 2305
        manager.generate_prompt_buckets()
        manager.generate_decode_buckets()
        count = len(manager.prompt_buckets) + len(manager.decode_buckets)
        rng, padded, real = random.Random(1), 0, 0
        for _ in range(20_000):
            batch = rng.randint(1, 4)
            query = rng.randint(1, 2048 if batch == 1 else 512)  # padded, it is within the budget
            context = rng.randint(0, math.ceil((8191 - query) / 128))
            bucket = manager.find_prompt_bucket(batch, query, context)
            padded, real = padded + bucket[0] * bucket[1], real + batch * query
            manager.find_decode_bucket(rng.randint(1, 128), rng.randint(1, 2304))
        misses = len(manager.prompt_buckets) + len(manager.decode_buckets) - count
        print(count, misses, padded / real)


class Mover:
    """Counts the blocks that are copied."""

    def __init__(self, move: Any, *, both_ways: bool) -> None:
        self.move = move
        self.copies_of_pair = 1 + both_ways
        self.num_copied = 0

    def __call__(self, srcs: torch.Tensor, dsts: torch.Tensor, *rest: Any) -> None:
        used = srcs >= 0  # the plugin pads with -1, which the CPU rejects
        srcs, dsts = srcs[used].cpu(), dsts[used].cpu()
        pairs = set(zip(srcs.tolist(), dsts.tolist(), strict=True))
        self.num_copied += len(pairs) * self.copies_of_pair
        self.move(srcs, dsts, *rest)


def defragmentation(*, keeps: bool) -> None:
    """The blocks that both copy. Each block's content is checked after each step."""
    given = {"prefix_caching": keeps, "model_type": "llama", "bridge_mode": "lazy"}
    get_config(**given, use_contiguous_pa=True, VLLM_DEFRAG_WITH_GRAPHS=False, defrag=True)
    copied = []
    for made in (THEIRS[1], OURS[1]):
        defragmenter = made(caches(400), SIZE)
        # The plugin copies in both directions where prefixes are cached.
        mover = Mover(defragmenter.cache_utils, both_ways=keeps and made is THEIRS[1])
        defragmenter.cache_utils = mover
        # The plugin's loses the blocks of an id that comes again in the step in which it ends.
        traffic = Traffic(defragmenter, 400, seed=7, keeps=keeps, ids_return=False)
        for _ in range(400):
            traffic.step()
            traffic.check(40)
        copied.append(mover.num_copied)
    print(*copied)


if __name__ == "__main__":
    what, keeps = (*sys.argv[1:], "")[:2]
    if what == "buckets":
        buckets()
    else:
        defragmentation(keeps=bool(keeps))
