"""The bucket grids that an engine warms up: from the user's settings, or a small default grid."""

from __future__ import annotations

import logging
from collections.abc import Sequence
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
from trencadis.engine.runner.shapes import DecodeRead, PromptShape
from trencadis.kvcache import ceil_div

logger = logging.getLogger("trencadis.engine")

_EXPONENTIAL = "the device's default, exponential; VLLM_* variables choose others"
_CONFIGURED = "from the VLLM_* bucketing settings"


@attrs.frozen
class Grids:
    """The buckets that prefill and decode batches are padded to.

    ``read`` says what the second axis of the decode grid counts. A prompt grid without an axis of
    context has no batches of chunks with context: such a chunk runs alone, with ``context_blocks``.
    """

    prompt: BucketGrid
    decode: BucketGrid
    read: DecodeRead = DecodeRead.PREFIX
    context_blocks: int = 0

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

    def prompt_size(self, exact: PromptShape) -> tuple[int, ...] | None:
        """The size of a prefill batch on the axes of the grid; None if it has to be divided."""
        if self.has_context:
            return exact.batch, exact.query, exact.context_blocks
        if exact.context_blocks and exact.batch > 1:
            return None
        return exact.batch, exact.query

    def padded_prompt(self, bucket: Sequence[int], exact: PromptShape) -> PromptShape:
        """The shape in which a prefill batch runs, given the sizes of its bucket."""
        if self.has_context:
            return PromptShape(*bucket)
        batch, query = bucket
        if not exact.context_blocks:
            return PromptShape(batch, query, 0)
        return PromptShape(1, query, self.context_blocks)

    def prompt_shapes(self, bucket: Sequence[int]) -> list[PromptShape]:
        """All shapes in which batches of a bucket of the prompt grid run."""
        if self.has_context:
            return [PromptShape(*bucket)]
        batch, query = bucket
        shapes = [PromptShape(batch, query, 0)]
        if batch == 1 and self.context_blocks:
            shapes.append(PromptShape(1, query, self.context_blocks))
        return shapes


def build_grids(
    config: BucketingConfig | None, limits: ServingLimits, *, exponential: bool = False
) -> Grids:
    """Both grids. Logs their axes as seed 002 does. Raises `BucketingError`.

    Without ``config``: the default grid of Gaudi's plugin if ``exponential``, else a small grid.
    """
    if config is None and not exponential:
        grids = small_grids(limits)
        why = (
            "few, because this device runs a new shape without compiling it; "
            "VLLM_PROMPT_* and VLLM_DECODE_* variables choose others"
        )
    else:
        grids = configured_grids(config or BucketingConfig(), limits)
        why = (
            "the device's default, exponential; VLLM_* variables choose others"
            if config is None
            else _CONFIGURED
        )
    _log(grids, why)
    return grids


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


def configured_grids(config: BucketingConfig, limits: ServingLimits) -> Grids:
    """The grids that the user's settings describe. Warns of shapes within the limits without one.

    A maximum of the user's and a bucket file can leave such shapes.
    """
    grids = made_grids(config, limits)
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
    return grids


def made_grids(config: BucketingConfig, limits: ServingLimits) -> Grids:
    """The grids that the user's settings describe, without a word on their gaps."""
    return Grids(
        prompt_grid(
            config,
            max_model_len=limits.max_model_len,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            block_size=limits.block_size,
        ),
        decode_grid(
            config,
            max_num_seqs=limits.max_num_seqs,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
        ),
        decode_read(config),
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
        "no %s bucket holds %s%s: such a batch is a bucket miss and runs in a shape of its own, "
        "which is compiled when it first comes; to prepare it, raise the bucket maxima, or fit "
        "the bucket file to these limits",
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
    longest = min(limits.max_num_batched_tokens, limits.max_model_len)
    context = ceil_div(limits.max_model_len, limits.block_size)
    batch, query = min(4, limits.max_num_seqs), min(64, longest)
    prompt = BucketGrid(
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
    blocks = _quartering(limits.num_blocks, 5)
    decode = BucketGrid(
        {"batch": _doubling(1, limits.max_num_seqs), "blocks": blocks},
        phase="decode",
        settings_line="Decode bucket config (min, step, max_warmup) "
        f"bs:{[1, limits.max_num_seqs, limits.max_num_seqs]}, "
        f"blocks:[{blocks[0]}, x4, {blocks[-1]}]",
    )
    return Grids(prompt, decode)


def _doubling(smallest: int, largest: int) -> tuple[int, ...]:
    """``smallest``, twice that, … and ``largest``: the ramp-up of seed 002 alone."""
    return linear_range(smallest, largest, largest)


def _quartering(largest: int, count: int) -> tuple[int, ...]:
    """``largest``, a quarter of it, a sixteenth, …: at most ``count`` sizes, none below 4."""
    sizes = {ceil_div(largest, 4**i) for i in range(count)}
    return tuple(sorted(size for size in sizes if size >= min(4, largest)))
