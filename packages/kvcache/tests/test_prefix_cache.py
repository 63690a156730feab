from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import InvalidSetting, RequestHasher

TOKENS = st.lists(st.integers(0, 2), max_size=9)


def constant_digest(parent: bytes, content: bytes) -> bytes:
    return b"the same for all"


def test_only_full_blocks_have_keys() -> None:
    hasher = RequestHasher(4)
    assert [len(hasher(range(n)).blocks) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@given(TOKENS, TOKENS)
def test_digests_are_equal_exactly_for_equal_prefixes(a: list[int], b: list[int]) -> None:
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
def test_equal_tokens_with_different_extra_keys_have_different_keys(
    other: tuple[object, ...],
) -> None:
    hasher = RequestHasher(2)
    mine, theirs = hasher([1, 2], ("adapter-a",)), hasher([1, 2], other)
    assert mine.blocks[0].digest != theirs.blocks[0].digest
    assert not mine.blocks[0].same_as(theirs.blocks[0])


def test_given_keys_are_extended_not_recomputed() -> None:
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


def test_token_ids_beyond_32_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        RequestHasher(1)([1 << 40])
