"""The axes of the grids of a serving engine: the user's settings over each strategy's defaults.

The defaults are those of Gaudi's vLLM plugin (`vllm_gaudi/extension/bucketing`). Those of
`sequence_axes` under `lin` are in the plugin's documentation, page "Bucketing Mechanism".
"""

from __future__ import annotations

from trencadis.bucketing.axis_config import AxisConfig
from trencadis.bucketing.axis_settings import AxisSettings, resolve_axis
from trencadis.bucketing.config import BucketingConfig, Phase
from trencadis.bucketing.rounding import ceil_div
from trencadis.bucketing.strategies import STRATEGIES, Size


def prompt_axes(
    config: BucketingConfig,
    ceilings: tuple[int, int, int],
    *,
    max_num_batched_tokens: int,
    block_size: int,
) -> tuple[AxisSettings, ...]:
    """The axes (batch, query, context_blocks); `ceilings` has the largest size of each."""
    max_batch, max_query, max_context_blocks = ceilings
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
    return (
        resolve_axis(
            "batch", label="bs", user=config.decode_batch, default=batch, ceiling=max_num_seqs
        ),
        resolve_axis(
            "blocks", label="blocks", user=config.decode_blocks, default=blocks, ceiling=max_blocks
        ),
    )


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
