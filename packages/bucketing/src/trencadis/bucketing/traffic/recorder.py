"""A recorder of the shapes that a server gets, in bounded memory, to fit later grids to."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.rounding import IntArray, round_up


class TrafficRecorder:
    """Counts of the shapes of one grid's traffic, before padding.

    Memory is bounded. When there are more than `capacity` different shapes, the axis with the most
    different sizes is recorded at half its resolution from then on, with sizes rounded up. A fit
    stays exact while the resolution of an axis divides its step.

    Not thread-safe: use one recorder per thread, then `merge`.

    Args:
        axes: the names of the axes, as in the grid.
        capacity: the most different shapes to keep.

    Raises:
        BucketingError: no axes, or a capacity that is too small.
    """

    def __init__(self, axes: Sequence[str], *, capacity: int = 1 << 16) -> None:
        # Even at its coarsest, an axis keeps 0 apart from other sizes: two sizes per axis.
        if not axes or capacity < 1 << len(axes):
            raise BucketingError(
                f"a recorder of {len(axes)} axes with capacity {capacity} cannot count: "
                f"give at least one axis and a capacity of at least {1 << len(axes)}"
            )
        self._axes = tuple(axes)
        self._capacity = capacity
        self._resolution = [1] * len(self._axes)
        self._counts: dict[tuple[int, ...], int] = {}

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes."""
        return self._axes

    @property
    def resolution(self) -> tuple[int, ...]:
        """The step to which sizes are rounded up, per axis: 1 until `capacity` is reached."""
        return tuple(self._resolution)

    @property
    def total(self) -> int:
        """The number of recorded shapes."""
        return sum(self._counts.values())

    def record(self, shape: Sequence[int], count: int = 1) -> None:
        """Count one batch of this shape, or `count` of them.

        Raises:
            BucketingError: not one size per axis, or a negative size or count.
        """
        if len(shape) != len(self._axes) or min(shape) < 0 or count < 0:
            raise BucketingError(
                f"{count} of shape {tuple(shape)} cannot be counted: give a size of 0 or more for "
                f"each of {', '.join(self._axes)}, and a count of 0 or more"
            )
        key = self._rounded(shape)
        while key not in self._counts and len(self._counts) >= self._capacity:
            self._coarsen(key)
            key = self._rounded(shape)
        self._counts[key] = self._counts.get(key, 0) + count

    def merge(self, other: TrafficRecorder) -> None:
        """Add the counts of another recorder of the same axes.

        Raises:
            BucketingError: different axes.
        """
        if other.axes != self._axes:
            raise BucketingError(
                f"traffic of axes {', '.join(other.axes)} does not merge into traffic of axes "
                f"{', '.join(self._axes)}: record both with the same axes"
            )
        for axis, resolution in enumerate(other.resolution):
            while self._resolution[axis] < resolution:
                self._halve_resolution(axis)
        for shape, count in other._counts.items():
            self.record(shape, count)

    def shapes(self) -> tuple[IntArray, IntArray]:
        """The shapes, sorted, one row each, and how often each was recorded."""
        rows = sorted(self._counts)
        counts = np.array([self._counts[row] for row in rows], dtype=np.int64)
        return np.array(rows, dtype=np.int64).reshape(-1, len(self._axes)), counts

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a JSON file, replaced atomically."""
        content = {
            "axes": self._axes,
            "capacity": self._capacity,
            "resolution": self._resolution,
            "counts": [[*shape, count] for shape, count in sorted(self._counts.items())],
        }
        partial = Path(f"{os.fspath(path)}.partial")
        partial.write_text(json.dumps(content) + "\n", encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrafficRecorder:
        """Read a file that `save` wrote.

        Raises:
            BucketingError: the file is not recorded traffic.
            OSError: the file cannot be read.
        """
        text = Path(path).read_text(encoding="utf-8")
        try:
            content: dict[str, Any] = json.loads(text)
            recorder = cls(content["axes"], capacity=content["capacity"])
            recorder._resolution = [_power_of_two(size) for size in content["resolution"]]
            for *shape, count in content["counts"]:
                recorder.record(shape, count)
        except (ValueError, TypeError, KeyError) as error:
            raise BucketingError(
                f"{path} is not recorded traffic ({error}): save it again"
            ) from None
        return recorder

    def _rounded(self, shape: Sequence[int]) -> tuple[int, ...]:
        sizes = zip(shape, self._resolution, strict=True)
        return tuple(round_up(size, resolution) for size, resolution in sizes)

    def _coarsen(self, new_shape: tuple[int, ...]) -> None:
        """Halve the resolution of the axis with the most different sizes."""
        sizes = zip(*self._counts, new_shape, strict=True)
        different = [len(set(axis)) for axis in sizes]
        self._halve_resolution(different.index(max(different)))

    def _halve_resolution(self, axis: int) -> None:
        self._resolution[axis] *= 2
        counts: dict[tuple[int, ...], int] = {}
        for shape, count in self._counts.items():
            key = self._rounded(shape)
            counts[key] = counts.get(key, 0) + count
        self._counts = counts


def _power_of_two(value: Any) -> int:
    if type(value) is not int or value < 1 or value & (value - 1):
        raise ValueError(f"resolution {value!r} is not a power of two")
    return value
