from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trencadis.kvcache import (
    BlockManager,
    CacheConfig,
    InvalidSetting,
    PrefixKeys,
    RequestHasher,
)

TOKENS = st.lists(st.integers(0, 2), max_size=9)


def constant_digest(parent: bytes, content: bytes) -> bytes:
    return b"the same for all"


def test_only_full_blocks_have_keys() -> None:
    hasher = RequestHasher(4)
    assert [len(hasher(range(n)).blocks) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


class Endless(Sequence[int]):
    """Token ids that say how many they are."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: Any) -> Any:
        raise IndexError(position)


def test_more_tokens_than_32_bits_count_are_refused_before_they_are_read() -> None:
    hasher = RequestHasher(4)
    assert hasher(Endless((1 << 31) - 1)).blocks == ()
    with pytest.raises(InvalidSetting, match="token ids must be integers from -2147483648 to 21"):
        hasher(Endless(1 << 31))


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
    with pytest.raises(InvalidSetting, match="token ids must be integers"):
        RequestHasher(1)([1 << 40])


class Tenant:
    """A key whose text says nothing of its value."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return "Tenant"


class Name(str):
    """A string that compares as it likes."""

    def __repr__(self) -> str:
        return "'a'"


KEYS = ["a", "b", "'a'", b"a", 1, 0, "1", True, False, 1.0, None, "None", ("a",), (), ("a", "b")]


@pytest.mark.parametrize(
    ("mine", "theirs"), [(a, b) for i, a in enumerate(KEYS) for b in KEYS[i + 1 :]]
)
def test_prompts_with_unequal_extra_keys_share_no_block(mine: object, theirs: object) -> None:
    manager = BlockManager(CacheConfig(num_blocks=16, block_size=2))
    manager.allocate(1, [5, 6, 7], extra_keys=(mine,))
    manager.mark_computed(1, 3)
    assert manager.allocate(2, [5, 6, 7], extra_keys=(theirs,)) == 0
    assert manager.allocate(3, [5, 6, 7], extra_keys=(mine,)) == 2


@pytest.mark.parametrize(
    "key", [Tenant("a"), object(), Name("a"), float("nan"), ["a"], {"a": 1}, ("a", Tenant("b")), 1j]
)
def test_an_extra_key_that_cannot_be_compared_by_value_is_refused(key: Any) -> None:
    manager = BlockManager(CacheConfig(num_blocks=16, block_size=2))
    with pytest.raises(InvalidSetting, match="cannot be compared by value"):
        manager.allocate(1, [5, 6], extra_keys=(key,))
    with pytest.raises(InvalidSetting, match="cannot be compared by value"):
        manager.hasher([5, 6], (key,))
    assert 1 not in manager


def test_keys_that_no_hasher_made_are_refused() -> None:
    with pytest.raises(InvalidSetting, match="extra must be of type bytes, got 'salt'"):
        PrefixKeys((), "salt")  # type: ignore[arg-type]
    salted = RequestHasher(2)([5, 6], (b"salt",)).blocks
    with pytest.raises(InvalidSetting, match="keys with the same extra keys"):
        PrefixKeys(salted, b"")


@pytest.mark.parametrize("extra_keys", ["tenant", b"salt", 5, None, {"a"}, {"a": 1}, range(9)])
def test_extra_keys_are_a_sequence(extra_keys: Any) -> None:
    with pytest.raises(InvalidSetting, match="extra_keys must be a tuple of keys"):
        RequestHasher(2)([1, 2], extra_keys)


def test_no_message_shows_an_extra_key() -> None:
    manager = BlockManager(CacheConfig(num_blocks=16, block_size=2))
    keys = manager.hasher([5, 6, 7], ("swordfish",))
    for extra_keys in ("swordfish", (Tenant("swordfish"),), ("sword", "swordfish")):
        with pytest.raises(InvalidSetting) as error:
            manager.allocate(1, [5, 6, 7], prefix_keys=keys, extra_keys=extra_keys)
        assert "swordfish" not in str(error.value)


@pytest.mark.parametrize(
    "extra_keys", [(10**5000,), (functools.reduce(lambda k, _: (k,), range(10**5)),)]
)
def test_extra_keys_without_a_text_are_refused(extra_keys: Any) -> None:
    with pytest.raises(InvalidSetting, match="too many digits or too many nested tuples"):
        RequestHasher(2)([1, 2], extra_keys)


def test_prefix_keys_of_other_extra_keys_are_refused() -> None:
    manager = BlockManager(CacheConfig(num_blocks=16, block_size=2))
    keys = manager.hasher([5, 6, 7], ("a",))
    with pytest.raises(InvalidSetting, match="computed with other extra keys"):
        manager.allocate(1, [5, 6, 7], prefix_keys=keys, extra_keys=("b",))
    assert manager.allocate(1, [5, 6, 7], prefix_keys=keys, extra_keys=("a",)) == 0
    with pytest.raises(InvalidSetting, match="use RequestHasher"):
        PrefixKeys(keys.blocks, b"other")


def test_tenants_share_nothing_when_their_digests_collide() -> None:
    config = CacheConfig(num_blocks=16, block_size=2)
    manager = BlockManager(config, hasher=RequestHasher(2, constant_digest))
    manager.allocate(1, [5, 6, 7], extra_keys=("a",))
    manager.mark_computed(1, 3)
    assert manager.num_cached_prefix_blocks(manager.hasher([5, 6, 7], ("b",))) == 0
    assert manager.allocate(2, [5, 6, 7], extra_keys=("b",)) == 0
    assert manager.allocate(3, [5, 6, 7], extra_keys=("a",)) == 2


def test_a_swapped_tenant_gets_no_block_of_another_when_their_digests_collide() -> None:
    config = CacheConfig(num_blocks=16, block_size=2, num_host_blocks=8)
    manager = BlockManager(config, hasher=RequestHasher(2, constant_digest))
    for seq_id, tenant in ((1, "a"), (2, "b")):
        manager.allocate(seq_id, [5, 6], extra_keys=(tenant,))
        manager.mark_computed(seq_id, 2)
    assert len(manager.swap_out([1])) == len(manager.swap_out([2])) == 1
    assert len(manager.swap_in([2])) == 1
