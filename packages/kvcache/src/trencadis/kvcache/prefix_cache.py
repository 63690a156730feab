"""The prefix cache: the keys of full blocks, the index of cached content, and the reuse rate.

The key and value vectors of a block depend on every token before it. So the key of a block holds
its tokens and the key of its parent, the block before it: a hash chain, as in vLLM's automatic
prefix caching. Extra keys (adapter id, cache salt) separate tenants; they are part of every key.

A digest only selects a candidate. A prefix hit needs equal tokens, equal extra keys and equal
parents, so a hash collision, accidental or forged, never gives a request other content.
"""

from __future__ import annotations

import ast
import reprlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from hashlib import blake2b
from math import isnan

from trencadis.kvcache.block_key import BlockKey
from trencadis.kvcache.cache_events import CacheRecorder
from trencadis.kvcache.config import PADDING_BLOCK
from trencadis.kvcache.errors import InvalidSetting
from trencadis.kvcache.rounding import num_passed_blocks
from trencadis.kvcache.state_snapshots import StateSnapshots
from trencadis.kvcache.validators import instance_of, integer

ID_TYPECODE = "i"
"""`array` typecode of token ids: 32-bit signed integers."""

COMPARABLE_TYPES = (str, bytes, int, float, bool, type(None))
"""The types of extra keys, alone or in tuples: ``repr`` gives every value of them another text."""

MAX_NUM_TOKENS = (1 << 31) - 1
"""Most tokens of a sequence. Slots are counted in 32-bit integers."""

_PLAIN_SEQUENCES = (list, tuple)

Digest = Callable[[bytes, bytes], bytes]
"""Gives the digest of a block, from the digest of its parent and its tokens as bytes."""

_MAX_OUTCOMES = 1024
"""At this number of outcomes the weight of all earlier outcomes is halved."""


def blake2b_digest(parent: bytes, content: bytes) -> bytes:
    """The 32-byte BLAKE2b digest of a block's tokens, keyed with the digest of its parent."""
    return blake2b(content, digest_size=32, key=parent).digest()


class PrefixKeys:
    """The keys of a request's full blocks, first to last, and its encoded extra keys.

    `RequestHasher` makes them. Raises `InvalidSetting` for keys with other extra keys.
    """

    __slots__ = ("_in_groups", "blocks", "extra")

    def __init__(self, blocks: Sequence[BlockKey], extra: bytes) -> None:
        instance_of(Sequence).checked("blocks", blocks)
        instance_of(bytes).checked("extra", extra)
        if any(not isinstance(key, BlockKey) or key.extra != extra for key in blocks):
            raise InvalidSetting(
                "blocks must be keys with the same extra keys: use RequestHasher to make them"
            )
        self.blocks = tuple(blocks)
        self.extra = extra
        self._in_groups: dict[int, tuple[BlockKey, ...]] = {}

    def in_group(self, group: int) -> tuple[BlockKey, ...]:
        """The keys of the same tokens in a block group, made once. Those of group 0 are blocks."""
        if not group:
            return self.blocks
        keys = self._in_groups.get(group)
        if keys is None:
            keys = self._in_groups[group] = tuple(keys_in_group(self.blocks, group, None))
        return keys


def keys_in_group(
    keys: Iterable[BlockKey], group: int, parent: BlockKey | None
) -> Iterator[BlockKey]:
    """The keys of the same tokens in another group, which follow ``parent`` there."""
    for key in keys:
        parent = key.in_group(group, parent)
        yield parent


PREFIX_KEYS = instance_of(PrefixKeys)


