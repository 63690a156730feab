"""The grids of a serving engine, from the user's settings and the engine's limits.

Every shape within the limits has a bucket: an axis whose range ends below its limit gets the limit
as its last value, and a bucket is dropped only if no shape that can come pads to it.
`BucketGrid.coverage_gaps` proves it. The exceptions are a maximum that the user sets, and a bucket
file: the shapes without a bucket are then what `coverage_gaps` returns. They are bucket misses, and
`BucketGrid.fallback` gives their shape.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import get_args

from trencadis.bucketing.config import (
    BucketingConfig,
    Phase,
    listed_buckets,
    recorded_traffic,
    variable_of,
)
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.grid import (
    BucketGrid,
    ReachableDecodeShapes,
    Shape,
    every_shape,
)
from trencadis.bucketing.rounding import ceil_div
from trencadis.bucketing.serving_grids.axes import decode_axes, prompt_axes, sequence_axes
from trencadis.bucketing.serving_grids.limits import PromptLimits
from trencadis.bucketing.shapes import checked_limits
from trencadis.bucketing.strategies import STRATEGIES, AxisSettings
from trencadis.bucketing.traffic import TrafficRecorder
from trencadis.bucketing.validators import boolean, instance_of, one_of

logger = logging.getLogger(__name__)

CONTEXT_AXIS = "context_blocks"
PROMPT_AXES = ("batch", "query", CONTEXT_AXIS)
DECODE_AXES = ("batch", "blocks")

MANY_BUCKETS = 10_000
"""More buckets are warned of. A server captures some thousand graphs at most, and a warm-up of ten
thousand takes hours where each is compiled for a second."""

_FIELDS: dict[tuple[Phase, str], str] = {
    ("prompt", "batch"): "prompt_batch",
    ("prompt", "query"): "prompt_query",
    ("prompt", "seq"): "prompt_query",
    ("prompt", CONTEXT_AXIS): "prompt_context",
    ("decode", "batch"): "decode_batch",
    ("decode", "blocks"): "decode_blocks",
    ("decode", "seq"): "decode_seq",
}
"""The field of `BucketingConfig` that has the settings of an axis, by phase and name."""


def prompt_grid(
    config: BucketingConfig,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    block_size: int,
    traffic: TrafficRecorder | None = None,
) -> BucketGrid:
    """The grid of prompt batches and prefill chunks: axes (batch, query, context_blocks).

    A bucket holds `batch` sequences with `query` new tokens each, after `context_blocks` blocks of
    tokens that are in the KV cache already. The engine adds prompts to a batch while `find` has a
    bucket for it: while the padded tokens, `batch * query`, are within `max_num_batched_tokens`.
    A single prompt always has a bucket: where the smallest batch of the settings would exceed that
    limit, one of batch 1.

    Args:
        config: the user's settings.
        max_model_len: tokens of one sequence, prompt and output together.
        max_num_batched_tokens: new tokens of one batch, padding included.
        max_num_seqs: sequences of one batch.
        block_size: tokens per block of the KV cache.
        traffic: for the fit strategy, in place of the file `config.prompt_traffic`.

    Raises:
        BucketingError: settings that contradict each other or the limits.
    """
    limits = PromptLimits(
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
    )
    _check_arguments(config, traffic)
    listed = listed_buckets(config).prompt
    if listed:
        return _prompt_grid_of_file(config, listed, limits)
    axes = prompt_axes(config, limits)
    values = _axis_values("prompt", config, axes, traffic)
    grid = prompt_grid_of(values, limits, settings_line=_settings_line("prompt", config, axes))
    _warn_of_size("prompt", grid)
    return grid


def prompt_grid_of(
    values: Mapping[str, Sequence[int]], limits: PromptLimits, *, settings_line: str = ""
) -> BucketGrid:
    """The prompt grid with these sizes of (batch, query, context_blocks), within the limits.

    Prompts are batched only while `find` has a bucket, so a batch above the largest one is not a
    gap of the grid's coverage. A smallest batch above 1 is not used for prompts of which it would
    exceed `max_num_batched_tokens`: these get buckets of batch 1.
    """
    smallest, budget = values["batch"][0], limits.max_num_batched_tokens
    if smallest * values["query"][-1] > budget and smallest > 1:
        values = {**values, "batch": (1, *values["batch"])}
    return BucketGrid(
        values,
        filters=(
            lambda bucket: bucket["batch"] >= smallest or smallest * bucket["query"] > budget,
        ),
        reachable=limits.reachable,
        limits=(values["batch"][-1], *limits.largest[1:]),
        cost=limits.cost,
        phase="prompt",
        settings_line=settings_line,
    )


def decode_grid(
    config: BucketingConfig,
    *,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    traffic: TrafficRecorder | None = None,
    clamp: bool = True,
) -> BucketGrid:
    """The grid of decode batches: axes (batch, blocks).

    With `config.contiguous_pa`, `blocks` is the part of the KV cache that decode reads: from block
    0 to the highest block in use, which any batch can have. Otherwise it is the number of
    (sequence, block) pairs: per sequence at least one, at most the blocks of `max_model_len`.

    Args:
        config: the user's settings.
        max_num_seqs: sequences of one batch.
        num_blocks: blocks in the KV cache.
        block_size: tokens per block.
        max_model_len: tokens of one sequence.
        traffic: for the fit strategy, in place of the file `config.decode_traffic`.
        clamp: without `contiguous_pa`, whether `blocks` ends at three times `num_blocks`. False for
            models whose batches may have more pairs: with several groups of KV cache, as hybrids,
            or with sliding windows (`skip_decode_block_clamp` of Gaudi's plugin).

    Raises:
        BucketingError: settings that contradict each other or the limits.
    """
    max_num_seqs, num_blocks, block_size, max_model_len = checked_limits(
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
    )
    _check_arguments(config, traffic)
    boolean().checked("clamp", clamp)
    max_blocks, reachable = num_blocks, every_shape
    if not config.contiguous_pa:
        # A block that several sequences share counts once for each; the plugin allows for three
        # sequences per block on average.
        per_sequence = ceil_div(max_model_len, block_size)
        max_blocks = per_sequence * max_num_seqs
        if clamp:
            max_blocks = min(max_blocks, 3 * num_blocks)
        reachable = ReachableDecodeShapes(per_sequence)
    limits = (max_num_seqs, max_blocks)
    listed = listed_buckets(config).decode
    if listed:
        grid_of = functools.partial(
            BucketGrid.from_shapes, DECODE_AXES, reachable=reachable, limits=limits, phase="decode"
        )
        grid = grid_of(_lowered(listed, limits))
        used = _used_shapes("decode", config, grid, listed, limits)
        return grid if len(used) == len(grid) else grid_of(used)

    axes = decode_axes(
        config, max_num_seqs=max_num_seqs, max_blocks=max_blocks, block_size=block_size
    )
    grid = BucketGrid(
        _axis_values("decode", config, axes, traffic),
        reachable=reachable,
        limits=limits,
        phase="decode",
        settings_line=_settings_line("decode", config, axes),
    )
    _warn_of_size("decode", grid)
    return grid


def sequence_grid(
    phase: Phase,
    config: BucketingConfig,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    traffic: TrafficRecorder | None = None,
) -> BucketGrid:
    """The grid of a runtime that pads sequences and has no paged KV cache: axes (batch, seq).

    Args:
        phase: the phase whose settings apply.
        config: the user's settings.
        max_num_seqs: sequences of one batch.
        max_model_len: tokens of one sequence.
        block_size: the default granularity of the sequence length, in tokens.
        traffic: for the fit strategy, in place of the phase's file in `config`.

    Raises:
        BucketingError: settings that contradict each other or the limits, or a bucket file, whose
            shapes have a context.
    """
    max_num_seqs, max_model_len, block_size = checked_limits(
        max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size
    )
    _check_arguments(config, traffic)
    one_of(get_args(Phase)).checked("phase", phase)
    if config.bucket_file:
        raise BucketingError(
            f"bucket file {config.bucket_file} has shapes with a context, which a (batch, seq) "
            f"grid does not have: unset {variable_of(BucketingConfig, 'bucket_file')}"
        )
    axes = sequence_axes(
        phase,
        config,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        block_size=block_size,
    )
    grid = BucketGrid(
        _axis_values(phase, config, axes, traffic),
        limits=(max_num_seqs, max_model_len),
        phase=phase,
        settings_line=_settings_line(phase, config, axes),
    )
    _warn_of_size(phase, grid)
    return grid


def _check_arguments(config: object, traffic: object) -> None:
    instance_of(BucketingConfig).checked("config", config)
    instance_of(TrafficRecorder, optional=True).checked("traffic", traffic)


def _prompt_grid_of_file(
    config: BucketingConfig, listed: Sequence[Shape], limits: PromptLimits
) -> BucketGrid:
    def grid_of(shapes: Collection[Shape]) -> BucketGrid:
        return BucketGrid.from_shapes(
            PROMPT_AXES,
            shapes,
            reachable=limits.reachable,
            limits=(max(batch for batch, *_ in shapes), *limits.largest[1:]),
            cost=limits.cost,
            phase="prompt",
        )

    grid = grid_of(_lowered(listed, limits.largest))
    used = _used_shapes("prompt", config, grid, listed, limits.largest)
    budget = limits.max_num_batched_tokens
    # A bucket above the budget is used because a prompt alone needs it.
    fitting = {(b if b * query <= budget else 1, query, rest) for b, query, rest in used}
    return grid if fitting == {bucket.shape for bucket in grid} else grid_of(fitting)


def _lowered(shapes: Iterable[Shape], limits: Shape) -> set[Shape]:
    """The shapes with sizes above the limits lowered to them."""
    return {tuple(map(min, shape, limits)) for shape in shapes}


def _used_shapes(
    phase: Phase,
    config: BucketingConfig,
    grid: BucketGrid,
    listed: Sequence[Shape],
    limits: Shape,
) -> list[Shape]:
    """The shapes of the grid of a bucket file that some batch within the limits is padded to.

    A warning says how many of the `listed` buckets are lowered to the limits or left out.
    """
    used = [bucket.shape for bucket in grid.used_buckets()]
    num_lowered = sum(any(map(operator.gt, shape, limits)) for shape in listed)
    num_unused = len(grid) - len(used)
    if num_lowered or num_unused:
        logger.warning(
            "%d of the %d %s buckets in %s are above the limits (%s) and lowered to them, and %d "
            "are left out, because no batch within the limits is padded to them: raise the limits "
            "of the server, or fit the file to them",
            num_lowered,
            len(listed),
            phase,
            config.bucket_file,
            ", ".join(f"{axis} {size}" for axis, size in zip(grid.axes, limits, strict=True)),
            num_unused,
        )
    return used


def _warn_of_size(phase: Phase, grid: BucketGrid) -> None:
    """Warn of a grid with more buckets than a server warms up, and say which setting to change."""
    if len(grid) <= MANY_BUCKETS:
        return
    longest = max(grid.axes, key=lambda axis: len(grid.values(axis)))
    sizes = " × ".join(f"{len(grid.values(axis)):,} {axis}" for axis in grid.axes)
    logger.warning(
        "the %s grid has %s buckets (%s), and a warm-up runs each of them: raise %s, or choose the "
        "exp strategy",
        phase,
        f"{len(grid):,}",
        sizes,
        variable_of(BucketingConfig, _FIELDS[phase, longest]).format("STEP"),
    )


def _axis_values(
    phase: Phase,
    config: BucketingConfig,
    axes: Sequence[AxisSettings],
    traffic: TrafficRecorder | None,
) -> dict[str, tuple[int, ...]]:
    """The values of every axis by name, from the phase's strategy."""
    strategy = STRATEGIES[config.strategy_of(phase)]
    if strategy.fit is not None and traffic is None:
        traffic = recorded_traffic(config, phase)
    values = strategy.values(axes, traffic)
    # Every batch has a sequence, a token and a block; only the context may be 0.
    return {
        name: sizes if name == CONTEXT_AXIS else tuple(size for size in sizes if size)
        for name, sizes in values.items()
    }


def _settings_line(phase: Phase, config: BucketingConfig, axes: Sequence[AxisSettings]) -> str:
    """The log line of the settings, as Gaudi's plugin prints it."""
    settings = STRATEGIES[config.strategy_of(phase)].settings
    names = ", ".join("max_warmup" if name == "max" else name for name in settings)
    shown = (f"{axis.label}:{[getattr(axis, name) for name in settings]}" for axis in axes)
    return f"{phase.capitalize()} bucket config ({names}) {', '.join(shown)}"
