from __future__ import annotations

from array import array

from trencadis.kvcache import RequestHasher
from trencadis.kvcache.prefix_cache import BlockKey, PrefixCache, PrefixIndex


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
