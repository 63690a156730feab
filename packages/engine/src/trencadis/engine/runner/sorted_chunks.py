"""Finds how far below the best token top_k and top_p reach, with few reads of the logits.

A row is sorted in chunks, and each chunk is divided into blocks. The first of each block are the
samples of the row (regular sampling: Shi and Schaeffer, "Parallel Sorting by Regular Sampling",
1992). Whatever lies between two adjacent samples lies in one block of each chunk, so that a binary
search among the samples and a sort of those blocks find the limit exactly: for any logits, with
the same operations and shapes. There is no second way for large nuclei.

All operations have Gaudi kernels (``scripts/hpu_op.yaml`` of HabanaAI/gaudi-pytorch-bridge 1.19.0:
``topk`` 6526, ``gather`` 3109, ``cumsum`` 2527, ``sum`` 6411 with Int). Sorts are ``topk`` of all
values: ``sort`` is the same kernel, but an unstable one, and one of up to 37 values, runs on the
host (``hpu_ops/backend/sort_gen.cpp:20-29``). vLLM, on Gaudi too, sorts the whole row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import torch

CHUNK = 4096
"""Logits that are sorted together."""

_BLOCK = 64
"""Logits of a block. A round of the search reads a sample of each block and a block of each chunk,
together the least for 128k logits."""

PROBABILITY_UNIT = 2.0**30
"""A probability of 1 as an integer. Sums of a vocabulary's rounded parts stay below 2**31."""

WeightOf = Callable[[torch.Tensor], torch.Tensor]
"""Weights, int32, of tokens at given distances, fp32 of any shape."""


@attrs.frozen(eq=False)
class SortedChunks:
    """The logits of rows, in order within each chunk.

    The distance of a token is how far its scaled logit is below the best of its row. ``parts``:
    fp32 ``[rows, chunks, blocks, _BLOCK]``, the whole chunks and what remains, filled up with minus
    infinity; ``best``: the largest scaled logit, and ``temperature``, both ``[rows, 1]``.
    """

    parts: tuple[torch.Tensor, ...]
    best: torch.Tensor
    temperature: torch.Tensor

    @classmethod
    def of(cls, logits: torch.Tensor, temperature: torch.Tensor) -> SortedChunks:
        """Of ``logits`` fp32 ``[rows, vocabulary]``. ``temperature`` is above 0."""
        # Not divided before the sort, whose input has to be in memory.
        parts = tuple(_sorted_blocks(part) for part in _parts(logits))
        first = torch.cat([part[:, :, 0, 0] for part in parts], dim=1)
        return cls(parts, first.amax(-1, keepdim=True) / temperature, temperature)

    def counted(self) -> WeightedChunks:
        """Each token counts as 1, also one of probability 0."""
        sums = [torch.full_like(part[..., 0], _BLOCK, dtype=torch.int32) for part in self.parts]
        return WeightedChunks.of(self, _one, sums)

    def weighed(self) -> WeightedChunks:
        """Each token counts as its probability in multiples of 2**-30."""
        exponentials = [torch.exp(-self.distance(part)).sum((1, 2, 3)) for part in self.parts]
        divisor = torch.stack(exponentials).sum(0)[:, None]

        def probability(distance: torch.Tensor) -> torch.Tensor:
            part = torch.exp(-distance) / _beside(divisor, distance)
            return (part * PROBABILITY_UNIT).to(torch.int32)

        sums = [probability(self.distance(part)).sum(-1, dtype=torch.int32) for part in self.parts]
        return WeightedChunks.of(self, probability, sums)

    def distance(self, logits: torch.Tensor) -> torch.Tensor:
        """The distances of some of the logits, ``[rows, ...]``."""
        return _beside(self.best, logits) - logits / _beside(self.temperature, logits)


