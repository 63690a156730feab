"""A recorder of the shapes that a server gets, in bounded memory, to fit later grids to."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from trencadis.bucketing.errors import BucketingError, shown
from trencadis.bucketing.rounding import IntArray, round_up
from trencadis.bucketing.shapes import MAX_SIZE, checked_names, checked_sizes
from trencadis.bucketing.text_files import check_path, read_text, replace_text
from trencadis.bucketing.validators import instance_of, integer


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
        names = checked_names(axes)
        # Even at its coarsest, an axis keeps 0 apart from other sizes: two sizes per axis.
        self._capacity: int = integer(1 << len(names)).checked("capacity", capacity)
        if not names:
            raise BucketingError("a recorder without axes cannot count: give at least one axis")
        self._axes = names
        self._resolution = [1] * len(self._axes)
        self._counts: dict[tuple[int, ...], int] = {}
        self._total = 0

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
        return self._total

    def record(self, shape: Sequence[int], count: int = 1) -> None:
        """Count one batch of this shape, or `count` of them.

        Raises:
            BucketingError: not one size per axis; a size or a count that is not an integer of 0
                or more, or above `MAX_SIZE`; more than `MAX_SIZE` batches in all.
        """
        sizes = checked_sizes("shape", shape)
        times = integer(0, MAX_SIZE).checked("the count of a shape", count)
        if len(sizes) != len(self._axes):
            raise BucketingError(
                f"shape {shown(sizes)} cannot be counted: give a size for each of "
                f"{', '.join(self._axes)}"
            )
        if self._total + times > MAX_SIZE:
            raise BucketingError(
                f"{shown(times)} more batches than the {self._total} recorded are above "
                f"{MAX_SIZE}: begin a new recorder"
            )
        key = self._rounded(sizes)
        while key not in self._counts and len(self._counts) >= self._capacity:
            self._coarsen(key)
            key = self._rounded(sizes)
        self._counts[key] = self._counts.get(key, 0) + times
        self._total += times

    def merge(self, other: TrafficRecorder) -> None:
        """Add the counts of another recorder of the same axes.

        Raises:
            BucketingError: different axes.
        """
        instance_of(TrafficRecorder).checked("traffic", other)
        if other.axes != self._axes:
            raise BucketingError(
                f"traffic of axes {', '.join(other.axes)} does not merge into traffic of axes "
                f"{', '.join(self._axes)}: record both with the same axes"
            )
        if self._total + other.total > MAX_SIZE:
            raise BucketingError(
                f"{self._total} and {other.total} recorded batches are above {MAX_SIZE} together: "
                "keep them apart"
            )
        for axis, resolution in enumerate(other.resolution):
            while self._resolution[axis] < resolution:
                self._halve_resolution(axis)
        # A copy of the counts, because a recorder may be merged into itself.
        for shape, count in list(other._counts.items()):
            self.record(shape, count)

    def shapes(self) -> tuple[IntArray, IntArray]:
        """The shapes, sorted, one row each, and how often each was recorded."""
        rows = sorted(self._counts)
        counts = np.array([self._counts[row] for row in rows], dtype=np.int64)
        return np.array(rows, dtype=np.int64).reshape(-1, len(self._axes)), counts

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a JSON file, replaced atomically.

        A link is followed, and the file that it replaces keeps its permissions. Of two that save to
        the same path the last one stays: hold a lock to read, `merge` and save.

        Raises:
            OSError: the file cannot be written.
        """
        check_path(path)
        content = {
            "axes": self._axes,
            "capacity": self._capacity,
            "resolution": self._resolution,
            "counts": [[*shape, count] for shape, count in sorted(self._counts.items())],
        }
        replace_text(path, json.dumps(content) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrafficRecorder:
        """Read a file that `save` wrote.

        Raises:
            BucketingError: the file is not recorded traffic; the message has the line of a byte
                that is not UTF-8 or not JSON, or the entry of a bad shape or count; a pipe or a
                device.
            OSError: the file cannot be read.
        """
        text = read_text(path)
        try:
            content: dict[str, Any] = json.loads(text)
            recorder = cls(content["axes"], capacity=content["capacity"])
            recorder._resolution = _checked_resolution(content["resolution"], len(recorder.axes))
            counts = list(content["counts"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BucketingError(
                f"{path} is not recorded traffic ({error}): save it again"
            ) from None
        for number, entry in enumerate(counts, start=1):
            recorder._record_entry(entry, f"{path}, entry {number} of counts")
        return recorder

    def _record_entry(self, entry: Any, place: str) -> None:
        """Count an entry of a file: the sizes of a shape and its count."""
        if not isinstance(entry, list) or len(entry) != len(self._axes) + 1:
            raise BucketingError(
                f"{place}: {shown(entry)} is not recorded traffic, a shape with its count: "
                "save it again"
            )
        try:
            self.record(entry[:-1], entry[-1])
        except BucketingError as error:
            raise BucketingError(f"{place} is not recorded traffic: {error}") from None

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


def _checked_resolution(resolution: Any, num_axes: int) -> list[int]:
    """The resolution of every axis, each a power of two."""
    steps = list(checked_sizes("resolution", resolution))
    if len(steps) != num_axes or any(step < 1 or step & (step - 1) for step in steps):
        raise BucketingError(
            f"resolution {shown(steps)} is not one power of two for each of {num_axes} axes"
        )
    return steps
