"""The prefix cache: the keys of full blocks, the index of cached content, and the reuse rate.

The key and value vectors of a block depend on every token before it. So the key of a block holds
its tokens and the key of its parent, the block before it: a hash chain, as in vLLM's automatic
prefix caching. Extra keys (adapter id, cache salt) separate tenants; they are part of every key.

A digest only selects a candidate. A prefix hit needs equal tokens, equal extra keys and equal
parents, so a hash collision, accidental or forged, never gives a request other content.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from hashlib import blake2b

from trencadis.kvcache.errors import InvalidSetting

ID_TYPECODE = "i"
"""`array` typecode of token ids: 32-bit signed integers."""

Digest = Callable[[bytes, bytes], bytes]
"""Gives the digest of a block, from the digest of its parent and its tokens as bytes."""

_MAX_OUTCOMES = 1024
"""At this number of outcomes the weight of all earlier outcomes is halved."""


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


class PrefixIndex:
    """A map from block keys to blocks: at most one block per digest, and one key per block.

    The first key that was registered for a content is its canonical key. Later blocks are
    registered with canonical parents, so that comparing two chains takes one step.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def key_of(self, block: int) -> BlockKey | None:
        """The key that ``block`` is registered under, if any."""
        return self._key_of.get(block)

    def lookup(self, key: BlockKey) -> int | None:
        """The block that holds the content of ``key``, if any."""
        block = self._block_of.get(key.digest)
        return block if block is not None and self._key_of[block].same_as(key) else None

    def match(self, keys: Sequence[BlockKey]) -> list[tuple[int, BlockKey]]:
        """The blocks of the longest cached prefix of ``keys``, with their canonical keys."""
        hits: list[tuple[int, BlockKey]] = []
        parent: BlockKey | None = None
        for key in keys:
            block = self._block_of.get(key.digest)
            if block is None:
                break
            known = self._key_of[block]
            equal = known.tokens == key.tokens and known.extra == key.extra
            # Usually the parent is the key that the previous iteration verified.
            if not equal or not (known.parent is parent or known.same_as(key)):
                break
            hits.append((block, known))
            parent = known
        return hits

    def register(self, key: BlockKey, block: int) -> BlockKey:
        """Register ``block`` as the holder of ``key``; returns the canonical key of the content.

        If another block already holds the same content, or other content with the same digest,
        that block stays registered and ``block`` is not.
        """
        holder = self._block_of.get(key.digest)
        if holder is not None:
            known = self._key_of[holder]
            return known if known.same_as(key) else key
        self._block_of[key.digest] = block
        self._key_of[block] = key
        return key

    def drop(self, block: int) -> BlockKey | None:
        """Remove ``block``, whose content is about to change; returns its key, if any."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key.digest]
        return key

    def clear(self) -> None:
        """Remove every block."""
        self._block_of.clear()
        self._key_of.clear()


class ReuseEstimator:
    """Measures the share of cached blocks that get a prefix hit.

    A block that is evicted before its first hit counts as unused. Its digest is remembered, for
    the latest ``num_remembered`` such blocks. If a later prompt asks for the content, the block
    counts as reused after all. Without this correction a cache that evicts too early would
    measure that nothing is ever reused.
    """

    def __init__(self, num_remembered: int) -> None:
        self._num_remembered = num_remembered
        self._evicted_digests: OrderedDict[bytes, None] = OrderedDict()
        self._num_reused = 0
        self._num_unused = 1

    @property
    def rate(self) -> float:
        """The reused share, 0 to 1. Recent outcomes count more. It is 0 before any outcome."""
        return self._num_reused / (self._num_reused + self._num_unused)

    def record_hit(self, key: BlockKey) -> None:
        """Count a prefix hit of a cached block. Only the first hit of a content counts."""
        if not key.hits:
            self._num_reused += 1
            self._decay()

    def record_eviction(self, key: BlockKey) -> None:
        """Count the eviction of a cached block, unless it had a hit."""
        if key.hits:
            return
        self._num_unused += 1
        self._decay()
        self._evicted_digests[key.digest] = None
        if len(self._evicted_digests) > self._num_remembered:
            self._evicted_digests.popitem(last=False)

    def record_misses(self, keys: Iterable[BlockKey]) -> None:
        """Correct the count for content that a prompt asks for after it was evicted."""
        if not self._evicted_digests:
            return
        for key in keys:
            if key.digest in self._evicted_digests:
                del self._evicted_digests[key.digest]
                self._num_reused += 1
                self._num_unused = max(1, self._num_unused - 1)

    def _decay(self) -> None:
        if self._num_reused + self._num_unused >= _MAX_OUTCOMES:
            self._num_reused //= 2
            self._num_unused = max(1, self._num_unused // 2)


class PrefixCache:
    """Combines a request hasher with a prefix index; finds no prefix if not ``enabled``."""

    def __init__(self, index: PrefixIndex, hasher: RequestHasher, *, enabled: bool) -> None:
        self.enabled = enabled
        self._index = index
        self._hasher = hasher

    def match(
        self,
        tokens: array[int],
        prefix_keys: PrefixKeys | None,
        extra_keys: Sequence[Hashable],
    ) -> tuple[PrefixKeys, list[tuple[int, BlockKey]]]:
        """The keys of a prompt, and the blocks of its longest cached prefix with their keys.

        The prefix leaves at least one token to compute. Computes the keys that are missing in
        ``prefix_keys``. Raises `InvalidSetting` if ``prefix_keys`` belong to other tokens.
        """
        if prefix_keys is None:
            prefix_keys = PrefixKeys((), encode_extra_keys(extra_keys))
        if not self.enabled:
            return prefix_keys, []
        prefix_keys = self._hasher.extended(prefix_keys, tokens)
        num_blocks = (len(tokens) - 1) // self._hasher.block_size
        return prefix_keys, self._index.match(prefix_keys.blocks[:num_blocks])

    def cache_full_blocks(
        self, keys: list[BlockKey], new_blocks: Sequence[int], tokens: array[int], extra: bytes
    ) -> None:
        """Register the next full blocks of a sequence, so that prompts can share them.

        ``keys`` are those of the blocks before; the keys of ``new_blocks`` are appended.
        """
        start = len(keys)
        num_tokens = (start + len(new_blocks)) * self._hasher.block_size
        self._hasher.extend_chain(keys, tokens, num_tokens, extra)
        for position, block in enumerate(new_blocks, start):
            # The canonical key of the parent can be another object: see `PrefixIndex`.
            keys[position].parent = keys[position - 1] if position else None
            keys[position] = self._index.register(keys[position], block)
