"""The grids that a serving engine needs, from the user's settings and its own limits.

A range may stop short of the largest shape that the limits allow, and a filter may drop the bucket
that a real shape needs. Neither happens here: an axis whose range ends early gets its maximum as
one more value, and a bucket is left out only if no shape that can come pads to it.
`BucketGrid.cover` is the proof. A maximum that the user set is the exception: shapes past it have
no bucket, as the user asked, and go to `BucketGrid.fallback`.

The defaults of every axis are those of Gaudi's vLLM plugin (`vllm_gaudi/extension/bucketing`); of
`sequence_grid` under `lin` they are those of its documentation's page on the bucketing mechanism.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Literal

from trencadis.bucketing.axis_settings import AxisPlan, origin_line, plan_axis
from trencadis.bucketing.bucket_file import read_bucket_file
from trencadis.bucketing.config import AxisConfig, BucketingConfig
from trencadis.bucketing.errors import BucketingError
from trencadis.bucketing.grid import BucketGrid, Cost, Reachable, anything, element_count
from trencadis.bucketing.reachable_shapes import DecodeReach, PromptCost, PromptReach
from trencadis.bucketing.rounding import ceil_div
from trencadis.bucketing.traffic_fit import fit_plans
from trencadis.bucketing.traffic_recorder import TrafficRecorder
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
    """The grid of prompt (chunk) batches: axes (batch, query, context_blocks).

    A batch of `batch` prompts is padded to `query` new tokens each, behind `context_blocks` blocks
    of tokens that are in the KV cache already. The engine adds prompts to a batch for as long as
    `find` has a bucket for it: one whose padded tokens, `batch * query`, are within
    `max_num_batched_tokens`. A single prompt always has one.

    Args:
        config: the user's settings.
        max_model_len: tokens of one sequence, prompt and output together.
        max_num_batched_tokens: new tokens of one batch, padding included.
        max_num_seqs: sequences of one batch.
        block_size: tokens per block of the KV cache.
        traffic: for the fit strategy, instead of `config.prompt_traffic`.

    Raises:
        BucketingError: settings that contradict each other or the limits.
    """
    check_positive(
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
    )
    longest = min(max_num_batched_tokens, max_model_len)
    ceilings = (max_num_seqs, longest, ceil_div(max_model_len - 1, block_size))
    cost = PromptCost(max_model_len, block_size)
    listed = _listed("prompt", config, ceilings)
    if listed:
        reach = PromptReach(max_num_batched_tokens, max_model_len, block_size, alone=1)
        return _file_grid("prompt", PROMPT_AXES, listed, reach, cost)
    strategy = config.prompt_strategy or config.strategy
    query_limit = max(2, (max_num_batched_tokens - 1).bit_length())
    defaults = (
        AxisConfig(min=1, step={"exp": 2}.get(strategy, 1)),
        AxisConfig(min=block_size, step=block_size, limit=query_limit),
        AxisConfig(
            min=0,
            step={"pad": 2}.get(strategy, 1),
            pad_max=ceil_div(max_num_batched_tokens, block_size),
        ),
    )
    users = (config.prompt_batch, config.prompt_query, config.prompt_context)
    labels = ("bs", "query", "blocks")
    plans = _plans(strategy, PROMPT_AXES, labels, users, defaults, ceilings)
    plans = _fitted("prompt", strategy, plans, traffic, config.prompt_traffic)
    smallest = next(size for size in plans[0].values if size)
    reach = PromptReach(max_num_batched_tokens, max_model_len, block_size, alone=smallest)
    return _grid("prompt", strategy, plans, reach, cost)


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

    With `config.contiguous_pa`, `blocks` is the prefix of the KV cache that is read, up to the
    highest block in use, and any batch can meet any prefix. Otherwise it is the number of
    (sequence, block) pairs, at least one and at most `max_model_len` worth per sequence.

    Args:
        config: the user's settings.
        max_num_seqs: sequences of one batch.
        num_blocks: blocks in the KV cache.
        block_size: tokens per block.
        max_model_len: tokens of one sequence.
        traffic: for the fit strategy, instead of `config.decode_traffic`.

    Raises:
        BucketingError: settings that contradict each other or the limits.
    """
    check_positive(
        max_num_seqs=max_num_seqs,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
    )
    per_sequence = ceil_div(max_model_len, block_size)
    most_blocks, reach = num_blocks, anything
    if not config.contiguous_pa:
        # A block shared by several sequences counts once for each. The plugin allows for three
        # sequences on average.
        most_blocks = min(per_sequence * max_num_seqs, 3 * num_blocks)
        reach = DecodeReach(per_sequence)
    ceilings = (max_num_seqs, most_blocks)
    listed = _listed("decode", config, (max_num_seqs, 1, most_blocks))
    if listed:
        pairs = [(batch, blocks) for batch, _, blocks in listed]
        return _file_grid("decode", DECODE_AXES, pairs, reach)
    strategy = config.decode_strategy or config.strategy
    defaults = (
        AxisConfig(min=1, step={"lin": 32, "fit": 1}.get(strategy, 2)),
        AxisConfig(
            min={"pad": block_size}.get(strategy, 1),
            step={"exp": max_num_seqs, "fit": 1}.get(strategy, block_size),
        ),
    )
    users = (config.decode_batch, config.decode_blocks)
    plans = _plans(strategy, DECODE_AXES, ("bs", "blocks"), users, defaults, ceilings)
    plans = _fitted("decode", strategy, plans, traffic, config.decode_traffic)
    return _grid("decode", strategy, plans, reach)


