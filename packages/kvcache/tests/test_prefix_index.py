from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import (
    BlockManager,
    CacheConfig,
    CacheEvents,
    RequestHasher,
    decode_extra_keys,
)
from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.config import PADDING_BLOCK
from trencadis.kvcache.prefix_cache import (
    PrefixCache,
    PrefixIndex,
    blake2b_digest,
    encode_extra_keys,
)


def constant_digest(parent: bytes, content: bytes) -> bytes:
    return b"the same for all"


def test_a_match_ends_at_the_first_block_that_is_not_cached() -> None:
    keys = RequestHasher(1)([1, 2, 3]).blocks
    index = PrefixIndex()
    index.register(keys[0], 7)
    index.register(keys[2], 9)
    assert [block for block, _ in index.match(keys)] == [7]


def test_a_hash_collision_is_no_match_and_does_not_replace_the_registered_block() -> None:
    hasher = RequestHasher(1, constant_digest)
    first, second = hasher([1]).blocks, hasher([2]).blocks
    index = PrefixIndex()
    index.register(first[0], 7)
    assert index.register(second[0], 8) is second[0]
    assert index.match(second) == []
    assert [block for block, _ in index.match(first)] == [7]


def test_a_child_of_another_parent_with_the_same_digest_is_no_match() -> None:
    def last_token_only(parent: bytes, content: bytes) -> bytes:
        return b"child" if content[:1] == b"\x05" else b"parent"

    hasher = RequestHasher(1, last_token_only)
    first, second = hasher([1, 5]).blocks, hasher([2, 5]).blocks
    index = PrefixIndex()
    index.register(first[0], 7)
    index.register(first[1], 8)
    index.drop(7)
    index.register(second[0], 9)
    assert [block for block, _ in index.match(second)] == [9]


def test_a_child_matches_again_after_its_parent_is_recomputed() -> None:
    hasher = RequestHasher(1)
    index = PrefixIndex()
    keys = hasher([1, 2]).blocks
    index.register(keys[0], 7)
    index.register(keys[1], 8)
    index.drop(7)
    again = hasher([1, 2]).blocks
    assert index.match(again) == []
    index.register(again[0], 9)
    assert [block for block, _ in index.match(again)] == [9, 8]


def test_a_block_is_registered_with_the_registered_key_of_the_block_before() -> None:
    """Else the comparison of two prefixes would walk the whole chain, block by block."""
    index = PrefixIndex()
    cache = PrefixCache(index, RequestHasher(1), enabled=True)
    first: list[BlockKey] = []
    cache.cache_full_blocks(first, [7], array("i", [1]), b"")
    second: list[BlockKey] = []
    cache.cache_full_blocks(second, [8, 9], array("i", [1, 2]), b"")
    assert second[0] is first[0]
    assert index.key_of(9) is second[1]
    assert second[1].parent is first[0]


TOKENS = st.lists(st.integers(0, 2), max_size=9)


def short_digest(parent: bytes, content: bytes) -> bytes:
    """One of four, so that other content often has it."""
    return bytes([blake2b_digest(parent, content)[0] % 4])


@given(
    data=st.data(),
    stored=st.lists(TOKENS, max_size=5),
    asked=TOKENS,
    window=st.integers(1, 5),
    collides=st.booleans(),
)
def test_within_a_window_the_longest_prefix_is_found_whose_last_blocks_are_cached(
    data: Any, stored: list[list[int]], asked: list[int], window: int, collides: bool
) -> None:
    hasher = RequestHasher(1, short_digest if collides else blake2b_digest)
    index, num_blocks = PrefixIndex(), 0
    for tokens in stored:
        for key in hasher(tokens).blocks:
            if data.draw(st.booleans()):
                index.register(key, num_blocks := num_blocks + 1)
        if num_blocks and data.draw(st.booleans()):
            index.drop(data.draw(st.integers(1, num_blocks)))
    keys = hasher(asked).blocks

    def found(n: int) -> list[int | None]:
        first = max(0, n - window)
        return [PADDING_BLOCK] * first + [index.lookup(key) for key in keys[first:n]]

    longest = max(n for n in range(len(keys) + 1) if None not in found(n))
    hits = index.match_within(keys, lambda n: max(0, n - window))
    assert [block for block, _ in hits] == found(longest)


def test_within_a_window_chains_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each block of the window: a chain is as long as the prompt."""
    hasher, index, compared = RequestHasher(1), PrefixIndex(), []
    tokens = list(range(200))
    for block, key in enumerate(hasher(tokens).blocks, start=1):
        if block % 20:
            index.register(key, block)
    same_as = BlockKey.same_as

    def counted(self: BlockKey, other: BlockKey) -> bool:
        compared.append(self)
        return same_as(self, other)

    monkeypatch.setattr(BlockKey, "same_as", counted)
    assert len(index.match_within(hasher(tokens).blocks, lambda n: max(0, n - 10))) == 199
    assert len(compared) == 1


def test_within_a_window_a_block_of_the_same_tokens_and_digest_may_have_another_prefix() -> None:
    hasher, index = RequestHasher(1, constant_digest), PrefixIndex()
    index.register(hasher([5]).blocks[0], 7)
    assert index.match_within(hasher([1, 5]).blocks, lambda n: max(0, n - 1)) == []


def test_events_are_of_content_and_bounded_by_the_cache() -> None:
    """Whoever takes them late is told what has changed, not everything that happened."""
    config = CacheConfig(num_blocks=5, block_size=4, record_events=True)
    manager = BlockManager(config)
    for number in range(200):
        prompt = list(range(number, number + 8))
        manager.allocate(number, prompt, extra_keys=("salt", number))
        manager.mark_computed(number, 8)
        manager.free(number)
    events = manager.take_events()
    assert not events.cleared
    assert events.removed == ()
    assert len(events.stored) == config.num_blocks - 1
    assert {decode_extra_keys(key.extra) for key in events.stored} <= {
        ("salt", number) for number in range(200)
    }
    first = next(key for key in events.stored if key.parent is None)
    assert list(array("i", first.tokens)) == list(range(first.tokens[0], first.tokens[0] + 4))
    manager.reset_prefix_cache()
    assert manager.take_events().cleared
    assert not manager.take_events()


def test_events_are_true_where_anything_happened() -> None:
    key = BlockKey(b"digest", b"tokens", None, b"")
    assert not CacheEvents(cleared=False, removed=(), stored=())
    assert CacheEvents(cleared=True, removed=(), stored=())
    assert CacheEvents(cleared=False, removed=(b"digest",), stored=())
    assert CacheEvents(cleared=False, removed=(), stored=(key,))


def test_a_manager_records_nothing_unless_it_is_asked_to() -> None:
    manager = BlockManager(CacheConfig(num_blocks=5, block_size=4))
    manager.allocate(1, range(8))
    manager.mark_computed(1, 8)
    assert not manager.take_events()


@pytest.mark.parametrize("keys", [(), ("a",), ("a", 1, True, None, b"x", 1.5, ("y", ("z",)))])
def test_extra_keys_are_told_as_they_were_given(keys: tuple[Any, ...]) -> None:
    told = decode_extra_keys(encode_extra_keys(keys))
    assert told == keys
    assert repr(told) == repr(keys)


def test_extra_keys_that_no_literal_says_are_one_text() -> None:
    assert decode_extra_keys(encode_extra_keys((float("inf"),))) == ("(inf,)",)
