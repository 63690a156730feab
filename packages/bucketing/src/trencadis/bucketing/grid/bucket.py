"""A bucket: one named shape that a graph is compiled for, and what it costs to run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import attrs

from trencadis.bucketing.errors import BucketingError, UnknownAxis, shown
from trencadis.bucketing.shapes import checked_names, checked_sizes

Shape: TypeAlias = tuple[int, ...]
"""One size per axis, in the order of the axes."""


def _sizes(shape: Sequence[int]) -> Shape:
    return checked_sizes("a bucket", shape)


@functools.total_ordering
@attrs.frozen(order=False, cache_hash=True, repr=False)
class Bucket:
    """A shape whose axes have names, such as `Bucket(("batch", "seq"), (4, 512))`.

    It is hashable, so it can be the key of a captured graph. Buckets are ordered by shape.
    `bucket["seq"]` is the size along one axis.

    Raises:
        BucketingError: not one size of 0 or more per axis, or two axes of one name.
    """

    axes: tuple[str, ...] = attrs.field(converter=checked_names)
    shape: Shape = attrs.field(converter=_sizes)

    def __attrs_post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise BucketingError(
                f"shape {self.shape} has {len(self.shape)} sizes for the {len(self.axes)} axes "
                f"{', '.join(self.axes)}: give one size per axis"
            )

    def __getitem__(self, axis: str) -> int:
        try:
            return self.shape[self.axes.index(axis)]
        except ValueError:  # of an array of NumPy too, which cannot be compared with a name
            raise UnknownAxis(
                f"no axis {shown(axis)}: this bucket has {', '.join(self.axes)}"
            ) from None

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Bucket):
            return NotImplemented
        return self.shape < other.shape

    def __repr__(self) -> str:
        pairs = zip(self.axes, self.shape, strict=True)
        return f"Bucket({', '.join(f'{axis}={size}' for axis, size in pairs)})"


Cost: TypeAlias = Callable[[Bucket], float]


def element_count(bucket: Bucket) -> float:
    """The default cost: the product of the sizes, where a size of 0 counts as 1."""
    return float(math.prod(size or 1 for size in bucket.shape))


@attrs.frozen
class PromptCost:
    """The cost of a prompt bucket (batch, query, context blocks), in (token, token) pairs.

    Linear layers cost per new token, attention per pair of a new token and a token it attends to.
    The weights make both equal at a context of about `max_model_len`.

    Attributes:
        max_model_len: tokens of one sequence.
        block_size: tokens per block.
    """

    max_model_len: int
    block_size: int

    def __call__(self, bucket: Bucket) -> float:
        batch, query, blocks = bucket.shape
        return float(batch * query * (self.max_model_len + query + blocks * self.block_size))
