"""A bucket: one named shape that a graph is compiled for."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TypeAlias

import attrs

from trencadis.bucketing.errors import BucketingError

Shape: TypeAlias = tuple[int, ...]
"""One size per axis, in the order of the axes."""


def _names(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(axes)


def _sizes(shape: Sequence[int]) -> Shape:
    return tuple(shape)


@functools.total_ordering
@attrs.frozen(order=False, cache_hash=True, repr=False)
class Bucket:
    """A shape whose axes have names, such as `Bucket(("batch", "seq"), (4, 512))`.

    It is hashable, so it can be the key of a captured graph. Buckets are ordered by shape.
    `bucket["seq"]` is the size along one axis.

    Raises:
        BucketingError: not one size per axis.
    """

    axes: tuple[str, ...] = attrs.field(converter=_names)
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
        except ValueError:
            raise KeyError(f"no axis {axis!r}: this bucket has {', '.join(self.axes)}") from None

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Bucket):
            return NotImplemented
        return self.shape < other.shape

    def __repr__(self) -> str:
        pairs = zip(self.axes, self.shape, strict=True)
        return f"Bucket({', '.join(f'{axis}={size}' for axis, size in pairs)})"
