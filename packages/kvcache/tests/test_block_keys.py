from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import InvalidSetting, RequestHasher
from trencadis.kvcache.prefix_index import PrefixIndex

TOKENS = st.lists(st.integers(0, 2), max_size=9)


def constant_digest(parent: bytes, content: bytes) -> bytes:
    return b"the same for all"


def test_only_full_blocks_have_keys() -> None:
    hasher = RequestHasher(4)
    assert [len(hasher(range(n)).blocks) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@given(TOKENS, TOKENS)
def test_digests_are_equal_for_equal_prefixes_and_for_no_others(a: list[int], b: list[int]) -> None:
    hasher = RequestHasher(2)
    keys = zip(hasher(a).blocks, hasher(b).blocks, strict=False)
    for index, (mine, theirs) in enumerate(keys):
        equal = a[: 2 * index + 2] == b[: 2 * index + 2]
        assert (mine.digest == theirs.digest) is equal
        assert mine.same_as(theirs) is equal


@given(TOKENS, TOKENS)
def test_colliding_digests_do_not_make_prefixes_the_same(a: list[int], b: list[int]) -> None:
    hasher = RequestHasher(2, constant_digest)
    for index, (mine, theirs) in enumerate(zip(hasher(a).blocks, hasher(b).blocks, strict=False)):
        assert mine.same_as(theirs) is (a[: 2 * index + 2] == b[: 2 * index + 2])


@pytest.mark.parametrize("other", [(), ("adapter-b",), ("adapter-a", "salt"), (1,), ("1",)])
def test_extra_keys_keep_apart_what_has_the_same_tokens(other: tuple[object, ...]) -> None:
    hasher = RequestHasher(2)
    mine, theirs = hasher([1, 2], ("adapter-a",)), hasher([1, 2], other)
    assert mine.blocks[0].digest != theirs.blocks[0].digest
    assert not mine.blocks[0].same_as(theirs.blocks[0])


def test_known_keys_are_extended_not_made_again() -> None:
    hasher = RequestHasher(2)
    tokens = array("i", [1, 2, 3, 4, 5])
    known = hasher(tokens[:2])
    extended = hasher.extended(known, tokens)
    assert extended.blocks[0] is known.blocks[0]
    assert extended.blocks[1].digest == hasher(tokens).blocks[1].digest


@pytest.mark.parametrize("tokens", [[1, 9, 3], [1], []])
def test_keys_of_other_tokens_are_refused(tokens: list[int]) -> None:
    hasher = RequestHasher(2)
    with pytest.raises(InvalidSetting, match="belong to other tokens"):
        hasher.extended(hasher([1, 2]), array("i", tokens))


def test_a_match_ends_at_the_first_block_that_is_unknown() -> None:
    keys = RequestHasher(1)([1, 2, 3]).blocks
    index = PrefixIndex()
    index.register(keys[0], 7)
    index.register(keys[2], 9)
    assert [block for block, _ in index.match(keys)] == [7]


def test_a_collision_is_no_match_and_does_not_replace_what_is_known() -> None:
    hasher = RequestHasher(1, constant_digest)
    one, two = hasher([1]).blocks, hasher([2]).blocks
    index = PrefixIndex()
    index.register(one[0], 7)
    assert index.register(two[0], 8) is two[0]
    assert index.match(two) == []
    assert [block for block, _ in index.match(one)] == [7]


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


def test_a_child_is_found_again_once_its_parent_is_computed_again() -> None:
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


def test_token_ids_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        RequestHasher(1)([1 << 40])
