"""The axes of the grids of a serving engine: the user's settings over each strategy's defaults.

The defaults are those of Gaudi's vLLM plugin (`vllm_gaudi/extension/bucketing`). Those of
`sequence_axes` under `lin` are in the plugin's documentation, page "Bucketing Mechanism".
"""

from __future__ import annotations

import logging

import attrs

from trencadis.bucketing.config import AxisConfig, BucketingConfig, Phase, variable_of
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.rounding import ceil_div
from trencadis.bucketing.serving_grids.limits import PromptLimits
from trencadis.bucketing.strategies import STRATEGIES, AxisSettings, Size

logger = logging.getLogger(__name__)


def prompt_axes(config: BucketingConfig, limits: PromptLimits) -> tuple[AxisSettings, ...]:
    """The axes (batch, query, context_blocks)."""
    max_batch, max_query, max_context_blocks = limits.largest
    max_num_batched_tokens, block_size = limits.max_num_batched_tokens, limits.block_size
    defaults = STRATEGIES[config.strategy_of("prompt")].defaults
    batch = AxisConfig(min=1, step=defaults.prompt_batch_step)
    query = AxisConfig(
        min=block_size, step=block_size, limit=max(2, (max_num_batched_tokens - 1).bit_length())
    )
    context = AxisConfig(
        min=0, step=defaults.context_step, pad_max=ceil_div(max_num_batched_tokens, block_size)
    )
    return (
        resolve_axis(
            "batch", label="bs", user=config.prompt_batch, default=batch, ceiling=max_batch
        ),
        resolve_axis(
            "query", label="query", user=config.prompt_query, default=query, ceiling=max_query
        ),
        resolve_axis(
            "context_blocks",
            label="blocks",
            user=config.prompt_context,
            default=context,
            ceiling=max_context_blocks,
        ),
    )


def decode_axes(
    config: BucketingConfig, *, max_num_seqs: int, max_blocks: int, block_size: int
) -> tuple[AxisSettings, ...]:
    """The axes (batch, blocks)."""
    limits = {"max_num_seqs": max_num_seqs, "block_size": block_size}

    def number(size: Size) -> int:
        return size if isinstance(size, int) else limits[size]

    defaults = STRATEGIES[config.strategy_of("decode")].defaults
    batch = AxisConfig(min=1, step=defaults.decode_batch_step)
    blocks = AxisConfig(
        min=number(defaults.decode_blocks_min), step=number(defaults.decode_blocks_step)
    )
    user_blocks = _with_sequence_lengths(config, max_num_seqs=max_num_seqs, block_size=block_size)
    return (
        resolve_axis(
            "batch", label="bs", user=config.decode_batch, default=batch, ceiling=max_num_seqs
        ),
        resolve_axis(
            "blocks",
            label="blocks",
            user=user_blocks,
            default=blocks,
            ceiling=max_blocks,
            lowers_by_step=True,
        ),
    )


def _with_sequence_lengths(
    config: BucketingConfig, *, max_num_seqs: int, block_size: int
) -> AxisConfig:
    """The user's settings of the blocks of decode batches.

    Where one is not set, that of the sequence length takes its place: blocks = tokens / block size.
    The longest length is that of each of `max_num_seqs` sequences.
    """
    seq, blocks = config.decode_seq, config.decode_blocks

    def in_blocks(tokens: int | None, sequences: int = 1) -> int | None:
        return None if tokens is None else sequences * ceil_div(tokens, block_size)

    converted = AxisConfig(
        min=in_blocks(seq.min),
        step=in_blocks(seq.step),
        max=in_blocks(seq.max, max_num_seqs),
        limit=seq.limit,
        pad_max=in_blocks(seq.pad_max),
        pad_percent=seq.pad_percent,
    )
    own = attrs.asdict(blocks)
    mapped = {
        name: value
        for name, value in attrs.asdict(converted).items()
        if value is not None and own[name] is None
    }
    if not mapped:
        return blocks
    ends = {field.name: field.metadata["env"] for field in attrs.fields(AxisConfig)}
    tokens = variable_of(BucketingConfig, "decode_seq").format("*")
    in_place = variable_of(BucketingConfig, "decode_blocks")
    logger.warning(
        "%s are tokens of one sequence and are read as blocks of %d tokens, the largest for each "
        "of %d sequences: %s",
        tokens,
        block_size,
        max_num_seqs,
        " ".join(f"{in_place.format(ends[name])}={value}" for name, value in mapped.items()),
    )
    return attrs.evolve(blocks, **mapped)


