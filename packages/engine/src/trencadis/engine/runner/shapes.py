"""The exact shapes of a step's forward passes, before padding, and how prefill chunks share them.

Kept apart from `model_input` because the simulated device uses shapes and does not import PyTorch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import attrs
import numpy as np

from trencadis.kvcache import ceil_div, most_window_blocks
from trencadis.scheduler import ScheduledSequence


@attrs.frozen
class PromptShape:
    """Padded shape of a prefill batch: sequences, tokens of each, context blocks of each.

    ``adapter_rank``, here and in the other shapes: the rank up to which adapters are computed, 0
    for a batch without any. ``recent``: how many last blocks of each context layers read whose
    window is within them; 0 where these read what the others do.
    """

    batch: int
    query: int
    context_blocks: int
    adapter_rank: int = 0
    recent: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward pass, padding included."""
        return self.batch * self.query

    @property
    def size(self) -> tuple[int, int, int]:
        """That on the axes of a prompt grid."""
        return self.batch, self.query, self.context_blocks


class ChunkSize(NamedTuple):
    """Tokens of a prefill chunk, and the tokens and blocks of its context."""

    tokens: int
    context_tokens: int
    context_blocks: int


@attrs.frozen
class RaggedShape:
    """Shape of prefill chunks that follow each other as one row of ``num_tokens``.

    Padding is at the end alone. A program of the decoder layers depends on ``num_tokens``;
    attention computes each chunk in its own size.
    """

    num_tokens: int
    chunks: tuple[ChunkSize, ...]
    adapter_rank: int = 0

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.chunks)


@attrs.frozen
class DecodeShape:
    """Padded shape of a decode batch: sequences, blocks of the cache prefix, gathered pairs.

    ``extra`` is the number of (block, sequence) pairs beyond each block's first owner: a block that
    several sequences share is read in place for its first owner and gathered for the others.
    Without a prefix (``blocks`` is 0) all blocks of the batch are such pairs. The first ``shared``
    blocks of the prefix are scored for every sequence, read in place once. ``further``: the pairs
    in each block group after the first; there is no prefix then. ``recent``: how many last blocks
    of each sequence are gathered for layers whose window is within them; 0 where these read what
    the others do.
    """

    batch: int
    blocks: int
    extra: int = 0
    shared: int = 0
    adapter_rank: int = 0
    further: tuple[int, ...] = ()
    recent: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward pass, padding included."""
        return self.batch


@attrs.frozen
class MixedShape:
    """Shape of a forward pass of all that a step computes, as one row of ``num_tokens``.

    First one token for each sequence of the decode batch, then the prefill chunks. Padding is at
    the end alone.
    """

    decode: DecodeShape
    prompt: RaggedShape
    adapter_rank: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of the forward pass, padding included."""
        return self.decode.num_tokens + self.prompt.num_tokens

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.decode.batch + self.prompt.batch


class DecodeRead(enum.Enum):
    """How decode reads the KV cache; it says what the second axis of a decode bucket counts."""

    PREFIX = "the blocks from 0 to the highest block of the batch, in place"
    PAIRS = "the (block, sequence) pairs of the batch, gathered"
    SEQUENCES = "the tokens of its longest sequence; the blocks of each are gathered"


BucketShape = PromptShape | RaggedShape | DecodeShape
"""A shape that a bucket stands for."""

ForwardShape = BucketShape | MixedShape


def prompt_shape(chunks: Sequence[ScheduledSequence], block_size: int) -> PromptShape:
    """The smallest shape that holds these prefill chunks."""
    return PromptShape(
        len(chunks),
        max(len(chunk.token_ids) for chunk in chunks),
        max(ceil_div(chunk.start, block_size) for chunk in chunks),
    )


def ragged_shape(chunks: Sequence[ScheduledSequence], block_size: int) -> RaggedShape:
    """The shape of these prefill chunks, one after another."""
    sizes = tuple(
        ChunkSize(len(chunk.token_ids), chunk.start, ceil_div(chunk.start, block_size))
        for chunk in chunks
    )
    return RaggedShape(sum(size.tokens for size in sizes), sizes)


