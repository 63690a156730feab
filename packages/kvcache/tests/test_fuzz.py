"""Random calls of the public API: right ones, and ones with wrong types, odd values, wrong orders.

Only errors of this package leave, a rejected call changes nothing, and right calls work after it.
`Fuzzer(seed).calls(n)` repeats a failure, which names its seed.
"""

from __future__ import annotations

import importlib.util
import io
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trencadis.kvcache import (
    AllocStatus,
    BandwidthGovernor,
    BlockCopy,
    BlockManager,
    BlockPool,
    CacheConfig,
    CopyPlan,
    DefragConfig,
    Defragmenter,
    Direction,
    HostBlockPool,
    KVCacheError,
    PrefixKeys,
    RequestHasher,
    lay_out,
    lay_out_pairs,
    split_to_plan_sizes,
    warm_up_defragmenter,
)

NUM_CALLS = 3_000
NUM_SOAK_CALLS = 100_000
CALLS_PER_SEED = 500


def no_result(*arguments: object) -> None:
    """A callable whose result is of no use."""


ODD_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 8, 99, 1 << 31, 10**9, 10**30, -(10**30), 10**400),
    *(0.0, 0.5, 2.5, -1.0, 1e308, float("nan"), float("inf"), -float("inf"), 1j),
    *("", "x", "12", "attention", b"", b"\x01\x02\x03\x04", bytearray(b"1234")),
    *([], (), {}, set(), frozenset({1}), [1], (1, 2), [[1]], [(1, 2)], [(1, 9)], [1.5], ["1"]),
    *([None], {1: 2}, {"num_blocks": 8}, [1 << 40], [float("nan")], range(5), range(10**30)),
    *(np.int64(1), np.float32(1.5), np.array(2), np.array([1, 2]), np.zeros((2, 2)), object()),
    *(
        no_result,
        Direction.OUT,
        BlockCopy(1, 2),
        [BlockCopy(-1, 2)],
        [BlockCopy("1", None)],
    ),
    *(ValueError("x"), ..., NotImplemented, CacheConfig(num_blocks=4, block_size=2)),
)

HAS_TORCH = importlib.util.find_spec("torch") is not None
SIZE = 2
NUM_BLOCKS = 12
NUM_HOST_BLOCKS = 6


class StatePickler(pickle.Pickler):
    """Writes out the state of a manager, too, which cannot be pickled to make another."""

    def reducer_override(self, value: Any) -> Any:
        return object.__reduce_ex__(value, 5) if isinstance(value, BlockManager) else NotImplemented


Call = tuple[Callable[..., object], tuple[str, ...], dict[str, str]]
"""A function, and the kinds of its positional and of its named arguments."""


