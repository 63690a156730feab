"""The bucket grids that an engine warms up: from the user's settings, or a small default grid."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs

from trencadis.bucketing import (
    BucketGrid,
    BucketingConfig,
    CoverageGap,
    decode_grid,
    linear_range,
    prompt_grid,
    sequence_grid,
)
from trencadis.engine.runner.limits import BatchSettings, ServingLimits, token_budget
from trencadis.engine.runner.shapes import (
    ChunkSize,
    DecodeRead,
    PromptShape,
    RaggedShape,
    prompt_shape,
    ragged_shape,
    with_recent_context,
)
from trencadis.kvcache import ceil_div
from trencadis.scheduler import ScheduledSequence

logger = logging.getLogger("trencadis.engine")

_EXPONENTIAL = "the device's default, exponential; VLLM_* variables choose others"
_CONFIGURED = "from the VLLM_* bucketing settings"
_FEW = (
    "few, because this device runs a new shape without compiling it; "
    "VLLM_PROMPT_* and VLLM_DECODE_* variables choose others"
)


@attrs.frozen
class Grids:
    """The buckets that prefill and decode batches are padded to.

    ``read`` says what the second axis of the decode grid counts. A prompt grid without an axis of
    context has no batches of chunks with context: such a chunk runs alone, with ``context_blocks``.
    If ``ragged``, the chunks of a batch follow each other without padding between them, and the
    query axis counts the tokens of all. ``windows``: of layers that may read the last blocks of a
    context, which have ``block_size`` tokens.
    """

    prompt: BucketGrid
    decode: BucketGrid
    read: DecodeRead = DecodeRead.PREFIX
    context_blocks: int = 0
    ragged: bool = False
    windows: tuple[int, ...] = ()
    block_size: int = 1

    @property
    def num_buckets(self) -> int:
        """Buckets of both phases."""
        return len(self.prompt) + len(self.decode)

    @property
    def max_chunk_tokens(self) -> int:
        """Tokens of the largest query bucket."""
        return self.prompt.values(self.prompt.axes[1])[-1]

    @property
    def has_context(self) -> bool:
        """Whether the prompt grid has an axis of context."""
        return len(self.prompt.axes) > 2

    def exact_prompt(
        self, chunks: Sequence[ScheduledSequence], block_size: int
    ) -> PromptShape | RaggedShape:
        """The shape of these prefill chunks before padding."""
        shape_of = ragged_shape if self.ragged else prompt_shape
        return shape_of(chunks, block_size)

    def prompt_size(self, exact: PromptShape | RaggedShape) -> tuple[int, ...] | None:
        """The size of a prefill batch on the axes of the grid; None if it has to be divided."""
        if isinstance(exact, RaggedShape):
            return 1, exact.num_tokens, 0
        if self.has_context:
            return exact.batch, exact.query, exact.context_blocks
        if exact.context_blocks and exact.batch > 1:
            return None
        return exact.batch, exact.query

    def padded_prompt(
        self, bucket: Sequence[int], exact: PromptShape | RaggedShape
    ) -> PromptShape | RaggedShape:
        """The shape in which a prefill batch runs, given the sizes of its bucket."""
        if isinstance(exact, RaggedShape):
            return attrs.evolve(exact, num_tokens=bucket[1])
        if self.has_context:
            return self._with_recent(PromptShape(*bucket))
        batch, query = bucket
        if not exact.context_blocks:
            return PromptShape(batch, query, 0)
        return self._with_recent(PromptShape(1, query, self.context_blocks))

    def prompt_shapes(self, bucket: Sequence[int]) -> Sequence[PromptShape | RaggedShape]:
        """All shapes in which batches of a bucket of the prompt grid run; of ragged, an example."""
        if self.ragged:
            return [RaggedShape(bucket[1], (ChunkSize(bucket[1], 0, 0),))]
        if self.has_context:
            return [self._with_recent(PromptShape(*bucket))]
        batch, query = bucket
        shapes = [PromptShape(batch, query, 0)]
        if batch == 1 and self.context_blocks:
            shapes.append(self._with_recent(PromptShape(1, query, self.context_blocks)))
        return shapes

    def _with_recent(self, shape: PromptShape) -> PromptShape:
        return with_recent_context(shape, self.windows, self.block_size)


def build_grids(
    config: BucketingConfig | None,
    limits: ServingLimits,
    *,
    exponential: bool = False,
    ragged: bool = False,
    prompts: BucketGrid | None = None,
) -> Grids:
    """Both grids. Logs their axes as seed 002 does. Raises `BucketingError`.

    Without ``config``: the default grid of Gaudi's plugin if ``exponential``, else a small grid. If
    ``ragged``, those of `ragged_grids`. ``prompts``: the result of `build_prompts` for the same
    arguments, which is not made again.
    """
    if ragged:
        grids, why = ragged_grids(limits), _FEW
    elif config is None:
        grids = made_grids(None, limits, prompts, exponential=exponential)
        why = _EXPONENTIAL if exponential else _FEW
    else:
        grids, why = made_grids(config, limits, prompts), _source(config)
    announce_grids(grids, limits, why)
    return grids


def announce_grids(grids: Grids, limits: ServingLimits, why: str) -> None:
    """Log the axes of grids as seed 002 does, and ``why`` these. Warns as `configured_grids`."""
    if not grids.ragged:
        _warn_of_limits(grids, limits)
    _log(grids, why)


def _source(config: BucketingConfig) -> str:
    """The files that grids are from, else the variables."""
    traffic = (config.prompt_traffic, config.decode_traffic)
    fits = (config.strategy_of("prompt") == "fit", config.strategy_of("decode") == "fit")
    files = [config.bucket_file, *itertools.compress(traffic, fits)]
    return f"from {named}" if (named := ", ".join(filter(None, files))) else _CONFIGURED


def build_prompts(
    config: BucketingConfig | None, limits: ServingLimits, *, exponential: bool = False
) -> BucketGrid:
    """The prompt grid of `build_grids` where prompts are not ragged, whatever the number of blocks.

    Logs nothing. Raises `BucketingError`.
    """
    if config is None and not exponential:
        return _small_prompt_grid(limits)
    return _prompt_grid(config or BucketingConfig(), limits)


def largest_prompts(shapes: Iterable[PromptShape], block_size: int) -> list[PromptShape]:
    """Of these shapes those that take the most memory in one way or another.

    The most tokens, which activations grow with; the most gathered blocks of context; the most
    pairs of a query and a position, which masks and scores grow with.
    """
    gathered = {shape: shape.batch * shape.context_blocks for shape in shapes}

    def pairs(shape: PromptShape) -> int:
        return shape.num_tokens * (shape.context_blocks * block_size + shape.query)

    most = (
        max(gathered, key=lambda shape: (shape.num_tokens, gathered[shape])),
        max(gathered, key=lambda shape: (gathered[shape], shape.num_tokens)),
        max(gathered, key=pairs),
    )
    return list(dict.fromkeys(most))


def sequence_grids(
    config: BucketingConfig | None, settings: BatchSettings, max_model_len: int
) -> Grids:
    """The grids of seed 002: axes batch size and sequence length, in both phases.

    A prompt bucket ends at the tokens of a step. Decode gathers the blocks of each sequence, padded
    to the length of the bucket. A chunk with context runs alone, with the context of the longest
    sequence. By default with the strategy ``lin``. Logs the lines of seed 002; raises
    `BucketingError`.
    """
    config = config or BucketingConfig(strategy="lin")

    def grid(phase: Literal["prompt", "decode"], longest: int) -> BucketGrid:
        return sequence_grid(
            phase,
            config,
            max_num_seqs=settings.max_num_seqs,
            max_model_len=longest,
            block_size=min(settings.block_size, longest),
        )

    grids = Grids(
        grid("prompt", min(token_budget(settings), max_model_len)),
        grid("decode", max_model_len),
        DecodeRead.SEQUENCES,
        ceil_div(max_model_len - 1, settings.block_size),
    )
    _log(grids, "batch size and sequence length")
    return grids


def _log(grids: Grids, why: str) -> None:
    for grid in (grids.prompt, grids.decode):
        for line in grid.describe():
            logger.info(line)
    logger.info("%d prompt and %d decode buckets (%s)", len(grids.prompt), len(grids.decode), why)


def configured_grids(
    config: BucketingConfig, limits: ServingLimits, prompts: BucketGrid | None = None
) -> Grids:
    """The grids that the user's settings describe. Warns of shapes within the limits without one.

    A maximum of the user's and a bucket file can leave such shapes. ``prompts``: as for
    `build_grids`.
    """
    grids = made_grids(config, limits, prompts)
    _warn_of_limits(grids, limits)
    return grids


def _warn_of_limits(grids: Grids, limits: ServingLimits) -> None:
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    if grids.max_chunk_tokens < longest:
        logger.info(
            "prompts are computed in chunks of at most %d tokens, the largest query bucket, "
            "instead of %d",
            grids.max_chunk_tokens,
            longest,
        )
    _warn_of_gaps(grids.prompt, prompt_gaps(grids, limits))
    _warn_of_gaps(grids.decode, decode_gaps(grids, limits))


def made_grids(
    config: BucketingConfig | None,
    limits: ServingLimits,
    prompts: BucketGrid | None = None,
    *,
    exponential: bool = False,
) -> Grids:
    """The grids of `build_grids` where prompts are not ragged, without a warning of their gaps."""
    if config is None and not exponential:
        return small_grids(limits)
    config = config or BucketingConfig()
    prompt = _prompt_grid(config, limits) if prompts is None else prompts
    return Grids(prompt, _decode_grid(config, limits), decode_read(config))


def _prompt_grid(config: BucketingConfig, limits: ServingLimits) -> BucketGrid:
    return prompt_grid(
        config,
        max_model_len=limits.max_model_len,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        block_size=limits.block_size,
    )


def _decode_grid(config: BucketingConfig, limits: ServingLimits) -> BucketGrid:
    return decode_grid(
        config,
        max_num_seqs=limits.max_num_seqs,
        num_blocks=limits.num_blocks,
        block_size=limits.block_size,
        max_model_len=limits.max_model_len,
    )


def decode_read(config: BucketingConfig | None) -> DecodeRead:
    """How decode reads the KV cache under these settings (``VLLM_CONTIGUOUS_PA``)."""
    return DecodeRead.PREFIX if config is None or config.contiguous_pa else DecodeRead.PAIRS


def prompt_gaps(grids: Grids, limits: ServingLimits) -> tuple[CoverageGap, ...]:
    """The prefill chunks within the limits that no bucket holds.

    No chunk is longer than the largest query bucket, and chunks share a batch only if a bucket
    holds it. So a chunk alone decides.
    """
    context = ceil_div(limits.max_model_len - 1, limits.block_size)
    return grids.prompt.coverage_gaps(limits=(1, grids.max_chunk_tokens, context))


def decode_gaps(grids: Grids, limits: ServingLimits) -> tuple[CoverageGap, ...]:
    """The decode batches within the limits that no bucket holds.

    Any batch may read the whole cache as a prefix; of pairs it has at most those of its sequences.
    """
    if grids.read is not DecodeRead.PREFIX:
        return grids.decode.coverage_gaps()
    return grids.decode.coverage_gaps(
        limits=(limits.max_num_seqs, limits.num_blocks), reachable=lambda low, high: True
    )


def _warn_of_gaps(grid: BucketGrid, gaps: Sequence[CoverageGap]) -> None:
    if not gaps:
        return
    ranges = (
        f"{axis} {low} to {high}"
        for axis, low, high in zip(grid.axes, gaps[0].low, gaps[0].high, strict=True)
    )
    logger.warning(
        "no %s bucket holds %s%s: such a batch is a bucket miss, which is compiled in a shape of "
        "its own, run eagerly or rejected (--on-bucket-miss); to prepare it, raise the bucket "
        "maxima, or fit the bucket file to these limits",
        "prompt" if "query" in grid.axes else "decode",
        ", ".join(ranges),
        f" (and {len(gaps) - 1} more such ranges)" if len(gaps) > 1 else "",
    )


def small_grids(limits: ServingLimits) -> Grids:
    """A grid of few buckets, for a device that runs a new shape within milliseconds.

    Every axis doubles or quadruples; the log lines of the settings show the latter as ``x4`` in
    place of a step. Prefill chunks with context run one sequence at a time: their
    attention covers the padded context, so a batch of unequal contexts would be mostly padding.
    """
    return Grids(_small_prompt_grid(limits), _small_decode_grid(limits))


def _small_prompt_grid(limits: ServingLimits) -> BucketGrid:
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    context = ceil_div(limits.max_model_len, limits.block_size)
    batch, query = min(4, limits.max_num_seqs), min(64, longest)
    return BucketGrid(
        {
            "batch": _doubling(1, batch),
            "query": _doubling(query, longest),
            "context_blocks": (0, *_quartering(context, 3)),
        },
        filters=(
            lambda b: b["batch"] * b["query"] <= limits.max_num_batched_tokens or b["batch"] == 1,
            lambda b: b["context_blocks"] == 0 or b["batch"] == 1,
        ),
        phase="prompt",
        settings_line="Prompt bucket config (min, step, max_warmup) "
        f"bs:{[1, batch, batch]}, query:{[query, longest, longest]}, blocks:[0, x4, {context}]",
    )


def ragged_grids(limits: ServingLimits, decode: BucketingConfig | None = None) -> Grids:
    """A small grid of a device that computes ragged prefill batches: their tokens, padded.

    Eight sizes and some small ones: they share a program, and a padded token costs as much as
    another. ``decode``: the settings of the decode grid; a small one without them. Either has
    batches of one sequence, because a single token has a program of its own.
    """
    longest = limits.max_num_batched_tokens
    smallest = min(32, longest)
    step = max(smallest, ceil_div(longest, 8))
    prompt = BucketGrid(
        {
            "batch": (1,),
            "query": linear_range(smallest, step, longest),
            "context_blocks": (0,),
        },
        phase="prompt",
        settings_line="Prompt bucket config (min, step, max_warmup) "
        f"bs:[1, 1, 1], query:{[smallest, step, longest]}, blocks:[0, 1, 0]",
    )
    if decode is None:
        return Grids(prompt, _small_decode_grid(limits), ragged=True)
    decodes = _with_single_sequences(_decode_grid(decode, limits))
    return Grids(prompt, decodes, decode_read(decode), ragged=True)


def _with_single_sequences(grid: BucketGrid) -> BucketGrid:
    batches, blocks = (grid.values(axis) for axis in grid.axes)
    if 1 in batches:
        return grid
    return BucketGrid(
        {"batch": (1, *batches), "blocks": blocks},
        phase="decode",
        settings_line="".join(grid.describe()[:-1]),
    )


def _small_decode_grid(limits: ServingLimits) -> BucketGrid:
    blocks = _quartering(limits.num_blocks, 5)
    return BucketGrid(
        {"batch": _doubling(1, limits.max_num_seqs), "blocks": blocks},
        phase="decode",
        settings_line="Decode bucket config (min, step, max_warmup) "
        f"bs:{[1, limits.max_num_seqs, limits.max_num_seqs]}, "
        f"blocks:[{blocks[0]}, x4, {blocks[-1]}]",
    )


def _doubling(smallest: int, largest: int) -> tuple[int, ...]:
    """``smallest``, twice that, … and ``largest``: the ramp-up of seed 002 alone."""
    return linear_range(smallest, largest, largest)


def _quartering(largest: int, count: int) -> tuple[int, ...]:
    """``largest``, a quarter of it, a sixteenth, …: at most ``count`` sizes, none below 4."""
    sizes = {ceil_div(largest, 4**i) for i in range(count)}
    return tuple(sorted(size for size in sizes if size >= min(4, largest)))