class RequestHasher:
    """Computes the keys of a request's full blocks. ``block_size`` is in tokens.

    A scheduler hashes a request once, on arrival, and passes the keys to every call of
    `BlockManager.can_allocate` and `BlockManager.allocate`. ``digest`` gives the bytes of a block
    from the digest of its parent and its tokens; an error that it raises is passed on.
    """

    def __init__(self, block_size: int, digest: Digest = blake2b_digest) -> None:
        positive = integer(1, remedy="pass the block size of the cache")
        if not callable(digest):
            raise InvalidSetting(f"digest must be callable, got {digest!r}: pass a function")
        self.block_size: int = positive.checked("block_size", block_size)
        self._digest = digest

    def __call__(self, token_ids: Sequence[int], extra_keys: Sequence[Hashable] = ()) -> PrefixKeys:
        """The keys of the full blocks of ``token_ids``; a partial last block has no key.

        Two requests share blocks only if their ``extra_keys`` have equal types and values. Extra
        keys are strings, bytes, numbers, booleans, None, and tuples of these. Raises
        `InvalidSetting` for others, and for token ids that are not 32-bit integers.
        """
        tokens = as_token_array(token_ids)
        return self.extended(PrefixKeys((), encode_extra_keys(extra_keys)), tokens)

    def extended(self, prefix_keys: PrefixKeys, tokens: array[int]) -> PrefixKeys:
        """``prefix_keys`` followed by the keys of the remaining full blocks of ``tokens``.

        Raises `InvalidSetting` if ``prefix_keys`` do not belong to the first of these tokens.
        """
        PREFIX_KEYS.checked("prefix_keys", prefix_keys)
        num_covered = len(prefix_keys.blocks) * self.block_size
        covered = b"".join(key.tokens for key in prefix_keys.blocks)
        if covered != tokens[:num_covered].tobytes():
            raise InvalidSetting(
                f"the {len(prefix_keys.blocks)} prefix keys belong to other tokens: "
                "hash the request again"
            )
        if num_covered + self.block_size > len(tokens):
            return prefix_keys
        keys = prefix_keys.blocks
        return PrefixKeys(
            (*keys, *self.next_keys(keys, tokens, len(tokens), prefix_keys.extra)),
            prefix_keys.extra,
        )

    def next_keys(
        self, keys: Sequence[BlockKey], tokens: array[int], num_tokens: int, extra: bytes
    ) -> list[BlockKey]:
        """The keys that follow ``keys``, up to the last full block of the first ``num_tokens``."""
        size, parent = self.block_size, keys[-1] if keys else None
        new_keys: list[BlockKey] = []
        for position in range(len(keys), num_tokens // size):
            content = tokens[position * size : (position + 1) * size].tobytes()
            seed = self._digest(b"", extra) if parent is None else parent.digest
            digest = self._digest(seed, content)
            if type(digest) is not bytes:
                raise InvalidSetting(f"digest must return bytes, got {digest!r}: convert it")
            parent = BlockKey(digest, content, parent, extra)
            new_keys.append(parent)
        return new_keys


def as_token_array(token_ids: Sequence[int]) -> array[int]:
    """A copy of the token ids. Raises `InvalidSetting` unless all are 32-bit signed integers."""
    try:
        if type(token_ids) in _PLAIN_SEQUENCES:
            return array(ID_TYPECODE, token_ids)
        if len(token_ids) > MAX_NUM_TOKENS:  # more than 32-bit slots, such as a range without end
            raise ValueError("too many")
        # Without an iterator, an array would take bytes as the memory of integers.
        return array(ID_TYPECODE, iter(token_ids))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidSetting(
            f"token ids must be integers from {-(1 << 31)} to {(1 << 31) - 1}, "
            f"got {reprlib.repr(token_ids)}: pass the ids that the tokenizer gives"
        ) from error


def encode_extra_keys(extra_keys: Sequence[Hashable]) -> bytes:
    """The extra keys as bytes, which are equal for keys of equal types and values only.

    Raises `InvalidSetting` for keys of a type that is not in `COMPARABLE_TYPES` and no tuple of
    these, and for NaN: two such keys could be taken for equal although they are not.
    """
    # A key may be a secret, so no message shows one.
    if not isinstance(extra_keys, (tuple, list)):
        raise InvalidSetting(
            f"extra_keys must be a tuple of keys, got a {type(extra_keys).__name__}: pass a tuple"
        )
    unchecked: list[Hashable] = list(extra_keys)
    while unchecked:
        key = unchecked.pop()
        if type(key) is tuple:
            unchecked += key
        elif type(key) not in COMPARABLE_TYPES or (type(key) is float and isnan(key)):
            raise InvalidSetting(
                f"an extra key of type {type(key).__name__} cannot be compared by value: "
                "pass strings, bytes, numbers (not NaN), booleans, None, or tuples of these"
            )
    try:
        return repr(tuple(extra_keys)).encode() if extra_keys else b""
    except (ValueError, RecursionError) as error:
        raise InvalidSetting(
            "extra_keys have an integer of too many digits or too many nested tuples: "
            "pass a digest of them"
        ) from error


def decode_extra_keys(extra: bytes) -> tuple[Hashable, ...]:
    """The extra keys of a `BlockKey`. Those with an infinite number are one text."""
    if not extra:
        return ()
    try:
        return tuple(ast.literal_eval(extra.decode()))
    except ValueError:
        return (extra.decode(),)


class PrefixIndex:
    """A map from block keys to blocks: at most one block per digest, and one key per block.

    The first key that was registered for a content is its canonical key. Later blocks are
    registered with canonical parents, so that comparing two chains takes one step. ``recorders``
    note what is registered and dropped.
    """

    def __init__(self, *recorders: CacheRecorder) -> None:
        self._recorders = recorders
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
        """The blocks of ``keys`` up to the first that is not cached, with their canonical keys.

        ``keys`` follow each other in a chain, from its start or a later block.
        """
        hits: list[tuple[int, BlockKey]] = []
        parent = keys[0].parent if keys else None
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

    def match_within(
        self, keys: Sequence[BlockKey], num_unseen: Callable[[int], int]
    ) -> list[tuple[int, BlockKey]]:
        """As `match`, for the longest prefix of which the blocks that are still seen are cached.

        After a prefix of n blocks, its first ``num_unseen(n)`` are not seen: `PADDING_BLOCK` is in
        their place.
        """
        end = position = len(keys)
        while True:
            while position > num_unseen(end):
                position -= 1
                if keys[position].digest not in self._block_of:
                    end = position
            # From the first one on: where the parent is known, its chain need not be compared.
            hits = self.match(keys[position:end])
            if position + len(hits) == end:
                return [*((PADDING_BLOCK, key) for key in keys[:position]), *hits]
            end = position = position + len(hits)  # other content has that digest

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
        for recorder in self._recorders:
            recorder.store(key)
        return key

    def drop(self, block: int) -> BlockKey | None:
        """Remove ``block``, whose content is about to change; returns its key, if any."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key.digest]
            for recorder in self._recorders:
                recorder.drop(key)
        return key

    def clear(self) -> None:
        """Remove every block."""
        self._block_of.clear()
        self._key_of.clear()
        for recorder in self._recorders:
            recorder.clear()


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


Hits = Sequence[tuple[int, BlockKey]]
"""The blocks of a cached prefix in a group, with their keys; `PADDING_BLOCK` stands for a block
that the group's window has passed."""


class PrefixCache:
    """Combines a request hasher with a prefix index; finds no prefix if not ``enabled``.

    ``windows`` are those of `CacheConfig`. ``snapshots``: a prefix is found only with a snapshot of
    the state after it; None for a model without states.
    """

    def __init__(
        self,
        index: PrefixIndex,
        hasher: RequestHasher,
        *,
        enabled: bool,
        windows: Sequence[int | None] = (None,),
        snapshots: StateSnapshots | None = None,
    ) -> None:
        self.enabled = enabled
        self._snapshots = snapshots
        self._windows = windows
        self._index = index
        self._hasher = hasher

    def match(
        self,
        tokens: array[int],
        prefix_keys: PrefixKeys | None,
        extra_keys: Sequence[Hashable],
    ) -> tuple[PrefixKeys, list[Hits]]:
        """The keys of a prompt, and its longest cached prefix in each group.

        The prefix leaves at least one token to compute. Computes the keys that are missing in
        ``prefix_keys``. Raises `InvalidSetting` if ``prefix_keys`` belong to other tokens or to
        other extra keys.
        """
        extra = encode_extra_keys(extra_keys)
        if prefix_keys is None:
            prefix_keys = PrefixKeys((), extra)
        PREFIX_KEYS.checked("prefix_keys", prefix_keys)
        if extra and extra != prefix_keys.extra:
            raise InvalidSetting(
                "prefix_keys were computed with other extra keys: hash the request again"
            )
        if not self.enabled:
            return prefix_keys, [()] * len(self._windows)
        prefix_keys = self._hasher.extended(prefix_keys, tokens)
        num_blocks = (len(tokens) - 1) // self._hasher.block_size
        return prefix_keys, self.hits(prefix_keys, num_blocks)

    def hits(self, prefix_keys: PrefixKeys, num_blocks: int) -> list[Hits]:
        """The longest cached prefix, of at most ``num_blocks`` blocks, in each group.

        It is as long in all of them: each has the blocks that a token after it sees. If layers keep
        a state, there is a snapshot of that after it.
        """
        hits = self.hits_of_blocks(prefix_keys, num_blocks)
        if self._snapshots is None:
            return hits
        while (length := self._snapshots.longest([key for _, key in hits[0]])) < len(hits[0]):
            hits = self.hits_of_blocks(prefix_keys, length)
        return hits

    def hits_of_blocks(self, prefix_keys: PrefixKeys, num_blocks: int) -> list[Hits]:
        """As `hits`, with or without a snapshot."""
        num_groups = len(self._windows)
        keys = [prefix_keys.in_group(group)[:num_blocks] for group in range(num_groups)]
        hits = [self.hits_in_group(0, keys[0])]
        if num_groups == 1:
            return hits
        hits += [()] * (num_groups - 1)
        length, group, num_agreed = len(hits[0]), 0, 1
        while num_agreed < num_groups:
            group = (group + 1) % num_groups
            hits[group] = self.hits_in_group(group, keys[group][:length])
            num_agreed = num_agreed + 1 if len(hits[group]) == length else 1
            length = len(hits[group])
        return hits

    def hits_in_group(self, group: int, keys: Sequence[BlockKey]) -> Hits:
        """The longest cached prefix of ``keys``, which are of this group."""
        window, size = self._windows[group], self._hasher.block_size
        if window is None:
            return self._index.match(keys)
        return self._index.match_within(keys, lambda n: num_passed_blocks(n * size, window, size))

    def cache_full_blocks(
        self, keys: list[BlockKey], new_blocks: Sequence[int], tokens: array[int], extra: bytes
    ) -> None:
        """Register the next full blocks of a sequence in group 0, so that prompts can share them.

        ``keys`` are those of the blocks before; the keys of ``new_blocks`` are appended.
        """
        num_tokens = (len(keys) + len(new_blocks)) * self._hasher.block_size
        self._register(keys, self._hasher.next_keys(keys, tokens, num_tokens, extra), new_blocks)

    def cache_in_group(
        self,
        group: int,
        keys: list[BlockKey],
        new_blocks: Sequence[int],
        of_first: Sequence[BlockKey],
    ) -> None:
        """As `cache_full_blocks` in another group. ``of_first``: the keys of the first group."""
        parent = keys[-1] if keys else None
        self._register(keys, keys_in_group(of_first[len(keys) :], group, parent), new_blocks)

    def _register(
        self, keys: list[BlockKey], new_keys: Iterable[BlockKey], new_blocks: Sequence[int]
    ) -> None:
        for key, block in zip(new_keys, new_blocks, strict=True):
            # The canonical key of the parent can be another object: see `PrefixIndex`.
            key.parent = keys[-1] if keys else None
            keys.append(self._index.register(key, block))