def sequence_grid(
    phase: Literal["prompt", "decode"],
    config: BucketingConfig,
    *,
    max_num_seqs: int,
    max_model_len: int,
    block_size: int,
    traffic: TrafficRecorder | None = None,
) -> BucketGrid:
    """The two-axis grid (batch, seq) of runtimes that pad sequences and keep no paged context.

    Args:
        phase: which of the user's settings apply.
        config: the user's settings.
        max_num_seqs: sequences of one batch.
        max_model_len: tokens of one sequence.
        block_size: the default granularity of the sequence length, in tokens.
        traffic: for the fit strategy, instead of the phase's file in `config`.

    Raises:
        BucketingError: settings that contradict each other or the limits, or a bucket file, whose
            shapes have a context.
    """
    check_positive(max_num_seqs=max_num_seqs, max_model_len=max_model_len, block_size=block_size)
    if config.bucket_file:
        raise BucketingError(
            f"bucket file {config.bucket_file} has shapes with a context, which a (batch, seq) "
            "grid has not: unset VLLM_BUCKETING_FROM_FILE"
        )
    prompt = phase == "prompt"
    strategy = (config.prompt_strategy if prompt else config.decode_strategy) or config.strategy
    defaults = (
        AxisConfig(min=1, step={"lin": 32 if prompt else 128, "fit": 1}.get(strategy, 2)),
        AxisConfig(min=block_size, step=block_size),
    )
    users = (
        (config.prompt_batch, config.prompt_query)
        if prompt
        else (config.decode_batch, config.decode_seq)
    )
    ceilings = (max_num_seqs, max_model_len)
    plans = _plans(strategy, ("batch", "seq"), ("bs", "seq"), users, defaults, ceilings)
    saved = config.prompt_traffic if prompt else config.decode_traffic
    return _grid(phase, strategy, _fitted(phase, strategy, plans, traffic, saved), anything)


def _plans(
    strategy: str,
    axes: Sequence[str],
    labels: Sequence[str],
    users: Sequence[AxisConfig],
    defaults: Sequence[AxisConfig],
    ceilings: Sequence[int],
) -> tuple[AxisPlan, ...]:
    return tuple(
        plan_axis(axis, label=label, strategy=strategy, user=user, default=default, ceiling=most)
        for axis, label, user, default, most in zip(
            axes, labels, users, defaults, ceilings, strict=True
        )
    )


def _fitted(
    phase: str,
    strategy: str,
    plans: tuple[AxisPlan, ...],
    traffic: TrafficRecorder | None,
    saved: str | None,
) -> tuple[AxisPlan, ...]:
    if strategy != "fit":
        return plans
    variable = f"VLLM_{phase.upper()}_BUCKETING_TRAFFIC"
    if traffic is None and saved:
        with _named_setting(variable):
            traffic = TrafficRecorder.load(saved)
    return fit_plans(plans, traffic, variable)


def _grid(
    phase: str,
    strategy: str,
    plans: tuple[AxisPlan, ...],
    reachable: Reachable,
    cost: Cost = element_count,
) -> BucketGrid:
    return BucketGrid(
        {plan.axis: plan.values for plan in plans},
        reachable=reachable,
        cost=cost,
        phase=phase,
        origin=origin_line(phase, strategy, plans),
    )


def _listed(
    phase: str, config: BucketingConfig, ceilings: tuple[int, int, int]
) -> list[tuple[int, ...]]:
    """The file's shapes for a phase, none larger than the limits; empty where it lists none.

    A phase that the file leaves out is bucketed by the strategy.
    """
    if not config.bucket_file:
        return []
    with _named_setting("VLLM_BUCKETING_FROM_FILE"):
        shapes = read_bucket_file(config.bucket_file)
    chosen = (shape for shape in shapes if (shape[1] == 1) == (phase == "decode"))
    return [tuple(map(min, shape, ceilings)) for shape in chosen]


def _file_grid(
    phase: str,
    axes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    reachable: Reachable,
    cost: Cost = element_count,
) -> BucketGrid:
    kept = [shape for shape in shapes if reachable(shape, shape)]
    return BucketGrid.from_shapes(axes, kept, reachable=reachable, cost=cost, phase=phase)


@contextmanager
def _named_setting(variable: str) -> Generator[None, None, None]:
    """Turn a file that cannot be read into an error about the setting that names it."""
    try:
        yield
    except OSError as error:
        raise BucketingError(f"{variable}={error.filename}: {error.strerror}: change it") from error