def decode_size(
    decodes: Sequence[ScheduledSequence], read: DecodeRead, block_size: int
) -> tuple[int, int]:
    """The size of a decode batch on the axes of the decode grid, before padding."""
    if read is DecodeRead.PREFIX:
        highest = int(np.concatenate([decode.block_table for decode in decodes]).max())
        return len(decodes), 1 + highest
    if read is DecodeRead.PAIRS:
        tables = (decode.block_table[: decode.start // block_size + 1] for decode in decodes)
        # Padding blocks stand for those that were given back.
        return len(decodes), sum(int(np.count_nonzero(table)) for table in tables)
    return len(decodes), 1 + max(decode.start for decode in decodes)


def padded_decode(
    size: tuple[int, int],
    read: DecodeRead,
    block_size: int,
    num_blocks: int,
    windows: Sequence[int] = (),
) -> DecodeShape:
    """The shape of batches that are padded to a bucket of this size, for a cache of this length.

    A bucket may have more blocks than the cache; the cache prefix cannot be longer. ``windows``: of
    layers for which the last blocks of each sequence may be gathered, in tokens.
    """
    batch, length = size
    if read is DecodeRead.PREFIX:
        shape = DecodeShape(batch, min(length, num_blocks))
    elif read is DecodeRead.PAIRS:
        shape = DecodeShape(batch, 0, length)
    else:
        shape = DecodeShape(batch, 0, batch * ceil_div(length, block_size))
    return with_recent(shape, windows, block_size)


GATHER_COST = 3
"""A gathered block is read, written and read again."""


def with_recent(shape: DecodeShape, windows: Sequence[int], block_size: int) -> DecodeShape:
    """The shape with the last blocks of each sequence, where gathering them reads less.

    For the largest of the ``windows`` for which it does; layers with smaller ones read a part.
    """
    pairs = GATHER_COST * shape.batch if shape.blocks else shape.batch
    counts = (most_window_blocks(window, 1, block_size) for window in windows)
    fitting = (count for count in counts if pairs * count < shape.blocks + shape.extra)
    return attrs.evolve(shape, recent=max(fitting, default=0))


def with_recent_context(shape: PromptShape, windows: Sequence[int], block_size: int) -> PromptShape:
    """As `with_recent`. The blocks of a context are always gathered."""
    counts = (most_window_blocks(window, 1, block_size) for window in windows)
    fitting = (count for count in counts if count < shape.context_blocks)
    return attrs.evolve(shape, recent=max(fitting, default=0))


SHARED_TOKENS = 8192
"""Tokens of a prefix whose blocks may be scored for every sequence of a batch. For 128 sequences of
an 8B model that is 0.55 teraflop, 0.3 ms at the peak of Gaudi 3, which reads its weights in 4.3."""


def most_shared_blocks(block_size: int) -> int:
    """Blocks, from 0 on, that may be scored for every sequence of a batch."""
    return ceil_div(SHARED_TOKENS, block_size)


def with_shared(shape: DecodeShape, block_size: int) -> DecodeShape:
    """The shape of a batch whose sequences share blocks among the first of the prefix."""
    return attrs.evolve(shape, shared=min(shape.blocks, most_shared_blocks(block_size)))


def most_prefix_pairs(num_blocks: int) -> int:
    """The most (block, sequence) pairs of a decode that reads a prefix of a cache of this length.

    It scores the prefix, and gathers as many blocks again that sequences share. Memory is planned
    for them; a batch with more is divided.
    """
    return 2 * num_blocks


def most_group_pairs(num_blocks: int, num_groups: int, longest: int) -> int:
    """The most (block, sequence) pairs of a decode in each of several block groups.

    ``longest``: blocks of the longest sequence, of which a batch has one at least. Pairs of the
    group that sees most take the most memory: the others share the cache's blocks with it.
    """
    return max(longest, most_prefix_pairs(num_blocks) // num_groups)


def in_groups(shape: DecodeShape, num_groups: int) -> DecodeShape:
    """The shape of a batch with as many pairs in each of several block groups as it has blocks."""
    pairs = shape.blocks + shape.extra
    further = (pairs,) * (num_groups - 1)
    return attrs.evolve(shape, blocks=0, extra=pairs, shared=0, further=further)


Cost = Callable[[Sequence[ScheduledSequence]], float | None]
"""Cost of one padded forward pass for these chunks; None for a bucket miss."""


def split_prompts(
    chunks: Sequence[ScheduledSequence], cost: Cost
) -> list[Sequence[ScheduledSequence]]:
    """Split prefill chunks into batches of minimal total cost.

    Chunks are sorted by context and length, so that similar chunks are neighbours. Dynamic
    programming over the prefixes of that order finds the best split. A chunk that fits no bucket
    runs alone.
    """
    ordered = sorted(chunks, key=lambda chunk: (chunk.start > 0, len(chunk.token_ids), chunk.start))
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(ordered) + 1):
        options = []
        for start in range(end - 1, -1, -1):
            batch_cost = cost(ordered[start:end])
            if batch_cost is None:
                break  # a larger batch does not fit either
            options.append((best[start][0] + batch_cost, start))
        best.append(min(options, default=(best[end - 1][0], end - 1)))
    batches: list[Sequence[ScheduledSequence]] = []
    end = len(ordered)
    while end:
        start = best[end][1]
        batches.append(ordered[start:end])
        end = start
    return batches[::-1]
