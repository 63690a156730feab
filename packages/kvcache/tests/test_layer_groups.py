"""Which layers share a block, and what several block groups save and cost."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import (
    AllocStatus,
    BlockManager,
    CacheConfig,
    InvalidSetting,
    LayerGroups,
    RequestHasher,
    TierTransfers,
    group_layers,
    num_passed_blocks,
)
from trencadis.kvcache.prefix_cache import PrefixCache, PrefixIndex, blake2b_digest

torch = pytest.importorskip("torch")

from trencadis.kvcache import BlockCopy
from trencadis.kvcache.tensors import KVCache, LayerShape, bytes_per_block

SHAPE = LayerShape(kv_heads=2, key_width=4, value_width=4)
GEMMA_3 = [1024] * 5 + [None]
"""The windows of 6 layers: every sixth sees all."""


def grouped(windows: list[int | None], num_tokens: int, block_size: int = 16) -> LayerGroups:
    return group_layers(
        windows, [SHAPE] * len(windows), num_tokens=num_tokens, block_size=block_size
    )


@given(
    windows=st.lists(st.sampled_from([None, 8, 40, 1000]), min_size=1, max_size=70),
    num_tokens=st.integers(1, 5000),
)
def test_each_layer_has_a_tensor_of_its_own_in_its_group(
    windows: list[int | None], num_tokens: int
) -> None:
    groups = grouped(windows, num_tokens)
    places = list(zip(groups.group_of, groups.tensor_of, strict=True))
    assert len(set(places)) == len(windows)
    assert groups.num_groups == len(groups.windows) == len(set(groups.group_of))
    for window, (group, _) in zip(windows, places, strict=True):
        seen = groups.windows[group]
        assert seen is None or (window is not None and window <= seen), "a layer sees more"
    CacheConfig(num_blocks=4, block_size=16, windows=groups.windows)
    assert LayerGroups.single([None, 4]).windows == (None,)
    assert LayerGroups.single([3, 4]).windows == (4,)


def test_a_sequence_of_32k_tokens_takes_little_more_than_its_windows_see() -> None:
    """In bytes, of a model with 5 of 6 layers that see 1,024 tokens."""
    for block_size, layers in ((16, 6), (128, 6), (16, 26), (128, 48)):
        windows = (GEMMA_3 * 8)[:layers]
        groups = grouped(windows, 32768, block_size)
        config = CacheConfig(num_blocks=1 << 16, block_size=block_size, windows=groups.windows)
        manager = BlockManager(config)
        manager.allocate(1, range(32767))
        manager.mark_computed(1, 32767)
        manager.append(1, [0])
        shapes = groups.one_of_each_tensor([SHAPE] * layers)
        size = bytes_per_block(shapes, block_size=block_size, dtype=torch.float32)
        per_token = bytes_per_block([SHAPE], block_size=1, dtype=torch.float32)
        ideal = sum(min(32768, window or 32768) for window in windows) * per_token
        used = manager.pool.num_used_blocks * size
        before = layers * 32768 * per_token
        assert ideal <= used <= 1.1 * ideal
        assert before / used > 4


def test_layers_of_one_window_are_in_one_group() -> None:
    assert grouped([None] * 3, 100) == LayerGroups((None,), (0, 0, 0), (0, 1, 2))
    assert grouped([8] * 3, 100).windows == (8,)
    assert grouped([8, None, 8], 8).windows == (None,), "no sequence is longer"
    assert grouped([95, None, 95], 100).windows == (None,), "it saves less than a tenth"
    shapes = [SHAPE, LayerShape(kv_heads=1, key_width=4, value_width=4)]
    assert group_layers([None, 8], shapes, num_tokens=100, block_size=4).windows == (None,)


def test_layers_of_more_windows_than_groups_share_one() -> None:
    windows: list[int | None] = [16 * number for number in range(1, 34)]
    assert grouped(windows[:32], 5000).num_groups == 32
    assert grouped(windows, 5000) == LayerGroups.single(windows)


def test_groups_that_see_most_come_first() -> None:
    groups = grouped([16, None, 512, 16], 5000)
    assert groups.windows == (None, 512, 16, 16)
    assert groups.group_of == (2, 0, 1, 3)
    assert groups.num_tensors == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"windows": [None], "shapes": []},
        {"windows": [], "shapes": []},
        {"num_tokens": 0},
        {"block_size": 0},
    ],
)
def test_wrong_arguments_are_named(wrong: dict[str, Any]) -> None:
    given = {"windows": [None], "shapes": [SHAPE], "num_tokens": 9, "block_size": 4, **wrong}
    with pytest.raises(InvalidSetting):
        group_layers(given.pop("windows"), given.pop("shapes"), **given)


@pytest.mark.parametrize(
    ("windows", "group_of", "tensor_of"),
    [
        ((None, 8), (0, 1), (0,)),
        ((None,), (0, 0), (0, 0)),
        ((None, 8), (0, 0), (0, 1)),
        ((None,), (0, 0), (0, 2)),
    ],
)
def test_two_layers_never_have_the_same_place(
    windows: tuple[int | None, ...], group_of: tuple[int, ...], tensor_of: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidSetting, match="a tensor of its own"):
        LayerGroups(windows, group_of, tensor_of)


def test_layers_of_a_tensor_have_the_same_memory() -> None:
    groups = LayerGroups((None, 8), (0, 1, 1), (0, 0, 1))
    sizes: dict[str, Any] = {"num_blocks": 4, "block_size": 2, "dtype": torch.float32}
    cache = KVCache(layers=[SHAPE] * 3, groups=groups, num_host_blocks=2, **sizes)
    assert cache.key(0).data_ptr() == cache.key(1).data_ptr() != cache.key(2).data_ptr()
    assert cache.value(0).data_ptr() == cache.value(1).data_ptr() != cache.value(2).data_ptr()
    cache.key(0)[1], cache.value(2)[1] = 1.0, 2.0
    cache.copy([BlockCopy(1, 3)])
    cache.swap_out([BlockCopy(3, 0)])
    cache.swap_in([BlockCopy(0, 2)])
    assert cache.key(1)[2].min() == 1.0
    assert cache.value(2)[2].min() == 2.0
    with pytest.raises(InvalidSetting, match="layer 1 has heads and widths"):
        other = LayerShape(kv_heads=1, key_width=8, value_width=4)
        KVCache(layers=[SHAPE, other, SHAPE], groups=groups, **sizes)
    with pytest.raises(InvalidSetting, match="groups are of 3 layers"):
        KVCache(layers=[SHAPE] * 2, groups=groups, **sizes)


# What a manager does with several groups.


def make(**changes: Any) -> BlockManager:
    settings = {"num_blocks": 40, "block_size": 4, "windows": (None, 5), "watermark": 0.0}
    return BlockManager(CacheConfig(**{**settings, **changes}))


def test_a_prefix_hit_needs_what_each_group_sees() -> None:
    manager = make(num_blocks=13)
    prompt = list(range(12))
    manager.allocate(1, [*prompt, 0])
    manager.mark_computed(1, 13)
    first, second = (manager.block_table(1, group).tolist() for group in (0, 1))
    assert first == [1, 2, 3, 4]
    assert second == [0, 0, 7, 8]
    keys = manager.hasher(prompt)
    assert manager.num_cached_prefix_blocks(keys) == 3
    assert manager.allocate(2, [*prompt, 1]) == 12
    assert manager.block_table(2, 1).tolist()[:3] == [0, 0, 7]
    manager.free(1)
    manager.free(2)
    manager.allocate(3, [50] * 21)  # takes all blocks, of which the window has passed none
    manager.free(3)
    assert manager.num_cached_prefix_blocks(keys) == 0


@given(data=st.data(), windows=st.sampled_from([(None, 3), (None, 4, 2), (9, 5), (6, 3, 1)]))
def test_the_longest_prefix_is_found_of_which_each_group_has_what_it_sees(
    data: Any, windows: tuple[int | None, ...]
) -> None:
    size, hasher, index = 2, RequestHasher(2), PrefixIndex()
    keys = hasher(range(16))
    blocks = itertools.count(1)
    cached = [data.draw(st.sets(st.integers(0, 7), min_size=3)) for _ in windows]
    for group, places in enumerate(cached):
        for place in sorted(places):
            index.register(keys.in_group(group)[place], next(blocks))
    hits = PrefixCache(index, hasher, enabled=True, windows=windows).hits(keys, 8)

    def is_seen(length: int, group: int) -> range:
        window = windows[group]
        return range(
            0 if window is None else num_passed_blocks(length * size, window, size), length
        )

    lengths = [
        length
        for length in range(9)
        if all(set(is_seen(length, group)) <= cached[group] for group in range(len(windows)))
    ]
    assert {len(of_group) for of_group in hits} == {max(lengths)}
    for group, of_group in enumerate(hits):
        held = [place for place, (block, _) in enumerate(of_group) if block]
        assert held == list(is_seen(max(lengths), group))
        assert [key.tokens for _, key in of_group] == [
            key.tokens for key in keys.blocks[: max(lengths)]
        ]


def test_a_block_of_one_group_is_no_hit_in_another() -> None:
    """By a digest that says nothing, too."""
    for digest in (blake2b_digest, lambda parent, content: b"", lambda parent, content: b"\0\1"):
        config = CacheConfig(num_blocks=20, block_size=2, windows=(None, None), watermark=0.0)
        manager = BlockManager(config, hasher=RequestHasher(2, digest))
        manager.allocate(1, [1, 2, 3])
        manager.mark_computed(1, 3)
        assert manager.allocate(2, [1, 2, 9]) == 2
        for group in (0, 1):
            tables = [manager.block_table(seq_id, group).tolist() for seq_id in (1, 2)]
            assert tables[0][0] == tables[1][0]
        assert manager.block_table(1, 0)[0] != manager.block_table(1, 1)[0]


def test_events_tell_of_the_first_group() -> None:
    manager = make(record_events=True)
    manager.allocate(1, range(13))
    manager.mark_computed(1, 13)
    stored = [key.tokens for key in manager.take_events().stored]
    assert stored == [key.tokens for key in manager.hasher(range(12)).blocks]
    manager.free(1)
    manager.allocate(2, [50] * 4 * 19)
    assert len(manager.take_events().removed) == 3


def test_what_needs_one_group_says_so() -> None:
    manager = make()
    for call in (
        lambda: manager.uncached_after_prefix(()),
        lambda: manager.cache_loaded((), 0),
        lambda: TierTransfers(
            manager,
            (),
            None,
            staging=(),
            first_host_block=0,
            identity=b"",  # type: ignore[arg-type]
        ),
    ):
        with pytest.raises(InvalidSetting, match="block group"):
            call()
    manager.allocate(1, [0])
    for group in (2, -1, True, "0"):
        with pytest.raises(InvalidSetting, match="group must be"):
            manager.block_table(1, group)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "windows", [(), (0,), (8, None), (4, 8), (None, -1), 8, (None,) * 257, (True,)]
)
def test_wrong_windows_are_rejected(windows: Any) -> None:
    with pytest.raises(InvalidSetting, match="windows must be"):
        CacheConfig(num_blocks=4, block_size=4, windows=windows)


def test_a_long_prompt_is_admitted_where_what_it_holds_at_a_time_fits() -> None:
    """It shares three blocks of the first group, and needs 12 there and 4 of the other."""
    manager = make(num_blocks=23, tokens_ahead=6)
    manager.allocate(1, range(13))
    for end in (6, 12, 13):
        manager.mark_computed(1, end)
        manager.append(1, [])
    prompt = list(range(60))
    assert manager.pool.num_free_blocks == 16
    assert manager.can_allocate(prompt, num_spare=1) is AllocStatus.LATER
    assert manager.can_allocate(prompt) is AllocStatus.OK
    assert manager.allocate(2, prompt) == 12
    for end in range(18, 61, 6):
        manager.append(2, [])
        manager.mark_computed(2, end)
    assert manager.can_allocate(range(100)) is AllocStatus.NEVER


def test_blocks_of_later_tokens_come_with_append() -> None:
    manager = make(tokens_ahead=6)
    prompt = list(range(20))
    manager.allocate(1, prompt)
    assert len(manager.block_table(1)) == 5
    assert len(manager.block_table(1, 1)) == 2, "those of six tokens"
    manager.mark_computed(1, 6)
    assert manager.blocks_to_append(1, 0) == 1
    assert manager.append(1, []) == ()
    assert len(manager.block_table(1, 1)) == 3
    manager.mark_computed(1, 12)
    manager.append(1, [])
    manager.mark_computed(1, 18)
    assert manager.append(1, [0] * 8) == ()
    assert manager.num_tokens(1) == 28
    assert manager.block_table(1, 1).tolist().count(0) == 3, "the window has passed 14 tokens"
    assert len(manager.block_table(1, 1)) == 6, "24 of 28 tokens"
    assert manager.config.most_window_blocks == (None, 4)
    assert manager.config.num_blocks_for(28) == 7 + 4
