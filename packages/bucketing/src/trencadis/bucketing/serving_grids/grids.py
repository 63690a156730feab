"""The grids of a serving engine, from the user's settings and the engine's limits.

Every shape within the limits has a bucket: an axis whose range ends below its limit gets the limit
as its last value, and a bucket is dropped only if no shape that can come pads to it.
`BucketGrid.coverage_gaps` proves it. The exception is a maximum that the user sets: larger shapes
are bucket misses, and `BucketGrid.fallback` gives their shape.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from trencadis.bucketing.config import (
    BucketingConfig,
    Phase,
    listed_shapes,
    recorded_traffic,
    variable_of,
)
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.grid import (
    BucketGrid,
    PromptCost,
    ReachableDecodeShapes,
    ReachablePromptShapes,
    every_shape,
)
from trencadis.bucketing.rounding import ceil_div
from trencadis.bucketing.serving_grids.axes import decode_axes, prompt_axes, sequence_axes
from trencadis.bucketing.strategies import STRATEGIES, AxisSettings
from trencadis.bucketing.traffic import TrafficRecorder
from trencadis.bucketing.validators import check_positive

PROMPT_AXES = ("batch", "query", "context_blocks")
DECODE_AXES = ("batch", "blocks")


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
    A single prompt always has a bucket.

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
    check_positive(
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
    )
    max_query = min(max_num_batched_tokens, max_model_len)
    ceilings = (max_num_seqs, max_query, ceil_div(max_model_len - 1, block_size))
    cost = PromptCost(max_model_len, block_size)
    reachable = functools.partial(
        ReachablePromptShapes, max_num_batched_tokens, max_model_len, block_size
    )
    listed = listed_shapes(config, "prompt", ceilings)
    if listed:
        can_come = reachable(single_batch=1)
        kept = [shape for shape in listed if can_come(shape, shape)]
        return BucketGrid.from_shapes(
            PROMPT_AXES, kept, reachable=can_come, cost=cost, phase="prompt"
        )
    axes = prompt_axes(
        config, ceilings, max_num_batched_tokens=max_num_batched_tokens, block_size=block_size
    )
    values = _axis_values("prompt", config, axes, traffic)
    single_batch = next(size for size in values["batch"] if size)
    return BucketGrid(
        values,
        reachable=reachable(single_batch=single_batch),
        cost=cost,
        phase="prompt",
        settings_line=_settings_line("prompt", config, axes),
    )


def decode_grid(
    config: BucketingConfig,
    *,
    max_num_seqs: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    traffic: TrafficRecorder | None = None,
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

    Raises:
        BucketingError: settings that contradict each other or the limits.
    """
    check_positive(
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
    )
    max_blocks, reachable = num_blocks, every_shape
    if not config.contiguous_pa:
        # A block that several sequences share counts once for each; the plugin allows for three
        # sequences per block on average.
        per_sequence = ceil_div(max_model_len, block_size)
        max_blocks = min(per_sequence * max_num_seqs, 3 * num_blocks)
        reachable = ReachableDecodeShapes(per_sequence)
    listed = listed_shapes(config, "decode", (max_num_seqs, 1, max_blocks))
    if listed:
        pairs = [(batch, blocks) for batch, _, blocks in listed]
        kept = [pair for pair in pairs if reachable(pair, pair)]
        return BucketGrid.from_shapes(DECODE_AXES, kept, reachable=reachable, phase="decode")

    axes = decode_axes(
        config, max_num_seqs=max_num_seqs, max_blocks=max_blocks, block_size=block_size
    )
    return BucketGrid(
        _axis_values("decode", config, axes, traffic),
        reachable=reachable,
        phase="decode",
        settings_line=_settings_line("decode", config, axes),
    )


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
    check_positive(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size)
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
    return BucketGrid(
        _axis_values(phase, config, axes, traffic),
        phase=phase,
        settings_line=_settings_line(phase, config, axes),
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
    return strategy.values(axes, traffic)


def _settings_line(phase: Phase, config: BucketingConfig, axes: Sequence[AxisSettings]) -> str:
    """The log line of the settings, as Gaudi's plugin prints it."""
    settings = STRATEGIES[config.strategy_of(phase)].settings
    names = ", ".join("max_warmup" if name == "max" else name for name in settings)
    shown = (f"{axis.label}:{[getattr(axis, name) for name in settings]}" for axis in axes)
    return f"{phase.capitalize()} bucket config ({names}) {', '.join(shown)}"
