"""Counts the forward passes of each bucket, and shows grids as tables of bounded size."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import attrs

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.engine.api.inspection import MAX_GRID_SIZES, GridUsage
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.shapes import DecodeRead
from trencadis.kvcache import ceil_div
from trencadis.warmup import Phase

Shape = tuple[int, ...]

_NAMES: Mapping[Phase, Literal["prefill", "decode"]] = {
    Phase.PROMPT: "prefill",
    Phase.DECODE: "decode",
}
_LENGTH_AXES = {
    DecodeRead.PREFIX: "blocks",
    DecodeRead.PAIRS: "blocks",
    DecodeRead.SEQUENCES: "seq",
}


class BucketUsage:
    """The hits of the buckets of ``grids``. A hit costs one increment in a dictionary."""

    def __init__(self, grids: Grids | None, read: DecodeRead) -> None:
        self._hits: dict[Phase, dict[Shape, int]] = {phase: {} for phase in Phase}
        self._unpadded: dict[Phase, dict[Shape, int]] = {phase: {} for phase in Phase}
        self._unpadded_axes = {
            Phase.PROMPT: ("batch", "query"),
            Phase.DECODE: ("batch", _LENGTH_AXES[read]),
        }
        self._grids = grids
        self._tables: dict[Phase, _GridTable] = {}

    def count(self, phase: Phase, shape: Shape) -> None:
        """Count a forward pass in a bucket of the grid."""
        hits = self._hits[phase]
        hits[shape] = hits.get(shape, 0) + 1

    def count_unpadded(self, phase: Phase, batch: int, length: int) -> None:
        """Count a forward pass in a size of its own, under the next powers of two."""
        hits = self._unpadded[phase]
        size = 1 << (batch - 1).bit_length(), 1 << (length - 1).bit_length()
        hits[size] = hits.get(size, 0) + 1

    def tables(
        self,
        ready: Collection[tuple[Phase, Bucket]],
        captured: Collection[tuple[Phase, Bucket]],
        *,
        is_padded: bool,
    ) -> tuple[GridUsage, ...]:
        """Both grids. ``ready``, ``captured``: the buckets that are warmed up, and have graphs."""
        if self._grids is None or not is_padded:
            return tuple(
                _sizes_that_occurred(phase, self._unpadded_axes[phase], self._unpadded[phase])
                for phase in Phase
            )
        if not self._tables:
            self._tables = {
                Phase.PROMPT: _GridTable.of(self._grids.prompt),
                Phase.DECODE: _GridTable.of(self._grids.decode),
            }
        return tuple(self._usage(phase, ready, captured) for phase in Phase)

    def _usage(
        self,
        phase: Phase,
        ready: Collection[tuple[Phase, Bucket]],
        captured: Collection[tuple[Phase, Bucket]],
    ) -> GridUsage:
        table = self._tables[phase]
        warm = {bucket.shape for of_phase, bucket in ready if of_phase is phase}
        graphs = {bucket.shape for of_phase, bucket in captured if of_phase is phase}
        return GridUsage(
            phase=_NAMES[phase],
            axes=table.axes,
            rows=table.rows,
            columns=table.columns,
            is_padded=True,
            num_buckets=table.num_buckets,
            num_warm=table.summed((shape, 1) for shape in warm | graphs),
            num_captured=table.summed((shape, 1) for shape in graphs),
            num_hits=table.summed(self._hits[phase].items()),
        )


@attrs.frozen
class _GridTable:
    """The cells of a grid. ``cell_of``: the cell of each bucket, by its shape."""

    axes: tuple[str, str]
    rows: Shape
    columns: Shape
    cell_of: dict[Shape, int]
    num_buckets: Shape

    @classmethod
    def of(cls, grid: BucketGrid) -> _GridTable:
        row_axis, column_axis = grid.axes[:2]
        rows, row_of = _grouped(grid.values(row_axis))
        columns, column_of = _grouped(grid.values(column_axis))
        cell_of = {
            bucket.shape: row_of[bucket.shape[0]] * len(columns) + column_of[bucket.shape[1]]
            for bucket in grid.buckets
        }
        num_buckets = _summed(len(rows) * len(columns), ((cell, 1) for cell in cell_of.values()))
        return cls((row_axis, column_axis), rows, columns, cell_of, num_buckets)

    def summed(self, counts: Iterable[tuple[Shape, int]]) -> Shape:
        """The sum of each cell."""
        return _summed(
            len(self.num_buckets), ((self.cell_of[shape], count) for shape, count in counts)
        )


def _summed(num_cells: int, counts: Iterable[tuple[int, int]]) -> Shape:
    sums = [0] * num_cells
    for cell, count in counts:
        sums[cell] += count
    return tuple(sums)


def _grouped(sizes: Sequence[int]) -> tuple[Shape, dict[int, int]]:
    """The largest size of each group of neighbours, and the group of each size."""
    length = max(1, ceil_div(len(sizes), MAX_GRID_SIZES))
    largest = tuple(sizes[min(i + length, len(sizes)) - 1] for i in range(0, len(sizes), length))
    return largest, {size: i // length for i, size in enumerate(sizes)}


def _sizes_that_occurred(
    phase: Phase, axes: tuple[str, str], hits: Mapping[Shape, int]
) -> GridUsage:
    rows, row_of = _grouped(sorted({size[0] for size in hits}))
    columns, column_of = _grouped(sorted({size[1] for size in hits}))
    num_cells = len(rows) * len(columns)
    none = (0,) * num_cells
    return GridUsage(
        phase=_NAMES[phase],
        axes=axes,
        rows=rows,
        columns=columns,
        is_padded=False,
        num_buckets=none,
        num_warm=none,
        num_captured=none,
        num_hits=_summed(
            num_cells,
            (
                (row_of[batch] * len(columns) + column_of[length], count)
                for (batch, length), count in hits.items()
            ),
        ),
    )