def sequence_axes(
    phase: Phase, config: BucketingConfig, *, max_num_seqs: int, max_model_len: int, block_size: int
) -> tuple[AxisSettings, ...]:
    """The axes (batch, seq)."""
    defaults = STRATEGIES[config.strategy_of(phase)].defaults
    if phase == "prompt":
        user_batch, user_seq = config.prompt_batch, config.prompt_query
        batch_step = defaults.sequence_prompt_batch_step
    else:
        user_batch, user_seq = config.decode_batch, config.decode_seq
        batch_step = defaults.sequence_decode_batch_step
    batch = AxisConfig(min=1, step=batch_step)
    seq = AxisConfig(min=block_size, step=block_size)
    return (
        resolve_axis("batch", label="bs", user=user_batch, default=batch, ceiling=max_num_seqs),
        resolve_axis("seq", label="seq", user=user_seq, default=seq, ceiling=max_model_len),
    )


def resolve_axis(
    name: str,
    *,
    label: str,
    user: AxisConfig,
    default: AxisConfig,
    ceiling: int,
    lowers_by_step: bool = False,
) -> AxisSettings:
    """The settings of an axis whose sizes can reach `ceiling`, the serving limit.

    `max` is the user's, or `ceiling` where that is lower. A `min` above `max` is lowered to it, or
    to a step below it: a user who sets the minimum number of KV cache blocks does not know yet how
    many blocks there will be.

    Args:
        name: the name of the axis.
        label: its name in the log line.
        user: the user's settings.
        default: the settings for what the user leaves open. A `min` of 0 says that a batch may
            have nothing on this axis, such as no context.
        ceiling: the largest size that the serving limits allow.
        lowers_by_step: whether a `min` above `max` becomes `max` less a step, at least 1, as for
            the decode blocks of Gaudi's plugin, so that a small cache has several buckets.

    Raises:
        BucketingError: a `max` of 0 on an axis whose sizes start at 1.
    """
    max_size = ceiling if user.max is None else min(user.max, ceiling)
    if max_size == 0 and default.min:
        raise BucketingError(f"{name} bucket max 0 leaves nothing to run: give at least 1")
    min_size = _first_set(user.min, default.min, 1)
    step = _first_set(user.step, default.step, 1)
    if min_size > max_size:
        lowered = max(1, max_size - step) if lowers_by_step else max_size
        if user.min is not None:
            logger.warning(
                "%s bucket min %d is lowered to %d, because no size above %d can come",
                name,
                min_size,
                lowered,
                max_size,
            )
        min_size = lowered
    doublings = max(max_size - 1, 0).bit_length()
    # An axis that starts at 0 needs two buckets at least: one for 0, one for the rest.
    fewest = 2 if default.min == 0 else 1
    return AxisSettings(
        name=name,
        label=label,
        min=min_size,
        step=step,
        max=max_size,
        limit=_first_set(user.limit, default.limit, max(fewest, doublings + 1)),
        pad_max=_first_set(user.pad_max, default.pad_max, ceil_div(max_size, 4)),
        pad_percent=_first_set(user.pad_percent, default.pad_percent, 25),
    )


def _first_set(*values: int | None) -> int:
    return next(value for value in values if value is not None)
