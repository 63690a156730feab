"""Block keys: the identity of the content of a full block.

The key and value vectors of a block depend on every token before it. So the key of a block holds
its tokens and the key of its parent, the block before it: a hash chain, as in vLLM's automatic
prefix caching. Extra keys (adapter id, cache salt) separate tenants; they are part of every key.

A digest only selects a candidate. A prefix hit needs equal tokens, equal extra keys and equal
parents, so a hash collision, accidental or forged, never gives a request other content.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from hashlib import blake2b

from trencadis.kvcache.errors import InvalidSetting

ID_TYPECODE = "i"
"""`array` typecode of token ids: 32-bit signed integers."""

Digest = Callable[[bytes, bytes], bytes]
"""Gives the digest of a block, from the digest of its parent and its tokens as bytes."""


def blake2b_digest(parent: bytes, content: bytes) -> bytes:
    """The 32-byte BLAKE2b digest of a block's tokens, keyed with the digest of its parent."""
    return blake2b(content, digest_size=32, key=parent).digest()


class BlockKey:
    """The identity of the content of one full block.

    ``digest`` is what an index looks up. ``tokens`` are the token ids as bytes. ``parent`` is the
    key of the block before, None for the first block. ``extra`` are the encoded extra keys.
    ``hits`` counts the prefix hits of this content.
    """

    __slots__ = ("digest", "extra", "hits", "parent", "tokens")

    def __init__(self, digest: bytes, tokens: bytes, parent: BlockKey | None, extra: bytes) -> None:
        self.digest = digest
        self.tokens = tokens
        self.parent = parent
        self.extra = extra
        self.hits = 0

    def same_as(self, other: BlockKey) -> bool:
        """Whether both keys stand for the same tokens after the same prefix.

        Compares the two chains up to their first common key. For canonical keys (see
        `PrefixIndex`) that is one comparison.
        """
        mine: BlockKey | None = self
        theirs: BlockKey | None = other
        while mine is not theirs:
            if mine is None or theirs is None:
                return False
            if mine.tokens != theirs.tokens or mine.extra != theirs.extra:
                return False
            mine, theirs = mine.parent, theirs.parent
        return True


class PrefixKeys:
    """The keys of a request's full blocks, first to last, and its encoded extra keys."""

    __slots__ = ("blocks", "extra")

    def __init__(self, blocks: Sequence[BlockKey], extra: bytes) -> None:
        self.blocks = tuple(blocks)
        self.extra = extra


class RequestHasher:
    """Computes the keys of a request's full blocks. ``block_size`` is in tokens.

    A scheduler hashes a request once, on arrival, and passes the keys to every call of
    `BlockManager.can_allocate` and `BlockManager.allocate`.
    """

    def __init__(self, block_size: int, digest: Digest = blake2b_digest) -> None:
        self.block_size = block_size
        self._digest = digest

    def __call__(self, token_ids: Iterable[int], extra_keys: Sequence[Hashable] = ()) -> PrefixKeys:
        """The keys of the full blocks of ``token_ids``; a partial last block has no key.

        Two requests share blocks only if their ``extra_keys`` are equal. Extra keys are compared
        by their ``repr``.
        """
        tokens = array(ID_TYPECODE, token_ids)
        return self.extended(PrefixKeys((), encode_extra_keys(extra_keys)), tokens)

    def extended(self, prefix_keys: PrefixKeys, tokens: array[int]) -> PrefixKeys:
        """``prefix_keys`` followed by the keys of the remaining full blocks of ``tokens``.

        Raises `InvalidSetting` if ``prefix_keys`` do not belong to the first of these tokens.
        """
        num_covered = len(prefix_keys.blocks) * self.block_size
        covered = b"".join(key.tokens for key in prefix_keys.blocks)
        if covered != tokens[:num_covered].tobytes():
            raise InvalidSetting(
                f"the {len(prefix_keys.blocks)} prefix keys belong to other tokens: "
                "hash the request again"
            )
        if num_covered + self.block_size > len(tokens):
            return prefix_keys
        keys = list(prefix_keys.blocks)
        self.extend_chain(keys, tokens, len(tokens), prefix_keys.extra)
        return PrefixKeys(keys, prefix_keys.extra)

    def extend_chain(
        self, keys: list[BlockKey], tokens: array[int], num_tokens: int, extra: bytes
    ) -> None:
        """Append to ``keys`` the missing keys of the full blocks of the first ``num_tokens``."""
        size = self.block_size
        for index in range(len(keys), num_tokens // size):
            content = tokens[index * size : (index + 1) * size].tobytes()
            parent = keys[-1] if keys else None
            seed = self._digest(b"", extra) if parent is None else parent.digest
            keys.append(BlockKey(self._digest(seed, content), content, parent, extra))


def encode_extra_keys(extra_keys: Sequence[Hashable]) -> bytes:
    """The extra keys as bytes. Equal extra keys give equal bytes, different ones do not."""
    return repr(tuple(extra_keys)).encode() if extra_keys else b""
