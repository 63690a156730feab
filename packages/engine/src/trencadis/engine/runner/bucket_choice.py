"""The bucket of each batch, and what is known of the buckets: ready, captured, used.

A batch larger than every bucket is a bucket miss.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Iterator, Sequence

import attrs

from trencadis.bucketing import Bucket, BucketGrid
from trencadis.engine.api.inspection import GridUsage
from trencadis.engine.errors import BucketMiss, DeviceError
from trencadis.engine.runner.bucket_usage import BucketUsage
from trencadis.engine.runner.forward_runner import REFUSED, ForwardRunner
from trencadis.engine.runner.grids import Grids
from trencadis.engine.runner.shapes import BucketShape, DecodeRead, padded_decode, with_shared
from trencadis.kvcache.tensors import KVCache
from trencadis.warmup import GraphCapture, Phase

logger = logging.getLogger("trencadis.engine")

_MAX_OVERSIZE = 4
"""A ready bucket may replace a cold one if it is at most this many times as large."""

RecordMiss = Callable[[Phase, Bucket], None]


class BucketChoice:
    """Chooses the buckets of batches. ``usage`` counts them, ``num_misses`` bucket misses.

    ``read`` says how decode reads the cache, as the decode grid assumes it. Without ``grids`` no
    batch is padded.
    """

    def __init__(
        self, forward_runner: ForwardRunner, cache: KVCache, grids: Grids | None, read: DecodeRead
    ) -> None:
        self.num_misses = 0
        self._grids = grids
        self._forward_runner = forward_runner
        self._read = read
        # Numbers, not the cache: while a model sleeps, its cache is the padding block alone.
        self._num_blocks, self._block_size = cache.num_blocks, cache.block_size
        self._ready: tuple[int, frozenset[tuple[Phase, Bucket]]] = 0, frozenset()
        self._captured: set[tuple[Phase, Bucket]] = set()
        self.usage = BucketUsage(grids, read)
        self._record_miss: RecordMiss | None = None
        self._capture: GraphCapture | None = None
        self._never_used: dict[Phase, set[Bucket]] = {}
        self.not_captured: dict[tuple[Phase, Bucket], None] = {}
        """Buckets that were used first since `capture_used` was called, where it has work to do."""

    def find(self, phase: Phase, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape to pad to. Logs a bucket miss, which may compile in live traffic."""
        if self._grids is None:
            self.usage.count_unpadded(phase, *shape[:2])
            return shape
        grid = self._grids.prompt if phase is Phase.PROMPT else self._grids.decode
        found = bucket = grid.find(shape)
        if bucket is None:
            self.num_misses += 1
            if self._forward_runner.refuse_cold:
                raise BucketMiss(f"{_describe_miss(phase, shape, grid)}, and {REFUSED}")
            bucket = grid.fallback(shape)
            logger.warning(
                "%s bucket miss: shape %s is past every bucket, padded to %s",
                phase.value,
                shape,
                bucket.shape,
            )
        if self._record_miss is not None and not self.is_ready(phase, bucket):
            self._record_miss(phase, bucket)
            bucket = self._ready_substitute(phase, bucket, grid)
        if self._capture is not None and bucket in self._never_used[phase]:
            # Once for each bucket: a graph that does not fit when it first comes is not captured.
            self._never_used[phase].discard(bucket)
            self.not_captured[phase, bucket] = None
        if found is not None:
            self.usage.count(phase, bucket.shape)
        return bucket.shape

    def prefer_ready(self, record_miss: RecordMiss) -> None:
        """Let a batch whose bucket is not ready use a larger one that is.

        Calls ``record_miss`` for each batch whose own bucket was not ready yet.
        """
        self._record_miss = record_miss

    def shapes(self, phase: Phase, bucket: Bucket) -> Sequence[BucketShape]:
        """The shapes that batches of a bucket have.

        A decode bucket that reads a prefix has two: without gathered blocks, and with as many as
        it has blocks. Where attention scores shared blocks in place, there is one with these alone,
        and they are not gathered. With adapters, there are as many again for each of
        `ForwardRunner.adapter_ranks`.
        """
        shapes = self._shapes(phase, bucket)
        ranks = self._forward_runner.adapter_ranks
        return (*shapes, *(attrs.evolve(x, adapter_rank=rank) for rank in ranks for x in shapes))

    def _shapes(self, phase: Phase, bucket: Bucket) -> Sequence[BucketShape]:
        """`shapes`, of batches without adapters."""
        if phase is Phase.PROMPT:
            return self._grids.prompt_shapes(bucket.shape) if self._grids else ()
        batch, length = bucket.shape
        windows = self._forward_runner.windows
        size = (batch, length)
        shape = padded_decode(size, self._read, self._block_size, self._num_blocks, windows)
        if shape.batch == 1 or not shape.blocks or not self._forward_runner.needs_warmup:
            return (shape,)
        if not self._forward_runner.scores_shared:
            return shape, attrs.evolve(shape, extra=shape.blocks)
        shared = with_shared(shape, self._block_size)
        # Where all blocks can be shared, nothing is left to be gathered.
        if shared.shared == shape.blocks:
            return shape, shared
        return shape, shared, attrs.evolve(shared, extra=shape.blocks)

    def is_ready(self, phase: Phase, bucket: Bucket) -> bool:
        """Whether all shapes of a bucket are warmed up, be it by live traffic."""
        return all(map(self._forward_runner.is_warm, self.shapes(phase, bucket)))

    @property
    def num_ready(self) -> int:
        """Buckets of the grids that are ready."""
        return len(self._all_ready())

    def _all_ready(self) -> frozenset[tuple[Phase, Bucket]]:
        """The buckets of the grids that are ready, looked for when more shapes are."""
        # Read first: a thread may warm up the next bucket meanwhile.
        num_warm = self._forward_runner.num_warm
        if num_warm != self._ready[0]:
            ready = (key for key in self._of_grids() if self.is_ready(*key))
            self._ready = num_warm, frozenset(ready)
        return self._ready[1]

    def _of_grids(self) -> Iterator[tuple[Phase, Bucket]]:
        if self._grids is not None:
            for phase, grid in (
                (Phase.PROMPT, self._grids.prompt),
                (Phase.DECODE, self._grids.decode),
            ):
                yield from ((phase, bucket) for bucket in grid.buckets)

    def mark_captured(self, phase: Phase, bucket: Bucket) -> None:
        """Note that the graphs of a bucket were captured."""
        self._captured.add((phase, bucket))

    def mark_released(self, phase: Phase, bucket: Bucket) -> None:
        """Note that the graphs of a bucket were released."""
        self._captured.discard((phase, bucket))

    def grid_usage(self, *, is_padded: bool) -> tuple[GridUsage, ...]:
        """The state and the hits of the buckets of both phases."""
        # A copy, because a graph may be captured meanwhile. Without graphs, those that the buckets
        # had were released with the memory of the device.
        captured = self._captured.copy() if self._forward_runner.num_graphs else set()
        return self.usage.tables(self._all_ready(), captured, is_padded=is_padded)

    def capture_in_traffic(self, capture: GraphCapture) -> None:
        """Capture the graphs of the buckets that live traffic uses, after their first use."""
        self._capture = capture
        if self._grids is not None:
            self._never_used = {
                Phase.PROMPT: set(self._grids.prompt.buckets),
                Phase.DECODE: set(self._grids.decode.buckets),
            }

    def capture_used(self, *, passes_errors: bool = False) -> None:
        """Capture the graphs of buckets that were used first since the last call.

        Call it between two steps. After an error no more graphs are captured; serving goes on.
        With ``passes_errors`` it is raised as a `DeviceError`: a rank that failed alone has left
        collective calls out. Where all ranks raise it, they go on with the next step.
        """
        while self.not_captured and self._capture is not None:
            phase, bucket = next(iter(self.not_captured))
            self._forward_runner.on_cold(self.shapes(phase, bucket)[0])
            try:
                self._capture.capture_bucket(phase, bucket)
            except Exception as error:
                logger.exception("Capturing a graph failed; no more graphs are captured")
                self._capture = None
                if passes_errors:
                    raise DeviceError(f"capturing a graph failed: {error}") from error
            finally:
                self.not_captured.pop((phase, bucket))

    def _ready_substitute(self, phase: Phase, bucket: Bucket, grid: BucketGrid) -> Bucket:
        """The smallest ready bucket that holds ``bucket`` and is not much larger, or itself."""
        size = num_elements(bucket)
        larger = (
            candidate
            for candidate in grid.buckets
            if size < num_elements(candidate) <= _MAX_OVERSIZE * size
            and all(map(operator.le, bucket.shape, candidate.shape))
            and self.is_ready(phase, candidate)
        )
        return min(larger, key=num_elements, default=bucket)


def _describe_miss(phase: Phase, shape: tuple[int, ...], grid: BucketGrid) -> str:
    """The batch that no bucket holds, and what sets the largest bucket, which is too small."""
    sizes = ", ".join(f"{axis} {size}" for axis, size in zip(grid.axes, shape, strict=True))
    message = f"no {phase.value.lower()} bucket holds a batch of {sizes}"
    for axis, size in zip(grid.axes, shape, strict=True):
        if size > grid.values(axis)[-1]:
            variable = f"VLLM_{phase.name}_{_VARIABLES[axis]}_BUCKET_MAX"
            return (
                f"{message} (the largest {axis} is {grid.values(axis)[-1]}: {variable}, or the "
                "bucket file)"
            )
    return message


_VARIABLES = {
    "batch": "BS",
    "query": "QUERY",
    "context_blocks": "CTX",
    "blocks": "BLOCK",
    "seq": "SEQ",
}


def num_elements(bucket: Bucket) -> int:
    """The product of the sizes of a bucket, an empty one counted as 1."""
    return math.prod(size or 1 for size in bucket.shape)