class Fuzzer:
    """The objects under test, and right arguments for their methods, by the name of the kind."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.seed = seed
        governor = BandwidthGovernor(1, 2.0, 2.0) if rng.random() < 0.5 else None
        config = CacheConfig(
            num_blocks=NUM_BLOCKS,
            block_size=SIZE,
            num_host_blocks=NUM_HOST_BLOCKS,
            enable_prefix_caching=rng.random() < 0.9,
        )
        self.manager = BlockManager(config, governor=governor)
        self.defragmenter = Defragmenter(self.manager, DefragConfig(threshold=0))
        self.pool, self.host_pool = BlockPool(8), HostBlockPool(4)
        self.governor = BandwidthGovernor(1, 2.0, 2.0)
        self.plan = CopyPlan()
        self.cache: Any = None
        if HAS_TORCH and rng.random() < 0.2:
            self.cache = small_cache()
        self.targets: list[Call] = [
            *self.manager_calls(),
            *self.other_calls(),
            *(self.cache_calls() if self.cache is not None else ()),
        ]

    def manager_calls(self) -> list[Call]:
        manager = self.manager
        keys = {"prefix_keys": "prefix_keys", "extra_keys": "extra_keys"}
        return [
            *[(manager.allocate, ("new_id", "tokens"), keys)] * 6,
            (manager.can_allocate, ("tokens",), {**keys, "num_spare": "num_tokens"}),
            *[(self.compute, ("seq_id",), {})] * 6,
            *[(manager.mark_computed, ("seq_id", "num_tokens"), {})] * 2,
            *[(manager.append, ("seq_id", "tokens"), {})] * 3,
            (manager.blocks_to_append, ("seq_id", "num_tokens"), {}),
            *[(manager.fork, ("seq_id", "new_id"), {})] * 3,
            *[(manager.free, ("seq_id",), {})] * 3,
            (manager.block_table, ("seq_id",), {}),
            (manager.num_tokens, ("seq_id",), {}),
            (manager.is_resident, ("seq_id",), {}),
            (manager.__contains__, ("seq_id",), {}),
            (manager.num_cached_prefix_blocks, ("prefix_keys",), {"num_tokens": "num_tokens"}),
            (manager.can_swap_out, ("seq_ids",), {}),
            *[(manager.swap_out, ("seq_ids", "now"), {})] * 3,
            (manager.can_swap_in, ("seq_ids",), {"num_spare": "num_tokens"}),
            *[(manager.swap_in, ("seq_ids", "now"), {})] * 3,
            (manager.resume_swaps, ("now",), {}),
            *[(manager.relocate, ("moves",), {"keep": "blocks"})] * 3,
            (manager.hasher, ("tokens", "extra_keys"), {}),
            (manager.pool.ref_count, ("block",), {}),
            (manager.pool.is_shared, ("block",), {}),
            (manager.host_pool.ref_count, ("block",), {}),
            (self.defragmenter.defragment, (), {}),
            (self.defragmenter.is_due, (), {}),
        ]

    def other_calls(self) -> list[Call]:
        pool, host_pool = self.pool, self.host_pool
        return [
            *[
                (pool.allocate, (), {}),
                (pool.share, ("block",), {}),
                (pool.release, ("block",), {}),
                (pool.block_map, ("number",), {}),
            ],
            (lambda *move: pool.relocate(*move[:2], keep=move[2]), ("block", "block", "flag"), {}),
            (lambda: host_pool.allocate(None), (), {}),
            *[(host_pool.share, ("block",), {}), (host_pool.release, ("block",), {})],
            (self.governor.grant, ("number", "now"), {}),
            (self.plan.add, ("direction", "moves"), {}),
            (lambda copies: list(split_to_plan_sizes(copies)), ("moves",), {}),
            (lay_out, ("tables", "lengths", "size"), {"num_blocks": "number"}),
            (lay_out_pairs, ("tables", "lengths", "size"), {}),
            (warm_up_defragmenter, ("callable", "number", "sizes"), {}),
            (new_config, (), CONFIG),
            (DefragConfig, (), {"threshold": "number", "debug": "flag", "keep_from": "share"}),
            (DefragConfig.from_env, ("environ",), {}),
            (BandwidthGovernor, ("number", "rate", "rate"), {}),
            (BlockPool, ("number", "sizes"), {}),
            (HostBlockPool, ("number",), {}),
            (RequestHasher, ("size", "callable"), {}),
            (PrefixKeys, ("nothing", "nothing"), {}),
            (BlockManager, ("config",), {"hasher": "hasher", "governor": "governor"}),
            (Defragmenter, ("manager", "defrag_config"), {}),
        ]

    def cache_calls(self) -> list[Call]:
        cache = self.cache
        return [
            *[(call, ("moves",), {}) for call in (cache.copy, cache.swap_out, cache.swap_in)],
            (cache.carry_out, ("plan",), {}),
            *[(cache.key, ("layer",), {}), (cache.value, ("layer",), {})],
            (small_cache, (), dict.fromkeys(("num_blocks", "key_width"), "small")),
            *[(small_cache, (), {name: "nothing"}) for name in ("dtype", "layers")],
            (small_cache, (), {"token_rows": "flag"}),
            (small_cache, (), {"device": "nothing"}),
        ]

    def calls(self, count: int) -> None:
        for number in range(count):
            try:
                self.call()
            except AssertionError as error:  # noqa: PERF203
                raise AssertionError(f"call {number} of Fuzzer({self.seed}): {error}") from error
        self.check_that_right_calls_work()

    def call(self) -> None:
        function, kinds, keywords = self.rng.choice(self.targets)
        share_odd = self.rng.choice((0.0, 0.0, 0.3, 1.0))
        arguments = [self.argument(kind, share_odd) for kind in kinds]
        named = {
            name: self.argument(kind, share_odd)
            for name, kind in keywords.items()
            if self.rng.random() < 0.5
        }
        before = self.state()
        try:
            function(*arguments, **named)
        except KVCacheError:
            assert self.state() == before, f"{function} with {arguments}, {named} changed the state"
        except Exception as error:
            raise AssertionError(f"{function} with {arguments}, {named}: {error!r}") from error

    def state(self) -> bytes:
        owners = (self.manager, self.pool, self.host_pool, self.governor, list(self.plan))
        memory = (
            b""
            if self.cache is None
            else b"".join(
                part(layer).numpy().tobytes()
                for part in (self.cache.key, self.cache.value)
                for layer in range(self.cache.num_layers)
            )
        )
        pickled = io.BytesIO()
        StatePickler(pickled).dump(owners)
        return pickled.getvalue() + memory

    def compute(self, seq_id: int) -> None:
        self.manager.mark_computed(seq_id, self.manager.num_tokens(seq_id))

    def argument(self, kind: str, share_odd: float) -> Any:
        if self.rng.random() < share_odd:
            return self.rng.choice(ODD_VALUES)
        return getattr(self, f"some_{kind}")()

    # ---- right arguments ----

    def some_seq_id(self) -> int:
        return self.rng.choice([*self.manager._sequences, 5])

    def some_new_id(self) -> int:
        return self.rng.randint(-2, 8)

    def some_seq_ids(self) -> list[int]:
        return [self.some_seq_id() for _ in range(self.rng.randint(0, 3))]

    def some_tokens(self) -> list[int]:
        return [self.rng.randint(0, 1) for _ in range(self.rng.choice((1, 2, 3, 5)))]

    def some_num_tokens(self) -> int:
        return self.rng.randint(0, 6)

    def some_prefix_keys(self) -> PrefixKeys:
        return self.manager.hasher(self.some_tokens(), self.some_extra_keys())

    def some_extra_keys(self) -> tuple[object, ...]:
        return self.rng.choice(((), ("a",), ("a", 1), (("a", None), b"b", 1.5)))

    def some_now(self) -> float:
        return self.rng.uniform(0.0, 9.0)

    def some_block(self) -> int:
        return self.rng.randint(1, NUM_BLOCKS - 1)

    def some_blocks(self) -> set[int]:
        return {self.some_block() for _ in range(self.rng.randint(0, 3))}

    def some_moves(self) -> list[BlockCopy]:
        pairs = [(self.some_block(), self.some_block()) for _ in range(self.rng.randint(0, 3))]
        return [BlockCopy(src, dst) for src, dst in pairs]

    def some_number(self) -> int:
        return self.rng.randint(0, 20)

    def some_small(self) -> int:
        return self.rng.randint(1, 4)

    def some_size(self) -> int:
        return self.rng.choice((1, 2, 4))

    def some_sizes(self) -> tuple[int, ...]:
        return self.rng.choice(((), (4, 8), (2, 4, 6)))

    def some_flag(self) -> bool:
        return self.rng.random() < 0.5

    def some_share(self) -> float:
        return self.rng.random()

    def some_rate(self) -> float:
        return self.rng.choice((0.5, 1.0, 1e9))

    def some_nothing(self) -> None:
        return None

    def some_layer(self) -> int:
        return self.rng.randint(0, 2)

    def some_direction(self) -> Direction:
        return self.rng.choice(list(Direction))

    def some_plan(self) -> list[tuple[Direction, list[BlockCopy]]]:
        return [(self.some_direction(), self.some_moves())]

    def some_callable(self) -> Callable[..., object]:
        return self.rng.choice((hash_of, no_result))

    def some_environ(self) -> dict[str, str]:
        value = self.rng.choice(("", "5", "many", "defrag", "9" * 5000))
        return {self.rng.choice(("VLLM_DEFRAG_THRESHOLD", "VLLM_DEBUG")): value}

    def some_tables(self) -> list[np.ndarray[Any, Any]]:
        return [np.array([self.some_block()], np.int32)]

    def some_lengths(self) -> Sequence[int]:
        return [self.rng.randint(0, 3)]

    def some_config(self) -> CacheConfig:
        return CacheConfig(num_blocks=4, block_size=self.some_size())

    def some_defrag_config(self) -> DefragConfig:
        return DefragConfig()

    def some_manager(self) -> BlockManager:
        return self.manager

    def some_hasher(self) -> RequestHasher:
        return RequestHasher(self.some_size())

    def some_governor(self) -> BandwidthGovernor:
        return BandwidthGovernor(1)

    # ---- the end ----

    def check_that_right_calls_work(self) -> None:
        manager = self.manager
        for seq_id in list(manager._sequences):
            manager.free(seq_id)
        assert manager.pool.num_free_blocks == manager.pool.num_usable_blocks
        assert manager.host_pool.num_free_blocks == NUM_HOST_BLOCKS
        prompt = [7] * SIZE * (NUM_BLOCKS - 1)
        assert manager.can_allocate(prompt) is AllocStatus.OK
        assert manager.allocate(1, prompt) == 0
        assert sorted(manager.block_table(1).tolist()) == list(range(1, NUM_BLOCKS))
        manager.mark_computed(1, SIZE)
        manager.free(1)
        cached = manager.allocate(2, prompt)
        assert cached == (SIZE if manager.config.enable_prefix_caching else 0)


CONFIG = {
    "num_blocks": "number",
    "block_size": "size",
    "watermark": "share",
    "num_host_blocks": "number",
    "enable_prefix_caching": "flag",
    "decode_buckets": "sizes",
    "windows": "sizes",
    "tokens_ahead": "number",
}


def new_config(**settings: Any) -> CacheConfig:
    return CacheConfig(**{"num_blocks": 4, "block_size": 2, **settings})


def hash_of(*arguments: object) -> bytes:
    return str(arguments).encode()


def small_cache(**changes: Any) -> Any:
    import torch

    from trencadis.kvcache.tensors import KVCache, LayerShape

    shape = LayerShape(1, changes.pop("key_width", 1), 1)
    sizes: dict[str, Any] = {
        "layers": [shape] * 2,
        "num_blocks": NUM_BLOCKS,
        "block_size": SIZE,
        "dtype": torch.float32,
        "num_host_blocks": NUM_HOST_BLOCKS,
    }
    return KVCache(**{**sizes, **changes})


def fuzz(num_calls: int) -> None:
    for seed in range(num_calls // CALLS_PER_SEED):
        Fuzzer(seed).calls(CALLS_PER_SEED)


@pytest.fixture(autouse=True)
def scratch_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random string may be taken as a path, and a file be written there."""
    monkeypatch.chdir(tmp_path)


def test_random_calls_end_well_or_in_a_typed_error_that_changes_nothing() -> None:
    fuzz(NUM_CALLS)


@pytest.mark.soak
def test_100_000_random_calls_end_well_or_in_a_typed_error() -> None:
    fuzz(NUM_SOAK_CALLS)
