"""Prefix keys: what a full block must share with another for its content to be the same.

The key and value vectors of a block depend on every token before it, so a block's key holds its
tokens and the key of its parent: a hash chain, as in vLLM's automatic prefix caching. Keys that
separate tenants or adapters (adapter id, cache salt) are part of every link.

A digest only finds a candidate. A hit is granted after the tokens, the extra keys and the whole
chain of parents compared equal, so no collision, accidental or forged, can hand out the content
of other tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Iterable, Sequence
from hashlib import blake2b

from trencadis.kvcache.errors import InvalidSetting

ID_TYPECODE = "i"
"""Token ids are kept and hashed as 32-bit signed integers."""

Digest = Callable[[bytes, bytes], bytes]


def blake2b_digest(parent: bytes, content: bytes) -> bytes:
    """BLAKE2b of a block's tokens, keyed with the digest of its parent: 32 bytes."""
    return blake2b(content, digest_size=32, key=parent).digest()


class BlockKey:
    """The identity of one full block: its tokens, and the key of the block before it.

    ``parent`` is None for the first block of a sequence. ``extra`` tells apart what must not be
    shared. ``digest`` is what an index looks up. ``hits`` counts the prompts that were given this
    content instead of computing it.
    """

    __slots__ = ("digest", "extra", "hits", "parent", "tokens")

    def __init__(self, digest: bytes, tokens: bytes, parent: BlockKey | None, extra: bytes) -> None:
        self.digest = digest
        self.tokens = tokens
        self.parent = parent
        self.extra = extra
        self.hits = 0

    def same_as(self, other: BlockKey) -> bool:
        """Whether both stand for the same tokens after the same prefix.

        Walks up both chains until they meet; where keys are canonical (see `PrefixIndex`) that
        is one step.
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
    """The keys of a request's full blocks, first to last, and the extra keys they carry."""

    __slots__ = ("blocks", "extra")

    def __init__(self, blocks: Sequence[BlockKey], extra: bytes) -> None:
        self.blocks = tuple(blocks)
        self.extra = extra


class RequestHasher:
    """Turns the tokens of a request into the keys of its full blocks, once per request.

    ``block_size`` is in tokens. A scheduler hashes a request when it arrives and passes the keys
    to `BlockManager.can_allocate` and `allocate` as often as it tries.
    """

    def __init__(self, block_size: int, digest: Digest = blake2b_digest) -> None:
        self.block_size = block_size
        self._digest = digest

    def __call__(self, token_ids: Iterable[int], extra_keys: Sequence[Hashable] = ()) -> PrefixKeys:
        """Keys of the full blocks of ``token_ids``; a last, partial block has none.

        ``extra_keys`` (adapter id, cache salt, ...) must be equal for two requests to share;
        they are compared by their ``repr``.
        """
        tokens = array(ID_TYPECODE, token_ids)
        return self.extended(PrefixKeys((), encode_extra(extra_keys)), tokens)

    def extended(self, known: PrefixKeys, tokens: array[int]) -> PrefixKeys:
        """``known`` with the keys of the later full blocks of ``tokens``, if there are any.

        Raises `InvalidSetting` if ``known`` are not the keys of the first of these tokens.
        """
        covered = len(known.blocks) * self.block_size
        if b"".join(key.tokens for key in known.blocks) != tokens[:covered].tobytes():
            raise InvalidSetting(
                f"the {len(known.blocks)} given keys belong to other tokens: hash the request again"
            )
        if covered + self.block_size > len(tokens):
            return known
        blocks = list(known.blocks)
        self.chain(blocks, tokens, len(tokens), known.extra)
        return PrefixKeys(blocks, known.extra)

    def chain(
        self, blocks: list[BlockKey], tokens: array[int], num_tokens: int, extra: bytes
    ) -> None:
        """Append to ``blocks`` the keys of the full blocks of ``num_tokens`` that lack one."""
        size = self.block_size
        for index in range(len(blocks), num_tokens // size):
            content = tokens[index * size : (index + 1) * size].tobytes()
            parent = blocks[-1] if blocks else None
            seed = self._digest(b"", extra) if parent is None else parent.digest
            blocks.append(BlockKey(self._digest(seed, content), content, parent, extra))


def encode_extra(extra_keys: Sequence[Hashable]) -> bytes:
    """The extra keys as bytes: equal for equal keys, different for different ones."""
    return repr(tuple(extra_keys)).encode() if extra_keys else b""


class PrefixIndex:
    """Which block holds the content of which key: at most one block per digest, one key per block.

    The key that was registered first for a content is its canonical key. Later blocks are
    registered on top of canonical parents, so that comparing two chains stops at the first step.
    """

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, block: int) -> bool:
        return block in self._key_of

    def key_of(self, block: int) -> BlockKey | None:
        """The key under which ``block`` is registered."""
        return self._key_of.get(block)

    def find(self, key: BlockKey) -> int | None:
        """The block that holds the content of ``key``."""
        block = self._block_of.get(key.digest)
        return block if block is not None and self._key_of[block].same_as(key) else None

    def match(self, keys: Sequence[BlockKey]) -> list[tuple[int, BlockKey]]:
        """The blocks that hold the longest known prefix of ``keys``, with their canonical keys."""
        found: list[tuple[int, BlockKey]] = []
        parent: BlockKey | None = None
        for key in keys:
            block = self._block_of.get(key.digest)
            if block is None:
                break
            known = self._key_of[block]
            equal = known.tokens == key.tokens and known.extra == key.extra
            # The usual case first: the parent was verified in the previous round.
            if not equal or not (known.parent is parent or known.same_as(key)):
                break
            found.append((block, known))
            parent = known
        return found

    def register(self, key: BlockKey, block: int) -> BlockKey:
        """Make ``block`` the holder of ``key``; returns the content's canonical key.

        Where another block holds the same content already, that one stays and ``block`` is left
        out. Where another *content* has the same digest, ``block`` is left out as well.
        """
        holder = self._block_of.get(key.digest)
        if holder is not None:
            known = self._key_of[holder]
            return known if known.same_as(key) else key
        self._block_of[key.digest] = block
        self._key_of[block] = key
        return key

    def drop(self, block: int) -> BlockKey | None:
        """Forget ``block``, which is about to hold something else; returns what it was known as."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key.digest]
        return key