@attrs.frozen(eq=False)
class WeightedChunks:
    """Tokens with weights.

    ``sums``: int32 ``[rows, chunks, blocks]``, the weights of each block and those before it in its
    chunk.
    """

    chunks: SortedChunks
    weight_of: WeightOf
    sums: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls, chunks: SortedChunks, weight_of: WeightOf, blocks: list[torch.Tensor]
    ) -> WeightedChunks:
        """``blocks``: the weights of each block, int32 ``[rows, chunks, blocks]``."""
        return cls(chunks, weight_of, tuple(x.cumsum(-1, dtype=torch.int32) for x in blocks))

    def total(self) -> torch.Tensor:
        """The weights of each row together, int32 ``[rows, 1]``."""
        return _added([sums[..., -1].sum(1, dtype=torch.int32) for sums in self.sums])

    def up_to(self, limit: torch.Tensor) -> torch.Tensor:
        """The weights of each row's distances up to ``limit``, int32 ``[rows, 1]``."""
        return self._cut(limit)[0]

    def reaching(self, target: torch.Tensor) -> torch.Tensor:
        """The least distance, fp32 ``[rows, 1]``, up to which weights reach ``target``.

        Infinity where they do not. ``target`` is int32 ``[rows, 1]``.
        """
        chunks = self.chunks
        firsts = [chunks.distance(part[..., 0]).flatten(1) for part in chunks.parts]
        samples = _ascending(torch.cat(firsts, dim=1))
        last = samples.shape[-1] - 1
        # How many samples do not reach the target, from the highest bit on.
        count = torch.zeros_like(target)
        for position in reversed(range(samples.shape[-1].bit_length())):
            tried = count + (1 << position)
            sample = samples.gather(1, (tried - 1).clamp_max(last).long())
            below = (self.up_to(sample) < target) & (tried <= last + 1)
            count = torch.where(below, tried, count)
        lower = samples.gather(1, (count - 1).clamp_min(0).long())
        lower = torch.where(count > 0, lower, -1.0)
        upper = samples.gather(1, count.clamp_max(last).long())
        upper = torch.where(count <= last, upper, math.inf)
        # The limit is the upper sample or one of the distances between both.
        reached, cut = self._cut(lower)
        blocks = torch.cat(cut, dim=1)
        between = _ascending(torch.where(blocks > lower, blocks, math.inf))
        reached = reached + self.weight_of(between).cumsum(-1, dtype=torch.int32)
        limit = torch.where(reached >= target, between, math.inf).amin(-1, keepdim=True)
        return torch.minimum(limit, upper)

    def _cut(self, limit: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The weights up to ``limit``, and the distances of each chunk's block that it falls in.

        Those are fp32 ``[rows, chunks * _BLOCK]``, a tensor for each of the parts; of a chunk
        without any up to it the first block.
        """
        found, blocks = [], []
        for part, sums in zip(self.chunks.parts, self.sums, strict=True):
            begun = self.chunks.distance(part[..., 0]) <= limit[:, :, None]
            number = begun.sum(-1, keepdim=True, dtype=torch.int32) - 1
            index = number.clamp_min(0).long()
            block = part.gather(2, index[..., None].expand(-1, -1, 1, _BLOCK))[:, :, 0]
            block = self.chunks.distance(block)
            beyond = self.weight_of(block) * (block > limit[:, :, None])
            inside = sums.gather(2, index) - beyond.sum(-1, keepdim=True, dtype=torch.int32)
            found.append((inside * (number >= 0)).sum((1, 2), dtype=torch.int32))
            blocks.append(block.flatten(1))
        return _added(found), blocks


def _parts(logits: torch.Tensor) -> list[torch.Tensor]:
    """``[rows, chunks, logits of a chunk]``: the whole chunks, and what remains, padded."""
    rows, vocabulary = logits.shape
    whole = vocabulary - vocabulary % CHUNK
    parts = [logits[:, :whole].view(rows, -1, CHUNK)] if whole else []
    if whole < vocabulary:
        padding = -(vocabulary - whole) % _BLOCK
        rest = torch.constant_pad_nd(logits[:, whole:], (0, padding), -math.inf)
        parts.append(rest[:, None])
    return parts


def _sorted_blocks(part: torch.Tensor) -> torch.Tensor:
    ordered = part.topk(part.shape[-1], dim=-1).values
    return ordered.view(*part.shape[:2], -1, _BLOCK)


def _ascending(distances: torch.Tensor) -> torch.Tensor:
    return distances.topk(distances.shape[-1], dim=-1, largest=False).values


def _one(distance: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(distance, dtype=torch.int32)


def _added(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(parts).sum(0, dtype=torch.int32)[:, None]


def _beside(number: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """``number`` ``[rows, 1]`` with as many dimensions as ``values``."""
    return number.view(-1, *(1,) * (values.dim() - 1))
