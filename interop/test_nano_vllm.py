"""nano-vllm's scheduler on our block manager: the same tokens, and the time of its bookkeeping.

``NANO_VLLM`` is a checkout of github.com/GeeeekExplorer/nano-vllm; ``nox -s interop`` makes one.
"""

from __future__ import annotations

import importlib
import os
import random
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from trencadis.kvcache.nano_vllm import NanoBlockManager
from trencadis.kvcache.testing import AllocatorFault, check_allocator

CHECKOUT = os.environ.get("NANO_VLLM", "")
if not CHECKOUT:
    pytest.skip("NANO_VLLM names no checkout", allow_module_level=True)

MOST_RATIO = 2.0
"""Of the time of its own bookkeeping."""


def nano(module: str) -> Any:
    """A module of nano-vllm, whose package itself needs a GPU to be imported."""
    if "nanovllm" not in sys.modules:
        package = types.ModuleType("nanovllm")
        package.__path__ = [str(Path(CHECKOUT) / "nanovllm")]
        sys.modules["nanovllm"] = package
    return importlib.import_module(f"nanovllm.{module}")


def make_scheduler(manager: type, num_blocks: int, block_size: int, **limits: int) -> Any:
    module = nano("engine.scheduler")
    nano("engine.sequence").Sequence.block_size = block_size
    module.BlockManager = manager
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits}
    names = {"eos": -1, "num_kvcache_blocks": num_blocks, "kvcache_block_size": block_size}
    return module.Scheduler(types.SimpleNamespace(**settings, **names))


class Model:
    """Its cache holds, for each slot, the token there; the next token depends on all of them."""

    def __init__(self, block_size: int) -> None:
        self.size = block_size
        self.slots: dict[tuple[int, int], int] = {}

    def run(self, seq: Any) -> int:
        size, end = self.size, seq.num_cached_tokens + seq.num_scheduled_tokens
        for position in range(seq.num_cached_tokens, end):
            block = seq.block_table[position // size]
            self.slots[block, position % size] = seq.token_ids[position]
        places = [(seq.block_table[at // size], at % size) for at in range(end)]
        return sum((at + 1) * self.slots[place] for at, place in enumerate(places)) % 997


def serve(manager: type, seed: int) -> tuple[dict[int, list[int]], int]:
    """The answers by number of the request, and how often one was preempted."""
    rng, size = random.Random(seed), 4
    scheduler = make_scheduler(manager, num_blocks=24, block_size=size)
    params = nano("sampling_params").SamplingParams
    seqs = []
    for _ in range(40):
        prompt = [rng.randrange(2)] * rng.randrange(1, 20) + [rng.randrange(9)]
        limit = params(max_tokens=rng.randrange(1, 24), ignore_eos=True)
        seqs.append(nano("engine.sequence").Sequence(prompt, limit))
        scheduler.add(seqs[-1])
    model, preempted, preempt = Model(size), [], scheduler.preempt
    scheduler.preempt = lambda seq: (preempted.append(seq), preempt(seq))
    while not scheduler.is_finished():
        batch, is_prefill = scheduler.schedule()
        scheduler.postprocess(batch, [model.run(seq) for seq in batch], is_prefill)
    return {number: seq.completion_token_ids for number, seq in enumerate(seqs)}, len(preempted)


@pytest.mark.parametrize("seed", range(20))
def test_its_tokens_are_those_of_its_own_manager(seed: int) -> None:
    own, num_preempted = serve(nano("engine.block_manager").BlockManager, seed)
    ours, _ = serve(NanoBlockManager, seed)
    assert ours == own
    assert num_preempted


def test_bookkeeping_takes_at_most_twice_as_long() -> None:
    """Steps of 256 sequences in a full decode batch; the two managers take turns."""
    own = nano("engine.block_manager").BlockManager
    runs = {manager: decoding(manager) for manager in (own, NanoBlockManager)}
    times: dict[type, list[float]] = {manager: [] for manager in runs}
    for _ in range(600):
        for manager, scheduler in runs.items():
            began = time.perf_counter()
            batch, is_prefill = scheduler.schedule()
            scheduler.postprocess(batch, [7] * len(batch), is_prefill)
            times[manager].append(time.perf_counter() - began)
    own_ms, ours_ms = (1e3 * statistics.median(times[manager]) for manager in runs)
    ratio = ours_ms / own_ms
    print(
        f"\nnano-vllm, 256 sequences: {own_ms:.3f} and {ours_ms:.3f} ms a step, {ratio:.2f} times"
    )
    assert ratio <= MOST_RATIO


def decoding(manager: type) -> Any:
    rng = random.Random(1)
    limits = {"max_num_seqs": 256, "max_num_batched_tokens": 1 << 20}
    scheduler = make_scheduler(manager, num_blocks=2048, block_size=256, **limits)
    params = nano("sampling_params").SamplingParams(max_tokens=10_000, ignore_eos=True)
    for _ in range(256):
        prompt = [rng.randrange(50_000) for _ in range(rng.randrange(100, 600))]
        scheduler.add(nano("engine.sequence").Sequence(prompt, params))
    batch, is_prefill = scheduler.schedule()
    assert len(batch) == 256
    scheduler.postprocess(batch, [7] * len(batch), is_prefill)
    return scheduler


class Itself:
    """nano-vllm's own block manager as a `PagedAllocator`, called as its scheduler calls it."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        nano("engine.sequence").Sequence.block_size = block_size
        self.manager = nano("engine.block_manager").BlockManager(num_blocks, block_size)
        self.sequences: dict[int, Any] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self.manager.free_block_ids)

    def allocate(self, seq_id: int, token_ids: Any) -> int | None:
        seq = nano("engine.sequence").Sequence(list(token_ids))
        num_cached = self.manager.can_allocate(seq)
        if num_cached < 0:
            return None
        self.manager.allocate(seq, num_cached)
        self.sequences[seq_id] = seq
        return int(seq.num_cached_tokens)

    def append(self, seq_id: int, token_id: int) -> list[tuple[int, int]] | None:
        seq = self.sequences[seq_id]
        seq.append_token(token_id)
        if not self.manager.can_append(seq):
            seq.token_ids.pop()
            seq.num_tokens -= 1
            return None
        self.manager.may_append(seq)
        return []

    def mark_computed(self, seq_id: int, num_tokens: int) -> None:
        seq = self.sequences[seq_id]
        seq.num_scheduled_tokens = num_tokens - seq.num_cached_tokens
        self.manager.hash_blocks(seq)
        seq.num_cached_tokens = num_tokens

    def free(self, seq_id: int) -> None:
        self.manager.deallocate(self.sequences.pop(seq_id))

    def block_table(self, seq_id: int) -> Any:
        return self.sequences[seq_id].block_table


def test_its_own_manager_is_sound_in_blocks_of_two_tokens_or_more() -> None:
    # In blocks of one token the second token gets none: `may_append` looks for a rest of 1.
    with pytest.raises(AllocatorFault, match=r"\d+ tokens have the blocks"):
        check_allocator(Itself, block_sizes=[1])
    check_allocator(Itself, block_sizes=[2, 4])
